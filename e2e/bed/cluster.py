"""What suites may ask of a cluster, whichever backend they run on."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from e2e.bed.errors import BedError


class Cap(enum.Enum):
    """An ability that not every backend has. A test names those it needs."""

    REAL_PODS = "real-pods"
    PARTITION = "partition"
    POWER = "power"
    GPU_PATCH = "gpu-patch"
    REGISTRY = "registry"
    DAEMONS = "daemons"
    FAKE_NODES = "fake-nodes"


class Cluster(Protocol):
    """The members that every backend has. Those of one capability are on the backends that list it."""

    @property
    def kubeconfig(self) -> Path:
        """Works from this machine's own network as well as inside ``in_network``."""
        ...

    @property
    def version(self) -> str:
        """The API server's version, like v1.36.3."""
        ...

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node names."""
        ...

    @property
    def caps(self) -> frozenset[Cap]:
        """What this backend can do."""
        ...

    def in_network(self) -> AbstractContextManager[None]:
        """Run the calling thread in a network that reaches pods and Services."""
        ...

    def dump(self, to: Path) -> None:
        """Write what helps to understand a failure."""
        ...

    def close(self) -> None:
        """Give everything back. Idempotent."""
        ...


def require(cluster: Cluster, caps: Iterable[Cap]) -> None:
    """Raise BedError when the cluster lacks a capability."""
    missing = [cap.value for cap in caps if cap not in cluster.caps]
    if missing:
        raise BedError(
            f"{type(cluster).__name__} lacks {', '.join(missing)}: run with CLUSTER=local (Linux, root) for real nodes"
        )
