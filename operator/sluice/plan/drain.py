"""How an instance leaves: marked, unrouted, emptied, deleted; each step follows from what is observed.

1. Start, in one pass: the mark (annotation with time and reason, so that a restarted operator goes on here), the
   readiness gate False, the routers' lists without it. The engine still accepts whatever a router sent a moment ago.
2. Every router says that it let go, then the engine counts zero requests, then the pod is deleted.
3. At the deadline it is deleted anyway, also if the agent or a router is silent, and the cut requests are reported.
   The mark may be of another process with another clock, so our clock alone never ends a drain (`_is_over`).

The pod's own preStop waits for in-flight zero once more, so a request that slipped in between is still answered.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from sluice.api import names
from sluice.api.agent import EnginePhase
from sluice.api.conditions import Reason
from sluice.api.v1alpha1 import Drain
from sluice.plan.actions import Annotate, Delete, ObjectRef, SetGate
from sluice.plan.health import Instance
from sluice.plan.revisions import Revision
from sluice.plan.routing import RouterView, is_unrouted
from sluice.plan.snapshot import Event
from sluice.plan.times import format_moment

SETTLE_S: Final = 2.0
"""Seconds after the start of a drain from which a count of zero is believed: the agent reads its engine every second,
so an older count may not know a request that was routed just before."""
CHECK_S: Final = 1.0
"""How often a draining instance is looked at without an event."""
PRESTOP_MARGIN_S: Final = 60.0
"""The grace period ends so long after the agent's own drain deadline (`pods.GRACE_MARGIN_S`)."""
DEADLINE_GRACE_S: Final = 5
"""Grace of a pod that is deleted at its deadline: preStop would wait for the same requests for the whole drain time
once more, so the kubelet stops it after these seconds and gives the engine its minimum of 2 s."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a draining instance waits for."""

    delete: bool
    waits_for: str
    """For people; "" when nothing is waited for."""
    event: Event | None = None
    grace_s: int | None = None
    """Null: the pod's own, which is long, because preStop may still have to wait."""


def pod_ref(instance: Instance) -> ObjectRef:
    pod = instance.pod
    return ObjectRef("Pod", pod.namespace, pod.name, pod.uid)


def mark(instance: Instance, reason: Reason, now: float) -> Annotate:
    count = 0 if instance.engine_cannot_have_requests else instance.in_flight
    annotations = {
        names.ANNOTATION_DRAIN_STARTED_AT: format_moment(now),
        names.ANNOTATION_DRAIN_REASON: str(reason),
        names.ANNOTATION_DRAIN_IN_FLIGHT: None if count is None else str(count),
    }
    return Annotate(pod_ref(instance), annotations, scope=instance.name)


def close_gate(instance: Instance, reason: Reason, message: str) -> SetGate:
    return SetGate(pod_ref(instance), False, str(reason), message, scope=instance.name)


def progress(instance: Instance, routers: Sequence[RouterView], timeout_s: float, now: float) -> Progress:
    """Where the drain of an instance with a drain mark stands."""
    started = instance.pod.drain_started_at
    if started is None:
        raise AssertionError(f"{instance.name} does not drain")
    if _is_over(instance, started + timeout_s, timeout_s, now):
        # The pod's own grace would let preStop wait for the whole drain time once more.
        return Progress(True, "", _ended_at_deadline(instance, timeout_s), grace_s=DEADLINE_GRACE_S)
    if not is_unrouted(instance, routers):
        return Progress(False, "routers to let go of it")
    if instance.pod.drain_reason == Reason.NODE_LOST and instance.state is None:
        return Progress(True, "", _drained(instance, "its node is lost"))
    if instance.state is not None and instance.state.phase is EnginePhase.HUNG:
        event = (
            _cut(instance, "the engine hangs") if instance.in_flight != 0 else _drained(instance, "the engine hangs")
        )
        return Progress(True, "", event)
    if instance.engine_cannot_have_requests:
        return Progress(True, "", _drained(instance, "it never served"))
    if instance.in_flight is None:
        return Progress(False, "the agent to count the requests in flight")
    if instance.in_flight > 0:
        return Progress(False, "requests in flight")
    if instance.heard_at < _unrouted_at(started, routers, now) + SETTLE_S:
        return Progress(False, "a count of the requests in flight from after it was unrouted")
    return Progress(True, "", _drained(instance, "no request is in flight"))


def _is_over(instance: Instance, ends: float, timeout_s: float, now: float) -> bool:
    """True if our clock says that the drain's time is up, and its node's clock says so too or this process has watched
    the instance for as long by itself: a new leader whose clock is minutes ahead must cut nobody. Behind a wrong node
    clock, or with a silent agent, a restart of the operator so prolongs a drain by its timeout at most."""
    if now < ends:
        return False
    if instance.asked_s is not None and instance.asked_s >= timeout_s:
        return True
    said_at = instance.state.said_at if instance.state is not None else None
    if said_at is not None:
        return said_at + now - instance.heard_at >= ends
    return instance.asked_s is None


def _unrouted_at(started: float, routers: Sequence[RouterView], now: float) -> float:
    """When the last list reached a router, if that was after the drain began: an operator that died in between leaves
    the instance routed. A time in the future is another node's clock and says nothing."""
    times = [router.last.wanted_at for router in routers if router.speaks and router.last and router.last.wanted_at]
    return max([started, *(moment for moment in times if moment <= now)])


def timeout_s(revisions: Iterable[Revision], instance: Instance) -> float:
    """Seconds that the instance may drain: what its pod was built with."""
    for revision in revisions:
        if revision.id == instance.pod.revision:
            return float(revision.declaration.drain.timeout_seconds)
    return float(Drain().timeout_seconds)


def delete(instance: Instance, reason: str, grace_s: int | None = None) -> Delete:
    return Delete(pod_ref(instance), reason, scope=instance.name, grace_s=grace_s, instance=instance.name)


def cut_by_others(instance: Instance, now: float) -> Event | None:
    """A pod that others deleted reached the end of its agent's wait with requests in flight."""
    ends = instance.pod.deletion_at
    if ends is None or instance.pod.drain_started_at is not None or not instance.in_flight:
        return None
    if now < ends - PRESTOP_MARGIN_S:
        return None
    return _event_cut(instance, f"its grace period ends; {instance.in_flight} requests in flight are cut")


def _ended_at_deadline(instance: Instance, timeout_s: float) -> Event:
    if instance.in_flight == 0 or instance.engine_cannot_have_requests:
        return _drained(instance, "no request is in flight")
    return _cut(instance, f"the drain timeout of {int(timeout_s)} s passed")


def _drained(instance: Instance, why: str) -> Event:
    note = f"Instance {instance.name} was drained ({instance.pod.drain_reason}): {why}"
    return Event(str(Reason.DRAINED), note, instance=instance.name, action="Drain")


def _cut(instance: Instance, why: str) -> Event:
    count = instance.in_flight
    what = "an unknown number of requests" if count is None else f"{count} requests"
    return _event_cut(instance, f"{why}; {what} in flight are cut")


def _event_cut(instance: Instance, text: str) -> Event:
    note = f"Instance {instance.name}: {text}"
    return Event(str(Reason.REQUESTS_CUT), note, warning=True, instance=instance.name, action="Drain")
