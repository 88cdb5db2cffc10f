"""Instances that have to leave their node, drains that users ask for, and what evictions may take meanwhile."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.api import names
from sluice.api.agent import EnginePhase
from sluice.api.conditions import Reason
from sluice.plan.actions import Action, Apply, Delete, Result
from sluice.plan.disruption import BLOCKED_S, KIND, node_goes
from sluice.plan.facts import node_facts, pod_facts
from sluice.plan.rollout import Budget, held_step, next_step
from sluice.plan.scale import Member
from tests.unit.plan.cluster import Cluster, a_node, pools, served

REQUESTED = names.ANNOTATION_DRAIN_REQUESTED


def reasons(cluster: Cluster) -> list[str]:
    return [event.reason for event in cluster.events]


def budget_of(cluster: Cluster) -> int:
    [budget] = [b for (kind, _), b in cluster.children.items() if kind == KIND and "minAvailable" in b["spec"]]
    return int(budget["spec"]["minAvailable"])


def on_node(cluster: Cluster, node: str) -> list[str]:
    return [name for name in cluster.engine_pods() if cluster.pods[name]["spec"].get("nodeName") == node]


def serving(cluster: Cluster) -> int:
    return int(cluster.pool_status()["serving"])


def staying(cluster: Cluster) -> list[str]:
    return [name for name in cluster.live_pods() if pod_facts(cluster.pods[name]).drain_started_at is None]


def steps(cluster: Cluster, number: int, seconds: float = 1.0) -> Iterator[None]:
    """Passes with the rest of the world between them; the body of the loop looks at what came out of each."""
    for _ in range(number):
        cluster.pass_()
        yield
        cluster.play(seconds)


# Which nodes go


@pytest.mark.parametrize(
    ("spec", "metadata", "why"),
    [
        ({}, {}, ""),
        ({"unschedulable": True}, {}, "node n is cordoned"),
        ({}, {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "node n is being deleted"),
        ({"taints": [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]}, {}, "ToBeDeleted"),
        ({"taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]}, {}, "karpenter.sh/disrupted"),
        ({"taints": [{"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}]}, {}, ""),
        ({"taints": [{"key": "DeletionCandidateOfClusterAutoscaler", "effect": "PreferNoSchedule"}]}, {}, ""),
        ({"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}, {}, ""),
    ],
)
def test_a_node_goes_when_somebody_says_so(spec: dict[str, Any], metadata: dict[str, Any], why: str) -> None:
    told = node_goes(node_facts({"metadata": {"name": "n", **metadata}, "spec": spec}))
    assert bool(told) == bool(why)
    assert why in told


def test_of_an_unknown_node_nothing_is_said() -> None:
    assert node_goes(None) == ""


# Make before break


def test_s095_one_instance_on_a_cordoned_node_is_replaced_elsewhere_before_it_leaves() -> None:
    cluster = served(1)
    [old] = cluster.engine_pods()
    cluster.engines[old].in_flight = 3
    cluster.node = "node-2"
    cluster.cordon("node-1")
    for _ in steps(cluster, 12):
        assert serving(cluster) >= 1
        assert len(cluster.live_pods()) <= 2
        assert not evictable(cluster, old) or serving(cluster) >= 2 or old not in cluster.listed()
    assert len(on_node(cluster, "node-2")) == 1
    assert pod_facts(cluster.pods[old]).drain_reason == "NodeDrain"
    assert old not in cluster.deleted_by_us, "three requests are still in it"
    cluster.engines[old].in_flight = 0
    cluster.run()
    assert old not in cluster.pods
    assert len(cluster.engine_pods()) == serving(cluster) == 1
    assert reasons(cluster).count("Drained") == 1
    assert "RequestsCut" not in reasons(cluster)
    assert budget_of(cluster) == 1


def test_instances_of_a_drained_node_are_replaced_one_at_a_time_and_never_twice() -> None:
    cluster = served(3, rollout={"maxSurge": 2})
    before = set(cluster.engine_pods())
    created = cluster.created
    cluster.node = "node-2"
    cluster.cordon("node-1")
    for _ in steps(cluster, 40):
        assert serving(cluster) >= 3
        assert len(staying(cluster)) <= 4
    cluster.run()
    assert not before & set(cluster.pods)
    assert cluster.created - created == 3


def test_a_drained_node_needs_a_surge_also_where_rollouts_have_none() -> None:
    cluster = served(2, rollout={"maxSurge": 0, "maxUnavailable": 1})
    cluster.node = "node-2"
    cluster.cordon("node-1")
    for _ in steps(cluster, 40):
        assert serving(cluster) >= 2, "a replacement can be placed, so nobody has to miss"
    cluster.run()
    assert len(on_node(cluster, "node-2")) == 2


def test_without_room_elsewhere_it_stays_and_the_condition_has_the_schedulers_words() -> None:
    cluster = served(1)
    [old] = cluster.engine_pods()
    cluster.cordon("node-1")  # the only node
    for _ in steps(cluster, 5):
        assert cluster.condition("Reconciling")["reason"] == "NodeDrain"
    assert (cluster.pass_().requeue_after_s or BLOCKED_S) < BLOCKED_S, "it is looked at again by itself"
    cluster.now += BLOCKED_S
    for _ in steps(cluster, 5):
        told = cluster.condition("Reconciling")
        assert (told["status"], told["reason"]) == ("True", "NodeDrainBlocked")
        assert "0/2 nodes are available" in told["message"]
        assert "maxUnavailable" in told["message"]
        assert cluster.listed() == {old}
        assert not evictable(cluster, old)
    assert len(cluster.live_pods()) == 2, "no second replacement"
    assert reasons(cluster).count("NodeDrainBlocked") == 1
    assert cluster.condition("Ready")["status"] == "True"


def test_without_room_elsewhere_an_explicit_max_unavailable_lets_it_go() -> None:
    cluster = served(3, rollout={"maxUnavailable": 1})
    cluster.cordon("node-1")
    for _ in steps(cluster, 5):
        assert serving(cluster) == 3, "the replacement has its chance first"
        assert not any(evictable(cluster, name) for name in cluster.listed())
    cluster.now += BLOCKED_S
    for _ in steps(cluster, 30):
        assert serving(cluster) >= 2
    assert serving(cluster) == 2
    assert "NodeDrain" in {event.note.partition("(")[2].partition(")")[0] for event in cluster.events}


def test_an_uncordon_in_the_middle_leaves_no_surplus() -> None:
    cluster = served(2)
    before = set(cluster.engine_pods())
    cluster.node = "node-2"
    cluster.starts = False
    cluster.cordon("node-1")
    for _ in steps(cluster, 3):
        pass
    assert len(cluster.live_pods()) == 3
    cluster.cordon("node-1", on=False)
    for _ in steps(cluster, 10):
        assert serving(cluster) == 2
    assert set(cluster.engine_pods()) == before, "the replacement did not serve yet: it costs least"


def test_an_uncordon_calls_a_drain_off_only_if_the_pool_is_short_of_instances() -> None:
    cluster = served(2, rollout={"maxUnavailable": 1})
    for name in cluster.engine_pods():
        cluster.engines[name].in_flight = 1
    cluster.cordon("node-1")
    cluster.pass_()
    cluster.play()
    cluster.now += BLOCKED_S
    for _ in steps(cluster, 3):
        pass
    assert serving(cluster) == 1
    cluster.starts = False
    cluster.cordon("node-1", on=False)
    for _ in steps(cluster, 6):
        pass
    assert serving(cluster) == 2
    assert reasons(cluster).count("DrainCancelled") == 1
    cluster.starts = True
    for engine in cluster.engines.values():
        engine.in_flight = 0
    cluster.run()
    assert len(cluster.engine_pods()) == 2


def test_a_node_drain_during_a_rollout_keeps_one_budget() -> None:
    cluster = served(3)
    before = set(cluster.engine_pods())
    cluster.node = "node-2"
    cluster.cordon("node-1")
    cluster.edit(engine={"type": "Simulated", "args": ["--seed=2"]})
    for _ in steps(cluster, 40):
        assert serving(cluster) >= 3
        assert len(staying(cluster)) <= 4
    cluster.run()
    assert not before & set(cluster.pods)
    assert len(cluster.engine_pods()) == 3
    assert cluster.condition("RolloutComplete")["status"] == "True"


def test_a_node_drain_during_a_paused_rollout_stays_on_the_old_revision() -> None:
    cluster = served(2)
    revision = cluster.pool_status()["revision"]["current"]
    cluster.node = "node-2"
    cluster.cordon("node-1")
    cluster.edit(engine={"type": "Simulated", "args": ["--seed=2"]}, rollout={"paused": True})
    for _ in steps(cluster, 40):
        assert serving(cluster) >= 2
    cluster.run()
    assert on_node(cluster, "node-1") == []
    labels = [cluster.pods[name]["metadata"]["labels"] for name in cluster.engine_pods()]
    assert [label[names.LABEL_REVISION] for label in labels] == [revision, revision]


def test_a_scale_in_takes_the_instance_that_has_to_leave_anyway() -> None:
    cluster = served(2)
    cluster.node = "node-2"
    cluster.edit(pools=pools(3))
    cluster.run()
    [stays] = on_node(cluster, "node-2")
    created = cluster.created
    cluster.cordon("node-1")
    cluster.edit(pools=pools(1))
    cluster.run()
    assert cluster.engine_pods() == [stays]
    assert cluster.created == created


# A drain that a user asked for


def test_a_requested_drain_replaces_first_and_then_drains() -> None:
    cluster = served(2)
    asked = cluster.engine_pods()[0]
    cluster.annotate(asked, REQUESTED, "2026-11-29T12:00:00Z")
    for _ in steps(cluster, 20):
        assert serving(cluster) >= 2
    cluster.run()
    assert asked not in cluster.pods
    assert len(cluster.engine_pods()) == 2
    assert cluster.created == 3
    assert "DrainRequested" in next(e.note for e in cluster.events if e.reason == "Drained")


def test_an_empty_value_is_a_request_too() -> None:
    cluster = served(1)
    [asked] = cluster.engine_pods()
    cluster.annotate(asked, REQUESTED, "")
    cluster.run()
    assert asked not in cluster.pods


def test_a_request_taken_back_while_it_drains_makes_the_instance_serve_again() -> None:
    cluster = served(2)
    asked = cluster.engine_pods()[0]
    cluster.engines[asked].in_flight = 4
    cluster.annotate(asked, REQUESTED, "maintenance")
    for _ in steps(cluster, 10):
        pass
    assert pod_facts(cluster.pods[asked]).drain_reason == "DrainRequested"
    assert asked not in cluster.listed()
    cluster.annotate(asked, REQUESTED, None)
    for _ in steps(cluster, 3):
        assert serving(cluster) >= 2, "its replacement stays until it serves again"
    cluster.engines[asked].in_flight = 0
    cluster.run()
    assert asked in cluster.listed()
    assert pod_facts(cluster.pods[asked]).gate
    assert len(cluster.engine_pods()) == 2, "its replacement is one too many"
    assert reasons(cluster).count("DrainCancelled") == 1
    assert cluster.service["status"]["drains"] == []


def test_a_request_taken_back_before_the_drain_began_costs_the_replacement_only() -> None:
    cluster = served(1)
    [asked] = cluster.engine_pods()
    cluster.starts = False
    cluster.annotate(asked, REQUESTED, "x")
    for _ in steps(cluster, 3):
        assert cluster.condition("Reconciling")["reason"] == "DrainRequested"
    cluster.annotate(asked, REQUESTED, None)
    cluster.run()
    assert cluster.engine_pods() == [asked]
    assert cluster.listed() == {asked}


def test_a_request_taken_back_after_the_deletion_comes_too_late() -> None:
    cluster = served(1)
    [asked] = cluster.engine_pods()
    cluster.annotate(asked, REQUESTED, "x")
    for _ in steps(cluster, 20):
        if asked in cluster.deleted_by_us:
            break
    cluster.annotate(asked, REQUESTED, None)
    cluster.run()
    assert asked not in cluster.pods
    assert "DrainCancelled" not in reasons(cluster)


# Evictions


def ready(cluster: Cluster, name: str) -> bool:
    return pod_facts(cluster.pods[name]).ready


def evictable(cluster: Cluster, name: str) -> bool:
    """What the Eviction API would answer now (`AlwaysAllow` for pods that are not ready)."""
    pod = cluster.pods[name]
    if "deletionTimestamp" in pod["metadata"] or not ready(cluster, name):
        return True
    healthy = [n for n in cluster.live_pods() if ready(cluster, n)]
    return len(healthy) - 1 >= budget_of(cluster)


class Watched(Cluster):
    """After each single action the Eviction API is asked about every serving instance."""

    def _carry_out(self, action: Action) -> Result:
        before = len(self.supply())
        result = super()._carry_out(action)
        after = len(self.supply())
        assert after >= min(before, self.floor()), f"{action} leaves {after} instances"
        self.check()
        return result

    def floor(self) -> int:
        spec = self.service["spec"]
        return int(spec["pools"][0]["replicas"] - (spec.get("rollout") or {}).get("maxUnavailable", 0))

    def supply(self) -> set[str]:
        """Routed, and healthy in the eyes of Kubernetes."""
        return self.listed() & {name for name in staying(self) if ready(self, name)}

    def check(self) -> None:
        if any(kind == KIND for kind, _ in self.children):
            supply = self.supply()
            for name in supply:
                assert not evictable(self, name) or len(supply) - 1 >= self.floor(), f"{name} may be evicted: {supply}"


def watched(replicas: int, **spec: Any) -> Watched:
    made = served(replicas, **spec)
    return Watched(**{key: getattr(made, key) for key in made.__dataclass_fields__})


events = st.lists(
    st.sampled_from(["play", "play", "cordon", "uncordon", "ask", "take back", "edit", "suspect", "well", "evict"]),
    min_size=1,
    max_size=25,
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(events, st.integers(1, 3), st.sampled_from([{}, {"maxUnavailable": 1}, {"maxSurge": 0, "maxUnavailable": 1}]))
def test_no_eviction_that_is_allowed_takes_a_pool_below_its_floor_and_no_surplus_is_left(
    story: list[str], replicas: int, rollout: dict[str, int]
) -> None:
    cluster = watched(replicas, rollout=rollout)
    cluster.node = "node-2"
    cluster.nodes["node-2"] = a_node("node-2")
    for number, event in enumerate(story):
        happen(cluster, event, number)
        cluster.pass_()
        cluster.check()
        cluster.play()
        cluster.check()
    calm(cluster)
    cluster.run(120)
    assert len(cluster.engine_pods()) == replicas == serving(cluster)
    assert budget_of(cluster) == replicas - rollout.get("maxUnavailable", 0)


def happen(cluster: Watched, event: str, number: int) -> None:
    live = cluster.live_pods()
    some = live[number % len(live)] if live else ""
    acts: dict[str, Callable[[], None]] = {
        "cordon": lambda: cluster.cordon("node-1"),
        "uncordon": lambda: cluster.cordon("node-1", on=False),
        "ask": lambda: cluster.annotate(some, REQUESTED, "x"),
        "take back": lambda: cluster.annotate(some, REQUESTED, None),
        "edit": lambda: cluster.edit(engine={"type": "Simulated", "args": [f"--seed={number}"]}),
        "suspect": lambda: say(cluster, [some], EnginePhase.SUSPECT),
        "well": lambda: say(cluster, live, EnginePhase.READY),
        "evict": lambda: cluster.delete_pod(some) if evictable(cluster, some) else None,
    }
    if some and event in acts:
        acts[event]()


def say(cluster: Watched, pods: list[str], phase: EnginePhase) -> None:
    for name in pods:
        if name in cluster.engines:
            cluster.engines[name].phase = phase


def calm(cluster: Watched) -> None:
    cluster.cordon("node-1", on=False)
    say(cluster, cluster.live_pods(), EnginePhase.READY)
    for name in cluster.live_pods():
        cluster.annotate(name, REQUESTED, None)


def test_a_budget_is_raised_before_and_lowered_after_everything_else() -> None:
    cluster = served(1)
    cluster.node = "node-2"
    cluster.cordon("node-1")
    seen = []
    for _ in range(15):
        made = cluster.pass_()
        at = [n for n, a in enumerate(made.actions) if isinstance(a, Apply) and a.body["kind"] == KIND]
        if at:
            minimum = made.actions[at[0]].body["spec"]["minAvailable"]  # type: ignore[union-attr]  # an Apply, see above
            seen.append(minimum)
            assert at == ([0] if minimum == 2 else [len(made.actions) - 1])
        cluster.play()
    assert seen == [2, 1]


def test_a_steady_service_never_writes_its_budget_whatever_its_instances_do() -> None:
    cluster = served(2)
    before = budget_of(cluster)
    [name, _] = cluster.engine_pods()
    cluster.engines[name].silent = True
    for _ in steps(cluster, 5):
        assert budget_of(cluster) == before == 2


def test_the_budget_goes_with_its_pool() -> None:
    cluster = served(1)
    cluster.edit(pools=[{"name": "other", "replicas": 1}])
    cluster.run(120)
    cluster.run()
    budgets = [b for (kind, _), b in cluster.children.items() if kind == KIND and "minAvailable" in b["spec"]]
    assert [b["spec"]["selector"]["matchLabels"][names.LABEL_POOL] for b in budgets] == ["other"]


def test_a_foreign_budget_at_its_name_is_a_conflict_and_left_alone() -> None:
    cluster = served(1)
    [key] = [k for k, b in cluster.children.items() if k[0] == KIND and "minAvailable" in b["spec"]]
    cluster.children[key] = {"kind": KIND, "metadata": {"name": key[1], "uid": "x"}, "spec": {"minAvailable": 7}}
    cluster.pass_()
    assert cluster.children[key]["spec"] == {"minAvailable": 7}
    assert cluster.condition("Stalled")["reason"] == "NameConflict"


# Lost nodes, dying nodes


def test_s094_a_lost_instance_is_force_deleted_only_when_its_machine_is_known_to_be_off() -> None:
    cluster = served(2)
    lost = on_node(cluster, "node-1")
    cluster.node = "node-2"
    cluster.nodes["node-1"] = a_node("node-1", ready="Unknown")
    for name in lost:
        cluster.engines[name].silent = True
    for _ in steps(cluster, 20):
        assert set(lost) <= set(cluster.pods), "its kubelet may be alive"
        assert not set(lost) & cluster.listed()
    assert serving(cluster) == 2
    cluster.now += 3600
    for _ in steps(cluster, 3):
        assert set(lost) <= set(cluster.pods)
    taint = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
    cluster.nodes["node-1"]["spec"] = {"taints": [taint]}
    for _ in steps(cluster, 2):
        pass
    assert not set(lost) & set(cluster.pods)
    cluster.run()
    assert len(cluster.engine_pods()) == 2


def test_s094_an_instance_of_a_node_that_returns_is_never_served_twice() -> None:
    cluster = served(1)
    [lost] = cluster.engine_pods()
    cluster.node = "node-2"
    cluster.nodes["node-1"] = a_node("node-1", ready="Unknown")
    cluster.engines[lost].silent = True
    for _ in steps(cluster, 10):
        pass
    assert serving(cluster) == 1
    cluster.nodes["node-1"] = a_node("node-1")
    cluster.engines[lost].silent = False
    for _ in steps(cluster, 10):
        assert len(cluster.listed()) == 1
        assert lost not in cluster.listed()
    cluster.run()
    assert len(cluster.engine_pods()) == 1


def test_a_missing_node_object_proves_nothing_while_nodes_cannot_be_read() -> None:
    cluster = served(1)
    [gone] = cluster.engine_pods()
    cluster.delete_pod(gone)
    cluster.engines[gone].silent = True
    cluster.engines[gone].in_flight = 1
    del cluster.nodes["node-1"]
    assert not any(isinstance(a, Delete) for a in cluster.pass_().actions)


def test_s085_a_pod_that_its_kubelet_ends_is_unrouted_and_replaced_at_once() -> None:
    cluster = served(2)
    ending = cluster.engine_pods()[0]
    cluster.engines[ending].in_flight = 2
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
    cluster.pods[ending]["status"]["conditions"].append(condition)
    cluster.pass_()
    assert ending not in cluster.listed()
    assert not pod_facts(cluster.pods[ending]).gate
    assert len(cluster.live_pods()) == 3
    cluster.now += 20
    cluster.pods[ending]["status"]["phase"] = "Failed"
    cluster.engines[ending].in_flight = 0
    cluster.pass_()
    assert cluster.service["status"]["lastFailures"] == [], "a node's shutdown is no failure of the instance"
    cluster.run()
    assert ending not in cluster.pods
    assert len(cluster.engine_pods()) == 2


def test_an_eviction_that_was_only_tried_moves_nobody() -> None:
    cluster = served(1)
    [name] = cluster.engine_pods()
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    cluster.pods[name]["status"]["conditions"].append(condition)
    assert cluster.pass_().actions == ()


# The step alone


@st.composite
def members(draw: st.DrawFn) -> list[Member]:
    made = []
    for number in range(draw(st.integers(0, 8))):
        is_serving = draw(st.booleans())
        made.append(
            Member(
                f"i-{number}",
                number,
                is_new=draw(st.booleans()),
                is_serving=is_serving,
                may_serve=is_serving or draw(st.booleans()),
                in_flight=draw(st.none() | st.integers(0, 9)),
                moves=draw(st.sampled_from([None, None, Reason.NODE_DRAIN, Reason.DRAIN_REQUESTED])),
                is_kept=draw(st.booleans()),
            )
        )
    return made


@st.composite
def budgets(draw: st.DrawFn) -> Budget:
    unavailable = draw(st.integers(0, 3))
    return Budget(
        draw(st.integers(0, 6)), draw(st.integers(0, 3)), unavailable, draw(st.sampled_from([0, unavailable]))
    )


@settings(deadline=None)
@given(members(), st.integers(0, 3), budgets(), st.booleans())
def test_s025_no_step_takes_a_pool_below_its_floor_or_above_its_surge(
    pool: list[Member], leaving: int, budget: Budget, is_held: bool
) -> None:
    step = held_step(pool, budget, leaving) if is_held else next_step(pool, leaving, budget)
    gone = {leave.name for leave in step.leave}
    before = sum(m.is_serving for m in pool)
    after = sum(m.is_serving and m.name not in gone for m in pool)
    assert after >= min(before, budget.desired - budget.max_unavailable)
    if all(m.is_new for m in pool):
        assert after >= min(before, budget.desired - budget.moves_unavailable)
    assert len(gone) == len(step.leave)
    kept = len(pool) - len(gone)
    if step.create and (not is_held or any(m.moves for m in pool)):
        assert kept + leaving + step.create <= budget.desired + max(1, budget.max_surge)
    stay = [m for m in pool if not m.moves and m.name not in gone and (is_held or m.is_new)]
    assert step.create <= max(0, budget.desired - len(stay))


@settings(deadline=None)
@given(members(), budgets())
def test_what_moves_and_does_not_serve_goes_at_once_and_by_its_own_reason(pool: list[Member], budget: Budget) -> None:
    step = next_step(pool, 0, budget)
    told = {leave.name: leave.reason for leave in step.leave}
    for member in pool:
        if member.moves and not member.may_serve:
            assert told[member.name] is member.moves
