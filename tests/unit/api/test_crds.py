"""Lints of the CRDs that we ship; what only an API server can judge is in tests/api/test_crds.py."""

import re
from typing import Any

import kubernetes_validate
import pytest
import yaml

from sluice.api import crdgen, names
from sluice.api.kinds import KINDS, SCHEMA_VERSION
from sluice.api.v1alpha1 import InferenceServiceSpec, parse_lenient
from tests.unit.api.schemas import ROOT, Schema, crds, nodes, schema_of, with_defaults

CRDS = crds()
NODES = [
    pytest.param(node, id=kind + path) for kind, crd in CRDS.items() for path, node in nodes(schema_of(crd)) if path
]
KEYWORDS = {
    *("type", "description", "default", "properties", "required", "items", "additionalProperties", "format", "enum"),
    *("minLength", "maxLength", "pattern", "minimum", "maximum", "minItems", "maxItems", "maxProperties"),
    *("x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-int-or-string"),
    *("x-kubernetes-preserve-unknown-fields", "x-kubernetes-validations"),
}
SPEC = schema_of(CRDS["InferenceService"])["properties"]["spec"]
MINIMAL: dict[str, Any] = {"model": {"uri": "pvc://models/qwen"}}


def test_checked_in_crds_are_what_the_models_say() -> None:
    chart = ROOT / "charts" / "sluice-crds" / "templates"
    assert crdgen.main(["--check", str(ROOT / "crds"), str(chart)]) == 0


def test_output_is_byte_stable() -> None:
    assert [crdgen.render(kind) for kind in KINDS] == [crdgen.render(kind) for kind in KINDS]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_s005_crd_is_small_enough_for_client_side_apply(kind: Any) -> None:
    assert len(crdgen.render(kind).encode()) < 100_000


def test_s005_pod_override_is_an_allow_list_not_an_inlined_pod_template() -> None:
    template = SPEC["properties"]["pools"]["items"]["properties"]["podTemplate"]
    assert set(template["properties"]["spec"]["properties"]) == {
        *("nodeSelector", "tolerations", "affinity", "priorityClassName", "schedulerName", "runtimeClassName"),
        "resources",
    }
    assert template["properties"]["spec"]["properties"]["affinity"]["x-kubernetes-preserve-unknown-fields"] is True
    assert len(yaml.safe_dump(template)) < 10_000


@pytest.mark.parametrize("version", ["1.35", "1.36", "1.37"])
@pytest.mark.parametrize("kind", CRDS)
def test_crd_is_a_valid_object_of_its_kind(kind: str, version: str) -> None:
    kubernetes_validate.validate(CRDS[kind], version, strict=True)


@pytest.mark.parametrize("kind", CRDS)
def test_crd_carries_the_schema_version_that_the_operator_compares(kind: str) -> None:
    annotations = CRDS[kind]["metadata"]["annotations"]
    assert annotations == {names.ANNOTATION_SCHEMA_VERSION: str(SCHEMA_VERSION)}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_crd_of_the_chart_differs_only_in_the_keep_policy(kind: Any) -> None:
    plain, chart = yaml.safe_load(crdgen.render(kind)), yaml.safe_load(crdgen.render(kind, for_chart=True))
    assert chart["metadata"]["annotations"].pop("helm.sh/resource-policy") == "keep"
    assert plain == chart


@pytest.mark.parametrize("node", NODES)
def test_node_uses_known_keywords_and_has_a_type(node: Schema) -> None:
    assert set(node) <= KEYWORDS
    assert ("type" in node) != node.get("x-kubernetes-int-or-string", False)


@pytest.mark.parametrize("node", NODES)
def test_node_is_bounded(node: Schema) -> None:
    if node.get("type") == "array":
        assert "maxItems" in node
    if node.get("type") == "string":
        assert "maxLength" in node or "enum" in node or node.get("description", "").startswith("`")
    if node.get("type") == "object":
        assert "properties" in node or "maxProperties" in node or node.get("x-kubernetes-preserve-unknown-fields")
    if node.get("type") == "integer":
        assert "minimum" in node and node["format"] in ("int32", "int64")


@pytest.mark.parametrize("node", NODES)
def test_list_keys_are_required_or_defaulted(node: Schema) -> None:
    for key in node.get("x-kubernetes-list-map-keys", ()):
        item = node["items"]
        assert key in item.get("required", ()) or "default" in item["properties"][key]


@pytest.mark.parametrize("node", NODES)
def test_every_list_says_how_it_is_merged(node: Schema) -> None:
    if node.get("type") == "array":
        assert node["x-kubernetes-list-type"] in ("map", "atomic")


@pytest.mark.parametrize("node", NODES)
def test_pattern_is_anchored_and_go_can_read_it(node: Schema) -> None:
    if "pattern" in node:
        assert node["pattern"].startswith("^") and node["pattern"].endswith("$")
        assert not re.search(r"\(\?[=!<]", node["pattern"])


@pytest.mark.parametrize("kind", CRDS)
def test_every_rule_has_a_message_that_fits_in_a_line_of_kubectl(kind: str) -> None:
    for path, node in nodes(schema_of(CRDS[kind])):
        for rule in node.get("x-kubernetes-validations", ()):
            assert 20 <= len(rule["message"]) <= 400, path
            assert not rule["message"].endswith("."), path


def test_s102_defaults_of_the_schema_are_the_defaults_of_the_model() -> None:
    """Absent fields mean the same to the API server and to the operator."""
    stored = with_defaults(MINIMAL, SPEC)
    assert parse_lenient(stored) == parse_lenient(MINIMAL)
    kept = InferenceServiceSpec.model_validate(MINIMAL).model_dump(mode="json", by_alias=True, exclude_none=True)
    assert stored == _without_empty(kept)


def test_s102_there_is_no_default_without_a_meaning() -> None:
    """Empty lists and texts, and objects without defaults inside, would only clutter live objects."""
    for path, node in nodes(SPEC):
        assert node.get("default", True) not in ("", [], None), path
        if node.get("default") == {}:
            assert any("default" in child for child in node["properties"].values()), path


def test_new_object_shows_that_nobody_has_seen_it_yet() -> None:
    root = schema_of(CRDS["InferenceService"])
    assert with_defaults({"spec": MINIMAL}, root)["status"] == {"observedGeneration": -1}


def test_columns_of_kubectl_get_point_at_fields_that_exist() -> None:
    for crd in CRDS.values():
        paths = {path for path, _ in nodes(schema_of(crd))} | {".metadata.creationTimestamp"}
        for column in crd["spec"]["versions"][0]["additionalPrinterColumns"]:
            assert re.sub(r"\[\?\(.*\)\]", "[]", column["jsonPath"]) in paths


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        cleaned = {key: _without_empty(child) for key, child in value.items()}
        return {key: child for key, child in cleaned.items() if child not in ({}, [], "")}
    return [_without_empty(item) for item in value] if isinstance(value, list) else value
