"""A cluster as the user's tools see it: kubectl and Helm with an explicit kubeconfig or context.

`CLUSTER=local` (default) needs Linux and root. `CLUSTER=existing CONTEXT=<name>` uses that context of the user's
kubeconfig, by name; the current context is never read, used or changed.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BED = "demo"
SYSTEM = "sluice-system"
VENV = Path(sys.executable).parent


class DemoError(Exception):
    """What is missing or failed, and what to do about it; shown to the user without a trace."""


@dataclass(frozen=True, slots=True)
class Target:
    """How to reach the cluster: arguments for kubectl and for helm."""

    kubeconfig: Path | None
    context: str | None
    helm: Path

    def kubectl(self, *args: str) -> list[str]:
        command = [str(VENV / "kubectl")]
        if self.kubeconfig:
            command.append(f"--kubeconfig={self.kubeconfig}")
        if self.context:
            command.append(f"--context={self.context}")
        return [*command, *args]

    def helm_command(self, *args: str) -> list[str]:
        command = [str(self.helm), *args]
        if self.kubeconfig:
            command.append(f"--kubeconfig={self.kubeconfig}")
        if self.context:
            command.append(f"--kube-context={self.context}")
        return command


def kind_of_cluster() -> str:
    """`local` or `existing`, as the environment asks.

    Raises:
        DemoError: another value, `existing` without a context, or `local` where it can't work.
    """
    kind = os.environ.get("CLUSTER") or "local"
    if kind not in ("local", "existing"):
        raise DemoError(f"CLUSTER={kind} is unknown: use CLUSTER=local, or CLUSTER=existing with CONTEXT=<name>")
    if kind == "existing" and not os.environ.get("CONTEXT"):
        raise DemoError("CLUSTER=existing needs CONTEXT=<name of a context of your kubeconfig> (it is never guessed)")
    if kind == "local" and os.environ.get("CONTEXT"):
        raise DemoError("CONTEXT needs CLUSTER=existing: without it the local cluster would be used")
    if kind == "local" and (sys.platform != "linux" or os.geteuid() != 0):
        raise DemoError(
            "CLUSTER=local needs Linux and root (it makes namespaces, bridges and cgroups). Run as root, or name a "
            "cluster that you have: make demo CLUSTER=existing CONTEXT=<name>"
        )
    return kind


def run(command: Sequence[str]) -> str:
    """Run and return standard output.

    Raises:
        DemoError: the command failed; the message carries it and its last lines.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-25:])
        raise DemoError(f"{' '.join(command)}\nended with {done.returncode}:\n{tail}")
    return done.stdout


def install(target: Target, *settings: str) -> None:
    """Both charts, as a user installs them; `settings` are values for the operator's chart (`--set`)."""
    common = ("--namespace", SYSTEM, "--create-namespace", "--wait", "--timeout", "3m")
    chosen = [part for setting in settings for part in ("--set", setting)]
    for release in ("sluice-crds", "sluice"):
        values = chosen if release == "sluice" else []
        chart = str(ROOT / "charts" / release)
        run(target.helm_command("upgrade", "--install", release, chart, *common, *values))
