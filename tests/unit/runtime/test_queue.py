"""The queue: once at a time, fair, backing off; on a fake clock."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.runtime.queue import Lane, Queue
from tests.unit.runtime.builders import FakeClock

A, B, C = (("InferenceService", "t", name) for name in "abc")


def a_queue() -> tuple[Queue, FakeClock]:
    clock = FakeClock()
    return Queue(clock=clock, rng=random.Random(1)), clock


def test_key_added_twice_runs_once() -> None:
    queue, _ = a_queue()
    queue.add(A)
    queue.add(A)
    assert (queue.take(), queue.take()) == (A, None)


def test_key_added_while_it_runs_runs_again_afterwards_and_never_twice_at_once() -> None:
    queue, _ = a_queue()
    queue.add(A)
    assert queue.take() == A
    queue.add(A)
    assert queue.take() is None
    queue.done(A, True)
    assert queue.take() == A
    queue.done(A, True)
    assert queue.take() is None


def test_first_dirty_is_first_served() -> None:
    queue, _ = a_queue()
    for key in (B, A, C, B):
        queue.add(key)
    assert [queue.take() for _ in range(3)] == [B, A, C]


def test_events_go_before_resync_but_every_fourth_pick_is_for_resync() -> None:
    queue, _ = a_queue()
    events = [("InferenceService", "t", f"e{i}") for i in range(6)]
    for key in events:
        queue.add(key)
    queue.add(A, Lane.RESYNC)
    picks = [queue.take() for _ in range(7)]
    assert picks[:4] == [*events[:3], A]


def test_event_promotes_a_key_that_waits_in_resync() -> None:
    queue, _ = a_queue()
    queue.add(A, Lane.RESYNC)
    queue.add(B, Lane.RESYNC)
    queue.add(B)
    assert queue.take() == B


def test_delayed_key_starts_when_due_and_keeps_the_earliest_deadline() -> None:
    queue, clock = a_queue()
    queue.add_after(A, 100)
    queue.add_after(A, 10)
    queue.add_after(A, 50)
    clock.advance(8.9)
    assert queue.take() is None
    clock.advance(2.2)
    assert queue.take() == A


def test_run_clears_the_deadline() -> None:
    queue, clock = a_queue()
    queue.add_after(A, 10)
    queue.add(A)
    assert queue.take() == A
    queue.done(A, True)
    clock.advance(60)
    assert queue.take() is None


def test_deadline_that_falls_into_a_run_makes_the_key_run_again() -> None:
    queue, clock = a_queue()
    queue.add(A)
    assert queue.take() == A
    queue.add_after(A, 1)
    clock.advance(2)
    assert queue.take() is None
    queue.done(A, True)
    assert queue.take() == A


def delays_of_failures(queue: Queue, clock: FakeClock, times: int, **done: float) -> list[float]:
    """Seconds that the queue makes a key wait after each failure in a row."""
    queue.add(A)
    assert queue.take() == A
    waits = []
    for _ in range(times):
        queue.done(A, False, **done)
        due = queue.next_due()
        assert due is not None
        waits.append(due - clock.now)
        clock.now = due
        assert queue.take() == A
    return waits


def test_failing_key_backs_off_doubling_to_five_minutes() -> None:
    queue, clock = a_queue()
    waits = delays_of_failures(queue, clock, 14)
    assert all(0.8 * 0.5 * 2**n <= wait <= 1.2 * 0.5 * 2**n for n, wait in enumerate(waits[:10]))
    assert all(0.8 * 300 <= wait <= 1.2 * 300 for wait in waits[10:])


def test_back_off_of_transient_failures_has_a_lower_cap() -> None:
    queue, clock = a_queue()
    assert max(delays_of_failures(queue, clock, 14, backoff_cap_s=30.0)) <= 36


def test_success_forgets_failures() -> None:
    queue, clock = a_queue()
    delays_of_failures(queue, clock, 8)
    queue.done(A, True)
    queue.add(A)
    assert queue.take() == A
    queue.done(A, False)
    due = queue.next_due()
    assert due is not None and due - clock.now <= 0.6


def test_event_starts_a_backed_off_key_at_most_once_a_second() -> None:
    queue, clock = a_queue()
    delays_of_failures(queue, clock, 8)
    queue.done(A, False)
    queue.add(A)
    assert queue.take() is None
    clock.advance(1.0)
    assert queue.take() == A


def test_closed_queue_starts_nothing() -> None:
    queue, _ = a_queue()
    queue.add(A)
    queue.close()
    queue.add(B)
    assert queue.take() is None


async def test_waiting_worker_wakes_for_an_add_and_for_close() -> None:
    queue = Queue()
    async with asyncio.timeout(2):
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.add(A)
        assert await waiting == A
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.close()
        assert await waiting is None


async def test_waiting_worker_wakes_for_a_deadline() -> None:
    queue = Queue()
    async with asyncio.timeout(2):
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.add_after(A, 0.01)
        assert await waiting == A


@pytest.mark.parametrize("seed", range(5))
def test_oldest_and_depth_count_what_waits(seed: int) -> None:
    queue, clock = a_queue()
    assert (queue.depth(), queue.oldest_s()) == (0, 0.0)
    for i in range(seed + 1):
        queue.add(("InferenceService", "t", str(i)))
        clock.advance(1)
    assert (queue.depth(), queue.oldest_s()) == (seed + 1, seed + 1)


steps = st.lists(
    st.tuples(st.sampled_from(["add", "resync", "later", "take", "ok", "fail", "tick"]), st.sampled_from([A, B, C])),
    max_size=80,
)


@settings(max_examples=200, deadline=None)
@given(steps)
def test_no_dirty_key_is_lost_and_none_runs_twice(script: list[tuple[str, tuple[str, str, str]]]) -> None:
    queue, clock = a_queue()
    running: set[tuple[str, str, str]] = set()
    dirty: set[tuple[str, str, str]] = set()
    for step, key in script:
        match step:
            case "add":
                queue.add(key)
                dirty.add(key)
            case "resync":
                queue.add(key, Lane.RESYNC)
                dirty.add(key)
            case "later":
                queue.add_after(key, 3)
                dirty.add(key)
            case "tick":
                clock.advance(1)
            case "take":
                taken = queue.take()
                if taken is not None:
                    assert taken not in running
                    running.add(taken)
                    dirty.discard(taken)
            case _ if key in running:
                running.discard(key)
                queue.done(key, step == "ok")
                if step == "fail":
                    dirty.add(key)
    for key in running:
        queue.done(key, True)
    clock.advance(1000)
    left = set()
    while (taken := queue.take()) is not None:
        left.add(taken)
        queue.done(taken, True)
    assert dirty <= left
