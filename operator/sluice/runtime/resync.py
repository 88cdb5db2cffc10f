"""Heals the store: the first LIST of every kind, then one every five minutes, sooner when a watch restarted.

Why: after a 410 the watch tells survivors, never what was deleted meanwhile; a silent watch tells nothing. Two
refreshes in a row that both had to heal while the watch said nothing in between mean a dead watch: `problem` says so
and the liveness probe fails.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from sluice.runtime.errors import Expired, Forbidden, KubeError, NotFound
from sluice.runtime.kinds import Kind
from sluice.runtime.kube import Client
from sluice.runtime.queue import Key, Lane
from sluice.runtime.store import Store

log = logging.getLogger(__name__)

PERIOD_S: Final = 300.0
JITTER: Final = 0.1
SOON_S: Final = 5.0
SOON_AT_MOST_EVERY_S: Final = 30.0
RETRY_S: Final = 5.0
DEAD_AFTER_PERIODS: Final = 3
AT_ONCE: Final = 4

Enqueue = Callable[[set[Key], Lane], None]


@dataclass(slots=True)
class _Health:
    """What is known of one kind's refreshes."""

    attempted_at: float
    refreshed_at: float | None = None
    events: int = 0
    events_at_refresh: int = 0
    deaf: int = 0
    """Refreshes in a row that healed something while the watch told nothing."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class Resync:
    """One healing loop per watched kind."""

    def __init__(
        self,
        client: Client,
        store: Store,
        watched: Sequence[Kind],
        enqueue: Enqueue,
        *,
        namespaces: Sequence[str] = (),
        clock: Callable[[], float] = monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._client = client
        self._store = store
        self._enqueue = enqueue
        self._namespaces = tuple(namespaces) or ("",)
        self._clock = clock
        self._rng = rng or random.Random()
        self._health = {kind: _Health(clock()) for kind in watched}
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def first(self) -> None:
        """The start barrier: list every kind, retrying until the API server answers.

        Raises: Forbidden, NotFound for a kind that is not optional (it was checked before; now it is gone).
        """
        async with asyncio.TaskGroup() as tasks:
            for kind in self._health:
                tasks.create_task(self._first(kind))
        self._store.healed.clear()  # nothing was lost before the first look

    async def run(self) -> None:
        """Heal for ever."""
        async with asyncio.TaskGroup() as tasks:
            for kind, health in self._health.items():
                tasks.create_task(self._run(kind, health), name=f"resync {kind.resource}")

    def saw_event(self, kind: Kind, event: str | None) -> None:
        """A watch event arrived; `None` means that the watch lists anew, so deletions may have been missed."""
        health = self._health[kind]
        health.events += 1
        if event is None:
            health.wake.set()

    def ages(self) -> dict[str, float]:
        """Seconds since the last refresh, per kind."""
        now = self._clock()
        return {k.name: now - h.refreshed_at for k, h in self._health.items() if h.refreshed_at is not None}

    def problem(self) -> str:
        """Why this process should be restarted; "" if all is well. An API server that is away is no reason."""
        now = self._clock()
        for kind, health in self._health.items():
            if now - health.attempted_at > DEAD_AFTER_PERIODS * PERIOD_S:
                return f"no refresh of {kind.resource} was attempted for {DEAD_AFTER_PERIODS} periods"
            if health.deaf >= 2:
                return f"the watch of {kind.resource} is silent: two refreshes in a row found what it did not tell"
        return ""

    async def _first(self, kind: Kind) -> None:
        while True:
            try:
                await self._refresh(kind)
            except (Forbidden, NotFound):
                if not kind.optional:
                    raise
                self._store.mark_absent(kind)
            except KubeError as error:
                log.warning("waiting for the API server: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            return

    async def _run(self, kind: Kind, health: _Health) -> None:
        pause_s = PERIOD_S * self._rng.uniform(1 - JITTER, 1 + JITTER)
        woken_at = -SOON_AT_MOST_EVERY_S
        while True:
            if await self._wait(health, pause_s):
                since = self._clock() - woken_at
                await asyncio.sleep(max(SOON_S, SOON_AT_MOST_EVERY_S - since))
                woken_at = self._clock()
                health.wake.clear()
            pause_s = await self._attempt(kind, health)

    async def _wait(self, health: _Health, seconds: float) -> bool:
        """True if woken, False if the time passed."""
        try:
            async with asyncio.timeout(seconds):
                await health.wake.wait()
        except TimeoutError:
            return False
        return True

    async def _attempt(self, kind: Kind, health: _Health) -> float:
        """One refresh; returns the pause before the next."""
        before = self._store.healed[kind.name]
        try:
            keys = await self._refresh(kind)
        except (Forbidden, NotFound) as error:
            log.warning("%s is not readable: %s", kind.resource, error)
            keys = self._store.mark_absent(kind) if kind.optional else set()
        except KubeError as error:
            log.warning("refresh of %s: %s", kind.resource, error)
            return RETRY_S
        finally:
            health.attempted_at = self._clock()
        healed = self._store.healed[kind.name] > before
        deaf = healed and health.events == health.events_at_refresh
        health.deaf = health.deaf + 1 if deaf else 0
        health.events_at_refresh = health.events
        self._enqueue(keys, Lane.RESYNC)
        return PERIOD_S * self._rng.uniform(1 - JITTER, 1 + JITTER)

    async def _refresh(self, kind: Kind) -> set[Key]:
        changed: set[Key] = set()
        async with self._slots:
            for namespace in self._namespaces if kind.namespaced else ("",):
                changed |= await self._refresh_namespace(kind, namespace)
        self._health[kind].refreshed_at = self._clock()
        return changed

    async def _refresh_namespace(self, kind: Kind, namespace: str) -> set[Key]:
        """Page by page, so that thousands of pods are never in memory as dicts at once."""
        changed: set[Key] = set()
        listed: set[str] = set()
        version = ""
        try:
            async for page in self._client.pages(kind, namespace):
                changed |= self._store.merge(kind, page.items, listed)
                version = version or page.resource_version
                await asyncio.sleep(0)  # let the loop breathe between pages
        except Expired:
            log.info("the list of %s took too long; it is read again at the next refresh", kind.resource)
            return changed
        return changed | self._store.prune(kind, listed, version, namespace)
