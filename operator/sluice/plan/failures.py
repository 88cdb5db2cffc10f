"""What has failed, from the facts: when an instance is given up, and the evidence that outlives its pod.

An unhealthy instance is unrouted at once and the kubelet restarts its engine in place. It is given up (drained, then
replaced) when that does not help: more restarts than the budget, a start that never ends, or an idle engine that goes
on answering wrongly. Invariants:
- Unknown never gives up: only what the kubelet or a fresh word of the agent says counts; silence proves nothing.
- Nothing is remembered: restarts are counted from the pod's own status, the evidence is `status.lastFailures`.
  Losing that status costs history, never an instance.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sluice.api import names
from sluice.api.agent import EnginePhase
from sluice.api.conditions import Reason
from sluice.api.status import MAX_FAILURES
from sluice.api.v1alpha1 import Health
from sluice.plan.health import GiveUp, Instance, Verdict, exit_reason
from sluice.plan.snapshot import ContainerFacts, ContainerPhase, PodFacts
from sluice.plan.timeline import timeline
from sluice.plan.times import format_time, parse_time

GIVE_UP_REASONS: Final = frozenset({Reason.RESTARTS_EXHAUSTED, Reason.STARTUP_TIMEOUT, Reason.SELF_TEST_FAILED})
"""Drain reasons of instances that failed for good."""

_MESSAGE: Final = 2048
"""Characters of the newest failure's message; the kubelet keeps 2 KiB of a log (`FallbackToLogsOnError`)."""
_OLDER_MESSAGE: Final = 256


@dataclass(frozen=True, slots=True)
class Failure:
    """One entry of `status.lastFailures`; one per instance, its last."""

    instance: str
    node: str
    revision: str
    reason: str
    exit_code: int | None
    message: str
    at: float
    """Seconds since the epoch."""
    replaced: bool
    """The instance was given up; False: restarted in place."""


def crashes(engine: ContainerFacts, window_s: float, now: float) -> int:
    """How often the engine's container ended in the last `window_s` seconds, from what the kubelet shows.

    It shows a total and the last run only. The last end outside of the window: none. The last run longer than the
    window: one. Otherwise the total is taken, which is exact for pods younger than the window and too high for an older
    one with earlier crashes: that one is then replaced a little early, while it is down anyway.
    """
    total = engine.restarts
    if engine.phase is not ContainerPhase.RUNNING and engine.exit_code is not None:
        total += 1  # ended, and not yet restarted
    if total == 0 or engine.ended_at is None:
        return total
    if now - engine.ended_at > window_s:
        return 0
    run_began = engine.ended_run_started_at
    return 1 if run_began is not None and engine.ended_at - run_began > window_s else total


def give_up(instance: Instance, health: Health, now: float) -> GiveUp | None:
    """Why the instance has to be replaced, or None while it serves, starts, or may still be helped in place.

    `health` is the present spec's, not what the pod was built with: the budget is the operator's, not the pod's.
    """
    if not instance.is_live or instance.verdict is not Verdict.UNROUTE:
        return None
    engine = instance.pod.container(names.CONTAINER_ENGINE)
    count = crashes(engine, health.restart_window_seconds, now) if engine else 0
    if count > health.max_restarts:
        limit = f"spec.health.maxRestarts is {health.max_restarts} in {health.restart_window_seconds} s"
        return GiveUp(Reason.RESTARTS_EXHAUSTED, f"its engine ended {count} times ({limit}): {instance.message}")
    if instance.reason is Reason.STARTUP_TIMEOUT:
        start = timeline(instance).text
        return GiveUp(Reason.STARTUP_TIMEOUT, f"{instance.message}; seconds of its start: {start or 'none known'}")
    wrong_since = answers_wrongly_since(instance)
    if wrong_since is not None and now - wrong_since >= health.hang_timeout_seconds:
        return GiveUp(
            Reason.SELF_TEST_FAILED, f"idle, and wrong for {health.hang_timeout_seconds} s: {instance.message}"
        )
    return None


def answers_wrongly_since(instance: Instance) -> float | None:
    """Since when an idle engine answers self-tests with errors; None if it doesn't, or has work (then it may be busy).

    Such an engine is alive, so the kubelet never restarts it.
    """
    state = instance.state
    if state is None or state.phase is not EnginePhase.SUSPECT or state.in_flight != 0:
        return None
    return state.phase_since if state.reason == Reason.SELF_TEST_FAILED else None


def was_refused(pod: PodFacts) -> bool:
    """The node's kubelet did not admit the pod: it ended without any container having run (S093)."""
    return pod.phase == "Failed" and not pod.disruption_target and not any(c.container_id for c in pod.containers)


def load(status: Mapping[str, Any]) -> tuple[Failure, ...]:
    """Entries of a status, unreadable ones left out."""
    return tuple(f for entry in status.get("lastFailures") or [] if (f := _parse(entry)) is not None)


def recent(before: Sequence[Failure], instances: Iterable[Instance], now: float) -> tuple[Failure, ...]:
    """The last failures, newest first, one per instance: what status knows and what the pods show now."""
    known = {failure.instance: failure for failure in before}
    for instance in instances:
        seen = _observe(instance, known.get(instance.name), now)
        if seen is not None:
            known[seen.instance] = seen
    ordered = sorted(known.values(), key=lambda f: (-int(f.at), f.instance))[:MAX_FAILURES]
    return tuple(_cut(f, _MESSAGE if rank == 0 else _OLDER_MESSAGE) for rank, f in enumerate(ordered))


def entries(failures: Iterable[Failure]) -> list[dict[str, Any]]:
    """As `status.lastFailures` holds them."""
    made = []
    for failure in failures:
        entry: dict[str, Any] = {
            "instance": failure.instance,
            "node": failure.node,
            "revision": failure.revision,
            "reason": failure.reason,
            "message": failure.message,
            "at": format_time(failure.at),
            "replaced": failure.replaced,
        }
        made.append(entry if failure.exit_code is None else {**entry, "exitCode": failure.exit_code})
    return made


def _observe(instance: Instance, before: Failure | None, now: float) -> Failure | None:
    """The instance's failure as its pod shows it; None when there is none, or none that is news.

    A pod that others, or its node's shutdown, told to stop is passed over: how its engine ends then is no failure, and
    what failed before was noted before.
    """
    pod = instance.pod
    engine = pod.container(names.CONTAINER_ENGINE)
    ended = engine is not None and engine.exit_code is not None
    if (
        pod.deletion_at is not None
        or instance.is_ended_by_kubelet
        or not (ended or instance.is_dead or instance.gives_up)
    ):
        return None
    reason, message, at = _cause(instance, engine if ended else None)
    if at is None:
        at = before.at if before is not None and before.reason == reason else now
    replaced = instance.is_dead or instance.gives_up is not None or pod.drain_reason in GIVE_UP_REASONS
    return Failure(
        instance=instance.name,
        node=pod.node,
        revision=pod.revision,
        reason=str(reason),
        exit_code=engine.exit_code if engine is not None else None,
        message=message,
        at=at,
        replaced=replaced or (before is not None and before.replaced),
    )


def _cause(instance: Instance, ended: ContainerFacts | None) -> tuple[Reason, str, float | None]:
    """Reason, message, and when, if the facts say so."""
    pod = instance.pod
    if was_refused(pod):
        return Reason.ADMISSION_FAILED, ": ".join(part for part in (pod.reason, pod.message) if part), None
    if instance.gives_up is not None and instance.gives_up.reason is not Reason.RESTARTS_EXHAUSTED:
        return instance.gives_up.reason, instance.gives_up.message, None
    if instance.is_dead and (ended is None or pod.reason):
        return Reason.POD_FAILED, ": ".join(part for part in (pod.reason, pod.message) if part), None
    if ended is None:
        return instance.reason, instance.message, None
    message = ended.message if ended.phase is ContainerPhase.TERMINATED else ended.last_message
    return exit_reason(ended), message.strip() or "the container left no message", ended.ended_at


def _cut(failure: Failure, limit: int) -> Failure:
    text = failure.message
    return failure if len(text) <= limit else replace(failure, message="…" + text[len(text) - limit + 1 :])


def _parse(entry: Any) -> Failure | None:
    if not isinstance(entry, Mapping):
        return None
    at, instance = parse_time(entry.get("at")), entry.get("instance")
    if at is None or not isinstance(instance, str):
        return None
    code = entry.get("exitCode")
    return Failure(
        instance=instance,
        node=str(entry.get("node") or ""),
        revision=str(entry.get("revision") or ""),
        reason=str(entry.get("reason") or Reason.POD_FAILED),
        exit_code=code if isinstance(code, int) else None,
        message=str(entry.get("message") or ""),
        at=at,
        replaced=entry.get("replaced") is True,
    )
