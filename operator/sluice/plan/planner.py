"""Composition: one snapshot in, one `Plan` out.

The order of a plan's actions is safety first: drain marks, gates closed, worker lists, what pods need, pods, gates
opened, deletions. Each part decides for itself (`drain`, `rollout`, `routing`, …); nothing here counts or remembers.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from sluice.api.conditions import ConditionType, Reason
from sluice.plan import (
    backoff,
    children,
    deadlines,
    disruption,
    drain,
    leaving,
    outcome,
    policies,
    quarantine,
    revisions,
    router,
    services,
    surge,
)
from sluice.plan.actions import Action, Annotate, Apply, Create, Delete, ObjectRef, PutWorkers, SetGate
from sluice.plan.engines.adapter import ENGINE_PORT, engine_port
from sluice.plan.health import Instance, Verdict
from sluice.plan.pods import build_pod
from sluice.plan.problems import new_problem_events
from sluice.plan.revisions import Revision
from sluice.plan.rollout import Budget, Leave, Step, held_step, next_step, removed_step
from sluice.plan.routing import Served, held_ports, put_lists, wanted_workers
from sluice.plan.scale import Member
from sluice.plan.snapshot import Event, ServiceSnapshot
from sluice.plan.timeline import first_serving
from sluice.plan.view import PoolView, ServiceView, is_service_name, observe

FAST_FAILURE_S: Final = 10.0
"""A pod that failed within so many seconds of its creation is deleted only then, so that everyone sees how it ended."""
STUCK_S: Final = 10.0
"""Seconds after the end of its grace period from which a pod that is still there counts as gone."""
_HOLD_SURGE: Final = (Reason.SUPERSEDED, Reason.ROLLED_BACK, Reason.DRAIN_REQUESTED)
LIMIT_CHECK_S: Final = 10.0
CONFLICT_CHECK_S: Final = 30.0
"""How often a name that is taken is looked at: objects of others are not watched."""
YOUNG_S: Final = 90.0
"""Age up to which a pod counts as one of the last minute's creations; some spare for the clocks' difference."""
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
    called_off: set[str] = field(default_factory=set)
    """Instances whose drain ends in this pass: from the next one on they count again."""
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
    for moment in disruption.deadlines(view):
        draft.check_at(moment, view.now)
    applies, conflicts = _plan_children(view)
    budgets = disruption.plan_budgets(view, draft.leaving)
    if conflicts or budgets.conflicts:
        draft.checks.append(CONFLICT_CHECK_S)
    actions: list[Action] = [
        *budgets.raised,
        *draft.marks,
        *draft.closed,
        *_plan_routing(view, draft),
        *applies,
        *_new_revisions(view),
        *_creations(view, draft),
        *_open_gates(view, draft),
        *draft.deletes,
        *budgets.lowered,
        *budgets.deleted,
        *_old_revisions(view),
    ]
    return Plan(
        actions=tuple(actions),
        events=(
            *leaving.started_events(view, draft.marks),
            *draft.events,
            *new_problem_events(view),
            *(told for i in view.instances if (told := first_serving(i, now)) and i.name not in draft.leaving),
            *disruption.blocked_events(view),
            *outcome.events(view),
            *_rollout_events(view),
        ),
        requeue_after_s=min(draft.checks, default=None),
        view=view,
        conflicts=(*conflicts, *budgets.conflicts),
    )


def _plan_deletion(view: ServiceView) -> Plan:
    """Take it off the air and stop there: owner references delete the children, preStop drains the pods.

    With `--cascade=orphan` the children are meant to go on as they are, so nothing is done at all.
    """
    if "orphan" in (view.snapshot.service["metadata"].get("finalizers") or []):
        return Plan(view=view)
    puts = put_lists(view.routers, (), is_ignorant=False, is_open=False)
    cuts = [event for i in view.instances if (event := drain.cut_by_others(i, view.now))]
    forgotten = [
        drain.delete(i, Reason.NODE_LOST, grace_s=0)
        for i in view.instances
        if disruption.is_beyond_recall(i, view.snapshot)
    ]
    return Plan(
        (*puts, *forgotten), events=tuple(cuts), requeue_after_s=leaving.STEP_S if view.instances else None, view=view
    )


def _plan_leaving(view: ServiceView, pool: PoolView, instance: Instance, draft: _Draft) -> None:
    """What has to go whatever the spec says: drains under way, lost, dead, deleted by others."""
    pod, now = instance.pod, view.now
    if pod.deletion_at is not None:
        _plan_deleted(view, pool, instance, draft)
    elif instance.is_dead:
        if _failed_at_once(instance, now):
            draft.check_at(pod.created_at + FAST_FAILURE_S, now)
        else:
            draft.deletes.append(drain.delete(instance, Reason.POD_FAILED))
    elif pod.drain_started_at is not None and disruption.is_called_off(view, pool, instance):
        mark, event = disruption.call_off(instance, now)
        draft.marks.append(mark)
        draft.events.append(event)
        draft.called_off.add(instance.name)
    elif pod.drain_started_at is not None:
        step = drain.progress(instance, view.routers, leaving.timeout_s(pool, instance), now)
        if step.delete:
            draft.deletes.append(drain.delete(instance, pod.drain_reason, step.grace_s))
            draft.events += [step.event] if step.event else []
        else:
            draft.checks.append(drain.CHECK_S)
    elif (reason := _no_supply(instance)) is not None:
        draft.let_go(instance, reason, now)
        draft.events += _given_up(instance)
    elif (node := view.snapshot.nodes.get(pod.node)) is not None and node.ready is not True:
        draft.checks.append(NODE_CHECK_S)  # lost only once its agent is silent too


def _no_supply(instance: Instance) -> Reason | None:
    """Why an instance that nobody marked yet has to go; none of these costs any of the budget."""
    if instance.is_lost:
        return Reason.NODE_LOST
    if instance.is_ended_by_kubelet:
        return Reason.NODE_SHUTDOWN
    return instance.gives_up.reason if instance.gives_up else None


def _given_up(instance: Instance) -> list[Event]:
    if instance.gives_up is None:
        return []
    note = f"Instance {instance.name} is given up and replaced: {instance.gives_up.message}"
    return [Event(str(instance.gives_up.reason), note, warning=True, instance=instance.name, action="Replace")]


def _plan_deleted(view: ServiceView, pool: PoolView, instance: Instance, draft: _Draft) -> None:
    """A pod with a deletionTimestamp: its preStop waits for the requests, so there is little left but to tell."""
    now, ends = view.now, instance.pod.deletion_at
    if ends is None:
        raise AssertionError(f"{instance.name} is not deleted")
    cut = drain.cut_by_others(instance, now)
    draft.events += [cut] if cut else []
    draft.check_at(ends - drain.PRESTOP_MARGIN_S, now)
    draft.check_at(ends + STUCK_S, now)
    if noted := leaving.note_external(pool, instance):
        draft.marks.append(noted[0])
        draft.events.append(noted[1])
    if disruption.is_beyond_recall(instance, view.snapshot):
        draft.deletes.append(drain.delete(instance, Reason.NODE_LOST, grace_s=0))
    elif instance.in_flight:
        draft.checks.append(leaving.STEP_S)


def _plan_size(view: ServiceView, pool: PoolView, draft: _Draft) -> None:
    """Instances to create and to let go, by the spec. A spec that can't be read changes nothing."""
    if view.desired is None:
        return
    step, built_from = _step(view, pool, draft)
    by_name = {instance.name: instance for instance in pool.live}
    for leave in step.leave:
        draft.let_go(by_name[leave.name], leave.reason, view.now)
    held_back = sum(i.name in draft.called_off for i in pool.instances)
    for moment in deadlines.moments(view, pool):
        if moment < math.inf:
            draft.check_at(moment, view.now)
    if built_from is None:
        return
    taken = {
        i.pod.index
        for i in pool.instances
        if (i.is_live and i.name not in draft.leaving) or disruption.may_return(i, view.snapshot.nodes)
    }
    for _ in range(max(0, step.create - held_back)):
        index = next(i for i in count() if i not in taken)
        taken.add(index)
        retry_at = backoff.blocked_until(pool.slots, index, built_from.id)
        if view.now < retry_at:  # the place waits; others don't
            draft.check_at(retry_at, view.now)
        else:
            draft.creates.append((built_from, index, pool.epoch + 1))


def _step(view: ServiceView, pool: PoolView, draft: _Draft) -> tuple[Step, Revision | None]:
    """The pool's next step and the revision that new instances are built from."""
    members = [_member(view, pool, i) for i in pool.live if i.name not in draft.leaving]
    if view.desired is None or pool.declared is None:
        others = [other for other in view.pools if other.declared is not None]
        return removed_step(members, all(other.serving >= other.desired for other in others)), None
    rollout = view.desired.spec.rollout
    unavailable = surge.max_unavailable(rollout, pool.no_room, view.now)
    budget = Budget(pool.desired, rollout.max_surge, unavailable, disruption.moves_unavailable(view, pool))
    leaving_ones = sum(_holds_surge(i, view.now) for i in pool.instances)
    is_new = pool.current is not None and pool.target is not None and pool.current.id != pool.target.id
    if pool.target is None or (rollout.paused and is_new):
        return held_step(members, budget, leaving_ones), pool.current
    if pool.attempt is not None and pool.attempt.is_held and pool.desired:
        # What failed stays to be looked at, and is no supply: what is missing without it comes back as it was.
        counted = [m for m in members if m.may_serve or not m.is_new]
        return held_step(counted, budget, leaving_ones), pool.current
    step = next_step(members, leaving_ones, budget)
    if pool.attempt is not None and pool.attempt.is_rolled_back:
        leave = (Leave(x.name, Reason.ROLLED_BACK if x.reason is Reason.SUPERSEDED else x.reason) for x in step.leave)
        step = Step(step.create, tuple(leave))
    return step, pool.goal


def _member(view: ServiceView, pool: PoolView, instance: Instance) -> Member:
    return Member(
        name=instance.name,
        index=instance.pod.index,
        is_new=pool.is_on_goal(instance),
        is_serving=instance.is_serving and disruption.is_protected(instance, view.snapshot.nodes),
        may_serve=_may_serve(instance),
        in_flight=instance.in_flight,
        prompt_tokens=instance.state.prompt_tokens if instance.state else None,
        moves=disruption.moves(instance, view.snapshot.nodes),
        is_kept=disruption.is_kept(instance, view.now),
    )


def _may_serve(instance: Instance) -> bool:
    return instance.is_serving or (instance.pod.gate and instance.verdict is not Verdict.UNROUTE)


def _holds_surge(instance: Instance, now: float) -> bool:
    """A replaced instance that still finishes its requests, and with them holds its accelerators. What one on a node
    that goes holds is of no use to anybody."""
    pod = instance.pod
    stuck = instance.is_lost or (pod.deletion_at is not None and now > pod.deletion_at + STUCK_S)
    return pod.drain_started_at is not None and pod.drain_reason in _HOLD_SURGE and not stuck


def _failed_at_once(instance: Instance, now: float) -> bool:
    # A pod from the future is one of a clock that is behind the API server's: it says nothing about speed.
    return 0 <= now - instance.pod.created_at < FAST_FAILURE_S


def _limit_creations(view: ServiceView, draft: _Draft) -> None:
    """The circuit breaker: what removes or fails pods all the time must not be fed without end."""
    limit = view.snapshot.config.limits.creations_per_service_and_minute
    left = max(0, limit - view.snapshot.recent_creations)
    if len(draft.creates) <= left:
        return
    del draft.creates[left:]
    draft.checks.append(LIMIT_CHECK_S)
    young = sum(i.is_live and i.pod.created_at > view.now - YOUNG_S for i in view.instances)
    if young >= view.snapshot.recent_creations:
        return  # all that was created is there: a large pool comes up, at the limit's pace
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
    served = {r.id: Served(r.declaration.served_model, engine_port(r.declaration)) for r in view.revisions}
    workers = wanted_workers(staying, view.routers, served)
    listed = {worker.id for worker in workers}
    is_ignorant = any(i.verdict is Verdict.HOLD and i.pod.gate and i.name not in listed for i in staying)
    return put_lists(view.routers, workers, is_ignorant=is_ignorant)


def _plan_children(view: ServiceView) -> tuple[tuple[Apply, ...], tuple[children.Conflict, ...]]:
    """Everything but pods and revisions. A refused name has no children; an unreadable spec changes none."""
    if view.desired is None or not is_service_name(view.snapshot.name):
        return (), ()
    snapshot = view.snapshot
    live = children.own(snapshot, "Deployment", router.router_name(snapshot))
    declared = {engine_port(revision.declaration) for revision in view.revisions}
    ports = sorted((declared | held_ports(view.routers)) or {ENGINE_PORT})
    wanted = [
        *([router.build_keys(snapshot)] if snapshot.signing_keys else []),
        policies.build_engine_policy(snapshot, ports),
        policies.build_router_policy(snapshot, ports),
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
        served = pool.current or (pool.target if pool.is_rolled_out else None)
        gone = revisions.unused(pool.stored, pool.target, served, used)
        if view.desired is not None and pool.declared is None and not pool.instances:
            gone = pool.stored  # the pool was removed and its last instance is gone
        for revision in gone:
            ref = ObjectRef(revisions.KIND, view.snapshot.namespace, revision.name, revision.uid)
            yield Delete(ref, str(Reason.SUPERSEDED), scope=f"{revisions.KIND}/{revision.name}")


def _creations(view: ServiceView, draft: _Draft) -> Iterator[Create]:
    where = quarantine.placement(view.avoided, view.failures, view.now)
    for revision, index, epoch in draft.creates:
        body = build_pod(view.snapshot, revision, index, epoch, where)
        name = body["metadata"]["name"]
        yield Create(body, scope=name, instance=name)


def _rollout_events(view: ServiceView) -> Iterator[Event]:
    """Said once: status notes that the target served in full, and is written after this."""
    for pool in view.pools:
        if pool.desired and pool.target and pool.is_rolled_out and not pool.was_complete:
            note = f"Pool {pool.name}: all {pool.desired} instances serve on revision {pool.target.id}"
            yield Event(str(ConditionType.ROLLOUT_COMPLETE), note, action="Rollout")
