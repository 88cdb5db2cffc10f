"""What the bed needs from the machine (packages, kernel features, room); ``doctor`` tries each, names the cure."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from e2e.bed import build, cgroups
from e2e.bed.errors import BedError

# Program -> the Debian package that has it.
PACKAGES = MappingProxyType(
    {
        "runc": "runc",
        "nft": "nftables",
        "ip": "iproute2",
        "iptables": "iptables",
        "conntrack": "conntrack",
        "ipset": "ipset",
        "unshare": "util-linux",
        "nsenter": "util-linux",
        "setpriv": "util-linux",
        "mount": "mount",
        "busybox": "busybox-static",
    }
)
CNI_DIRECTORIES = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
CNI_PLUGINS = ("ptp", "host-local", "portmap", "loopback")
CNI_PACKAGE = "containernetworking-plugins"
DISK_GB = 10
MEMORY_GB = 4
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TIMEOUT_S = 30.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """One need: whether it is met, what was seen, and how to meet it."""

    what: str
    is_met: bool
    seen: str
    cure: str = ""


def missing_packages() -> list[str]:
    """Debian packages whose programs are not here."""
    missing = {package for name, package in PACKAGES.items() if shutil.which(name, path=_SYSTEM_PATH) is None}
    if not all(any((directory / plugin).exists() for directory in CNI_DIRECTORIES) for plugin in CNI_PLUGINS):
        missing.add(CNI_PACKAGE)
    return sorted(missing)


def install_command(names: list[str]) -> list[str]:
    """The apt-get line for these packages."""
    return ["apt-get", "install", "--yes", "--no-install-recommends", "-qq", *names]


def ensure(say: Say = print) -> None:
    """Install what is missing, as root on Debian; else BedError with the command to run."""
    names = missing_packages()
    if not names:
        return
    command = install_command(names)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise BedError(
            f"Debian packages are missing: {' '.join(names)}. Run as root: apt-get update && {' '.join(command)} "
            "(on another distribution install runc, the CNI plugins, nftables and iproute2)"
        )
    say(f"Debian packages: installing {' '.join(names)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for step in (["apt-get", "update", "-qq"], command):
        result = subprocess.run(step, capture_output=True, text=True, env=environment)
        if result.returncode != 0:
            raise BedError(f"{' '.join(step)} failed:\n{result.stderr.strip()[-1500:]}")
    if names := missing_packages():
        raise BedError(f"apt-get installed the packages, but programs are still missing of: {' '.join(names)}")


def _try(what: str, command: list[str], cure: str, *, script: str = "") -> Finding:
    try:
        result = subprocess.run(command, input=script, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(what, False, str(error), cure)
    words = (result.stderr or result.stdout).strip().splitlines()
    return Finding(
        what, result.returncode == 0, "works" if result.returncode == 0 else words[-1] if words else "", cure
    )


_OVERLAY = """set -e
d=$(mktemp -d); mount -t tmpfs tmpfs "$d"; mkdir "$d/u" "$d/w" "$d/m"
mount -t overlay -o lowerdir=/etc,upperdir="$d/u",workdir="$d/w" overlay "$d/m"
umount "$d/m"; umount "$d"; rmdir "$d"
"""
_LINKS = "set -e\nip link add br0 type bridge\nip link add v0 type veth peer name v1\nip link set v0 master br0\n"
_RULES = """table ip bed {
  chain c {
    type nat hook output priority -100;
    ip daddr 10.96.0.1 dnat to 10.90.0.1
    fib daddr type local counter
  }
  chain d {
    numgen random mod 2 vmap { 0 : accept, 1 : drop }
  }
}
"""


def _kernel() -> Iterator[Finding]:
    """Features, each tried in throw-away namespaces."""
    inside = ["unshare", "--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
    cure = "run on the machine itself or in a privileged container, with a kernel that has it"
    yield _try("namespaces", [*inside, "true"], cure)
    yield _try("overlay on tmpfs", [*inside, "sh", "-s"], cure, script=_OVERLAY)
    yield _try("bridge and veth", [*inside, "sh", "-s"], cure, script=_LINKS)
    yield _try("nftables nat, fib, numgen", [*inside, "nft", "-f", "-"], cure, script=_RULES)


def _room() -> Iterator[Finding]:
    cache = build.cache_root()
    while not cache.exists():
        cache = cache.parent
    free_gb = shutil.disk_usage(cache).free / 1e9
    yield Finding("disk", free_gb >= DISK_GB, f"{free_gb:.0f} GB free at {cache}", f"free {DISK_GB} GB there")
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    memory_gb = int(lines["MemAvailable"].split()[0]) / 1e6
    yield Finding("memory", memory_gb >= MEMORY_GB, f"{memory_gb:.0f} GB available", f"free {MEMORY_GB} GB")


def _control_groups() -> Finding:
    try:
        found = cgroups.hierarchies()
    except BedError as error:
        return Finding("control groups", False, str(error), "mount them")
    mode = "v2" if cgroups.is_v2() else f"v1, {len(found)} hierarchies"
    return Finding("control groups", os.access(found[0], os.W_OK), mode, "run as root, with /sys/fs/cgroup writable")


def _programs() -> Iterator[Finding]:
    try:
        yield Finding("Go", True, build.find_go().version)
    except BedError as error:
        yield Finding("Go", False, str(error), "install Go 1.26")
        return
    missing = [name for name in build.FAMILIES if not build.is_built(name)]
    seen = f"not built: {', '.join(missing)}" if missing else f"built, in {build.cache_root()}"
    yield Finding("cluster programs", not missing, seen, "python -m e2e.bed build")


def findings() -> Iterator[Finding]:
    """Every need of a local bed, tried now."""
    yield Finding("Linux", sys.platform == "linux", sys.platform, "use a Linux machine, or CLUSTER=existing")
    if sys.platform != "linux":
        return
    yield Finding("root", os.geteuid() == 0, f"uid {os.geteuid()}", "run as root, or use CLUSTER=api")
    missing = missing_packages()
    cure = "python -m e2e.bed doctor --install"
    yield Finding("Debian packages", not missing, f"missing: {' '.join(missing)}" if missing else "all there", cure)
    yield from _room()
    yield _control_groups()
    yield from _kernel()
    yield from _programs()
