"""Leadership on a fake clock and an API server in memory."""

import asyncio
import random
from datetime import UTC, datetime, timedelta

import pytest

from sluice.runtime.errors import Unavailable
from sluice.runtime.kinds import LEASE
from sluice.runtime.lease import Lease
from tests.unit.runtime.builders import FakeClock
from tests.unit.runtime.memory_api import MemoryApi, Object, failing

pytestmark = pytest.mark.asyncio


class Cluster:
    """One API server and processes whose wall clocks disagree."""

    def __init__(self) -> None:
        self.api = MemoryApi()
        self.clock = FakeClock()

    def process(self, identity: str, *, wall_offset_s: float = 0.0) -> Lease:
        start = datetime(2026, 1, 1, tzinfo=UTC)
        return Lease(
            self.api,
            namespace="sluice-system",
            name="op",
            identity=identity,
            clock=self.clock,
            utc_now=lambda: start + timedelta(seconds=self.clock.now + wall_offset_s),
            rng=random.Random(1),
        )

    def record(self) -> Object:
        spec: Object = self.api.objects[LEASE.name, "sluice-system", "op"]["spec"]
        return spec


async def test_first_process_gets_the_lease_and_the_second_waits() -> None:
    cluster = Cluster()
    a, b = cluster.process("a"), cluster.process("b")
    assert await a.attempt()
    assert not await b.attempt()
    assert (a.held(), b.held(), b.holder) == (True, False, "a")
    assert cluster.record()["renewTime"] == "2026-01-01T00:16:40.000000Z"


async def test_dead_holder_is_replaced_after_the_duration_by_the_own_clock() -> None:
    cluster = Cluster()
    a, b = cluster.process("a"), cluster.process("b", wall_offset_s=-3600)
    await a.attempt()
    assert not await b.attempt()
    cluster.clock.advance(14.9)
    assert not await b.attempt()
    cluster.clock.advance(0.2)
    assert await b.attempt()
    assert cluster.record()["leaseTransitions"] == 1
    assert not await a.attempt()


async def test_renewing_holder_is_never_replaced_however_wrong_the_clocks() -> None:
    cluster = Cluster()
    a, b = cluster.process("a", wall_offset_s=-9999), cluster.process("b", wall_offset_s=9999)
    await a.attempt()
    for _ in range(20):
        cluster.clock.advance(2)
        assert await a.attempt()
        assert not await b.attempt()


async def test_held_ends_with_the_renew_deadline_before_others_may_take_it() -> None:
    cluster = Cluster()
    a, b = cluster.process("a"), cluster.process("b")
    await a.attempt()
    await b.attempt()
    cluster.api.fail = failing(Unavailable, "")
    cluster.clock.advance(9.9)
    assert a.held()
    assert not await a.attempt()
    cluster.clock.advance(0.2)
    assert not a.held()


async def test_two_waiting_processes_do_not_both_win() -> None:
    cluster = Cluster()
    a, b, c = cluster.process("a"), cluster.process("b"), cluster.process("c")
    await a.attempt()
    await b.attempt(), await c.attempt()
    cluster.clock.advance(16)
    won = await asyncio.gather(b.attempt(), c.attempt())
    assert sorted(won) == [False, True]


async def test_release_lets_the_next_process_in_at_once() -> None:
    cluster = Cluster()
    a, b = cluster.process("a"), cluster.process("b")
    await a.attempt()
    await a.release()
    assert not a.held()
    assert (cluster.record()["holderIdentity"], cluster.record()["leaseDurationSeconds"]) == ("", 1)
    assert await b.attempt()


async def test_release_of_a_lost_lease_takes_nothing_from_the_new_holder() -> None:
    cluster = Cluster()
    a, b = cluster.process("a"), cluster.process("b")
    await a.attempt()
    await b.attempt()
    cluster.clock.advance(16)
    await b.attempt()
    await a.release()
    assert cluster.record()["holderIdentity"] == "b"


async def test_same_identity_goes_on_without_waiting() -> None:
    cluster = Cluster()
    await cluster.process("a").attempt()
    assert await cluster.process("a").attempt()


async def test_hanging_api_server_is_a_failed_try_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    a = cluster.process("a")
    monkeypatch.setattr("sluice.runtime.lease.REQUEST_TIMEOUT_S", 0.01)

    async def hang(*_: object) -> Object:
        await asyncio.Event().wait()
        raise AssertionError

    cluster.api.get = hang  # type: ignore[method-assign,assignment]  # an API server that never answers
    async with asyncio.timeout(2):
        assert not await a.attempt()
