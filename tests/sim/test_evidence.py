"""What failed is told and counted, although the pass that saw it also took the pod away."""

from typing import Any

from tests.fakeapi.cluster import Options
from tests.sim.simulation import NAMESPACE, Simulation

NOT_ADMITTED = {
    "reason": "UnexpectedAdmissionError",
    "message": "no healthy devices",
    "containerStatuses": None,
    "initContainerStatuses": None,
}


def fail(sim: Simulation, pod: dict[str, Any]) -> None:
    """The pod's node refuses it, and the operator hears of it."""
    pods = sim.cluster.resource("", "pods")
    status = {"status": {"phase": "Failed", **NOT_ADMITTED}}
    sim.cluster.patch(
        pods, NAMESPACE, pod["metadata"]["name"], status, subresource="status", options=Options("kubelet")
    )
    assert sim.running is not None
    for kind in sim.running.undelivered():
        while sim.running.pending[kind.name]:
            sim.running.deliver(kind)


def living(sim: Simulation) -> list[dict[str, Any]]:
    return [p for p in sim.engine_pods(leaving=False) if p["status"].get("phase") != "Failed"]


def test_a_start_that_timed_out_is_among_the_last_failures(sim: Simulation) -> None:
    sim.start_operator()
    sim.world.load_s = 1e9
    sim.create_service(replicas=1, health={"startupTimeoutSeconds": 30})
    sim.settle(until=lambda: bool(sim.engine_pods()), within_s=60)
    first = sim.engine_pods()[0]["metadata"]["name"]
    sim.settle(until=lambda: first not in [p["metadata"]["name"] for p in sim.engine_pods()], within_s=600)
    failures = {f["instance"]: f["reason"] for f in sim.service()["status"].get("lastFailures", [])}
    assert failures[first] == "StartupTimeout"


def test_a_pod_that_failed_by_itself_is_counted_in_the_pass_that_deletes_it(sim: Simulation) -> None:
    sim.start_operator()
    sim.create_service(replicas=1)
    sim.settle()
    [pod] = sim.engine_pods()
    sim.advance(60)
    fail(sim, pod)
    sim.run_pass()
    status = sim.service()["status"]
    assert [f["instance"] for f in status["lastFailures"]] == [pod["metadata"]["name"]]
    assert status["pools"][0]["backoff"], "the failed instance counts for the pause of its place"


def test_pods_that_fail_late_again_and_again_are_paused(sim: Simulation) -> None:
    """Each waits 15 s for its place, then its node refuses it; pauses of 20, 40, 80, 160 s leave about 7 in 600 s."""
    sim.start_operator()
    sim.world.load_s = 1e9
    sim.create_service(replicas=1)
    seen: set[str] = set()
    end = sim.now + 600
    while sim.now < end:
        sim.settle(until=lambda: bool(living(sim)), within_s=2000)
        [pod] = living(sim)
        seen.add(pod["metadata"]["name"])
        sim.advance(15)
        fail(sim, pod)
    assert len(seen) <= 10


def test_what_happens_once_is_told_once_however_many_rounds_a_pass_has(sim: Simulation) -> None:
    operator = sim.start_operator()
    told: list[tuple[str, str, str]] = []
    record = operator.recorder.record

    def noted(regarding: Any, event: Any) -> None:
        told.append((event.reason, event.instance, event.note))
        record(regarding, event)

    operator.recorder.record = noted  # type: ignore[method-assign]
    sim.create_service(replicas=2)
    sim.settle()
    sim.edit_service({"engine": {"args": ["--seed=1"]}})
    sim.settle()
    assert len(told) == len(set(told))
