"""The keyed work queue: what to look at next, never twice at once, fair, with back-off. No I/O; the clock is injected.

Invariants
- A key is in one of: waiting, running, neither. An `add` while it runs makes it wait again at `done`.
- Lane `EVENT` goes before `RESYNC`, but every fourth pick tries `RESYNC` first: a storm of events can't starve the
  periodic look at everything. Inside a lane, first dirty first served.
- A failing key backs off on its own (0.5 s doubling to 300 s); events may start it earlier, at most once a second.
"""

import asyncio
import heapq
import random
from collections.abc import Callable
from enum import Enum
from time import monotonic
from typing import Final

Key = tuple[str, str, str]
"""(kind, namespace, name)."""

BACKOFF_BASE_S: Final = 0.5
BACKOFF_CAP_S: Final = 300.0
BACKOFF_JITTER: Final = 0.2
DELAY_JITTER: Final = 0.1
FAILING_PERIOD_S: Final = 1.0
"""A failing key starts at most this often, however many events come."""
RESYNC_EVERY: Final = 4


class Lane(Enum):
    EVENT = "event"
    RESYNC = "resync"


class Queue:
    """`get` and `done` frame a run of a key; everything else may be called at any time in the loop's thread."""

    def __init__(self, *, clock: Callable[[], float] = monotonic, rng: random.Random | None = None) -> None:
        self._clock = clock
        self._rng = rng or random.Random()
        self._waiting: dict[Lane, dict[Key, float]] = {Lane.EVENT: {}, Lane.RESYNC: {}}
        self._running: set[Key] = set()
        self._again: dict[Key, Lane] = {}
        self._deadlines: dict[Key, float] = {}
        self._timers: list[tuple[float, Key]] = []
        self._failures: dict[Key, int] = {}
        self._not_before: dict[Key, float] = {}
        self._picks = 0
        self._closed = False
        self._wake = asyncio.Event()
        self.on_start: Callable[[float], None] | None = None
        """Told how long a key waited, in seconds, when it starts."""
        self.retries = 0

    # Producers

    def add(self, key: Key, lane: Lane = Lane.EVENT) -> None:
        """Mark the key dirty now."""
        if self._closed:
            return
        if key in self._running:
            if self._again.get(key) is not Lane.EVENT:
                self._again[key] = lane
            return
        not_before = self._not_before.get(key, 0.0)
        if not_before > self._clock():
            self._schedule(key, not_before)
        else:
            self._enqueue(key, lane)
        self._wake.set()

    def add_after(self, key: Key, seconds: float) -> None:
        """Mark the key dirty after `seconds` (±10 %); of several deadlines the earliest counts, a run clears it."""
        if self._closed:
            return
        jitter = self._rng.uniform(1 - DELAY_JITTER, 1 + DELAY_JITTER)
        self._schedule(key, self._clock() + max(seconds, 0.0) * jitter)
        self._wake.set()

    def forget(self, key: Key) -> None:
        """The object is gone: drop back-off and deadlines."""
        self._deadlines.pop(key, None)
        self._failures.pop(key, None)
        self._not_before.pop(key, None)

    def close(self) -> None:
        """No key starts any more; `get` returns None."""
        self._closed = True
        self._wake.set()

    # Consumers

    async def get(self) -> Key | None:
        """The next key, running from now on; None once the queue is closed."""
        while not self._closed:
            key = self.take()
            if key is not None:
                return key
            self._wake.clear()
            due = self.next_due()
            try:
                async with asyncio.timeout(None if due is None else max(due - self._clock(), 0.0)):
                    await self._wake.wait()
            except TimeoutError:
                continue
        return None

    def take(self) -> Key | None:
        """The next key if one may start now."""
        if self._closed:
            return None
        self._release_due()
        self._picks += 1
        lanes = (Lane.RESYNC, Lane.EVENT) if self._picks % RESYNC_EVERY == 0 else (Lane.EVENT, Lane.RESYNC)
        for lane in lanes:
            waiting = self._waiting[lane]
            if waiting:
                key = next(iter(waiting))
                since = waiting.pop(key)
                self._running.add(key)
                self._deadlines.pop(key, None)
                if self.on_start is not None:
                    self.on_start(self._clock() - since)
                return key
        self._picks -= 1
        return None

    def done(self, key: Key, ok: bool, *, backoff_cap_s: float = BACKOFF_CAP_S) -> None:
        """The run of this key ended; not ok: it is retried with back-off, at the latest after `backoff_cap_s`."""
        self._running.discard(key)
        if ok:
            self._failures.pop(key, None)
            self._not_before.pop(key, None)
        else:
            failures = self._failures.get(key, 0)
            self._failures[key] = failures + 1
            self.retries += 1
            jitter = self._rng.uniform(1 - BACKOFF_JITTER, 1 + BACKOFF_JITTER)
            delay = min(BACKOFF_BASE_S * 2 ** min(failures, 20), backoff_cap_s) * jitter
            self._not_before[key] = self._clock() + min(FAILING_PERIOD_S, delay)
            if not self._closed:
                self._schedule(key, self._clock() + delay)
        lane = self._again.pop(key, None)
        if lane is not None:
            self.add(key, lane)
        self._wake.set()

    # Observing

    def depth(self) -> int:
        """Keys that wait."""
        return sum(len(waiting) for waiting in self._waiting.values())

    def running(self) -> int:
        return len(self._running)

    def oldest_s(self) -> float:
        """Seconds that the longest-waiting key has waited; 0 if none waits."""
        firsts = [next(iter(waiting.values())) for waiting in self._waiting.values() if waiting]
        return self._clock() - min(firsts) if firsts else 0.0

    def next_due(self) -> float | None:
        """Clock time of the next deadline."""
        while self._timers and self._deadlines.get(self._timers[0][1]) != self._timers[0][0]:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    # Inside

    def _enqueue(self, key: Key, lane: Lane) -> None:
        if key in self._waiting[Lane.EVENT]:
            return
        since = self._waiting[Lane.RESYNC].get(key)
        if since is None:
            self._waiting[lane][key] = self._clock()
        elif lane is Lane.EVENT:  # promoted: its event is as new as any other's
            del self._waiting[Lane.RESYNC][key]
            self._waiting[Lane.EVENT][key] = self._clock()

    def _schedule(self, key: Key, deadline: float) -> None:
        if deadline < self._deadlines.get(key, float("inf")):
            self._deadlines[key] = deadline
            heapq.heappush(self._timers, (deadline, key))

    def _release_due(self) -> None:
        now = self._clock()
        while (due := self.next_due()) is not None and due <= now:
            _, key = heapq.heappop(self._timers)
            del self._deadlines[key]
            if key in self._running:
                self._again.setdefault(key, Lane.EVENT)
            else:
                self._enqueue(key, Lane.EVENT)
