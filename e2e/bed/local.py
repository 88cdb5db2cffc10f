"""LocalBed: a cluster with real nodes on this machine, each node a set of Linux namespaces. Needs root.

The *hub* is a machine too: it runs the control plane, DNS, a kube-proxy and the image registry's socket, and the
nodes hang on its bridge. Nothing of the machine's own network, mounts, sysctls or control groups is changed but for
one tmpfs and one group, which go in ``close`` (or in the sweep before the next start).
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from e2e.bed import build
from e2e.bed.api import JSON_PATCH, Api
from e2e.bed.api_only import free_ports
from e2e.bed.audit import Audit
from e2e.bed.cgroups import Cgroups
from e2e.bed.cluster import Cap
from e2e.bed.control_plane import ControlPlane, Site
from e2e.bed.errors import BedError
from e2e.bed.forward import Forwarder
from e2e.bed.namespaces import Machine
from e2e.bed.node import (
    CLUSTER_DOMAIN,
    HUB_IP,
    PAUSE_IMAGE,
    REGISTRY_PORT,
    Node,
    NodeAddress,
    hub_setup,
    kube_proxy_config,
)
from e2e.bed.oci import File, ImageStore
from e2e.bed.process import Daemon, Spawner, wait_for
from e2e.bed.registry import Registry
from e2e.bed.state import Hold

FAMILIES = ("etcd", "k8s", "init", "containerd", "dns")
NODE_GRACE_S = 20
READY_TIMEOUT_S = 90.0
"""4 s quiet, 10 s at load 27; the limit only ends a hopeless wait."""
HIDDEN = (Path("/run"), Path("/mnt"))
"""A node has these for itself, so programs there would be missing inside."""


class LocalBed:
    """A running local cluster (``with LocalBed() as bed``). See ``cluster.Cluster`` for the shared members."""

    caps = frozenset({Cap.REAL_PODS, Cap.PARTITION, Cap.POWER, Cap.GPU_PATCH, Cap.REGISTRY, Cap.DAEMONS})
    version = build.KUBERNETES_VERSION

    def __init__(
        self,
        *,
        name: str = "default",
        nodes: int = 2,
        audit: bool = False,
        background: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        """Start and wait until all nodes are Ready. Several beds can run at once under different names."""
        if not 1 <= nodes <= 200:
            raise BedError(f"{nodes} nodes: 1 to 200")
        build.build(FAMILIES, say)
        if any(build.cache_root().resolve().is_relative_to(path) for path in HIDDEN):
            raise BedError(
                f"the cache {build.cache_root()} is below /run or /mnt: set SLUICE_BED_CACHE to another place"
            )
        self.name = name
        self._hold = Hold(name, background=background)
        self._spawner = Spawner()
        self._forwarder: Forwarder | None = None
        self._registry: Registry | None = None
        self._nodes: dict[str, Node] = {}
        self._hub_daemons: dict[str, Daemon] = {}
        self._daemons: list[Daemon] = []
        started = time.monotonic()
        try:
            self._start(nodes, audit)
        except BaseException:
            self.close()
            raise
        self.startup_s = time.monotonic() - started
        """How long it took from nothing to Ready nodes, programs built."""

    def _start(self, count: int, audit: bool) -> None:
        self._hold.mount()
        self.state = self._hold.directory
        logs = self.state / "logs"
        logs.mkdir()
        self._cgroups = Cgroups(self.name)
        join = self._cgroups.create("cp")
        self.hub = Machine("hub", hub_setup(), logs / "hub.log", join)
        self._daemons.append(self.hub.keeper)
        self.hub.start(self._spawner)
        self._forwarder = Forwarder(self.hub)
        (port,) = free_ports(1)
        self.plane = ControlPlane(self._site(port, join, audit), self._spawner)
        # The same address works outside (forwarded) and inside the hub, so one kubeconfig serves both.
        self._forwarder.open("127.0.0.1", port, port)
        self._daemons += self.plane.daemons.values()
        self.plane.start()
        self.images = ImageStore(self._hold.images)
        self._put_pause_image()
        self._registry = Registry(self.images, self.hub.listen(HUB_IP, REGISTRY_PORT))
        self._server = f"https://{HUB_IP}:{port}"
        self._hub_daemons = self._make_hub_daemons(join)
        for index in range(1, count + 1):
            node = Node(index, self.state, self.plane.pki, self._server, self._cgroups)
            self._nodes[node.name] = node
        self._each_node(lambda node: node.boot(self.hub, self._spawner))
        self.plane.wait_ready()
        self._daemons += self._hub_daemons.values()
        for daemon in self._hub_daemons.values():
            daemon.start(self._spawner)
        for node in self._nodes.values():
            node.join_cluster(self._spawner)
        for node_name in self._nodes:
            self.wait_node_ready(node_name)
        (self.state / "bed.json").write_text(json.dumps(self._description()))

    def _site(self, port: int, join: tuple[Path, ...], audit: bool) -> Site:
        return Site(
            state=self.state,
            bind="0.0.0.0",
            advertise=HUB_IP,
            port=port,
            etcd_port=2379,
            etcd_peer_port=2380,
            kcm_port=10257,
            scheduler_port=10259,
            node_grace_s=NODE_GRACE_S,
            prefix=self.hub.prefix,
            join=join,
            audit=audit,
        )

    def _each_node(self, do: Callable[[Node], None]) -> None:
        with ThreadPoolExecutor(max_workers=len(self._nodes)) as pool:
            for done in [pool.submit(do, node) for node in self._nodes.values()]:
                done.result()

    def _put_pause_image(self) -> None:
        layer = self.images.layer({"bedinit": File(build.program("bedinit"), 0o755)})
        self.images.image(PAUSE_IMAGE, [layer], entrypoint=["/bedinit"])

    def _make_hub_daemons(self, join: tuple[Path, ...]) -> dict[str, Daemon]:
        pki, logs = self.plane.pki, self.plane.logs
        # DNS reads Services, EndpointSlices, Pods and Namespaces: as an administrator, to need no role of its own.
        corefile = self.state / "Corefile"
        corefile.write_text(
            f".:53 {{\n  bind {HUB_IP}\n  errors\n  ready 127.0.0.1:8181\n"
            f"  kubernetes {CLUSTER_DOMAIN} in-addr.arpa ip6.arpa {{\n"
            f"    kubeconfig {self.plane.admin}\n    pods verified\n    ttl 1\n  }}\n}}\n"
        )
        proxy = self.state / "kube-proxy.yaml"
        # kube-proxy waits 30 s for the Node object of its name before it writes a rule; the hub has none: it says n1.
        # It then takes n1's endpoints for the local ones, which matters only to internalTrafficPolicy: Local.
        kubeconfig = pki.kubeconfig("proxy-hub", self._server, "system:kube-proxy")
        proxy.write_text(json.dumps(kube_proxy_config(kubeconfig, NodeAddress(1).name, HUB_IP)))
        commands = {
            "dns": (str(build.program("beddns")), "-conf", str(corefile)),
            "kube-proxy": (str(build.program("kube-proxy")), f"--config={proxy}"),
        }
        return {
            name: Daemon(f"{name} of the hub", (*self.hub.prefix, *command), logs / f"{name}.log", os.environ, join)
            for name, command in commands.items()
        }

    def _description(self) -> dict[str, object]:
        return {
            "owner": os.getpid(),
            "kubeconfig": str(self.kubeconfig),
            "version": self.version,
            "nodes": list(self.nodes),
            "images": str(self.images.root),
            "network_pid": self.hub.pid,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- looking -------------------------------------------------------------------------------------------------

    @property
    def kubeconfig(self) -> Path:
        """Administrator; works outside and inside ``in_network``."""
        return self.plane.admin

    @property
    def api(self) -> Api:
        """A bare client for the bed's own checks."""
        return self.plane.api

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node names, n1 and on."""
        return tuple(self._nodes)

    @property
    def audit(self) -> Audit:
        """The log of writes; BedError unless the bed was started with ``audit=True``."""
        if self.plane.audit is None:
            raise BedError("this bed keeps no audit log: start it with LocalBed(audit=True)")
        return self.plane.audit

    @property
    def registry(self) -> Registry:
        """Counts pulls, fails or delays an image."""
        if self._registry is None:
            raise BedError("the bed is closed")
        return self._registry

    def add_namespace(self, name: str) -> None:
        """Create a namespace and wait until it takes pods (its default ServiceAccount is there)."""
        self.api.create("/api/v1/namespaces", {"metadata": {"name": name}})
        account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        wait_for(f"default ServiceAccount in {name}", lambda: self.api.request("GET", account)[0] == 200, 30.0)

    def wait_node_ready(self, name: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Until the node's Ready condition is True and it takes pods."""
        watched = [*self._hub_daemons.values(), *self._node(name).daemons.values()]
        wait_for(f"node {name} Ready", lambda: self.is_node_ready(name), timeout_s, watched)

    def is_node_ready(self, name: str) -> bool:
        """Whether the node is Ready and carries no taint. A missing Node is not."""
        status, node = self.api.request("GET", f"/api/v1/nodes/{name}")
        if status != 200 or node["spec"].get("taints"):
            return False
        conditions = {entry["type"]: entry["status"] for entry in node["status"].get("conditions", ())}
        return conditions.get("Ready") == "True"

    def _node(self, name: str) -> Node:
        if name not in self._nodes:
            raise BedError(f"no node {name!r}; there are {', '.join(self._nodes)}")
        return self._nodes[name]

    # -- network -------------------------------------------------------------------------------------------------

    @contextmanager
    def in_network(self) -> Iterator[None]:
        """The calling thread (and threads and processes it starts meanwhile) reaches pods and ClusterIPs."""
        with self.hub.in_network():
            yield

    def forward(self, host: str, port: int) -> int:
        """A port of this machine's loopback that leads to a pod or ClusterIP, until the bed closes."""
        if self._forwarder is None:
            raise BedError("the bed is closed")
        return self._forwarder.open(host, port)

    # -- faults --------------------------------------------------------------------------------------------------

    def partition(self, node: str) -> None:
        """Cut the node's network: its pods run on, unseen."""
        self._node(node).set_link(False)

    def heal(self, node: str) -> None:
        """Undo ``partition``; use ``wait_node_ready`` after it."""
        self._node(node).set_link(True)

    def power_off(self, node: str) -> None:
        """All processes of the node end at once."""
        self._node(node).power_off()

    def power_on(self, node: str) -> None:
        """Boot it again with the disk it had; use ``wait_node_ready`` after it."""
        self._node(node).boot(self.hub, self._spawner)
        self._node(node).join_cluster(self._spawner)

    def stop(self, daemon: str, node: str | None = None) -> None:
        """SIGKILL a daemon, of the control plane (etcd, apiserver, kcm, scheduler, dns) or of a node."""
        if node is not None:
            self._node(node).daemon(daemon).kill()
        elif daemon in self._hub_daemons:
            self._hub_daemons[daemon].kill()
        else:
            self.plane.stop_daemon(daemon)

    def start(self, daemon: str, node: str | None = None) -> None:
        """Start a stopped daemon; returns when API server or containerd accept again."""
        if node is not None:
            self._node(node).restart(daemon, self._spawner)
        elif daemon in self._hub_daemons:
            self._hub_daemons[daemon].start(self._spawner)
        else:
            self.plane.start_daemon(daemon)

    def restart(self, daemon: str, node: str | None = None) -> None:
        """``stop`` and ``start``."""
        self.stop(daemon, node)
        self.start(daemon, node)

    def set_gpus(self, node: str, count: int, product: str = "NVIDIA-Fake") -> None:
        """Let the node report this many nvidia.com/gpu (allocatable follows in 2-4 s); no device in containers."""
        self._node(node)
        self.api.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": {"nvidia.com/gpu.product": product}}})
        add = [{"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": str(count)}]
        self.api.patch(f"/api/v1/nodes/{node}/status", add, JSON_PATCH)
        wait_for(f"{count} GPUs allocatable on {node}", lambda: self._allocatable_gpus(node) == count, 60.0)

    def _allocatable_gpus(self, node: str) -> int:
        allocatable = self.api.get(f"/api/v1/nodes/{node}")["status"]["allocatable"]
        return int(allocatable.get("nvidia.com/gpu", -1))

    # -- end -----------------------------------------------------------------------------------------------------

    def dump(self, to: Path) -> None:
        """Copy the daemons' logs and the kubelets' container logs, and write all pods and events."""
        to.mkdir(parents=True, exist_ok=True)
        shutil.copytree(self.state / "logs", to / "daemons", dirs_exist_ok=True)
        for name in self._nodes:
            pods = self.state / name / "overlay/var-log/upper/pods"
            if pods.is_dir():
                shutil.copytree(pods, to / "pods" / name, dirs_exist_ok=True)
        for resource in ("pods", "events"):
            try:
                (to / f"{resource}.json").write_text(json.dumps(self.api.get(f"/api/v1/{resource}"), indent=1))
            except (OSError, BedError) as error:
                (to / f"{resource}.json").write_text(f"API server: {error}\n")

    def close(self) -> None:
        """End everything and remove every trace. Idempotent."""
        if self._registry is not None:
            self._registry.close()
            self._registry = None
        if self._forwarder is not None:
            self._forwarder.close()
            self._forwarder = None
        self._hold.close()
        for daemon in [*self._daemons, *(daemon for node in self._nodes.values() for daemon in node.all_daemons())]:
            daemon.kill()  # it is dead; this collects it
        self._spawner.close()
