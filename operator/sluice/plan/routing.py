"""The wanted worker list of each router, and what the routers' own words prove.

Invariants:
- Listed is only who answered a real inference in the engine run that is named in the list (D14), and whoever was
  listed before and has gone silent. Nobody is listed who drains, terminates, failed or is lost.
- Serving = every live router shows the worker ready, and so does each one that starts and has its list: it may be Ready
  by its other workers a moment later, when those are about to leave. Unrouted = no router can still send it a request.
- A router that says nothing proves nothing, unless its pod is terminating, or was ready and is not any more: it then
  gets no new requests.
- No list is sent to a router before it was heard: a fresh operator must not empty routers by ignorance.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from sluice.api import names
from sluice.api.conditions import Reason
from sluice.api.router import MAX_WORKERS, RoutedWorker, RouterState, Worker, WorkerList, WorkerStatus
from sluice.plan.actions import ObjectRef, PutWorkers
from sluice.plan.health import SERVES, SILENT_S, Instance, InstancePhase, Verdict
from sluice.plan.snapshot import PodFacts, ServiceSnapshot

_MAY_GET_REQUESTS = frozenset({WorkerStatus.READY, WorkerStatus.PENDING, WorkerStatus.NOT_READY})
"""smg states from which a worker has requests sent to it, now or when its next health check passes."""
STARTING_S = 60.0
"""Seconds for which a router that is not ready yet counts as starting; smg has its workers within two."""
NEVER_READY_S = 30.0
"""A pod whose Ready condition has been False since so soon after its creation has not been Ready before."""
_NOT_IN_SMG = frozenset({WorkerStatus.WITHHELD, WorkerStatus.ABSENT})


@dataclass(frozen=True, slots=True)
class RouterView:
    """One router pod."""

    pod: PodFacts
    last: RouterState | None
    """Its last word, however old."""
    is_fresh: bool
    not_ready_s: float = 0.0
    """Seconds since its pod turned not ready, or was made."""

    @property
    def takes_requests(self) -> bool:
        """New requests reach it through the Service."""
        return self.pod.ready and self.pod.deletion_at is None and self.pod.phase not in ("Failed", "Succeeded")

    @property
    def is_starting(self) -> bool:
        """It has its list, so its pod is Ready as soon as any worker is. One that takes longer may be cut off from the
        engines, and must not keep them from serving elsewhere."""
        is_leaving = self.pod.deletion_at is not None or self.pod.phase != "Running"
        held = self.last.wanted if self.last is not None and self.speaks else None
        is_young = self.not_ready_s <= STARTING_S
        return held is not None and held.open and not self.pod.ready and not is_leaving and is_young

    @property
    def speaks(self) -> bool:
        """Its word about smg counts now."""
        return self.is_fresh and self.last is not None and self.last.smg_reachable

    def entry(self, instance: Instance) -> RoutedWorker | None:
        if self.last is None:
            return None
        return next((w for w in self.last.workers if w.id == instance.name), None)


def router_views(snapshot: ServiceSnapshot, now: float) -> tuple[RouterView, ...]:
    views = []
    for pod in snapshot.pods:
        if pod.component == names.COMPONENT_ROUTER:
            facts = snapshot.routers.get(pod.uid)
            is_fresh = facts is not None and facts.age_s <= SILENT_S
            not_ready_s = 0.0 if pod.ready else now - (pod.not_ready_since or pod.created_at)
            views.append(RouterView(pod, facts.state if facts else None, is_fresh, not_ready_s))
    return tuple(views)


def confirmed(instances: Iterable[Instance], routers: Sequence[RouterView]) -> tuple[Instance, ...]:
    """The instances with their phase as the routers see it: Serving only when all live routers list them."""
    return tuple(_confirmed(instance, routers) for instance in instances)


def _confirmed(instance: Instance, routers: Sequence[RouterView]) -> Instance:
    if instance.verdict is Verdict.UNROUTE:
        return instance
    live = [router for router in routers if router.takes_requests]
    # What serves already stays Serving while a router starts.
    starting = [] if instance.pod.gate else [router for router in routers if router.is_starting]
    if live and all(_lists(router, instance) for router in (*live, *starting)):
        if instance.reason is Reason.ROUTERS_STARTING:
            return replace(instance, phase=InstancePhase.SERVING, reason=Reason.SERVING, message=SERVES)
        return replace(instance, phase=InstancePhase.SERVING) if instance.verdict is Verdict.ROUTE else instance
    if instance.phase is InstancePhase.SERVING:
        return replace(instance, phase=InstancePhase.VERIFYING)
    return instance


def _lists(router: RouterView, instance: Instance) -> bool:
    """True if the router sends requests to this engine run; a router that says nothing changes nothing."""
    if not router.speaks:
        return instance.pod.gate
    entry = router.entry(instance)
    if entry is None or entry.status is not WorkerStatus.READY:
        return False
    return instance.state is None or entry.engine_id == instance.state.engine_id


def is_unrouted(instance: Instance, routers: Sequence[RouterView]) -> bool:
    """No router can still send the instance a new request."""
    return all(_has_let_go(router, instance) for router in routers)


def _may_have_become_ready(router: RouterView, instance: Instance) -> bool:
    """A router that was never ready yet, told that it has the instance, and then fell silent: the watch may not have
    told us that it became ready meanwhile. Two times of the API are compared, not ours with the API's."""
    pod, last = router.pod, router.last
    if pod.deletion_at is not None or pod.phase != "Running" or last is None or last.wanted is None:
        return False
    was_ready = pod.not_ready_since is None or pod.not_ready_since - pod.created_at > NEVER_READY_S
    return not was_ready and any(worker.id == instance.name for worker in last.wanted.workers)


def held_ports(routers: Iterable[RouterView]) -> frozenset[int]:
    """Engine ports of the lists that routers hold: also of instances whose revision is not stored any more."""
    workers = (w for router in routers if router.last and router.last.wanted for w in router.last.wanted.workers)
    return frozenset(port for worker in workers if (port := urlsplit(worker.url).port))


def _has_let_go(router: RouterView, instance: Instance) -> bool:
    if not router.speaks:
        return not router.takes_requests and not _may_have_become_ready(router, instance)
    state = router.last
    if state is None:
        return False
    if state.wanted is not None and any(worker.id == instance.name for worker in state.wanted.workers):
        return False
    ip = instance.pod.ip
    return not any(
        (w.id == instance.name or (ip and urlsplit(w.url).hostname == ip)) and w.status in _MAY_GET_REQUESTS
        for w in state.workers
    )


@dataclass(frozen=True, slots=True)
class Served:
    """What a revision's instances serve, and on which port; a rollout may change both."""

    model: str
    port: int


def wanted_workers(
    instances: Iterable[Instance], routers: Sequence[RouterView], served: Mapping[str, Served]
) -> tuple[Worker, ...]:
    """Who should be listed, by name; a silent one as some router last had it.

    `served`: by revision. Of one that is not stored any more it is taken from what a router holds; without that the
    instance can't be listed.
    """
    known: dict[str, Worker] = {}
    for router in sorted(routers, key=lambda r: r.is_fresh):
        if router.last is not None and router.last.wanted is not None:
            known.update({worker.id: worker for worker in router.last.wanted.workers})
    listed = {}
    for instance in instances:
        before = known.get(instance.name)
        serves = served.get(instance.pod.revision) or _as_held(before)
        if instance.verdict is Verdict.ROUTE and serves:
            listed[instance.name] = _worker(instance, serves)
        elif instance.verdict is Verdict.HOLD and before is not None:
            listed[instance.name] = before
    return tuple(listed[name] for name in sorted(listed))


def _as_held(worker: Worker | None) -> Served | None:
    port = urlsplit(worker.url).port if worker else None
    return Served(worker.model, port) if worker and port else None


def _worker(instance: Instance, serves: Served) -> Worker:
    host = _host(instance.pod.ip)
    engine_id = instance.state.engine_id if instance.state else None
    if not engine_id:
        raise AssertionError(f"{instance.name}: routed without the identity of its engine run")
    return Worker(
        id=instance.name,
        url=f"http://{host}:{serves.port}",
        role=instance.pod.role,
        agent_url=f"http://{host}:{names.PORT_AGENT}",
        engine_id=engine_id,
        model=serves.model,
    )


def put_lists(
    routers: Sequence[RouterView],
    workers: Sequence[Worker],
    *,
    is_ignorant: bool,
    is_open: bool = True,
) -> tuple[PutWorkers, ...]:
    """Lists for the routers that hold another one.

    `is_ignorant`: a routed instance is silent and no router could say how it was listed. An empty list then is no
    statement, so none is sent.
    """
    actions = []
    for router in routers:
        pod, state = router.pod, router.last
        if (
            state is None
            or not pod.ip
            or pod.phase != "Running"
            or (pod.deletion_at is not None and not router.is_fresh)
        ):
            continue
        mine = _without_reused_addresses(workers, state)[:MAX_WORKERS]
        if not mine and is_ignorant:
            continue
        wanted = worker_list(mine, is_open=is_open)
        if state.generation != wanted.generation:
            ref = ObjectRef("Pod", pod.namespace, pod.name, pod.uid)
            actions.append(PutWorkers(ref, pod.ip, wanted, scope=f"router/{pod.name}"))
    return tuple(actions)


def worker_list(workers: Sequence[Worker], *, is_open: bool = True) -> WorkerList:
    """The list with the digest of its content as generation."""
    content = [worker.model_dump(mode="json") for worker in workers]
    generation = names.short_hash(json.dumps([is_open, content], sort_keys=True), length=16)
    return WorkerList(generation=generation, open=is_open, workers=list(workers))


def _without_reused_addresses(workers: Sequence[Worker], state: RouterState) -> tuple[Worker, ...]:
    """A worker whose address this router still has under another instance waits until that one is gone (some 5 s):
    smg would take it for the old one."""
    holders: dict[str, set[str]] = {}
    for routed in state.workers:
        if routed.status not in _NOT_IN_SMG:
            holders.setdefault(routed.url, set()).add(routed.id)
    return tuple(w for w in workers if not holders.get(w.url, set()) - {w.id})


def _host(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip
