"""Fixtures of the fake API server; `contract` is the fake side of the contract suite."""

from collections.abc import AsyncIterator, Iterator

import pytest
from kubernetes.aio.client import Configuration

from sluice.runtime import kube
from tests.fakeapi import crds
from tests.fakeapi.cluster import FakeCluster
from tests.fakeapi.contract import Contract
from tests.fakeapi.server import FakeServer


@pytest.fixture
def cluster() -> FakeCluster:
    """A cluster with our CRDs and the namespace `t`."""
    made = crds.install(FakeCluster())
    made.create(made.resource("", "namespaces"), "", {"metadata": {"name": "t"}})
    made.audit.clear()
    return made


@pytest.fixture
def server(cluster: FakeCluster) -> Iterator[FakeServer]:
    with FakeServer(cluster) as running:
        yield running


@pytest.fixture
async def client(server: FakeServer) -> AsyncIterator[kube.Client]:
    async with kube.connect_with(Configuration(host=server.url)) as connected:
        yield connected


@pytest.fixture
def contract(client: kube.Client) -> Contract:
    return Contract(client, "t", is_real=False)
