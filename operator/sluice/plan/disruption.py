"""Who has to leave its node, or was asked to, and what the cluster may take from a pool meanwhile.

Make before break: a live instance that *moves* is replaced first (`rollout` does that within the one budget), then
drained. What makes it move is read off the API in every pass, so taking the cause away calls the move off, also after a
restart of the operator.

| cause | reason |
|---|---|
| its node is cordoned, being deleted, or has a taint of somebody who removes nodes | NodeDrain |
| annotation `serving.sluice.dev/drain-requested` on its pod | DrainRequested |

The pool's PodDisruptionBudget is the other half: its `minAvailable` is the number of instances below which the pool
must not fall, plus one for every pod that Kubernetes still counts as healthy and that gets no requests. So an eviction
that it allows never takes the serving instances below `desired - maxUnavailable`. Integer `minAvailable` only: for
owners without a scale subresource the disruption controller can't work out `maxUnavailable` (read in source,
Kubernetes 1.36.3).
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sluice.api import names
from sluice.api.conditions import Reason
from sluice.plan import children
from sluice.plan.actions import Annotate, Apply, Delete, ObjectRef
from sluice.plan.health import Instance
from sluice.plan.metadata import child_metadata
from sluice.plan.snapshot import Event, NodeFacts, ServiceSnapshot
from sluice.plan.times import format_moment
from sluice.plan.view import PoolView, ServiceView, is_service_name

KIND: Final = "PodDisruptionBudget"

BLOCKED_S: Final = 60.0
"""Seconds that a replacement may wait for a node before the move counts as blocked: a scheduler that has room needs far
less than one, an autoscaler that adds a node for it needs minutes and is not disturbed by our saying so."""
KEPT_S: Final = 600.0
"""Seconds for which an instance whose drain was called off is the last that a scale-in picks: its replacement, which is
then one too many, goes instead."""

OUT_OF_SERVICE: Final = "node.kubernetes.io/out-of-service"
"""Set by an administrator: the machine is off for certain, its pods may be forgotten."""
REMOVAL_TAINTS: Final = frozenset(
    {
        "ToBeDeletedByClusterAutoscaler",
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",  # until Karpenter 1.0
        "node.cloudprovider.kubernetes.io/shutdown",
        OUT_OF_SERVICE,
    }
)
"""Of somebody who is about to remove the node; taints for a condition (not ready, memory pressure) are none of them."""


def node_goes(node: NodeFacts | None) -> str:
    """Why no instance should stay on the node, for people; "" while it stays (or while nothing is known of it)."""
    if node is None:
        return ""
    if node.is_being_deleted:
        return f"node {node.name} is being deleted"
    taint = next((key for key in node.taints if key in REMOVAL_TAINTS), "")
    if taint:
        return f"node {node.name} has the taint {taint}"
    return f"node {node.name} is cordoned" if node.unschedulable else ""


def moves(instance: Instance, nodes: Mapping[str, NodeFacts]) -> Reason | None:
    """Why a live instance has to be replaced and to leave; None: it stays."""
    pod = instance.pod
    if not instance.is_live:
        return None
    if pod.drain_requested:
        return Reason.DRAIN_REQUESTED
    return Reason.NODE_DRAIN if pod.node and node_goes(nodes.get(pod.node)) else None


def is_protected(instance: Instance, nodes: Mapping[str, NodeFacts]) -> bool:
    """True if Kubernetes counts the pod as healthy, so that the budget holds evictions off it.

    A pod whose gate opened a moment ago serves already, but may be evicted freely until its kubelet has reported it
    Ready: no other instance may leave on the strength of it. On a node that is not ready no pod is Ready, and nobody
    evicts.
    """
    node = nodes.get(instance.pod.node)
    return instance.pod.ready or (instance.pod.gate and node is not None and node.ready is not True)


def moving(view: ServiceView) -> tuple[Instance, ...]:
    """Live instances that still wait for their replacement."""
    return tuple(i for i in view.instances if moves(i, view.snapshot.nodes))


def is_kept(instance: Instance, now: float) -> bool:
    cancelled = instance.pod.drain_cancelled_at
    return cancelled is not None and now < cancelled + KEPT_S


@dataclass(frozen=True, slots=True)
class Blocked:
    """An instance has to move and its replacement finds no node."""

    pool: str
    message: str


def blocked(view: ServiceView, pool: PoolView) -> Blocked | None:
    """What keeps the pool's moving instances where they are; None while nothing does, or nobody moves."""
    nodes = view.snapshot.nodes
    stuck = [i for i in pool.live if moves(i, nodes)]
    waiting = [i for i in pool.live if i.reason is Reason.UNSCHEDULABLE and view.now >= i.pod.created_at + BLOCKED_S]
    if not stuck or not waiting or pool.declared is None:
        return None
    why = node_goes(nodes.get(stuck[0].pod.node)) or f"its drain was requested ({stuck[0].pod.drain_requested})"
    allowed = explicit_unavailable(view)
    then = (
        f"up to {allowed} may go without (rollout.maxUnavailable)"
        if allowed
        else "add capacity, or set rollout.maxUnavailable to let it go without"
    )
    text = f"pool {pool.name}: {stuck[0].name} has to leave ({why}), its replacement {waiting[0].name} finds no node"
    return Blocked(pool.name, f"{text}: {waiting[0].message}; {then}")


def blocked_events(view: ServiceView) -> Iterator[Event]:
    """One Event when a move becomes blocked: told while status does not say so yet."""
    conditions = view.snapshot.status.get("conditions") or []
    if any(c.get("type") == "Reconciling" and c.get("reason") == Reason.NODE_DRAIN_BLOCKED for c in conditions):
        return
    for found in (blocked(view, pool) for pool in view.pools):
        if found:
            yield Event(str(Reason.NODE_DRAIN_BLOCKED), found.message, warning=True, action="Drain")


def deadlines(view: ServiceView) -> Iterator[float]:
    """Moments, in seconds since the epoch, from which something here is judged in another way."""
    for pool in view.pools:
        is_moving = any(moves(i, view.snapshot.nodes) for i in pool.live)
        for instance in pool.live:
            if is_moving and instance.reason is Reason.UNSCHEDULABLE:
                yield instance.pod.created_at + BLOCKED_S
            if instance.pod.drain_cancelled_at is not None and len(pool.live) > pool.desired:
                yield instance.pod.drain_cancelled_at + KEPT_S


def explicit_unavailable(view: ServiceView) -> int:
    """Instances that the user lets go without a replacement; unset is none."""
    return (view.desired.spec.rollout.max_unavailable or 0) if view.desired else 0


def moves_unavailable(view: ServiceView, pool: PoolView) -> int:
    """Instances that may be missing for the sake of those that move: none while a replacement may still be placed."""
    return explicit_unavailable(view) if blocked(view, pool) else 0


def is_called_off(view: ServiceView, pool: PoolView, instance: Instance) -> bool:
    """True if an instance that drains should serve again, because the cause of its drain is gone.

    What a user asked for and took back always comes back. After an uncordon it comes back only if the pool is short of
    instances: else its replacement serves, and letting it finish costs nothing.
    """
    pod = instance.pod
    goes = node_goes(view.snapshot.nodes.get(pod.node))
    if pod.deletion_at is not None or goes or pod.drain_requested or instance.is_dead or instance.is_lost:
        return False
    if pod.drain_reason == Reason.DRAIN_REQUESTED:
        return True
    return pod.drain_reason == Reason.NODE_DRAIN and pool.declared is not None and pool.serving < pool.desired


def may_return(instance: Instance, nodes: Mapping[str, NodeFacts]) -> bool:
    """True if the instance's drain may still be called off, so that it keeps its place in the pool meanwhile."""
    pod = instance.pod
    if pod.deletion_at is not None or instance.is_dead or instance.is_lost:
        return False
    is_moved = pod.drain_started_at is not None and pod.drain_reason in (Reason.DRAIN_REQUESTED, Reason.NODE_DRAIN)
    return is_moved or moves(instance, nodes) is not None


def call_off(instance: Instance, now: float) -> tuple[Annotate, Event]:
    """The mark goes; the instance is routed again on the way that every verified instance takes."""
    pod = instance.pod
    annotations = {
        names.ANNOTATION_DRAIN_STARTED_AT: None,
        names.ANNOTATION_DRAIN_REASON: None,
        names.ANNOTATION_DRAIN_IN_FLIGHT: None,
        names.ANNOTATION_DRAIN_CANCELLED_AT: format_moment(now),
    }
    note = f"Instance {instance.name}: its drain ({pod.drain_reason}) was called off; it is routed again"
    ref = ObjectRef("Pod", pod.namespace, pod.name, pod.uid)
    event = Event(str(Reason.DRAIN_CANCELLED), note, instance=instance.name, action="Drain")
    return Annotate(ref, annotations, scope=instance.name), event


def is_beyond_recall(instance: Instance, snapshot: ServiceSnapshot) -> bool:
    """True if the pod may be force-deleted (D17): its machine is off, so nobody can run it any more.

    That is known only when the Node object is gone or an administrator tainted it out-of-service; silence alone,
    however long, is no proof: a force-deleted pod of a node that only lost its network goes on running, unseen.
    """
    pod = instance.pod
    if pod.deletion_at is None or not pod.node or instance.state is not None:
        return False
    node = snapshot.nodes.get(pod.node)
    if node is None:
        return snapshot.nodes_known
    return node.ready is not True and OUT_OF_SERVICE in node.taints


@dataclass(frozen=True, slots=True)
class Budgets:
    """What to do about the PodDisruptionBudgets. Raised before anything else is done, lowered after all else."""

    raised: tuple[Apply, ...] = ()
    lowered: tuple[Apply, ...] = ()
    deleted: tuple[Delete, ...] = ()
    conflicts: tuple[children.Conflict, ...] = ()


def plan_budgets(view: ServiceView, leaving: Collection[str]) -> Budgets:
    """`leaving`: names of the instances whose drain starts in this pass."""
    if view.desired is None or not is_service_name(view.snapshot.name):
        return Budgets()
    pools = [pool for pool in view.pools if pool.declared or pool.instances]
    wanted = [build_budget(view.snapshot, pool.name, min_available(view, pool, leaving)) for pool in pools]
    applies, conflicts = children.changed(view.snapshot, wanted)
    raised = tuple(a for a in applies if _raises(view.snapshot, a))
    return Budgets(
        raised=raised,
        lowered=tuple(a for a in applies if a not in raised),
        deleted=_unused(view.snapshot, {pool.name for pool in pools}),
        conflicts=conflicts,
    )


def min_available(view: ServiceView, pool: PoolView, leaving: Collection[str]) -> int:
    """Healthy pods (as Kubernetes counts them) that evictions must leave.

    Healthy is every pod that is Ready, or will be by the gate that is open or opened now. Those of them that do not
    serve (they drain, are suspect, or a router does not list them) are added to the floor, or an eviction would take a
    serving one for them. With no more healthy pods than the floor nothing is allowed anyway, and nothing is written.
    """
    floor = _floor(view, pool)
    healthy = [
        i
        for i in pool.instances
        if i.pod.deletion_at is None and not i.is_dead and (i.pod.gate or i.pod.ready or i.is_serving)
    ]
    idle = sum(not i.is_serving or i.name in leaving for i in healthy)
    return floor + idle if len(healthy) > floor else floor


def budget_name(snapshot: ServiceSnapshot, pool: str) -> str:
    return names.child_name(snapshot.name, snapshot.uid, pool, "engines")


def build_budget(snapshot: ServiceSnapshot, pool: str, minimum: int) -> dict[str, Any]:
    selector = {names.LABEL_SERVICE_UID: snapshot.uid, names.LABEL_POOL: pool}
    return {
        "apiVersion": "policy/v1",
        "kind": KIND,
        "metadata": child_metadata(
            snapshot, budget_name(snapshot, pool), names.COMPONENT_ENGINE, {names.LABEL_POOL: pool}
        ),
        "spec": {
            "minAvailable": minimum,
            # A pod that gets no requests never holds up a node drain; its preStop finishes what is left.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": selector},
        },
    }


def _floor(view: ServiceView, pool: PoolView) -> int:
    """Serving instances that must stay. A removed pool's serve until the other pools do, so none may be evicted.

    While instances move, `maxUnavailable` is not for evictions: the replacement has its chance first.
    """
    if pool.declared is None:
        return pool.serving
    nodes = view.snapshot.nodes
    is_moving = any(moves(i, nodes) for i in pool.instances)
    allowed = moves_unavailable(view, pool) if is_moving else explicit_unavailable(view)
    return max(0, pool.desired - allowed)


def _raises(snapshot: ServiceSnapshot, apply: Apply) -> bool:
    """True unless the live budget is the stricter one: what is new, or changed in another way, protects at once."""
    live = children.own(snapshot, KIND, apply.body["metadata"]["name"])
    before = ((live or {}).get("spec") or {}).get("minAvailable")
    return not isinstance(before, int) or before <= apply.body["spec"]["minAvailable"]


def _unused(snapshot: ServiceSnapshot, pools: Collection[str]) -> tuple[Delete, ...]:
    """Budgets of pools that are gone with all their instances."""
    gone = []
    for (kind, name), live in sorted(snapshot.children.items()):
        pool = (live["metadata"].get("labels") or {}).get(names.LABEL_POOL)
        if kind != KIND or not pool or pool in pools or children.own(snapshot, kind, name) is None:
            continue
        if not live["metadata"].get("deletionTimestamp"):
            ref = ObjectRef(KIND, snapshot.namespace, name, str(live["metadata"]["uid"]))
            gone.append(Delete(ref, str(Reason.SCALE_IN), scope=f"{KIND}/{name}"))
    return tuple(gone)
