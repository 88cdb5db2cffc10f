"""How long a place in a pool waits for its next instance after the ones before failed: no crash loop burns a cluster.

Kept per place (index and revision) in `status.pools[].backoff`, because the pods that failed are gone by then. An
instance counts once: build numbers only rise. A lost status forgets the pauses, which costs one early try per place.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sluice.api.conditions import Reason
from sluice.api.status import MAX_BACKOFF
from sluice.plan.failures import GIVE_UP_REASONS
from sluice.plan.health import Instance
from sluice.plan.times import format_time, parse_time

BASE_S: Final = 10.0
"""Pause after the creation of the first instance that failed; one that lived longer is replaced at once."""
CAP_S: Final = 600.0
RESET_S: Final = 1800.0
"""Seconds after the end of a pause from which a place counts as new."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place whose instances failed one after the other."""

    index: int
    revision: str
    epoch: int
    """Build number of the last one that failed."""
    failures: int
    """0: a new try was asked for; failed ones up to `epoch` do not count any more."""
    reason: str
    retry_at: float
    """Seconds since the epoch."""

    @property
    def is_exhausted(self) -> bool:
        """What failed last had all its chances, so a new revision is to blame for it."""
        return self.failures > 0 and self.reason in GIVE_UP_REASONS


def load(pool_status: Mapping[str, Any]) -> tuple[Slot, ...]:
    """Entries of a pool's status, unreadable ones left out."""
    found = []
    for entry in pool_status.get("backoff") or []:
        retry_at = parse_time(entry.get("retryAt")) if isinstance(entry, Mapping) else None
        numbers = [entry.get(key, 0) for key in ("index", "epoch", "failures")] if retry_at is not None else []
        if retry_at is not None and all(isinstance(number, int) for number in numbers):
            revision, reason = str(entry.get("revision") or ""), str(entry.get("reason") or "")
            found.append(Slot(numbers[0], revision, numbers[1], numbers[2], reason, retry_at))
    return tuple(found)


def forgiven(slots: Iterable[Slot], revision: str, now: float) -> tuple[Slot, ...]:
    """The slots when a new try was asked for: no pause, and what failed up to now is history."""
    return tuple(
        Slot(s.index, s.revision, s.epoch, 0, "", min(s.retry_at, float(int(now)))) if s.revision == revision else s
        for s in slots
    )


def update(slots: Sequence[Slot], instances: Sequence[Instance], now: float) -> tuple[Slot, ...]:
    """The slots with what is seen now, the last failure first."""
    known = {(s.index, s.revision): s for s in slots if now <= s.retry_at + RESET_S}
    for instance in sorted(instances, key=lambda i: i.pod.epoch):
        place = (instance.pod.index, instance.pod.revision)
        slot = known.get(place)
        if slot is not None and instance.pod.epoch <= slot.epoch:
            continue
        if instance.is_serving:
            known.pop(place, None)
        elif (reason := _failed(instance)) is not None:
            known[place] = _counted(instance, reason, slot.failures + 1 if slot else 1, now)
    return tuple(sorted(known.values(), key=lambda s: (-s.retry_at, s.index, s.revision))[:MAX_BACKOFF])


def blocked_until(slots: Sequence[Slot], index: int, revision: str) -> float:
    """From when an instance of the revision may be created at this place; 0: now.

    With more failing places than the list holds, one that is not listed waits for the last of those that are.
    """
    mine = [s for s in slots if s.revision == revision]
    listed = next((s.retry_at for s in mine if s.index == index), None)
    if listed is not None:
        return listed
    return max((s.retry_at for s in mine), default=0.0) if len(slots) >= MAX_BACKOFF else 0.0


def entries(slots: Iterable[Slot]) -> list[dict[str, Any]]:
    """As `status.pools[].backoff` holds them."""
    return [
        {
            "index": s.index,
            "revision": s.revision,
            "epoch": s.epoch,
            "failures": s.failures,
            "reason": s.reason,
            "retryAt": format_time(s.retry_at),
        }
        for s in slots
    ]


def _failed(instance: Instance) -> Reason | None:
    if instance.gives_up is not None:
        return instance.gives_up.reason if instance.gives_up.reason in GIVE_UP_REASONS else None
    # How an engine ends that was told to stop is no failure, whoever told it.
    is_told = instance.pod.deletion_at is not None or instance.is_ended_by_kubelet
    if instance.is_dead and not is_told:
        return Reason.POD_FAILED
    if instance.pod.drain_reason in GIVE_UP_REASONS:
        return Reason(instance.pod.drain_reason)
    return None


def _counted(instance: Instance, reason: Reason, failures: int, now: float) -> Slot:
    pod = instance.pod
    pause = min(CAP_S, BASE_S * 2.0 ** min(failures - 1, 16))
    # A pod from the future is one of a clock that is behind the API server's: the pause counts from now.
    retry_at = min(pod.created_at, now) + BASE_S if failures == 1 else now + pause
    return Slot(pod.index, pod.revision, pod.epoch, failures, str(reason), float(int(retry_at)))
