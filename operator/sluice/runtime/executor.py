"""Carries out a plan's actions: in order, each idempotent, stopping exactly what depends on a failure.

| outcome | meaning | rest of the same scope | rest of the plan |
|---|---|---|---|
| Done, Unchanged | | goes on | goes on |
| Refused | no for good: 403, quota, 422, name conflict, creation limit | skipped | goes on |
| Failed, by a router | one sidecar does not answer | skipped | goes on |
| Failed, by the API server | transient, affects everybody | skipped | skipped; the key backs off |

Neighbouring actions of one type run up to eight at once (those of one scope in order); deletes run one by one. The
Lease is looked at before each write. Every response goes into the store, so the next pass sees it (no counters).
The client is a parameter: tests kill the run between any two actions by a client that raises.
"""

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, Protocol

from sluice.api import names
from sluice.api.conditions import Reason
from sluice.api.router import WorkerList
from sluice.plan.actions import Action, Annotate, Apply, Create, Delete, ObjectRef, Outcome, PutWorkers, Result, SetGate
from sluice.runtime import kinds
from sluice.runtime.errors import (
    AlreadyExists,
    Forbidden,
    Invalid,
    KubeError,
    NotFound,
    QuotaExceeded,
    Replaced,
    Stale,
)
from sluice.runtime.kinds import Kind
from sluice.runtime.store import Store, controlling_service

log = logging.getLogger(__name__)

PARALLEL: Final = 8
CREATION_WINDOW_S: Final = 60.0

Object = dict[str, Any]


class Writer(Protocol):
    """The verbs of `kube.Client` that actions need."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Object: ...
    async def create(self, kind: Kind, body: Mapping[str, Any]) -> Object: ...
    async def apply(self, kind: Kind, body: Mapping[str, Any], *, uid: str | None = None) -> Object: ...
    async def patch(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        patch: Mapping[str, Any],
        *,
        uid: str = "",
        subresource: str = "",
        strategic: bool = False,
    ) -> Object: ...
    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str, grace_s: int | None = None
    ) -> Object | None: ...


class RouterUnreachable(Exception):  # noqa: N818 - reads better in `except RouterUnreachable`
    """A router's sidecar did not take the list; says which pod and why."""


class WorkerSender(Protocol):
    """Sends worker lists to routers' sidecars; raises `RouterUnreachable`."""

    async def put(self, router: ObjectRef, ip: str, workers: WorkerList) -> None: ...


class Leadership(Protocol):
    def held(self) -> bool:
        """True while the Lease is ours beyond doubt."""
        ...


class CreationLog:
    """When pods were created, per service: the memory of the circuit breaker. Lost at a restart, then the pods' own
    creation times count (`reconciler`)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: defaultdict[str, deque[float]] = defaultdict(deque)

    def record(self, service_uid: str) -> None:
        self._times[service_uid].append(self._clock())

    def recent(self, service_uid: str) -> int:
        """Creations in the last minute."""
        times = self._times.get(service_uid)
        if times is None:
            return 0
        while times and times[0] <= self._clock() - CREATION_WINDOW_S:
            times.popleft()
        if not times:
            del self._times[service_uid]
        return len(times)


@dataclass(slots=True)
class _Pass:
    """State of one run."""

    service_uid: str
    creations_left: int
    creation_limit: int
    stopped_scopes: set[str]
    ended: str = ""
    """Why nothing more may be done; "" while the pass goes on."""


class Executor:
    """Carries out plans; one instance serves all services."""

    def __init__(
        self,
        client: Writer,
        store: Store,
        routers: WorkerSender,
        lease: Leadership,
        *,
        creations: CreationLog,
        creation_limit: int,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._store = store
        self._routers = routers
        self._lease = lease
        self._creations = creations
        self._creation_limit = creation_limit
        self._wall_clock = wall_clock

    async def run(
        self, service_uid: str, actions: Sequence[Action], *, recent_creations: int = 0
    ) -> tuple[Result, ...]:
        """Carry out the actions; one result per action, in the plan's order.

        `recent_creations`: pods created for this service in the last minute, counted against the limit. Pods refused
        by it are not created now; the other actions go on.
        """
        left = max(self._creation_limit - recent_creations, 0)
        state = _Pass(service_uid, left, self._creation_limit, set())
        results: list[Result] = []
        for kind, group in groupby(actions, key=type):
            batch = list(group)
            if kind is Delete:
                results += [await self._one(action, state) for action in batch]
            else:
                results += await self._batch(batch, state)
        return tuple(results)

    async def _batch(self, batch: Sequence[Action], state: _Pass) -> list[Result]:
        """Scopes side by side, the actions of one scope in order."""
        results: dict[int, Result] = {}
        scopes: defaultdict[str, list[int]] = defaultdict(list)
        for index, action in enumerate(batch):
            scopes[action.scope].append(index)
        slots = asyncio.Semaphore(PARALLEL)

        async def run_scope(indices: Iterable[int]) -> None:
            for index in indices:
                async with slots:
                    results[index] = await self._one(batch[index], state)

        async with asyncio.TaskGroup() as tasks:
            for indices in scopes.values():
                tasks.create_task(run_scope(indices))
        return [results[index] for index in range(len(batch))]

    async def _one(self, action: Action, state: _Pass) -> Result:
        if state.ended:
            return Result(action, Outcome.SKIPPED, message=state.ended)
        if action.scope in state.stopped_scopes:
            return Result(action, Outcome.SKIPPED, message=f"an earlier step of {action.scope} did not succeed")
        if not self._lease.held():
            state.ended = "this process does not hold the Lease"
            return Result(action, Outcome.SKIPPED, message=state.ended)
        result = await self._attempt(action, state)
        if result.outcome in (Outcome.REFUSED, Outcome.FAILED):
            state.stopped_scopes.add(action.scope)
            if result.outcome is Outcome.FAILED and not isinstance(action, PutWorkers):
                state.ended = f"the pass ended: {result.message}"
        return result

    async def _attempt(self, action: Action, state: _Pass) -> Result:
        try:
            outcome, reason, message = await self._carry_out(action, state)
            return Result(action, outcome, reason, message)
        except RouterUnreachable as error:
            return Result(action, Outcome.FAILED, Reason.ROUTER_UNREACHABLE, str(error))
        except QuotaExceeded as error:
            return Result(action, Outcome.REFUSED, Reason.QUOTA_EXCEEDED, error.message)
        except Forbidden as error:
            message = f"not allowed to {error.verb} {error.resource}: {error.message}"
            return Result(action, Outcome.REFUSED, Reason.FORBIDDEN, message)
        except (Invalid, NotFound) as error:
            return Result(action, Outcome.REFUSED, Reason.REJECTED, str(error))
        except KubeError as error:
            return Result(action, Outcome.FAILED, Reason.API_UNAVAILABLE, str(error))

    async def _carry_out(self, action: Action, state: _Pass) -> "_Verdict":
        match action:
            case PutWorkers():
                await self._routers.put(action.router, action.ip, action.workers)
                return _DONE
            case SetGate():
                return await self._set_gate(action)
            case Annotate():
                patch = {"metadata": {"annotations": dict(action.annotations)}}
                return await self._patch_pod(action.pod, patch)
            case Apply():
                return await self._apply(action, state)
            case Create():
                return await self._create(action, state)
            case Delete():
                return await self._delete(action)

    async def _set_gate(self, action: SetGate) -> "_Verdict":
        condition = {
            "type": names.READINESS_GATE,
            "status": "True" if action.routable else "False",
            "reason": action.reason,
            "message": action.message,
            "lastTransitionTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._wall_clock())),
        }
        return await self._patch_pod(action.pod, {"status": {"conditions": [condition]}}, status=True)

    async def _patch_pod(self, pod: ObjectRef, patch: Mapping[str, Any], *, status: bool = False) -> "_Verdict":
        """A pod that is gone or replaced needs no patch: the store learns it, the next pass plans without it."""
        before = self._store.version(kinds.POD, pod.uid)
        try:
            live = await self._client.patch(
                kinds.POD,
                pod.namespace,
                pod.name,
                patch,
                uid=pod.uid,
                subresource="status" if status else "",
                strategic=status,
            )
        except (NotFound, Replaced):
            self._store.forget(kinds.POD, pod.uid)
            return Outcome.DONE, "", "the pod is gone"
        return self._learn(live, before)

    async def _apply(self, action: Apply, state: _Pass, *, again: bool = True) -> "_Verdict":
        kind = kinds.BY_NAME[action.body["kind"]]
        body, meta = action.body, action.body["metadata"]
        known = self._store.find(kind, meta.get("namespace", ""), meta["name"], state.service_uid)
        try:
            live = await self._client.apply(kind, body, uid=None if known is None else known.uid)
        except AlreadyExists:
            live = await self._standing(kind, meta)
            if controlling_service(live["metadata"]) != state.service_uid:
                return _name_conflict(kind, live)
            self._store.found(live)
            if not again:
                raise
            return await self._apply(action, state, again=False)
        except Replaced:
            if known is None or not again:
                raise
            self._store.forget(kind, known.uid)  # gone or replaced: look at the name once more
            return await self._apply(action, state, again=False)
        return self._learn(live, None if known is None else known.version)

    async def _create(self, action: Create, state: _Pass) -> "_Verdict":
        kind = kinds.BY_NAME[action.body["kind"]]
        if kind is kinds.POD:
            if state.creations_left <= 0:
                return Outcome.REFUSED, Reason.CREATION_LIMIT, _limit_message(state.creation_limit)
            state.creations_left -= 1
        meta = action.body["metadata"]
        try:
            live = await self._client.create(kind, action.body)
        except AlreadyExists:
            live = await self._standing(kind, meta)
            if controlling_service(live["metadata"]) != state.service_uid:
                return _name_conflict(kind, live)
            before = self._store.version(kind, live["metadata"]["uid"])
            self._store.found(live)
            return self._learn(live, before)
        if kind is kinds.POD:
            self._creations.record(state.service_uid)
        return self._learn(live, None)

    async def _delete(self, action: Delete) -> "_Verdict":
        target = action.target
        kind = kinds.BY_NAME[target.kind]
        before = self._store.version(kind, target.uid)
        live = await self._client.delete(kind, target.namespace, target.name, uid=target.uid, grace_s=action.grace_s)
        if live is not None:
            return self._learn(live, before)
        self._store.forget(kind, target.uid)
        return _UNCHANGED if before is None else _DONE

    async def _standing(self, kind: Kind, meta: Mapping[str, Any]) -> Object:
        """What stands at a name that is taken; if it went away in between, the pass ends and looks again."""
        try:
            return await self._client.get(kind, meta.get("namespace", ""), meta["name"])
        except NotFound as error:
            raise Stale.like(error) from error

    def _learn(self, live: Object, before: float | None) -> "_Verdict":
        """Take a response in. Unchanged if the object is as it was: only Done makes the key run again, so that a
        write that never takes effect can't become a hot loop."""
        self._store.apply("MODIFIED", live)
        after = self._store.version(kinds.BY_NAME[live["kind"]], live["metadata"]["uid"])
        return _UNCHANGED if before is not None and after == before else _DONE


_Verdict = tuple[Outcome, str, str]
_DONE: Final[_Verdict] = (Outcome.DONE, "", "")
_UNCHANGED: Final[_Verdict] = (Outcome.UNCHANGED, "", "")


def _name_conflict(kind: Kind, live: Mapping[str, Any]) -> _Verdict:
    meta = live["metadata"]
    owners = [f"{o.get('kind')}/{o.get('name')}" for o in meta.get("ownerReferences") or ()]
    whose = f"owned by {', '.join(owners)}" if owners else "without an owner"
    name = f"{meta.get('namespace', '')}/{meta['name']}"
    message = (
        f"{kind.name} {name} exists already and is not ours ({whose}); it is left alone. "
        "Delete or rename it, or rename the InferenceService."
    )
    return Outcome.REFUSED, Reason.NAME_CONFLICT, message


def _limit_message(limit: int) -> str:
    return (
        f"{limit} pods were created for this service within a minute; creation pauses. "
        "Something removes or fails the pods: see status.problems and the pods' events."
    )
