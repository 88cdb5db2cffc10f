"""What follows from failure: restart budget, evidence, quarantine, pauses; pure tables and properties."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.api.agent import EnginePhase, Signal
from sluice.api.conditions import Reason
from sluice.api.status import MAX_BACKOFF, MAX_FAILURES
from sluice.api.v1alpha1 import Health
from sluice.plan import backoff, failures, quarantine
from sluice.plan.backoff import CAP_S, Slot, blocked_until
from sluice.plan.facts import pod_facts
from sluice.plan.failures import Failure, crashes, give_up
from sluice.plan.health import Instance, InstancePhase, Verdict
from sluice.plan.quarantine import AVOID_S, EVIDENCE_S, AvoidedNode, Placement, place
from sluice.plan.snapshot import ContainerFacts, ContainerPhase
from sluice.plan.times import format_time
from tests.unit.plan.cluster import START, running
from tests.unit.plan.test_health import NOW, a_pod, crashed, judge, says

HEALTH = Health()


def an_engine(restarts: int, *, ended_s_ago: float | None = None, ran_s: float = 5, up: bool = True) -> ContainerFacts:
    ended = None if ended_s_ago is None else NOW - ended_s_ago
    return ContainerFacts(
        name="engine",
        container_id="c",
        phase=ContainerPhase.RUNNING if up else ContainerPhase.WAITING,
        reason="",
        message="",
        exit_code=None if ended is None else 1,
        last_reason="Error",
        last_message="",
        ready=False,
        started=False,
        restarts=restarts,
        ended_at=ended,
        ended_run_started_at=None if ended is None else ended - ran_s,
    )


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (an_engine(0), 0),
        (an_engine(2, ended_s_ago=10), 2),
        (an_engine(2, ended_s_ago=10, up=False), 3),
        (an_engine(4, ended_s_ago=1801), 0),
        (an_engine(4, ended_s_ago=10, ran_s=7 * 86400), 1),
        (an_engine(4), 4),
    ],
    ids=["never", "restarted", "ended, not yet restarted", "long ago", "one in a week", "times unknown"],
)
def test_restarts_are_counted_from_what_the_kubelet_shows(engine: ContainerFacts, expected: int) -> None:
    assert crashes(engine, 1800, NOW) == expected


@given(st.integers(0, 50), st.floats(0, 1e5), st.floats(0, 1e6), st.booleans(), st.integers(60, 86400))
def test_never_more_restarts_than_there_were(restarts: int, ago: float, ran_s: float, up: bool, window_s: int) -> None:
    engine = an_engine(restarts, ended_s_ago=ago, ran_s=ran_s, up=up)
    assert 0 <= crashes(engine, window_s, NOW) <= restarts + 1


def with_restarts(count: int, **more: Any) -> Instance:
    engine = {**crashed(1, message="no kernel image"), "restartCount": count}
    return judge(a_pod(engine=engine, **more))


def test_s092_an_instance_is_given_up_only_over_the_budget_and_only_while_it_is_down() -> None:
    assert give_up(with_restarts(2), HEALTH, NOW) is None
    found = give_up(with_restarts(3), HEALTH, NOW)
    assert found is not None
    assert found.reason is Reason.RESTARTS_EXHAUSTED
    assert "maxRestarts is 3 in 1800 s" in found.message
    assert "no kernel image" in found.message
    assert give_up(with_restarts(3), Health(max_restarts=10), NOW) is None
    up_again = {**running("engine"), "restartCount": 9}
    assert give_up(judge(a_pod(engine=up_again), says(EnginePhase.READY)), HEALTH, NOW) is None


def test_a_start_that_takes_too_long_and_a_wrong_idle_engine_are_given_up() -> None:
    late = judge(a_pod(), says(EnginePhase.LOADING, started_at=START))
    given_up = give_up(late, HEALTH, NOW)
    assert given_up is not None and given_up.reason is Reason.STARTUP_TIMEOUT
    assert given_up.message.startswith(late.message)
    wrong = says(EnginePhase.SUSPECT, "SelfTestFailed", in_flight=0)
    wrong = dataclasses.replace(wrong, state=wrong.state.model_copy(update={"phase_since": NOW - 60}))
    found = give_up(judge(a_pod(gate=True), wrong), HEALTH, NOW)
    assert found is not None and found.reason is Reason.SELF_TEST_FAILED


@pytest.mark.parametrize(
    "agent",
    [
        says(EnginePhase.SUSPECT, "SelfTestFailed", in_flight=3),
        says(EnginePhase.SUSPECT, "SelfTestFailed", in_flight=None),
        says(EnginePhase.SUSPECT, "Suspect", in_flight=0),
        says(EnginePhase.VERIFYING, "SelfTestUnauthorized", started_at=START),
        says(EnginePhase.READY, "SelfTestUnauthorized"),
        None,
    ],
    ids=["busy", "unknown load", "unanswered", "key refused (D15)", "key refused while it serves", "silent"],
)
def test_busy_unknown_or_unauthorized_is_never_given_up(agent: Any) -> None:
    if agent is not None:
        agent = dataclasses.replace(agent, state=agent.state.model_copy(update={"phase_since": NOW - 9000}))
    assert give_up(judge(a_pod(), agent, timeout_s=60), HEALTH, NOW) is None


def test_metrics_that_are_gone_are_a_problem_and_never_a_reason_to_unroute() -> None:
    instance = judge(a_pod(), says(EnginePhase.READY, missing=[Signal.WAITING]))
    assert (instance.reason, instance.verdict) == (Reason.METRICS_MISSING, Verdict.ROUTE)
    assert "waiting" in instance.message
    assert give_up(instance, HEALTH, NOW) is None


# ------------------------------------------------------------------------------------------------------- evidence
def a_failure(number: int, *, node: str = "n1", revision: str = "r", at: float = NOW, **more: Any) -> Failure:
    fields: dict[str, Any] = {"reason": "CrashLoop", "exit_code": 1, "message": "m", "replaced": True, **more}
    return Failure(instance=f"i-{number}", node=node, revision=revision, at=at, **fields)


def test_evidence_has_the_exit_code_and_the_end_of_the_log() -> None:
    log = "first line\n" + "x" * 5000 + "\nRuntimeError: no kernel image"
    engine = crashed(1, message=log)
    engine["lastState"]["terminated"]["finishedAt"] = format_time(NOW - 5)
    [seen] = failures.recent((), [judge(a_pod(engine=engine))], NOW)
    assert (seen.instance, seen.reason, seen.exit_code, seen.at) == ("i", "CrashLoop", 1, NOW - 5)
    assert seen.message.endswith("no kernel image")
    assert len(seen.message) <= 2048
    assert not seen.replaced


def test_evidence_outlives_the_pod_and_is_bounded() -> None:
    before = [a_failure(n, at=NOW - n, message="y" * 2048) for n in range(20)]
    kept = failures.recent(before, [], NOW)
    assert [f.instance for f in kept] == [f"i-{n}" for n in range(MAX_FAILURES)]
    assert len(kept[0].message) == 2048
    assert all(len(f.message) <= 256 for f in kept[1:])
    assert failures.recent(kept, [], NOW + 9) == kept
    assert failures.load({"lastFailures": failures.entries(kept)}) == kept
    assert failures.load({"lastFailures": [None, {}, {"instance": 3, "at": "x"}]}) == ()


def test_a_pod_that_others_deleted_did_not_fail() -> None:
    gone = judge(a_pod(engine=crashed(143), deletionTimestamp=format_time(NOW)))
    assert failures.recent((), [gone], NOW) == ()


def test_s093_a_pod_that_its_node_refused_is_an_admission_failure() -> None:
    pod = a_pod(phase="Failed")
    pod["status"].update(reason="UnexpectedAdmissionError", message="device unhealthy")
    pod["status"]["containerStatuses"] = pod["status"]["initContainerStatuses"] = []
    [seen] = failures.recent((), [judge(pod)], NOW)
    assert (seen.reason, seen.exit_code, seen.replaced) == ("AdmissionFailed", None, True)
    assert "device unhealthy" in seen.message


# ----------------------------------------------------------------------------------------------------- quarantine
def test_a_node_where_two_instances_failed_is_avoided_until_its_time() -> None:
    failed = [a_failure(1), a_failure(2, at=NOW + 9)]
    assert quarantine.update((), failed[:1], [], NOW) == ()
    [entry] = quarantine.update((), failed, [], NOW + 9)
    assert (entry.node, entry.until) == ("n1", NOW + 9 + AVOID_S)
    assert quarantine.placement([entry], failed, NOW + 10).avoid == ("n1",)
    later = NOW + 10 + AVOID_S
    [over] = quarantine.update([entry], failed, [], later)
    assert quarantine.placement([over], failed, later) == Placement(prefer_not=("n1",))
    assert quarantine.update([over], failed, [], later + EVIDENCE_S) == ()


def test_a_new_failure_after_the_quarantine_starts_another() -> None:
    failed = [a_failure(1), a_failure(2)]
    [entry] = quarantine.update((), failed, [], NOW)
    again = [*failed, a_failure(3, at=entry.until + 5)]
    [renewed] = quarantine.update([entry], again, [], entry.until + 5)
    assert renewed.until == entry.until + 5 + AVOID_S


@pytest.mark.parametrize(
    "failed",
    [
        [a_failure(1, replaced=False), a_failure(2, replaced=False)],
        [a_failure(1, reason="PodFailed"), a_failure(2, reason="PodFailed")],
        [a_failure(1, node=""), a_failure(2, node="")],
        [a_failure(1), a_failure(2), a_failure(3, node="n2"), a_failure(4, node="n2")],
        [a_failure(1, at=NOW - EVIDENCE_S), a_failure(2)],
    ],
    ids=["restarted in place", "evicted", "no node", "a revision that fails everywhere", "long ago"],
)
def test_a_node_is_not_blamed_for(failed: list[Failure]) -> None:
    assert quarantine.update((), failed, [], NOW) == ()


def test_avoiding_is_added_to_what_the_user_asked_for() -> None:
    wanted: dict[str, Any] = {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    mine = {"nodeAffinity": {required: {"nodeSelectorTerms": [wanted, {}]}}, "podAffinity": {}}
    pod: dict[str, Any] = {"metadata": {"name": "p"}, "spec": {"affinity": mine}}
    made = place(pod, Placement(("n1",), ("n2",)))
    assert place(pod, Placement()) is pod
    terms = made["spec"]["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"]
    avoid = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n1"]}
    assert [t["matchExpressions"][-1] for t in terms] == [avoid, avoid]
    assert terms[0]["matchExpressions"][0] == wanted["matchExpressions"][0]
    assert made["spec"]["affinity"]["podAffinity"] == {}
    assert pod_facts(made).avoids == ("n1",)
    assert pod["spec"]["affinity"] == mine


a_node_entry = st.builds(AvoidedNode, st.sampled_from("abcdefgh"), st.floats(NOW - 9000, NOW + 9000), st.just("r"))
a_failed = st.builds(
    a_failure,
    st.integers(0, 12),
    node=st.sampled_from("abcdefgh"),
    revision=st.sampled_from("rs"),
    at=st.floats(NOW - 9000, NOW),
)


@settings(deadline=None)
@given(st.lists(a_node_entry, max_size=8, unique_by=lambda e: e.node), st.lists(a_failed, max_size=12))
def test_a_quarantine_always_ends_and_the_same_facts_change_nothing(
    before: list[AvoidedNode], failed: list[Failure]
) -> None:
    made = quarantine.update(before, failed, [], NOW)
    assert quarantine.update(made, failed, [], NOW) == made
    end = NOW + AVOID_S + 9000
    assert quarantine.placement(quarantine.update(made, failed, [], end), failed, end).avoid == ()


# ---------------------------------------------------------------------------------------------------------- pauses
def a_dead(index: int, epoch: int, *, created: float = NOW - 60, revision: str = "r") -> Instance:
    pod = a_pod(phase="Failed", creationTimestamp=format_time(created))
    facts = dataclasses.replace(pod_facts(pod), index=index, epoch=epoch, revision=revision)
    return dataclasses.replace(judge(pod), pod=facts)


def test_pauses_grow_from_failure_to_failure_up_to_ten_minutes() -> None:
    slots: tuple[Slot, ...] = ()
    pauses = []
    now = NOW
    for epoch in range(1, 12):
        slots = backoff.update(slots, [a_dead(0, epoch, created=now)], now)
        assert backoff.update(slots, [a_dead(0, epoch, created=now)], now + 5) == slots, "one failure counts once"
        pauses.append(blocked_until(slots, 0, "r") - now)
        now = blocked_until(slots, 0, "r")
    assert pauses[:6] == [10, 20, 40, 80, 160, 320]
    assert pauses[6:] == [CAP_S] * 5


def test_an_engine_that_was_told_to_stop_costs_no_pause_however_it_ends() -> None:
    """vLLM exits 143 after SIGTERM, so the pod of a clean drain is Failed for a moment before it is gone."""
    dead = a_dead(0, 1)
    deleted = dataclasses.replace(dead, pod=dataclasses.replace(dead.pod, deletion_at=NOW + 30))
    shut_down = dataclasses.replace(dead, pod=dataclasses.replace(dead.pod, disruption_target="TerminationByKubelet"))
    assert backoff.update((), [deleted], NOW) == backoff.update((), [shut_down], NOW) == ()
    given_up = dataclasses.replace(deleted.pod, drain_reason=str(Reason.RESTARTS_EXHAUSTED))
    [slot] = backoff.update((), [dataclasses.replace(deleted, pod=given_up)], NOW)
    assert slot.reason == Reason.RESTARTS_EXHAUSTED


def test_a_pause_is_of_one_place_and_one_revision_and_ends_when_it_serves() -> None:
    slots = backoff.update((), [a_dead(0, 1, created=NOW)], NOW)
    assert blocked_until(slots, 0, "r") > NOW
    assert blocked_until(slots, 1, "r") == blocked_until(slots, 0, "other") == 0
    serving = dataclasses.replace(a_dead(0, 2), phase=InstancePhase.SERVING)
    assert backoff.update(slots, [serving], NOW + 60) == ()
    long_lived = backoff.update((), [a_dead(0, 1, created=NOW - 3600)], NOW)
    assert blocked_until(long_lived, 0, "r") < NOW, "what lived long is replaced at once"


def test_more_failing_places_than_the_list_holds_wait_all_the_same() -> None:
    slots = backoff.update((), [a_dead(n, 1, created=NOW) for n in range(20)], NOW)
    assert len(slots) == MAX_BACKOFF
    assert all(blocked_until(slots, n, "r") > NOW for n in range(30))
    assert backoff.load({"backoff": backoff.entries(slots)}) == slots
    assert backoff.load({"backoff": [None, {"retryAt": "x"}, {"retryAt": format_time(1), "index": "y"}]}) == ()


def test_asking_for_a_new_try_ends_the_pauses_and_counts_no_old_failure_again() -> None:
    dead = a_dead(0, 3, created=NOW)
    slots = backoff.forgiven(backoff.update((), [dead], NOW), "r", NOW)
    assert backoff.update(slots, [dead], NOW) == slots
    assert blocked_until(slots, 0, "r") <= NOW
    assert not any(s.is_exhausted for s in slots)
