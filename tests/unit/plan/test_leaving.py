"""What a user reads about instances that leave: numbers of the engine, or that they are unknown; never a guess."""

from typing import Any

import pytest

from sluice.api import names
from sluice.api.agent import EnginePhase
from sluice.plan.facts import pod_facts
from sluice.plan.leaving import drains_text
from tests.unit.plan.cluster import Cluster, Engine, pools, served


def draining(in_flight: int | None, replicas: int = 1) -> tuple[Cluster, str]:
    """One busy instance, whose drain began in the pass before."""
    cluster = served(replicas)
    name = cluster.engine_pods()[0]
    cluster.engines[name].in_flight = in_flight
    cluster.edit(pools=pools(0))
    cluster.pass_()
    return cluster, name


def entry(cluster: Cluster) -> dict[str, Any]:
    [told] = cluster.service["status"]["drains"]
    return dict(told)


def test_s021_the_progress_of_a_drain_is_told_in_status_condition_and_events() -> None:
    cluster, name = draining(12)
    note = next(e.note for e in cluster.events if e.reason == "Draining")
    assert note == f"Instance {name} is draining (ScaleIn): 12 requests in flight, at most 600 s"
    cluster.engines[name].in_flight = 3
    for _ in range(41):
        cluster.play()
        cluster.pass_()
    assert entry(cluster) == {
        "instance": name,
        "reason": "ScaleIn",
        "inFlight": 3,
        "of": 12,
        "elapsedSeconds": 40,
        "timeoutSeconds": 600,
    }
    message = cluster.condition("Reconciling")["message"]
    assert f"{name}: draining 3 of 12 requests, 40 s of 600 s" in message
    assert [e.reason for e in cluster.events].count("Draining") == 1
    cluster.engines[name].in_flight = 0
    cluster.run()
    assert cluster.service["status"]["drains"] == []
    assert [e.reason for e in cluster.events].count("Drained") == 1


def test_a_long_drain_writes_its_status_six_times_a_minute() -> None:
    cluster, name = draining(600)
    told: list[dict[str, Any]] = []
    for second in range(120):
        cluster.engines[name].in_flight = 600 - second
        cluster.play()
        cluster.pass_()
        if not told or told[-1] != cluster.service["status"]:
            told.append(cluster.service["status"])
    assert len(told) <= 14


def test_an_unknown_number_is_said_to_be_unknown() -> None:
    cluster, name = draining(None)
    cluster.play()
    cluster.pass_()
    assert "inFlight" not in entry(cluster)
    assert "of" not in entry(cluster)
    assert f"{name}: draining an unknown number of requests, 0 s" in cluster.condition("Reconciling")["message"]
    assert "an unknown number of requests in flight" in next(e.note for e in cluster.events if e.reason == "Draining")


def test_requests_that_were_cut_are_counted_exactly() -> None:
    cluster, name = draining(1)
    for _ in range(605):
        cluster.play()
        cluster.pass_()
    assert name not in cluster.pods or "deletionTimestamp" in cluster.pods[name]["metadata"]
    [cut] = [e for e in cluster.events if e.reason == "RequestsCut"]
    assert cut.warning
    assert "1 requests in flight are cut" in cut.note


def test_a_pod_that_others_deleted_is_told_in_the_same_way() -> None:
    cluster = served(2)
    name = cluster.engine_pods()[0]
    cluster.engines[name].in_flight = 5
    cluster.delete_pod(name)
    for _ in range(25):
        cluster.pass_()
        cluster.play()
        cluster.engines[name].in_flight = 2
    told = entry(cluster)
    assert told["reason"] == "ExternalDelete"
    assert (told["inFlight"], told["of"], told["elapsedSeconds"], told["timeoutSeconds"]) == (2, 5, 20, 600)
    assert [e.reason for e in cluster.events].count("Draining") == 1


def test_a_short_grace_period_of_another_deleter_is_what_is_left_to_its_requests() -> None:
    cluster = served(1)
    [name] = cluster.engine_pods()
    cluster.engines[name].in_flight = 5
    cluster.delete_pod(name, grace_s=20)
    cluster.pass_()
    assert entry(cluster)["timeoutSeconds"] == 20


def test_an_instance_that_never_served_has_no_requests() -> None:
    cluster = served(1)
    cluster.edit(pools=pools(2))
    cluster.pass_()
    fresh = cluster.live_pods()[-1]
    cluster.engines[fresh] = Engine(EnginePhase.LOADING, in_flight=None)
    cluster.play()
    cluster.edit(pools=pools(1))
    cluster.pass_()
    assert "0 requests in flight" in next(e.note for e in cluster.events if e.reason == "Draining")
    assert pod_facts(cluster.pods[fresh]).drain_in_flight == 0


def test_status_and_message_stay_bounded() -> None:
    cluster = served(40)
    for engine in cluster.engines.values():
        engine.in_flight = 1
    cluster.edit(pools=pools(0))
    cluster.pass_()  # marks them
    cluster.pass_()
    assert len(cluster.service["status"]["drains"]) == 16
    assert cluster.pool_status()["draining"] == 40
    assert "and 37 more" in cluster.condition("Reconciling")["message"]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({"inFlight": 3, "of": 12, "elapsedSeconds": 40}, "a: draining 3 of 12 requests, 40 s of 600 s"),
        ({"inFlight": 13, "of": 12, "elapsedSeconds": 0}, "a: draining 13 requests, 0 s of 600 s"),
        ({"inFlight": 3, "elapsedSeconds": 40}, "a: draining 3 requests, 40 s of 600 s"),
        ({"of": 12}, "a: draining an unknown number of requests, an unknown time of 600 s"),
    ],
)
def test_text_of_one_drain(numbers: dict[str, int], text: str) -> None:
    assert drains_text([{"instance": "a", "reason": "ScaleIn", "timeoutSeconds": 600, **numbers}], 1) == text


def test_marks_of_another_version_are_passed_over() -> None:
    metadata = {"annotations": {names.ANNOTATION_DRAIN_IN_FLIGHT: "many", names.ANNOTATION_DRAIN_CANCELLED_AT: "soon"}}
    facts = pod_facts({"metadata": metadata})
    assert (facts.drain_in_flight, facts.drain_cancelled_at, facts.drain_requested) == (None, None, "")
