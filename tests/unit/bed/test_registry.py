"""The bed's registry, asked as containerd asks it."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.bed.oci import MANIFEST, File, ImageStore
from e2e.bed.registry import Registry

TIMEOUT_S = 10


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    store = ImageStore(tmp_path)
    store.image("app:1", [store.layer({"data": File(b"x" * 300_000)})])
    return store


@pytest.fixture
def registry(store: ImageStore) -> Iterator[Registry]:
    registry = Registry(store, socket.create_server(("127.0.0.1", 0)))
    yield registry
    registry.close()


def ask(registry: Registry, path: str, method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", registry.port, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return Answer(response.status, dict(response.headers), response.read())
    finally:
        connection.close()


def test_a_pull_as_containerd_does_it_gets_everything_and_counts_once(registry: Registry, store: ImageStore) -> None:
    head = ask(registry, "/v2/library/app/manifests/1?ns=docker.io", "HEAD")
    digest = head.headers["Docker-Content-Digest"]
    assert (head.status, head.headers["Content-Type"], head.body) == (200, MANIFEST, b"")

    manifest = ask(registry, f"/v2/library/app/manifests/{digest}?ns=docker.io")
    assert int(head.headers["Content-Length"]) == len(manifest.body)
    for blob in [json.loads(manifest.body)["config"], *json.loads(manifest.body)["layers"]]:
        answer = ask(registry, f"/v2/library/app/blobs/{blob['digest']}?ns=docker.io")
        assert (answer.status, len(answer.body)) == (200, blob["size"])
        assert answer.body == store.blob(blob["digest"]).read_bytes()
    assert registry.pulls("app:1") == 1
    assert registry.pulls("app:2") == 0


def test_without_a_mirrored_host_the_registry_answers_for_its_own_address(
    registry: Registry, store: ImageStore
) -> None:
    store.tag("10.90.0.1:5000/mine:1", "app:1")
    assert ask(registry, "/v2/mine/manifests/1", Host="10.90.0.1:5000").status == 200
    assert ask(registry, "/v2/mine/manifests/1", Host="10.90.0.2:5000").status == 404


def test_an_image_added_later_is_served_at_once(registry: Registry, store: ImageStore) -> None:
    path = "/v2/team/late/manifests/1?ns=registry.example"
    missing = ask(registry, path)
    assert missing.status == 404
    assert json.loads(missing.body)["errors"][0]["code"] == "MANIFEST_UNKNOWN"
    store.tag("registry.example/team/late:1", "app:1")
    assert ask(registry, path).status == 200


def test_a_failing_name_fails_until_it_is_restored_and_others_do_not(registry: Registry, store: ImageStore) -> None:
    store.tag("app:2", "app:1")
    registry.fail("app:1")
    assert ask(registry, "/v2/library/app/manifests/1?ns=docker.io", "HEAD").status == 503
    assert ask(registry, "/v2/library/app/manifests/2?ns=docker.io", "HEAD").status == 200
    registry.fail("app:1", 401)
    assert ask(registry, "/v2/library/app/manifests/1?ns=docker.io", "HEAD").status == 401
    registry.restore("app:1")
    assert ask(registry, "/v2/library/app/manifests/1?ns=docker.io", "HEAD").status == 200
    assert registry.pulls("app:1") == 3


def test_a_delayed_name_answers_as_soon_as_the_delay_is_lifted(registry: Registry) -> None:
    registry.delay("app:1", 3600)
    answers: list[Answer] = []
    waiting = threading.Thread(
        target=lambda: answers.append(ask(registry, "/v2/library/app/manifests/1?ns=docker.io", "HEAD"))
    )
    waiting.start()
    deadline = time.monotonic() + TIMEOUT_S
    while not registry.pulls("app:1"):
        assert time.monotonic() < deadline
    assert ask(registry, "/v2/").status == 200  # others are served meanwhile
    assert answers == []
    registry.delay("app:1", 0)
    waiting.join(TIMEOUT_S)
    assert [answer.status for answer in answers] == [200]


def test_a_manifest_inside_an_index_is_found_by_its_digest(registry: Registry, store: ImageStore) -> None:
    inner = store.resolve("app:1")
    assert inner is not None
    store.forget("app:1")
    answer = ask(registry, f"/v2/library/app/manifests/{inner.digest}?ns=docker.io")
    assert (answer.status, answer.headers["Content-Type"]) == (200, MANIFEST)


@pytest.mark.parametrize(
    "path",
    [
        "/v2/library/app/blobs/sha256:0000",
        "/v2/library/app/blobs/..%2f..%2foci-layout",
        "/v2/library/app/blobs/sha256:" + "0" * 64,
        "/v2/library/app/tags/list",
        "/etc/passwd",
    ],
)
def test_what_is_not_there_is_not_found(registry: Registry, path: str) -> None:
    assert ask(registry, path).status == 404


def test_it_can_not_be_written_to(registry: Registry) -> None:
    assert ask(registry, "/v2/library/app/manifests/1", "PUT").status == 501


def test_after_close_nothing_answers_not_even_an_open_connection(store: ImageStore) -> None:
    registry = Registry(store, socket.create_server(("127.0.0.1", 0)))
    port = registry.port
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.request("GET", "/v2/")
    connection.getresponse().read()
    registry.close()
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        connection.request("GET", "/v2/")
        connection.getresponse()
    connection.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
