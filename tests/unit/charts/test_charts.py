"""The charts: what they render, for a matrix of values, and what they refuse."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from manifests import render as base
from manifests.render import Object, template
from sluice.api import names
from sluice.api.config import OperatorConfig
from sluice.api.v1alpha1 import AcceleratorProfileSpec
from sluice.cli.catalogue import read_shipped, shipped
from sluice.runtime import kinds
from sluice.runtime.checks import needed_rights
from tests.unit.api.schemas import ROOT, crds, nodes, schema_of
from tests.unit.charts.conftest import Render

CHART = ROOT / "charts" / "sluice"
GOLDEN = Path(__file__).parent / "rbac.golden.yaml"
LONG_RELEASE = "r" * 53
MATRIX: dict[str, list[str]] = {
    "defaults": [],
    "namespaced": ["--set", "namespaces={team-a,team-b}"],
    "bare": ["--set", "podDisruptionBudget.enabled=false,networkPolicy.enabled=false,topologySpread=false"],
    "digest": ["--set", f"image.repository=r.example.com/s,image.tag=x,image.digest=sha256:{'a' * 64}"],
    "placed": [
        *("--set", "priorityClassName=high,nodeSelector.pool=infra,podAnnotations.note=x,imagePullSecrets[0].name=key"),
        *("--set", "tolerations[0].key=infra,tolerations[0].operator=Exists"),
        *("--set-json", 'affinity={"nodeAffinity":{}}'),
    ],
    "labelled": ["--set", "commonLabels.team=search,rbac.aggregate=false,replicas=1"],
    "scraped": ["--set", "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.name=monitoring"],
}
matrix = pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)


def _of(found: list[Object], kind: str) -> list[Object]:
    return [obj for obj in found if obj["kind"] == kind]


def _deployment(found: list[Object]) -> Any:
    (deployment,) = _of(found, "Deployment")
    return deployment["spec"]


def _config(found: list[Object]) -> OperatorConfig:
    (config_map,) = _of(found, "ConfigMap")
    return OperatorConfig.model_validate(yaml.safe_load(config_map["data"]["operator.yaml"]))


@matrix
def test_two_renders_are_byte_equal(helm: str, values: list[str]) -> None:
    assert template(helm, *values) == template(helm, *values)


@matrix
def test_objects_fit_the_strict_schema_of_their_kind(render: Render, values: list[str]) -> None:
    for obj in render(*values):
        if obj["kind"] == names.PROFILE_KIND:
            AcceleratorProfileSpec.model_validate(obj["spec"])
            continue
        for version in ("1.35", "1.36", "1.37"):
            kubernetes_validate.validate(obj, version, strict=True)


@matrix
def test_objects_hold_no_null_and_no_empty_map(render: Render, values: list[str]) -> None:
    """Server-side apply refuses null; an empty map would differ from what the server stores."""
    for obj in render(*values):
        for path, value in _leaves(obj):
            may_be_empty = path.endswith(("namespaceSelector", "affinity.nodeAffinity"))
            assert value is not None and (value != {} or may_be_empty), path


def test_the_catalogue_of_accelerators_is_the_planners_and_can_be_left_out(render: Render) -> None:
    def profiles(*values: str) -> dict[str, Object]:
        return {o["metadata"]["name"]: o["spec"] for o in render(*values) if o["kind"] == names.PROFILE_KIND}

    assert profiles() == {name: (read_shipped(name) or {})["spec"] for name in shipped()}
    assert profiles("--set", "acceleratorProfiles.catalogue=false") == {}


@matrix
def test_s103_no_webhook_is_installed(render: Render, values: list[str]) -> None:
    kinds_found = {obj["kind"] for obj in (*render(*values), *render(chart="sluice-crds"))}
    assert not any("Webhook" in kind for kind in kinds_found)
    assert not any("conversion" in crd["spec"] for crd in render(chart="sluice-crds"))


@matrix
def test_s004_every_name_and_label_fits_under_a_long_release_name(render: Render, values: list[str]) -> None:
    namespace = "n" * 63
    for obj in (*render(*values, "--namespace", namespace, release=LONG_RELEASE), *render(chart="sluice-crds")):
        meta = obj["metadata"]
        limit = 253 if obj["kind"] in ("CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding") else 63
        assert len(meta["name"]) <= limit
        pod_meta = obj["spec"]["template"]["metadata"] if obj["kind"] == "Deployment" else {}
        for labels in (meta.get("labels", {}), pod_meta.get("labels", {})):
            for key, value in labels.items():
                assert len(key.rpartition("/")[2]) <= 63 and len(key) <= 253
                assert re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", value), (key, value)


def test_s004_helm_refuses_a_release_name_that_is_too_long(render: Render) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        render(release=LONG_RELEASE + "r")
    assert "release name" in refused.value.stderr


@matrix
def test_s104_cluster_scoped_names_do_not_depend_on_release_or_namespace(render: Render, values: list[str]) -> None:
    def cluster_scoped(found: list[Object]) -> set[str]:
        return {o["metadata"]["name"] for o in found if "namespace" not in o["metadata"]} - set(shipped())

    elsewhere = render(*values, "--namespace", "other", release="other")
    assert (
        cluster_scoped(render(*values))
        == cluster_scoped(elsewhere)
        == {"sluice-operator", "sluice-view", "sluice-edit", "sluice-drain"}
    )


@matrix
def test_nothing_calls_for_what_differs_between_renders(values: list[str]) -> None:
    del values
    text = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    for word in ("lookup", "randAlpha", "genCA", "genSigned", "now", "helm.sh/hook"):
        assert not re.search(rf"\b{re.escape(word)}\b", text), word


def test_common_labels_reach_every_object_and_no_selector(render: Render) -> None:
    found = render("--set", "commonLabels.team=search")
    assert all(obj["metadata"]["labels"]["team"] == "search" for obj in found)
    spec = _deployment(found)
    assert spec["template"]["metadata"]["labels"]["team"] == "search"
    (budget,) = _of(found, "PodDisruptionBudget")
    (policy,) = _of(found, "NetworkPolicy")
    (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]
    for selector in (
        spec["selector"],
        budget["spec"]["selector"],
        policy["spec"]["podSelector"],
        spread["labelSelector"],
    ):
        assert "team" not in selector["matchLabels"]
    assert "team" not in _config_text(found)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["--set", "replica=1"], "additional properties 'replica' not allowed"),
        (["--set", "replicas=many"], "got string, want integer"),
        (["--set", "image.Tag=1"], "additional properties 'Tag' not allowed"),
        (["--set", "image.digest=abc"], "does not match pattern"),
        (["--set", "config.image.vllm=x"], "additional properties 'image' not allowed"),
        (["--set", "config.logLevel=LOUD"], "value must be one of"),
        (["--set", "resources.requests=null"], "missing property 'requests'"),
        (["--set-json", "networkPolicy.apiServerPorts=[]"], "minItems: got 0, want 1"),
        (["--set", "commonLabels.app\\.kubernetes\\.io/name=x"], "invalid propertyName"),
        (["--set", "namespaces={Team}"], "does not match pattern"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_wrong_value_is_refused_at_render(render: Render, values: list[str], said: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        render(*values)
    assert said in refused.value.stderr


@pytest.mark.parametrize("chart", ["sluice", "sluice-crds"])
def test_values_schema_is_closed_at_every_level(chart: str) -> None:
    schema = json.loads((ROOT / "charts" / chart / "values.schema.json").read_text())
    free = {"global", "affinity", "tolerations[]", "metricsFrom[]"}
    for path, node in nodes({"properties": schema["properties"] | schema.get("$defs", {})}):
        if node.get("type") == "object" and not path.endswith(tuple(free)):
            assert "additionalProperties" in node, path


def test_default_values_are_the_operators_own_defaults() -> None:
    """A user who reads values.yaml reads the truth; and every setting can be reached from the chart."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    defaults = OperatorConfig().model_dump(mode="json", by_alias=True)
    placed_by_chart = {"namespaces", "leaseNamespace", "routerTokenFile", "operatorSubject"}
    assert values["config"] == {key: value for key, value in defaults.items() if key not in placed_by_chart}


def test_operator_reads_the_rendered_configuration(render: Render) -> None:
    config = _config(render("--set", "namespaces={team-a}", "--namespace", "elsewhere"))
    assert config.namespaces == ("team-a",)
    assert config.lease_namespace == "elsewhere"
    assert config.operator_subject == "system:serviceaccount:elsewhere:sluice-operator"
    assert _config(render()) == OperatorConfig()


def test_changed_configuration_makes_new_pods(render: Render) -> None:
    def annotations(*values: str) -> Any:
        return _deployment(render(*values))["template"]["metadata"]["annotations"]

    assert annotations() == annotations("--set", "replicas=3")
    assert annotations() != annotations("--set", "config.workers=4")


def test_operator_pod_gets_what_the_operator_expects(render: Render) -> None:
    spec = _deployment(render())
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["replicas"] == 2
    assert pod["serviceAccountName"] == names.OPERATOR_SERVICE_ACCOUNT
    assert pod["terminationGracePeriodSeconds"] == 30
    assert {p: container[p]["httpGet"] for p in ("livenessProbe", "readinessProbe")} == {
        "livenessProbe": {"path": "/healthz", "port": "http"},
        "readinessProbe": {"path": "/readyz", "port": "http"},
    }
    assert container["ports"] == [{"name": "http", "containerPort": names.PORT_OPERATOR, "protocol": "TCP"}]
    (token,) = (v["projected"]["sources"][0]["serviceAccountToken"] for v in pod["volumes"] if "projected" in v)
    assert token["audience"] == names.ROUTER_TOKEN_AUDIENCE
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert f"{mounts['router-token']}/{token['path']}" == str(OperatorConfig().router_token_file)
    assert container["args"] == [f"--config={mounts['config']}/operator.yaml"]


@matrix
def test_operator_pod_meets_the_restricted_pod_security_standard(render: Render, values: list[str]) -> None:
    pod = _deployment(render(*values))["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert {next(iter(set(volume) - {"name"})) for volume in pod["volumes"]} <= {"configMap", "projected"}
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True
        assert set(container["resources"]) == {"requests", "limits"}


def test_digest_wins_over_tag(render: Render) -> None:
    pod = _deployment(render(*MATRIX["digest"]))["template"]["spec"]
    assert pod["containers"][0]["image"] == f"r.example.com/s@sha256:{'a' * 64}"


def test_rbac_is_what_was_agreed(render: Render) -> None:
    """A change of any rule is a change of the golden file, and is read as one."""
    found = {obj["metadata"]["name"]: obj["rules"] for obj in render() if obj["kind"] in ("ClusterRole", "Role")}
    assert found == yaml.safe_load(GOLDEN.read_text())


def _rules(found: list[Object]) -> Iterator[tuple[str, str, set[str]]]:
    for obj in found:
        if obj["kind"] in ("ClusterRole", "Role") and obj["metadata"]["name"].startswith("sluice-operator"):
            for rule in obj["rules"]:
                for group in rule.get("apiGroups", ()):
                    for resource in rule["resources"]:
                        yield group, resource, set(rule["verbs"])


@matrix
def test_operator_may_not_do_what_it_never_needs(render: Render, values: list[str]) -> None:
    for group, resource, verbs in _rules(render(*values)):
        assert "*" not in {group, resource, *verbs}
        assert resource.partition("/")[0] not in {
            *("secrets", "serviceaccounts", "roles", "rolebindings", "clusterroles", "clusterrolebindings"),
            *("mutatingwebhookconfigurations", "validatingwebhookconfigurations"),
        }
        assert resource not in {"pods/exec", "pods/attach", "pods/portforward", "pods/log", "pods/ephemeralcontainers"}
        if resource in ("inferenceservices", "acceleratorprofiles", "nodes", "customresourcedefinitions"):
            assert verbs <= {"get", "list", "watch"}


@pytest.mark.parametrize("values", [MATRIX["defaults"], MATRIX["namespaced"]], ids=["all namespaces", "some"])
def test_operator_gets_every_right_that_it_checks_at_start(render: Render, values: list[str]) -> None:
    allowed = {(group, resource): verbs for group, resource, verbs in _rules(render(*values))}
    for right in needed_rights():
        resource = f"{right.kind.plural}/{right.subresource}" if right.subresource else right.kind.plural
        assert right.verb in allowed[(right.kind.group, resource)], str(right)
    for kind in kinds.WATCHED:
        assert allowed[(kind.group, kind.plural)] >= {"get", "list", "watch"}, kind.resource


def test_namespaced_install_has_no_rights_on_namespaced_objects_elsewhere(render: Render) -> None:
    found = render(*MATRIX["namespaced"])
    (cluster,) = (o for o in _of(found, "ClusterRole") if o["metadata"]["name"] == "sluice-operator")
    resources = {resource for rule in cluster["rules"] for resource in rule.get("resources", ())}
    assert resources == {"acceleratorprofiles", "nodes", "customresourcedefinitions", "selfsubjectaccessreviews"}
    roles = {(o["metadata"]["namespace"], o["metadata"]["name"]) for o in _of(found, "Role")}
    assert roles == {
        ("sluice-system", "sluice-operator-lease"),
        ("team-a", "sluice-operator"),
        ("team-b", "sluice-operator"),
    }


def test_users_get_their_rights_through_the_built_in_roles(render: Render) -> None:
    roles = {obj["metadata"]["name"]: obj["metadata"]["labels"] for obj in _of(render(), "ClusterRole")}

    def aggregated(name: str) -> set[str]:
        prefix = "rbac.authorization.k8s.io/aggregate-to-"
        return {key.removeprefix(prefix) for key in roles[name] if key.startswith(prefix)}

    assert aggregated("sluice-view") == {"view", "edit", "admin"}
    assert aggregated("sluice-edit") == {"edit", "admin"}
    assert aggregated("sluice-operator") == aggregated("sluice-drain") == set()


def test_crd_chart_keeps_the_crds_when_it_goes(render: Render) -> None:
    found = render(chart="sluice-crds")
    assert {obj["spec"]["names"]["kind"] for obj in found} == set(crds())
    for obj in found:
        assert obj["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        assert schema_of(obj) == schema_of(crds()[obj["spec"]["names"]["kind"]])


def test_kustomize_base_is_the_charts_output(helm: str) -> None:
    assert base.base(helm) == base.TARGET.read_text(), "run `make generate`"
    kubectl = Path(sys.executable).parent / "kubectl"
    built = subprocess.run(
        [kubectl, "kustomize", ROOT / "manifests" / "base"], check=True, capture_output=True, text=True, timeout=60
    )
    found = [obj for obj in base.objects(built.stdout) if obj["kind"] != "Namespace"]
    assert base.normal_form(found) == base.objects(base.TARGET.read_text())


def test_gitops_snippets_name_our_kinds_and_folders() -> None:
    gitops = ROOT / "manifests" / "gitops"
    argo = yaml.safe_load((gitops / "argocd-cm.yaml").read_text())
    assert set(argo["data"]) == {f"resource.customizations.health.{names.GROUP}_{names.SERVICE_KIND}"}
    paths = [flux["spec"]["path"] for flux in yaml.safe_load_all((gitops / "flux.yaml").read_text())]
    assert all((ROOT / path).is_dir() for path in paths if path != "./models")


def _config_text(found: list[Object]) -> str:
    (config_map,) = _of(found, "ConfigMap")
    return str(config_map["data"]["operator.yaml"])


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _leaves(child, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for number, child in enumerate(value):
            yield from _leaves(child, f"{path}[{number}]")
    else:
        yield path, value
