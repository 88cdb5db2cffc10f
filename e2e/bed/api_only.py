"""The API-level bed: real etcd, API server, controllers and scheduler on loopback, no kubelet.

Needs no root and no container. Pods are bound to fake nodes by the real scheduler and never run: tests play them. The
bed dies with its process; a directory left by a killed one is removed by the next start (``sweep_api_beds``).
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from e2e.bed import build
from e2e.bed.audit import Audit
from e2e.bed.cluster import Cap
from e2e.bed.control_plane import ControlPlane, Site
from e2e.bed.errors import BedError
from e2e.bed.fake_nodes import fake_node, is_schedulable
from e2e.bed.process import Spawner, wait_for

PREFIX = "sluice-api-"
PORTS = range(20000, 28000)
"""Below Linux's ephemeral ports (32768), so no outgoing connection takes one; apart from Sluice's own (9900-30001)."""
NODE_GRACE_S = 30 * 24 * 3600
"""Fake nodes send no heartbeats: the node controller must never call them NotReady."""
FAMILIES = ("etcd", "k8s")


def _state_parent() -> Path:
    """tmpfs where there is one: etcd is then not slowed by other disk users."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def free_ports(count: int) -> list[int]:
    """Loopback TCP ports that nobody listens on now."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise BedError(f"no {count} free TCP ports in {PORTS.start}-{PORTS.stop} on 127.0.0.1")


def _new_state() -> tuple[Path, int]:
    """A directory and its lock, held for the life of this process: it tells a live bed's directory from a left one.

    It gets its final name when it is locked, so no sweep of another process can take it for a left one.
    """
    fresh = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=_state_parent()))
    lock = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return fresh.rename(fresh.with_name(fresh.name.removeprefix("."))), lock


def sweep_api_beds() -> list[Path]:
    """Remove the directories of this user's API-level beds whose process is gone; what was removed."""
    removed = []
    for directory in _state_parent().glob(f"{PREFIX}*"):
        if directory.stat().st_uid != os.getuid():
            continue
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)
        shutil.rmtree(directory, ignore_errors=True)
        removed.append(directory)
    return removed


class ApiOnly:
    """A running API-level bed (``with ApiOnly() as bed``). See ``cluster.Cluster`` for the shared members."""

    caps = frozenset({Cap.GPU_PATCH, Cap.DAEMONS, Cap.FAKE_NODES})
    version = build.KUBERNETES_VERSION

    def __init__(self, *, audit: bool = False, extra_apiserver: Sequence[str] = ()) -> None:
        """Start and wait until ready (4-6 s). ``audit``: log all writes, see ``bed.audit``."""
        build.build(FAMILIES)
        sweep_api_beds()
        self.state, self._lock = _new_state()
        self._nodes: list[str] = []
        self._spawner = Spawner()
        port, etcd_port, etcd_peer_port, kcm_port, scheduler_port = free_ports(5)
        site = Site(
            state=self.state,
            bind="127.0.0.1",
            port=port,
            etcd_port=etcd_port,
            etcd_peer_port=etcd_peer_port,
            kcm_port=kcm_port,
            scheduler_port=scheduler_port,
            node_grace_s=NODE_GRACE_S,
            audit=audit,
            extra_apiserver=tuple(extra_apiserver),
        )
        self.plane = ControlPlane(site, self._spawner)
        self.api = self.plane.api
        self.kubeconfig = self.plane.admin
        try:
            self.plane.start()
            self.plane.wait_ready()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def nodes(self) -> tuple[str, ...]:
        """The fake nodes made so far."""
        return tuple(self._nodes)

    @property
    def audit(self) -> Audit:
        """The log of writes; BedError unless the bed was started with ``audit=True``."""
        if self.plane.audit is None:
            raise BedError("this bed keeps no audit log: start it with ApiOnly(audit=True)")
        return self.plane.audit

    def fake_nodes(self, count: int, *, gpus: int = 0, labels: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """Add ``count`` schedulable fake nodes and return their names (``fake-<i>``, numbered on)."""
        first = len(self._nodes)
        objects = [fake_node(index, gpus=gpus, labels=labels) for index in range(first, first + count)]
        names = [str(node["metadata"]["name"]) for node in objects]
        for node in objects:
            self.api.create("/api/v1/nodes", node)
        self._nodes += names
        for name in names:
            wait_for(f"{name} schedulable", lambda name=name: is_schedulable(self.api, name), 60.0)  # type: ignore[misc]  # mypy cannot infer a lambda's default
        return tuple(names)

    def user_kubeconfig(self, user: str, groups: Sequence[str] = ()) -> Path:
        """A kubeconfig for another user, say to tell the operator's writes apart in the audit log."""
        return self.plane.pki.kubeconfig(f"user-{user.replace(':', '-')}", self.plane.url, user, groups)

    def set_gpus(self, node: str, count: int, product: str = "NVIDIA-Fake") -> None:
        """Give a fake node this many nvidia.com/gpu, and the label that names the product."""
        self.api.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": {"nvidia.com/gpu.product": product}}})
        room = {"nvidia.com/gpu": str(count)}
        self.api.patch(f"/api/v1/nodes/{node}/status", {"status": {"capacity": room, "allocatable": room}})

    def stop(self, daemon: str) -> None:
        """SIGKILL one of etcd, apiserver, kcm, scheduler; it stays away until ``start``."""
        self.plane.stop_daemon(daemon)

    def start(self, daemon: str) -> None:
        """Start a stopped daemon again, same state, same port."""
        self.plane.start_daemon(daemon)

    def restart(self, daemon: str, node: str | None = None) -> None:
        """SIGKILL and start; returns when the API server is ready again."""
        if node is not None:
            raise BedError("the API-level bed has no nodes with daemons: give no node")
        self.stop(daemon)
        self.start(daemon)

    @contextmanager
    def in_network(self) -> Iterator[None]:
        """The bed is on this machine's loopback: nothing to enter."""
        yield

    def dump(self, to: Path) -> None:
        """Copy the daemons' logs."""
        shutil.copytree(self.plane.logs, to, dirs_exist_ok=True)

    def close(self) -> None:
        """Kill the daemons, remove all state. Idempotent."""
        self.plane.close()
        self._spawner.close()
        shutil.rmtree(self.state, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
