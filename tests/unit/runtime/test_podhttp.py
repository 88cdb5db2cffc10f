"""What answers at a pod's address is not trusted; on a real socket of the loopback interface."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from pydantic import ValidationError

from sluice.api import names
from sluice.api.agent import MAX_STATE_BYTES, AgentState
from sluice.api.router import WorkerList
from sluice.plan.actions import ObjectRef
from sluice.runtime import routers
from sluice.runtime.executor import RouterUnreachable
from sluice.runtime.observer import Follower
from sluice.runtime.podhttp import PodHttp, PodUnreachable, Rejected, pod_url
from sluice.runtime.routers import Routers, Sender, Token
from tests.unit.runtime.builders import FakeClock


class Peer:
    """A server on a free port; what it was asked is in `seen`."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str | None]] = []
        self.status, self.text, self.headers = 200, "{}", {"Content-Type": "application/json"}
        self.good_token: str | None = None
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.append((request.method, request.path, request.headers.get("Authorization")))
        if self.good_token and request.headers.get("Authorization") != f"Bearer {self.good_token}":
            return web.Response(status=401)
        return web.Response(status=self.status, text=self.text, headers=self.headers)


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    made = Peer()
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", made.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


@pytest.fixture
async def http() -> AsyncIterator[PodHttp]:
    made = PodHttp()
    yield made
    await made.close()


async def test_answer_within_the_limit_is_read_whole(peer: Peer, http: PodHttp) -> None:
    peer.text = "x" * 70_000
    assert await http.call("GET", f"{peer.url}/state", timeout_s=2, max_bytes=70_000) == b"x" * 70_000


async def test_answer_over_the_limit_is_refused(peer: Peer, http: PodHttp) -> None:
    peer.text = "x" * 1001
    with pytest.raises(PodUnreachable, match="over 1000 bytes"):
        await http.call("GET", f"{peer.url}/state", timeout_s=2, max_bytes=1000)


async def test_redirect_is_not_followed(peer: Peer, http: PodHttp) -> None:
    peer.status, peer.headers = 302, {"Location": f"{peer.url}/elsewhere"}
    with pytest.raises(Rejected, match="HTTP 302"):
        await http.call("GET", f"{peer.url}/state", timeout_s=2, max_bytes=1000)
    assert len(peer.seen) == 1


async def test_nobody_there_is_unreachable(http: PodHttp) -> None:
    with pytest.raises(PodUnreachable):
        await http.call("GET", "http://127.0.0.1:1/state", timeout_s=2, max_bytes=1000)


@pytest.mark.parametrize("ip", ["169.254.169.254", "fe80::1", "224.0.0.1", "0.0.0.0", "metadata.google.internal", ""])
def test_address_that_no_pod_has_is_never_asked(ip: str) -> None:
    with pytest.raises(PodUnreachable):
        pod_url(ip, 9900, "/state")


@pytest.mark.parametrize(
    ("ip", "url"), [("10.0.0.7", "http://10.0.0.7:9900/state"), ("fd00::7", "http://[fd00::7]:9900/state")]
)
def test_url_of_a_pod(ip: str, url: str) -> None:
    assert pod_url(ip, 9900, "/state") == url


# Routers


STATE = '{"generation":"g1","open":true,"smgReachable":true,"workers":[]}'
ROUTER = ObjectRef("Pod", "t", "r", "uid-r")


@pytest.fixture
def sidecar(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> Peer:
    """The peer stands at the sidecar's address and port."""
    monkeypatch.setattr(names, "PORT_SIDECAR", int(peer.url.rsplit(":", 1)[1]))
    peer.text = STATE
    return peer


def a_sender(http: PodHttp, token_file: Path) -> Sender:
    source = Routers(http, Token(token_file))
    return Sender(source, Follower(source, lambda _: None))


async def test_list_goes_out_with_the_token_and_reading_goes_without(
    sidecar: Peer, http: PodHttp, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    await a_sender(http, token).put(ROUTER, "127.0.0.1", WorkerList(generation="g1"))
    await Routers(http, Token(token)).call("GET", "127.0.0.1")
    assert sidecar.seen == [("PUT", "/workers", "Bearer secret"), ("GET", "/workers", None)]


async def test_rotated_token_is_read_again_after_a_401(sidecar: Peer, http: PodHttp, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old")
    sidecar.good_token = "old"
    sender = a_sender(http, token)
    await sender.put(ROUTER, "127.0.0.1", WorkerList(generation="g1"))
    token.write_text("new")
    sidecar.good_token = "new"
    await sender.put(ROUTER, "127.0.0.1", WorkerList(generation="g1"))
    assert [seen[2] for seen in sidecar.seen] == ["Bearer old", "Bearer old", "Bearer new"]


def test_token_is_read_again_every_half_minute(tmp_path: Path) -> None:
    clock, path = FakeClock(), tmp_path / "token"
    path.write_text("old")
    token = Token(path, clock=clock)
    assert token.value() == "old"
    path.write_text("new")
    assert token.value() == "old"
    clock.advance(routers.TOKEN_PERIOD_S + 1)
    assert token.value() == "new"


@pytest.mark.parametrize(
    ("status", "text", "says"),
    [
        (503, "no keys yet", "HTTP 503: no keys yet"),
        (200, "{}", "not a router's state"),
        (200, STATE.replace("g1", "g0"), "answers a PUT of list g1 with list g0"),
    ],
)
async def test_router_that_does_not_take_the_list_is_named_with_the_cause(
    sidecar: Peer, http: PodHttp, tmp_path: Path, status: int, text: str, says: str
) -> None:
    (tmp_path / "token").write_text("secret")
    sidecar.status, sidecar.text = status, text
    with pytest.raises(RouterUnreachable, match=says) as error:
        await a_sender(http, tmp_path / "token").put(ROUTER, "127.0.0.1", WorkerList(generation="g1"))
    assert "router t/r" in str(error.value)


async def test_missing_token_file_is_named(http: PodHttp, tmp_path: Path) -> None:
    with pytest.raises(RouterUnreachable, match=str(tmp_path / "absent")):
        await a_sender(http, tmp_path / "absent").put(ROUTER, "127.0.0.1", WorkerList(generation="g1"))


NOISE = {
    "nothing": b"",
    "zeros": b"\x00" * 100,
    "unknown version": b"HTTP/9.9 abc\r\n\r\n",
    "negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
    "huge length": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\nx",
    "broken chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\nfoo",
    "negative chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\nfoo\r\n0\r\n\r\n",
    "long header": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 50_000 + b"\r\n",
    "redirect to nowhere": b"HTTP/1.1 302 Found\r\nLocation: http://[::bad\r\nContent-Length: 0\r\n\r\n",
    "broken gzip": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
    "broken charset": b"HTTP/1.1 200 OK\r\nContent-Type: a/b; charset=\xff\r\nContent-Length: 2\r\n\r\n{}",
    "broken cookie": b"HTTP/1.1 200 OK\r\nSet-Cookie: \xff=;;;=\r\nContent-Length: 4\r\n\r\n\xff\xfe[[",
    "upgrade": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n",
    "endless continue": b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
    "body without content": b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\nhello",
    "status 0": b"HTTP/1.1 000 \r\n\r\n",
    "status 999": b"HTTP/1.1 999 \xff\r\n\r\n",
    "deep JSON": b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 60_000,
}


@pytest.mark.parametrize("noise", NOISE)
async def test_noise_at_a_pods_address_is_an_unreachable_pod_or_no_state_and_nothing_worse(
    noise: str, http: PodHttp
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(NOISE[noise])
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/state"
    try:
        data = await http.call("GET", url, timeout_s=2, max_bytes=MAX_STATE_BYTES)
    except PodUnreachable:
        return
    finally:
        server.close()
    with pytest.raises(ValidationError):
        AgentState.model_validate_json(data)
