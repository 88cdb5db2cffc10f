"""Children of a bed: started so that they die with it, logged to files, restartable by name.

Invariants:
- A child gets SIGKILL when its bed's process ends, however that ends (PR_SET_PDEATHSIG through ``setpriv``). The
  kernel sends that signal when the *thread* that started the child ends, so one thread that lives as long as the bed
  starts all.
- Daemons are ended by SIGKILL: nothing of a bed is kept, and kube-apiserver drains for a minute on SIGTERM.
- A wait for something that a daemon should do watches that daemon: one that ended is reported with its last log
  lines, not by a time-out.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from e2e.bed.errors import BedError

POLL_S = 0.05
TAIL_LINES = 15
KILL_TIMEOUT_S = 20.0
T = TypeVar("T")


class Spawner:
    """Starts processes from one thread that lives until ``close``."""

    def __init__(self) -> None:
        if shutil.which("setpriv") is None:
            raise BedError("`setpriv` is missing: install util-linux (apt-get install util-linux)")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bed-spawner")

    def start(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str], join: Sequence[Path] = ()
    ) -> subprocess.Popen[bytes]:
        """Start ``command``, output appended to ``log``, first writing its pid into each file of ``join`` (cgroups)."""
        guarded = ["setpriv", "--pdeathsig", "KILL", *command]
        if join:
            # The shell joins before it becomes the program, so no child of the program can be left outside.
            script = 'n=$1; shift; while [ "$n" -gt 0 ]; do echo $$ > "$1"; shift; n=$((n-1)); done; exec "$@"'
            guarded = ["sh", "-ec", script, "bed", str(len(join)), *(str(path) for path in join), *guarded]

        def spawn() -> subprocess.Popen[bytes]:
            with log.open("ab") as output:
                return subprocess.Popen(
                    guarded,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    start_new_session=True,
                )

        return self._thread.submit(spawn).result()

    def close(self) -> None:
        """End the thread; children that still live are killed by the kernel."""
        self._thread.shutdown()


def descendants(pid: int) -> list[int]:
    """The live processes below ``pid``, parents before children (as this PID namespace numbers them)."""
    found: list[int] = []
    pending = [pid]
    while pending:
        current = pending.pop()
        try:
            text = Path(f"/proc/{current}/task/{current}/children").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children = [int(part) for part in text.split()]
        found += children
        pending += children
    return found


def kill_quietly(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal; a process that is gone already is fine."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


@dataclass(slots=True)
class Daemon:
    """One long-running program of the bed. ``join``: the ``cgroup.procs`` files that it has to be in."""

    name: str
    command: tuple[str, ...]
    log: Path
    environment: Mapping[str, str]
    join: tuple[Path, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self, spawner: Spawner) -> None:
        """Start it unless it runs."""
        if self.process is None or self.process.poll() is not None:
            self.process = spawner.start(self.command, self.log, self.environment, self.join)

    def kill(self) -> None:
        """SIGKILL the program and wait until it is gone, so that its ports are free.

        An nsenter or unshare before it ends by itself when the program has ended; killed first, it would not tell.
        """
        process = self.process
        if process is None:
            return
        below = descendants(process.pid)
        for pid in reversed(below):
            kill_quietly(pid)
        try:
            if below:
                kill_quietly(process.pid, signal.SIGCONT)
                process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        process.kill()
        process.wait(KILL_TIMEOUT_S)
        self.process = None

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to the program, say SIGSTOP to make it silent."""
        if self.process is not None:
            for pid in [self.process.pid, *descendants(self.process.pid)]:
                kill_quietly(pid, number)

    def has_ended(self) -> bool:
        """Whether it was started, and not stopped by us, and yet is gone."""
        return self.process is not None and self.process.poll() is not None

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of its log."""
        if not self.log.exists():
            return "(no log)"
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def check(self) -> None:
        """Raise BedError when it ended by itself."""
        if self.has_ended():
            code = self.process.returncode if self.process else None
            raise BedError(f"{self.name} ended with code {code}; last lines of {self.log}:\n{self.tail()}")


def wait_for(what: str, ready: Callable[[], T], timeout_s: float, watched: Iterable[Daemon] = ()) -> T:
    """Poll until ``ready()`` is true and return it. Raises BedError on time-out or when a watched daemon ended."""
    watched = list(watched)
    deadline = time.monotonic() + timeout_s
    while True:
        if result := ready():
            return result
        for daemon in watched:
            daemon.check()
        if time.monotonic() > deadline:
            tails = "".join(f"\n--- {daemon.name}\n{daemon.tail(5)}" for daemon in watched)
            raise BedError(f"{what}: not within {timeout_s:.0f} s{tails}")
        time.sleep(POLL_S)
