"""Worker lists: who is listed where, and what the routers' words prove."""

import dataclasses
from typing import Any

import pytest

from sluice.api.agent import EnginePhase
from sluice.api.router import RoutedWorker, RouterState, Worker, WorkerList, WorkerStatus
from sluice.plan.facts import pod_facts
from sluice.plan.health import Instance, InstancePhase
from sluice.plan.routing import (
    RouterView,
    Served,
    confirmed,
    held_ports,
    is_unrouted,
    put_lists,
    wanted_workers,
    worker_list,
)
from tests.unit.plan.test_health import NOW, a_pod, judge, says

SERVED = {"": Served("llama", 8000)}
READY = says(EnginePhase.READY)


def a_router(
    *workers: RoutedWorker,
    name: str = "r",
    ready: bool = True,
    fresh: bool = True,
    held: WorkerList | None = None,
    heard: bool = True,
) -> RouterView:
    pod = {
        "metadata": {"name": name, "uid": name},
        "status": {
            "phase": "Running",
            "podIP": "10.1.0.1",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }
    generation = held.generation if held else None
    state = RouterState(
        generation=generation,
        open=held.open if held else True,
        smg_reachable=True,
        workers=list(workers),
        wanted=held,
    )
    return RouterView(pod_facts(pod), state if heard else None, fresh)


def entry(status: WorkerStatus = WorkerStatus.READY, **more: Any) -> RoutedWorker:
    fields = {"id": "i", "url": "http://10.0.0.1:8000", "engine_id": "run-1", **more}
    return RoutedWorker(status=status, **fields)


def phase(instance: Instance, *routers: RouterView) -> InstancePhase:
    return confirmed([instance], routers)[0].phase


def test_s026_serving_means_that_every_live_router_shows_the_engine_run_as_ready() -> None:
    verified = judge(a_pod(), READY)
    assert phase(verified, a_router(entry()), a_router(entry())) == "Serving"
    assert phase(verified, a_router(entry()), a_router()) == "Verifying"
    assert phase(verified, a_router(entry(engine_id="run-0"))) == "Verifying"
    assert phase(verified, a_router(entry(WorkerStatus.NOT_READY))) == "Verifying"
    assert phase(verified) == "Verifying"  # no router at all


def test_a_router_that_gets_no_requests_does_not_count() -> None:
    verified = judge(a_pod(), READY)
    assert phase(verified, a_router(entry()), a_router(ready=False)) == "Serving"
    assert phase(verified, a_router(entry(), ready=False)) == "Verifying"


def test_a_router_that_starts_with_its_list_has_to_show_what_is_new() -> None:
    """It turns Ready by its old workers; were they drained on the word of the others, it would be left with none."""
    starting = a_router(ready=False, held=worker_list([]))
    assert phase(judge(a_pod(), READY), a_router(entry()), starting) == "Verifying"
    assert phase(judge(a_pod(), READY), a_router(entry()), a_router(entry(), ready=False, held=worker_list([]))) == (
        "Serving"
    )
    closed = a_router(ready=False, held=worker_list([], is_open=False))
    assert phase(judge(a_pod(), READY), a_router(entry()), closed) == "Serving"
    assert phase(judge(a_pod(gate=True), READY), a_router(entry()), starting) == "Serving", "what serves goes on"


def test_a_silent_router_changes_nothing_in_either_direction() -> None:
    assert phase(judge(a_pod(gate=True), READY), a_router(entry()), a_router(fresh=False)) == "Serving"
    assert phase(judge(a_pod(gate=False), READY), a_router(entry()), a_router(fresh=False)) == "Verifying"


def test_a_silent_instance_stays_listed_as_some_router_has_it() -> None:
    worker = Worker(id="i", url="http://10.0.0.1:8000", agent_url="http://10.0.0.1:9900", engine_id="run-7", model="m")
    held = worker_list([worker])
    silent = judge(a_pod(gate=True), says(EnginePhase.READY, age_s=60))
    assert wanted_workers([silent], [a_router(held=held)], SERVED) == (worker,)
    # A fresh router learns it from its sibling's list.
    [put] = put_lists(
        [a_router(name="new"), a_router(name="old", held=held)],
        wanted_workers([silent], [a_router(held=held)], SERVED),
        is_ignorant=False,
    )
    assert (put.router.name, put.workers.workers) == ("new", [worker])


def test_an_empty_list_is_sent_only_when_it_is_known_to_be_right() -> None:
    held = worker_list([Worker(id="x", url="http://1", agent_url="http://2", engine_id="e", model="m")])
    assert put_lists([a_router(held=held)], (), is_ignorant=True) == ()
    [put] = put_lists([a_router(held=held)], (), is_ignorant=False)
    assert put.workers.workers == []


def test_a_router_that_was_never_heard_gets_no_list() -> None:
    assert put_lists([a_router(heard=False)], (), is_ignorant=False) == ()


def test_an_equal_list_is_not_sent_again() -> None:
    workers = wanted_workers([judge(a_pod(), READY)], [], SERVED)
    [put] = put_lists([a_router()], workers, is_ignorant=False)
    assert put_lists([a_router(held=put.workers)], workers, is_ignorant=False) == ()


def test_a_reused_address_waits_until_the_router_lost_its_old_owner() -> None:
    workers = wanted_workers([judge(a_pod(), READY)], [], SERVED)
    ghost = entry(WorkerStatus.DRAINING, id="former", engine_id=None)
    [put] = put_lists([a_router(ghost)], workers, is_ignorant=False)
    assert put.workers.workers == []
    [put] = put_lists([a_router(entry(WorkerStatus.ABSENT, id="former"))], workers, is_ignorant=False)
    assert [worker.id for worker in put.workers.workers] == ["i"]


def test_addresses_of_version_6_are_written_in_brackets() -> None:
    pod = a_pod()
    pod["status"]["podIP"] = "fd00::7"
    [worker] = wanted_workers([judge(pod, READY)], [], SERVED)
    assert (worker.url, worker.agent_url) == ("http://[fd00::7]:8000", "http://[fd00::7]:9900")


def test_a_worker_is_listed_at_the_port_of_its_revision_and_let_go_at_any() -> None:
    """A rollout from one engine to another may change the port; the old instance keeps the one it listens on."""
    verified = judge(a_pod(), READY)
    [worker] = wanted_workers([verified], [], {"": Served("llama", 9100)})
    assert worker.url == "http://10.0.0.1:9100"
    held = a_router(held=worker_list([worker]))
    assert wanted_workers([verified], [held], {}) == (worker,), "its revision is not stored any more"
    ghost = entry(id="", url="http://10.0.0.1:9100", engine_id=None)
    assert not is_unrouted(verified, [a_router(ghost)])


@pytest.mark.parametrize(
    ("not_ready_since", "let_go"),
    [
        pytest.param(NOW - 5, True, id="was ready before"),
        pytest.param(NOW - 599, False, id="was never ready"),
        pytest.param(None, True, id="since unknown"),
    ],
)
def test_a_silent_router_that_is_not_ready_has_let_go_if_it_was_ready_before(
    not_ready_since: float | None, let_go: bool
) -> None:
    """The watch may be behind: the pod that it shows as not ready yet may be Ready by now, with the list that it told.
    Both times are the API's, so that our clock does not matter."""
    verified = judge(a_pod(), READY)
    [worker] = wanted_workers([verified], [], SERVED)
    silent = a_router(ready=False, fresh=False, held=worker_list([worker]))
    pod = dataclasses.replace(silent.pod, created_at=NOW - 600, not_ready_since=not_ready_since)
    assert is_unrouted(verified, [dataclasses.replace(silent, pod=pod)]) is let_go


def test_a_router_that_does_not_get_ready_keeps_a_new_instance_from_serving_for_a_minute_at_most() -> None:
    """Its sidecar answers, but its node's way to the engines is broken."""
    sick = a_router(entry(WorkerStatus.PENDING), ready=False, held=worker_list([]))
    verified = judge(a_pod(), READY)
    assert phase(verified, a_router(entry()), dataclasses.replace(sick, not_ready_s=5)) == "Verifying"
    assert phase(verified, a_router(entry()), dataclasses.replace(sick, not_ready_s=61)) == "Serving"


def test_ports_of_held_lists_stay_open_when_their_revision_is_gone() -> None:
    [worker] = wanted_workers([judge(a_pod(), READY)], [], {"": Served("llama", 9100)})
    assert held_ports([a_router(held=worker_list([worker])), a_router(heard=False)]) == {9100}
