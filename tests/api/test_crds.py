"""Our CRDs, examples and manifests before a real API server, with no operator running."""

import copy
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.bed.api_only import ApiOnly
from e2e.kstatus import kstatus
from manifests.render import normal_form, objects
from sluice.api import names
from sluice.api.v1alpha1 import parse_lenient
from tests.unit.api.schemas import ROOT, crds

Object = dict[str, Any]

APPLY = "application/apply-patch+yaml"
CRD_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
EXAMPLES = sorted((ROOT / "manifests" / "examples").glob("*.yaml"))
MODEL = {"uri": "pvc://models/qwen"}

_NAME = (
    "the service gets a Kubernetes Service of the same name, so metadata.name must be at most 63 characters: "
    "lower-case letters, digits and '-', starting with a letter and not ending with '-'"
)
_PVC_ONLY = (
    "engines take models from a PersistentVolumeClaim only in this release: write pvc://<claim>/<path> (the Simulated "
    "engine reads none and takes any URI)"
)
_PVC = (
    "a pvc:// URI is pvc://<claim>/<path>: the name of a PersistentVolumeClaim of this namespace, then the directory "
    "of the model inside it"
)
_URI = (
    "a model URI is <scheme>://<path> in printable ASCII without spaces and backslashes, for example "
    "pvc://models/qwen3-8b"
)
_DOTS = "a model URI must not contain '..' as a path segment; write the path without it"
_FLAGS = (
    "the operator sets the engine's address, model, served name, parallel sizes, keys and drain time itself; remove "
    "flags such as --host, --port, --model, --served-model-name, --tensor-parallel-size, --api-key, --config (use "
    "spec.model, spec.pools[].parallelism and spec.drain)"
)
_ENV = (
    "VLLM_API_KEY, VLLM_HOST_IP, VLLM_PORT, VLLM_SERVER_DEV_MODE and names that start with SLUICE_ are set or ruled "
    "out by the operator; remove them"
)
_ONE_OF = "set exactly one of profileRef and resourceName"
_EXTENDED = "an accelerator is an extended resource of its vendor's domain, for example nvidia.com/gpu"
_SURGE = "maxSurge 0 needs maxUnavailable of at least 1: a rollout with neither can't move"
_HANG = "selfTestTimeoutSeconds must be less than hangTimeoutSeconds: an instance is Suspect before it is Hung"
_POOL_NAME = "a pool's name is lower-case letters, digits and '-', not at its ends; at most 20 characters"
_LABELS = (
    "labels of serving.sluice.dev/, of the app.kubernetes.io/ keys that the operator sets, and of Argo CD, Flux and "
    "Helm are not for engine pods; remove them"
)
_CONTROL_PLANE = "engine pods do not belong on control-plane nodes; remove the toleration of node-role.kubernetes.io/*"


def _pod(**spec: Any) -> Object:
    return {"pools": [{"podTemplate": {"spec": spec}}]}


ACCEPTED: dict[str, Object] = {
    "smallest": {},
    "claim without a path": {"model": {"uri": "pvc://models"}},
    "claim with dots": {"model": {"uri": "pvc://models.v2/a/b.c/"}},
    "simulated takes any URI": {"model": {"uri": "hf://Qwen/Qwen3-8B"}, "engine": {"type": "Simulated"}},
    "profile": {"accelerator": {"profileRef": {"name": "h100.80g"}}},
    "resource": {"accelerator": {"resourceName": "nvidia.com/mig-1g.10gb"}},
    "image digest": {"engine": {"image": f"r.example.com:5000/vllm/x@sha256:{'a' * 64}"}},
    "arguments of the user": {"engine": {"args": ["--max-model-len", "8192", "--model-impl=auto", "-O3"]}},
    "no surge but unavailable": {"rollout": {"maxSurge": 0, "maxUnavailable": 1}},
    "explicit zero unavailable": {"rollout": {"maxUnavailable": 0}},
    "no instances": {"pools": [{"replicas": 0}]},
    "eight pools": {"pools": [{"name": f"pool-{i}"} for i in range(8)]},
    "quantities as numbers and as text": _pod(resources={"limits": {"cpu": 4, "memory": "64Gi"}}),
    "free affinity": _pod(affinity={"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}}),
    "suspended": {"suspend": True},
    "experts and cores in a pod": {"pools": [{"parallelism": {"tensor": 2, "data": 4, "expert": True}}]},
    "another engine": {"engine": {"type": "SGLang"}},
    "an engine by its command": {
        "engine": {
            "type": "Custom",
            "image": "x/y:1",
            "custom": {"command": ["serve", "$(SLUICE_MODEL_PATH)"], "port": 9000, "metrics": {"running": "x:running"}},
        }
    },
}
REFUSED: dict[str, tuple[Object, str, str]] = {
    "vLLM without claim": ({"model": {"uri": "hf://Qwen/Qwen3-8B"}}, "spec.model.uri", _PVC_ONLY),
    "claim with capitals": ({"model": {"uri": "pvc://Models/x"}}, "spec.model.uri", _PVC),
    "newline in URI": ({"model": {"uri": "pvc://models/x\ny"}}, "spec.model.uri", _URI),
    "backslash in URI": ({"model": {"uri": "pvc://models\\x"}}, "spec.model.uri", _URI),
    "no scheme": ({"model": {"uri": "/mnt/models"}}, "spec.model.uri", _URI),
    "escape from the claim": ({"model": {"uri": "pvc://models/../x"}}, "spec.model.uri", _DOTS),
    "escape at the end": ({"model": {"uri": "pvc://models/.."}}, "spec.model.uri", _DOTS),
    "model name like a flag": (
        {"model": {**MODEL, "name": "-x"}},
        "spec.model.name",
        "a model name starts with a letter or digit, followed by letters, digits and any of . _ : / @ + -",
    ),
    "image with a space": (
        {"engine": {"image": "a b"}},
        "spec.engine.image",
        "an image is written host/path:tag or host/path@sha256:<64 hexadecimal digits>, without spaces",
    ),
    "owned flag": ({"engine": {"args": ["--port=9000"]}}, "spec.engine.args", _FLAGS),
    "owned flag, two words": ({"engine": {"args": ["--tensor_parallel_size", "2"]}}, "spec.engine.args", _FLAGS),
    "owned flag, short": ({"engine": {"args": ["-tp=2"]}}, "spec.engine.args", _FLAGS),
    "owned flag of a pool": ({"pools": [{"engine": {"args": ["--api-key=x"]}}]}, "spec.pools[0].engine.args", _FLAGS),
    "owned variable": ({"engine": {"env": [{"name": "VLLM_SERVER_DEV_MODE"}]}}, "spec.engine.env", _ENV),
    "owned variable of a pool": (
        {"pools": [{"engine": {"env": [{"name": "SLUICE_X"}]}}]},
        "spec.pools[0].engine.env",
        _ENV,
    ),
    "variable name": (
        {"engine": {"env": [{"name": "1A"}]}},
        "spec.engine.env[0].name",
        "a variable's name is letters, digits and '_', not starting with a digit",
    ),
    "variable twice": (
        {"engine": {"env": [{"name": "A"}, {"name": "A"}]}},
        "spec.engine.env[1]",
        'Duplicate value: {"name":"A"}',
    ),
    "neither accelerator": ({"accelerator": {}}, "spec.accelerator", _ONE_OF),
    "both accelerators": (
        {"pools": [{"accelerator": {"resourceName": "a.b/c", "profileRef": {"name": "x"}}}]},
        "spec.pools[0].accelerator",
        _ONE_OF,
    ),
    "core resource": ({"accelerator": {"resourceName": "cpu/x y"}}, "spec.accelerator.resourceName", _EXTENDED),
    "kubernetes.io resource": (
        {"accelerator": {"resourceName": "kubernetes.io/gpu"}},
        "spec.accelerator.resourceName",
        _EXTENDED,
    ),
    "rollout that can't move": ({"rollout": {"maxSurge": 0}}, "spec.rollout.maxSurge", _SURGE),
    "rollout that can't move, explicit": (
        {"rollout": {"maxSurge": 0, "maxUnavailable": 0}},
        "spec.rollout.maxSurge",
        _SURGE,
    ),
    "suspect after hung": (
        {"health": {"selfTestTimeoutSeconds": 60}},
        "spec.health.selfTestTimeoutSeconds",
        _HANG,
    ),
    "pool name": ({"pools": [{"name": "Main"}]}, "spec.pools[0].name", _POOL_NAME),
    "long pool name": (
        {"pools": [{"name": "a" * 21}]},
        "spec.pools[0].name",
        "Too long: may not be more than 20 bytes",
    ),
    "pool twice": ({"pools": [{"name": "a"}, {"name": "a"}]}, "spec.pools[1]", 'Duplicate value: {"name":"a"}'),
    "no pool": ({"pools": []}, "spec.pools", "should have at least 1 items"),
    "nine pools": ({"pools": [{"name": f"p{i}"} for i in range(9)]}, "spec.pools", "must have at most 8 items"),
    "role of a later release": ({"pools": [{"role": "Prefill"}]}, "spec.pools[0].role", 'supported values: "Unified"'),
    "unknown engine": (
        {"engine": {"type": "TensorRT"}},
        "spec.engine.type",
        'supported values: "vLLM", "SGLang", "Simulated", "Custom"',
    ),
    "SGLang without claim": (
        {"engine": {"type": "SGLang"}, "model": {"uri": "hf://Qwen/Qwen3-8B"}},
        "spec.model.uri",
        _PVC_ONLY,
    ),
    "custom without command": (
        {"engine": {"type": "Custom", "image": "x/y:1"}},
        "spec.engine.custom",
        "engine type Custom needs custom.command, and no other type takes custom",
    ),
    "custom without image": (
        {"engine": {"type": "Custom", "custom": {"command": ["serve"]}}},
        "spec.engine.image",
        "engine type Custom has no default image; name one",
    ),
    "custom at the agent's port": (
        {"engine": {"type": "Custom", "image": "x/y:1", "custom": {"command": ["serve"], "port": 9900}}},
        "spec.engine.custom.port",
        "port 9900 is the agent's; let the engine listen on another one",
    ),
    "more accelerators than a pod can have": (
        {"pools": [{"parallelism": {"tensor": 16, "pipeline": 8}}]},
        "spec.pools[0].parallelism",
        "tensor x pipeline x data is at most 64: an instance is one pod in this release; lower one of them, or raise "
        "replicas",
    ),
    "copies of a dense model": (
        {"pools": [{"parallelism": {"data": 2}}]},
        "spec.pools[0].parallelism.data",
        "data above 1 needs expert: true, because it is for mixture-of-experts models; copies of a dense model are "
        "instances: raise replicas instead",
    ),
    "experts on one accelerator": (
        {"pools": [{"parallelism": {"expert": True}}]},
        "spec.pools[0].parallelism.expert",
        "expert: true spreads the experts over tensor x data accelerators, which is 1 here: raise data or tensor, or "
        "leave expert out",
    ),
    "negative replicas": (
        {"pools": [{"replicas": -1}]},
        "spec.pools[0].replicas",
        "should be greater than or equal to 0",
    ),
    "no router": ({"routing": {"replicas": 0}}, "spec.routing.replicas", "should be greater than or equal to 1"),
    "label of ours": (
        {"pools": [{"podTemplate": {"metadata": {"labels": {"serving.sluice.dev/pool": "x"}}}}]},
        "spec.pools[0].podTemplate.metadata.labels",
        _LABELS,
    ),
    "annotation of Argo CD": (
        {"pools": [{"podTemplate": {"metadata": {"annotations": {"argocd.argoproj.io/tracking-id": "x"}}}}]},
        "spec.pools[0].podTemplate.metadata.annotations",
        _LABELS.replace("labels of", "annotations of", 1),
    ),
    "control plane": (
        _pod(tolerations=[{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists"}]),
        "spec.pools[0].podTemplate.spec.tolerations",
        _CONTROL_PLANE,
    ),
    "toleration of everything": (
        _pod(tolerations=[{"operator": "Exists"}]),
        "spec.pools[0].podTemplate.spec.tolerations[0].key",
        "Required value",
    ),
    "system priority": (
        _pod(priorityClassName="system-node-critical"),
        "spec.pools[0].podTemplate.spec.priorityClassName",
        "system-* priority classes are for the cluster's own components",
    ),
    "negative resources": (
        _pod(resources={"limits": {"memory": "-1Gi"}}),
        "spec.pools[0].podTemplate.spec.resources.limits.memory",
        r"should match '^[0-9]+(\.[0-9]{1,9})?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?$'",
    ),
}


@pytest.fixture(scope="module")
def server(api_bed: ApiOnly) -> ApiOnly:
    """The bed with our CRDs applied and served."""
    for crd in crds().values():
        path = f"{CRD_PATH}/{crd['metadata']['name']}"
        api_bed.api.patch(f"{path}?fieldManager=test&force=true&fieldValidation=Strict", crd, APPLY)
    deadline = time.monotonic() + 30
    while True:
        served = [
            api_bed.api.request("GET", f"/apis/{names.API_VERSION}/{c['spec']['names']['plural']}")
            for c in crds().values()
        ]
        if all(status == 200 for status, _ in served):
            return api_bed
        assert time.monotonic() < deadline, f"CRDs not served after 30 s: {served}"
        time.sleep(0.1)


@pytest.fixture
def namespace(server: ApiOnly) -> Iterator[str]:
    name = f"t-{uuid.uuid4().hex[:10]}"
    server.api.create("/api/v1/namespaces", {"metadata": {"name": name}})
    yield name
    server.api.delete(f"/api/v1/namespaces/{name}")


def _path(namespace: str, name: str = "") -> str:
    path = f"/apis/{names.API_VERSION}/namespaces/{namespace}/{names.SERVICE_PLURAL}"
    return f"{path}/{name}" if name else path


def _service(spec: Object, name: str = "qwen") -> Object:
    body = {"apiVersion": names.API_VERSION, "kind": names.SERVICE_KIND, "metadata": {"name": name}}
    return {**body, "spec": {"model": MODEL, **spec}}


def _kubectl(server: ApiOnly, *arguments: str | Path, stdin: str | None = None) -> str:
    program = Path(sys.executable).parent / "kubectl"
    command = [program, "--kubeconfig", server.kubeconfig, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, input=stdin)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", crds())
def test_crd_is_accepted_strictly_and_its_schema_is_structural(server: ApiOnly, kind: str) -> None:
    crd = copy.deepcopy(crds()[kind])
    live = server.api.get(f"{CRD_PATH}/{crd['metadata']['name']}")
    assert {c["type"]: c["status"] for c in live["status"]["conditions"]} == {
        "NamesAccepted": "True",
        "Established": "True",
    }
    # The same once more as a new object: creation is stricter than update, which forgives what was there before.
    crd["spec"]["group"] = "strict.sluice.dev"
    crd["metadata"]["name"] = f"{crd['spec']['names']['plural']}.strict.sluice.dev"
    server.api.create(f"{CRD_PATH}?dryRun=All&fieldValidation=Strict", crd)


@pytest.mark.parametrize("spec", ACCEPTED.values(), ids=ACCEPTED)
def test_spec_is_accepted_and_means_to_us_what_the_server_stores(server: ApiOnly, namespace: str, spec: Object) -> None:
    made = server.api.create(f"{_path(namespace)}?fieldValidation=Strict", _service(spec))
    assert parse_lenient(made["spec"]) == parse_lenient({"model": MODEL, **spec})


@pytest.mark.parametrize(("spec", "field", "said"), REFUSED.values(), ids=REFUSED)
def test_spec_is_refused_with_field_and_fix(
    server: ApiOnly, namespace: str, spec: Object, field: str, said: str
) -> None:
    status, answer = server.api.request("POST", f"{_path(namespace)}?fieldValidation=Strict", _service(spec))
    assert status == 422, answer
    causes = [cause for cause in answer["details"]["causes"] if cause["message"].endswith(said)]
    assert [cause["field"] for cause in causes] == [field], answer["message"]


@pytest.mark.parametrize("name", ["a", "a1-b", "a" * 63], ids=["one character", "dash and digit", "63 characters"])
def test_s001_name_that_fits_a_service_is_accepted(server: ApiOnly, namespace: str, name: str) -> None:
    server.api.create(_path(namespace), _service({}, name))


@pytest.mark.parametrize("name", ["a" * 64, "a" * 253, "1a", "a.b"], ids=["64", "253", "digit first", "dot"])
def test_s001_other_name_is_refused_at_apply_with_the_limit(server: ApiOnly, namespace: str, name: str) -> None:
    status, answer = server.api.request("POST", _path(namespace), _service({}, name))
    assert status == 422
    (cause,) = answer["details"]["causes"]
    assert (cause["field"], cause["message"].endswith(_NAME)) == ("metadata.name", True)


@pytest.mark.parametrize("path", ["spec.autoscaling", "spec.pools[0].podTemplate.spec.hostNetwork"])
def test_unknown_field_is_refused_by_its_path(server: ApiOnly, namespace: str, path: str) -> None:
    spec = {"autoscaling": {}} if "autoscaling" in path else _pod(hostNetwork=True)
    status, answer = server.api.request("POST", f"{_path(namespace)}?fieldValidation=Strict", _service(spec))
    assert (status, f'unknown field "{path}"' in answer["message"]) == (400, True)


def test_new_object_is_in_progress_before_any_operator_saw_it(server: ApiOnly, namespace: str) -> None:
    made = server.api.create(_path(namespace), _service({}))
    assert made["status"] == {"observedGeneration": -1}
    assert kstatus(made) == "InProgress"


def _written_status() -> Object:
    now = "2026-01-01T00:00:00Z"
    return {
        "observedGeneration": 1,
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "Serving",
                "message": "2 of 2 instances serve",
                "observedGeneration": 1,
                "lastTransitionTime": now,
            }
        ],
        "url": "http://qwen.chat.svc",
        "revision": {"current": "abc", "target": "abc"},
        "pools": [
            {
                "name": "default",
                "role": "Unified",
                "desired": 2,
                "current": 2,
                "serving": 2,
                "updated": 2,
                "draining": 0,
                "unhealthy": 0,
                "epoch": 2,
                "revision": {"current": "abc", "target": "abc"},
            }
        ],
        "summary": {"model": "qwen3-8b", "serving": "2/2"},
        "problems": [
            {
                "name": "qwen-default-0-1",
                "phase": "Loading",
                "reason": "Loading",
                "message": "",
                "node": "n1",
                "since": now,
            }
        ],
        "lastHandledReconcileAt": "now",
    }


def _apply_status(server: ApiOnly, namespace: str, status: Object) -> tuple[int, Any]:
    body = {**_service({}), "status": status}
    del body["spec"]
    path = f"{_path(namespace, 'qwen')}/status?fieldManager={names.FIELD_MANAGER}&force=true&fieldValidation=Strict"
    return server.api.request("PATCH", path, body, content_type=APPLY)


def test_status_is_stored_as_written_and_writing_it_again_changes_nothing(server: ApiOnly, namespace: str) -> None:
    server.api.create(_path(namespace), _service({}))
    code, first = _apply_status(server, namespace, _written_status())
    assert (code, first["status"]) == (200, _written_status())
    assert kstatus(first) == "Current"
    _, second = _apply_status(server, namespace, _written_status())
    assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


def test_released_observed_generation_falls_back_to_not_seen(server: ApiOnly, namespace: str) -> None:
    server.api.create(_path(namespace), _service({}))
    _apply_status(server, namespace, _written_status())
    _, after = _apply_status(server, namespace, {"url": "http://qwen.chat.svc"})
    assert after["status"] == {"observedGeneration": -1, "url": "http://qwen.chat.svc"}


def test_status_can_not_grow_without_bounds(server: ApiOnly, namespace: str) -> None:
    server.api.create(_path(namespace), _service({}))
    status = _written_status()
    status["problems"] *= 17
    code, answer = _apply_status(server, namespace, status)
    assert (code, "status.problems" in answer["message"]) == (422, True)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_s102_example_applied_again_is_the_same_object(server: ApiOnly, namespace: str, example: Path) -> None:
    """Once a status is stored. Before that the first repeated apply stores the default status, and only that."""
    apply = ("apply", "--server-side", "--validate=strict", "-n", namespace, "-f", example)
    listing = ("get", "infsvc,accprofile", "-n", namespace, "-o")
    versions = (*listing, "jsonpath={range .items[*]}{.metadata.name}={.metadata.resourceVersion} {end}")
    _kubectl(server, *apply)
    for name in _kubectl(server, *listing[:1], "infsvc", *listing[2:], "name").split():
        _kubectl(
            server,
            "patch",
            name,
            "-n",
            namespace,
            "--subresource=status",
            "--type=merge",
            "-p",
            '{"status":{"url":"x"}}',
        )
    before = _kubectl(server, *versions)
    _kubectl(server, *apply)
    assert _kubectl(server, *versions) == before
    assert _kubectl(server, "diff", "--server-side", "-n", namespace, "-f", example) == ""


def test_kubectl_get_shows_the_columns(server: ApiOnly, namespace: str) -> None:
    server.api.create(_path(namespace), _service({}))
    _apply_status(server, namespace, _written_status())
    header, line = _kubectl(server, "get", "infsvc", "-n", namespace).splitlines()
    assert header.split() == ["NAME", "MODEL", "READY", "SERVING", "URL", "AGE"]
    assert line.split()[:-1] == ["qwen", "qwen3-8b", "True", "2/2", "http://qwen.chat.svc"]


@pytest.mark.parametrize(
    ("field", "sentences"),
    [
        ("infsvc", ["A large language model served by self-healing engine instances"]),
        ("infsvc.spec", ["Which model is served, and under which name.", "keep the object; default false."]),
        ("infsvc.spec.model.uri", ["Where the weights are: `pvc://<claim>/<path>` for vLLM"]),
        ("infsvc.spec.pools", ["Instances of this pool; default 1.", "default `default`."]),
        (
            "infsvc.spec.pools.parallelism",
            ["Tensor-parallel size: accelerators that share each layer; default 1."],
        ),
        ("infsvc.spec.drain", ["Seconds that an instance that leaves may take to finish its requests; default 600."]),
        ("infsvc.status", ["Generation of the spec that this status is about; -1 until the operator saw the object."]),
        ("accprofile.spec", ["Extended resource that a pod asks for, one per tensor-parallel rank."]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kubectl_explain_reads_like_documentation(server: ApiOnly, field: str, sentences: list[str]) -> None:
    said = " ".join(_kubectl(server, "explain", field).split())
    for sentence in sentences:
        assert sentence in said


@pytest.fixture
def system_namespace(server: ApiOnly) -> Iterator[str]:
    """A namespace with the labels of `manifests/base`, so that the server's own pod security checks apply."""
    name = f"t-{uuid.uuid4().hex[:10]}"
    body = yaml.safe_load((ROOT / "manifests" / "base" / "namespace.yaml").read_text())
    server.api.create("/api/v1/namespaces", {**body, "metadata": {**body["metadata"], "name": name}})
    yield name
    server.api.delete(f"/api/v1/namespaces/{name}")


def _base(namespace: str) -> str:
    text = (ROOT / "manifests" / "base" / "operator.yaml").read_text()
    return text.replace(f"namespace: {names.SYSTEM_NAMESPACE}", f"namespace: {namespace}")


def test_manifests_are_in_the_form_that_the_server_stores(server: ApiOnly, system_namespace: str) -> None:
    """So that GitOps tools never see a difference: what was applied is a subset of what comes back."""
    text = _base(system_namespace)
    answer = _kubectl(server, "apply", "--server-side", "--dry-run=server", "-o", "yaml", "-f", "-", stdin=text)
    stored = {(o["kind"], o["metadata"]["name"]): o for o in normal_form(yaml.safe_load(answer)["items"])}
    for obj in objects(text):
        _assert_subset(obj, stored[obj["kind"], obj["metadata"]["name"]], obj["kind"])


def _assert_subset(wanted: Any, found: Any, path: str) -> None:
    if isinstance(wanted, dict):
        for key, value in wanted.items():
            assert key in found, f"{path}.{key} is not stored"
            _assert_subset(value, found[key], f"{path}.{key}")
    elif isinstance(wanted, list):
        assert len(wanted) == len(found), path
        for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
            _assert_subset(one, other, f"{path}[{number}]")
    else:
        assert wanted == found, path


def test_operator_pod_passes_the_servers_restricted_pod_security(server: ApiOnly, system_namespace: str) -> None:
    found = objects(_base(system_namespace))
    (template,) = (o["spec"]["template"] for o in found if o["kind"] == "Deployment")
    (account,) = (o for o in found if o["kind"] == "ServiceAccount")
    server.api.create(f"/api/v1/namespaces/{system_namespace}/serviceaccounts", account)
    pod = {"metadata": {**template["metadata"], "name": "operator"}, "spec": template["spec"]}
    path = f"/api/v1/namespaces/{system_namespace}/pods?dryRun=All&fieldValidation=Strict"
    server.api.create(path, pod)
    pod["spec"]["hostNetwork"] = True
    status, answer = server.api.request("POST", path, pod)
    assert (status, "violates PodSecurity" in answer["message"]) == (403, True)
