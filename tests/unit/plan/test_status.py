"""Status: what kubectl, kstatus, Flux and Argo CD see in each situation."""

import dataclasses
from typing import Any

import pytest

from sluice.api import names
from sluice.api.agent import EnginePhase
from sluice.api.status import MAX_PROBLEMS, InferenceServiceStatus
from sluice.plan.actions import Apply, Create, Outcome, Result
from sluice.plan.planner import plan
from sluice.plan.status import compute_status
from tests.unit.plan.cluster import Cluster, Engine, a_node, a_service, pools, served


def three(cluster: Cluster) -> tuple[str, str, str]:
    ready, reconciling, stalled = (cluster.condition(kind)["status"] for kind in ("Ready", "Reconciling", "Stalled"))
    return ready, reconciling, stalled


def starting() -> Cluster:
    cluster = Cluster(a_service({"pools": pools(2)}))
    cluster.starts = False
    cluster.pass_()
    return cluster


def rolling() -> Cluster:
    cluster = served(2)
    cluster.starts = False
    cluster.edit(engine={"type": "Simulated", "args": ["--seed=2"]})
    cluster.pass_()
    cluster.pass_()
    return cluster


def scaling_out() -> Cluster:
    cluster = served(2)
    cluster.starts = False
    cluster.edit(pools=pools(3))
    cluster.pass_()
    return cluster


def draining() -> Cluster:
    cluster = served(2)
    for engine in cluster.engines.values():
        engine.in_flight = 1
    cluster.edit(pools=pools(1))
    cluster.pass_()
    cluster.pass_()
    return cluster


def broken() -> Cluster:
    cluster = served(2)
    cluster.engines[cluster.engine_pods()[0]] = Engine(EnginePhase.HUNG, "Hung", message="no token for 60 s")
    cluster.pass_()
    return cluster


def refused() -> Cluster:
    cluster = Cluster(a_service({"engine": {"type": "vLLM"}}))
    cluster.pass_()
    return cluster


def idle() -> Cluster:
    cluster = Cluster(a_service({"pools": pools(0)}))
    cluster.run()
    return cluster


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (starting, ("Unknown", "True", "False")),
        (rolling, ("True", "True", "False")),
        (scaling_out, ("True", "True", "False")),
        (draining, ("True", "True", "False")),
        (broken, ("False", "True", "False")),
        (refused, ("False", "False", "True")),
        (lambda: served(2), ("True", "False", "False")),
        (idle, ("True", "False", "False")),
    ],
    ids=["starting", "rolling", "scaling out", "draining", "broken", "refused", "served", "idle"],
)
def test_ready_reconciling_stalled(make: Any, expected: tuple[str, str, str]) -> None:
    cluster = make()
    assert three(cluster) == expected
    status = cluster.service["status"]
    assert status["observedGeneration"] == cluster.service["metadata"]["generation"]
    assert {c["observedGeneration"] for c in status["conditions"]} == {status["observedGeneration"]}
    assert all(c["message"] for c in status["conditions"])


@pytest.mark.parametrize("make", [starting, rolling, draining, broken, refused, idle])
def test_status_fits_the_schema_and_holds_every_default(make: Any) -> None:
    status = make().service["status"]
    parsed = InferenceServiceStatus.model_validate(status)
    assert parsed.model_dump(mode="json", by_alias=True, exclude_none=True) == status


def test_a_service_that_lost_its_only_instance_is_not_ready() -> None:
    cluster = served(1)
    cluster.starts = False
    del cluster.pods[cluster.engine_pods()[0]]
    cluster.pass_()
    assert cluster.condition("Ready")["status"] == "False"


def test_the_transition_time_moves_with_the_status_alone() -> None:
    cluster = served(1)
    before = cluster.condition("Ready")["lastTransitionTime"]
    cluster.now += 1000
    cluster.edit(routing={"policy": "RoundRobin"})
    cluster.pass_()
    assert cluster.condition("Ready")["lastTransitionTime"] == before
    assert cluster.condition("Ready")["observedGeneration"] == 2


def test_s081_the_scheduler_s_words_are_on_the_object_and_in_one_event() -> None:
    cluster = starting()
    for name in cluster.engine_pods():
        cluster._condition(name, "PodScheduled", False)
        cluster.pods[name]["status"]["conditions"][-1]["message"] = (
            "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
        )
    for _ in range(3):
        cluster.pass_()
    ready = cluster.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "Unschedulable")
    assert "Insufficient nvidia.com/gpu" in ready["message"]
    told = [event for event in cluster.events if event.reason == "Unschedulable"]
    assert len(told) == 2  # one per instance, not one per pass
    assert all("Insufficient" in event.note for event in told)


def test_problems_are_bounded_worst_first_and_keep_their_since() -> None:
    cluster = served(20)
    for name in cluster.engine_pods():
        cluster.engines[name] = Engine(EnginePhase.SUSPECT, message="x" * 900)
    worst = cluster.engine_pods()[7]
    cluster.engines[worst] = Engine(EnginePhase.HUNG, message="y" * 900)
    cluster.pass_()
    problems = cluster.service["status"]["problems"]
    assert len(problems) == MAX_PROBLEMS
    assert problems[0]["name"] == worst
    since = problems[0]["since"]
    cluster.now += 500
    cluster.pass_()
    assert cluster.service["status"]["problems"][0]["since"] == since
    assert len(str(cluster.service["status"])) < 16 * 1024


def test_an_instance_that_the_router_cannot_reach_is_told_apart_from_one_that_is_ill() -> None:
    cluster = served(1)
    made = cluster.snapshot()
    router = next(iter(cluster.lists))
    [uid] = [pod.uid for pod in made.pods if pod.name == router]
    facts = made.routers[uid]
    sick = [w.model_copy(update={"status": "not_ready"}) for w in facts.state.workers]
    state = facts.state.model_copy(update={"workers": sick})
    seen = dataclasses.replace(made, routers={**made.routers, uid: dataclasses.replace(facts, state=state)})
    planned = plan(seen, cluster.now)
    assert planned.actions == ()  # no restart, no unroute
    status = compute_status(seen, planned, (), cluster.now)
    routed = next(c for c in status["conditions"] if c["type"] == "Routed")
    assert (routed["status"], routed["reason"]) == ("False", "RouterUnreachable")


def test_a_silent_router_makes_routing_unknown_not_false() -> None:
    cluster = served(1)
    cluster.silent_routers = {next(iter(cluster.lists))}
    cluster.pass_()
    assert cluster.condition("Routed")["status"] == "Unknown"
    assert cluster.condition("Ready")["status"] == "True"


def test_a_transient_failure_is_reconciling_and_a_final_refusal_stalled() -> None:
    cluster = Cluster(a_service({"pools": pools(1)}))
    snapshot = cluster.snapshot()
    made = plan(snapshot, cluster.now)
    child = next(a for a in made.actions if isinstance(a, Apply | Create))

    def conditions(outcome: Outcome, reason: str) -> dict[str, str]:
        status = compute_status(snapshot, made, [Result(child, outcome, reason, "why")], cluster.now)
        return {c["type"]: c["status"] for c in status["conditions"]}

    transient = conditions(Outcome.FAILED, "APIUnavailable")
    assert (transient["Reconciling"], transient["Stalled"]) == ("True", "False")
    final = conditions(Outcome.REFUSED, "Forbidden")
    assert (final["Reconciling"], final["Stalled"]) == ("False", "True")
    quota = conditions(Outcome.REFUSED, "QuotaExceeded")
    assert (quota["Reconciling"], quota["Stalled"]) == ("True", "False")


def test_weights_of_a_claim_are_named() -> None:
    cluster = Cluster(a_service({"engine": {"type": "vLLM"}, "model": {"uri": "pvc://weights/llama"}}))
    cluster.pass_()
    weights = cluster.condition("WeightsReady")
    assert (weights["reason"], "weights" in weights["message"]) == ("PersistentVolumeClaim", True)
    assert served(1).condition("WeightsReady")["reason"] == "NotNeeded"


def test_a_lost_node_is_named_beside_its_instance() -> None:
    cluster = served(2)
    name = cluster.engine_pods()[0]
    cluster.engines[name] = Engine(EnginePhase.HUNG, message="stuck")
    cluster.nodes["node-1"] = a_node("node-1")
    cluster.pass_()
    assert cluster.service["status"]["problems"][0]["node"] == "node-1"


@pytest.mark.parametrize("label", ["", "set-aside-by-alice-for-debugging", None], ids=["empty", "too long", "removed"])
def test_a_pod_whose_pool_label_was_edited_is_replaced_and_stops_no_status(label: str | None) -> None:
    cluster = served(2)
    labels = cluster.pods[cluster.engine_pods()[0]]["metadata"]["labels"]
    if label is None:
        del labels[names.LABEL_POOL]
    else:
        labels[names.LABEL_POOL] = label
    cluster.run()
    assert cluster.condition("Ready")["status"] == "True"
    assert [pool["name"] for pool in cluster.service["status"]["pools"]] == ["default"]


@pytest.mark.parametrize("epoch", [2**63 - 1, 10**8, -5])
def test_an_absurd_epoch_in_status_stops_no_creation(epoch: int) -> None:
    name = "a-pool-of-20-letters"
    cluster = Cluster(a_service({"pools": [{"name": name, "replicas": 1}]}))
    cluster.run()
    cluster.service["status"]["pools"][0]["epoch"] = epoch  # by hand
    cluster.edit(pools=[{"name": name, "replicas": 2}])
    cluster.run()
    assert cluster.pool_status()["serving"] == 2
    assert cluster.pool_status()["epoch"] == 2


def test_a_name_taken_by_a_foreign_pod_needs_nobody_and_the_next_build_has_another() -> None:
    cluster = Cluster(a_service({"pools": pools(1)}))
    snapshot = cluster.snapshot()
    made = plan(snapshot, cluster.now)
    pod = next(a for a in made.actions if isinstance(a, Create) and a.instance)
    taken = Result(pod, Outcome.REFUSED, "NameConflict", "exists already and is not ours")
    status = compute_status(snapshot, made, [taken], cluster.now)
    conditions = {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]}
    assert conditions["Stalled"][0] == "False"
    assert conditions["Reconciling"] == ("True", "NameConflict")
    cluster.service["status"] = status
    again = next(a for a in plan(cluster.snapshot(), cluster.now).actions if isinstance(a, Create) and a.instance)
    assert again.instance != pod.instance


def address(outcome: Outcome, reason: str = "", message: str = "") -> tuple[str | None, dict[str, Any]]:
    """(url, Routed) of a new service whose own Service ended so."""
    cluster = Cluster(a_service({"pools": pools(1)}))
    snapshot = cluster.snapshot()
    made = plan(snapshot, cluster.now)
    apply = next(a for a in made.actions if isinstance(a, Apply) and a.body["metadata"]["name"] == "chat")
    status = compute_status(snapshot, made, [Result(apply, outcome, reason, message)], cluster.now)
    return status.get("url"), next(c for c in status["conditions"] if c["type"] == "Routed")


def test_the_address_is_told_only_while_the_service_there_is_ours() -> None:
    url, _ = address(Outcome.DONE)
    assert url == "http://chat.team.svc/v1"
    assert address(Outcome.FAILED, "APIUnavailable", "away")[0] is None
    url, routed = address(Outcome.REFUSED, "NameConflict", "Service team/chat exists already and is not ours")
    assert url is None
    assert (routed["status"], routed["reason"]) == ("False", "NameConflict")
    assert "exists already" in routed["message"]
    cluster = served(1)
    assert cluster.service["status"]["url"] == "http://chat.team.svc/v1"
    cluster.children["Service", "chat"]["metadata"]["ownerReferences"] = []
    cluster.pass_()
    assert "url" not in cluster.service["status"]
    assert cluster.condition("Routed")["reason"] == "NameConflict"
