"""One pass's picture of a service: the spec resolved, every pool with its revisions and instances, the routers.

Made once from the snapshot; planner and status both decide from it, so they never disagree.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sluice.api import names
from sluice.plan import revisions, template
from sluice.plan.declared import Desired, DesiredPool, PoolDeclaration, Refused, declare
from sluice.plan.engines import ADAPTERS
from sluice.plan.health import Instance, assess
from sluice.plan.revisions import Revision
from sluice.plan.routing import RouterView, confirmed, router_views
from sluice.plan.snapshot import PodFacts, ServiceSnapshot

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

    @property
    def desired(self) -> int:
        return self.declared.replicas if self.declared else 0

    @property
    def live(self) -> tuple[Instance, ...]:
        return tuple(i for i in self.instances if i.is_live)

    @property
    def serving(self) -> int:
        return sum(i.is_serving for i in self.instances)

    def is_updated(self, instance: Instance) -> bool:
        return self.target is not None and instance.pod.revision == self.target.id

    @property
    def is_rolled_out(self) -> bool:
        """Nothing of another revision is left, leaving instances included, and the target once served in full.

        An instance that dies later starts no rollout (S011): once complete, it stays so until the target changes.
        """
        if self.target is None or not all(self.is_updated(i) for i in self.instances):
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

    @property
    def instances(self) -> tuple[Instance, ...]:
        return tuple(i for pool in self.pools for i in pool.instances)


def observe(snapshot: ServiceSnapshot, now: float) -> ServiceView:
    desired = declare(snapshot)
    refusals = [desired] if isinstance(desired, Refused) else [*_name_refusal(snapshot), *desired.refusals]
    stored = revisions.load(snapshot)
    routers = router_views(snapshot)
    pods = _engine_pods(snapshot)
    declared = {} if isinstance(desired, Refused) else {pool.name: pool for pool in desired.pools}
    pools = []
    for name in dict.fromkeys([*declared, *sorted(pods), *sorted(stored)]):
        pool = declared.get(name)
        found = _check(pool.declaration) if pool and pool.declaration else ()
        refusals += found
        usable = pool.declaration if pool and not found and not _name_refusal(snapshot) else None
        pools.append(_pool(snapshot, name, pool, usable, stored.get(name, ()), pods.get(name, ()), routers, now))
    return ServiceView(
        snapshot=snapshot,
        now=now,
        desired=None if isinstance(desired, Refused) else desired,
        refusals=tuple(dict.fromkeys(refusals)),
        pools=tuple(pools),
        routers=routers,
    )


def _pool(
    snapshot: ServiceSnapshot,
    name: str,
    pool: DesiredPool | None,
    declaration: PoolDeclaration | None,
    stored: tuple[Revision, ...],
    pods: Sequence[PodFacts],
    routers: tuple[RouterView, ...],
    now: float,
) -> PoolView:
    said = _said(snapshot, name)
    said_current = str((said.get("revision") or {}).get("current") or "")
    target = revisions.target(snapshot, name, declaration, stored) if declaration else None
    known = {revision.id: revision for revision in stored}
    instances = []
    for pod in pods:
        revision = known.get(pod.revision)
        timeout_s = revision.declaration.health.startup_timeout_seconds if revision else math.inf
        instances.append(assess(pod, snapshot.agents.get(pod.uid), snapshot.nodes.get(pod.node), now, timeout_s))
    floor = said.get("epoch")
    return PoolView(
        name=name,
        declared=pool,
        stored=stored,
        target=target,
        current=revisions.current(stored, target, pods, said_current),
        instances=confirmed(instances, routers),
        epoch=max([floor if isinstance(floor, int) else 0, *(pod.epoch for pod in pods)]),
        was_complete=target is not None and said_current == target.id,
    )


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
