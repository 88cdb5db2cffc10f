"""Which instances leave when there are more than wanted.

Whoever can't serve yet goes before anyone who serves (S023); of those who serve the one with the least to finish, then
the one with the least cached.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sluice.api.conditions import Reason


@dataclass(frozen=True, slots=True)
class Member:
    """A live instance of a pool, as scaling and rollout see it."""

    name: str
    index: int
    is_new: bool
    """On the pool's target revision."""
    is_serving: bool
    """Available: every router lists it, and Kubernetes counts it as Ready, so that a disruption budget protects it."""
    may_serve: bool
    """Serves, or did a moment ago and only a router's word is missing: a router that restarts must not make healthy
    instances look expendable."""
    in_flight: int | None
    """Requests in the engine; None (unknown) counts as the most, never as none."""
    prompt_tokens: float | None = None
    """Worked through in this engine run: what its prefix cache was filled from, since no engine tells what is in it.
    None (unknown) counts as the most."""
    moves: Reason | None = None
    """Why it has to be replaced whatever its revision: its node goes, or a user asked for it."""
    is_kept: bool = False
    """A user just called its drain off: others go first."""

    @property
    def must_go(self) -> bool:
        return not self.is_new or self.moves is not None


def victims(members: Sequence[Member], excess: int) -> tuple[Member, ...]:
    """The `excess` members to let go, none if `excess` <= 0; the same members give the same answer in any order."""
    return tuple(sorted(members, key=_cost)[: max(0, excess)])


def _cost(member: Member) -> tuple[bool, bool, bool, bool, float, float, int, str]:
    busy = math.inf if member.in_flight is None else float(member.in_flight)
    cached = math.inf if member.prompt_tokens is None else member.prompt_tokens
    stays = member.moves is None
    return member.is_kept, member.may_serve, stays, member.is_new, busy, cached, -member.index, member.name
