"""Scenarios of the behaviour catalogue at the level of planner, store and executor, by their numbers."""

from typing import Any

import pytest

from sluice.api import names
from sluice.api.config import EngineDefaults, Images, OperatorConfig
from sluice.runtime import kinds
from tests.fakeapi.cluster import Options
from tests.fakeapi.errors import ApiError
from tests.played.world import Mood
from tests.sim.client import Attempt, Crash
from tests.sim.simulation import NAMESPACE, Simulation, is_leaving

Object = dict[str, Any]
USER = Options("user")


def pods(sim: Simulation) -> set[str]:
    return {pod["metadata"]["name"] for pod in sim.engine_pods()}


def revisions(sim: Simulation) -> set[str]:
    return {pod["metadata"]["labels"][names.LABEL_REVISION] for pod in sim.engine_pods()}


def test_s002_services_a_and_a_1_do_not_share_children(sim: Simulation) -> None:
    sim.start_operator()
    sim.create_service("a", replicas=2)
    sim.create_service("a-1", replicas=2)
    sim.settle()
    assert sim.condition("Ready", "a")["status"] == sim.condition("Ready", "a-1")["status"] == "True"
    owners = {pod["metadata"]["name"]: pod["metadata"]["labels"][names.LABEL_SERVICE_UID] for pod in sim.engine_pods()}
    assert len(owners) == 4
    assert sorted(list(owners.values()).count(uid) for uid in set(owners.values())) == [2, 2]


def test_s008_lagging_view_makes_no_surplus_pod(serving: Simulation) -> None:
    """The watch of pods says nothing for a whole rollout: own writes are enough to count right."""
    serving.edit_service({"engine": {"args": ["--seed=1"]}})
    operator = serving.running
    for _ in range(200):
        for kind in operator.undelivered():
            while operator.pending[kind.name]:
                event = operator.pending[kind.name].popleft()
                if kind is not kinds.POD:
                    operator.hand_over(event)
        serving.run_pass()
        serving.machinery.round()
        serving.advance(0.5)
    live = [pod for pod in serving.engine_pods() if not is_leaving(pod)]
    assert len(live) <= 3 + 1  # maxSurge
    serving.heal_views()
    serving.settle()
    assert len(serving.engine_pods()) == 3


def test_s011_dead_pod_is_repaired_within_its_revision(serving: Simulation) -> None:
    before = revisions(serving)
    victim = serving.engine_pods()[0]["metadata"]["name"]
    serving.cluster.delete(serving.cluster.resource("", "pods"), NAMESPACE, victim, {"gracePeriodSeconds": 0}, USER)
    serving.settle()
    assert len(pods(serving)) == 3 and victim not in pods(serving)
    assert revisions(serving) == before
    assert len(serving.cluster.objects("controllerrevisions", "apps")) == 1


def test_s023_starting_instances_are_cancelled_before_serving_ones(serving: Simulation) -> None:
    serving.world.load_s = 600.0
    serving.scale(5)
    serving.settle(until=lambda: len(pods(serving)) == 5)
    old = {pod["metadata"]["name"] for pod in serving.engine_pods() if serving.is_available(pod)}
    assert len(old) == 3
    serving.scale(3)
    serving.settle(until=lambda: len(pods(serving)) == 3)
    assert pods(serving) == old


def test_s024_three_edits_in_a_row_keep_one_budget(serving: Simulation) -> None:
    """The invariants check the budget at every write; the newest revision wins."""
    for seed in (1, 2, 3):
        serving.edit_service({"engine": {"args": [f"--seed={seed}"]}})
        serving.settle(until=lambda seed=seed: len(revisions(serving)) > 1 or seed > 1, within_s=60)  # type: ignore[misc]  # mypy cannot infer a lambda's default
        for _ in range(5):
            serving.run_pass()
    serving.settle()
    assert len(revisions(serving)) == 1
    spec = serving.engine_pods()[0]["spec"]
    engine = next(c for c in spec["containers"] if c["name"] == names.CONTAINER_ENGINE)
    assert "--seed=3" in engine.get("args", []) + engine.get("command", [])


def test_s027_rollout_is_never_complete_early(serving: Simulation) -> None:
    serving.edit_service({"engine": {"args": ["--seed=1"]}})

    def is_complete() -> bool:
        done = serving.condition("RolloutComplete")
        return bool(done["status"] == "True" and done["observedGeneration"] == 2)

    serving.settle(until=is_complete)
    assert len(revisions(serving)) == 1
    assert all(serving.is_available(pod) for pod in serving.engine_pods())
    assert len(serving.engine_pods()) == 3


def test_s028_wiped_status_and_labels_restart_nothing(serving: Simulation) -> None:
    before = pods(serving)
    services = serving.cluster.resource(names.GROUP, names.SERVICE_PLURAL)
    serving.cluster.patch(services, NAMESPACE, "demo", {"status": None}, subresource="status", options=USER)
    serving.kill_operator()
    serving.start_operator()
    serving.settle()
    assert pods(serving) == before
    assert serving.condition("Ready")["status"] == "True"


def test_s060_terminating_pod_leaves_the_routers_before_it_stops(serving: Simulation) -> None:
    victim = serving.engine_pods()[0]
    engine = serving.engine(victim)
    assert engine is not None
    engine.in_flight = 1
    serving.cluster.delete(serving.cluster.resource("", "pods"), NAMESPACE, victim["metadata"]["name"], None, USER)
    serving.settle(until=lambda: len(serving.engine_pods(leaving=False)) == 3, within_s=120)
    assert not serving.is_routed(victim)
    assert victim["metadata"]["name"] in pods(serving), "preStop holds the engine while a request runs"
    engine.in_flight = 0
    serving.settle()
    assert victim["metadata"]["name"] not in pods(serving)


def test_s096_changed_defaults_roll_nothing(serving: Simulation) -> None:
    before = pods(serving)
    images = Images(vllm="vllm/vllm-openai:v9.9.9", engine="sluice-engine:9.9.9", router="sluice-router:0.1.0")
    changed = OperatorConfig(images=images, engine_defaults=EngineDefaults(simulated_args=("--new-default",)))
    serving.kill_operator()
    serving.start_operator(changed)
    serving.settle()
    assert pods(serving) == before
    assert not serving.invariants.created[3:]


def test_silent_agents_change_nothing(serving: Simulation) -> None:
    """Unknown is not zero: no replica less, nobody unrouted, nothing created."""
    for engine in serving.world.engines.values():
        engine.silent = True
    before = pods(serving)
    serving.settle(within_s=600)
    assert pods(serving) == before
    assert all(serving.is_available(pod) for pod in serving.engine_pods())


def test_silent_agents_survive_an_operator_restart(serving: Simulation) -> None:
    for engine in serving.world.engines.values():
        engine.silent = True
    for router in serving.world.routers.values():
        router.silent = True
    before = pods(serving)
    serving.kill_operator()
    serving.start_operator()
    serving.settle(within_s=600)
    assert pods(serving) == before
    assert all(serving.is_available(pod) for pod in serving.engine_pods())


def test_restarted_engine_is_unrouted_until_it_is_verified_again(serving: Simulation) -> None:
    """D14: another engine run at the same address is another engine."""
    pod = serving.engine_pods()[0]
    engine = serving.engine(pod)
    assert engine is not None
    engine.load_s = 30.0
    engine.restart(serving.now)
    serving.settle(until=lambda: serving.condition("Reconciling")["status"] == "True", within_s=60)
    assert not serving.is_routed(pod)
    serving.settle()
    assert serving.is_available(pod)
    assert serving.condition("Ready")["status"] == "True"


def test_suspect_engine_is_unrouted_and_comes_back(serving: Simulation) -> None:
    pod = serving.engine_pods()[0]
    engine = serving.engine(pod)
    assert engine is not None
    engine.mood = Mood.SUSPECT
    serving.settle(until=lambda: not serving.is_routed(pod) and serving.condition("Ready")["status"] == "False")
    engine.mood = Mood.WELL
    serving.settle()
    assert serving.is_available(pod)
    assert pod["metadata"]["name"] in pods(serving)


def test_suspended_service_drains_all_and_comes_back(serving: Simulation) -> None:
    serving.edit_service({"suspend": True})
    serving.settle()
    assert not pods(serving)
    assert (serving.condition("Ready")["status"], serving.condition("Ready")["reason"]) == ("True", "Suspended")
    serving.edit_service({"suspend": False})
    serving.settle()
    assert len(pods(serving)) == 3


def test_paused_rollout_keeps_the_old_revision(serving: Simulation) -> None:
    before = pods(serving)
    serving.edit_service({"rollout": {"paused": True}, "engine": {"args": ["--seed=1"]}})
    serving.settle()
    assert pods(serving) == before
    assert serving.condition("RolloutComplete")["status"] == "False"
    serving.edit_service({"rollout": {"paused": False}})
    serving.settle()
    assert not pods(serving) & before


@pytest.mark.parametrize("position", ["before", "after"])
def test_operator_killed_at_every_write_of_a_rollout_converges(position: str) -> None:
    """Every write in turn; the pods that were created are exactly those of an undisturbed run."""
    undisturbed = _rollout(None, position)
    for number in range(1, undisturbed.writes + 1):
        run = _rollout(number, position)
        assert run.crashed, f"write {number} of {undisturbed.writes} never happened"
        assert run.created == undisturbed.created, f"killed {position} write {number}"


class _Run:
    """A service with two instances is created and rolled once; the operator dies at one write."""

    def __init__(self, kill_at: int | None, position: str) -> None:
        self.writes = 0
        self.crashed = False
        self._kill_at = kill_at
        self.sim = Simulation(load_s=2.0)
        hook = "before_write" if position == "before" else "after_write"
        setattr(self.sim, hook, self._count)

    @property
    def created(self) -> int:
        return len(set(self.sim.invariants.created))

    def _count(self, attempt: Attempt) -> None:
        del attempt
        self.writes += 1
        if self.writes == self._kill_at:
            self.crashed = True
            raise Crash

    def settle(self) -> None:
        self.sim.settle()
        if self.sim.operator is None:
            self.sim.start_operator()
            self.sim.settle()


def _rollout(kill_at: int | None, position: str) -> _Run:
    run = _Run(kill_at, position)
    sim = run.sim
    try:
        sim.start_operator()
        sim.create_service(replicas=2)
        run.settle()
        sim.edit_service({"engine": {"args": ["--seed=1"]}})
        run.settle()
        assert len(sim.engine_pods()) == 2
        assert len(revisions(sim)) == 1
        assert sim.condition("Ready")["status"] == "True"
        assert sim.condition("RolloutComplete")["status"] == "True"
        with sim.writing_nothing():
            sim.kill_operator()
            sim.start_operator()
            sim.settle()
    finally:
        sim.close()
    return run


def test_s095_node_drain_replaces_before_it_evicts_and_ends(serving: Simulation) -> None:
    """`kubectl drain`: cordon, then evict again and again what the budget lets go."""
    node = serving.engine_pods()[0]["spec"]["nodeName"]
    serving.machinery.cordon(node)
    for engine in serving.world.engines.values():
        engine.in_flight = 1

    def is_empty() -> bool:
        left = [pod for pod in serving.engine_pods() if pod["spec"].get("nodeName") == node]
        for pod in left:
            if "deletionTimestamp" not in pod["metadata"]:
                _evict(serving, pod["metadata"]["name"])
            assert sum(serving.is_available(p) for p in serving.engine_pods()) >= 3
        for engine in serving.world.engines.values():
            engine.in_flight = 0
        return not left

    serving.settle(until=is_empty)
    serving.settle()
    assert len(pods(serving)) == 3
    with serving.writing_nothing():
        serving.kill_operator()
        serving.start_operator()
        serving.settle()


def test_drain_that_was_asked_for_is_called_off_while_the_operator_was_away(serving: Simulation) -> None:
    pod = serving.engine_pods()[0]
    name, resource = pod["metadata"]["name"], serving.cluster.resource("", "pods")
    engine = serving.engine(pod)
    assert engine is not None
    engine.in_flight = 1

    def ask(value: str | None) -> None:
        patch = {"metadata": {"annotations": {names.ANNOTATION_DRAIN_REQUESTED: value}}}
        serving.cluster.patch(resource, NAMESPACE, name, patch, options=USER)

    ask("maintenance")
    serving.settle(until=lambda: not serving.is_routed(pod) and len(pods(serving)) == 4)
    serving.kill_operator()
    ask(None)
    serving.start_operator()
    serving.settle(until=lambda: serving.is_routed(pod))
    engine.in_flight = 0
    serving.settle()
    assert name in pods(serving)
    assert len(pods(serving)) == 3
    assert serving.service()["status"].get("drains", []) == []


def _evict(sim: Simulation, name: str) -> None:
    try:
        sim.cluster.evict(NAMESPACE, name, {}, Options("drainer"))
    except ApiError as error:
        assert error.code == 429
