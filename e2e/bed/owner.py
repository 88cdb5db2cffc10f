"""A bed that outlives the command that made it: a process that only holds it, started by ``up`` and ended by ``down``.

The two talk through the bed's lock (who owns it) and ``bed.json`` in its state directory (written when it is ready).
``down`` also removes what a killed owner left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.bed import packages, state
from e2e.bed.build import Say, build
from e2e.bed.errors import BedError
from e2e.bed.local import FAMILIES, LocalBed
from e2e.bed.process import kill_quietly

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.1
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Running:
    """A bed that another process holds. ``network_pid``: any process in the network that reaches pods."""

    name: str
    kubeconfig: Path
    version: str
    nodes: tuple[str, ...]
    images: Path
    network_pid: int


def find(name: str) -> Running | None:
    """The ready bed of this name, whoever holds it; None when there is none (or not yet)."""
    owner = state.owner_of(name)
    if owner is None or not Path(f"/proc/{owner.pid}").exists():
        return None
    try:
        raw: dict[str, Any] = json.loads((state.directory_of(name) / "bed.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    if raw["owner"] != owner.pid:
        return None  # left by a killed owner, whom the present one has not swept yet
    return Running(
        name=name,
        kubeconfig=Path(raw["kubeconfig"]),
        version=raw["version"],
        nodes=tuple(raw["nodes"]),
        images=Path(raw["images"]),
        network_pid=raw["network_pid"],
    )


def up(name: str, nodes: int, say: Say = print) -> Running:
    """Start a background bed and wait until it is ready; one that is there already is returned as it is.

    Raises BedError with the owner's last words when it fails.
    """
    if running := find(name):
        return running
    if owner := state.owner_of(name):
        raise state.BusyError(name, owner)
    prepare(say)
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            [sys.executable, "-m", "e2e.bed", "own", "--name", name, "--nodes", str(nodes)],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if running := find(name):
                return running
            if process.poll() is not None:
                words.seek(0)
                raise BedError(f"the bed did not come up:\n{words.read().decode(errors='replace').strip()[-3000:]}")
            time.sleep(POLL_S)
    down(name)
    raise BedError(f"the bed did not come up within {START_TIMEOUT_S:.0f} s (machine overloaded?)")


def prepare(say: Say = print) -> None:
    """Debian packages and cluster programs that a local bed needs; here, so that their progress is seen."""
    packages.ensure(say)
    build(FAMILIES, say)


def own(name: str, nodes: int) -> None:
    """Hold a bed until SIGTERM or SIGINT. This is the background process."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with LocalBed(name=name, nodes=nodes, background=True):
        ended.wait()


def down(name: str, say: Say = print) -> bool:
    """End the background bed and remove every trace of it; False when there was nothing.

    Raises BusyError when the bed belongs to a process that does other things too (a test run).
    """
    owner = state.owner_of(name)
    if owner is not None:
        if not owner.background:
            raise state.BusyError(name, owner)
        kill_quietly(owner.pid, signal.SIGTERM)
        if not _wait_released(name, STOP_TIMEOUT_S):
            say(f"bed {name}: process {owner.pid} does not end, killing it")
            kill_quietly(owner.pid)
            _wait_released(name, STOP_TIMEOUT_S)
    if name not in state.names():
        return owner is not None
    state.sweep(name)
    return True


def _wait_released(name: str, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while state.owner_of(name) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def enter(running: Running, command: list[str]) -> None:
    """Become ``command`` (default: the user's shell) in the bed's network, with KUBECONFIG set. Does not return."""
    environment = {**os.environ, "KUBECONFIG": str(running.kubeconfig)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', '')}"
    program = command or [environment.get("SHELL", "/bin/sh")]
    os.execvpe("nsenter", ["nsenter", "-t", str(running.network_pid), "-n", *program], environment)
