"""Healing: when LISTs happen and what a dead watch looks like."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sluice.runtime import kinds, resync
from sluice.runtime.errors import Expired, Forbidden, KubeError, Unavailable
from sluice.runtime.kinds import Kind
from sluice.runtime.kube import ObjectList
from sluice.runtime.queue import Key, Lane
from sluice.runtime.resync import Resync
from sluice.runtime.store import Store
from tests.unit.runtime.builders import KEY, FakeClock, Object, a_pod, a_service, until


class Lists:
    """The `pages` of a client, from memory: two pages when there is more than one object."""

    def __init__(self) -> None:
        self.objects: dict[str, list[Object]] = {}
        self.version = 100
        self.error: KubeError | None = None
        self.error_on_second_page: KubeError | None = None
        self.asked: list[tuple[str, str]] = []

    async def pages(self, kind: Kind, namespace: str = "") -> AsyncIterator[ObjectList]:
        self.asked.append((kind.name, namespace))
        if self.error:
            raise self.error
        objects = self.objects.get(kind.name, [])
        yield ObjectList(objects[:1], str(self.version))
        if self.error_on_second_page:
            raise self.error_on_second_page
        if objects[1:]:
            yield ObjectList(objects[1:], str(self.version))


class Bench:
    def __init__(self, *watched: Kind, namespaces: tuple[str, ...] = ()) -> None:
        self.lists, self.store, self.clock = Lists(), Store(), FakeClock()
        self.enqueued: list[tuple[set[Key], Lane]] = []
        client: Any = self.lists
        self.resync = Resync(
            client,
            self.store,
            watched,
            lambda keys, lane: self.enqueued.append((keys, lane)),
            namespaces=namespaces,
            clock=self.clock,
        )

    async def attempt(self, kind: Kind) -> None:
        await self.resync._attempt(kind, self.resync._health[kind])


def an_error(kind: type[KubeError]) -> KubeError:
    return kind("list", "pods", "", 0, kind.__name__, "no")


async def test_first_look_reads_every_kind_and_counts_nothing_as_healed() -> None:
    bench = Bench(kinds.INFERENCE_SERVICE, kinds.POD)
    bench.lists.objects = {"InferenceService": [a_service()], "Pod": [a_pod("p"), a_pod("q")]}
    await bench.resync.first()
    view = bench.store.view(KEY)
    assert view is not None and len(view.pods) == 2
    assert not bench.store.healed


async def test_first_look_waits_for_the_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resync, "RETRY_S", 0.001)
    bench = Bench(kinds.POD)
    bench.lists.error = an_error(Unavailable)
    async with asyncio.timeout(3):
        looking = asyncio.create_task(bench.resync.first())
        await until(lambda: len(bench.lists.asked) >= 3)
        assert not looking.done()
        bench.lists.error = None
        await looking


async def test_optional_kind_that_is_not_readable_is_unknown_and_a_needed_one_ends_the_start() -> None:
    bench = Bench(kinds.ACCELERATOR_PROFILE)
    bench.store.apply("ADDED", a_service())
    bench.lists.error = an_error(Forbidden)
    await bench.resync.first()
    view = bench.store.view(KEY)
    assert view is not None and not view.profiles_known
    needed = Bench(kinds.POD)
    needed.lists.error = an_error(Forbidden)
    with pytest.raises(ExceptionGroup):
        await needed.resync.first()


async def test_refresh_enqueues_what_it_healed_behind_events() -> None:
    bench = Bench(kinds.POD)
    bench.store.apply("ADDED", a_service())
    bench.store.apply("ADDED", a_pod("gone", version=50))
    bench.lists.objects = {"Pod": [a_pod("p"), a_pod("q")]}
    await bench.attempt(kinds.POD)
    assert bench.enqueued == [({KEY}, Lane.RESYNC)]
    view = bench.store.view(KEY)
    assert view is not None and sorted(pod.name for pod in view.pods) == ["p", "q"]


async def test_list_that_expires_half_way_takes_nothing_away() -> None:
    bench = Bench(kinds.POD)
    bench.store.apply("ADDED", a_service())
    bench.store.apply("ADDED", a_pod("q", version=50))
    bench.lists.objects = {"Pod": [a_pod("p"), a_pod("q", version=50)]}
    bench.lists.error_on_second_page = an_error(Expired)
    await bench.attempt(kinds.POD)
    view = bench.store.view(KEY)
    assert view is not None and sorted(pod.name for pod in view.pods) == ["p", "q"]


async def test_namespaced_mode_lists_each_namespace_and_cluster_kinds_once() -> None:
    bench = Bench(kinds.POD, kinds.NODE, namespaces=("a", "b"))
    await bench.resync.first()
    assert sorted(bench.lists.asked) == [("Node", ""), ("Pod", "a"), ("Pod", "b")]


async def test_two_refreshes_that_heal_under_a_silent_watch_are_a_dead_watch() -> None:
    bench = Bench(kinds.POD)
    bench.store.apply("ADDED", a_service())
    for version in (10, 20):
        assert bench.resync.problem() == ""
        bench.lists.objects = {"Pod": [a_pod("p", version=version)]}
        await bench.attempt(kinds.POD)
    assert "the watch of pods is silent" in bench.resync.problem()
    bench.resync.saw_event(kinds.POD, "MODIFIED")
    bench.lists.objects = {"Pod": [a_pod("p", version=30)]}
    await bench.attempt(kinds.POD)
    assert bench.resync.problem() == ""


async def test_api_server_that_is_away_is_no_reason_for_a_restart() -> None:
    bench = Bench(kinds.POD)
    bench.lists.error = an_error(Unavailable)
    for _ in range(10):
        bench.clock.advance(resync.PERIOD_S)
        await bench.attempt(kinds.POD)
        assert bench.resync.problem() == ""


async def test_refresh_that_hangs_is_a_reason_for_a_restart() -> None:
    bench = Bench(kinds.POD)
    bench.clock.advance(resync.PERIOD_S * 3 + 1)
    assert "no refresh of pods was attempted" in bench.resync.problem()


async def test_watch_that_lists_anew_brings_a_refresh_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resync, "SOON_S", 0.001)
    bench = Bench(kinds.POD)
    async with asyncio.timeout(3):
        healing = asyncio.create_task(bench.resync.run())
        bench.resync.saw_event(kinds.POD, None)
        await until(lambda: bench.lists.asked)
        healing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await healing
