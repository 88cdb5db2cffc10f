"""Composition: one snapshot in, one `Plan` out.

The order of a plan's actions is safety first: drain marks, gates closed, worker lists, what pods need, pods, gates
opened, deletions. Each part decides for itself (`drain`, `rollout`, `routing`, …); nothing here counts or remembers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from sluice.api.conditions import ConditionType, Reason
from sluice.api.v1alpha1 import Drain
from sluice.plan import children, drain, policies, revisions, router, services
from sluice.plan.actions import Action, Annotate, Apply, Create, Delete, ObjectRef, PutWorkers, SetGate
from sluice.plan.health import Instance, Verdict
from sluice.plan.pods import build_pod
from sluice.plan.problems import new_problem_events
from sluice.plan.revisions import Revision
from sluice.plan.rollout import Budget, Step, held_step, next_step, removed_step
from sluice.plan.routing import put_lists, wanted_workers
from sluice.plan.scale import Member
from sluice.plan.snapshot import Event, ServiceSnapshot
from sluice.plan.view import PoolView, ServiceView, is_service_name, observe

FAST_FAILURE_S: Final = 10.0
"""A pod that failed within so many seconds of its creation is replaced only then: a node that rejects pods at
admission would otherwise be offered one after the other without a pause."""
STUCK_S: Final = 10.0
"""Seconds after the end of its grace period from which a pod that is still there counts as gone."""
LIMIT_CHECK_S: Final = 10.0
NODE_CHECK_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The next step. `status` is made afterwards by `plan.status.compute_status(snapshot, plan, results, now)`."""

    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    """To be told whatever the actions' outcome; `plan.problems.outcome_events(results)` has those that depend on it."""
    requeue_after_s: float | None = None
    """When to look again though nothing changed (deadlines); null: only on events and the periodic resync."""
    view: ServiceView | None = None
    """What the plan was made from; `compute_status` makes it again if it is missing."""
    conflicts: tuple[children.Conflict, ...] = ()
    """Objects of others in the way."""


@dataclass(slots=True)
class _Draft:
    """What the pools add up to, before it is put in order."""

    marks: list[Annotate] = field(default_factory=list)
    closed: list[SetGate] = field(default_factory=list)
    leaving: set[str] = field(default_factory=set)
    creates: list[tuple[Revision, int, int]] = field(default_factory=list)
    """(revision, index, epoch)."""
    deletes: list[Delete] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    checks: list[float] = field(default_factory=list)
    """Seconds until something has to be looked at again."""

    def let_go(self, instance: Instance, reason: Reason, now: float) -> None:
        self.leaving.add(instance.name)
        self.marks.append(drain.mark(instance, reason, now))
        self.checks.append(drain.CHECK_S)
        if instance.pod.gate:
            self.closed.append(drain.close_gate(instance, reason, "the instance is drained"))

    def check_at(self, moment: float, now: float) -> None:
        if moment > now:
            self.checks.append(moment - now)


def plan(snapshot: ServiceSnapshot, now: float) -> Plan:
    """The next step towards what is declared; the same snapshot always gives the same plan."""
    view = observe(snapshot, now)
    if snapshot.is_being_deleted:  # before any reference is looked at (S083)
        return _plan_deletion(view)
    draft = _Draft()
    for pool in view.pools:
        for instance in pool.instances:
            _plan_leaving(view, pool, instance, draft)
        _plan_size(view, pool, draft)
    _limit_creations(view, draft)
    _close_gates(view, draft)
    applies, conflicts = _plan_children(view)
    actions: list[Action] = [
        *draft.marks,
        *draft.closed,
        *_plan_routing(view, draft),
        *applies,
        *_new_revisions(view),
        *(_create(view, *new) for new in draft.creates),
        *_open_gates(view, draft),
        *draft.deletes,
        *_old_revisions(view),
    ]
    return Plan(
        actions=tuple(actions),
        events=(*draft.events, *new_problem_events(view), *_rollout_events(view)),
        requeue_after_s=min(draft.checks, default=None),
        view=view,
        conflicts=conflicts,
    )


def _plan_deletion(view: ServiceView) -> Plan:
    """Take it off the air and stop there: owner references delete the children, preStop drains the pods.

    With `--cascade=orphan` the children are meant to go on as they are, so nothing is done at all.
    """
    if "orphan" in (view.snapshot.service["metadata"].get("finalizers") or []):
        return Plan(view=view)
    puts = put_lists(view.routers, (), is_ignorant=False, is_open=False)
    cuts = [event for i in view.instances if (event := drain.cut_by_others(i, view.now))]
    return Plan(actions=puts, events=tuple(cuts), view=view)


def _plan_leaving(view: ServiceView, pool: PoolView, instance: Instance, draft: _Draft) -> None:
    """What has to go whatever the spec says: drains under way, lost, dead, deleted by others."""
    pod, now = instance.pod, view.now
    if pod.deletion_at is not None:
        cut = drain.cut_by_others(instance, now)
        draft.events += [cut] if cut else []
        draft.check_at(pod.deletion_at - drain.PRESTOP_MARGIN_S, now)
        draft.check_at(pod.deletion_at + STUCK_S, now)
    elif instance.is_dead:
        if _failed_at_once(instance, now):
            draft.check_at(pod.created_at + FAST_FAILURE_S, now)
        else:
            draft.deletes.append(drain.delete(instance, Reason.POD_FAILED))
    elif pod.drain_started_at is not None:
        step = drain.progress(instance, view.routers, _drain_timeout_s(pool, instance), now)
        if step.delete:
            draft.deletes.append(drain.delete(instance, pod.drain_reason, step.grace_s))
            draft.events += [step.event] if step.event else []
        else:
            draft.checks.append(drain.CHECK_S)
    elif instance.is_lost:
        draft.let_go(instance, Reason.NODE_LOST, now)
    elif (node := view.snapshot.nodes.get(pod.node)) is not None and node.ready is not True:
        draft.checks.append(NODE_CHECK_S)  # lost only once its agent is silent too


def _plan_size(view: ServiceView, pool: PoolView, draft: _Draft) -> None:
    """Instances to create and to let go, by the spec. A spec that can't be read changes nothing."""
    if view.desired is None:
        return
    step, built_from = _step(view, pool)
    by_name = {instance.name: instance for instance in pool.live}
    for leave in step.leave:
        draft.let_go(by_name[leave.name], leave.reason, view.now)
    held_back = sum(i.is_dead and i.pod.deletion_at is None and _failed_at_once(i, view.now) for i in pool.instances)
    if built_from is None:
        return
    taken = {instance.pod.index for instance in pool.live if instance.name not in draft.leaving}
    for _ in range(max(0, step.create - held_back)):
        index = next(i for i in count() if i not in taken)
        taken.add(index)
        draft.creates.append((built_from, index, pool.epoch + 1))


def _step(view: ServiceView, pool: PoolView) -> tuple[Step, Revision | None]:
    """The pool's next step and the revision that new instances are built from."""
    members = [
        Member(i.name, i.pod.index, pool.is_updated(i), i.is_serving, _may_serve(i), i.in_flight) for i in pool.live
    ]
    if view.desired is None or pool.declared is None:
        others = [other for other in view.pools if other.declared is not None]
        return removed_step(members, all(other.serving >= other.desired for other in others)), None
    rollout = view.desired.spec.rollout
    budget = Budget(pool.desired, rollout.max_surge, rollout.max_unavailable or 0)
    is_new = pool.current is not None and pool.target is not None and pool.current.id != pool.target.id
    if pool.target is None or (rollout.paused and is_new):
        return held_step(members, budget), pool.current
    leaving = sum(_holds_surge(i, view.now) for i in pool.instances)
    return next_step(members, leaving, budget), pool.target


def _may_serve(instance: Instance) -> bool:
    return instance.is_serving or (instance.pod.gate and instance.verdict is not Verdict.UNROUTE)


def _holds_surge(instance: Instance, now: float) -> bool:
    """A superseded instance that still finishes its requests, and with them holds its accelerators."""
    pod = instance.pod
    stuck = instance.is_lost or (pod.deletion_at is not None and now > pod.deletion_at + STUCK_S)
    return pod.drain_started_at is not None and pod.drain_reason == Reason.SUPERSEDED and not stuck


def _failed_at_once(instance: Instance, now: float) -> bool:
    return now < instance.pod.created_at + FAST_FAILURE_S


def _drain_timeout_s(pool: PoolView, instance: Instance) -> float:
    """The instance's own: what its pod was built with."""
    for revision in (*pool.stored, *((pool.target,) if pool.target else ())):
        if revision.id == instance.pod.revision:
            return float(revision.declaration.drain.timeout_seconds)
    return float(Drain().timeout_seconds)


def _limit_creations(view: ServiceView, draft: _Draft) -> None:
    """The circuit breaker: what removes or fails pods all the time must not be fed without end."""
    limit = view.snapshot.config.limits.creations_per_service_and_minute
    left = max(0, limit - view.snapshot.recent_creations)
    if len(draft.creates) <= left:
        return
    del draft.creates[left:]
    draft.checks.append(LIMIT_CHECK_S)
    note = (
        f"{limit} pods were created for this service within a minute; creation pauses. Something removes or fails "
        "the pods: see status.problems and the pods' events."
    )
    draft.events.append(Event(str(Reason.CREATION_LIMIT), note, warning=True))


def _close_gates(view: ServiceView, draft: _Draft) -> None:
    """Gate False for everyone who must not be routed; a pod that ended for good needs no gate any more."""
    for instance in view.instances:
        is_open = instance.pod.gate and instance.name not in draft.leaving and not instance.is_dead
        if is_open and instance.verdict is Verdict.UNROUTE:
            draft.closed.append(drain.close_gate(instance, instance.reason, instance.message))


def _open_gates(view: ServiceView, draft: _Draft) -> Iterator[SetGate]:
    for instance in view.instances:
        if instance.is_serving and not instance.pod.gate and instance.name not in draft.leaving:
            yield SetGate(drain.pod_ref(instance), True, str(instance.reason), instance.message, scope=instance.name)


def _plan_routing(view: ServiceView, draft: _Draft) -> tuple[PutWorkers, ...]:
    staying = [instance for instance in view.instances if instance.name not in draft.leaving]
    models = {
        revision.id: revision.declaration.served_model
        for pool in view.pools
        for revision in (*pool.stored, *((pool.target,) if pool.target else ()))
    }
    workers = wanted_workers(staying, view.routers, models)
    listed = {worker.id for worker in workers}
    is_ignorant = any(i.verdict is Verdict.HOLD and i.pod.gate and i.name not in listed for i in staying)
    return put_lists(view.routers, workers, is_ignorant=is_ignorant)


def _plan_children(view: ServiceView) -> tuple[tuple[Apply, ...], tuple[children.Conflict, ...]]:
    """Everything but pods and revisions. A refused name has no children; an unreadable spec changes none."""
    if view.desired is None or not is_service_name(view.snapshot.name):
        return (), ()
    snapshot = view.snapshot
    live = children.own(snapshot, "Deployment", router.router_name(snapshot))
    wanted = [
        *([router.build_keys(snapshot)] if snapshot.signing_keys else []),
        policies.build_engine_policy(snapshot),
        policies.build_router_policy(snapshot),
        services.build_service(snapshot),
        services.build_sibling_service(snapshot),
        router.build_budget(snapshot),
        router.build_deployment(snapshot, view.desired.spec, live),
    ]
    return children.changed(snapshot, wanted)


def _new_revisions(view: ServiceView) -> Iterator[Create]:
    """The record of a revision comes before its first pod."""
    for pool in view.pools:
        if pool.target is not None and not pool.target.uid:
            yield Create(revisions.build(view.snapshot, pool.target), scope=f"{revisions.KIND}/{pool.target.name}")


def _old_revisions(view: ServiceView) -> Iterator[Delete]:
    for pool in view.pools:
        used = {instance.pod.revision for instance in pool.instances}
        gone = revisions.unused(pool.stored, pool.target, pool.current, used)
        if view.desired is not None and pool.declared is None and not pool.instances:
            gone = pool.stored  # the pool was removed and its last instance is gone
        for revision in gone:
            ref = ObjectRef(revisions.KIND, view.snapshot.namespace, revision.name, revision.uid)
            yield Delete(ref, str(Reason.SUPERSEDED), scope=f"{revisions.KIND}/{revision.name}")


def _create(view: ServiceView, revision: Revision, index: int, epoch: int) -> Create:
    body = build_pod(view.snapshot, revision, index, epoch)
    name = body["metadata"]["name"]
    return Create(body, scope=name, instance=name)


def _rollout_events(view: ServiceView) -> Iterator[Event]:
    """Said once: status notes that the target served in full, and is written after this."""
    for pool in view.pools:
        if pool.desired and pool.target and pool.is_rolled_out and not pool.was_complete:
            note = f"Pool {pool.name}: all {pool.desired} instances serve on revision {pool.target.id}"
            yield Event(str(ConditionType.ROLLOUT_COMPLETE), note, action="Rollout")
