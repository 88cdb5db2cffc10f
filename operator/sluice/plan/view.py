"""One pass's picture of a service: the spec resolved, every pool with its revisions and instances, the routers.

Made once from the snapshot; planner and status both decide from it, so they never disagree.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sluice.api import names
from sluice.api.conditions import Reason
from sluice.api.v1alpha1 import UpgradePolicy
from sluice.plan import backoff, failures, quarantine, revisions, rollback, surge, template
from sluice.plan.backoff import Slot
from sluice.plan.declared import Desired, DesiredPool, PoolDeclaration, Refused, declare
from sluice.plan.engines import ADAPTERS
from sluice.plan.failures import Failure
from sluice.plan.health import Instance, assess
from sluice.plan.pods import pod_name
from sluice.plan.quarantine import AvoidedNode
from sluice.plan.revisions import Revision
from sluice.plan.rollback import Attempt
from sluice.plan.routing import RouterView, confirmed, router_views
from sluice.plan.snapshot import PodFacts, ServiceSnapshot
from sluice.plan.surge import NoRoom

MAX_EPOCH: Final = 10**8
_SERVICE_NAME: Final = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class PoolView:
    name: str
    declared: DesiredPool | None
    """None: not in the spec (any more), or the spec can't be read."""
    stored: tuple[Revision, ...]
    """Oldest first."""
    target: Revision | None
    """What new instances are built from; None: not declared, or it can't be resolved."""
    current: Revision | None
    """The revision that served last in full; None before the first instance."""
    instances: tuple[Instance, ...]
    epoch: int
    """Highest build number seen on the pool's pods or noted in status; 0: none yet."""
    was_complete: bool
    """Status says that the target served in full."""
    never_served: bool = False
    """Status knows of no revision that served in full; False also when status was lost."""
    slots: tuple[Slot, ...] = ()
    """Places whose instances failed."""
    attempt: Attempt | None = None
    """The rollout under way, or the one that failed."""
    no_room: NoRoom | None = None
    """The rollout's next instance finds no place."""

    @property
    def desired(self) -> int:
        return self.declared.replicas if self.declared else 0

    @property
    def live(self) -> tuple[Instance, ...]:
        return tuple(i for i in self.instances if i.is_live)

    @property
    def serving(self) -> int:
        return sum(i.is_serving for i in self.instances)

    @property
    def goal(self) -> Revision | None:
        """What the pool is brought to: the target, or after a failed rollout the revision before it."""
        return self.current if self.attempt is not None and self.attempt.is_rolled_back else self.target

    def is_updated(self, instance: Instance) -> bool:
        return self.target is not None and instance.pod.revision == self.target.id

    def is_on_goal(self, instance: Instance) -> bool:
        return self.goal is not None and instance.pod.revision == self.goal.id

    @property
    def is_rolled_out(self) -> bool:
        """Nothing of another revision is left, leaving instances included, and the target once served in full.

        An instance that dies later starts no rollout (S011): once complete, it stays so until the target changes.
        """
        if self.target is None or not all(self.is_updated(i) for i in self.instances):
            return False
        if self.attempt is not None and (self.attempt.is_rolled_back or self.attempt.is_held):
            return False
        return self.was_complete or self.serving >= self.desired


@dataclass(frozen=True, slots=True)
class ServiceView:
    snapshot: ServiceSnapshot
    now: float
    desired: Desired | None
    """None: the spec can't be read."""
    refusals: tuple[Refused, ...]
    """Everything that a human has to change; empty: accepted."""
    pools: tuple[PoolView, ...]
    """Declared ones in spec order, then those that only have instances or revisions left."""
    routers: tuple[RouterView, ...]
    failures: tuple[Failure, ...] = ()
    """The last ones, newest first; those of instances that are gone too."""
    avoided: tuple[AvoidedNode, ...] = ()
    """Nodes in quarantine, and those whose time has come."""

    @property
    def instances(self) -> tuple[Instance, ...]:
        return tuple(i for pool in self.pools for i in pool.instances)

    @property
    def revisions(self) -> tuple[Revision, ...]:
        """All that an instance may be of."""
        return tuple(r for pool in self.pools for r in (*pool.stored, *((pool.target,) if pool.target else ())))


def observe(snapshot: ServiceSnapshot, now: float) -> ServiceView:
    desired = declare(snapshot)
    refusals = [desired] if isinstance(desired, Refused) else [*_name_refusal(snapshot), *desired.refusals]
    stored = revisions.load(snapshot)
    routers = router_views(snapshot, now)
    pods = _engine_pods(snapshot)
    declared = {} if isinstance(desired, Refused) else {pool.name: pool for pool in desired.pools}
    policy = UpgradePolicy.ON_NEW_REVISION if isinstance(desired, Refused) else desired.spec.rollout.upgrade_policy
    pools = []
    for name in dict.fromkeys([*declared, *sorted(pods), *sorted(stored)]):
        pool = declared.get(name)
        found = _check(pool.declaration) if pool and pool.declaration else ()
        refusals += found
        usable = pool.declaration if pool and not found and not _name_refusal(snapshot) else None
        target = _target(snapshot, name, usable, stored.get(name, ()), policy)
        pools.append(_pool(snapshot, name, pool, target, stored.get(name, ()), pods.get(name, ()), routers, now))
    known = None if isinstance(desired, Refused) else desired
    judged = tuple(_judged(snapshot, pool, known, now) for pool in pools)
    everyone = [instance for pool in judged for instance in pool.instances]
    recent = failures.recent(failures.load(snapshot.status), everyone, now)
    return ServiceView(
        snapshot=snapshot,
        now=now,
        desired=known,
        refusals=tuple(dict.fromkeys(refusals)),
        pools=judged,
        routers=routers,
        failures=recent,
        avoided=quarantine.update(quarantine.load(snapshot.status), recent, everyone, now),
    )


def _target(
    snapshot: ServiceSnapshot,
    pool: str,
    declaration: PoolDeclaration | None,
    stored: tuple[Revision, ...],
    policy: UpgradePolicy,
) -> Revision | None:
    if declaration is None:
        return None
    said = str((_said(snapshot, pool).get("revision") or {}).get("target") or "")
    return revisions.target(snapshot, pool, declaration, stored, said=said, policy=policy)


def _pool(
    snapshot: ServiceSnapshot,
    name: str,
    pool: DesiredPool | None,
    target: Revision | None,
    stored: tuple[Revision, ...],
    pods: Sequence[PodFacts],
    routers: tuple[RouterView, ...],
    now: float,
) -> PoolView:
    said = _said(snapshot, name)
    said_current = str((said.get("revision") or {}).get("current") or "")
    known = {revision.id: revision for revision in stored}
    instances = []
    for pod in pods:
        revision = known.get(pod.revision)
        timeout_s = revision.declaration.health.startup_timeout_seconds if revision else math.inf
        agent, node = snapshot.agents.get(pod.uid), snapshot.nodes.get(pod.node)
        instances.append(assess(pod, agent, node, now, timeout_s, snapshot.asked_s.get(pod.uid)))
    floor = said.get("epoch")
    was_seen = bool((said.get("revision") or {}).get("target"))
    return PoolView(
        name=name,
        declared=pool,
        stored=stored,
        target=target,
        current=revisions.current(stored, target, pods, said_current),
        instances=confirmed(instances, routers),
        # Beyond what a label of ours can say it was written by hand, and no name has room for it.
        epoch=max([floor if isinstance(floor, int) and 0 <= floor < MAX_EPOCH else 0, *(pod.epoch for pod in pods)]),
        was_complete=target is not None and said_current == target.id,
        never_served=was_seen and not said_current,
        slots=backoff.load(said),
    )


def _judged(snapshot: ServiceSnapshot, pool: PoolView, desired: Desired | None, now: float) -> PoolView:
    """The pool with what follows from failures. A spec that can't be read gives nobody up and fails nothing."""
    if desired is None or pool.declared is None:
        return pool
    said, target, current = _said(snapshot, pool.name), pool.target, pool.current
    health = desired.spec.health
    found = (
        replace(i, gives_up=failures.give_up(i, health, now) or quarantine.find_no_place(i, now))
        for i in pool.instances
    )
    pool = replace(pool, instances=tuple(found))
    slots = pool.slots
    if target is not None and rollback.is_new_try(snapshot, said, target.id):
        slots = backoff.forgiven(slots, target.id, now)
    pool = replace(pool, slots=backoff.update(slots, pool.instances, now))
    if target is None:
        return pool
    seen = rollback.Observed(
        instances=pool.instances,
        slots=pool.slots,
        can_fall_back=current is not None and current.id != target.id and not pool.never_served,
        is_complete=pool.is_rolled_out,
        is_paused=desired.spec.rollout.paused,
        problems=_problems(snapshot),
    )
    rollout = desired.spec.rollout
    attempt = rollback.observe_attempt(said, target.id, rollback.token(snapshot), seen, rollout, now)
    pool = replace(pool, attempt=attempt)
    if attempt is not None and attempt.is_held:  # what failed stays as it is, to be looked at
        kept = (replace(i, gives_up=None) if pool.is_updated(i) else i for i in pool.instances)
        pool = replace(pool, instances=tuple(kept))
    return replace(pool, no_room=_no_room(snapshot, pool, rollout.max_surge))


def _no_room(snapshot: ServiceSnapshot, pool: PoolView, max_surge: int) -> NoRoom | None:
    if pool.goal is None:
        return None
    problems = [p for p in _problems(snapshot) if p.get("reason") == Reason.QUOTA_EXCEEDED]
    places = range(pool.desired + max_surge) if problems else ()
    refused = {pod_name(snapshot, pool.goal, index, pool.epoch + 1) for index in places}
    return surge.find_no_room(pool.instances, pool.goal.id, refused, problems)


def _problems(snapshot: ServiceSnapshot) -> list[Mapping[str, Any]]:
    return [entry for entry in snapshot.status.get("problems") or [] if isinstance(entry, Mapping)]


def _engine_pods(snapshot: ServiceSnapshot) -> dict[str, list[PodFacts]]:
    """Engine pods by pool. Only pods that we own: labels alone prove nothing (a foreign pod is never adopted)."""
    found: dict[str, list[PodFacts]] = {}
    for pod in snapshot.pods:
        if pod.component == names.COMPONENT_ENGINE and pod.owner_uid == snapshot.uid:
            found.setdefault(pod.pool, []).append(pod)
    return found


def _check(declaration: PoolDeclaration) -> tuple[Refused, ...]:
    adapter = ADAPTERS[declaration.engine.type]
    return (*adapter.check(declaration), *template.check(declaration))


def is_service_name(name: str) -> bool:
    """True if a Kubernetes Service can have this name."""
    return _SERVICE_NAME.fullmatch(name) is not None


def _name_refusal(snapshot: ServiceSnapshot) -> tuple[Refused, ...]:
    """Admission refuses such names; objects may be older than that rule (S001)."""
    if is_service_name(snapshot.name):
        return ()
    return (
        Refused(
            f"metadata.name: {snapshot.name!r} can't name the Service of this object: at most 63 lower-case letters, "
            "digits and '-', starting with a letter; create the object under another name"
        ),
    )


def _said(snapshot: ServiceSnapshot, pool: str) -> Mapping[str, Any]:
    entries = snapshot.status.get("pools") or []
    return next((e for e in entries if isinstance(e, Mapping) and e.get("name") == pool), {})
