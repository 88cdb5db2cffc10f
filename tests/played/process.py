"""The real operator as a child process, on any API server: started, killed, stopped, its log kept."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

_PROGRAM = "import sys; from sluice.main import main; sys.exit(main(sys.argv[1:]))"
STOP_S = 25.0
"""Longer than the operator's own hard limit for its exit."""


class OperatorProcess:
    """`with OperatorProcess(kubeconfig, config, log)`: killed at the end of the block if it still runs."""

    def __init__(self, kubeconfig: Path, config: Path, log: Path, *, identity: str = "test") -> None:
        self._arguments = [
            f"--kubeconfig={kubeconfig}",
            f"--config={config}",
            "--host=127.0.0.1",
            "--port=0",
            f"--identity={identity}",
        ]
        self._log_path = log
        self._log: IO[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "OperatorProcess":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def start(self) -> None:
        self._log = self._log_path.open("a")
        self._process = subprocess.Popen([sys.executable, "-c", _PROGRAM, *self._arguments], stderr=self._log)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGKILL)
            self._process.wait(10)
        if self._log is not None:
            self._log.close()

    def stop(self) -> int:
        """SIGTERM; the exit code. Raises: subprocess.TimeoutExpired."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(STOP_S)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log_end(self) -> str:
        return self._log_path.read_text()[-4000:]

    def wait_for(self, what: str, probe: Callable[[], bool], step: Callable[[], None], deadline_s: float) -> None:
        """Call `step` until the probe holds.

        Raises:
            AssertionError: at the deadline, or when the process ended; with the end of its log.
        """
        end = time.monotonic() + deadline_s
        while not probe():
            assert self.is_running, f"the operator ended while waiting for {what}:\n{self.log_end()}"
            assert time.monotonic() < end, f"not within {deadline_s} s: {what}\n{self.log_end()}"
            step()
