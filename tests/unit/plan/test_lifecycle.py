"""A service from apply to deletion, through the planner alone: what a user would notice at every step."""

import copy
import dataclasses

import pytest

from sluice.api import names
from sluice.api.agent import EnginePhase
from sluice.api.config import EngineDefaults, Images, Limits, OperatorConfig
from sluice.plan.actions import Apply, Create, Delete, PutWorkers, SetGate
from sluice.plan.facts import pod_facts
from sluice.plan.planner import plan
from sluice.plan.status import compute_status
from sluice.plan.times import format_time
from tests.unit.plan.cluster import Cluster, Engine, a_node, a_service, pools, served


def reasons(cluster: Cluster) -> list[str]:
    return [event.reason for event in cluster.events]


def revision_of(cluster: Cluster, pod: str) -> str:
    return str(cluster.pods[pod]["metadata"]["labels"][names.LABEL_REVISION])


def test_a_new_service_serves_and_then_rests() -> None:
    cluster = served(2)
    assert len(cluster.listed()) == 2
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.condition("Reconciling")["status"] == "False"
    assert cluster.service["status"]["summary"]["serving"] == "2/2"
    assert reasons(cluster) == ["Created", "Created", "InstanceServing", "InstanceServing", "RolloutComplete"]
    for _ in range(2):
        before = copy.deepcopy(cluster.service["status"])
        made = cluster.pass_()
        assert made.actions == ()
        assert made.events == ()
        assert made.requeue_after_s is None
        assert cluster.service["status"] == before


def test_an_instance_is_routed_only_after_a_real_inference() -> None:
    cluster = Cluster(a_service({"pools": pools(1)}))
    cluster.pass_()
    [name] = cluster.engine_pods()
    for phase in (EnginePhase.LOADING, EnginePhase.VERIFYING):
        cluster.engines[name] = Engine(phase)
        for _ in range(3):
            cluster.play()
            cluster.pass_()
        assert cluster.listed() == set()
        assert not pod_facts(cluster.pods[name]).gate
    cluster.engines[name].phase = EnginePhase.READY
    cluster.run()
    assert cluster.listed() == {name}
    assert pod_facts(cluster.pods[name]).gate


def test_s008_a_lagging_view_creates_no_surplus_pod() -> None:
    cluster = Cluster(a_service({"pools": pools(3)}))
    stale = cluster.snapshot()
    first, again = plan(stale, cluster.now), plan(stale, cluster.now + 5)
    names_of = [[a.body["metadata"]["name"] for a in made.actions if isinstance(a, Create)] for made in (first, again)]
    assert names_of[0] == names_of[1]
    assert len(set(names_of[0])) == 4  # three pods and their revision
    deletes = [a for a in plan(served(1).snapshot(), 0).actions if isinstance(a, Delete)]
    assert all(a.target.uid for a in deletes)


def test_s011_a_dead_pod_is_replaced_within_its_revision_under_a_new_name() -> None:
    cluster = served(2)
    gone, stays = cluster.engine_pods()
    before = revision_of(cluster, gone)
    del cluster.pods[gone]
    cluster.run()
    assert len(cluster.live_pods()) == 2
    assert stays in cluster.pods
    assert gone not in cluster.pods
    assert {revision_of(cluster, name) for name in cluster.engine_pods()} == {before}
    assert cluster.condition("RolloutComplete")["status"] == "True"
    assert len([kind for kind, _ in cluster.children if kind == "ControllerRevision"]) == 1
    assert cluster.pool_status()["epoch"] == 2


def test_s060_a_deleted_pod_leaves_the_routers_in_the_pass_that_creates_its_replacement() -> None:
    cluster = served(2)
    gone = cluster.engine_pods()[0]
    cluster.engines[gone].in_flight = 3
    cluster.delete_pod(gone)
    made = cluster.pass_()
    kinds = [type(action) for action in made.actions]
    assert kinds.index(PutWorkers) < kinds.index(Create)
    assert gone not in cluster.listed()
    assert not pod_facts(cluster.pods[gone]).gate
    assert gone in cluster.pods  # its three requests are still answered
    cluster.engines[gone].in_flight = 0
    cluster.run()
    assert len(cluster.listed()) == 2
    assert gone not in cluster.pods
    assert cluster.deleted_by_us == []


def test_a_failed_pod_is_unrouted_replaced_and_deleted() -> None:
    cluster = served(2)
    cluster.now += 60
    gone = cluster.engine_pods()[0]
    cluster.pods[gone]["status"].update(phase="Failed", reason="Evicted", message="the node was low on memory")
    made = cluster.pass_()
    assert [type(a) for a in made.actions] == [PutWorkers, PutWorkers, Create, Delete]
    assert "low on memory" in cluster.service["status"]["problems"][0]["message"]
    cluster.run()
    assert len(cluster.listed()) == 2
    assert reasons(cluster).count("PodFailed") == 1


def test_a_pod_that_fails_at_once_is_not_replaced_without_a_pause() -> None:
    cluster = served(1)
    cluster.delete_pod(cluster.engine_pods()[0])
    cluster.starts = False
    for _ in range(2):
        cluster.pass_()
        cluster.play()
    [fresh] = cluster.live_pods()
    cluster.pods[fresh]["status"].update(phase="Failed", reason="UnexpectedAdmissionError", message="no device")
    made = cluster.pass_()
    assert not any(isinstance(a, Create) for a in made.actions)
    assert made.requeue_after_s is not None
    cluster.now += 10
    assert any(isinstance(a, Create) for a in cluster.pass_().actions)


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
def test_a_dead_pod_is_replaced_whatever_our_clock_says(ahead_s: float) -> None:
    cluster = served(2)
    victim = cluster.engine_pods()[0]
    cluster.pods[victim]["status"]["phase"] = "Failed"
    cluster.now += ahead_s
    cluster.run_for(20)
    assert victim not in cluster.pods
    assert cluster.pool_status()["serving"] == 2


def test_a_lost_node_costs_no_capacity_for_longer_than_its_agents_are_silent() -> None:
    cluster = served(2)
    cluster.nodes["node-1"] = a_node("node-1", ready="Unknown")
    assert cluster.pass_().actions == ()  # the data path still answers (D17)
    lost = cluster.engine_pods()[0]
    cluster.engines[lost].silent = True
    cluster.nodes["node-2"] = a_node("node-2")
    made = cluster.pass_()
    assert any(isinstance(a, Create) for a in made.actions)
    assert lost not in cluster.listed()
    assert pod_facts(cluster.pods[lost]).drain_reason == "NodeLost"
    assert not any(isinstance(a, Delete) and a.grace_s == 0 for a in made.actions)


def test_a_silent_agent_keeps_its_routing_and_gets_a_problem() -> None:
    cluster = served(2)
    silent = cluster.engine_pods()[0]
    cluster.engines[silent].silent = True
    made = cluster.pass_()
    assert made.actions == ()
    assert silent in cluster.listed()
    assert cluster.pool_status()["serving"] == 2
    assert cluster.service["status"]["problems"][0]["reason"] == "AgentSilent"
    assert reasons(cluster).count("AgentSilent") == 1
    cluster.pass_()
    assert reasons(cluster).count("AgentSilent") == 1


def test_s059_a_restarted_operator_that_heard_nobody_yet_changes_nothing() -> None:
    cluster = served(3)
    status = copy.deepcopy(cluster.service["status"])
    snapshot = cluster.snapshot()
    blind = dataclasses.replace(snapshot, agents={}, routers={})
    made = plan(blind, cluster.now + 100)
    assert made.actions == ()
    assert compute_status(blind, made, (), cluster.now + 100) == status


def test_s059_a_restarted_operator_calls_nobody_lost_whom_it_has_not_asked_long_enough() -> None:
    cluster = served(3)
    cluster.nodes["node-1"] = a_node("node-1", ready="Unknown")
    assert cluster.pass_().actions == ()  # the agents speak
    snapshot = cluster.snapshot()
    for asked_s, is_lost in ((0.1, False), (14.0, False), (16.0, True)):
        fresh = dataclasses.replace(snapshot, agents={}, asked_s={pod.uid: asked_s for pod in snapshot.pods})
        assert bool(plan(fresh, cluster.now).actions) is is_lost, asked_s


def test_s059_a_ghost_in_a_router_is_removed_by_the_next_list() -> None:
    cluster = served(1)
    router = next(name for name in cluster.lists)
    held = cluster.lists[router]
    ghost = held.workers[0].model_copy(update={"id": "ghost", "url": "http://10.9.9.9:8000"})
    cluster.lists[router] = held.model_copy(update={"generation": "other", "workers": [*held.workers, ghost]})
    made = cluster.pass_()
    assert [type(a) for a in made.actions] == [PutWorkers]
    assert [w.id for w in cluster.lists[router].workers] == cluster.engine_pods()


def test_s064_a_fresh_router_gets_the_whole_list_and_serving_waits_for_it() -> None:
    cluster = served(2)
    router = next(name for name in cluster.lists)
    del cluster.pods[router]
    del cluster.lists[router]
    cluster.play()
    cluster.pass_()
    assert len(cluster.lists[router].workers) == 2
    cluster.run()
    assert cluster.pool_status()["serving"] == 2


def test_a_restarted_engine_is_unrouted_until_it_is_verified_again() -> None:
    cluster = served(2)
    name = cluster.engine_pods()[0]
    cluster.engines[name].run, cluster.engines[name].phase = 2, EnginePhase.LOADING
    cluster.pass_()
    assert name not in {w.id for held in cluster.lists.values() for w in held.workers}
    assert cluster.pool_status()["serving"] == 1
    cluster.engines[name].phase = EnginePhase.READY
    cluster.run()
    assert {w.engine_id for held in cluster.lists.values() for w in held.workers if w.id == name} == {f"{name}#2"}


def test_a_changed_spec_serves_the_new_revision_before_the_old_one_leaves() -> None:
    cluster = served(2)
    old = set(cluster.engine_pods())
    cluster.edit(engine={"type": "Simulated", "args": ["--seed=2"]})
    for _ in range(40):
        cluster.pass_()
        assert cluster.pool_status()["serving"] >= 2
        assert len(cluster.engine_pods()) <= 3
        cluster.play()
    cluster.run()
    assert not old & set(cluster.pods)
    assert len(cluster.listed()) == 2
    assert cluster.condition("RolloutComplete")["status"] == "True"
    assert reasons(cluster).count("Drained") == 2
    assert "RequestsCut" not in reasons(cluster)


def test_s024_three_edits_in_a_row_end_on_the_newest_without_losing_capacity() -> None:
    cluster = served(3)
    cluster.starts = False
    for seed in (2, 3, 4):
        cluster.edit(engine={"type": "Simulated", "args": [f"--seed={seed}"]})
        for _ in range(6):
            cluster.pass_()
            cluster.play()
            assert cluster.pool_status()["serving"] == 3
    cluster.starts = True
    for _ in range(60):
        cluster.pass_()
        assert cluster.pool_status()["serving"] >= 3
        cluster.play()
    cluster.run()
    args = {tuple(cluster.pods[n]["spec"]["containers"][0]["args"][-1:]) for n in cluster.engine_pods()}
    assert args == {("--seed=4",)}


def test_s027_a_rollout_is_never_reported_done_early() -> None:
    cluster = served(2)
    cluster.edit(engine={"type": "Simulated", "args": ["--seed=2"]})
    for _ in range(60):
        cluster.pass_()
        status = cluster.service["status"]
        done = (
            cluster.condition("RolloutComplete")["status"] == "True"
            or cluster.condition("Reconciling")["status"] == "False"
        )
        old = [n for n in cluster.engine_pods() if revision_of(cluster, n) != status["pools"][0]["revision"]["target"]]
        assert status["observedGeneration"] == 2
        assert not (done and old)
        cluster.play()
    assert cluster.condition("RolloutComplete")["status"] == "True"


def test_s028_wiped_status_and_metadata_start_no_second_deployment() -> None:
    cluster = served(2)
    current = cluster.pool_status()["revision"]["current"]
    pods = set(cluster.engine_pods())
    cluster.service["status"] = {}
    cluster.service["metadata"].pop("annotations", None)
    made = cluster.pass_()
    assert made.actions == ()
    assert set(cluster.engine_pods()) == pods
    assert cluster.pool_status()["revision"]["current"] == current
    # Wiped in the middle of a rollout: it goes on, from the same revision.
    cluster.edit(engine={"type": "Simulated", "args": ["--seed=2"]})
    cluster.pass_()
    cluster.service["status"] = {}
    cluster.pass_()
    assert cluster.pool_status()["revision"]["current"] == current
    cluster.run()
    assert len(cluster.engine_pods()) == 2


def test_s096_a_new_operator_with_other_defaults_changes_no_pod() -> None:
    cluster = served(2)
    pods = {n: cluster.pods[n]["metadata"]["uid"] for n in cluster.pods}
    cluster.config = OperatorConfig(
        images=Images(engine="sluice-engine:9", router="sluice-router:9", vllm="vllm:9"),
        engine_defaults=EngineDefaults(simulated_args=("--speed=2",)),
    )
    assert cluster.pass_().actions == ()
    cluster.run()
    assert {n: cluster.pods[n]["metadata"]["uid"] for n in cluster.pods} == pods
    # A replacement is built like its siblings; more routers do not restart the present ones.
    del cluster.pods[cluster.engine_pods()[0]]
    cluster.edit(routing={"replicas": 3})
    cluster.run()
    images = {c["image"] for n in cluster.engine_pods() for c in cluster.pods[n]["spec"]["containers"]}
    assert images == {"sluice-engine:0.1.0"}
    deployment = next(obj for (kind, _), obj in cluster.children.items() if kind == "Deployment")
    assert deployment["spec"]["replicas"] == 3
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == "sluice-router:0.1.0"


def test_a_rollback_reuses_the_stored_revision() -> None:
    cluster = served(1)
    first = cluster.pool_status()["revision"]["target"]
    cluster.edit(engine={"type": "Simulated", "args": ["--seed=2"]})
    cluster.run()
    cluster.config = OperatorConfig(images=Images(engine="sluice-engine:9"))
    cluster.edit(engine={"type": "Simulated"})
    cluster.run()
    assert cluster.pool_status()["revision"]["target"] == first
    [pod] = cluster.engine_pods()
    assert cluster.pods[pod]["spec"]["containers"][0]["image"] == "sluice-engine:0.1.0"


def test_revisions_that_nobody_needs_are_deleted_but_the_last_that_served_stays() -> None:
    cluster = served(1)
    kept = [cluster.pool_status()["revision"]["target"]]
    for seed in (2, 3):
        cluster.edit(engine={"type": "Simulated", "args": [f"--seed={seed}"]})
        cluster.run()
        kept.append(cluster.pool_status()["revision"]["target"])
    stored = {
        obj["metadata"]["labels"][names.LABEL_REVISION]
        for (kind, _), obj in cluster.children.items()
        if kind == "ControllerRevision"
    }
    assert stored == set(kept[1:])


def test_paused_nothing_moves_to_the_new_revision_but_a_dead_instance_comes_back() -> None:
    cluster = served(2)
    current = cluster.pool_status()["revision"]["current"]
    cluster.edit(engine={"type": "Simulated", "args": ["--seed=2"]}, rollout={"paused": True})
    del cluster.pods[cluster.engine_pods()[0]]
    cluster.run()
    assert {revision_of(cluster, n) for n in cluster.engine_pods()} == {current}
    assert len(cluster.listed()) == 2
    assert cluster.condition("RolloutComplete")["reason"] == "RolloutPaused"
    assert cluster.condition("Ready")["status"] == "True"
    cluster.edit(rollout={"paused": False})
    cluster.run()
    assert current not in {revision_of(cluster, n) for n in cluster.engine_pods()}


def test_s023_scaling_in_cancels_what_starts_and_drains_nobody_who_serves() -> None:
    cluster = served(2)
    serving = set(cluster.engine_pods())
    cluster.starts = False
    cluster.edit(pools=pools(5))
    cluster.pass_()
    assert len(cluster.engine_pods()) == 5
    cluster.edit(pools=pools(2))
    cluster.run()
    assert set(cluster.engine_pods()) == serving
    assert len(cluster.listed()) == 2


def test_a_drained_instance_is_unrouted_first_and_deleted_when_it_is_empty() -> None:
    cluster = served(2)
    for engine in cluster.engines.values():
        engine.in_flight = 4
    cluster.edit(pools=pools(1))
    made = cluster.pass_()
    assert not any(isinstance(a, Delete) for a in made.actions)
    [leaving] = [n for n in cluster.engine_pods() if pod_facts(cluster.pods[n]).drain_started_at is not None]
    assert leaving not in cluster.listed()
    for _ in range(10):
        cluster.play()
        made = cluster.pass_()
        assert not any(isinstance(a, Delete) for a in made.actions)
        assert made.requeue_after_s is not None
    cluster.engines[leaving].in_flight = 0
    cluster.run()
    assert leaving not in cluster.pods
    assert reasons(cluster).count("Drained") == 1
    assert cluster.pool_status()["serving"] == 1


def test_at_the_deadline_the_instance_goes_and_the_cut_requests_are_told_with_their_number() -> None:
    cluster = served(2, drain={"timeoutSeconds": 30})
    for engine in cluster.engines.values():
        engine.in_flight = 4
    cluster.edit(pools=pools(1))
    cluster.pass_()
    cluster.play(31)
    cluster.pass_()
    [cut] = [event for event in cluster.events if event.reason == "RequestsCut"]
    assert "4 requests" in cut.note
    assert cut.warning
    assert len(cluster.deleted_by_us) == 1


def test_a_removed_pool_goes_when_its_successor_serves() -> None:
    cluster = served(1)
    old = cluster.engine_pods()
    cluster.edit(pools=[{"name": "other", "replicas": 1}])
    for _ in range(3):
        cluster.pass_()
        assert cluster.listed() or not cluster.lists
        cluster.play()
    cluster.run()
    assert not set(old) & set(cluster.pods)
    assert len(cluster.listed()) == 1
    assert [pool["name"] for pool in cluster.service["status"]["pools"]] == ["other"]
    assert len([kind for kind, _ in cluster.children if kind == "ControllerRevision"]) == 1


def test_suspend_drains_everything_and_resume_brings_it_back() -> None:
    cluster = served(2)
    cluster.edit(suspend=True)
    cluster.run()
    assert cluster.engine_pods() == []
    ready = cluster.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("True", "Suspended")
    cluster.edit(suspend=False)
    cluster.run()
    assert len(cluster.listed()) == 2
    assert cluster.pool_status()["epoch"] == 2


def limited(replicas: int, limit: int) -> Cluster:
    cluster = Cluster(a_service({"pools": pools(replicas)}))
    cluster.config = OperatorConfig(limits=Limits(creations_per_service_and_minute=limit))
    return cluster


def test_the_first_creation_of_a_large_pool_is_paced_and_no_alarm() -> None:
    cluster = limited(5, limit=3)
    made = cluster.pass_()
    assert len(cluster.engine_pods()) == 3
    assert made.requeue_after_s is not None
    made = plan(dataclasses.replace(cluster.snapshot(), recent_creations=3), cluster.now + 10)
    assert not [a for a in made.actions if isinstance(a, Create)]
    assert made.requeue_after_s is not None
    assert "CreationLimit" not in reasons(cluster) + [event.reason for event in made.events]


@pytest.mark.parametrize("how", ["vanished", "failed"])
def test_the_circuit_breaker_stops_creating_and_says_so_when_pods_are_lost(how: str) -> None:
    cluster = limited(5, limit=3)
    cluster.pass_()
    cluster.play()
    victim = cluster.engine_pods()[0]
    if how == "vanished":
        del cluster.pods[victim]
    else:
        cluster.pods[victim]["status"]["phase"] = "Failed"
    made = plan(dataclasses.replace(cluster.snapshot(), recent_creations=3), cluster.now + 10)
    assert not [a for a in made.actions if isinstance(a, Create)]
    assert "CreationLimit" in [event.reason for event in made.events]
    assert made.requeue_after_s is not None


def test_s010_one_refused_child_stops_neither_the_others_nor_the_status() -> None:
    cluster = Cluster(a_service({"pools": pools(1)}))
    cluster.refuse = {"Pod"}
    cluster.pass_()
    assert ("Service", "chat") in cluster.children
    assert cluster.service["status"]["observedGeneration"] == 1
    assert cluster.service["status"]["problems"][0]["reason"] == "QuotaExceeded"
    reconciling = cluster.condition("Reconciling")
    assert (reconciling["status"], reconciling["reason"]) == ("True", "QuotaExceeded")
    cluster.refuse = set()
    cluster.run()
    assert cluster.condition("Ready")["status"] == "True"


def test_s010_an_unchanged_child_is_never_sent_again_and_defaults_of_the_server_are_no_difference() -> None:
    cluster = served(1)
    service = cluster.children["Service", "chat"]
    service["spec"] |= {"clusterIP": "10.1.2.3", "sessionAffinity": "None"}
    deployment = next(obj for (kind, _), obj in cluster.children.items() if kind == "Deployment")
    deployment["spec"]["template"]["spec"]["dnsPolicy"] = "ClusterFirst"
    deployment["spec"]["template"]["metadata"]["creationTimestamp"] = None
    assert cluster.pass_().actions == ()
    service["spec"]["selector"] = {"app": "elsewhere"}
    [apply] = cluster.pass_().actions
    assert isinstance(apply, Apply)
    assert "clusterIP" not in apply.body["spec"]


def test_s002_a_foreign_object_at_our_name_is_a_conflict_and_never_touched() -> None:
    cluster = Cluster(a_service({"pools": pools(1)}))
    foreign = {"metadata": {"name": "chat", "namespace": "team", "uid": "x"}, "spec": {"selector": {"app": "other"}}}
    cluster.children["Service", "chat"] = foreign
    made = cluster.pass_()
    applied = {(a.body["kind"], a.body["metadata"]["name"]) for a in made.actions if isinstance(a, Apply)}
    assert ("Service", "chat") not in applied
    assert cluster.children["Service", "chat"] == foreign
    stalled = cluster.condition("Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "NameConflict")
    assert cluster.condition("Reconciling")["status"] == "False"
    assert cluster.condition("Routed")["reason"] == "NameConflict"
    assert made.requeue_after_s is not None
    assert made.requeue_after_s <= 30
    del cluster.children["Service", "chat"]
    cluster.run()
    assert cluster.condition("Ready")["status"] == "True"


def test_a_foreign_pod_with_our_labels_is_never_adopted() -> None:
    cluster = served(1)
    stranger = copy.deepcopy(cluster.pods[cluster.engine_pods()[0]])
    stranger["metadata"] |= {"name": "stranger", "uid": "s", "ownerReferences": [{"uid": "else", "controller": True}]}
    cluster.pods["stranger"] = stranger
    cluster.engines["stranger"] = Engine()
    assert cluster.pass_().actions == ()
    assert "stranger" not in cluster.listed()


@pytest.mark.parametrize("finalizers", [["foregroundDeletion"], []])
def test_s083_deletion_looks_at_no_reference_takes_it_off_the_air_and_creates_nothing(finalizers: list[str]) -> None:
    cluster = Cluster(a_service({"engine": {"type": "vLLM"}, "model": {"uri": "pvc://c/m"}, "pools": pools(2)}))
    cluster.service["spec"]["accelerator"] = {"profileRef": {"name": "h100"}}
    cluster.profiles["h100"] = {"spec": {"resourceName": "nvidia.com/gpu"}}
    cluster.run()
    del cluster.profiles["h100"]
    cluster.service["metadata"] |= {"deletionTimestamp": "2027-01-15T08:00:00Z", "finalizers": finalizers}
    made = cluster.pass_()
    assert {type(a) for a in made.actions} == {PutWorkers}
    assert all(not held.open and not held.workers for held in cluster.lists.values())
    del cluster.pods[cluster.engine_pods()[0]]
    assert cluster.pass_().actions == ()


def test_deletion_that_anothers_finalizer_holds_up_creates_nothing() -> None:
    cluster = served(2)
    meta = cluster.service["metadata"]
    meta |= {"deletionTimestamp": format_time(cluster.now), "finalizers": ["example.com/backup"]}
    cluster.run_for(10)
    assert cluster.created == 2
    assert cluster.condition("Reconciling")["reason"] == "Draining"


def test_deletion_that_orphans_the_children_leaves_them_serving() -> None:
    cluster = served(1)
    cluster.service["metadata"] |= {"deletionTimestamp": "2027-01-15T08:00:00Z", "finalizers": ["orphan"]}
    assert cluster.pass_().actions == ()
    assert len(cluster.listed()) == 1


def test_a_spec_that_cannot_be_read_stops_nothing_that_runs() -> None:
    cluster = served(2)
    good = copy.deepcopy(cluster.service["spec"])
    cluster.edit(pools="many")
    for _ in range(3):
        cluster.pass_()
        cluster.play()
    assert len(cluster.listed()) == 2
    accepted, stalled = cluster.condition("Accepted"), cluster.condition("Stalled")
    assert accepted["status"] == "False"
    assert "spec.pools" in accepted["message"]
    assert stalled["status"] == "True"
    # Safety goes on: a deleted pod is unrouted even now.
    gone = cluster.engine_pods()[0]
    cluster.delete_pod(gone)
    cluster.pass_()
    assert gone not in cluster.listed()
    cluster.edit(**good)
    cluster.run()
    assert len(cluster.listed()) == 2


def test_an_owned_flag_is_refused_by_name_and_the_running_revision_is_kept_and_repaired() -> None:
    cluster = served(2)
    cluster.edit(engine={"type": "Simulated", "args": ["--seed=1", "--port=1"]})
    del cluster.pods[cluster.engine_pods()[0]]
    cluster.run()
    accepted = cluster.condition("Accepted")
    assert accepted["status"] == "False"
    assert "spec.engine.args[1]: '--port=1'" in accepted["message"]
    assert len(cluster.listed()) == 2


def test_a_missing_profile_is_named_and_creates_nothing() -> None:
    cluster = Cluster(a_service({"engine": {"type": "vLLM"}, "model": {"uri": "pvc://claim/m"}}))
    cluster.service["spec"]["accelerator"] = {"profileRef": {"name": "h100"}}
    cluster.pass_()
    assert cluster.engine_pods() == []
    accepted = cluster.condition("Accepted")
    assert (accepted["reason"], "'h100'" in accepted["message"]) == ("ProfileNotFound", True)
    cluster.profiles["h100"] = {"spec": {"resourceName": "nvidia.com/gpu"}}
    cluster.pass_()
    assert len(cluster.engine_pods()) == 1


def test_a_silent_router_holds_the_drain_until_its_pod_is_not_ready() -> None:
    cluster = served(2)
    router = next(name for name in cluster.lists)
    cluster.silent_routers = {router}
    cluster.edit(pools=pools(1))
    for _ in range(6):
        cluster.pass_()
        cluster.play()
    assert cluster.deleted_by_us == []
    cluster._condition(router, "Ready", False)
    cluster.pass_()
    assert len(cluster.deleted_by_us) == 1


def test_gates_open_only_when_every_router_lists_the_instance() -> None:
    cluster = Cluster(a_service({"pools": pools(1)}))
    for _ in range(2):
        cluster.pass_()
        cluster.play()
    opened = [a for a in cluster.pass_().actions if isinstance(a, SetGate)]
    assert all(len(held.workers) == 1 for held in cluster.lists.values())
    assert [a.routable for a in opened] == [True]


def test_the_user_can_see_that_a_reconcile_was_asked_for_and_done() -> None:
    cluster = served(1)
    cluster.service["metadata"]["annotations"] = {names.ANNOTATION_RECONCILE_AT: "now"}
    cluster.pass_()
    assert cluster.service["status"]["lastHandledReconcileAt"] == "now"
