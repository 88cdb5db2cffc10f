"""One node: a set of namespaces with containerd, kubelet and kube-proxy, and the files that configure them.

Everything a node writes is on the bed's tmpfs: /var/lib, /var/log and /etc are overlays, /run and /mnt are its own,
and /var/lib/kubelet is a directory of the node (the device-plugin path is fixed, whatever ``--root-dir`` says).
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from e2e.bed import build
from e2e.bed.cgroups import Cgroups
from e2e.bed.errors import BedError
from e2e.bed.namespaces import Machine
from e2e.bed.pki import NODES, Pki
from e2e.bed.process import Daemon, Spawner, wait_for

HUB_IP = "10.90.0.1"
BRIDGE = "br0"
POD_CIDR = "10.244.0.0/16"
CLUSTER_DOMAIN = "cluster.local"
PAUSE_IMAGE = "bed.local/pause:1"
REGISTRY_PORT = 5000
CONTAINERD_TIMEOUT_S = 60.0
_SOCKET = "/run/containerd/containerd.sock"
# The kubelet writes these; a file bound over each keeps the machine's own value.
_SHIELDED_SYSCTLS = {"vm/overcommit_memory": "1", "kernel/panic": "10", "kernel/panic_on_oops": "1"}
_OVERLAID = ("/var/lib", "/var/log", "/etc")


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """What follows from a node's number (1...)."""

    index: int

    @property
    def name(self) -> str:
        """Node name, also the host's end of its link in the hub."""
        return f"n{self.index}"

    @property
    def ip(self) -> str:
        """Address on the bridge."""
        return f"10.90.0.{self.index + 1}"

    @property
    def pods(self) -> str:
        """The node's pod range."""
        return f"10.244.{self.index}.0/24"


def hub_setup() -> list[str]:
    """What the hub does inside its namespaces before anything else runs there."""
    return [
        "mount -t proc proc /proc",
        "hostname hub",
        "ip link set lo up",
        f"ip link add {BRIDGE} type bridge",
        f"ip addr add {HUB_IP}/24 dev {BRIDGE}",
        f"ip link set {BRIDGE} up",
        "echo 1 > /proc/sys/net/ipv4/ip_forward",
        # Only so that the kernel routes ClusterIPs at all; the hub's kube-proxy rewrites them before they leave.
        f"ip route add 10.96.0.0/16 dev {BRIDGE}",
    ]


def kube_proxy_config(kubeconfig: Path, hostname: str, address: str) -> dict[str, object]:
    """KubeProxyConfiguration; the conntrack values mean "write no sysctl"."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "clusterCIDR": POD_CIDR,
        "hostnameOverride": hostname,
        "bindAddress": address,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "nftables": {"minSyncPeriod": "100ms", "syncPeriod": "30s"},
    }


class Node:
    """A node that can be powered on and off, cut from the network, and whose daemons can be restarted."""

    def __init__(self, index: int, state: Path, pki: Pki, server: str, cgroups: Cgroups) -> None:
        """``server``: the API server's URL as nodes reach it. Writes files; starts nothing."""
        self.address = NodeAddress(index)
        self.name = self.address.name
        self._state = state / self.name
        self._logs = state / "logs"
        self._pki = pki
        self._cgroups = cgroups
        self._daemons_group, self._pods_group = f"sys-{self.name}", self.name
        self._hub: Machine | None = None
        self._machine: Machine | None = None
        self.daemons: dict[str, Daemon] = {}
        self._prepare_directories()
        self._kubeconfig = pki.kubeconfig(self.name, server, f"system:node:{self.name}", (NODES,))
        self._proxy_kubeconfig = pki.kubeconfig(f"proxy-{self.name}", server, "system:kube-proxy")
        self._write_configuration()

    # -- files ---------------------------------------------------------------------------------------------------

    def _prepare_directories(self) -> None:
        for part in ("kubelet", "containerd", "config/cni", "config/registry/_default"):
            (self._state / part).mkdir(parents=True)
        for path in _OVERLAID:
            (self._overlay(path) / "upper").mkdir(parents=True)
            (self._overlay(path) / "work").mkdir()
        for name, value in _SHIELDED_SYSCTLS.items():
            shield = self._state / "sysctl" / name
            shield.parent.mkdir(parents=True, exist_ok=True)
            shield.write_text(f"{value}\n")

    def _overlay(self, path: str) -> Path:
        return self._state / "overlay" / path.strip("/").replace("/", "-")

    def _write_configuration(self) -> None:
        config = self._state / "config"
        (config / "kubelet.yaml").write_text(json.dumps(self._kubelet_config()))
        (config / "containerd.toml").write_text(self._containerd_config())
        (config / "kube-proxy.yaml").write_text(
            json.dumps(kube_proxy_config(self._proxy_kubeconfig, self.name, self.address.ip))
        )
        registry = f"http://{HUB_IP}:{REGISTRY_PORT}"
        # ``server`` too: without it a miss is looked for at the name's real host, which takes a DNS time-out here.
        (config / "registry/_default/hosts.toml").write_text(
            f'server = "{registry}"\n[host."{registry}"]\n  capabilities = ["pull", "resolve"]\n'
        )
        (config / "cni/10-bed.conflist").write_text(json.dumps(self._cni_config()))

    def _cni_config(self) -> dict[str, object]:
        # ptp, not bridge: with a bridge, answers between pods of one node bypass the node's address translation
        # unless the kernel module br_netfilter is loaded, and a Service then seems not to answer.
        pods: dict[str, object] = {
            "type": "ptp",
            "ipMasq": False,
            "ipam": {
                "type": "host-local",
                "dataDir": "/run/cni-ipam",
                "ranges": [[{"subnet": self.address.pods}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        ports = {"type": "portmap", "capabilities": {"portMappings": True}}
        return {"cniVersion": "1.0.0", "name": "bed", "plugins": [pods, ports]}

    def _containerd_config(self) -> str:
        config = self._state / "config"
        return f"""version = 3
root = "{self._state / "containerd"}"
state = "/run/containerd"
# `opt` makes /opt/containerd on the machine; the others look for file systems that are not used here.
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.nri.v1.nri",
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.erofs"]
[grpc]
  address = "{_SOCKET}"
[ttrpc]
  address = "{_SOCKET}.ttrpc"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  discard_unpacked_layers = true
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{PAUSE_IMAGE}"
  [plugins."io.containerd.cri.v1.images".registry]
    config_path = "{config / "registry"}"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  cdi_spec_dirs = ["/etc/cdi", "/run/cdi"]
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["/usr/lib/cni", "/opt/cni/bin"]
    conf_dir = "{config / "cni"}"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      SystemdCgroup = false
"""

    def _kubelet_config(self) -> dict[str, object]:
        serving = self._pki.server(f"kubelet-{self.name}", f"system:node:{self.name}", [self.address.ip, self.name])
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.address.ip,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self._pki.ca.certificate)},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(serving.certificate),
            "tlsPrivateKeyFile": str(serving.key),
            "containerRuntimeEndpoint": f"unix://{_SOCKET}",
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": self._cgroups.path(self._pods_group),
            "failSwapOn": False,
            "clusterDNS": [HUB_IP],
            "clusterDomain": CLUSTER_DOMAIN,
            "resolvConf": "",
            # The machine's disk is not the bed's concern; memory is.
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "0%",
                "nodefs.inodesFree": "0%",
                "imagefs.available": "0%",
                "imagefs.inodesFree": "0%",
            },
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "makeIPTablesUtilChains": False,
            "maxPods": 250,
            "nodeStatusUpdateFrequency": "3s",
            "nodeLeaseDurationSeconds": 20,
            "serializeImagePulls": False,
            "registryPullQPS": 0,
            "eventRecordQPS": 0,
            "syncFrequency": "10s",
            "volumeStatsAggPeriod": "0s",
        }

    # -- power ---------------------------------------------------------------------------------------------------

    @property
    def machine(self) -> Machine:
        """Its namespaces; BedError when it is powered off."""
        if self._machine is None:
            raise BedError(f"node {self.name} is powered off")
        return self._machine

    def _setup(self) -> list[str]:
        kubelet = self._state / "kubelet"
        lines = ["mount --make-rshared /", "mount -t proc proc /proc"]
        for name in _SHIELDED_SYSCTLS:
            lines.append(f"mount --bind {self._state / 'sysctl' / name} /proc/sys/{name}")
        for path in _OVERLAID:
            overlay = self._overlay(path)
            options = f"lowerdir={path},upperdir={overlay / 'upper'},workdir={overlay / 'work'}"
            lines.append(f"mount -t overlay -o {options} overlay {path}")
        lines += [
            "mkdir -p /var/lib/kubelet",
            f"mount --bind {kubelet} /var/lib/kubelet",
            "mount -t tmpfs tmpfs /run",
            "mount -t tmpfs tmpfs /mnt",
            f"hostname {self.name}",
            "ip link set lo up",
            "echo 1 > /proc/sys/net/ipv4/ip_forward",
        ]
        return lines

    def boot(self, hub: Machine, spawner: Spawner) -> None:
        """Namespaces, link to the hub, containerd; returns when its socket accepts (else the kubelet would exit)."""
        self._hub = hub
        join = self._cgroups.create(self._daemons_group)
        self._cgroups.create(self._pods_group)
        machine = Machine(self.name, self._setup(), self._logs / f"{self.name}.log", join)
        machine.start(spawner)
        self._machine = machine
        hub.configure_network(
            f"link add {self.name} type veth peer name eth0 netns {machine.pid}",
            f"link set {self.name} master {BRIDGE} up",
            f"route replace {self.address.pods} via {self.address.ip}",
        )
        machine.configure_network(
            f"addr add {self.address.ip}/24 dev eth0", "link set eth0 up", f"route add default via {HUB_IP}"
        )
        self.daemons = {
            name: self._daemon(name, command, join)
            for name, command in (
                ("containerd", self._containerd_command()),
                ("kubelet", self._kubelet_command()),
                ("kube-proxy", self._proxy_command()),
            )
        }
        self._start_containerd(spawner)

    def join_cluster(self, spawner: Spawner) -> None:
        """Start kubelet and kube-proxy; the API server should answer by now."""
        for name in ("kubelet", "kube-proxy"):
            self.daemons[name].start(spawner)

    def power_off(self) -> None:
        """Everything on the node ends at once, as if unplugged. Its disk stays."""
        self.machine.stop()
        for daemon in self.daemons.values():
            daemon.kill()
        self._machine = None
        # A kubelet would spend 3 s on each old container group before it is Ready.
        self._cgroups.remove(self._pods_group)
        self._cgroups.remove(self._daemons_group)

    def set_link(self, up: bool) -> None:
        """Plug the node's only network cable in or out."""
        if self._hub is None:
            raise BedError(f"node {self.name} was never powered on")
        self._hub.configure_network(f"link set {self.name} {'up' if up else 'down'}")

    def restart(self, name: str, spawner: Spawner) -> None:
        """SIGKILL and start one daemon; pods stay untouched."""
        self.daemon(name).kill()
        if name == "containerd":
            self._start_containerd(spawner)
        else:
            self.daemon(name).start(spawner)

    def daemon(self, name: str) -> Daemon:
        """The daemon of this name; BedError lists the names."""
        if name not in self.daemons:
            raise BedError(
                f"node {self.name} has no daemon {name!r}; there are {', '.join(self.daemons) or 'none yet'}"
            )
        return self.daemons[name]

    def all_daemons(self) -> list[Daemon]:
        """Keeper and daemons of the present boot."""
        return [*([self._machine.keeper] if self._machine else []), *self.daemons.values()]

    # -- daemons -------------------------------------------------------------------------------------------------

    def _daemon(self, name: str, command: tuple[str, ...], join: tuple[Path, ...]) -> Daemon:
        programs = build.program("containerd").parent
        environment = {**os.environ, "PATH": f"{programs}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        log = self._logs / f"{name}-{self.name}.log"
        return Daemon(f"{name} of {self.name}", (*self.machine.prefix, *command), log, environment, join)

    def _start_containerd(self, spawner: Spawner) -> None:
        daemon = self.daemons["containerd"]
        daemon.start(spawner)
        wait_for(f"containerd of {self.name}", self._containerd_accepts, CONTAINERD_TIMEOUT_S, [daemon])

    def _containerd_accepts(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(f"/proc/{self.machine.pid}/root{_SOCKET}")
            except OSError:
                return False
        return True

    def _containerd_command(self) -> tuple[str, ...]:
        return (str(build.program("containerd")), "--config", str(self._state / "config/containerd.toml"))

    def _kubelet_command(self) -> tuple[str, ...]:
        return (
            str(build.program("kubelet")),
            f"--config={self._state / 'config/kubelet.yaml'}",
            f"--kubeconfig={self._kubeconfig}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address.ip}",
        )

    def _proxy_command(self) -> tuple[str, ...]:
        return (str(build.program("kube-proxy")), f"--config={self._state / 'config/kube-proxy.yaml'}")
