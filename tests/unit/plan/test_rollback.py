"""Failing instances and failing rollouts through the planner: what a user sees, and how little is created."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from sluice.api import names
from sluice.api.agent import EnginePhase, Signal
from sluice.plan.facts import pod_facts
from sluice.plan.times import format_time
from tests.unit.plan.cluster import Cluster, Engine, a_node, a_service, pools, served

Break = Callable[[Cluster, str], None]
NEW: dict[str, Any] = {"type": "Simulated", "args": ["--seed=2"]}


def on_revision(cluster: Cluster, revision: str) -> list[str]:
    return [n for n in cluster.live_pods() if cluster.pods[n]["metadata"]["labels"][names.LABEL_REVISION] == revision]


def crash_first_request(cluster: Cluster, name: str) -> None:
    """Ready, then it dies at its first request, every time; the kubelet restarts it after 10 s."""
    [engine] = cluster.pods[name]["status"].get("containerStatuses") or [{}]
    if "running" in engine.get("state", {}):
        cluster.crash(name, 1, "RuntimeError: no kernel image")
    elif engine:
        cluster.restart(name)


def bad_image(cluster: Cluster, name: str) -> None:
    state = {"waiting": {"reason": "ImagePullBackOff", "message": "manifest unknown"}}
    cluster.pods[name]["status"].update(phase="Pending")
    cluster.pods[name]["status"]["containerStatuses"] = [{"name": "engine", "state": state, "restartCount": 0}]


def hang_at_load(cluster: Cluster, name: str) -> None:
    """Never lists its model; says so for longer than the limit."""
    cluster.engines[name] = Engine(EnginePhase.LOADING, started_s_ago=cluster.now - created_at(cluster, name))


def created_at(cluster: Cluster, name: str) -> float:
    return pod_facts(cluster.pods[name]).created_at


def live_on(cluster: Cluster, revision: str, how: Break, *, seconds: float, step_s: float = 15.0) -> None:
    """Passes for so long; every instance of the revision does what `how` says."""
    end = cluster.now + seconds
    while cluster.now < end:
        cluster.pass_()
        cluster.play(step_s)
        for name in on_revision(cluster, revision):
            if "nodeName" in cluster.pods[name]["spec"]:
                how(cluster, name)


def rolled(how: Break, *, seconds: float = 600, replicas: int = 2, **rollout: Any) -> tuple[Cluster, int]:
    """A service that serves, then gets a spec whose instances fail; and how many pods that cost."""
    cluster = served(replicas, rollout=rollout, health={"startupTimeoutSeconds": 120})
    created = cluster.created
    cluster.edit(engine=NEW)
    cluster.pass_()
    live_on(cluster, cluster.pool_status()["revision"]["target"], how, seconds=seconds)
    return cluster, cluster.created - created


@pytest.mark.parametrize(
    ("how", "cause"),
    [(bad_image, "ImagePull"), (crash_first_request, "RestartsExhausted"), (hang_at_load, "StartupTimeout")],
)
def test_a_bad_rollout_goes_back_and_creates_next_to_nothing(how: Break, cause: str) -> None:
    cluster = served(2, health={"startupTimeoutSeconds": 120})
    old = set(cluster.engine_pods())
    created = cluster.created
    cluster.edit(engine=NEW)
    cluster.pass_()
    target = cluster.pool_status()["revision"]["target"]
    for _ in range(60):
        live_on(cluster, target, how, seconds=15)
        assert cluster.pool_status()["serving"] == 2, "the old revision loses nothing"
        assert cluster.condition("Ready")["status"] == "True"
    assert cluster.created - created <= 6
    assert set(cluster.live_pods()) == old
    done = cluster.condition("RolloutComplete")
    assert (done["status"], done["reason"]) == ("False", "RolledBack")
    assert cause in done["message"]
    assert cluster.condition("Stalled")["status"] == "True"
    assert cluster.condition("Reconciling")["status"] == "False"
    assert cluster.condition("Ready")["observedGeneration"] == 2
    assert [e.reason for e in cluster.events].count("RolledBack") == 1
    before = copy.deepcopy(cluster.service["status"])
    assert cluster.pass_().actions == ()
    assert cluster.service["status"] == before


def test_hold_keeps_what_is_there_and_still_repairs_what_serves() -> None:
    cluster, created = rolled(crash_first_request, onFailure="Hold")
    target = cluster.pool_status()["revision"]["target"]
    assert created == 1
    [kept] = on_revision(cluster, target)
    done = cluster.condition("RolloutComplete")
    assert (done["status"], done["reason"]) == ("False", "RestartsExhausted")
    assert cluster.condition("Stalled")["status"] == "True"
    assert cluster.condition("Ready")["status"] == "True"
    victim = next(n for n in cluster.live_pods() if n != kept)
    del cluster.pods[victim]
    live_on(cluster, target, crash_first_request, seconds=60)
    assert cluster.pool_status()["serving"] == 2
    assert on_revision(cluster, target) == [kept]


def test_a_corrected_spec_rolls_out_and_so_does_going_back_by_hand() -> None:
    cluster, _ = rolled(bad_image)
    cluster.edit(engine={"type": "Simulated", "args": ["--seed=3"]})
    cluster.run()
    assert cluster.condition("RolloutComplete")["status"] == "True"
    assert cluster.condition("Stalled")["status"] == "False"
    cluster, _ = rolled(bad_image)
    pods = set(cluster.live_pods())
    cluster.edit(engine={"type": "Simulated"})
    cluster.run()
    assert cluster.condition("RolloutComplete")["status"] == "True"
    assert set(cluster.live_pods()) == pods


def test_scaling_a_rolled_back_service_scales_what_serves_and_is_no_new_try() -> None:
    cluster, _ = rolled(bad_image)
    current, target = (cluster.pool_status()["revision"][key] for key in ("current", "target"))
    cluster.edit(pools=pools(4))
    live_on(cluster, target, bad_image, seconds=300)
    assert len(on_revision(cluster, current)) == 4
    assert on_revision(cluster, target) == []
    assert cluster.condition("RolloutComplete")["reason"] == "RolledBack"
    cluster.edit(suspend=True)
    cluster.run(passes=200)
    assert cluster.engine_pods() == []
    cluster.edit(suspend=False)
    live_on(cluster, target, bad_image, seconds=300)
    assert len(on_revision(cluster, current)) == 4


def test_retry_at_is_a_new_try_and_is_echoed() -> None:
    cluster, _ = rolled(crash_first_request)
    target = cluster.pool_status()["revision"]["target"]
    cluster.service["metadata"]["annotations"] = {names.ANNOTATION_RETRY_AT: "now"}
    cluster.run(passes=200)
    assert cluster.service["status"]["lastHandledRetryAt"] == "now"
    assert len(on_revision(cluster, target)) == 2
    assert cluster.condition("RolloutComplete")["status"] == "True"


def test_a_rollout_without_progress_for_the_deadline_has_failed() -> None:
    cluster = served(2, rollout={"progressDeadlineSeconds": 300, "maxUnavailable": 0})
    cluster.node = ""
    cluster.edit(engine=NEW)
    cluster.run_for(290, step_s=10)
    assert cluster.condition("RolloutComplete")["reason"] == "NoSurgeCapacity"
    assert "0/2 nodes are available" in cluster.condition("RolloutComplete")["message"]
    assert cluster.condition("Stalled")["status"] == "False"
    cluster.run_for(60, step_s=10)
    assert cluster.condition("RolloutComplete")["reason"] == "RolledBack"
    assert "ProgressDeadlineExceeded" in cluster.condition("RolloutComplete")["message"]
    assert cluster.pool_status()["serving"] == 2


def test_a_slow_rollout_that_moves_on_does_not_fail() -> None:
    cluster = served(3, rollout={"progressDeadlineSeconds": 100})
    cluster.edit(engine=NEW)
    for _ in range(6):
        cluster.starts = False
        cluster.run_for(80, step_s=10)
        cluster.starts = True
        cluster.run_for(10)
        assert cluster.condition("Stalled")["status"] == "False"
    cluster.run()
    assert cluster.condition("RolloutComplete")["status"] == "True"


def test_a_first_rollout_that_fails_is_stalled_tries_on_slowly_and_may_still_succeed() -> None:
    cluster = Cluster(a_service({"pools": pools(1), "health": {"startupTimeoutSeconds": 120}}))
    cluster.pass_()
    target = cluster.pool_status()["revision"]["target"]
    live_on(cluster, target, crash_first_request, seconds=3600, step_s=30)
    assert cluster.condition("Stalled")["status"] == "True"
    assert cluster.condition("Stalled")["reason"] == "RestartsExhausted"
    assert cluster.condition("Ready")["status"] != "True"
    assert cluster.created <= 10, "an hour of crashes"
    for name in set(cluster.live_pods()) & set(cluster.engines):  # from now on it answers
        cluster.restart(name)
        cluster.engines[name] = Engine(run=99)
    cluster.run_for(900, step_s=10)
    assert cluster.pool_status()["serving"] == 1
    assert cluster.condition("Stalled")["status"] == "False"
    assert cluster.condition("RolloutComplete")["status"] == "True"


def test_a_revision_that_never_served_is_nothing_to_go_back_to() -> None:
    cluster = Cluster(a_service({"pools": pools(1), "health": {"startupTimeoutSeconds": 120}}))
    cluster.pass_()
    live_on(cluster, cluster.pool_status()["revision"]["target"], bad_image, seconds=60)
    cluster.edit(engine=NEW)
    cluster.pass_()
    second = cluster.pool_status()["revision"]["target"]
    live_on(cluster, second, bad_image, seconds=600)
    assert len(on_revision(cluster, second)) == 1
    assert cluster.condition("RolloutComplete")["reason"] == "ImagePull"
    assert "current" not in cluster.pool_status()["revision"] or not cluster.pool_status()["revision"]["current"]


def test_a_lost_status_costs_a_failed_rollout_one_more_try_and_no_capacity() -> None:
    cluster, _ = rolled(crash_first_request)
    target = cluster.pool_status()["revision"]["target"]
    created = cluster.created
    cluster.service["status"] = {}
    live_on(cluster, target, crash_first_request, seconds=900)
    assert cluster.created - created <= 2
    assert cluster.condition("RolloutComplete")["reason"] == "RolledBack"
    assert cluster.pool_status()["serving"] == 2


# --------------------------------------------------------------------------------------------------- single instances
def test_s011_a_crash_within_the_budget_is_left_to_the_kubelet() -> None:
    cluster = served(2)
    victim = cluster.engine_pods()[0]
    for _ in range(3):
        cluster.crash(victim)
        cluster.pass_()
        assert victim not in cluster.listed()
        cluster.play(10)
        cluster.restart(victim)
        cluster.engines[victim] = Engine(run=cluster.engines[victim].run)
        cluster.run()
    assert victim in cluster.listed()
    assert cluster.created == 2
    assert cluster.service["status"]["lastFailures"][0]["replaced"] is False


def test_s092_over_the_budget_the_instance_is_replaced_rather_elsewhere_and_its_evidence_stays() -> None:
    cluster = served(2)
    victim, other = cluster.engine_pods()
    for _ in range(4):
        cluster.crash(victim, 139, "Segmentation fault in libnccl")
        cluster.pass_()
        cluster.play(10)
        if victim in cluster.pods:
            cluster.restart(victim)
    cluster.run()
    assert victim not in cluster.pods
    assert other in cluster.pods
    assert cluster.pool_status()["serving"] == 2
    kept = cluster.service["status"]["lastFailures"][0]
    assert (kept["instance"], kept["node"], kept["exitCode"], kept["replaced"]) == (victim, "node-1", 139, True)
    assert "libnccl" in kept["message"]
    [fresh] = set(cluster.engine_pods()) - {other}
    preferred = cluster.pods[fresh]["spec"]["affinity"]["nodeAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    assert preferred[0]["preference"]["matchExpressions"][0]["values"] == ["node-1"]
    labels = {cluster.pods[n]["metadata"]["labels"][names.LABEL_REVISION] for n in (fresh, other)}
    assert len(labels) == 1, "a failure makes no revision"


def refused_by(cluster: Cluster, node: str) -> None:
    """The node's kubelet refuses every pod that the scheduler sends there (S093)."""
    for name in cluster.live_pods():
        pod = cluster.pods[name]
        if "nodeName" not in pod["spec"] and node not in pod_facts(pod).avoids:
            pod["spec"]["nodeName"] = node
            pod["status"] = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "device unhealthy"}


def test_s093_a_node_that_refuses_pods_is_avoided_for_a_while_and_the_service_heals_elsewhere() -> None:
    cluster = served(2)
    cluster.nodes["bad"] = a_node("bad")
    created = cluster.created
    cluster.edit(pools=pools(3))
    for _ in range(60):
        cluster.pass_()
        refused_by(cluster, "bad")
        cluster.play(5)
    assert cluster.pool_status()["serving"] == 3
    assert cluster.created - created == 3, "two were refused, the third went elsewhere"
    [avoided] = cluster.service["status"]["avoidedNodes"]
    assert avoided["node"] == "bad"
    assert "AdmissionFailed" in avoided["reason"]
    assert "device unhealthy" in cluster.service["status"]["lastFailures"][0]["message"]
    assert [e.reason for e in cluster.events].count("NodeAvoided") == 1
    cluster.run()
    cluster.now += 2 * 3600
    cluster.edit(pools=pools(4))
    cluster.run()
    newest = max(cluster.engine_pods(), key=lambda n: created_at(cluster, n))
    assert pod_facts(cluster.pods[newest]).avoids == ()


def test_a_quarantine_never_leaves_the_service_without_any_node() -> None:
    cluster = served(2)
    entries = [
        {"node": name, "until": format_time(cluster.now + 1700 + number), "reason": "2 instances failed there"}
        for number, name in enumerate(("node-1", "node-2"))
    ]
    cluster.service["status"]["avoidedNodes"] = entries
    cluster.edit(pools=pools(3))
    cluster.pass_()
    for _ in range(60):
        [*waiting] = [n for n in cluster.live_pods() if "nodeName" not in cluster.pods[n]["spec"]]
        cluster.node = "" if any("node-1" in pod_facts(cluster.pods[n]).avoids for n in waiting) else "node-1"
        cluster.play(5)
        cluster.pass_()
    assert cluster.pool_status()["serving"] == 3
    until = {e["node"]: e["until"] for e in cluster.service["status"]["avoidedNodes"]}
    assert until["node-1"] < format_time(cluster.now) < until["node-2"], "the oldest is used again, the other is not"


# ------------------------------------------------------------------------------------------------- no room for a surge
def full(cluster: Cluster, places: int) -> None:
    """The cluster has room for so many instances."""
    held = [n for n in cluster.engine_pods() if "nodeName" in cluster.pods[n]["spec"]]
    cluster.node = "node-1" if len(held) < places else ""


def test_s029_a_full_cluster_is_rolled_one_by_one_when_the_user_set_no_limit() -> None:
    cluster = served(2)
    cluster.edit(engine=NEW)
    fewest, texts = 2, set()
    for _ in range(80):
        full(cluster, 2)
        cluster.pass_()
        fewest = min(fewest, cluster.pool_status()["serving"])
        texts.add(cluster.condition("RolloutComplete")["reason"])
        full(cluster, 2)
        cluster.play(5)
    assert cluster.condition("RolloutComplete")["status"] == "True"
    assert fewest == 1
    assert "NoSurgeCapacity" in texts


def test_s029_an_explicit_zero_is_obeyed_and_says_what_is_missing() -> None:
    cluster = served(2, rollout={"maxUnavailable": 0})
    pods = set(cluster.engine_pods())
    cluster.edit(engine=NEW)
    for _ in range(60):
        full(cluster, 2)
        cluster.pass_()
        assert cluster.pool_status()["serving"] == 2
        cluster.play(5)
    assert pods <= set(cluster.live_pods())
    done = cluster.condition("RolloutComplete")
    assert done["reason"] == "NoSurgeCapacity"
    assert "maxUnavailable is 0" in done["message"]
    cluster.node = "node-1"
    cluster.run(passes=100)
    assert cluster.condition("RolloutComplete")["status"] == "True"


def test_s030_a_refused_surge_counts_as_no_room_too() -> None:
    """S030: a quota that holds exactly what serves."""
    cluster = served(2)
    cluster.edit(engine=NEW)
    for _ in range(80):
        cluster.refuse = {"Pod"} if len(cluster.engine_pods()) >= 2 else set()
        cluster.pass_()
        cluster.play(5)
    assert cluster.condition("RolloutComplete")["status"] == "True"


# ------------------------------------------------------------------------------------------------------- what is told
def test_an_instance_tells_once_how_long_its_start_took() -> None:
    cluster = served(1)
    told = [e for e in cluster.events if e.reason == "InstanceServing"]
    assert len(told) == 1
    assert "routed" in told[0].note
    [name] = cluster.engine_pods()
    cluster.engines[name].phase = EnginePhase.SUSPECT
    cluster.pass_()
    cluster.engines[name].phase = EnginePhase.READY
    cluster.run()
    assert [e.reason for e in cluster.events].count("InstanceServing") == 1


def test_missing_metrics_are_told_and_change_nothing() -> None:
    cluster = served(2)
    name = cluster.engine_pods()[0]
    cluster.engines[name].missing = (Signal.WAITING,)
    made = cluster.pass_()
    assert made.actions == ()
    assert cluster.pool_status()["serving"] == 2
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.service["status"]["problems"][0]["reason"] == "MetricsMissing"
    assert [e.reason for e in cluster.events if e.warning] == ["MetricsMissing"]


def test_s080_the_reason_of_a_crash_loop_is_in_ready_and_never_outgrows_the_status() -> None:
    cluster = served(20)
    for name in cluster.engine_pods():
        cluster.crash(name, 1, "é" * 4000 + "CUDA out of memory")
    cluster.pass_()
    ready = cluster.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "CrashLoop")
    assert "CUDA out of memory" in ready["message"]
    assert len(json.dumps(cluster.service["status"], ensure_ascii=False).encode()) < 16 * 1024
    assert cluster.service["status"]["lastFailures"][0]["message"].endswith("out of memory")
