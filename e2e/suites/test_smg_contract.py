"""What this project relies on in smg, pinned: run at every bump of its version.

smg runs as a process on loopback, started by our own launcher, before tiny engines in this process. No cluster. The
limits are generous (a busy machine); figures in brackets are what was measured with smg 1.13.0 on an idle one.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec

from sluice.api.router import RouterState, SidecarConfig, Worker, WorkerList
from sluice.router import launcher

KEY = "contract-test-key"
MODEL = "m"
LIMIT_S = 30.0
POLL_S = 0.05
SETTLE_S = 5.0
"""smg keeps a removed worker as `draining` for this long (`drain_settle_secs`)."""
SERVES_AFTER_SIGTERM_S = 5.0
REREAD_S = 5.0
"""`--discovery-check-interval-secs`: smg also reads the manifest without a change."""

pytestmark = pytest.mark.asyncio(loop_scope="function")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


async def eventually(check: Callable[[], Awaitable[bool]], what: str, limit_s: float = LIMIT_S) -> float:
    """Seconds until the check holds."""
    started = time.monotonic()
    while not await check():
        assert time.monotonic() - started < limit_s, f"not within {limit_s} s: {what}"
        await asyncio.sleep(POLL_S)
    return time.monotonic() - started


async def holds(check: Callable[[], Awaitable[bool]], what: str, for_s: float) -> None:
    """Fail as soon as the check does not hold within the time."""
    started = time.monotonic()
    while time.monotonic() - started < for_s:
        assert await check(), what
        await asyncio.sleep(POLL_S)


@dataclass
class TinyEngine:
    """Answers like a vLLM that serves `MODEL`; its text is its name."""

    name: str
    port: int = field(default_factory=lambda: free_ports(1)[0])
    status: int = 200
    served: int = 0
    headers: list[dict[str, str]] = field(default_factory=list)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    streaming: asyncio.Event = field(default_factory=asyncio.Event)
    cut: bool = False
    _runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def entry(self, name: str | None = None) -> dict[str, str]:
        return {"id": name or self.name, "url": self.url, "worker_type": "regular", "model_id": MODEL}

    async def start(self) -> "TinyEngine":
        app = web.Application()
        app.router.add_get("/health", self._ok)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _ok(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.served += 1
        self.headers.append(dict(request.headers))
        body = await request.json()
        if self.status != 200:
            return web.json_response({"error": {"message": self.name, "code": self.status}}, status=self.status)
        if body.get("stream"):
            return await self._stream(request)
        if body["prompt"] == "hold":
            self.streaming.set()
            await self.release.wait()
        choice = {"index": 0, "text": self.name, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return web.json_response(
            {"id": "1", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice], "usage": usage}
        )

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """One token at once, one when released; or a cut connection instead of the second."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(self._event("first", None))
        self.streaming.set()
        await self.release.wait()
        if self.cut and request.transport is not None:
            request.transport.abort()
            return response
        await response.write(self._event("last", "stop") + b"data: [DONE]\n\n")
        return response

    def _event(self, text: str, finish_reason: str | None) -> bytes:
        choice = {"index": 0, "text": text, "finish_reason": finish_reason}
        chunk = {"id": "1", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]}
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"


@dataclass
class Smg:
    """One smg, started by the launcher, and its two files."""

    run_dir: Path
    session: aiohttp.ClientSession
    policy: str = "RoundRobin"
    options: Sequence[str] = ()
    port: int = 0
    health_port: int = 0
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.port, self.health_port, metrics_port = free_ports(3)
        (self.run_dir / launcher.KEY_FILE).write_text(KEY)
        arguments = ["--policy", self.policy, "--drain-seconds", "20", "--run-dir", str(self.run_dir)]
        places = {"host": "127.0.0.1", "metrics-host": "127.0.0.1", "port": self.port}
        places |= {"health-port": self.health_port, "metrics-port": metrics_port}
        arguments += [str(part) for name, value in places.items() for part in (f"--{name}", value)]
        with (self.run_dir / "smg.log").open("ab") as out:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, launcher.__file__, *arguments, *self.options, stdout=out, stderr=out
            )
        await eventually(self.lives, "smg's liveness")

    async def stop(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    def write(self, text: str) -> None:
        temporary = self.run_dir / "workers.tmp"
        temporary.write_text(text)
        temporary.replace(self.run_dir / launcher.MANIFEST_FILE)

    def list(self, *entries: dict[str, str]) -> None:
        self.write(json.dumps({"version": 1, "workers": entries}))

    async def health(self, path: str) -> int:
        try:
            async with self.session.get(f"http://127.0.0.1:{self.health_port}{path}") as response:
                return response.status
        except aiohttp.ClientError:
            return 0

    async def lives(self) -> bool:
        return await self.health("/liveness") == 200

    async def ready(self) -> bool:
        return await self.health("/readiness") == 200

    async def not_ready(self) -> bool:
        return await self.health("/readiness") == 503

    async def workers(self, **headers: str) -> tuple[int, dict[str, dict[str, Any]]]:
        """Status code, and workers by URL."""
        headers = headers or {"Authorization": f"Bearer {KEY}"}
        async with self.session.get(f"{self.url}/workers", headers=headers) as response:
            body = await response.json(content_type=None) if response.status == 200 else {"workers": []}
            return response.status, {worker["url"]: worker for worker in body["workers"]}

    async def status(self, engine: TinyEngine) -> str | None:
        entry = (await self.workers())[1].get(engine.url)
        return None if entry is None else str(entry["status"])

    def shows(self, engine: TinyEngine, status: str | None) -> Callable[[], Awaitable[bool]]:
        async def check() -> bool:
            return await self.status(engine) == status

        return check

    async def ask(self, prompt: str = "hi", **headers: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
        async with self.session.post(f"{self.url}/v1/completions", json=body, headers=headers) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            return response.status, await response.json(content_type=None), headers

    async def answers_from(self, count: int) -> set[str]:
        """The names of the engines that answered `count` requests; each of them must succeed."""
        names = set()
        for number in range(count):
            status, body, _ = await self.ask(f"request {number}")
            assert status == 200, body
            names.add(body["choices"][0]["text"])
        return names

    async def stream(self) -> tuple[int, str]:
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 4, "stream": True}
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            return response.status, await response.text()


@pytest.fixture
async def engines() -> AsyncIterator[list[TinyEngine]]:
    started = [await TinyEngine(name).start() for name in ("a", "b")]
    yield started
    for engine in started:
        engine.release.set()
        await engine.stop()


@asynccontextmanager
async def running_smg(run_dir: Path, **settings: Any) -> AsyncIterator[Smg]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        smg = Smg(run_dir, session, **settings)
        try:
            await smg.start()
            yield smg
        finally:
            await smg.stop()


@pytest.fixture
async def smg(tmp_path: Path) -> AsyncIterator[Smg]:
    async with running_smg(tmp_path) as smg:
        yield smg


@pytest.fixture
async def served(smg: Smg, engines: list[TinyEngine]) -> Smg:
    """smg with both engines listed and ready."""
    smg.list(*(engine.entry() for engine in engines))
    for engine in engines:
        await eventually(smg.shows(engine, "ready"), "listed engine is ready (0.3 s)")
    return smg


async def test_s062_without_a_manifest_it_lives_is_not_ready_and_answers_404(smg: Smg) -> None:
    assert await smg.lives()
    assert await smg.not_ready()
    status, body, _ = await smg.ask()
    assert (status, body["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("policy", sorted(launcher.POLICIES))
async def test_every_policy_starts_empty_and_follows_a_manifest_that_appears_later(
    policy: str, tmp_path: Path, engines: list[TinyEngine]
) -> None:
    async with running_smg(tmp_path, policy=policy) as smg:
        smg.list(*(engine.entry() for engine in engines))
        await eventually(smg.ready, "manifest that appears is followed (0.4 s)")
        for engine in engines:
            await eventually(smg.shows(engine, "ready"), "listed engine is ready")
        assert await smg.answers_from(4) <= {"a", "b"}


async def test_our_id_comes_back_as_label_and_the_url_unchanged(served: Smg, engines: list[TinyEngine]) -> None:
    _, workers = await served.workers()
    labels = {url: worker["labels"]["smg.ai/discovery-id"] for url, worker in workers.items()}
    assert labels == {engine.url: engine.name for engine in engines}
    assert await served.ready()
    assert await served.answers_from(6) == {"a", "b"}


async def test_s021_removed_worker_gets_no_request_and_its_stream_ends_normally(
    served: Smg, engines: list[TinyEngine]
) -> None:
    a, b = engines
    served.list(a.entry())
    await eventually(served.shows(b, None), "b is gone")
    stream = asyncio.create_task(served.stream())
    await asyncio.wait_for(a.streaming.wait(), LIMIT_S)
    served.list(b.entry())
    await eventually(served.shows(b, "ready"), "b is back")
    await eventually(served.shows(a, "draining"), "removed worker drains (0.2 s)")
    count = a.served
    assert await served.answers_from(10) == {"b"}
    await eventually(served.shows(a, None), f"removed worker is gone ({SETTLE_S} s)")
    assert await served.answers_from(5) == {"b"}
    assert a.served == count
    a.release.set()
    status, text = await asyncio.wait_for(stream, LIMIT_S)
    assert status == 200
    assert "last" in text
    assert text.rstrip().endswith("data: [DONE]")
    assert "error" not in text


BAD_MANIFESTS = {
    "no json": "{",
    "unknown field": '{"version": 1, "workers": [{"id": "a", "url": "http://127.0.0.1:1", "worker_type": "regular", '
    '"model_id": "m", "priority": 3}]}',
    "wrong type": '{"version": 1, "workers": {"a": 1}}',
    "empty file": "",
}


async def test_bad_or_missing_manifest_keeps_the_last_good_list(served: Smg, engines: list[TinyEngine]) -> None:
    async def both_ready() -> bool:
        return [await served.status(engine) for engine in engines] == ["ready", "ready"]

    for what, text in BAD_MANIFESTS.items():
        served.write(text)
        await holds(both_ready, f"the last good list stays: {what}", 1.5)
    (served.run_dir / launcher.MANIFEST_FILE).unlink()
    await holds(both_ready, "the last good list stays: missing file", REREAD_S + 1.5)
    served.list(engines[0].entry())
    await eventually(served.shows(engines[1], None), "a good manifest is followed again")


async def test_s064_empty_list_removes_all_with_503_first_and_404_then(served: Smg, engines: list[TinyEngine]) -> None:
    served.list()
    await eventually(served.not_ready, "readiness without workers")
    status, body, headers = await served.ask()
    assert (status, body["error"]["code"], headers["retry-after"]) == (503, "no_available_workers", "1")
    for engine in engines:
        await eventually(served.shows(engine, None), "all removed")
    status, body, _ = await served.ask()
    assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_removed_worker_that_is_listed_again_while_draining_is_dropped_all_the_same(
    served: Smg, engines: list[TinyEngine]
) -> None:
    """Why the sidecar waits until an address is gone before it lists it again."""
    a, b = engines
    first = (await served.workers())[1][a.url]["id"]
    served.list(b.entry())
    await eventually(served.shows(a, "draining"), "removed worker drains")
    served.list(a.entry(), b.entry())

    async def is_another() -> bool:
        worker = (await served.workers())[1].get(a.url)
        return worker is not None and worker["status"] == "ready" and worker["id"] != first

    assert await eventually(is_another, "dropped, then added as a new worker") > SETTLE_S / 2


async def test_address_that_is_gone_is_listed_again_under_another_id(served: Smg, engines: list[TinyEngine]) -> None:
    a, b = engines
    served.list(b.entry())
    await eventually(served.shows(a, None), "a is gone")
    served.list(a.entry("another"), b.entry())
    await eventually(served.shows(a, "ready"), "the address is back")
    assert (await served.workers())[1][a.url]["labels"]["smg.ai/discovery-id"] == "another"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"X-None": ""}, 401),
        ({"x-api-key": KEY}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": f"Bearer {KEY}"}, 200),
    ],
    ids=["nothing", "x-api-key", "wrong key", "key"],
)
async def test_s106_control_plane_wants_the_key(headers: dict[str, str], expected: int, smg: Smg) -> None:
    assert (await smg.workers(**headers))[0] == expected


async def test_s106_control_plane_writes_are_refused_without_the_key_and_traffic_is_not(
    served: Smg, engines: list[TinyEngine]
) -> None:
    entry = {"url": "http://127.0.0.1:9", "worker_type": "regular"}
    async with served.session.post(f"{served.url}/workers", json=entry) as response:
        assert response.status == 401
    uuid = (await served.workers())[1][engines[0].url]["id"]
    async with served.session.delete(f"{served.url}/workers/{uuid}") as response:
        assert response.status == 401
    status, _, _ = await served.ask(Authorization="Bearer client-key")
    assert status == 200
    seen = [headers for engine in engines for headers in engine.headers]
    assert any(headers.get("Authorization") == "Bearer client-key" for headers in seen), "passed on to the engine"


async def test_worker_deleted_by_api_comes_back_while_it_is_listed(served: Smg, engines: list[TinyEngine]) -> None:
    a = engines[0]
    uuid = (await served.workers())[1][a.url]["id"]
    async with served.session.delete(
        f"{served.url}/workers/{uuid}", headers={"Authorization": f"Bearer {KEY}"}
    ) as response:
        assert response.status == 202

    async def is_back() -> bool:
        worker = (await served.workers())[1].get(a.url)
        return worker is not None and worker["status"] == "ready" and worker["id"] != uuid

    await eventually(is_back, "the listed worker is added again")


async def test_s061_dead_worker_costs_no_plain_request(served: Smg, engines: list[TinyEngine]) -> None:
    await engines[0].stop()
    assert await served.answers_from(20) == {"b"}
    await eventually(served.shows(engines[0], "not_ready"), "dead worker is seen (2 probes)")
    await engines[0].start()
    await eventually(served.shows(engines[0], "ready"), "it is back (2-5 s)")

    async def serves_again() -> bool:
        return "a" in await served.answers_from(4)

    await eventually(serves_again, "it gets requests again")


@pytest.mark.parametrize("status", [429, 500, 502, 503])
async def test_failing_answer_is_repeated_elsewhere(status: int, served: Smg, engines: list[TinyEngine]) -> None:
    engines[0].status = status
    assert await served.answers_from(10) == {"b"}
    assert engines[0].served > 0


async def test_bad_request_is_passed_through(served: Smg, engines: list[TinyEngine]) -> None:
    for engine in engines:
        engine.status = 400
    status, _, _ = await served.ask()
    assert status == 400
    assert sum(engine.served for engine in engines) == 1


async def test_dead_address_in_the_list_does_not_delay_others_and_joins_later(
    smg: Smg, engines: list[TinyEngine]
) -> None:
    late = TinyEngine("late")
    smg.list(late.entry(), engines[0].entry())
    await eventually(smg.shows(engines[0], "ready"), "the living worker is ready")
    assert await smg.answers_from(5) == {"a"}
    await late.start()
    try:
        await eventually(smg.shows(late, "ready"), "the late worker joins (2 s)")
    finally:
        await late.stop()


async def test_worker_that_dies_in_a_stream_gives_an_error_event_with_200(smg: Smg, engines: list[TinyEngine]) -> None:
    """Clients and tests must look for the event: the status says nothing."""
    a = engines[0]
    smg.list(a.entry())
    await eventually(smg.shows(a, "ready"), "a is ready")
    a.cut = True
    stream = asyncio.create_task(smg.stream())
    await asyncio.wait_for(a.streaming.wait(), LIMIT_S)
    a.release.set()
    status, text = await asyncio.wait_for(stream, LIMIT_S)
    assert status == 200
    assert "first" in text
    assert "last" not in text
    assert "error" in text
    assert text.rstrip().endswith("data: [DONE]")


async def test_s063_sigterm_unreadies_serves_on_and_lets_streams_finish(served: Smg, engines: list[TinyEngine]) -> None:
    stream = asyncio.create_task(served.stream())
    streaming = [asyncio.create_task(engine.streaming.wait()) for engine in engines]
    await asyncio.wait(streaming, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
    for task in streaming:
        task.cancel()
    assert served.process is not None
    served.process.send_signal(signal.SIGTERM)
    terminated_at = time.monotonic()
    await eventually(served.not_ready, "readiness 503 after SIGTERM", SERVES_AFTER_SIGTERM_S)
    assert await served.answers_from(3) <= {"a", "b"}

    async def refuses() -> bool:
        try:
            await served.ask()
        except aiohttp.ClientError:
            return True
        return False

    await eventually(refuses, "the port closes")
    assert time.monotonic() - terminated_at > SERVES_AFTER_SIGTERM_S / 2, "endpoints have time to leave"
    assert served.process.returncode is None, "waits for its stream"
    for engine in engines:
        engine.release.set()
    status, text = await asyncio.wait_for(stream, LIMIT_S)
    assert status == 200
    assert "last" in text
    assert await asyncio.wait_for(served.process.wait(), LIMIT_S) == 0


async def test_s099_killed_smg_finds_its_list_by_itself(served: Smg, engines: list[TinyEngine]) -> None:
    await served.stop()
    await served.start()
    for engine in engines:
        await eventually(served.shows(engine, "ready"), "restarted router has its workers (0.3 s)")
    assert await served.answers_from(6) == {"a", "b"}


async def test_full_queue_is_429_with_retry_after(tmp_path: Path, engines: list[TinyEngine]) -> None:
    options = ["--max-concurrent-requests", "1", "--queue-size", "1", "--queue-timeout-seconds", "20"]
    async with running_smg(tmp_path, options=options) as smg:
        a = engines[0]
        smg.list(a.entry())
        await eventually(smg.shows(a, "ready"), "a is ready")
        held = [asyncio.create_task(smg.ask("hold")) for _ in range(2)]
        await asyncio.wait_for(a.streaming.wait(), LIMIT_S)

        async def is_full() -> bool:
            status, _, headers = await smg.ask()
            return status == 429 and "retry-after" in headers

        await eventually(is_full, "the third request is refused")
        a.release.set()
        assert [(await asyncio.wait_for(task, LIMIT_S))[0] for task in held] == [200, 200]


async def test_breaker_closes_soon_after_a_worker_recovers(served: Smg, engines: list[TinyEngine]) -> None:
    engines[0].status = 500
    assert await served.answers_from(20) == {"b"}
    engines[0].status = 200

    async def serves_again() -> bool:
        return "a" in await served.answers_from(2)

    await eventually(serves_again, "a recovered worker gets requests again (6 s)")


SIGNING_KEY = ec.generate_private_key(ec.SECP256R1())


@dataclass
class Sidecar:
    """Our sidecar as the other container of smg's pod; its agents are silent, which changes nothing."""

    smg: Smg
    port: int = field(default_factory=lambda: free_ports(1)[0])
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        keys = self.smg.run_dir / "jwks.json"
        jwk = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(SIGNING_KEY.public_key()))
        keys.write_text(json.dumps({"keys": [{**jwk, "kid": "k"}]}))
        config = SidecarConfig(
            service="ns/chat",
            operator_subject="operator",
            run_dir=str(self.smg.run_dir),
            keys_file=str(keys),
            host="127.0.0.1",
            port=self.port,
            smg_url=self.smg.url,
            smg_health_url=f"http://127.0.0.1:{self.smg.health_port}",
        )
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "from sluice.router.main import main; main()",
            env={**os.environ, "SLUICE_ROUTER_CONFIG": config.model_dump_json(by_alias=True)},
        )

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    async def put(self, *engines: TinyEngine) -> None:
        workers = [
            Worker(id=e.name, url=e.url, agent_url="http://127.0.0.1:1", engine_id="run", model=MODEL) for e in engines
        ]
        wanted = WorkerList(generation="-".join(e.name for e in engines), workers=workers)
        claims = {"sub": "operator", "aud": "sluice-router", "exp": time.time() + 60}
        token = jwt.encode(claims, SIGNING_KEY, algorithm="ES256", headers={"kid": "k"})
        async with self.smg.session.put(
            f"http://127.0.0.1:{self.port}/workers",
            data=wanted.model_dump_json(by_alias=True),
            headers={"Authorization": f"Bearer {token}"},
        ) as response:
            assert response.status == 200, await response.text()

    async def is_ready(self) -> bool:
        try:
            async with self.smg.session.get(f"http://127.0.0.1:{self.port}/ready") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    def shows(self, **expected: str) -> Callable[[], Awaitable[bool]]:
        async def check() -> bool:
            async with self.smg.session.get(f"http://127.0.0.1:{self.port}/workers") as response:
                state = RouterState.model_validate_json(await response.read())
            return {worker.id: str(worker.status) for worker in state.workers} == expected

        return check

    async def listens(self) -> bool:
        try:
            async with self.smg.session.get(f"http://127.0.0.1:{self.port}/healthz") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False


async def test_s099_router_pod_keeps_its_workers_when_either_container_is_killed(
    smg: Smg, engines: list[TinyEngine]
) -> None:
    a, b = engines
    sidecar = Sidecar(smg)
    await sidecar.start()
    try:
        await eventually(sidecar.listens, "the sidecar listens")
        assert not await sidecar.is_ready()
        await sidecar.put(a, b)
        await eventually(sidecar.shows(a="ready", b="ready"), "both are routed")
        await eventually(sidecar.is_ready, "the pod is ready")
        await sidecar.put(a)
        await eventually(sidecar.shows(a="ready", b="draining"), "the ghost is told while it is there")
        await sidecar.put(a, b)
        await eventually(sidecar.shows(a="ready", b="ready"), "the returning worker waited for its address")
        await sidecar.kill()
        await sidecar.start()
        await eventually(sidecar.is_ready, "a restarted sidecar has its list")
        await sidecar.kill()
        await smg.stop()
        await smg.start()
        await eventually(smg.shows(b, "ready"), "a restarted smg reads the list without the sidecar")
        assert await smg.answers_from(6) == {"a", "b"}
    finally:
        await sidecar.kill()
