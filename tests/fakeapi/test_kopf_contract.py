"""What our adapter relies on in kopf, one fact per test. Run at every upgrade of kopf."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from kubernetes.aio.client import Configuration

from sluice import kopfapp
from sluice.api import names
from sluice.runtime import kinds, kube
from sluice.runtime.kinds import Kind
from tests.fakeapi.cluster import FakeCluster, Options
from tests.fakeapi.contract import a_config_map, a_pod, a_service
from tests.fakeapi.server import FakeServer

pytestmark = pytest.mark.asyncio

WATCHED = (kinds.INFERENCE_SERVICE, kinds.POD, kinds.CONFIG_MAP)
DEADLINE_S = 15.0
Object = dict[str, Any]


@dataclass(eq=False)
class Told:
    """What kopf told us."""

    events: list[tuple[str, str | None, str]] = field(default_factory=list)
    """(kind, event type, name)."""

    def on_event(self, kind: Kind, event: str | None, obj: Object) -> None:
        assert obj["kind"] == kind.name
        self.events.append((kind.name, event, obj["metadata"]["name"]))

    async def hears(self, *event: str | None, since: int = 0) -> None:
        await until(lambda: event in self.events[since:], f"{event} in {self.events[since:]}")


async def until(probe: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not probe():
        assert time.monotonic() < end, f"not within {DEADLINE_S} s: {what}"
        await asyncio.sleep(0.02)


@asynccontextmanager
async def watching(client: kube.Client, server: FakeServer) -> AsyncIterator[Told]:
    """Kopf runs and watches all kinds; at the end it stops."""
    told, stop, ready = Told(), asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(kopfapp.run(client, WATCHED, told.on_event, namespaces=(), stop=stop, ready=ready))
    try:
        await until(lambda: all(server.watching(kind.plural) for kind in WATCHED), "watches are open")
        yield told
    finally:
        stop.set()
        await asyncio.wait_for(task, DEADLINE_S)


def create(cluster: FakeCluster, kind: Kind, body: Object) -> Object:
    return cluster.create(cluster.resource(kind.group, kind.plural), "t", body)


async def test_existing_objects_come_without_a_type_then_changes_with_one(
    cluster: FakeCluster, server: FakeServer, client: kube.Client
) -> None:
    create(cluster, kinds.INFERENCE_SERVICE, a_service("old", "t"))
    async with watching(client, server) as told:
        await told.hears("InferenceService", None, "old")
        create(cluster, kinds.INFERENCE_SERVICE, a_service("new", "t"))
        await told.hears("InferenceService", "ADDED", "new")
        resource = cluster.resource(names.GROUP, names.SERVICE_PLURAL)
        cluster.patch(resource, "t", "new", {"spec": {"suspend": True}})
        await told.hears("InferenceService", "MODIFIED", "new")
        cluster.delete(resource, "t", "new")
        await told.hears("InferenceService", "DELETED", "new")


async def test_label_selector_is_applied_by_the_api_server(
    cluster: FakeCluster, server: FakeServer, client: kube.Client
) -> None:
    async with watching(client, server) as told:
        foreign = a_pod("foreign", "t")
        foreign["metadata"]["labels"] = {}
        create(cluster, kinds.POD, foreign)
        create(cluster, kinds.POD, a_pod("ours", "t"))
        await told.hears("Pod", "ADDED", "ours")
        assert not [e for e in told.events if e[2] == "foreign"]
    asked = [seen for seen in server.seen if seen.path == "/api/v1/pods"]
    assert {bool(seen.query.get("watch")) for seen in asked} == {True, False}
    assert {seen.query.get("labelSelector") for seen in asked} == {kinds.OURS}


async def test_kopf_writes_nothing(cluster: FakeCluster, server: FakeServer, client: kube.Client) -> None:
    create(cluster, kinds.INFERENCE_SERVICE, a_service("s", "t", finalizers=["example.com/theirs"]))
    create(cluster, kinds.POD, a_pod("p", "t"))
    mark = len(cluster.audit)
    async with watching(client, server) as told:
        await told.hears("InferenceService", None, "s")
        await told.hears("Pod", None, "p")
        cluster.patch(cluster.resource(names.GROUP, names.SERVICE_PLURAL), "t", "s", {"spec": {"suspend": True}})
        await told.hears("InferenceService", "MODIFIED", "s")
        cluster.delete(cluster.resource(names.GROUP, names.SERVICE_PLURAL), "t", "s", None, Options("user"))
        cluster.delete(cluster.resource("", "pods"), "t", "p", None, Options("user"))
        await told.hears("Pod", "DELETED", "p")
    ours = [seen for seen in server.seen if seen.method != "GET"]
    assert not ours, f"kopf wrote: {ours}"
    assert {w.manager for w in cluster.writes(since=mark)} == {"test", "user"}


async def test_dropped_stream_misses_nothing(cluster: FakeCluster, server: FakeServer, client: kube.Client) -> None:
    async with watching(client, server) as told:
        server.drop_watches("configmaps")
        body = a_config_map("c", "t", labels={names.LABEL_MANAGED_BY: names.MANAGED_BY, names.LABEL_SERVICE_UID: "u"})
        create(cluster, kinds.CONFIG_MAP, body)
        await told.hears("ConfigMap", "ADDED", "c")


async def test_after_410_survivors_come_again_and_deletions_are_never_told(
    cluster: FakeCluster, server: FakeServer, client: kube.Client
) -> None:
    """Why the store heals by LIST."""
    labels = {names.LABEL_MANAGED_BY: names.MANAGED_BY, names.LABEL_SERVICE_UID: "u"}
    for name in ("stays", "goes"):
        create(cluster, kinds.CONFIG_MAP, a_config_map(name, "t", labels=labels))
    async with watching(client, server) as told:
        await told.hears("ConfigMap", None, "goes")
        since = len(told.events)
        with cluster.lock:
            cluster.delete(cluster.resource("", "configmaps"), "t", "goes")
            server.expire_watches("configmaps")
        await told.hears("ConfigMap", None, "stays", since=since)
        assert not [event for event in told.events[since:] if event[2] == "goes"]


async def test_login_is_repeated_after_a_401_on_a_session_of_its_own(cluster: FakeCluster) -> None:
    create(cluster, kinds.INFERENCE_SERVICE, a_service("s", "t"))
    with FakeServer(cluster, token="old") as server:
        configuration = Configuration(host=server.url)
        configuration.api_key = {"BearerToken": "Bearer old"}

        async def reload() -> None:
            configuration.api_key = {"BearerToken": "Bearer new"}

        async with (
            kube.connect_with(configuration, reload=reload) as client,
            watching(client, server) as told,
        ):
            await told.hears("InferenceService", None, "s")
            server.token = "new"
            server.drop_watches()
            await until(
                lambda: (
                    any(s.code == 401 for s in server.seen) and all(server.watching(kind.plural) for kind in WATCHED)
                ),
                "watches are open again",
            )
            create(cluster, kinds.INFERENCE_SERVICE, a_service("later", "t"))
            await told.hears("InferenceService", "ADDED", "later")
            await client.get(kinds.INFERENCE_SERVICE, "t", "s")


async def test_stop_flag_ends_kopf_at_once(server: FakeServer, client: kube.Client) -> None:
    async with watching(client, server):
        started = time.monotonic()
    assert time.monotonic() - started < 3.0


async def test_lists_are_paged(server: FakeServer, client: kube.Client) -> None:
    async with watching(client, server):
        pass
    listed = [s for s in server.seen if s.path == "/api/v1/pods" and not s.query.get("watch")]
    assert listed and all(seen.query.get("limit") == "500" for seen in listed)


async def test_kind_that_appears_later_is_watched(server: FakeServer, cluster: FakeCluster) -> None:
    later = {
        "metadata": {"name": "gadgets.example.com"},
        "spec": {
            "group": "example.com",
            "scope": "Namespaced",
            "names": {"plural": "gadgets", "kind": "Gadget", "singular": "gadget"},
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
                }
            ],
        },
    }
    gadget = Kind("Gadget", "example.com", "v1", "gadgets")
    told, stop, ready = Told(), asyncio.Event(), asyncio.Event()
    async with kube.connect_with(Configuration(host=server.url)) as client:
        task = asyncio.create_task(
            kopfapp.run(client, (kinds.POD, gadget), told.on_event, namespaces=(), stop=stop, ready=ready)
        )
        try:
            await until(lambda: bool(server.watching("pods")), "pods are watched")
            cluster.install_crd(later)
            await until(lambda: bool(server.watching("gadgets")), "gadgets are watched")
            create(cluster, gadget, {"metadata": {"name": "g"}})
            await told.hears("Gadget", "ADDED", "g")
        finally:
            stop.set()
            await asyncio.wait_for(task, DEADLINE_S)
