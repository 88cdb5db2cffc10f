"""The whole status of a service, computed from live facts in every pass; no status is ever built on.

What kstatus, Flux and Argo CD read (Ready, Reconciling, Stalled, observedGeneration) follows one table:

| situation | Ready | Reconciling | Stalled |
|---|---|---|---|
| starting, rolling out, scaling, draining, transient error | as it last was | True | False |
| nothing serves, or an instance has a problem | False | True | False |
| will not succeed without a change by a human | False | False | True |
| rollout failed, what was there before serves | as it serves | False | True |
| all desired instances of this generation serve | True | False | False |
| scaled to zero, suspended | True | False | False |

Reconciling and Stalled are never True together. Messages hold no ages, so an idle service writes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sluice.api import names
from sluice.api.conditions import ConditionType, Reason, condition
from sluice.api.router import UNREACHABLE, WorkerStatus
from sluice.api.status import InferenceServiceStatus
from sluice.api.v1alpha1 import EngineType
from sluice.plan import children, disruption, outcome, revisions
from sluice.plan.actions import Action, Apply, Create, Outcome, Result, target_of
from sluice.plan.health import InstancePhase, Verdict
from sluice.plan.leaving import count_drains, drain_entries, drains_text
from sluice.plan.planner import Plan
from sluice.plan.problems import is_problem, problem_entries, problem_instances
from sluice.plan.routing import RouterView
from sluice.plan.services import service_name, service_url
from sluice.plan.snapshot import ServiceSnapshot
from sluice.plan.times import format_time
from sluice.plan.view import PoolView, ServiceView, observe

MAX_POOLS: Final = 16
"""Entries of `status.pools`: eight declared ones and as many that still drain."""
MAX_POOL_NAME: Final = 20
"""Characters; a pod's label may have 63, and anyone with the right to edit pods can write there."""

_UNHEALTHY: Final = (InstancePhase.FAILED, InstancePhase.HUNG, InstancePhase.SUSPECT)
_FOR_GOOD: Final = frozenset({Reason.NAME_CONFLICT, Reason.FORBIDDEN, Reason.REJECTED})
"""Refusals that no waiting heals."""


@dataclass(frozen=True, slots=True)
class Says:
    """A condition's content; `status` None is Unknown."""

    status: bool | None
    reason: Reason
    message: str


def compute_status(snapshot: ServiceSnapshot, plan: Plan, results: Sequence[Result], now: float) -> dict[str, Any]:
    """`.status` as it should be after this pass, whatever its actions' outcome."""
    view = plan.view or observe(snapshot, now)
    before = {c.get("type"): c for c in snapshot.status.get("conditions") or []}
    said = _conditions(view, plan, results, before)
    status: dict[str, Any] = {
        "observedGeneration": snapshot.generation,
        "conditions": [
            condition(
                kind,
                says.status,
                says.reason,
                says.message,
                generation=snapshot.generation,
                now=format_time(now),
                previous=before.get(kind),
            )
            for kind, says in said.items()
        ],
        "pools": [_pool(pool, results) for pool in view.pools if _is_shown(pool)][:MAX_POOLS],
        "problems": problem_entries(view, results),
        "drains": drain_entries(view),
        **outcome.service_entry(view),
        "summary": _summary(view),
        "drift": _drift(view),
    }
    if view.desired is not None and _is_addressed(snapshot, results):
        status["url"] = service_url(snapshot)
    revision = _service_revision(view)
    if revision:
        status["revision"] = revision
    handled = (snapshot.service["metadata"].get("annotations") or {}).get(names.ANNOTATION_RECONCILE_AT)
    if handled:
        status["lastHandledReconcileAt"] = str(handled)[:256]
    # Through the model, so that every field with a default stands there: the API server would add it, and a status
    # that differs from what we would write is written again for ever.
    whole = InferenceServiceStatus.model_validate(status)
    return outcome.fitted(whole.model_dump(mode="json", by_alias=True, exclude_none=True))


def _drift(view: ServiceView) -> int:
    stale = {(p.name, r.id) for p in view.pools for r in p.stored if revisions.is_drifted(view.snapshot, r)}
    return sum((pool.name, i.pod.revision) in stale for pool in view.pools for i in pool.live)


def _conditions(
    view: ServiceView, plan: Plan, results: Sequence[Result], before: Mapping[Any, Mapping[str, Any]]
) -> dict[ConditionType, Says]:
    accepted = _accepted(view)
    stalled = _stalled(view, accepted, plan, results)
    reconciling = Says(False, stalled.reason, stalled.message) if stalled.status else _reconciling(view, results)
    drains = drains_text(drain_entries(view), count_drains(view))
    if reconciling.status and drains:
        reconciling = Says(True, reconciling.reason, f"{reconciling.message}; {drains}")
    said = {
        ConditionType.READY: _ready(view, stalled, reconciling, before.get(ConditionType.READY)),
        ConditionType.RECONCILING: reconciling,
        ConditionType.STALLED: stalled,
        ConditionType.ACCEPTED: accepted,
        ConditionType.ROUTED: _routed(view, plan, results, before.get(ConditionType.ROUTED)),
        ConditionType.ROLLOUT_COMPLETE: _rollout(view, accepted),
    }
    if view.desired is not None:
        said[ConditionType.WEIGHTS_READY] = _weights(view)
    return said


def _accepted(view: ServiceView) -> Says:
    if not view.refusals:
        return Says(True, Reason.VALID, "the spec is valid")
    text = "; ".join(refused.message for refused in view.refusals)
    return Says(False, view.refusals[0].reason, text)


def _stalled(view: ServiceView, accepted: Says, plan: Plan, results: Sequence[Result]) -> Says:
    if accepted.status is False:
        return Says(True, accepted.reason, accepted.message)
    if plan.conflicts:
        return Says(True, Reason.NAME_CONFLICT, "; ".join(conflict.message for conflict in plan.conflicts))
    for result in results:
        is_child = isinstance(result.action, Apply | Create) and not _is_taken(result)
        if is_child and result.outcome is Outcome.REFUSED and result.reason in _FOR_GOOD:
            return Says(True, Reason(result.reason), result.message)
    failed = outcome.failed_rollout(view) or outcome.nothing_serves(view)
    if failed is not None:
        return Says(True, *failed)
    return Says(False, Reason.VALID, "nothing needs a change by a human")


def _reconciling(view: ServiceView, results: Sequence[Result]) -> Says:
    """What is under way, the most telling cause first."""
    if view.snapshot.is_being_deleted:
        return Says(True, Reason.DRAINING, "the service is being deleted; its instances finish their requests")
    for result in results:
        if result.outcome in (Outcome.REFUSED, Outcome.FAILED) and result.reason in Reason.__members__.values():
            return Says(True, Reason(result.reason), result.message)
    pools = [pool for pool in view.pools if pool.declared]
    blocked = [found for pool in pools if (found := disruption.blocked(view, pool))]
    if blocked:
        return Says(True, Reason.NODE_DRAIN_BLOCKED, "; ".join(found.message for found in blocked))
    rolling = [pool for pool in pools if not pool.is_rolled_out and pool.current and _is_new(pool)]
    if rolling:
        text = "; ".join([*(_rollout_text(pool) for pool in rolling), *outcome.missing_room(view)])
        return Says(True, _rollout_reason(view), text)
    if moving := disruption.moving(view):
        reason = disruption.moves(moving[0], view.snapshot.nodes) or Reason.NODE_DRAIN
        return Says(True, reason, f"{len(moving)} instances are replaced before they leave: {_moving_text(view)}")
    missing = [pool for pool in pools if pool.serving < pool.desired]
    if missing:
        return Says(True, Reason.STARTING, "; ".join(_serving_text(pool) for pool in missing))
    leaving = sum(i.is_leaving for i in view.instances)
    if leaving:
        return Says(True, Reason.DRAINING, f"{leaving} instances finish their requests")
    if any(len(pool.live) > pool.desired for pool in view.pools):
        return Says(True, Reason.SCALING, "instances beyond the wanted number leave")
    return Says(False, Reason.UP_TO_DATE, "what runs is what is declared")


def _ready(view: ServiceView, stalled: Says, reconciling: Says, before: Mapping[str, Any] | None) -> Says:
    failed = outcome.failed_rollout(view)
    is_served = failed is not None and stalled == Says(True, *failed) and outcome.serves_on(view)
    if stalled.status and not is_served:
        return Says(False, stalled.reason, stalled.message)
    if view.snapshot.is_being_deleted:
        return Says(False, Reason.DRAINING, reconciling.message)
    pools = [pool for pool in view.pools if pool.declared]
    text = "; ".join(_serving_text(pool) for pool in pools)
    if sum(pool.desired for pool in pools) == 0:
        suspended = view.desired is not None and view.desired.spec.suspend
        if suspended:
            return Says(True, Reason.SUSPENDED, "suspended by spec.suspend; no instance is wanted")
        return Says(True, Reason.IDLE, "no instance is wanted")
    if all(pool.serving >= pool.desired for pool in pools):
        return Says(True, Reason.SERVING, text)
    trouble = problem_instances(view)
    if trouble:
        first = trouble[0]
        return Says(False, first.reason, f"{text}. {first.name} ({first.phase}): {first.message}")
    was = {"True": True, "False": False}.get(str((before or {}).get("status")))
    if any(pool.serving == 0 for pool in pools if pool.desired):
        # Never seen serving: not known to be broken either.
        return Says(False if was is not None else None, reconciling.reason, text)
    return Says(was, reconciling.reason, text)


def _is_address(action: Action, snapshot: ServiceSnapshot) -> bool:
    """True for the apply of the Service that users call."""
    return isinstance(action, Apply) and target_of(action) == ("Service", snapshot.namespace, service_name(snapshot))


def _is_addressed(snapshot: ServiceSnapshot, results: Sequence[Result]) -> bool:
    """The Service at our name is ours, or was made in this pass: else the address may lead to somebody else."""
    made = any(_is_address(r.action, snapshot) and r.outcome in (Outcome.DONE, Outcome.UNCHANGED) for r in results)
    return made or children.own(snapshot, "Service", service_name(snapshot)) is not None


def _no_address(view: ServiceView, plan: Plan, results: Sequence[Result]) -> Says | None:
    """Why users can't reach the routers by the service's name; None if they can."""
    snapshot = view.snapshot
    conflict = next((c for c in plan.conflicts if (c.kind, c.name) == ("Service", service_name(snapshot))), None)
    if conflict is not None:
        return Says(False, Reason.NAME_CONFLICT, conflict.message)
    if _is_addressed(snapshot, results):
        return None
    for result in results:  # an object without our label is not watched: only the API's answer tells of it
        is_refused = result.outcome is Outcome.REFUSED and result.reason in Reason.__members__.values()
        if is_refused and _is_address(result.action, snapshot):
            return Says(False, Reason(result.reason), result.message)
    return None


def _routed(view: ServiceView, plan: Plan, results: Sequence[Result], before: Mapping[str, Any] | None) -> Says:
    unreachable = _no_address(view, plan, results)
    if unreachable is not None:
        return unreachable
    live = [router for router in view.routers if router.takes_requests]
    reason = str((before or {}).get("reason"))
    if before and any(router.last is None for router in live) and reason in Reason.__members__.values():
        # Right after the operator's start: not asked yet is no news.
        was = {"True": True, "False": False}.get(str(before.get("status")))
        return Says(was, Reason(reason), str(before.get("message")))
    silent = [router for router in live if not router.speaks]
    if silent:
        return Says(None, Reason.ROUTER_UNREACHABLE, f"router {silent[0].pod.name} does not say what it routes to")
    blind = _blind_router(view, live)
    if blind is not None:
        return Says(False, Reason.ROUTER_UNREACHABLE, blind)
    if any(i.is_serving for i in view.instances) and live:
        return Says(True, Reason.ROUTED, f"{len(live)} routers list every serving instance")
    if sum(pool.desired for pool in view.pools) == 0:
        return Says(False, Reason.IDLE, "no instance is wanted, so routers have nothing to route to")
    if any(i.phase is InstancePhase.VERIFYING and i.verdict is Verdict.ROUTE for i in view.instances):
        return Says(False, Reason.ROUTERS_STARTING, "an instance is ready; not every router lists it yet")
    return Says(False, Reason.NO_INSTANCE_SERVING, "no instance has answered an inference yet")


def _blind_router(view: ServiceView, live: Sequence[RouterView]) -> str | None:
    """A router whose own health check fails for an instance that answers its agent: a network fault between them."""
    for router in live:
        for instance in view.instances:
            entry = router.entry(instance)
            is_cut = entry is not None and (
                entry.status in (WorkerStatus.NOT_READY, WorkerStatus.FAILED) or entry.reason.startswith(UNREACHABLE)
            )
            if is_cut and instance.pod.gate and instance.state is not None:
                return f"router {router.pod.name} can't reach instance {instance.name}, which answers its own agent"
    return None


def _rollout(view: ServiceView, accepted: Says) -> Says:
    if accepted.status is False:
        return Says(False, accepted.reason, "the present spec is not rolled out: it is not accepted")
    waiting = [pool for pool in view.pools if pool.declared and not pool.is_rolled_out]
    left = [pool for pool in view.pools if not pool.declared and pool.instances]
    if not waiting and not left:
        return Says(True, Reason.UP_TO_DATE, "all instances are of the present revision")
    failed = outcome.failed_rollout(view)
    if failed is not None:
        return Says(False, *failed)
    texts = [_rollout_text(pool) for pool in waiting]
    text = "; ".join([*texts, *(f"pool {pool.name}: is removed" for pool in left), *outcome.missing_room(view)])
    return Says(False, _rollout_reason(view), text)


def _rollout_reason(view: ServiceView) -> Reason:
    if view.desired is not None and view.desired.spec.rollout.paused:
        return Reason.ROLLOUT_PAUSED
    return Reason.NO_SURGE_CAPACITY if outcome.missing_room(view) else Reason.ROLLING_OUT


def _weights(view: ServiceView) -> Says:
    spec = view.desired.spec if view.desired else None
    if spec is None or spec.engine.type is EngineType.SIMULATED:
        return Says(True, Reason.NOT_NEEDED, "the simulated engine reads no weights")
    claim = spec.model.uri.removeprefix("pvc://").split("/", 1)[0]
    return Says(True, Reason.CLAIM, f"read by the engines from PersistentVolumeClaim {claim}; not checked before")


def _is_shown(pool: PoolView) -> bool:
    """Not under a name that only an edited pod label has and that the status' schema refuses."""
    return bool(pool.declared or (pool.instances and 0 < len(pool.name) <= MAX_POOL_NAME))


def _pool(pool: PoolView, results: Sequence[Result]) -> dict[str, Any]:
    role = pool.target or pool.current
    entry: dict[str, Any] = {
        "name": pool.name,
        "role": str(role.declaration.role) if role else "",
        "desired": pool.desired,
        "current": len(pool.live),
        "serving": pool.serving,
        "updated": sum(pool.is_updated(i) for i in pool.live),
        "draining": sum(i.is_leaving for i in pool.instances),
        "unhealthy": sum(i.phase in _UNHEALTHY for i in pool.instances),
        **outcome.pool_entry(pool),
        "epoch": max(pool.epoch, *(_created_epoch(r, pool.name) for r in results), 0),
    }
    revision = _pool_revision(pool)
    return {**entry, "revision": revision} if revision else entry


def _created_epoch(result: Result, pool: str) -> int:
    """Build number of a pod of the pool that this pass created, or whose name is taken by a pod of somebody else: the
    next attempt uses another. 0 for any other action."""
    if not isinstance(result.action, Create) or not (result.outcome is Outcome.DONE or _is_taken(result)):
        return 0
    labels = result.action.body["metadata"].get("labels") or {}
    is_pod = bool(result.action.instance) and labels.get(names.LABEL_POOL) == pool
    return int(labels.get(names.LABEL_EPOCH) or 0) if is_pod else 0


def _is_taken(result: Result) -> bool:
    """A pod of somebody else stands at the name of one of ours; the next has another name, so it heals by itself."""
    is_pod = isinstance(result.action, Create) and bool(result.action.instance)
    return is_pod and result.outcome is Outcome.REFUSED and result.reason == Reason.NAME_CONFLICT


def _pool_revision(pool: PoolView) -> dict[str, str]:
    target = pool.target.id if pool.target else ""
    current = ""
    if pool.declared is not None and pool.is_rolled_out:
        current = target
    elif pool.current is not None and (pool.current.id != target or pool.was_complete) and not pool.never_served:
        current = pool.current.id
    return {key: value for key, value in (("current", current), ("target", target)) if value}


def _service_revision(view: ServiceView) -> dict[str, str]:
    """One digest over the pools, the same for current and target when every pool is complete."""
    pairs = [(pool.name, _pool_revision(pool)) for pool in view.pools if pool.declared]
    made = {}
    for key in ("current", "target"):
        if pairs and all(key in revision for _, revision in pairs):
            made[key] = names.short_hash(*(f"{name}={revision[key]}" for name, revision in pairs), length=10)
    return made


def _summary(view: ServiceView) -> dict[str, str]:
    pools = [pool for pool in view.pools if pool.declared]
    spec = view.desired.spec if view.desired else None
    summary = {
        "model": (spec.model.name or view.snapshot.name)[:128] if spec else "",
        "serving": " ".join(f"{pool.serving}/{pool.desired}" for pool in pools)[:128],
    }
    return {key: value for key, value in summary.items() if value}


def _is_new(pool: PoolView) -> bool:
    """The target is another revision than the one that served last."""
    return pool.target is not None and pool.current is not None and pool.target.id != pool.current.id


def _moving_text(view: ServiceView) -> str:
    """The first three, each with its cause."""
    told = []
    for instance in disruption.moving(view)[:3]:
        node = disruption.node_goes(view.snapshot.nodes.get(instance.pod.node))
        told.append(f"{instance.name} ({node or 'its drain was requested'})")
    return "; ".join(told)


def _serving_text(pool: PoolView) -> str:
    bad = sum(is_problem(i) for i in pool.instances)
    text = f"pool {pool.name}: {pool.serving} of {pool.desired} instances serve"
    return f"{text}, {bad} have problems" if bad else text


def _rollout_text(pool: PoolView) -> str:
    updated = sum(pool.is_updated(i) and i.is_serving for i in pool.instances)
    old = sum(not pool.is_updated(i) for i in pool.instances)
    return (
        f"pool {pool.name}: {updated} of {pool.desired} instances serve on the present revision, {old} older are left"
    )
