"""When something has to be looked at again though no event will come.

Only moments that change a decision; an idle, healthy pool has none.
"""

import math
from collections.abc import Iterator
from typing import Final

from sluice.api.agent import EnginePhase
from sluice.plan import quarantine, revisions
from sluice.plan.failures import answers_wrongly_since
from sluice.plan.health import Instance
from sluice.plan.rollback import UNSTARTABLE_LIMIT_S, is_unstartable, unstartable_since
from sluice.plan.surge import SURGE_LIMIT_S
from sluice.plan.view import PoolView, ServiceView

UPGRADE_CHECK_S: Final = 30.0
"""How often a service looks whether its turn to roll out changed defaults has come: nothing tells when others end."""


def moments(view: ServiceView, pool: PoolView) -> Iterator[float]:
    """Seconds since the epoch, in any order, past ones too."""
    if view.desired is None or pool.declared is None:
        return
    attempt = pool.attempt
    if attempt is not None and attempt.failed is None:
        yield attempt.deadline_at
    policy = view.desired.spec.rollout.upgrade_policy
    if pool.target is not None and revisions.waits_for_others(view.snapshot, pool.target, policy):
        yield view.now + UPGRADE_CHECK_S
    if pool.no_room is not None:
        yield pool.no_room.since + SURGE_LIMIT_S
    problems = view.snapshot.status.get("problems") or []
    for instance in pool.live:
        yield _start_ends(pool, instance)
        yield quarantine.check_at(instance.pod)
        wrong_since = answers_wrongly_since(instance)
        if wrong_since is not None:
            yield wrong_since + view.desired.spec.health.hang_timeout_seconds
        if attempt is not None and attempt.failed is None and is_unstartable(instance):
            yield unstartable_since(instance, problems, view.now) + UNSTARTABLE_LIMIT_S


def _start_ends(pool: PoolView, instance: Instance) -> float:
    """When the instance's start has taken too long; infinite once it answered, or if its limit is unknown."""
    state = instance.state
    if state is None or state.phase not in (EnginePhase.LOADING, EnginePhase.VERIFYING):
        return math.inf
    for revision in pool.stored:
        if revision.id == instance.pod.revision:
            return state.started_at + revision.declaration.health.startup_timeout_seconds
    return math.inf
