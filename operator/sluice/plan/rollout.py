"""The next step of a pool: how many instances to create, and which ones leave, from what is observed now.

Stateless: the same observation gives the same step, so a restart or a third edit in a row loses nothing (S024).
One budget over all revisions and all reasons to leave (D6): an available instance may leave only while
`available - 1 >= desired - max_unavailable`. A superseded instance that can't serve costs nothing and goes first.

An instance that has to leave its node (`Member.moves`, see `disruption`) goes the way of a superseded one: its
replacement serves before it is drained.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.api.conditions import Reason
from sluice.plan.scale import Member, victims

MOVES_AT_ONCE = 1
"""Replacements under way for instances that move, beside what a rollout may surge (also where `maxSurge` is 0)."""


@dataclass(frozen=True, slots=True)
class Budget:
    """All numbers are instances of one pool."""

    desired: int
    max_surge: int
    max_unavailable: int
    moves_unavailable: int = 0
    """Instances that may be missing for the sake of those that move: `max_unavailable` once there is no place for their
    replacement, else 0."""


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
    leaving ones by our own creation (one more than `desired` at least, if an instance moves), never fewer than
    `desired - max_unavailable` serving by our own drains.
    """
    old = [m for m in members if m.must_go]
    new = [m for m in members if not m.must_go]
    idle_old = [m for m in old if not m.may_serve]
    surplus = _surplus(new, len(new) - budget.desired, members, budget)
    available = sum(m.is_serving for m in members) - sum(m.is_serving for m in surplus)
    busy_old = _affordable([m for m in old if m.may_serve], available, budget)

    going = len(idle_old) + len(busy_old)
    kept_new = len(new) - len(surplus)
    kept = len(members) - going - len(surplus)
    room_to_create = budget.desired + _surge(members, budget) - kept - leaving - going
    return Step(
        create=max(0, min(budget.desired - kept_new, room_to_create)),
        leave=(
            *(Leave(m.name, m.moves or Reason.SUPERSEDED) for m in (*victims(idle_old, len(idle_old)), *busy_old)),
            *(Leave(m.name, Reason.SCALE_IN) for m in surplus),
        ),
    )


def held_step(members: Sequence[Member], budget: Budget, leaving: int = 0) -> Step:
    """The step while no revision may be rolled out (paused, or the target can't be resolved).

    Missing instances are replaced on the current revision, moving ones too; too many leave. A surge that was under way
    when the rollout was paused stays.
    """
    moving = [m for m in members if m.moves]
    staying = [m for m in members if not m.moves]
    idle = [m for m in moving if not m.may_serve]
    mixed = len({m.is_new for m in staying}) > 1
    allowed = budget.desired + (budget.max_surge if mixed and budget.desired else 0)
    surplus = _surplus(staying, len(staying) - allowed, members, budget)
    available = sum(m.is_serving for m in members) - sum(m.is_serving for m in surplus)
    going = (*victims(idle, len(idle)), *_affordable([m for m in moving if m.may_serve], available, budget))

    kept = len(members) - len(going) - len(surplus)
    room_to_create = budget.desired + MOVES_AT_ONCE - kept - leaving - len(going)
    missing = budget.desired - (len(staying) - len(surplus))
    return Step(
        create=max(0, min(missing, room_to_create) if moving else missing),
        leave=(
            *(Leave(m.name, m.moves or Reason.SUPERSEDED) for m in going),
            *(Leave(m.name, Reason.SCALE_IN) for m in surplus),
        ),
    )


def removed_step(members: Sequence[Member], others_serve: bool) -> Step:
    """The step of a pool that is no longer declared: nobody new; whoever serves stays until the other pools do."""
    return Step(
        create=0,
        leave=tuple(Leave(m.name, Reason.SCALE_IN) for m in members if others_serve or not m.may_serve),
    )


def _surplus(
    candidates: Sequence[Member], excess: int, members: Sequence[Member], budget: Budget
) -> tuple[Member, ...]:
    """Whom of too many to let go. One that serves leaves only while enough others do: it may be that the one that was
    asked to stay (`is_kept`) does not serve yet."""
    spare = max(0, sum(m.is_serving for m in members) - budget.desired)
    picked = []
    for member in victims(candidates, excess):
        if member.is_serving and spare == 0:
            continue
        spare -= member.is_serving
        picked.append(member)
    return tuple(picked)


def _affordable(candidates: Sequence[Member], available: int, budget: Budget) -> tuple[Member, ...]:
    """Which of those that must go may go now; the moving ones of the present revision by their own, smaller budget."""
    moved = [m for m in candidates if m.is_new]
    superseded = [m for m in candidates if not m.is_new]
    first = victims(moved, available - max(0, budget.desired - budget.moves_unavailable))
    room = available - len(first) - max(0, budget.desired - budget.max_unavailable)
    return (*first, *victims(superseded, room))


def _surge(members: Sequence[Member], budget: Budget) -> int:
    """Instances above `desired` that may be there; what only moves is replaced one by one."""
    moves = MOVES_AT_ONCE if any(m.moves for m in members) else 0
    rolls = any(not m.is_new for m in members)
    return max(budget.max_surge, moves) if rolls or not moves else moves
