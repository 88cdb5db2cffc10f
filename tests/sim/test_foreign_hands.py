"""What others do to our objects and names, and what a control plane in trouble says: nobody who serves is touched, and
what was wanted comes about."""

from collections.abc import Callable
from typing import Any

import pytest

from sluice.api import names
from sluice.plan.snapshot import Event
from sluice.runtime.errors import NotFound
from tests.fakeapi.cluster import Options
from tests.sim.client import Attempt
from tests.sim.simulation import NAMESPACE, Simulation, is_leaving

Object = dict[str, Any]
USER = Options("user")
LABELS = [names.LABEL_MANAGED_BY, names.LABEL_SERVICE_UID]
CHILDREN = [
    ("", "services"),
    ("", "configmaps"),
    ("apps", "deployments"),
    ("apps", "controllerrevisions"),
    ("networking.k8s.io", "networkpolicies"),
    ("policy", "poddisruptionbudgets"),
]


def relabel(sim: Simulation, group: str, plural: str, name: str, label: str) -> None:
    patch = {"metadata": {"labels": {label: "platform"}}}
    sim.cluster.patch(sim.cluster.resource(group, plural), NAMESPACE, name, patch, options=USER)


def is_ready(sim: Simulation, name: str = "demo") -> Callable[[], bool]:
    return lambda: sim.condition("Ready", name).get("status") == "True"


def serves(sim: Simulation, count: int) -> Callable[[], bool]:
    return lambda: sum(sim.is_available(pod) for pod in sim.engine_pods(leaving=False)) == count


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize(("group", "plural"), CHILDREN)
def test_relabelled_child_stops_neither_the_service_nor_makes_a_hot_loop(
    serving: Simulation, group: str, plural: str, label: str
) -> None:
    name = serving.cluster.objects(plural, group, NAMESPACE)[0]["metadata"]["name"]
    relabel(serving, group, plural, name, label)
    passes = 0
    for _ in range(30):
        serving.machinery.settle()
        for kind in serving.running.undelivered():
            while serving.running.pending[kind.name]:
                serving.running.deliver(kind)
        while serving.run_pass():
            passes += 1
            assert passes < 100, "hot loop"
        serving.advance(1)
    serving.scale(4)
    serving.settle(until=serves(serving, 4), within_s=600)


def test_pods_that_a_webhook_relabels_are_not_made_again_and_again(sim: Simulation) -> None:
    def webhook(attempt: Attempt) -> None:
        if attempt.verb == "create" and attempt.kind == "Pod":
            relabel(sim, "", "pods", attempt.name, names.LABEL_MANAGED_BY)

    sim.after_write = webhook
    sim.start_operator()
    sim.create_service(replicas=2)
    sim.settle()
    sim.heal_views()
    sim.settle()
    assert len(sim.engine_pods()) == 2
    assert is_ready(sim)()


def test_partition_of_the_control_plane_takes_no_instance(serving: Simulation) -> None:
    """No kubelet, agent or router is heard any more, they go on serving their clients: when the network is back, a pod
    that was deleted meanwhile would be stopped in the middle of its requests."""
    before = {pod["metadata"]["name"] for pod in serving.engine_pods()}
    cut_off(serving)
    for _ in range(60):
        serving.running.poll_all()
        while serving.run_pass():
            pass
        serving.advance(5)
    assert {pod["metadata"]["name"] for pod in serving.engine_pods()} == before
    assert not [pod["metadata"]["name"] for pod in serving.engine_pods() if is_leaving(pod)]


def cut_off(sim: Simulation) -> None:
    controller = Options("kube-controller-manager")
    nodes, pods = sim.cluster.resource("", "nodes"), sim.cluster.resource("", "pods")
    silent: Object = {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}
    for node in sim.cluster.objects("nodes"):
        sim.cluster.patch(nodes, "", node["metadata"]["name"], silent, subresource="status", options=controller)
    for pod in [*sim.router_pods(), *sim.engine_pods()]:
        conditions = [{**c, "status": "False"} if c["type"] == "Ready" else c for c in pod["status"]["conditions"]]
        patch = {"status": {"conditions": conditions}}
        sim.cluster.patch(pods, NAMESPACE, pod["metadata"]["name"], patch, subresource="status", options=controller)
    for played in [*sim.world.routers.values(), *sim.world.engines.values()]:
        played.silent = True
    for kind in sim.running.undelivered():
        while sim.running.pending[kind.name]:
            sim.running.deliver(kind)


def test_one_stray_404_is_not_the_end_of_a_service(serving: Simulation) -> None:
    """A proxy, or an API server that has not heard of the CRD yet, denies what exists."""
    struck: list[str] = []

    def strike(attempt: Attempt) -> None:
        if attempt.subresource == "status" and attempt.kind == names.SERVICE_KIND and not struck:
            struck.append(attempt.name)
            raise NotFound("apply", "inferenceservices", "sim/demo", 404, "", "404 page not found")

    serving.before_write = strike
    serving.scale(2)
    serving.settle(until=serves(serving, 2), within_s=300)
    assert struck
    serving.scale(4)
    serving.settle(until=serves(serving, 4), within_s=300)


def test_foreign_pod_at_the_next_name_is_left_alone_and_costs_no_instance(serving: Simulation) -> None:
    taken: list[str] = []

    def squat(attempt: Attempt) -> None:
        if attempt.verb == "create" and attempt.kind == "Pod" and not taken:
            taken.append(attempt.name)
            spec = {"containers": [{"name": "x", "image": "x"}]}
            body = {"metadata": {"name": attempt.name}, "spec": spec}
            serving.cluster.create(serving.cluster.resource("", "pods"), NAMESPACE, body, USER)

    serving.before_write = squat
    victim = serving.engine_pods()[0]["metadata"]["name"]
    serving.cluster.delete(serving.cluster.resource("", "pods"), NAMESPACE, victim, {"gracePeriodSeconds": 0}, USER)
    serving.settle(until=lambda: bool(taken) and serves(serving, 3)() and is_ready(serving)(), within_s=60)
    [stranger] = [p for p in serving.cluster.objects("pods") if p["metadata"]["name"] == taken[0]]
    assert "deletionTimestamp" not in stranger["metadata"]
    assert serving.condition("Stalled")["status"] == "False"


def test_service_made_again_under_its_name_does_not_wait_for_the_old_ones_drains(serving: Simulation) -> None:
    old = {pod["metadata"]["uid"] for pod in serving.engine_pods()}
    for engine in serving.world.engines.values():
        engine.in_flight = 1
    serving.delete_service()
    serving.create_service(replicas=2)
    serving.settle(until=is_ready(serving), within_s=60)
    assert old <= {pod["metadata"]["uid"] for pod in serving.engine_pods()}, "they still finish their requests"


def test_s002_service_heals_soon_after_the_foreign_object_in_its_way_is_gone(sim: Simulation) -> None:
    services = sim.cluster.resource("", "services")
    foreign = {"metadata": {"name": "demo"}, "spec": {"ports": [{"port": 80}]}}
    sim.cluster.create(services, NAMESPACE, foreign, USER)
    sim.start_operator()
    sim.create_service(replicas=1)
    for _ in range(4):  # back-off at its longest
        sim.settle(until=lambda end=sim.now + 300: sim.now >= end)  # type: ignore[misc]  # mypy cannot infer a lambda's default
    assert "url" not in sim.service()["status"]
    assert sim.condition("Routed")["reason"] == "NameConflict"
    sim.cluster.delete(services, NAMESPACE, "demo", None, USER)
    sim.settle(until=is_ready(sim), within_s=30)
    assert sim.service()["status"]["url"] == "http://demo.sim.svc/v1"


def test_first_creation_of_a_large_pool_is_paced_without_an_alarm(sim: Simulation, monkeypatch: Any) -> None:
    told: list[Event] = []
    sim.start_operator()
    monkeypatch.setattr(sim.running.recorder, "record", lambda _, event: told.append(event))
    limit = sim.config.limits.creations_per_service_and_minute
    sim.create_service(replicas=limit + 20)
    sim.settle(until=lambda: len(sim.engine_pods()) == limit, within_s=30)
    sim.settle(until=lambda: len(sim.engine_pods()) == limit + 20, within_s=120)
    assert "CreationLimit" not in {event.reason for event in told}
