"""A cluster that the user names by its kubectl context. The current context is never used and never changed.

Work goes through a copy of the kubeconfig that has this one context only, removed in ``close``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from e2e.bed.cluster import Cap
from e2e.bed.errors import BedError

TIMEOUT_S = 30.0


def find_kubectl() -> str:
    """kubectl of this Python environment, else from PATH."""
    own = Path(sys.executable).parent / "kubectl"
    found = str(own) if own.exists() else shutil.which("kubectl")
    if not found:
        raise BedError("kubectl is missing: run `make setup`, or put kubectl on PATH")
    return found


def _run(command: Sequence[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise BedError(f"{' '.join(command)}: no answer within {TIMEOUT_S:.0f} s") from error
    if result.returncode != 0:
        raise BedError(f"{' '.join(command)}: {result.stderr.strip()}")
    return result.stdout


class Existing:
    """The named cluster (``with Existing("my-context") as cluster``). See ``cluster.Cluster``."""

    caps = frozenset({Cap.REAL_PODS})

    def __init__(self, context: str, kubeconfig: Path | None = None) -> None:
        """``kubeconfig``: default as kubectl's (KUBECONFIG, else ~/.kube/config). The cluster must answer."""
        if not context:
            raise BedError(
                "CLUSTER=existing needs CONTEXT=<name>; `kubectl config get-contexts -o name` lists the names"
            )
        source = ["--kubeconfig", str(kubeconfig)] if kubeconfig else []
        view = ["config", "view", "--raw", "--flatten", "--minify", "--context", context]
        document = _run([find_kubectl(), *source, *view])
        self._directory = Path(tempfile.mkdtemp(prefix="sluice-existing-"))
        self.kubeconfig = self._directory / "kubeconfig"
        self.kubeconfig.touch(mode=0o600)
        self.kubeconfig.write_text(document)
        try:
            self.version: str = self._json("version")["serverVersion"]["gitVersion"]
            self.nodes = tuple(item["metadata"]["name"] for item in self._json("get", "nodes")["items"])
        except BaseException:
            self.close()
            raise

    def _json(self, *arguments: str) -> Any:
        return json.loads(_run([find_kubectl(), "--kubeconfig", str(self.kubeconfig), *arguments, "-o", "json"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def in_network(self) -> Iterator[None]:
        """RefusedError: pods of a foreign cluster can't be reached from here; use ``kubectl port-forward``."""
        raise BedError("an existing cluster's pod network can't be entered: use kubectl port-forward, or CLUSTER=local")
        yield

    def dump(self, to: Path) -> None:
        """Write all pods and events that the user may list."""
        to.mkdir(parents=True, exist_ok=True)
        for resource in ("pods", "events"):
            (to / f"{resource}.json").write_text(json.dumps(self._json("get", resource, "--all-namespaces"), indent=1))

    def close(self) -> None:
        """Remove the copied kubeconfig. The cluster stays as it is."""
        shutil.rmtree(self._directory, ignore_errors=True)


def backend_from_environment() -> str:
    """``CLUSTER``, by default ``local`` on Linux as root. BedError lists the choices."""
    chosen = os.environ.get("CLUSTER", "")
    choices = "local (Linux, root), api (API server only, no pods run), existing (with CONTEXT=<name>)"
    if not chosen:
        if sys.platform == "linux" and os.geteuid() == 0:
            return "local"
        raise BedError(f"CLUSTER is not set and this is not Linux as root; choose CLUSTER={choices}")
    if chosen not in ("local", "api", "existing"):
        raise BedError(f"CLUSTER={chosen} is unknown; choose CLUSTER={choices}")
    return chosen
