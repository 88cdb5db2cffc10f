"""etcd, kube-apiserver, kube-controller-manager and kube-scheduler of one bed.

Where they run (the hub's namespaces, or plainly on loopback) is the ``Site``; what they are told is here, once.
Flags that deviate from a default say why. All state is below ``Site.state`` and is thrown away with the bed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e.bed import build
from e2e.bed.api import Api
from e2e.bed.audit import Audit
from e2e.bed.errors import BedError
from e2e.bed.pki import ADMINS, Pki
from e2e.bed.process import Daemon, Spawner, wait_for

SERVICE_CIDR = "10.96.0.0/16"
SERVICE_IP = "10.96.0.1"
READY_TIMEOUT_S = 90.0
"""2-4 s on a quiet machine, 10 s at load 27; the limit only ends a hopeless wait."""
SERVERS = ("etcd", "apiserver")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a control plane runs.

    ``advertise`` is the address that the ``kubernetes`` Service points to; None when no pod can reach it anyway.
    ``prefix`` goes before each program (nsenter), ``join`` are the ``cgroup.procs`` files for each process.
    ``node_grace_s``: how long a node may be silent before the node controller calls it NotReady.
    """

    state: Path
    bind: str
    port: int
    etcd_port: int
    etcd_peer_port: int
    kcm_port: int
    scheduler_port: int
    node_grace_s: int
    advertise: str | None = None
    prefix: tuple[str, ...] = ()
    join: tuple[Path, ...] = ()
    audit: bool = False
    extra_apiserver: tuple[str, ...] = ()


class ControlPlane:
    """The four daemons; they can be stopped, started and restarted by name."""

    def __init__(self, site: Site, spawner: Spawner) -> None:
        self.site = site
        self._spawner = spawner
        self.logs = site.state / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.pki = Pki(site.state / "pki")
        self.url = f"https://127.0.0.1:{site.port}"
        self.admin = self.pki.kubeconfig("admin", self.url, "admin", (ADMINS,))
        self.audit = Audit(site.state / "audit") if site.audit else None
        self.api = Api(self.url, self.pki.ca.certificate, self.pki.client("bed", "sluice-bed", (ADMINS,)))
        self.daemons = {
            name: Daemon(name, (*site.prefix, *command), self.logs / f"{name}.log", os.environ, site.join)
            for name, command in (
                ("etcd", self._etcd()),
                ("apiserver", self._apiserver()),
                ("kcm", self._controller_manager()),
                ("scheduler", self._scheduler()),
            )
        }

    def start(self) -> None:
        """Start etcd and the API server; ``wait_ready`` does the rest."""
        for name in SERVERS:
            self.daemons[name].start(self._spawner)

    def wait_ready(self) -> None:
        """Until ``/readyz`` is ok, the other two run, and the controllers have made the default ServiceAccount.

        The controllers start after ``/readyz``: before it, the RBAC roles that they need may be missing, and they exit.
        """
        servers = [self.daemons[name] for name in SERVERS]
        wait_for("kube-apiserver ready", self.api.is_ready, READY_TIMEOUT_S, servers)
        for daemon in self.daemons.values():
            daemon.start(self._spawner)
        wait_for("default ServiceAccount", self._has_default_account, READY_TIMEOUT_S, self.daemons.values())

    def _has_default_account(self) -> bool:
        status, _ = self.api.request("GET", "/api/v1/namespaces/default/serviceaccounts/default")
        return status == 200

    def daemon(self, name: str) -> Daemon:
        """The daemon of this name; BedError lists the names."""
        if name not in self.daemons:
            raise BedError(f"no control plane daemon {name!r}; there are {', '.join(self.daemons)}")
        return self.daemons[name]

    def stop_daemon(self, name: str) -> None:
        """SIGKILL: clients see refused connections until ``start_daemon``."""
        self.daemon(name).kill()

    def start_daemon(self, name: str) -> None:
        """Start a stopped daemon; for the API server and etcd, wait until the API server is ready."""
        self.daemon(name).start(self._spawner)
        if name in SERVERS and all(self.daemons[part].process for part in SERVERS):
            wait_for("kube-apiserver ready again", self.api.is_ready, READY_TIMEOUT_S, self.daemons.values())

    def close(self) -> None:
        """Kill all, clients before servers so that no log fills with complaints."""
        for daemon in reversed(self.daemons.values()):
            daemon.kill()

    def _etcd(self) -> Sequence[str]:
        client = f"http://127.0.0.1:{self.site.etcd_port}"
        peer = f"http://127.0.0.1:{self.site.etcd_peer_port}"
        return (
            str(build.program("etcd")),
            f"--data-dir={self.site.state / 'etcd'}",
            "--unsafe-no-fsync",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--quota-backend-bytes=4294967296",
            # kube-apiserver's watch cache asks for progress; without it consistent reads wait.
            "--watch-progress-notify-interval=5s",
            "--log-level=warn",
        )

    def _apiserver(self) -> Sequence[str]:
        site, pki = self.site, self.pki
        names = ["127.0.0.1", SERVICE_IP, "localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
        names += ["kubernetes.default.svc.cluster.local", *([site.advertise] if site.advertise else [])]
        serving = pki.server("apiserver", "kube-apiserver", names)
        kubelet = pki.client("apiserver-kubelet", "kube-apiserver-kubelet-client", (ADMINS,))
        if site.advertise:
            reachable = (f"--advertise-address={site.advertise}", "--endpoint-reconciler-type=lease")
        else:
            # A loopback address is refused in the kubernetes Service's endpoints: have none.
            reachable = (f"--advertise-address={site.bind}", "--endpoint-reconciler-type=none")
        return (
            str(build.program("kube-apiserver")),
            f"--etcd-servers=http://127.0.0.1:{site.etcd_port}",
            f"--bind-address={site.bind}",
            f"--secure-port={site.port}",
            *reachable,
            f"--cert-dir={pki.directory}",
            f"--tls-cert-file={serving.certificate}",
            f"--tls-private-key-file={serving.key}",
            f"--client-ca-file={pki.ca.certificate}",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={pki.service_account_public}",
            f"--service-account-signing-key-file={pki.service_account_key}",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            f"--kubelet-client-certificate={kubelet.certificate}",
            f"--kubelet-client-key={kubelet.key}",
            f"--kubelet-certificate-authority={pki.ca.certificate}",
            "--kubelet-preferred-address-types=InternalIP",
            # Webhooks are called at endpoint addresses: there is a kube-proxy in the hub, but it need not be awaited.
            "--enable-aggregator-routing=true",
            "--profiling=false",
            *(self.audit.arguments() if self.audit else ()),
            *site.extra_apiserver,
        )

    def _clients(self, file: str, user: str) -> tuple[str, ...]:
        config = self.pki.kubeconfig(file, self.url, user)
        return (
            f"--kubeconfig={config}",
            f"--authentication-kubeconfig={config}",
            f"--authorization-kubeconfig={config}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            "--profiling=false",
            # The default of 20-50 requests per second makes ServiceAccounts and bindings come seconds late.
            "--kube-api-qps=1000",
            "--kube-api-burst=2000",
        )

    def _controller_manager(self) -> Sequence[str]:
        site, pki = self.site, self.pki
        return (
            str(build.program("kube-controller-manager")),
            *self._clients("kcm", "system:kube-controller-manager"),
            f"--secure-port={site.kcm_port}",
            f"--cert-dir={pki.directory / 'kcm'}",
            "--use-service-account-credentials",
            f"--service-account-private-key-file={pki.service_account_key}",
            f"--root-ca-file={pki.ca.certificate}",
            f"--cluster-signing-cert-file={pki.ca.certificate}",
            f"--cluster-signing-key-file={pki.ca.key}",
            "--allocate-node-cidrs=false",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            "--node-monitor-period=2s",
            f"--node-monitor-grace-period={site.node_grace_s}s",
            "--concurrent-namespace-syncs=20",
        )

    def _scheduler(self) -> Sequence[str]:
        return (
            str(build.program("kube-scheduler")),
            *self._clients("scheduler", "system:kube-scheduler"),
            f"--secure-port={self.site.scheduler_port}",
            f"--cert-dir={self.pki.directory / 'scheduler'}",
        )
