"""Fixtures of the fake API server; `contract` is the fake side of the contract suite."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from kubernetes.aio.client import Configuration

from sluice.runtime import kube
from tests.fakeapi import crds
from tests.fakeapi.cluster import FakeCluster
from tests.fakeapi.contract import Contract
from tests.fakeapi.live import Stage
from tests.fakeapi.server import FakeServer
from tests.played.controllers import Machinery
from tests.played.server import PlayedServer
from tests.played.world import World


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


@pytest.fixture(scope="session")
def played() -> Iterator[World]:
    """The one world of played pods that answers over HTTP (the ports are fixed, so there is only one)."""
    world = World()
    with PlayedServer(world):
        yield world


@pytest.fixture
def stage(cluster: FakeCluster, server: FakeServer, played: World, tmp_path: Path) -> Iterator[Stage]:
    """Everything that an operator needs to run for real against the fake."""
    token = tmp_path / "token"
    token.write_text("played")
    played.load_s = 0.0
    yield Stage(cluster, server, played, Machinery(cluster, played), token)
    for uid in [*played.engines, *played.routers]:
        played.stop(uid)
