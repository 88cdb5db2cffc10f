"""Kubernetes Events of ours: told once, repeated ones counted, never more than a reader can take.

One series per (object, reason, instance, note without numbers). A repeat within ten minutes only counts; the count is
written at most once a minute. A bucket per object (25 at once, then one in 5 min) and a limit for all (10 per second)
bound what a broken service can write. An Event that can't be written is dropped and counted, never retried for ever:
it must not disturb a pass.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Final, Protocol

from sluice.api import names
from sluice.plan.snapshot import Event
from sluice.runtime.errors import KubeError, NotFound
from sluice.runtime.kinds import EVENT, Kind

log = logging.getLogger(__name__)

SERIES_S: Final = 600.0
PATCH_PERIOD_S: Final = 60.0
OBJECT_BURST: Final = 25
OBJECT_REFILL_S: Final = 300.0
PER_SECOND: Final = 10
MAX_QUEUED: Final = 1000
MAX_SERIES: Final = 5000
MAX_NOTE: Final = 1024
MAX_NAME: Final = 253

_NUMBERS = re.compile(r"\d+(\.\d+)?")

Object = dict[str, Any]
_SeriesKey = tuple[str, str, str, str]


class EventClient(Protocol):
    async def create(self, kind: Kind, body: Mapping[str, Any]) -> Object: ...
    async def patch(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> Object: ...


@dataclass(slots=True)
class _Series:
    namespace: str
    name: str
    last_s: float
    count: int = 1
    written_s: float = 0.0
    written_count: int = 1


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_s: float


@dataclass(frozen=True, slots=True)
class _Write:
    """A new Event (`body`), or a count to write to the series' one."""

    series: _Series
    key: _SeriesKey
    body: Object | None


class Recorder:
    """`record` is synchronous and cheap; `run` writes in the background until cancelled."""

    def __init__(
        self,
        client: EventClient,
        *,
        reporter: str,
        clock: Callable[[], float] = monotonic,
        utc_now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._client = client
        self._reporter = reporter
        self._clock = clock
        self._utc_now = utc_now
        self._series: dict[_SeriesKey, _Series] = {}
        self._buckets: dict[str, _Bucket] = {}
        self._queue: asyncio.Queue[_Write] = asyncio.Queue(MAX_QUEUED)
        self.dropped = 0
        """Events not written: limits, a full queue, or refused by the API server."""

    def record(self, regarding: Mapping[str, Any], event: Event) -> None:
        """Note that this happened to the object."""
        meta = regarding["metadata"]
        key = (meta["uid"], event.reason, event.instance, _NUMBERS.sub("#", event.note))
        now = self._clock()
        series = self._series.get(key)
        if series is not None and now - series.last_s < SERIES_S:
            series.count += 1
            series.last_s = now
            if now - series.written_s >= PATCH_PERIOD_S:
                series.written_s = now
                self._enqueue(_Write(series, key, None))
            return
        if not self._take_token(meta["uid"], now):
            self.dropped += 1
            return
        series = _Series(meta["namespace"], _event_name(meta["name"], key, self._utc_now()), now, written_s=now)
        self._series.pop(key, None)
        self._series[key] = series
        if len(self._series) > MAX_SERIES:
            del self._series[next(iter(self._series))]
        self._enqueue(_Write(series, key, self._body(regarding, event, series)))

    def forget(self, uid: str) -> None:
        """The object is gone."""
        self._buckets.pop(uid, None)

    async def run(self) -> None:
        """Write what was recorded, at most ten a second."""
        while True:
            await self.write_next()
            await asyncio.sleep(1 / PER_SECOND)

    async def write_next(self) -> None:
        """Wait for one Event and write it."""
        write = await self._queue.get()
        try:
            if write.body is not None:
                await self._client.create(EVENT, write.body)
            else:
                await self._write_count(write.series)
        except NotFound:  # the Event expired (or its namespace is gone): the next repeat starts a new one
            self._series.pop(write.key, None)
        except KubeError as error:
            self.dropped += 1
            log.warning("Event dropped: %s", error)

    async def _write_count(self, series: _Series) -> None:
        count = series.count
        if count == series.written_count:
            return
        patch = {"series": {"count": count, "lastObservedTime": _micro(self._utc_now())}}
        await self._client.patch(EVENT, series.namespace, series.name, patch)
        series.written_count = count

    def _enqueue(self, write: _Write) -> None:
        try:
            self._queue.put_nowait(write)
        except asyncio.QueueFull:
            self.dropped += 1

    def _take_token(self, uid: str, now: float) -> bool:
        bucket = self._buckets.setdefault(uid, _Bucket(OBJECT_BURST, now))
        bucket.tokens = min(bucket.tokens + (now - bucket.filled_s) / OBJECT_REFILL_S, OBJECT_BURST)
        bucket.filled_s = now
        if bucket.tokens < 1:
            return False
        bucket.tokens -= 1
        return True

    def _body(self, regarding: Mapping[str, Any], event: Event, series: _Series) -> Object:
        meta = regarding["metadata"]
        note = event.note if len(event.note) <= MAX_NOTE else event.note[: MAX_NOTE - 1] + "…"
        body: Object = {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.name,
            "metadata": {"name": series.name, "namespace": series.namespace},
            "eventTime": _micro(self._utc_now()),
            "reportingController": names.GROUP,
            "reportingInstance": self._reporter[:128],
            "action": event.action,
            "reason": event.reason,
            "type": "Warning" if event.warning else "Normal",
            "note": note,
            "regarding": {
                "apiVersion": regarding["apiVersion"],
                "kind": regarding["kind"],
                "namespace": series.namespace,
                "name": meta["name"],
                "uid": meta["uid"],
            },
        }
        if event.instance:
            body["related"] = {
                "apiVersion": "v1",
                "kind": "Pod",
                "namespace": series.namespace,
                "name": event.instance,
            }
        return body


def _event_name(name: str, key: _SeriesKey, now: datetime) -> str:
    digest = names.short_hash(*key, now.isoformat(), length=16)
    return f"{name[: MAX_NAME - 17].rstrip('.-')}.{digest}"


def _micro(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
