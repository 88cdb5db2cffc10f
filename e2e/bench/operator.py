"""The operator as a process beside an API server, for measurements and kills."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import TracebackType

import yaml


class OperatorProcess:
    """`sluice-operator` with its own configuration file; `with` ends it by SIGTERM, then SIGKILL."""

    def __init__(self, kubeconfig: Path, workdir: Path, **settings: object) -> None:
        self.kubeconfig = kubeconfig
        self.workdir = workdir
        self.settings = settings
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def start(self) -> None:
        """Start the process; `wait_ready` tells when it serves."""
        self.workdir.mkdir(parents=True, exist_ok=True)
        config = self.workdir / "operator.yaml"
        config.write_text(yaml.safe_dump({"leaseNamespace": "default", **self.settings}))
        context = yaml.safe_load(self.kubeconfig.read_text())["current-context"]
        self.port = _free_port()
        program = str(Path(sys.executable).parent / "sluice-operator")
        command = [program, "--config", str(config), "--kubeconfig", str(self.kubeconfig)]
        # One identity for all starts: after a SIGKILL the next process need not wait for its own Lease to expire.
        command += ["--context", context, "--port", str(self.port), "--identity", "bench"]
        with (self.workdir / "operator.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def wait_ready(self, deadline_s: float = 60) -> None:
        """Until `/readyz` and the Lease say that this process leads.

        Raises:
            RuntimeError: the process ended; the message carries the end of its log.
            TimeoutError: not ready within the deadline.
        """
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if self.process is None or self.process.poll() is not None:
                raise RuntimeError(f"the operator ended:\n{self.log_tail()}")
            if "sluice_leader 1.0" in self.metrics():
                return
            time.sleep(0.05)
        raise TimeoutError(f"the operator does not lead within {deadline_s:g} s:\n{self.log_tail()}")

    def metrics(self) -> str:
        """The text of `/metrics`; "" while the port is closed."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
                text: str = answer.read().decode()
                return text
        except OSError:
            return ""

    def rss_mb(self) -> float:
        """Resident memory of the process, MB (10^6 bytes)."""
        assert self.process is not None
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def kill(self) -> None:
        """SIGKILL: no clean-up of any kind."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self.process is None:
            return
        self.process.send_signal(how)
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join((self.workdir / "operator.log").read_text(errors="replace").splitlines()[-lines:])

    def __enter__(self) -> "OperatorProcess":
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
