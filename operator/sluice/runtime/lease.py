"""Leadership: one operator acts at a time, proved by a Lease in the operator's namespace.

Why not the library's elector: no request time-out inside the renew deadline, local time written as UTC, no release.
Invariants: another holder's record expires by *our* monotonic clock since it last changed, remote timestamps are never
compared; `held()` is False as soon as the renew deadline passed, so that no write happens after a long stall of the
loop; losing the Lease ends the process at once, because a drain would be work of two leaders.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Final, Protocol

from sluice.runtime.errors import KubeError, NotFound
from sluice.runtime.kinds import LEASE, Kind

log = logging.getLogger(__name__)

DURATION_S: Final = 15
RENEW_DEADLINE_S: Final = 10.0
RETRY_S: Final = 2.0
REQUEST_TIMEOUT_S: Final = 5.0
RELEASED_DURATION_S: Final = 1

Object = dict[str, Any]


class LeaseClient(Protocol):
    async def get(self, kind: Kind, namespace: str, name: str) -> Object: ...
    async def create(self, kind: Kind, body: Mapping[str, Any]) -> Object: ...
    async def replace(self, kind: Kind, body: Mapping[str, Any]) -> Object: ...


class Lease:
    """`acquire`, then `keep` in a task, `release` at a clean end."""

    def __init__(
        self,
        client: LeaseClient,
        *,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float] = monotonic,
        utc_now: Callable[[], datetime] = lambda: datetime.now(UTC),
        rng: random.Random | None = None,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self.identity = identity
        self._clock = clock
        self._utc_now = utc_now
        self._rng = rng or random.Random()
        self._renewed_at: float | None = None
        self._record: tuple[Any, ...] | None = None
        self._record_seen_at = 0.0
        self._live: Object | None = None
        self._released = False
        self._lock = asyncio.Lock()
        self.holder = ""
        """Who held the Lease when last looked at; "" if nobody."""

    def held(self) -> bool:
        """True while our last successful renewal is younger than the renew deadline."""
        return self._renewed_at is not None and self._clock() - self._renewed_at < RENEW_DEADLINE_S

    async def acquire(self) -> bool:
        """Wait until the Lease is ours; always True."""
        told = None
        while not await self.attempt():
            if self.holder != told:
                told = self.holder
                log.info("standing by: %s holds the Lease", told or "nobody yet")
            await asyncio.sleep(RETRY_S * self._rng.uniform(0.9, 1.1))
        log.info("holding the Lease %s/%s as %s", self._namespace, self._name, self.identity)
        return True

    async def keep(self) -> str:
        """Renew until it fails; returns why the Lease is lost (the caller must end the process), "" once released."""
        while True:
            await asyncio.sleep(RETRY_S)
            if self._released:
                return ""
            stalled = not self.held()  # after a long stall of the loop another may lead already
            if not stalled and await self.attempt():
                continue
            if stalled or not self.held():
                return f"not renewed for {RENEW_DEADLINE_S:.0f} s"
            if self.holder not in ("", self.identity):
                return f"{self.holder} holds it"

    async def release(self) -> None:
        """Give the Lease away, so that the next operator takes over within two seconds."""
        self._released = True
        async with self._lock:  # a renewal may be under way
            held, self._renewed_at = self.held(), None
            if held and self._live is not None:
                await self._give_away(self._live)

    async def _give_away(self, live: Object) -> None:
        body = self._body(live, holder="", duration_s=RELEASED_DURATION_S)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await self._client.replace(LEASE, body)
        except (KubeError, TimeoutError) as error:
            log.warning("could not release the Lease (it expires by itself): %s", str(error) or "no answer in time")

    async def attempt(self) -> bool:
        """One try to get or renew; False if another holds it or the API server did not answer in time."""
        async with self._lock:
            return await self._attempt()

    async def _attempt(self) -> bool:
        started = self._clock()  # the answer may be late: the term counts from before the request
        # The last try before the deadline ends with it: we are gone before another may take over.
        left = REQUEST_TIMEOUT_S if self._renewed_at is None else self._renewed_at + RENEW_DEADLINE_S - started
        try:
            async with asyncio.timeout(min(REQUEST_TIMEOUT_S, max(left, 0.0))):
                won = await self._get_or_renew()
        except (KubeError, TimeoutError) as error:
            log.warning("Lease %s/%s: %s", self._namespace, self._name, str(error) or "no answer in time")
            self._live = None
            return False
        if won:
            self._renewed_at = started
        return won

    async def _get_or_renew(self) -> bool:
        if self._live is None or self._renewed_at is None:
            try:
                self._live = await self._client.get(LEASE, self._namespace, self._name)
            except NotFound:
                self._live = await self._client.create(LEASE, self._body(None))
                self.holder = self.identity
                return True
        if not self._may_take(self._live):
            self._live = None
            return False
        self._live = await self._client.replace(LEASE, self._body(self._live))
        self.holder = self.identity
        return True

    def _may_take(self, live: Object) -> bool:
        spec = live.get("spec") or {}
        self.holder = spec.get("holderIdentity") or ""
        record = (self.holder, spec.get("renewTime"), live["metadata"].get("resourceVersion"))
        if record != self._record:
            self._record, self._record_seen_at = record, self._clock()
        duration_s = spec.get("leaseDurationSeconds") or DURATION_S
        expired = self._clock() - self._record_seen_at > duration_s
        return self.holder in ("", self.identity) or expired

    def _body(self, live: Object | None, *, holder: str | None = None, duration_s: int = DURATION_S) -> Object:
        spec = dict((live or {}).get("spec") or {})
        now = self._utc_now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        holder = self.identity if holder is None else holder
        if holder and spec.get("holderIdentity") != holder:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + (live is not None)
        spec |= {"holderIdentity": holder, "leaseDurationSeconds": duration_s, "renewTime": now}
        meta = {"name": self._name, "namespace": self._namespace}
        if live is not None:
            meta["resourceVersion"] = live["metadata"]["resourceVersion"]
        return {"apiVersion": LEASE.api_version, "kind": LEASE.name, "metadata": meta, "spec": spec}
