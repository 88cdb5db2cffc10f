"""The engine pod: goldens per engine, the rules that hold for every pod, and the bounded override."""

import json
import os
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sluice.api import names
from sluice.api.agent import AgentConfig
from sluice.plan.actions import Apply, Create
from sluice.plan.pods import GRACE_MARGIN_S, build_pod, drain_token
from sluice.plan.policies import build_engine_policy
from sluice.plan.snapshot import ServiceSnapshot
from sluice.plan.view import observe
from tests.unit.plan.cluster import Cluster, a_service, served

GOLDEN = Path(__file__).parent / "golden"
VLLM = {"engine": {"type": "vLLM"}, "model": {"uri": "pvc://weights/llama/8b"}}
TEMPLATE = {
    "metadata": {"labels": {"team": "nlp"}, "annotations": {"example.com/note": "hot"}},
    "spec": {
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "priorityClassName": "important",
        "resources": {"requests": {"cpu": "4", "memory": "32Gi"}, "limits": {"memory": "48Gi"}},
    },
}
H100 = {
    "spec": {
        "resourceName": "nvidia.com/gpu",
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    }
}
CASES: dict[str, dict[str, Any]] = {
    "simulated": {},
    "vllm": VLLM,
    "vllm-tp4": {
        **VLLM,
        "model": {"uri": "pvc://weights/llama/70b", "name": "llama-70b"},
        "accelerator": {"profileRef": {"name": "h100"}},
        "engine": {"type": "vLLM", "args": ["--max-model-len=32768"], "env": [{"name": "LOG", "value": "INFO"}]},
        "pools": [
            {
                "name": "default",
                "parallelism": {"tensor": 4},
                "engine": {"args": ["--max-num-seqs=64"], "env": [{"name": "LOG", "value": "DEBUG"}]},
                "podTemplate": TEMPLATE,
            }
        ],
        "health": {"startupTimeoutSeconds": 901},
        "drain": {"timeoutSeconds": 120},
    },
}


def snapshot_of(spec: dict[str, Any], **service: str) -> ServiceSnapshot:
    cluster = Cluster(a_service(spec, **service))
    cluster.profiles = {"h100": H100}
    return cluster.snapshot()


def built(spec: dict[str, Any], index: int = 0, epoch: int = 1, **service: str) -> dict[str, Any]:
    snapshot = snapshot_of(spec, **service)
    target = observe(snapshot, 0).pools[0].target
    assert target is not None, observe(snapshot, 0).refusals
    return build_pod(snapshot, target, index, epoch)


def refusals(spec: dict[str, Any]) -> list[str]:
    return [refused.message for refused in observe(snapshot_of(spec), 0).refusals]


@pytest.mark.parametrize("case", CASES)
def test_the_pod_is_the_golden_one(case: str) -> None:
    """Change goldens with GOLDEN_UPDATE=1 and read the diff."""
    path = GOLDEN / f"pod-{case}.yaml"
    plain = json.loads(json.dumps(built(CASES[case])))  # no shared parts, so YAML needs no anchors
    text = yaml.safe_dump(plain, sort_keys=False, width=120)
    if os.environ.get("GOLDEN_UPDATE"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("version", ["1.33", "1.36", "1.37"])
@pytest.mark.parametrize("case", CASES)
def test_every_child_passes_the_strict_schema_of_kubernetes(case: str, version: str) -> None:
    cluster = Cluster(a_service(CASES[case]))
    cluster.profiles = {"h100": H100}
    bodies = [a.body for a in cluster.pass_().actions if isinstance(a, Apply | Create)]
    kinds = {body["kind"] for body in bodies}
    assert kinds >= {"Pod", "ControllerRevision", "Service", "Deployment", "NetworkPolicy", "PodDisruptionBudget"}
    for body in bodies:
        kubernetes_validate.validate(body, version, strict=True)


@pytest.mark.parametrize("case", CASES)
def test_s007_no_service_link_and_no_token_reach_an_engine(case: str) -> None:
    spec = built(CASES[case])["spec"]
    assert spec["enableServiceLinks"] is False
    assert spec["automountServiceAccountToken"] is False


@pytest.mark.parametrize("case", CASES)
def test_pods_meet_the_restricted_security_standard(case: str) -> None:
    cluster = Cluster(a_service(CASES[case]))
    cluster.profiles = {"h100": H100}
    bodies = {a.body["kind"]: a.body for a in cluster.pass_().actions if isinstance(a, Apply | Create)}
    for spec in (bodies["Pod"]["spec"], bodies["Deployment"]["spec"]["template"]["spec"]):
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert all({"emptyDir", "configMap", "persistentVolumeClaim"} & set(v) for v in spec["volumes"])
        for container in (*spec["initContainers"], *spec["containers"]):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["runAsNonRoot"] is True
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}


@pytest.mark.parametrize("case", CASES)
def test_all_stop_times_come_from_one_drain_budget(case: str) -> None:
    pod = built(CASES[case])
    budget = CASES[case].get("drain", {}).get("timeoutSeconds", 600)
    [agent], [engine] = pod["spec"]["initContainers"], pod["spec"]["containers"]
    config = AgentConfig.model_validate_json(agent["env"][0]["value"])
    assert config.drain_timeout_s == budget
    assert pod["spec"]["terminationGracePeriodSeconds"] == budget + GRACE_MARGIN_S
    assert "--shutdown-timeout=30" in engine["args"]  # S020
    stop = engine["lifecycle"]["preStop"]["httpGet"]
    assert (stop["path"], stop["port"]) == ("/drain", names.PORT_AGENT)
    assert stop["httpHeaders"] == [{"name": "X-Sluice-Drain", "value": config.drain_token}]


@pytest.mark.parametrize("timeout_s", [0, 1, 29, 30, 59, 60, 61, 599, 600, 3600, 86399, 86400])
@pytest.mark.parametrize("case", CASES)
def test_s020_s022_no_stop_time_contradicts_another_whatever_the_drain_time_is(case: str, timeout_s: int) -> None:
    """S020: what runs one after the other inside a grace period fits into it, with 15 s for the engine's teardown."""
    cluster = Cluster(a_service({**CASES[case], "drain": {"timeoutSeconds": timeout_s}}))
    cluster.profiles = {"h100": H100}
    bodies = {a.body["kind"]: a.body for a in cluster.pass_().actions if isinstance(a, Apply | Create)}
    spec = bodies["Pod"]["spec"]
    [agent], [engine] = spec["initContainers"], spec["containers"]
    pre_stop = AgentConfig.model_validate_json(agent["env"][0]["value"]).drain_timeout_s
    shutdown = int(next(a for a in engine["args"] if a.startswith("--shutdown-timeout=")).partition("=")[2])
    assert pre_stop == timeout_s
    assert pre_stop + shutdown + 15 <= spec["terminationGracePeriodSeconds"]
    router = bodies["Deployment"]["spec"]["template"]["spec"]
    [smg] = router["containers"]
    drain_s = int(smg["args"][smg["args"].index("--drain-seconds") + 1])
    assert drain_s == timeout_s
    # preStop, the 5 s that smg goes on taking requests after SIGTERM, then the streams.
    assert smg["lifecycle"]["preStop"]["sleep"]["seconds"] + 5 + drain_s <= router["terminationGracePeriodSeconds"]


def test_s022_without_drain_settings_the_grace_fits_ten_minutes_of_streaming() -> None:
    assert built(CASES["vllm-tp4"] | {"drain": {}})["spec"]["terminationGracePeriodSeconds"] == 660


def test_s018_all_probes_ask_the_agent_and_startup_is_sized_for_the_load_time() -> None:
    engine = built(CASES["vllm-tp4"])["spec"]["containers"][0]
    probes = {key: engine[key] for key in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {p["httpGet"]["port"] for p in probes.values()} == {names.PORT_AGENT}
    startup = probes["startupProbe"]
    assert 901 <= startup["periodSeconds"] * startup["failureThreshold"] <= 903
    assert probes["livenessProbe"]["terminationGracePeriodSeconds"] == 30


def test_the_agent_is_told_how_to_watch_this_engine() -> None:
    pod = built(CASES["vllm-tp4"])
    config = AgentConfig.model_validate_json(pod["spec"]["initContainers"][0]["env"][0]["value"])
    assert config.instance == pod["metadata"]["name"]
    assert (config.served_model, config.engine, config.engine_port) == ("llama-70b", "vLLM", 8000)
    assert config.startup_timeout_s == 901


def test_another_pod_cannot_know_the_drain_token_from_the_name_alone() -> None:
    one, two = snapshot_of({}), snapshot_of({}, uid="another")
    assert drain_token(one, "i") != drain_token(two, "i")
    assert drain_token(one, "i") != drain_token(one, "j")


def test_the_template_is_laid_over_the_pod_and_ours_wins() -> None:
    pod = built(CASES["vllm-tp4"])
    spec, meta = pod["spec"], pod["metadata"]
    assert meta["labels"]["team"] == "nlp"
    assert meta["annotations"]["example.com/note"] == "hot"
    assert spec["nodeSelector"] == {"zone": "a", "gpu": "h100"}
    assert [t["key"] for t in spec["tolerations"]] == ["nvidia.com/gpu", "gpu"]
    resources = spec["containers"][0]["resources"]
    assert resources["limits"] == {"memory": "48Gi", "nvidia.com/gpu": "4"}
    assert resources["requests"]["nvidia.com/gpu"] == "4"
    assert [e["value"] for e in spec["containers"][0]["env"] if e["name"] == "LOG"] == ["DEBUG"]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ({"metadata": {"labels": {"serving.sluice.dev/pool": "x"}}}, "podTemplate.metadata.labels"),
        ({"metadata": {"annotations": {"argocd.argoproj.io/x": "y"}}}, "podTemplate.metadata.annotations"),
        ({"spec": {"priorityClassName": "system-node-critical"}}, "priorityClassName"),
        ({"spec": {"tolerations": [{"key": "node-role.kubernetes.io/control-plane"}]}}, "tolerations[0]"),
    ],
)
def test_what_an_engine_pod_must_not_carry_is_refused_with_its_path(template: dict[str, Any], said: str) -> None:
    assert any(said in text for text in refusals({"pools": [{"name": "default", "podTemplate": template}]}))


def test_accelerators_follow_from_the_layout_and_not_from_the_template() -> None:
    template = {"spec": {"resources": {"limits": {"nvidia.com/gpu": "1"}}}}
    spec = {"accelerator": {"resourceName": "nvidia.com/gpu"}, "pools": [{"name": "default", "podTemplate": template}]}
    assert any("nvidia.com/gpu follows from" in text for text in refusals(spec))


def test_a_limit_of_the_user_below_our_default_request_still_makes_a_valid_pod() -> None:
    template = {"spec": {"resources": {"limits": {"memory": "64Mi"}}}}
    pod = built({"pools": [{"name": "default", "podTemplate": template}]})
    assert pod["spec"]["containers"][0]["resources"] == {"requests": {"cpu": "50m"}, "limits": {"memory": "64Mi"}}


service_names = st.from_regex(r"\A[a-z]([-a-z0-9]{0,61}[a-z0-9])?\Z")
pool_names = st.from_regex(r"\A[a-z0-9]([-a-z0-9]{0,18}[a-z0-9])?\Z")


@given(service_names, pool_names, st.integers(0, 999), st.integers(1, 99_999))
def test_s001_every_name_and_label_fits(service: str, pool: str, index: int, epoch: int) -> None:
    pod = built({"pools": [{"name": pool}]}, index, epoch, name=service)
    assert len(pod["metadata"]["name"]) <= names.MAX_CHILD_NAME
    assert all(len(value) <= 63 for value in pod["metadata"]["labels"].values())


def test_s001_a_name_that_no_service_can_have_is_refused_and_gets_no_pods() -> None:
    for name in ("a" * 64, "a" * 253, "9lives", "with.dots"):
        cluster = Cluster(a_service(name=name))
        made = cluster.pass_()
        assert made.actions == ()
        accepted = cluster.condition("Accepted")
        assert accepted["status"] == "False"
        assert "metadata.name" in accepted["message"]
        assert "63" in accepted["message"]


def test_s002_services_a_and_a_1_never_meet_in_a_name_or_selector() -> None:
    one, two = (
        served(3),
        Cluster(a_service({"pools": [{"name": "default", "replicas": 3}]}, name="chat-1", uid="second")),
    )
    two.pass_()
    for made in (one, two):
        assert made.engine_pods()
    assert not set(one.pods) & set(two.pods)
    assert not {key for key in one.children if key[0] != "ConfigMap"} & set(two.children)
    selectors = [c.children["Service", c.service["metadata"]["name"]]["spec"]["selector"] for c in (one, two)]
    assert selectors[0] != selectors[1]


def test_pods_of_two_revisions_never_share_a_name() -> None:
    assert (
        built({})["metadata"]["name"]
        != built({"engine": {"type": "Simulated", "args": ["--seed=2"]}})["metadata"]["name"]
    )


def test_nothing_of_a_gitops_tool_is_copied_to_children() -> None:
    cluster = Cluster(a_service())
    cluster.service["metadata"]["labels"] = {"app.kubernetes.io/instance": "argo", "argocd.argoproj.io/instance": "x"}
    for action in cluster.pass_().actions:
        if isinstance(action, Apply | Create):
            keys = {*action.body["metadata"]["labels"], *action.body["metadata"].get("annotations", {})}
            assert not any("argo" in key or key == "app.kubernetes.io/instance" for key in keys)


def test_a_healthy_engine_outlasts_an_agent_that_is_away_for_the_kubelets_restart_pause() -> None:
    [engine] = built({})["spec"]["containers"]
    probe = engine["livenessProbe"]
    assert probe["periodSeconds"] * (probe["failureThreshold"] - 1) > 20 + 10
    agent = built({})["spec"]["initContainers"][0]["livenessProbe"]
    assert agent["httpGet"]["path"] == "/healthz"


def test_prometheus_reaches_the_metrics_of_engine_and_agent() -> None:
    snapshot = snapshot_of({})
    ingress = build_engine_policy(snapshot, [8000, 9100])["spec"]["ingress"]
    prometheus = {"matchLabels": {names.LABEL_NAME: "prometheus"}}
    open_to_it = [
        port["port"]
        for rule in ingress
        if any(peer.get("podSelector") == prometheus for peer in rule["from"])
        for port in rule["ports"]
    ]
    assert open_to_it == [8000, 9100, names.PORT_AGENT], "of all revisions that instances may be of"
