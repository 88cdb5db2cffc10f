"""What a rollout does when there is no room for one instance more (D7, S029).

With `maxUnavailable` unset the rollout keeps every instance while a surge finds a place; when a new pod finds none for
`SURGE_LIMIT_S`, one old instance is drained first. An explicit value is obeyed, and status says what is missing.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sluice.api.conditions import Reason
from sluice.api.v1alpha1 import Rollout
from sluice.plan.health import Instance
from sluice.plan.times import parse_time

SURGE_LIMIT_S: Final = 60.0
"""How long a new pod may find no place; a scheduler that has room needs far less than a second."""


@dataclass(frozen=True, slots=True)
class NoRoom:
    """A rollout whose next instance finds no place."""

    since: float
    """Seconds since the epoch."""
    what: str
    """In the words of the scheduler or the API server."""

    def is_certain(self, now: float) -> bool:
        return now >= self.since + SURGE_LIMIT_S


def find_no_room(
    instances: Sequence[Instance], revision: str, refused: Collection[str], problems: Sequence[Mapping[str, Any]]
) -> NoRoom | None:
    """What keeps the revision's next instance out, while instances of another one hold the room.

    `refused`: names that the next instances would have; their quota refusals stand in status among the `problems`.
    """
    if not any(i.is_live and i.pod.revision != revision for i in instances):
        return None
    for instance in instances:
        pod = instance.pod
        is_waiting = instance.is_live and pod.revision == revision and instance.reason is Reason.UNSCHEDULABLE
        if is_waiting and not pod.avoids:  # one that avoids nodes is built anew first (`quarantine`)
            return NoRoom(pod.unschedulable_since or pod.created_at, pod.scheduling_message)
    for problem in problems:
        since = parse_time(problem.get("since"))
        if problem.get("reason") == Reason.QUOTA_EXCEEDED and problem.get("name") in refused and since is not None:
            return NoRoom(since, str(problem.get("message") or ""))
    return None


def max_unavailable(rollout: Rollout, no_room: NoRoom | None, now: float) -> int:
    """Instances that may be missing now."""
    if rollout.max_unavailable is not None:
        return rollout.max_unavailable
    return 1 if no_room is not None and no_room.is_certain(now) else 0


def explain(rollout: Rollout, no_room: NoRoom) -> str:
    """What is missing, and what is done about it."""
    if rollout.max_unavailable is None:
        then = "one instance is drained before its replacement starts (spec.rollout.maxUnavailable is unset)"
    elif rollout.max_unavailable == 0:
        then = "spec.rollout.maxUnavailable is 0, so it waits: add capacity, or allow 1"
    else:
        then = f"up to {rollout.max_unavailable} are drained first (spec.rollout.maxUnavailable)"
    return f"no room for an instance more: {no_room.what.rstrip('.')}; {then}"
