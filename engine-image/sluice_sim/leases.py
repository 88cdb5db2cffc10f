"""KV that waits on the prefill side to be pulled: who holds which blocks, and until when. Pure.

Invariant: blocks that are taken in are given back exactly once: at the pull, or when the lease is over.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

_MAX_REMEMBERED: Final = 10_000
"""Leases that ran out and are remembered, so that a late pull can be told from a stranger's."""


class Notice(StrEnum):
    """What the news that a request's KV was read means."""

    IN_TIME = "in time"
    LATE = "late"
    """The lease had run out: what was read may have been another request's."""
    UNKNOWN = "unknown"


@dataclass(slots=True)
class Lease:
    blocks: list[int]
    expires_at: float
    """Steady clock."""


class LeaseBook:
    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._held: dict[str, Lease] = {}
        self._expired: OrderedDict[str, None] = OrderedDict()

    @property
    def held(self) -> int:
        """Requests whose KV waits."""
        return len(self._held)

    @property
    def held_blocks(self) -> int:
        return sum(len(lease.blocks) for lease in self._held.values())

    @property
    def next_expiry(self) -> float | None:
        return min((lease.expires_at for lease in self._held.values()), default=None)

    def hold(self, request_id: str, blocks: list[int], now: float) -> None:
        self._held[request_id] = Lease(blocks, now + self._duration_s)

    def extend(self, request_id: str, now: float) -> bool:
        """A heartbeat came: the lease starts again; False if there is none any more."""
        lease = self._held.get(request_id)
        if lease is None:
            return False
        lease.expires_at = max(lease.expires_at, now + self._duration_s)
        return True

    def pulled(self, request_id: str) -> tuple[Notice, list[int]]:
        """The KV was read: what that means, and the blocks to give back."""
        lease = self._held.pop(request_id, None)
        if lease is not None:
            return Notice.IN_TIME, lease.blocks
        if request_id in self._expired:
            del self._expired[request_id]
            return Notice.LATE, []
        return Notice.UNKNOWN, []

    def expire(self, request_id: str) -> list[int]:
        """End this lease now; the blocks to give back."""
        lease = self._held.pop(request_id)
        self._expired[request_id] = None
        if len(self._expired) > _MAX_REMEMBERED:
            self._expired.popitem(last=False)
        return lease.blocks

    def due(self, now: float) -> list[str]:
        """Requests whose lease is over."""
        return [request_id for request_id, lease in self._held.items() if lease.expires_at <= now]
