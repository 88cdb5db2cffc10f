"""The whole status of a service, computed from live facts in every pass; no status is ever built on.

What kstatus, Flux and Argo CD read (Ready, Reconciling, Stalled, observedGeneration) follows one table:

| situation | Ready | Reconciling | Stalled |
|---|---|---|---|
| starting, rolling out, scaling, draining, transient error | as it last was | True | False |
| nothing serves, or an instance has a problem | False | True | False |
| will not succeed without a change by a human | False | False | True |
| all desired instances of this generation serve | True | False | False |
| scaled to zero, suspended | True | False | False |

Reconciling and Stalled are never True together. Messages hold no ages, so an idle service writes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sluice.api import names
from sluice.api.conditions import ConditionType, Reason, condition
from sluice.api.status import InferenceServiceStatus
from sluice.api.v1alpha1 import EngineType
from sluice.plan.actions import Apply, Create, Outcome, Result
from sluice.plan.health import InstancePhase
from sluice.plan.planner import Plan
from sluice.plan.problems import is_problem, problem_entries, problem_instances
from sluice.plan.routing import RouterView
from sluice.plan.services import service_url
from sluice.plan.snapshot import ServiceSnapshot
from sluice.plan.times import format_time
from sluice.plan.view import PoolView, ServiceView, observe

MAX_POOLS: Final = 16
"""Entries of `status.pools`: eight declared ones and as many that still drain."""

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
        "pools": [_pool(pool, results) for pool in view.pools if pool.declared or pool.instances][:MAX_POOLS],
        "problems": problem_entries(view, results),
        "summary": _summary(view),
    }
    if view.desired is not None:
        status["url"] = service_url(snapshot)
    revision = _service_revision(view)
    if revision:
        status["revision"] = revision
    handled = (snapshot.service["metadata"].get("annotations") or {}).get(names.ANNOTATION_RECONCILE_AT)
    if handled:
        status["lastHandledReconcileAt"] = str(handled)[:256]
    # Through the model, so that every field with a default stands there: the API server would add it, and a status
    # that differs from what we would write is written again for ever.
    return InferenceServiceStatus.model_validate(status).model_dump(mode="json", by_alias=True, exclude_none=True)


def _conditions(
    view: ServiceView, plan: Plan, results: Sequence[Result], before: Mapping[Any, Mapping[str, Any]]
) -> dict[ConditionType, Says]:
    accepted = _accepted(view)
    stalled = _stalled(view, accepted, plan, results)
    reconciling = Says(False, stalled.reason, stalled.message) if stalled.status else _reconciling(view, results)
    said = {
        ConditionType.READY: _ready(view, stalled, reconciling, before.get(ConditionType.READY)),
        ConditionType.RECONCILING: reconciling,
        ConditionType.STALLED: stalled,
        ConditionType.ACCEPTED: accepted,
        ConditionType.ROUTED: _routed(view, plan, before.get(ConditionType.ROUTED)),
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
        is_child = isinstance(result.action, Apply | Create)
        if is_child and result.outcome is Outcome.REFUSED and result.reason in _FOR_GOOD:
            return Says(True, Reason(result.reason), result.message)
    del view
    return Says(False, Reason.VALID, "nothing needs a change by a human")


def _reconciling(view: ServiceView, results: Sequence[Result]) -> Says:
    """What is under way, the most telling cause first."""
    if view.snapshot.is_being_deleted:
        return Says(True, Reason.DRAINING, "the service is being deleted; its instances finish their requests")
    for result in results:
        if result.outcome in (Outcome.REFUSED, Outcome.FAILED) and result.reason in Reason.__members__.values():
            return Says(True, Reason(result.reason), result.message)
    pools = [pool for pool in view.pools if pool.declared]
    rolling = [pool for pool in pools if not pool.is_rolled_out and pool.current and _is_new(pool)]
    if rolling:
        text = "; ".join(_rollout_text(pool) for pool in rolling)
        paused = view.desired is not None and view.desired.spec.rollout.paused
        return Says(True, Reason.ROLLOUT_PAUSED if paused else Reason.ROLLING_OUT, text)
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
    if stalled.status:
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


def _routed(view: ServiceView, plan: Plan, before: Mapping[str, Any] | None) -> Says:
    conflict = next((c for c in plan.conflicts if c.kind == "Service"), None)
    if conflict is not None:
        return Says(False, Reason.NAME_CONFLICT, conflict.message)
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
    if any(i.phase is InstancePhase.VERIFYING and i.reason is Reason.ROUTERS_STARTING for i in view.instances):
        return Says(False, Reason.ROUTERS_STARTING, "an instance is ready; not every router lists it yet")
    return Says(False, Reason.NO_INSTANCE_SERVING, "no instance has answered an inference yet")


def _blind_router(view: ServiceView, live: Sequence[RouterView]) -> str | None:
    """A router whose own health check fails for an instance that answers its agent: a network fault between them."""
    for router in live:
        for instance in view.instances:
            entry = router.entry(instance)
            if entry is not None and entry.status in ("not_ready", "failed") and instance.pod.gate:
                return f"router {router.pod.name} can't reach instance {instance.name}, which answers its own agent"
    return None


def _rollout(view: ServiceView, accepted: Says) -> Says:
    if accepted.status is False:
        return Says(False, accepted.reason, "the present spec is not rolled out: it is not accepted")
    waiting = [pool for pool in view.pools if pool.declared and not pool.is_rolled_out]
    left = [pool for pool in view.pools if not pool.declared and pool.instances]
    if not waiting and not left:
        return Says(True, Reason.UP_TO_DATE, "all instances are of the present revision")
    paused = view.desired is not None and view.desired.spec.rollout.paused
    text = "; ".join([*map(_rollout_text, waiting), *(f"pool {pool.name}: is removed" for pool in left)])
    return Says(False, Reason.ROLLOUT_PAUSED if paused else Reason.ROLLING_OUT, text)


def _weights(view: ServiceView) -> Says:
    spec = view.desired.spec if view.desired else None
    if spec is None or spec.engine.type is EngineType.SIMULATED:
        return Says(True, Reason.NOT_NEEDED, "the simulated engine reads no weights")
    claim = spec.model.uri.removeprefix("pvc://").split("/", 1)[0]
    return Says(True, Reason.CLAIM, f"read by the engines from PersistentVolumeClaim {claim}; not checked before")


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
        "epoch": max(pool.epoch, *(_created_epoch(r, pool.name) for r in results), 0),
    }
    revision = _pool_revision(pool)
    return {**entry, "revision": revision} if revision else entry


def _created_epoch(result: Result, pool: str) -> int:
    """Build number of a pod of the pool that this pass created; 0 for any other action."""
    if not isinstance(result.action, Create) or result.outcome is not Outcome.DONE:
        return 0
    labels = result.action.body["metadata"].get("labels") or {}
    is_pod = bool(result.action.instance) and labels.get(names.LABEL_POOL) == pool
    return int(labels.get(names.LABEL_EPOCH) or 0) if is_pod else 0


def _pool_revision(pool: PoolView) -> dict[str, str]:
    target = pool.target.id if pool.target else ""
    current = ""
    if pool.declared is not None and pool.is_rolled_out:
        current = target
    elif pool.current is not None and (pool.current.id != target or pool.was_complete):
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
