"""The bed's control groups, on cgroup v1 (also hybrid) and v2.

One parent per bed, ``sluice-bed-<name>``, with a group for the control plane, one per node for its daemons and one
per node for the kubelet's pods. All processes of the bed are below it, so killing it empties the bed, whoever started
it.

- v1: every path must exist in every mounted hierarchy, and a cpuset must be given CPUs and memory nodes before a
  process can join; otherwise the kubelet ends with "has some missing paths".
- v2: controllers are handed down through ``cgroup.subtree_control``, and a group with children holds no process. In a
  container the root of the visible tree usually holds processes: they are moved to a leaf of their own first, and
  back at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from e2e.bed.errors import BedError
from e2e.bed.process import kill_quietly

MOUNT = Path("/sys/fs/cgroup")
PREFIX = "sluice-bed-"
LEAF = "sluice-bed.outside"
CONTROLLERS = ("cpuset", "cpu", "io", "memory", "pids", "hugetlb")
EMPTY_TIMEOUT_S = 30.0
POLL_S = 0.02


def is_v2(mount: Path = MOUNT) -> bool:
    """Whether the unified hierarchy is the only one."""
    return (mount / "cgroup.controllers").exists()


def hierarchies(mount: Path = MOUNT) -> list[Path]:
    """Every mounted hierarchy: one on v2, one per controller (and ``systemd``, ``unified``) on v1."""
    if is_v2(mount):
        return [mount]
    found = (
        sorted(path for path in mount.iterdir() if path.is_dir() and not path.is_symlink()) if mount.is_dir() else []
    )
    if not found:
        raise BedError(f"no control groups are mounted at {mount}: mount cgroup2 there, or use CLUSTER=api")
    return found


def left_names(mount: Path = MOUNT) -> list[str]:
    """Names of beds that have a group now."""
    found = {path.name.removeprefix(PREFIX) for root in hierarchies(mount) for path in root.glob(f"{PREFIX}*")}
    return sorted(found)


class Cgroups:
    """The groups of one bed."""

    def __init__(self, name: str, mount: Path = MOUNT) -> None:
        self._mount = mount
        self.parent = f"{PREFIX}{name}"

    def path(self, group: str) -> str:
        """A group as the kubelet wants it (``cgroupRoot``)."""
        return f"/{self.parent}/{group}"

    def create(self, group: str) -> tuple[Path, ...]:
        """Make a group in every hierarchy; the ``cgroup.procs`` files that a process writes its pid to, to join it."""
        if is_v2(self._mount):
            self._empty_root()
        joins = []
        for root in hierarchies(self._mount):
            current = root
            for part in (self.parent, group):
                if is_v2(self._mount):
                    self._hand_down(current)
                child = current / part
                child.mkdir(exist_ok=True)
                self._fill_cpuset(current, child)
                current = child
            joins.append(current / "cgroup.procs")
        return tuple(joins)

    def _fill_cpuset(self, parent: Path, child: Path) -> None:
        if is_v2(self._mount):
            return
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (child / name).exists() and not (child / name).read_text().strip():
                (child / name).write_text((parent / name).read_text().strip())

    def _hand_down(self, group: Path) -> None:
        available = (group / "cgroup.controllers").read_text().split()
        wanted = [f"+{controller}" for controller in CONTROLLERS if controller in available]
        (group / "cgroup.subtree_control").write_text(" ".join(wanted))

    def _empty_root(self) -> None:
        """In a container's cgroup namespace the root is an ordinary group: it may not hold processes and hand down."""
        is_real_root = not (self._mount / "cgroup.type").exists()
        if is_real_root:
            return
        leaf = self._mount / LEAF
        leaf.mkdir(exist_ok=True)
        _move(self._mount, leaf)

    def pids(self, group: str = "") -> set[int]:
        """Processes in the group or below it, in any hierarchy."""
        found: set[int] = set()
        for top in self._tops(group):
            for here in _below(top):
                found |= _pids(here)
        return found

    def remove(self, group: str = "") -> None:
        """SIGKILL every process in the group (default: the whole bed), and remove it. A missing group is fine.

        Raises BedError when a process does not die (it hangs in the kernel).
        """
        deadline = time.monotonic() + EMPTY_TIMEOUT_S
        while pids := self.pids(group):
            if time.monotonic() > deadline:
                raise BedError(f"processes {sorted(pids)} in {self.path(group)} do not end after SIGKILL")
            for pid in pids:
                kill_quietly(pid)
            time.sleep(POLL_S)
        for top in self._tops(group):
            for here in _below(top):
                _remove_directory(here, deadline)
        if not group and is_v2(self._mount):
            self._refill_root()

    def _refill_root(self) -> None:
        leaf = self._mount / LEAF
        if not leaf.is_dir() or any(self._mount.glob(f"{PREFIX}*")):
            return
        handed = (self._mount / "cgroup.subtree_control").read_text().split()
        (self._mount / "cgroup.subtree_control").write_text(" ".join(f"-{controller}" for controller in handed))
        _move(leaf, self._mount)
        leaf.rmdir()

    def _tops(self, group: str) -> Iterator[Path]:
        for root in hierarchies(self._mount):
            top = root / self.parent / group if group else root / self.parent
            if top.is_dir():
                yield top


def _below(top: Path) -> list[Path]:
    """``top`` and all groups below, deepest first; groups vanish while the bed is dying."""
    found: list[Path] = []
    pending = [top]
    while pending:
        here = pending.pop()
        found.append(here)
        try:
            pending += [path for path in here.iterdir() if path.is_dir()]
        except FileNotFoundError:
            continue
    return found[::-1]


def _pids(group: Path) -> set[int]:
    try:
        return {int(line) for line in (group / "cgroup.procs").read_text().split()}
    except (FileNotFoundError, OSError):
        # ENODEV and EOPNOTSUPP: the group is going away, or is a threaded one whose processes its parent lists.
        return set()


def _move(source: Path, target: Path) -> None:
    for pid in _pids(source):
        try:
            (target / "cgroup.procs").write_text(str(pid))
        except ProcessLookupError:
            continue


def _remove_directory(path: Path, deadline: float) -> None:
    while True:
        try:
            path.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            # EBUSY for a moment after the last process died.
            if time.monotonic() > deadline:
                raise BedError(f"control group {path} can't be removed: {error}") from error
            time.sleep(POLL_S)
        else:
            return
