"""The next step of a pool: how many instances to create, and which ones leave, from what is observed now.

Stateless: the same observation gives the same step, so a restart or a third edit in a row loses nothing (S024).
One budget over all revisions (D6): an available instance may leave only while
`available - 1 >= desired - max_unavailable`. A superseded instance that can't serve costs nothing and goes first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.api.conditions import Reason
from sluice.plan.scale import Member, victims


@dataclass(frozen=True, slots=True)
class Budget:
    """All numbers are instances of one pool."""

    desired: int
    max_surge: int
    max_unavailable: int


@dataclass(frozen=True, slots=True)
class Leave:
    name: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Step:
    create: int
    """New instances to ask for, on the target revision."""
    leave: tuple[Leave, ...]
    """Instances whose drain starts now."""


def next_step(members: Sequence[Member], leaving: int, budget: Budget) -> Step:
    """What to do next.

    `members` are the live instances of all revisions; `leaving` is how many superseded ones still finish their
    requests: they hold accelerators, so they count against the surge. Never more than `desired + max_surge` live and
    leaving ones by our own creation, never fewer than `desired - max_unavailable` serving by our own drains.
    """
    old = [m for m in members if not m.is_new]
    new = [m for m in members if m.is_new]
    idle_old = [m for m in old if not m.may_serve]
    surplus = victims(new, len(new) - budget.desired)
    available = sum(m.is_serving for m in members) - sum(m.is_serving for m in surplus)
    room = available - max(0, budget.desired - budget.max_unavailable)
    busy_old = victims([m for m in old if m.may_serve], room)

    superseded = len(idle_old) + len(busy_old)
    kept_new = len(new) - len(surplus)
    kept = len(members) - superseded - len(surplus)
    room_to_create = budget.desired + budget.max_surge - kept - leaving - superseded
    return Step(
        create=max(0, min(budget.desired - kept_new, room_to_create)),
        leave=(
            *(Leave(m.name, Reason.SUPERSEDED) for m in (*victims(idle_old, len(idle_old)), *busy_old)),
            *(Leave(m.name, Reason.SCALE_IN) for m in surplus),
        ),
    )


def held_step(members: Sequence[Member], budget: Budget) -> Step:
    """The step while no revision may be rolled out (paused, or the target can't be resolved).

    Missing instances are replaced on the current revision; too many leave. A surge that was under way when the
    rollout was paused stays.
    """
    mixed = len({m.is_new for m in members}) > 1
    allowed = budget.desired + (budget.max_surge if mixed and budget.desired else 0)
    return Step(
        create=max(0, budget.desired - len(members)),
        leave=tuple(Leave(m.name, Reason.SCALE_IN) for m in victims(members, len(members) - allowed)),
    )


def removed_step(members: Sequence[Member], others_serve: bool) -> Step:
    """The step of a pool that is no longer declared: nobody new; whoever serves stays until the other pools do."""
    return Step(
        create=0,
        leave=tuple(Leave(m.name, Reason.SCALE_IN) for m in members if others_serve or not m.may_serve),
    )
