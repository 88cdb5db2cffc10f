"""One real API server (with scheduler and controllers, no kubelet) for all tests of this level.

Tests share it through namespaces of their own. A missing need is an error that names the cure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.bed.api_only import ApiOnly
from sluice.runtime import kube
from tests.api.support import Cluster, Stage, install_crds, running_cluster


@pytest.fixture(scope="session")
def api_bed() -> Iterator[ApiOnly]:
    """A fresh API-level bed with an audit log of writes: ``.kubeconfig``, ``.api``, ``.fake_nodes``, ``.audit``."""
    with ApiOnly(audit=True) as bed:
        yield bed


@pytest.fixture(scope="module")
def cluster(api_bed: ApiOnly, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Our CRDs, a real operator process and played pods, for the tests of one module."""

    async def prepare() -> None:
        async with kube.connect(api_bed.kubeconfig) as client:
            await install_crds(client)

    asyncio.run(prepare())
    with running_cluster(api_bed, Path(tmp_path_factory.mktemp("operator"))) as running:
        yield running


@pytest.fixture
def stage(cluster: Cluster) -> Iterator[Stage]:
    """A namespace of the test's own, with what a test looks at."""
    with cluster.stage() as made:
        yield made
