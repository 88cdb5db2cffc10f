"""Linux namespaces as machines: the keeper (PID 1 of one), running in it, and reaching its network.

A keeper dies with the bed's process, and the kernel then ends all that runs in its PID namespace; its mounts, links
and nft rules go with the namespaces. ``ip netns exec`` is not used: it remounts /sys.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from e2e.bed import build
from e2e.bed.errors import BedError
from e2e.bed.process import Daemon, Spawner, descendants, wait_for

KEEPER_TIMEOUT_S = 20.0
_NEW_NET = 0x40000000  # CLONE_NEWNET
_BACKLOG = 128


class Machine:
    """A set of mount, PID, network, host name and IPC namespaces, held by a keeper."""

    def __init__(self, name: str, setup: Sequence[str], log: Path, join: tuple[Path, ...]) -> None:
        """``setup``: shell commands that run inside before anything else; one that fails ends the start."""
        script = "\n".join([*setup, f"exec {build.program('bedinit')}"])
        self.name = name
        self.keeper = Daemon(
            name,
            (
                *("unshare", "--mount", "--pid", "--net", "--uts", "--ipc", "--fork", "--kill-child"),
                *("--propagation", "private", "sh", "-ec", script),
            ),
            log,
            os.environ,
            join,
        )
        self._pid = 0

    @property
    def pid(self) -> int:
        """The keeper as the bed's process sees it."""
        if not self._pid:
            raise BedError(f"{self.name} is not running")
        return self._pid

    @property
    def is_running(self) -> bool:
        """Whether it was started and not stopped."""
        return bool(self._pid)

    def start(self, spawner: Spawner) -> None:
        """Start and wait until the set-up has run."""
        self.keeper.start(spawner)
        self._pid = wait_for(f"{self.name} set up", self._ready_pid, KEEPER_TIMEOUT_S, [self.keeper])

    def _ready_pid(self) -> int:
        assert self.keeper.process is not None
        for pid in descendants(self.keeper.process.pid):
            try:
                if Path(f"/proc/{pid}/comm").read_text().strip() == "bedinit":
                    return pid
            except (FileNotFoundError, ProcessLookupError):
                continue
        return 0

    def stop(self) -> None:
        """Pull the plug: all processes inside end at once."""
        self.keeper.kill()
        self._pid = 0

    @property
    def prefix(self) -> tuple[str, ...]:
        """What goes before a command to run it inside."""
        return ("nsenter", "-t", str(self.pid), "-n", "-m", "-p", "-u", "-i")

    def configure_network(self, *lines: str) -> None:
        """Run ``ip`` commands in its network namespace; pids in them are those of the outside."""
        result = subprocess.run(
            ["nsenter", "-t", str(self.pid), "-n", "ip", "-batch", "-"],
            input="\n".join(lines),
            capture_output=True,
            text=True,
        )
        if result.returncode != 0:
            raise BedError(f"network of {self.name}: {result.stderr.strip()}; commands:\n" + "\n".join(lines))

    @contextmanager
    def in_network(self) -> Iterator[None]:
        """The calling thread, and threads and processes that it starts meanwhile, are in this network."""
        with enter_network(self.pid):
            yield

    def listen(self, host: str, port: int) -> socket.socket:
        """A listening TCP socket inside, for a server outside. Made in a short-lived thread, as setns is per thread."""
        made: list[socket.socket] = []
        failed: list[OSError] = []

        def bind() -> None:
            try:
                with self.in_network():
                    made.append(socket.create_server((host, port), backlog=_BACKLOG))
            except OSError as error:
                failed.append(error)

        thread = threading.Thread(target=bind)
        thread.start()
        thread.join()
        if failed:
            raise BedError(f"listen on {host}:{port} in {self.name}: {failed[0]}")
        return made[0]


def _set_network(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _NEW_NET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


@contextmanager
def enter_network(pid: int) -> Iterator[None]:
    """Move the calling thread into the network namespace of process ``pid``, and back at the end."""
    outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        inside = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _set_network(inside)
        finally:
            os.close(inside)
        try:
            yield
        finally:
            _set_network(outside)
    finally:
        os.close(outside)
