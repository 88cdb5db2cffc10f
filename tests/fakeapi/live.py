"""The operator's real parts on the fake API server over HTTP, driven pass by pass in the test's own process.

Client, store, executor, reconciler and observer are the real ones, agents and sidecars answer over HTTP; only kopf is
left out: watch events are taken from the cluster directly, so that a test decides when a pass runs and where it dies.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes.aio.client import ApiClient, Configuration

from sluice.api import names
from sluice.api.config import OperatorConfig
from sluice.main import Options as MainOptions
from sluice.main import Parts
from sluice.runtime import kinds, kube
from sluice.runtime.kinds import Kind
from sluice.runtime.kube import Client
from sluice.runtime.lease import Lease
from sluice.runtime.metrics import Metrics
from sluice.runtime.queue import Key
from tests.fakeapi.cluster import FakeCluster
from tests.fakeapi.contract import a_service
from tests.fakeapi.disruption import is_ready
from tests.fakeapi.server import FakeServer
from tests.fakeapi.storage import Watch
from tests.played.controllers import Machinery
from tests.played.pods import is_engine, is_router
from tests.played.world import World

Object = dict[str, Any]

NAMESPACE = "t"
CONVERGE_S = 30.0
QUIET_ROUNDS = 10


class Killed(BaseException):  # not an error: the end of a process
    """The operator's process ends here; no `except Exception` of the operator can stop it."""


@dataclass(eq=False)
class Killer:
    """Counts the writes of one life and kills before or after one of them; 0: never."""

    kill_at: int = 0
    after: bool = False
    writes: int = 0
    dead: bool = False

    def before(self) -> int:
        """A write is about to be sent; its number."""
        if self.dead:
            raise Killed
        self.writes += 1
        if self.writes == self.kill_at and not self.after:
            self._kill()
        return self.writes

    def committed(self, number: int) -> None:
        """The write of this number was answered."""
        if number == self.kill_at and self.after:
            self._kill()

    def _kill(self) -> None:
        self.dead = True
        raise Killed


class MortalClient(Client):
    """The client with a killer at each of its writes."""

    def __init__(self, inner: Client, killer: Killer) -> None:
        api: ApiClient = inner.api
        super().__init__(api, inner.connector)
        self.killer = killer

    async def create(self, kind: Kind, body: Mapping[str, Any]) -> Object:
        number = self.killer.before()
        answer = await super().create(kind, body)
        self.killer.committed(number)
        return answer

    async def apply(
        self, kind: Kind, body: Mapping[str, Any], *, uid: str | None = None, dry_run: bool = False
    ) -> Object:
        number = self.killer.before()
        answer = await super().apply(kind, body, uid=uid, dry_run=dry_run)
        self.killer.committed(number)
        return answer

    async def apply_status(self, kind: Kind, body: Mapping[str, Any]) -> Object:
        number = self.killer.before()
        answer = await super().apply_status(kind, body)
        self.killer.committed(number)
        return answer

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
        number = self.killer.before()
        answer = await super().patch(
            kind, namespace, name, patch, uid=uid, subresource=subresource, strategic=strategic
        )
        self.killer.committed(number)
        return answer

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str, grace_s: int | None = None, foreground: bool = False
    ) -> Object | None:
        number = self.killer.before()
        answer = await super().delete(kind, namespace, name, uid=uid, grace_s=grace_s, foreground=foreground)
        self.killer.committed(number)
        return answer


@dataclass(eq=False)
class Life:
    """One life of the operator."""

    parts: Parts
    watches: dict[Kind, Watch]

    def deliver(self) -> None:
        """Everything that the watches have to tell."""
        for kind, watch in self.watches.items():
            for event in watch.take():
                self.parts.on_event(kind, event.type, event.object)

    async def pass_once(self) -> Key | None:
        """One pass if a key waits. Raises: Killed (perhaps in a group)."""
        key = self.parts.queue.take()
        if key is not None:
            ended = await self.parts.reconciler.run(key)
            self.parts.queue.done(key, str(ended) == "success")
        return key


@dataclass(eq=False)
class Stage:
    """A fake cluster with its API server, played pods, and the means to run operators on it."""

    cluster: FakeCluster
    server: FakeServer
    world: World
    machinery: Machinery
    token_file: Path

    @property
    def config(self) -> OperatorConfig:
        return OperatorConfig(router_token_file=self.token_file)

    def create_service(self, *, replicas: int = 2) -> Object:
        body = a_service("s", NAMESPACE, replicas=replicas, spec={"drain": {"timeoutSeconds": 60}})
        resource = self.cluster.resource(names.GROUP, names.SERVICE_PLURAL)
        return self.cluster.create(resource, NAMESPACE, body)

    def edit(self, spec: Object) -> None:
        resource = self.cluster.resource(names.GROUP, names.SERVICE_PLURAL)
        self.cluster.patch(resource, NAMESPACE, "s", {"spec": spec})

    def engine_pods(self) -> list[Object]:
        return [pod for pod in self.cluster.objects("pods", namespace=NAMESPACE) if is_engine(pod)]

    def created_engine_pods(self) -> list[str]:
        """Names of all engine pods that the operator ever created, repeats included."""
        made = self.cluster.writes(manager=names.FIELD_MANAGER)
        return [w.name for w in made if (w.verb, w.plural) == ("create", "pods")]

    def is_converged(self) -> bool:
        service = self.cluster.objects(names.SERVICE_PLURAL, names.GROUP)[0]
        conditions = {c["type"]: c for c in service.get("status", {}).get("conditions") or []}
        desired = sum(pool["replicas"] for pool in service["spec"]["pools"])
        pods = self.engine_pods()
        ready = conditions.get("Ready", {})
        return (
            ready.get("status") == "True"
            and ready.get("observedGeneration") == service["metadata"]["generation"]
            and conditions["Reconciling"]["status"] == "False"
            and len(pods) == desired
            and all(is_ready(pod) for pod in pods)
            and not any("deletionTimestamp" in pod["metadata"] for pod in pods)
            and any(is_router(pod) for pod in self.cluster.objects("pods", namespace=NAMESPACE))
        )

    @asynccontextmanager
    async def life(self, killer: Killer | None = None) -> AsyncIterator[Life]:
        """A started operator: Lease taken, everything listed, watches open."""
        async with kube.connect_with(Configuration(host=self.server.url)) as connected:
            client = MortalClient(connected, killer or Killer())
            lease = Lease(connected, namespace="sluice-system", name=names.OPERATOR_LEASE, identity="test")
            await lease.acquire()
            options = MainOptions(self.config, None, None, "127.0.0.1", 0, "test")
            parts = Parts(options, client, lease, Metrics(), kinds.WATCHED)
            watches = {}
            for kind in kinds.WATCHED:
                resource = self.cluster.resource(kind.group, kind.plural)
                watches[kind] = self.cluster.watch(resource, labels=kind.selector, from_rv=self.cluster.storage.rv)
            renewing = asyncio.create_task(lease.keep())
            try:
                await parts.load()
                for key in parts.store.services():
                    parts.queue.add(key)
                yield Life(parts, watches)
            finally:
                renewing.cancel()
                for watch in watches.values():
                    self.cluster.storage.close(watch)
                await parts.close()

    async def run(self, life: Life, until: Callable[[], bool]) -> None:
        """Passes, pods and events in turn until the condition holds.

        Raises:
            AssertionError: it did not within `CONVERGE_S`.
            Killed: the killer struck (perhaps in a group).
        """
        end = time.monotonic() + CONVERGE_S
        quiet = 0
        while quiet < QUIET_ROUNDS:
            life.deliver()
            busy = self.machinery.round()
            busy |= await life.pass_once() is not None
            quiet = quiet + 1 if until() and not busy else 0
            assert time.monotonic() < end, f"not within {CONVERGE_S} s; last writes: {self.cluster.writes()[-20:]}"
            await asyncio.sleep(0 if busy else 0.005)

    async def run_and_die(self, killer: Killer, until: Callable[[], bool]) -> bool:
        """Like `run` in a life of its own; True if the operator was killed on the way."""
        async with self.life(killer) as life:
            try:
                await self.run(life, until)
            except BaseException as error:
                if not is_killed(error):
                    raise
                return True
        return False

    async def writes_nothing(self) -> None:
        """A fresh operator on a converged cluster: two passes, no write but its Lease."""
        async with self.life() as life:
            await self.run(life, self.is_converged)
            mark = len(self.cluster.audit)
            for _ in range(2):
                for key in life.parts.store.services():
                    life.parts.queue.add(key)
                await self.run(life, self.is_converged)
            written = [w for w in self.cluster.writes(since=mark, changed=False) if w.plural != "leases"]
            assert not written, written


def is_killed(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(is_killed(inner) for inner in error.exceptions)
    return isinstance(error, Killed)
