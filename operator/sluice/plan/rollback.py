"""Whether a rollout still moves, and what follows when it does not.

A rollout has failed when its instances used up their chances, can't be started at all, or nothing moved on for the
progress deadline. With a revision to go back to, that verdict is final for this attempt (it stands in
`status.pools[].rollout`), so a bad revision is not offered again and again; another attempt is a spec that differs in
more than replicas, or another value of the annotation `retry-at`. A first rollout has nothing to go back to: it is
called failed while it fails, and goes on trying with growing pauses.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sluice.api import names
from sluice.api.conditions import Reason
from sluice.api.v1alpha1 import OnFailure, Rollout
from sluice.plan.backoff import Slot
from sluice.plan.health import Instance, InstancePhase
from sluice.plan.snapshot import ServiceSnapshot
from sluice.plan.times import format_time, parse_time

UNSTARTABLE_LIMIT_S: Final = 120.0
"""How long an instance of a new revision may be unable to start (image, configuration) before the rollout has failed:
the kubelet tries an image at 0, 10, 30 and 70 s."""
FAILED_INSTANCES: Final = 3
"""Instances of a new revision that failed in whatever way, after which the rollout has failed although others serve."""
_MESSAGE: Final = 512


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try to bring a pool to a revision."""

    revision: str
    token: str
    progress_at: float
    """Seconds since the epoch."""
    serving: int
    older: int
    failed: Reason | None = None
    message: str = ""
    can_fall_back: bool = False
    on_failure: OnFailure = OnFailure.ROLLBACK
    deadline_at: float = 0.0

    @property
    def is_rolled_back(self) -> bool:
        return self.failed is not None and self.can_fall_back and self.on_failure is OnFailure.ROLLBACK

    @property
    def is_held(self) -> bool:
        return self.failed is not None and self.can_fall_back and self.on_failure is OnFailure.HOLD


@dataclass(frozen=True, slots=True)
class Observed:
    """What an attempt is judged by."""

    instances: Sequence[Instance]
    """All of the pool."""
    slots: Sequence[Slot]
    can_fall_back: bool
    """Another revision served in full before."""
    is_complete: bool
    """All instances are of the revision, and all serve or once did."""
    is_paused: bool
    problems: Sequence[Mapping[str, Any]]
    """Of the status so far, for how long something lasts."""


def token(snapshot: ServiceSnapshot) -> str:
    """What makes an attempt: the spec, but for sizes, and the user's wish to try again."""
    spec = {key: value for key, value in (snapshot.service.get("spec") or {}).items() if key != "suspend"}
    pools = spec.get("pools")
    if isinstance(pools, list):
        spec["pools"] = [{**pool, "replicas": None} if isinstance(pool, Mapping) else pool for pool in pools]
    return names.short_hash(json.dumps(spec, sort_keys=True), retry_at(snapshot), length=10)


def retry_at(snapshot: ServiceSnapshot) -> str:
    annotations = snapshot.service["metadata"].get("annotations") or {}
    return str(annotations.get(names.ANNOTATION_RETRY_AT) or "")[:256]


def is_new_try(snapshot: ServiceSnapshot, pool_status: Mapping[str, Any], revision: str) -> bool:
    """Somebody wants what failed before to be tried again now."""
    said = _said(pool_status)
    wished = retry_at(snapshot)
    if wished and wished != str(snapshot.status.get("lastHandledRetryAt") or ""):
        return True
    return said.get("revision") == revision and said.get("attempt") != token(snapshot)


def observe_attempt(
    pool_status: Mapping[str, Any], revision: str, key: str, seen: Observed, rollout: Rollout, now: float
) -> Attempt | None:
    """The attempt under way or the one that failed; None when there is nothing to roll out."""
    said = _said(pool_status)
    is_same = said.get("revision") == revision and said.get("attempt") == key
    failed = _reason(said.get("failed")) if is_same and seen.can_fall_back else None
    if failed is None and (seen.is_complete or (seen.is_paused and seen.can_fall_back)):
        return None
    ours = [i for i in seen.instances if i.pod.revision == revision]
    serving, older = sum(i.is_serving for i in ours), len(seen.instances) - len(ours)
    progress_at = parse_time(said.get("progressAt")) if is_same else None
    if progress_at is not None:
        best, least = _number(said.get("serving"), serving), _number(said.get("older"), older)
        if failed is None and (serving > best or older < least):
            progress_at = float(int(now))
        serving, older = max(best, serving), min(least, older)
    else:
        progress_at = float(int(now))
    deadline_at = progress_at + rollout.progress_deadline_seconds
    message = str(said.get("message") or "") if failed else ""
    if failed is None:
        failed, message = _evidence(ours, revision, seen, deadline_at, rollout, now)
    return Attempt(
        revision=revision,
        token=key,
        progress_at=progress_at,
        serving=serving,
        older=older,
        failed=failed,
        message=message[:_MESSAGE],
        can_fall_back=seen.can_fall_back,
        on_failure=rollout.on_failure,
        deadline_at=deadline_at,
    )


def is_unstartable(instance: Instance) -> bool:
    """Its kubelet can't start a container of it: image or configuration."""
    if not instance.is_live:
        return False
    failed = instance.phase is InstancePhase.FAILED and instance.reason is Reason.POD_FAILED
    return failed or instance.reason is Reason.IMAGE_PULL


def unstartable_since(instance: Instance, problems: Iterable[Mapping[str, Any]], now: float) -> float:
    """Since when, as status noted it; now if it did not yet."""
    for problem in problems:
        if problem.get("name") == instance.name and problem.get("reason") == instance.reason:
            return parse_time(problem.get("since")) or now
    return now


def entry(attempt: Attempt | None) -> dict[str, Any] | None:
    """As `status.pools[].rollout` holds it."""
    if attempt is None:
        return None
    return {
        "revision": attempt.revision,
        "attempt": attempt.token,
        "progressAt": format_time(attempt.progress_at),
        "serving": attempt.serving,
        "older": attempt.older,
        "failed": str(attempt.failed or ""),
        "message": attempt.message,
    }


def _evidence(
    ours: Sequence[Instance], revision: str, seen: Observed, deadline_at: float, rollout: Rollout, now: float
) -> tuple[Reason | None, str]:
    """Why the attempt can't succeed, the most telling cause first."""
    slots = [s for s in seen.slots if s.revision == revision and s.failures > 0]
    spent = next((s for s in slots if s.is_exhausted), None)
    count = sum(s.failures for s in slots)
    if spent is not None and (count >= FAILED_INSTANCES or not any(i.is_serving for i in ours)):
        return Reason(spent.reason), f"{count} instances of revision {revision} failed; {_words(ours)}"
    if count >= FAILED_INSTANCES:
        return Reason.POD_FAILED, f"{count} instances of revision {revision} failed; {_words(ours)}"
    for instance in ours:
        if is_unstartable(instance) and now >= unstartable_since(instance, seen.problems, now) + UNSTARTABLE_LIMIT_S:
            text = f"{instance.name} could not start for {int(UNSTARTABLE_LIMIT_S)} s: {instance.message}"
            return instance.reason, text
    if now >= deadline_at:
        text = f"no progress for {rollout.progress_deadline_seconds} s (spec.rollout.progressDeadlineSeconds)"
        return Reason.PROGRESS_DEADLINE_EXCEEDED, f"{text}; {_words(ours)}"
    return None, ""


def _words(ours: Sequence[Instance]) -> str:
    """What is the matter with the instances that are there, in their own words."""
    told = [f"{i.name}: {i.gives_up.message if i.gives_up else i.message}" for i in ours if not i.is_serving]
    return told[0] if told else "see status.lastFailures"


def _said(pool_status: Mapping[str, Any]) -> Mapping[str, Any]:
    said = pool_status.get("rollout")
    return said if isinstance(said, Mapping) else {}


def _number(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) else otherwise


def _reason(text: Any) -> Reason | None:
    """A reason that this version does not know (another version wrote it) is a failure all the same."""
    if not isinstance(text, str) or not text:
        return None
    return Reason(text) if text in Reason.__members__.values() else Reason.POD_FAILED
