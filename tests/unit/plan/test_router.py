"""The router's Deployment: what restarts routers, and what becomes of edits by others."""

import copy
from typing import Any

import pytest

from sluice.api import names
from sluice.api.config import Images, OperatorConfig
from sluice.api.router import SidecarConfig
from tests.unit.plan.cluster import Cluster, served


def deployment(cluster: Cluster) -> dict[str, Any]:
    return next(obj for (kind, _), obj in cluster.children.items() if kind == "Deployment")


def template(cluster: Cluster) -> dict[str, Any]:
    made: dict[str, Any] = deployment(cluster)["spec"]["template"]
    return made


def test_a_hand_edited_template_is_brought_back() -> None:
    cluster = served(1)
    before = copy.deepcopy(template(cluster))
    spec = template(cluster)["spec"]
    spec["containers"][0]["image"] = "nginx:1"
    spec["initContainers"][0]["command"] = ["sleep", "inf"]
    del spec["topologySpreadConstraints"]
    cluster.run()
    assert template(cluster) == before


def test_s096_an_edit_is_brought_back_to_what_was_rendered_and_not_to_a_new_operators_images() -> None:
    cluster = served(1)
    before = copy.deepcopy(template(cluster))
    cluster.config = OperatorConfig(images=Images(engine="sluice-engine:9", router="sluice-router:9"))
    assert cluster.pass_().actions == ()
    template(cluster)["spec"]["containers"][0]["image"] = "nginx:1"
    cluster.run()
    assert template(cluster) == before


def test_what_others_add_to_the_template_stays_and_is_no_difference() -> None:
    cluster = served(1)
    template(cluster)["metadata"]["annotations"] = {"kubectl.kubernetes.io/restartedAt": "2027-01-15T08:00:00Z"}
    template(cluster)["spec"]["containers"].append({"name": "mesh", "image": "mesh:1"})
    assert cluster.pass_().actions == ()


@pytest.mark.parametrize("record", ["", "null", "[]", "{", "[" * 100_000, '{"spec":{"containers":[]}}'])
def test_a_damaged_record_of_the_template_is_replaced(record: str) -> None:
    cluster = served(1)
    before = copy.deepcopy(deployment(cluster))
    deployment(cluster)["metadata"]["annotations"][names.ANNOTATION_ROUTER_TEMPLATE] = record
    cluster.run()
    assert deployment(cluster)["spec"] == before["spec"]
    assert deployment(cluster)["metadata"]["annotations"] == before["metadata"]["annotations"]


def test_a_changed_declaration_renders_a_new_template() -> None:
    cluster = served(1)
    cluster.config = OperatorConfig(images=Images(router="sluice-router:9"))
    cluster.edit(routing={"policy": "RoundRobin"})
    cluster.run()
    [router] = template(cluster)["spec"]["containers"]
    assert router["image"] == "sluice-router:9"
    assert "RoundRobin" in router["args"]


def test_routers_accept_the_operator_after_it_moved_to_another_namespace() -> None:
    cluster = served(2)
    cluster.config = OperatorConfig(operator_subject="system:serviceaccount:platform:sluice")
    cluster.run()
    [sidecar] = template(cluster)["spec"]["initContainers"]
    config = next(entry["value"] for entry in sidecar["env"] if entry["name"] == "SLUICE_ROUTER_CONFIG")
    told = SidecarConfig.model_validate_json(config)
    assert told.operator_subject == "system:serviceaccount:platform:sluice"
