"""Which instances don't serve as they should, worst first, and the Events that say so once.

The root cause is told in the words of whoever knows it: scheduler, kubelet, engine, API server (S081).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from sluice.api.conditions import Reason
from sluice.api.status import MAX_PROBLEMS
from sluice.plan.actions import Create, Outcome, Result
from sluice.plan.health import Instance, InstancePhase
from sluice.plan.snapshot import Event
from sluice.plan.times import format_time
from sluice.plan.view import ServiceView

MAX_PROBLEM_MESSAGE: Final = 400
"""Characters; sixteen problems stay below half of the 16 KiB that a status may have."""

_BAD_PHASES: Final = (InstancePhase.FAILED, InstancePhase.HUNG, InstancePhase.SUSPECT)
_BAD_REASONS: Final = frozenset(
    {
        Reason.UNSCHEDULABLE,
        Reason.IMAGE_PULL,
        Reason.CRASH_LOOP,
        Reason.OUT_OF_MEMORY,
        Reason.STARTUP_TIMEOUT,
        Reason.SELF_TEST_FAILED,
        Reason.SELF_TEST_UNAUTHORIZED,
    }
)


def is_problem(instance: Instance) -> bool:
    """False while an instance starts, serves or leaves as it should."""
    if instance.is_leaving:
        return False
    if instance.is_serving:
        return instance.reason in (Reason.AGENT_SILENT, Reason.SELF_TEST_UNAUTHORIZED, Reason.METRICS_MISSING)
    return instance.phase in _BAD_PHASES or instance.reason in _BAD_REASONS


def problem_instances(view: ServiceView) -> list[Instance]:
    """At most `MAX_PROBLEMS`."""
    return sorted((i for i in view.instances if is_problem(i)), key=_rank)[:MAX_PROBLEMS]


def problem_entries(view: ServiceView, results: Iterable[Result]) -> list[dict[str, Any]]:
    """`status.problems`: instances first, then those that could not be created. `since` stays while the reason does."""
    before = {(p.get("name"), p.get("reason")): p.get("since") for p in view.snapshot.status.get("problems") or []}
    entries = [_entry(i.name, i.phase, i.reason, i.message, i.pod.node) for i in problem_instances(view)]
    for result in results:
        if isinstance(result.action, Create) and result.action.instance and result.outcome is Outcome.REFUSED:
            entries.append(_entry(result.action.instance, InstancePhase.PENDING, result.reason, result.message, ""))
    now = format_time(view.now)
    return [{**entry, "since": before.get((entry["name"], entry["reason"])) or now} for entry in entries[:MAX_PROBLEMS]]


def new_problem_events(view: ServiceView) -> Iterator[Event]:
    """One Event per problem that status does not show yet: told once, also across restarts of the operator."""
    told = {(p.get("name"), p.get("reason")) for p in view.snapshot.status.get("problems") or []}
    for instance in problem_instances(view):
        if (instance.name, str(instance.reason)) not in told:
            note = f"Instance {instance.name} ({instance.phase}): {instance.message}"
            yield Event(str(instance.reason), note, warning=True, instance=instance.name)


def outcome_events(results: Sequence[Result]) -> tuple[Event, ...]:
    """Pods that this pass really created; refusals are told by whoever carried the actions out."""
    return tuple(
        Event(
            str(Reason.CREATED),
            f"Created instance {result.action.instance}",
            instance=result.action.instance,
            action="Create",
        )
        for result in results
        if isinstance(result.action, Create) and result.action.instance and result.outcome is Outcome.DONE
    )


def _rank(instance: Instance) -> tuple[int, str]:
    order = [*_BAD_PHASES, *(p for p in InstancePhase if p not in _BAD_PHASES)]
    return order.index(instance.phase), instance.name


def _entry(name: str, phase: str, reason: str, message: str, node: str) -> dict[str, Any]:
    text = message if len(message) <= MAX_PROBLEM_MESSAGE else message[: MAX_PROBLEM_MESSAGE - 1] + "…"
    return {"name": name, "phase": str(phase), "reason": str(reason), "message": text, "node": node}
