"""What the client does when the API server or the network misbehaves. Fake only: a real server can't be ordered to."""

import time

import pytest
from kubernetes.aio.client import Configuration

from sluice.runtime import kinds, kube
from sluice.runtime.errors import AlreadyExists, Forbidden, QuotaExceeded, Throttled, Unauthorized, Unavailable
from tests.fakeapi import faults
from tests.fakeapi.cluster import FakeCluster
from tests.fakeapi.contract import a_config_map, a_pod
from tests.fakeapi.errors import ApiError
from tests.fakeapi.faults import Fault
from tests.fakeapi.server import FakeServer

pytestmark = pytest.mark.asyncio


async def test_throttled_request_waits_as_long_as_told(server: FakeServer, client: kube.Client) -> None:
    fault = server.faults.add(Fault(verb="create", plural="configmaps", error=faults.throttled(1)))
    started = time.monotonic()
    await client.create(kinds.CONFIG_MAP, a_config_map("a", "t"))
    assert fault.hits == 1
    assert time.monotonic() - started >= 1.0


async def test_lasting_throttling_is_an_error_of_its_own(server: FakeServer, client: kube.Client) -> None:
    error = ApiError(429, "TooManyRequests", "later", headers={"Retry-After": "0"})
    server.faults.add(Fault(verb="get", times=None, error=error))
    with pytest.raises(Throttled):
        await client.get(kinds.CONFIG_MAP, "t", "a")


async def test_short_outage_is_ridden_out(server: FakeServer, client: kube.Client) -> None:
    server.faults.add(Fault(verb="create", times=2, error=faults.unavailable()))
    made = await client.create(kinds.CONFIG_MAP, a_config_map("a", "t"))
    assert made["metadata"]["name"] == "a"


async def test_lasting_outage_is_unavailable_after_three_tries(server: FakeServer, client: kube.Client) -> None:
    fault = server.faults.add(Fault(verb="create", times=None, error=faults.unavailable()))
    with pytest.raises(Unavailable):
        await client.create(kinds.CONFIG_MAP, a_config_map("a", "t"))
    assert fault.hits == 3


async def test_lost_answer_of_a_create_makes_no_second_object(
    cluster: FakeCluster, server: FakeServer, client: kube.Client
) -> None:
    server.faults.add(Fault(verb="create", plural="pods", reset=True, after=True))
    with pytest.raises(AlreadyExists):
        await client.create(kinds.POD, a_pod("p", "t"))
    assert len(cluster.objects("pods")) == 1
    assert [w.verb for w in cluster.writes() if w.plural == "pods"] == ["create"]


async def test_no_answer_in_time_is_unavailable(server: FakeServer) -> None:
    server.faults.add(Fault(verb="get", times=None, latency_s=2.0))
    async with kube.connect_with(Configuration(host=server.url), timeout_s=0.1) as impatient:
        with pytest.raises(Unavailable):
            await impatient.get(kinds.CONFIG_MAP, "t", "a")


async def test_server_that_is_not_there_is_unavailable() -> None:
    async with kube.connect_with(Configuration(host="http://127.0.0.1:1")) as client:
        with pytest.raises(Unavailable):
            await client.get(kinds.CONFIG_MAP, "t", "a")


async def test_credentials_are_read_again_once_after_a_401(cluster: FakeCluster) -> None:
    with FakeServer(cluster, token="new") as server:
        configuration = Configuration(host=server.url)
        configuration.api_key = {"BearerToken": "Bearer old"}
        reloads = 0

        async def reload() -> None:
            nonlocal reloads
            reloads += 1
            configuration.api_key = {"BearerToken": "Bearer new"}

        async with kube.connect_with(configuration, reload=reload) as client:
            await client.create(kinds.CONFIG_MAP, a_config_map("a", "t"))
            assert reloads == 1


async def test_refused_credentials_are_unauthorized(cluster: FakeCluster) -> None:
    with FakeServer(cluster, token="new") as server:
        configuration = Configuration(host=server.url)
        configuration.api_key = {"BearerToken": "Bearer old"}
        async with kube.connect_with(configuration) as client:
            with pytest.raises(Unauthorized):
                await client.get(kinds.CONFIG_MAP, "t", "a")


async def test_forbidden_names_verb_and_resource(cluster: FakeCluster, client: kube.Client) -> None:
    cluster.forbidden.add(("create", "pods"))
    with pytest.raises(Forbidden) as refused:
        await client.create(kinds.POD, a_pod("p", "t"))
    assert (refused.value.verb, refused.value.resource) == ("create", "pods")
    assert not await client.is_allowed("create", kinds.POD, "t")


async def test_quota_is_a_refusal_of_its_own(server: FakeServer, client: kube.Client) -> None:
    server.faults.add(Fault(verb="create", plural="pods", error=faults.quota_exceeded("pods", "p")))
    with pytest.raises(QuotaExceeded):
        await client.create(kinds.POD, a_pod("p", "t"))


async def test_expired_page_token_restarts_the_list(
    server: FakeServer, client: kube.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube, "PAGE", 2)
    for i in range(5):
        await client.create(kinds.CONFIG_MAP, a_config_map(f"c{i}", "t"))
    pages = 0
    names = set()
    async for page in client.pages(kinds.CONFIG_MAP, "t", selector=""):
        names |= {o["metadata"]["name"] for o in page.items}
        pages += 1
    assert (pages, len(names)) == (3, 5)
    gone = ApiError(410, "Expired", "The provided continue parameter is too old")
    server.faults.add(Fault(verb="list", plural="configmaps", error=gone))
    found = await client.list(kinds.CONFIG_MAP, "t", selector="")
    assert {o["metadata"]["name"] for o in found.items} == names
