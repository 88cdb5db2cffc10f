"""A bed leaves nothing on the machine, whether it is ended or killed; and it never touches another bed."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.bed import owner, state
from e2e.bed.api import RefusedError
from e2e.bed.api_only import ApiOnly, sweep_api_beds
from e2e.bed.cgroups import Cgroups, hierarchies, is_v2
from e2e.bed.cluster import Cap, require
from e2e.bed.errors import BedError
from e2e.bed.existing import find_kubectl
from e2e.bed.images import REPOSITORY
from e2e.bed.local import LocalBed
from e2e.bed.node import PAUSE_IMAGE
from e2e.bed.process import kill_quietly, wait_for

pytestmark = pytest.mark.needs(Cap.DAEMONS)

SYSCTLS = ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops", "net/ipv4/ip_forward")
HOST_PATHS = ("/var/lib/kubelet", "/run/containerd", "/opt/containerd", "/var/log/pods", "/run/netns", "/etc/cni")


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _start_time(pid: int) -> str | None:
    """Identity of a process over time: pids are used again, start times (jiffies since boot) are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


@dataclass(frozen=True)
class Machine:
    """What a bed could leave behind. Mounts and control groups: those with the bed's name, as others may run."""

    links: str
    routes: str
    rules: str
    sysctls: tuple[str, ...]
    paths: tuple[bool, ...]
    mounts: tuple[str, ...]
    groups: tuple[str, ...]
    files: tuple[str, ...]


def look(name: str) -> Machine:
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    groups = [str(path) for root in hierarchies() for path in root.rglob(f"*{name}*")]
    files = [str(path) for path in state.ROOT.glob(f"{name}*")]
    return Machine(
        links=_output("ip", "-br", "link"),
        routes=_output("ip", "route", "show", "table", "all"),
        rules=_output("nft", "list", "ruleset"),
        sysctls=tuple(Path(f"/proc/sys/{key}").read_text() for key in SYSCTLS),
        paths=tuple(Path(path).exists() for path in HOST_PATHS),
        mounts=tuple(line for line in mounts if name in line),
        groups=tuple(groups),
        files=tuple(files),
    )


@pytest.fixture
def name() -> Iterator[str]:
    """The name of a bed of the test's own, gone afterwards whatever happened."""
    chosen = f"leak-{secrets.token_hex(3)}"
    yield chosen
    owner.down(chosen)


def _running_pods(running: owner.Running) -> dict[int, str | None]:
    """Start a pod on each node; then all processes of the bed with their start times."""
    kubectl = [find_kubectl(), "--kubeconfig", str(running.kubeconfig)]
    for node in running.nodes:
        overrides = f'{{"spec":{{"nodeName":"{node}","terminationGracePeriodSeconds":600}}}}'
        _output(*kubectl, "run", f"pod-{node}", "--image", PAUSE_IMAGE, f"--overrides={overrides}")
    _output(*kubectl, "wait", "pod", "--all", "--for=condition=Ready", "--timeout=60s")
    return {pid: _start_time(pid) for pid in Cgroups(running.name).pids()}


def _survivors(processes: dict[int, str | None]) -> list[int]:
    return [pid for pid, started in processes.items() if started is not None and _start_time(pid) == started]


def test_ended_bed_leaves_nothing(name: str) -> None:
    before = look(name)
    processes = _running_pods(owner.up(name, 2))
    assert len(processes) > 20
    assert look(name).links == before.links
    assert owner.down(name)
    wait_for("all processes of the bed reaped", lambda: not _survivors(processes), 10.0)
    assert look(name) == before
    assert not owner.down(name)


def test_killed_owner_takes_its_processes_along_and_sweep_removes_the_rest(name: str) -> None:
    before = look(name)
    processes = _running_pods(owner.up(name, 2))
    held = state.owner_of(name)
    assert held is not None
    kill_quietly(held.pid, signal.SIGKILL)
    wait_for("all processes of the bed gone", lambda: not _survivors(processes), 10.0)
    assert look(name).mounts  # only the kernel's work is done so far
    state.sweep(name)
    assert look(name) == before


def test_bed_comes_up_over_what_a_killed_one_left(name: str) -> None:
    first = owner.up(name, 1)
    held = state.owner_of(name)
    assert held is not None
    kill_quietly(held.pid, signal.SIGKILL)
    wait_for("the lock is free", lambda: state.owner_of(name) is None, 10.0)
    second = owner.up(name, 1)
    assert second.network_pid != first.network_pid
    assert _running_pods(second)


def test_refused_second_bed_has_touched_nothing(local_bed: LocalBed) -> None:
    with pytest.raises(state.BusyError, match="is in use by process"):
        LocalBed(name=local_bed.name)
    with pytest.raises(state.BusyError, match="SLUICE_BED_NAME"):
        owner.down(local_bed.name)
    assert all(local_bed.is_node_ready(node) for node in local_bed.nodes)


def test_v2_control_groups_hold_and_lose_processes(name: str) -> None:
    """On hybrid machines the unified tree stands for a v2 machine (it has no controllers there)."""
    unified = next((root for root in hierarchies() if is_v2(root)), None)
    if unified is None:
        pytest.fail("no cgroup2 file system is mounted: mount it at /sys/fs/cgroup/unified")
    groups = Cgroups(name, unified)
    (join,) = groups.create("cp")
    groups.create("sys-n1")
    with subprocess.Popen(["sh", "-c", 'echo $$ > "$1"; exec sleep 60', "sh", str(join)]) as child:
        wait_for("the child joined", lambda: groups.pids() == {child.pid}, 10.0)
        groups.remove()
        assert child.wait(10) == -signal.SIGKILL
    assert [str(path) for path in unified.rglob(f"*{name}*")] == []


def test_api_level_bed_leaves_nothing_and_a_sweep_spares_the_living() -> None:
    with ApiOnly() as bed:
        with pytest.raises(BedError, match="CLUSTER=local"):
            require(bed, [Cap.REAL_PODS])
        directory = bed.state
        daemons = [daemon.process.pid for daemon in bed.plane.daemons.values() if daemon.process]
        assert directory not in sweep_api_beds()
        bed.fake_nodes(2)
        with pytest.raises(RefusedError, match="already exists"):
            bed.api.create("/api/v1/nodes", {"metadata": {"name": "fake-0"}})
    assert not directory.exists()
    assert [pid for pid in daemons if Path(f"/proc/{pid}").exists()] == []


def test_killed_api_level_bed_takes_its_daemons_along_and_the_next_one_removes_the_rest() -> None:
    script = (
        "from e2e.bed.api_only import ApiOnly\n"
        "bed = ApiOnly()\n"
        "print(bed.state, *(daemon.process.pid for daemon in bed.plane.daemons.values()), flush=True)\n"
        "input()\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        directory, *pids = child.stdout.readline().split()
        processes = {int(pid): _start_time(int(pid)) for pid in pids}
        assert len(_survivors(processes)) == 4
        child.kill()
    wait_for("its daemons ended", lambda: not _survivors(processes), 10.0)
    assert Path(directory).exists()
    sweep_api_beds()  # the first thing that the next bed does
    assert not Path(directory).exists()
