"""The operator's API client over `FakeCluster` without HTTP: the same verbs and error classes, no waiting.

Every write passes two hooks, before and after it is committed; the simulation kills the operator there, answers with
errors, and checks invariants against what is about to happen.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sluice.api import names
from sluice.api.router import RouterState, WorkerList
from sluice.plan.actions import ObjectRef
from sluice.runtime.errors import AlreadyExists, KubeError, NotFound, Replaced, Stale, classify
from sluice.runtime.executor import RouterUnreachable
from sluice.runtime.kinds import Kind
from sluice.runtime.kube import ABSENT_VERSION
from tests.fakeapi.cluster import APPLY_PATCH, MERGE_PATCH, STRATEGIC_PATCH, FakeCluster, Options
from tests.fakeapi.errors import ApiError
from tests.played.world import PlayedRouter, World

Object = dict[str, Any]
OPERATOR = Options(manager=names.FIELD_MANAGER, strict=True, force=True)


class Crash(BaseException):
    """The operator's process ends here: not an Exception, so that nothing in the operator can catch it."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A write that the operator is about to do, or has just done."""

    verb: str
    kind: str
    namespace: str
    name: str
    subresource: str
    body: Mapping[str, Any] | WorkerList
    """What is sent; DeleteOptions for a delete."""


Hook = Callable[[Attempt], None]


class SimClient:
    """Implements what executor, reconciler and Event recorder want of a client."""

    def __init__(self, cluster: FakeCluster, before: Hook, after: Hook) -> None:
        self._cluster = cluster
        self._before = before
        self._after = after
        self._rng = random.Random(0)

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        return self._do("get", kind, namespace, name, lambda: self._cluster.get(self._resource(kind), namespace, name))

    async def create(self, kind: Kind, body: Mapping[str, Any]) -> Object:
        namespace, name = body["metadata"].get("namespace", ""), body["metadata"]["name"]
        attempt = Attempt("create", kind.name, namespace, name, "", body)
        return self._write(
            attempt, kind, lambda: self._cluster.create(self._resource(kind), namespace, dict(body), OPERATOR)
        )

    async def apply(self, kind: Kind, body: Mapping[str, Any], *, uid: str | None = None) -> Object:
        guard = {"resourceVersion": ABSENT_VERSION} if uid is None else {"uid": uid}
        guarded = {**body, "metadata": {**body["metadata"], **guard}}
        try:
            return self._patch(kind, guarded, "", APPLY_PATCH)
        except Stale as error:
            if uid is None:
                raise AlreadyExists.like(error) from error
            raise

    async def apply_status(self, kind: Kind, body: Mapping[str, Any]) -> Object:
        return self._patch(kind, body, "status", APPLY_PATCH)

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
    ) -> Object:
        metadata = {**patch.get("metadata", {}), "namespace": namespace, "name": name}
        if uid:
            metadata["uid"] = uid
        patch_type = STRATEGIC_PATCH if strategic else MERGE_PATCH
        return self._patch(kind, {**patch, "metadata": metadata}, subresource, patch_type)

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str, grace_s: int | None = None
    ) -> Object | None:
        body: Object = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        attempt = Attempt("delete", kind.name, namespace, name, "", body)
        gone = False

        def delete() -> Object:
            nonlocal gone
            last, gone = self._cluster.delete(self._resource(kind), namespace, name, body, OPERATOR)
            return last

        try:
            last = self._write(attempt, kind, delete)
        except (NotFound, Replaced):
            return None
        return None if gone and kind.name != "Pod" else last

    def _patch(self, kind: Kind, body: Mapping[str, Any], subresource: str, patch_type: str) -> Object:
        namespace, name = body["metadata"].get("namespace", ""), body["metadata"]["name"]
        verb = "apply" if patch_type == APPLY_PATCH else "patch"
        attempt = Attempt(verb, kind.name, namespace, name, subresource, body)
        return self._write(
            attempt,
            kind,
            lambda: self._cluster.patch(
                self._resource(kind),
                namespace,
                name,
                dict(body),
                patch_type=patch_type,
                subresource=subresource,
                options=OPERATOR,
            ),
        )

    def _write(self, attempt: Attempt, kind: Kind, action: Callable[[], Object]) -> Object:
        self._before(attempt)
        answer = self._do(attempt.verb, kind, attempt.namespace, attempt.name, action)
        self._after(attempt)
        return answer

    def _do(self, verb: str, kind: Kind, namespace: str, name: str, action: Callable[[], Object]) -> Object:
        try:
            return action()
        except ApiError as error:
            raise self.error(verb, kind, f"{namespace}/{name}", error) from error

    def error(self, verb: str, kind: Kind, name: str, error: ApiError) -> KubeError:
        """The error class that the real client makes of this answer."""
        data = json.dumps(error.body()).encode()
        return classify(verb, kind.resource, name, error.code, error.headers, data, self._rng)

    def _resource(self, kind: Kind) -> Any:
        return self._cluster.resource(kind.group, kind.plural)


class SimSender:
    """Worker lists to played routers; a silent or absent one is unreachable."""

    def __init__(self, world: World, before: Hook, after: Hook, heard: Callable[[str, RouterState], None]) -> None:
        self._world = world
        self._before = before
        self._after = after
        self._heard = heard

    async def put(self, router: ObjectRef, ip: str, workers: WorkerList) -> None:
        attempt = Attempt("put", "Workers", router.namespace, router.name, "", workers)
        self._before(attempt)
        played = self._world.at(ip)
        if not isinstance(played, PlayedRouter) or played.silent:
            raise RouterUnreachable(f"router {router.namespace}/{router.name}: nobody answers at {ip}")
        played.put(workers, self._world.clock())
        self._after(attempt)
        self._heard(router.uid, self._world.router_state(played, self._world.clock()))
