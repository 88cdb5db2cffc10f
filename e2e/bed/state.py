"""Where a bed on this machine keeps its state, who owns it, and how what a killed one left is removed.

- State lives in ``/var/tmp/sluice-bed/<name>``, a tmpfs that the bed mounts: on a busy disk start and end take a
  third of the time. Not below /run, /mnt, /etc, /var/lib or /var/log: nodes have those for themselves.
- Images are large and lie beside it, on the disk, in ``<name>.images``.
- ``<name>.lock`` is locked for the life of the owner and names it. Only the holder may sweep or remove anything; a
  refused second owner has touched nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from e2e.bed import cgroups
from e2e.bed.errors import BedError

ROOT = Path("/var/tmp/sluice-bed")
_UMOUNT_LAZILY = 2  # MNT_DETACH
# Asking who owns a bed takes its lock for an instant (``owner_of``): one who wants it tries for longer than that.
_PROBE_S = 0.5
_POLL_S = 0.02


class BusyError(BedError):
    """The bed of this name has a living owner."""

    def __init__(self, name: str, owner: Owner | None) -> None:
        who = f"process {owner.pid}" if owner else "another process"
        cure = f"`python -m e2e.bed down --name {name}` ends it" if owner and owner.background else "wait for its end"
        super().__init__(f"bed {name!r} is in use by {who}: {cure}, or choose another name (SLUICE_BED_NAME)")
        self.owner = owner


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that holds a bed; ``background``: it does nothing else, so ``down`` may end it."""

    pid: int
    background: bool


def directory_of(name: str) -> Path:
    """The state directory of the bed of this name."""
    if not name.replace("-", "").isalnum() or len(name) > 20:
        raise BedError(f"bed name {name!r}: up to 20 letters, digits and '-'")
    return ROOT / name


def _lock_path(name: str) -> Path:
    directory = directory_of(name)
    return directory.with_name(f"{name}.lock")


def owner_of(name: str) -> Owner | None:
    """The living owner, or None when nobody holds the bed. BedError unless root."""
    require_root()
    try:
        with _lock_path(name).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return _read_owner(name)
    return None


def _read_owner(name: str) -> Owner | None:
    try:
        return Owner(**json.loads(_lock_path(name).read_text()))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def names() -> list[str]:
    """Beds that run or left something here."""
    files = {path.stem for path in ROOT.glob("*.lock")} if ROOT.is_dir() else set()
    return sorted(files | set(cgroups.left_names()))


class Hold:
    """The lock of one bed, and its swept, fresh state directory. Released by ``close``."""

    def __init__(self, name: str, *, background: bool = False) -> None:
        """Raises BusyError when the bed has an owner. What a killed owner left is removed first."""
        self.name = name
        self.directory = directory_of(name)
        self.images = self.directory.with_name(f"{name}.images")
        make_root()
        self._lock = _acquire(name)
        self._lock.truncate(0)
        self._lock.seek(0)
        self._lock.write(json.dumps(asdict(Owner(os.getpid(), background))))
        self._lock.flush()
        self.clear()

    def mount(self) -> None:
        """Make the state directory, a tmpfs."""
        self.directory.mkdir(mode=0o700)
        _run("mount", "-t", "tmpfs", "-o", "mode=0700,size=80%", f"sluice-bed-{self.name}", str(self.directory))

    def clear(self) -> None:
        """Kill the bed's processes, remove its control groups, mounts and files."""
        cgroups.Cgroups(self.name).remove()
        for point in _mounts_below(self.directory):
            _detach(point)
        for directory in (self.directory, self.images):
            shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """Clear, and give the lock back. The lock file goes too: ``_acquire`` notices."""
        if self._lock.closed:
            return
        self.clear()
        _lock_path(self.name).unlink(missing_ok=True)
        self._lock.close()
        with contextlib.suppress(OSError):  # not empty: other beds
            ROOT.rmdir()


def require_root() -> None:
    """BedError unless root."""
    if os.geteuid() != 0:
        raise BedError("real nodes need root: run as root, or use CLUSTER=existing CONTEXT=<name>")


def make_root() -> None:
    """The directory of all beds; BedError unless root."""
    require_root()
    ROOT.mkdir(mode=0o700, exist_ok=True)
    if ROOT.is_symlink() or ROOT.stat().st_uid != 0:
        raise BedError(f"{ROOT} belongs to another user: remove it")


def _acquire(name: str) -> IO[str]:
    path = _lock_path(name)
    deadline = time.monotonic() + _PROBE_S
    while True:
        make_root()
        try:
            file = path.open("a+")
        except FileNotFoundError:
            continue  # the last holder has just removed the directory
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            if time.monotonic() > deadline:
                raise BusyError(name, _read_owner(name)) from None
            time.sleep(_POLL_S)
            continue
        # The former holder may have unlinked the file between our open and our lock.
        if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
            return file
        file.close()


def _mounts_below(directory: Path) -> list[str]:
    """Mount points at or below ``directory``, deepest first."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    inside = [point for point in points if point == str(directory) or point.startswith(f"{directory}/")]
    return sorted(inside, key=len, reverse=True)


def _detach(point: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(point.encode(), _UMOUNT_LAZILY) != 0:
        raise BedError(f"umount {point}: {os.strerror(ctypes.get_errno())}")


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise BedError(f"{' '.join(command)}: {result.stderr.strip()}")


def sweep(name: str) -> None:
    """Remove what a killed owner left. Raises BusyError when the owner lives."""
    Hold(name).close()
