"""A drain's next step: unrouted, then empty, then deleted; or the deadline."""

from dataclasses import replace
from typing import Any

import pytest

from sluice.api import names
from sluice.api.agent import EnginePhase
from sluice.api.router import RoutedWorker, RouterState, WorkerStatus
from sluice.plan import drain
from sluice.plan.drain import Progress
from sluice.plan.facts import pod_facts
from sluice.plan.health import Instance
from sluice.plan.routing import RouterView, worker_list
from sluice.plan.times import format_moment, format_time
from tests.unit.plan.test_health import NOW, a_pod, judge, says

TIMEOUT_S = 60.0


def leaving(started_s_ago: float, agent: Any = None, *, reason: str = "ScaleIn", **pod: Any) -> Instance:
    marks = {
        names.ANNOTATION_DRAIN_STARTED_AT: format_moment(NOW - started_s_ago),
        names.ANNOTATION_DRAIN_REASON: reason,
    }
    return judge(a_pod(annotations=marks, **pod), agent)


def a_router(
    status: WorkerStatus | None, *, ready: bool = True, fresh: bool = True, reachable: bool = True
) -> RouterView:
    pod = {
        "metadata": {"name": "r", "uid": "r"},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True" if ready else "False"}]},
    }
    workers = [RoutedWorker(id="i", url="http://10.0.0.1:8000", status=status)] if status else []
    state = RouterState(generation="g", smg_reachable=reachable, workers=workers, wanted=worker_list(()))
    return RouterView(pod_facts(pod), state, fresh)


IDLE = says(EnginePhase.READY, in_flight=0)
BUSY = says(EnginePhase.READY, in_flight=2)
GONE = a_router(None)


def progress(instance: Instance, *routers: RouterView) -> Progress:
    return drain.progress(instance, routers, TIMEOUT_S, NOW)


def test_it_is_deleted_when_unrouted_and_empty() -> None:
    done = progress(leaving(10, IDLE), GONE)
    assert done.delete
    assert done.event is not None
    assert done.event.reason == "Drained"


def test_it_waits_while_any_router_may_still_send_it_a_request() -> None:
    for status in (WorkerStatus.READY, WorkerStatus.NOT_READY, WorkerStatus.PENDING):
        assert not progress(leaving(10, IDLE), GONE, a_router(status)).delete
    for status in (WorkerStatus.DRAINING, WorkerStatus.WITHHELD, WorkerStatus.ABSENT):
        assert progress(leaving(10, IDLE), a_router(status)).delete


def test_a_silent_router_proves_nothing_unless_it_gets_no_requests() -> None:
    assert not progress(leaving(10, IDLE), a_router(None, fresh=False)).delete
    assert not progress(leaving(10, IDLE), a_router(None, reachable=False)).delete
    assert progress(leaving(10, IDLE), a_router(None, fresh=False, ready=False)).delete


def test_it_waits_for_its_requests_and_an_unknown_number_is_not_zero() -> None:
    assert progress(leaving(10, BUSY), GONE).waits_for == "requests in flight"
    assert not progress(leaving(10, says(EnginePhase.READY, in_flight=None)), GONE).delete
    assert not progress(leaving(10), GONE).delete


def test_a_count_from_before_it_was_unrouted_is_not_believed() -> None:
    assert not progress(leaving(1, IDLE), GONE).delete
    assert not progress(leaving(5, says(EnginePhase.READY, in_flight=0, age_s=4)), GONE).delete


def test_at_the_deadline_it_goes_also_when_nobody_answers() -> None:
    cut = progress(leaving(TIMEOUT_S, BUSY), a_router(WorkerStatus.READY))
    assert cut.delete
    assert cut.event is not None
    assert (cut.event.reason, cut.event.warning) == ("RequestsCut", True)
    assert "2 requests" in cut.event.note
    assert cut.grace_s == drain.DEADLINE_GRACE_S
    silent = progress(leaving(TIMEOUT_S), a_router(None, fresh=False))
    assert silent.delete
    assert silent.event is not None
    assert "unknown number" in silent.event.note


def test_an_engine_that_never_served_is_not_waited_for() -> None:
    assert progress(leaving(0, None, phase="Pending"), GONE).delete
    assert progress(leaving(0, says(EnginePhase.LOADING, in_flight=None)), GONE).delete


def test_a_hung_engine_is_not_waited_for_and_its_requests_are_told() -> None:
    hung = progress(leaving(5, says(EnginePhase.HUNG, in_flight=3)), GONE)
    assert hung.delete
    assert hung.event is not None
    assert "3 requests" in hung.event.note


def test_a_lost_instance_goes_once_unrouted_but_one_that_came_back_finishes_its_requests() -> None:
    assert progress(leaving(1, reason="NodeLost"), GONE).delete
    assert not progress(leaving(5, BUSY, reason="NodeLost"), GONE).delete


def test_requests_cut_by_the_grace_period_of_another_deleter_are_told() -> None:
    ends_soon = judge(a_pod(deletionTimestamp=format_time(NOW + 20)), BUSY)
    event = drain.cut_by_others(ends_soon, NOW)
    assert event is not None
    assert "2 requests" in event.note
    assert drain.cut_by_others(judge(a_pod(deletionTimestamp=format_time(NOW + 600)), BUSY), NOW) is None
    assert drain.cut_by_others(judge(a_pod(deletionTimestamp=format_time(NOW + 20)), IDLE), NOW) is None


@pytest.mark.parametrize("asked_s", [None, 0.1, TIMEOUT_S - 1])
def test_a_new_leader_whose_clock_is_ahead_cuts_no_drain(asked_s: float | None) -> None:
    """The node's clock says that the drain began a second ago, ours that it is eleven minutes."""
    busy = says(EnginePhase.READY, in_flight=3, said_at=NOW - 659)
    instance = replace(leaving(660, busy), asked_s=asked_s)
    assert not progress(instance, GONE).delete


def test_a_new_leader_ends_a_drain_in_time_when_the_nodes_clock_agrees() -> None:
    busy = says(EnginePhase.READY, in_flight=3, said_at=NOW - 2, age_s=2)
    assert progress(replace(leaving(TIMEOUT_S, busy), asked_s=1.0), GONE).delete


def test_nobodys_clock_prolongs_a_drain_that_this_process_watched_to_its_end() -> None:
    for word in (says(EnginePhase.READY, in_flight=3, said_at=NOW - 9999), says(EnginePhase.READY, in_flight=3), None):
        assert not progress(replace(leaving(TIMEOUT_S, word), asked_s=1.0), GONE).delete
        assert progress(replace(leaving(TIMEOUT_S, word), asked_s=TIMEOUT_S), GONE).delete
