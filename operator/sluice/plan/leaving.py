"""What is told about instances that leave: `status.drains`, the text in conditions, the Event at the start.

Numbers are the engine's own or absent, never assumed. They are those of the last full ten seconds, so that a long drain
writes its status six times a minute and not at every answered request.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from sluice.api import names
from sluice.api.conditions import Reason
from sluice.api.status import MAX_DRAINS
from sluice.plan import drain
from sluice.plan.actions import Annotate
from sluice.plan.health import Instance
from sluice.plan.snapshot import Event
from sluice.plan.view import PoolView, ServiceView

STEP_S: Final = 10
"""Seconds to which elapsed times are rounded down."""
MAX_TEXTS: Final = 3
"""Instances that a condition's message names."""


def drain_entries(view: ServiceView) -> list[dict[str, Any]]:
    """`status.drains`, the longest under way first."""
    before = {e.get("instance"): e for e in view.snapshot.status.get("drains") or [] if isinstance(e, Mapping)}
    entries = [
        _entry(pool, instance, view.now, before.get(instance.name))
        for pool in view.pools
        for instance in pool.instances
        if _is_draining(instance)
    ]
    return sorted(entries, key=lambda e: (-e.get("elapsedSeconds", 0), e["instance"]))[:MAX_DRAINS]


def count_drains(view: ServiceView) -> int:
    return sum(_is_draining(instance) for instance in view.instances)


def drains_text(entries: Sequence[Mapping[str, Any]], total: int) -> str:
    """`a: draining 3 of 12 requests, 40 s of 600 s; …`; "" without entries. `total`: instances that leave."""
    told = [f"{e['instance']}: draining {_requests(e)}, {_times(e)}" for e in entries[:MAX_TEXTS]]
    if total > len(told) > 0:
        told.append(f"and {total - len(told)} more")
    return "; ".join(told)


def started_events(view: ServiceView, marks: Iterable[Annotate]) -> Iterator[Event]:
    """One Event per drain that starts in this pass: its mark is written now."""
    found = {i.name: (pool, i) for pool in view.pools for i in pool.instances}
    for mark in marks:
        reason = mark.annotations.get(names.ANNOTATION_DRAIN_REASON)
        if reason and mark.scope in found:
            pool, instance = found[mark.scope]
            yield _started(instance, reason, timeout_s(pool, instance))


def note_external(pool: PoolView, instance: Instance) -> tuple[Annotate, Event] | None:
    """A pod that others deleted: how many requests it had is noted once, as the mark of our own drains does it."""
    pod = instance.pod
    is_ours = pod.drain_started_at is not None or instance.is_dead
    if pod.deletion_at is None or is_ours or pod.drain_in_flight is not None or instance.in_flight is None:
        return None
    note = Annotate(
        drain.pod_ref(instance), {names.ANNOTATION_DRAIN_IN_FLIGHT: str(instance.in_flight)}, scope=instance.name
    )
    return note, _started(instance, str(instance.reason), timeout_s(pool, instance))


def timeout_s(pool: PoolView, instance: Instance) -> float:
    """Seconds that the instance's requests have; of a pod that others deleted, what their grace period leaves."""
    grace = instance.pod.deletion_grace_s
    if instance.pod.drain_started_at is None and grace is not None:
        return grace - drain.PRESTOP_MARGIN_S if grace > drain.PRESTOP_MARGIN_S else grace
    return drain.timeout_s((*pool.stored, *((pool.target,) if pool.target else ())), instance)


def _is_draining(instance: Instance) -> bool:
    return instance.is_leaving and not instance.is_dead


def _started(instance: Instance, reason: str, timeout: float) -> Event:
    count = instance.in_flight
    if instance.engine_cannot_have_requests:
        count = 0
    what = "an unknown number of requests" if count is None else f"{count} requests"
    note = f"Instance {instance.name} is draining ({reason}): {what} in flight, at most {int(timeout)} s"
    return Event(str(Reason.DRAINING), note, instance=instance.name, action="Drain")


def _entry(pool: PoolView, instance: Instance, now: float, before: Mapping[str, Any] | None) -> dict[str, Any]:
    pod = instance.pod
    elapsed = _elapsed(instance, now)
    in_flight = 0 if instance.engine_cannot_have_requests else instance.in_flight
    same = before is not None and elapsed is not None and before.get("elapsedSeconds") == elapsed
    if before is not None and same and before.get("reason") == str(instance.reason):
        in_flight = before.get("inFlight")
    entry = {
        "instance": instance.name,
        "reason": str(instance.reason),
        "inFlight": in_flight,
        "of": pod.drain_in_flight,
        "elapsedSeconds": elapsed,
        "timeoutSeconds": int(timeout_s(pool, instance)),
    }
    return {key: value for key, value in entry.items() if value is not None}


def _elapsed(instance: Instance, now: float) -> int | None:
    """Since the drain began: by our mark, else by the deletion."""
    pod = instance.pod
    began = pod.drain_started_at
    if began is None and pod.deletion_at is not None and pod.deletion_grace_s is not None:
        began = pod.deletion_at - pod.deletion_grace_s
    return None if began is None else max(0, int((now - began) // STEP_S) * STEP_S)


def _requests(entry: Mapping[str, Any]) -> str:
    left, of = entry.get("inFlight"), entry.get("of")
    if left is None:
        return "an unknown number of requests"
    # More than at the start: routers sent some before they let go.
    return f"{left} of {of} requests" if of is not None and left <= of else f"{left} requests"


def _times(entry: Mapping[str, Any]) -> str:
    elapsed = entry.get("elapsedSeconds")
    return f"{'an unknown time' if elapsed is None else f'{elapsed} s'} of {entry['timeoutSeconds']} s"
