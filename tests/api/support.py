"""Shared pieces of the API level: namespaces, CRDs, and a stage with the operator as a process and played pods."""

import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from e2e.bed.api_only import ApiOnly
from e2e.bed.audit import Write
from sluice.api import names
from sluice.runtime import kinds, kube
from sluice.runtime.errors import AlreadyExists
from sluice.runtime.kinds import Kind
from tests.fakeapi import crds
from tests.fakeapi.contract import NAMESPACE, Contract, a_service
from tests.played.kubelet import PlayedKubelets
from tests.played.process import OperatorProcess
from tests.played.server import PlayedServer
from tests.played.world import PlayedEngine, PlayedRouter, World

Object = dict[str, Any]

OPERATOR_USER = "sluice-operator-under-test"
READY_S = 90.0
POLL_S = 0.1


async def install_crds(client: kube.Client) -> None:
    """Create our CRDs if they aren't there and wait until they are served.

    Raises:
        AssertionError: not served in time.
    """
    for crd in crds.shipped():
        try:
            await client.create(kinds.CRD, crd)
        except AlreadyExists:
            continue
    contract = Contract(client, "default", is_real=True)

    async def are_served() -> bool:
        served = await client.api_resources(names.GROUP, names.VERSION)
        return {names.SERVICE_PLURAL, names.PROFILE_PLURAL} <= served

    await contract.until("our kinds are served", are_served)


@asynccontextmanager
async def own_namespace(bed: ApiOnly) -> AsyncIterator[Contract]:
    """A client and a namespace of the test's own; the namespace is deleted without waiting."""
    async with kube.connect(bed.kubeconfig) as client:
        await install_crds(client)
        name = f"t-{uuid.uuid4().hex[:10]}"
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        made = await client.create(NAMESPACE, body)
        yield Contract(client, name, is_real=True)
        await client.delete(NAMESPACE, "", name, uid=made["metadata"]["uid"])


@dataclass(eq=False)
class Cluster:
    """The bed with CRDs, fake nodes, played pods and one operator process; shared by the tests of a session."""

    bed: ApiOnly
    world: World
    folder: Path
    operator: OperatorProcess
    token: Path

    @contextmanager
    def stage(self) -> Iterator["Stage"]:
        """A namespace for one test."""
        name = f"t-{uuid.uuid4().hex[:10]}"
        self.bed.api.create("/api/v1/namespaces", {"metadata": {"name": name}})
        yield Stage(self, name)
        self.world.load_s = 0.0
        self.bed.api.delete(f"/api/v1/namespaces/{name}")

    def restart_operator(self, config: Object | None = None) -> None:
        """SIGKILL, then a new process, with additions to its configuration if given."""
        self.operator.kill()
        self.write_config(config or {})
        self.operator.start()

    def write_config(self, extra: Object) -> None:
        (self.folder / "config.yaml").write_text(yaml.safe_dump({"routerTokenFile": str(self.token), **extra}))


@contextmanager
def running_cluster(bed: ApiOnly, folder: Path) -> Iterator[Cluster]:
    """Everything started; the operator has read the cluster when a first service is reconciled, not before."""
    token = folder / "token"
    token.write_text("played")
    kubeconfig = bed.user_kubeconfig(OPERATOR_USER, groups=["system:masters"])
    if not bed.nodes:
        bed.fake_nodes(2)
    status, _ = bed.api.request("GET", f"/api/v1/namespaces/{names.SYSTEM_NAMESPACE}")
    if status != 200:
        bed.api.create("/api/v1/namespaces", {"metadata": {"name": names.SYSTEM_NAMESPACE}})
    world = World()
    operator = OperatorProcess(kubeconfig, folder / "config.yaml", folder / "operator.log")
    cluster = Cluster(bed, world, folder, operator, token)
    cluster.write_config({})
    with PlayedServer(world), PlayedKubelets(bed.kubeconfig, world), operator:
        yield cluster


@dataclass(eq=False)
class Stage:
    """One test's namespace and what it asks about it."""

    cluster: Cluster
    namespace: str

    @property
    def api(self) -> Any:
        return self.cluster.bed.api

    def path(self, kind: Kind, name: str = "", subresource: str = "") -> str:
        return kind.path(self.namespace, name, subresource)

    def create_service(self, name: str = "s", *, replicas: int = 1, **spec: Any) -> Object:
        body = a_service(name, self.namespace, replicas=replicas, spec={"drain": {"timeoutSeconds": 60}, **spec})
        made: Object = self.api.create(self.path(kinds.INFERENCE_SERVICE), body)
        return made

    def edit_service(self, spec: Object, name: str = "s") -> Object:
        edited: Object = self.api.patch(self.path(kinds.INFERENCE_SERVICE, name), {"spec": spec})
        return edited

    def delete_service(self, name: str = "s") -> None:
        self.api.delete(self.path(kinds.INFERENCE_SERVICE, name))

    def service(self, name: str = "s") -> Object:
        got: Object = self.api.get(self.path(kinds.INFERENCE_SERVICE, name))
        return got

    def condition(self, kind: str, name: str = "s") -> Object:
        conditions = self.service(name).get("status", {}).get("conditions") or []
        return next((c for c in conditions if c["type"] == kind), {"status": "", "reason": "", "message": ""})

    def is_ready(self, name: str = "s") -> bool:
        """Ready and done, for the present generation."""
        service = self.service(name)
        found = {c["type"]: c["status"] for c in service.get("status", {}).get("conditions") or []}
        current = service["status"].get("observedGeneration") == service["metadata"]["generation"]
        return current and (found.get("Ready"), found.get("Reconciling")) == ("True", "False")

    def serve(self, name: str = "s", *, replicas: int = 1, **spec: Any) -> Object:
        """Create a service and wait until it serves."""
        self.create_service(name, replicas=replicas, **spec)
        self.until(f"{name} serves", lambda: self.is_ready(name))
        return self.service(name)

    def objects(self, kind: Kind, selector: str = kinds.OURS) -> list[Object]:
        answer = self.api.get(f"{self.path(kind)}?labelSelector={selector}")
        items: list[Object] = answer["items"]
        return items

    def pods(self, component: str = names.COMPONENT_ENGINE) -> list[Object]:
        return self.objects(kinds.POD, f"{names.LABEL_COMPONENT}={component}")

    def pod_uids(self) -> set[str]:
        return {pod["metadata"]["uid"] for pod in self.pods()}

    def engine(self, pod: Object) -> PlayedEngine:
        return self.cluster.world.engines[pod["metadata"]["uid"]]

    def routers(self) -> list[PlayedRouter]:
        uids = [pod["metadata"]["uid"] for pod in self.pods(names.COMPONENT_ROUTER)]
        return [self.cluster.world.routers[uid] for uid in uids if uid in self.cluster.world.routers]

    def routed(self) -> list[set[str]]:
        """Worker ids that each router really routes to."""
        now = time.time()
        return [
            {w.id for w in self.cluster.world.router_state(router, now).workers if w.status == "ready"}
            for router in self.routers()
        ]

    def until(self, what: str, probe: Callable[[], bool], deadline_s: float = READY_S) -> None:
        """Poll until the probe holds. Raises: AssertionError with the services' conditions and the operator's log."""
        self.cluster.operator.wait_for(what, probe, lambda: time.sleep(POLL_S), deadline_s)

    def operator_writes(self, mark: int) -> list[Write]:
        """Requests of the operator to write in this namespace since a mark of the audit log."""
        written = self.cluster.bed.audit.since(mark)
        return [w for w in written if w.user == OPERATOR_USER and w.namespace == self.namespace]
