"""The sidecar as a process on loopback, beside a stand-in for smg that follows its manifest: what operator, siblings,
agents and probes bring about. The real smg is pinned by `e2e/suites/test_smg_contract.py`."""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import rsa

from sluice.api.agent import AgentState, EnginePhase
from sluice.api.router import RouterState, SidecarConfig, Worker, WorkerList, WorkerStatus

DEADLINE_S = 10.0
SETTLE_S = 0.6
OPERATOR = "system:serviceaccount:sluice-system:sluice-operator"
SIGNING_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def eventually(check: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await check():  # noqa: ASYNC110 (another process: there is no event to wait for)
            await asyncio.sleep(0.03)


@asynccontextmanager
async def serving(app: web.Application, port: int) -> AsyncIterator[None]:
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield
    finally:
        await runner.cleanup()


def a_token(subject: str = OPERATOR) -> str:
    claims = {"sub": subject, "aud": ["sluice-router"], "exp": time.time() + 600}
    return jwt.encode(claims, SIGNING_KEY, algorithm="RS256", headers={"kid": "one"})


@dataclass
class Smg:
    """Follows the manifest like smg: a removed worker drains for the settle time, whatever is listed meanwhile."""

    run_dir: Path
    port: int = field(default_factory=free_port)
    pending: set[str] = field(default_factory=set)
    """Instances whose health check has not passed."""
    draining: dict[str, tuple[str, float]] = field(default_factory=dict)
    workers: dict[str, str] = field(default_factory=dict)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/workers", self._list)
        app.router.add_get("/readiness", self._readiness)
        return app

    def follow(self) -> None:
        path = self.run_dir / "workers.json"
        entries = json.loads(path.read_text())["workers"] if path.exists() else []
        listed = {entry["url"]: entry["id"] for entry in entries}
        now = time.monotonic()
        self.draining = {url: (name, end) for url, (name, end) in self.draining.items() if end > now}
        for url, name in self.workers.items():
            if listed.get(url) != name and url not in self.draining:
                self.draining[url] = (name, now + SETTLE_S)
        self.workers = {url: name for url, name in listed.items() if url not in self.draining}

    async def _list(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {(self.run_dir / 'admin-key').read_text()}":
            return web.Response(status=401)
        self.follow()
        told = [self._worker(url, n, "pending" if n in self.pending else "ready") for url, n in self.workers.items()]
        told += [self._worker(url, name, "draining") for url, (name, _) in self.draining.items()]
        return web.json_response({"workers": told, "total": len(told)})

    def _worker(self, url: str, name: str, status: str) -> dict[str, Any]:
        return {"id": "uuid", "url": url, "status": status, "labels": {"smg.ai/discovery-id": name}}

    async def _readiness(self, _: web.Request) -> web.Response:
        self.follow()
        return web.Response(status=200 if set(self.workers.values()) - self.pending else 503)


@dataclass
class Agent:
    """Plays an agent: says what it is told to say."""

    name: str
    port: int = field(default_factory=free_port)
    phase: EnginePhase = EnginePhase.READY
    engine_id: str = "run-1"
    seq: int = 1
    asked: int = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/state", self._state)
        return app

    def say(self, phase: EnginePhase, engine_id: str = "run-1") -> None:
        self.phase, self.engine_id, self.seq = phase, engine_id, self.seq + 1

    async def _state(self, _: web.Request) -> web.Response:
        self.asked += 1
        state = AgentState(
            seq=self.seq,
            instance=self.name,
            engine="vLLM",
            engine_id=self.engine_id,
            phase=self.phase,
            phase_since=0.0,
            started_at=0.0,
        )
        return web.Response(text=state.model_dump_json(by_alias=True), content_type="application/json")

    def worker(self) -> Worker:
        return Worker(
            id=self.name,
            url=f"http://10.0.0.{self.port % 250}:8000",
            agent_url=f"http://127.0.0.1:{self.port}",
            engine_id="run-1",
            model="m",
        )


@dataclass
class SidecarProcess:
    config: SidecarConfig
    session: aiohttp.ClientSession
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        env = {**os.environ, "SLUICE_ROUTER_CONFIG": self.config.model_dump_json(by_alias=True)}
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "from sluice.router.main import main; main()", env=env
        )
        await eventually(self._listens)

    async def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), 5)

    def url(self, path: str) -> str:
        return f"http://{self.config.host}:{self.config.port}{path}"

    async def _listens(self) -> bool:
        try:
            return await self.status("/healthz") == 200
        except aiohttp.ClientConnectorError:
            return False

    async def status(self, path: str) -> int:
        async with self.session.get(self.url(path)) as response:
            return response.status

    async def state(self) -> RouterState:
        async with self.session.get(self.url("/workers")) as response:
            assert response.status == 200
            return RouterState.model_validate_json(await response.read())

    async def put_raw(self, body: str, token: str | None) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with self.session.put(self.url("/workers"), data=body, headers=headers) as response:
            return response.status, await response.text()

    async def put(self, *workers: Worker, generation: str = "g1", is_open: bool = True) -> RouterState:
        wanted = WorkerList(generation=generation, workers=list(workers), open=is_open)
        status, text = await self.put_raw(wanted.model_dump_json(by_alias=True), a_token())
        assert status == 200, text
        return RouterState.model_validate_json(text)

    async def is_ready(self) -> bool:
        return await self.status("/ready") == 200

    def shows(self, **expected: str) -> Callable[[], Awaitable[bool]]:
        """Whether smg's workers are exactly these."""

        async def check() -> bool:
            return {worker.id: str(worker.status) for worker in (await self.state()).workers} == expected

        return check


@dataclass
class Pod:
    sidecar: SidecarProcess
    smg: Smg
    a: Agent
    b: Agent


@asynccontextmanager
async def running_pod(directory: Path, **config: Any) -> AsyncIterator[Pod]:
    run_dir = directory / "run"
    run_dir.mkdir(parents=True, exist_ok=True)
    keys = directory / "jwks.json"
    jwk = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(SIGNING_KEY.public_key()))
    keys.write_text(json.dumps({"keys": [{**jwk, "kid": "one"}]}))
    smg, a, b = Smg(run_dir), Agent("a"), Agent("b")
    settings = {
        "service": "ns/chat",
        "operator_subject": OPERATOR,
        "run_dir": str(run_dir),
        "keys_file": str(keys),
        "host": "127.0.0.1",
        "port": free_port(),
        "smg_url": f"http://127.0.0.1:{smg.port}",
        "smg_health_url": f"http://127.0.0.1:{smg.port}",
    }
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        for app, port in ((smg.app(), smg.port), (a.app(), a.port), (b.app(), b.port)):
            await stack.enter_async_context(serving(app, port))
        sidecar = SidecarProcess(SidecarConfig.model_validate({**settings, **config}), session)
        try:
            await sidecar.start()
            yield Pod(sidecar, smg, a, b)
        finally:
            await sidecar.stop(signal.SIGKILL)


@pytest.fixture
async def pod(tmp_path: Path) -> AsyncIterator[Pod]:
    async with running_pod(tmp_path) as pod:
        yield pod


async def test_s064_not_ready_before_a_list_nor_with_an_empty_or_closed_one(pod: Pod) -> None:
    sidecar = pod.sidecar
    state = await sidecar.state()
    assert (state.generation, state.smg_reachable, state.workers, state.wanted) == (None, True, [], None)
    assert not await sidecar.is_ready()
    assert not (pod.smg.run_dir / "workers.json").exists(), "no list is not an empty list"
    await sidecar.put(generation="none")
    assert not await sidecar.is_ready(), "without a worker smg answers a final 404"
    await sidecar.put(pod.a.worker(), pod.b.worker())
    await eventually(sidecar.shows(a="ready", b="ready"))
    assert await sidecar.is_ready()
    await sidecar.put(pod.a.worker(), pod.b.worker(), generation="closed", is_open=False)
    assert not await sidecar.is_ready()
    assert await sidecar.shows(a="ready", b="ready")(), "a closed router still finishes what it has"


async def test_put_tells_what_smg_has_and_the_key_is_private(pod: Pod) -> None:
    state = await pod.sidecar.put(pod.a.worker())
    assert (state.generation, state.wanted) == ("g1", WorkerList(generation="g1", workers=[pod.a.worker()]))
    assert state.workers[0].engine_id == "run-1"
    assert (pod.smg.run_dir / "admin-key").stat().st_mode & 0o077 == 0


async def test_only_the_operator_may_put_and_a_bad_list_changes_nothing(pod: Pod) -> None:
    sidecar = pod.sidecar
    await sidecar.put(pod.a.worker())
    good = WorkerList(generation="g2").model_dump_json(by_alias=True)
    twice = WorkerList(generation="g2", workers=[pod.a.worker()] * 2).model_dump_json(by_alias=True)
    assert (await sidecar.put_raw(good, None))[0] == 401
    assert (await sidecar.put_raw(good, a_token("system:serviceaccount:default:default")))[0] == 403
    assert (await sidecar.put_raw("{", a_token()))[0] == 400
    status, text = await sidecar.put_raw(twice, a_token())
    assert status == 400
    assert "'a'" in text
    state = await sidecar.state()
    assert state.generation == "g1"
    async with sidecar.session.get(sidecar.url("/metrics")) as response:
        page = await response.text()
    assert 'sluice_router_puts_total{code="401",service="ns/chat"} 1.0' in page


@pytest.mark.parametrize("phase", [EnginePhase.SUSPECT, EnginePhase.HUNG, EnginePhase.DRAINING])
async def test_s060_worker_whose_agent_speaks_against_it_leaves_and_comes_back(pod: Pod, phase: EnginePhase) -> None:
    await pod.sidecar.put(pod.a.worker(), pod.b.worker())
    await eventually(pod.sidecar.shows(a="ready", b="ready"))
    pod.a.say(phase)
    await eventually(pod.sidecar.shows(a="withheld", b="ready"))
    assert (await pod.sidecar.state()).workers[0].reason == str(phase)
    pod.a.say(EnginePhase.READY)
    await eventually(pod.sidecar.shows(a="ready", b="ready"))


async def test_restarted_engine_is_left_out_until_the_operator_lists_the_new_run(pod: Pod) -> None:
    await pod.sidecar.put(pod.a.worker())
    await eventually(pod.sidecar.shows(a="ready"))
    pod.a.say(EnginePhase.READY, "run-2")
    await eventually(pod.sidecar.shows(a="withheld"))
    assert not await pod.sidecar.is_ready()
    await pod.sidecar.put(pod.a.worker().model_copy(update={"engine_id": "run-2"}), generation="g2")
    await eventually(pod.sidecar.shows(a="ready"))


async def test_silent_agent_changes_nothing(pod: Pod) -> None:
    silent = pod.a.worker().model_copy(update={"agent_url": f"http://127.0.0.1:{free_port()}"})
    await pod.sidecar.put(silent)
    await eventually(pod.sidecar.shows(a="ready"))


async def test_s094_worker_behind_a_cut_link_leaves_within_seconds_and_comes_back(pod: Pod) -> None:
    """Neither agent nor engine of `c` can be reached; then its engine's port opens again."""
    engine_port = free_port()
    cut = Agent("c").worker().model_copy(update={"url": f"http://127.0.0.1:{engine_port}"})
    await pod.sidecar.put(cut)
    await eventually(pod.sidecar.shows(c="ready"))
    await pod.sidecar.put(cut, pod.a.worker(), generation="g2")
    await eventually(pod.sidecar.shows(c="withheld", a="ready"))
    assert (await pod.sidecar.state()).workers[0].reason.startswith("Unreachable")
    async with serving(web.Application(), engine_port):
        await eventually(pod.sidecar.shows(c="ready", a="ready"))


async def test_a_router_that_reaches_nobody_keeps_all_workers(pod: Pod) -> None:
    lost = [Agent(name).worker().model_copy(update={"url": f"http://127.0.0.1:{free_port()}"}) for name in ("c", "d")]
    await pod.sidecar.put(*lost)
    await eventually(pod.sidecar.shows(c="ready", d="ready"))
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(20):  # two rounds of its watch
            assert await pod.sidecar.shows(c="ready", d="ready")()
            await asyncio.sleep(0.1)


async def test_the_last_ready_worker_leaves_only_when_a_wanted_one_is_ready(pod: Pod) -> None:
    """A router that became Ready by its old worker alone, when that one is about to leave."""
    pod.smg.pending.add("b")
    await pod.sidecar.put(pod.a.worker(), pod.b.worker())
    await eventually(pod.sidecar.shows(a="ready", b="pending"))
    await pod.sidecar.put(pod.b.worker(), generation="g2")
    asked = pod.a.asked

    async def is_polled_on() -> bool:
        assert await pod.sidecar.is_ready()
        assert await pod.sidecar.shows(a="ready", b="pending")()
        return pod.a.asked > asked + 2

    await eventually(is_polled_on)
    pod.smg.pending.clear()
    await eventually(pod.sidecar.shows(a="draining", b="ready"))


async def test_reused_address_goes_to_the_new_instance_only_after_the_old_is_gone(pod: Pod) -> None:
    await pod.sidecar.put(pod.a.worker())
    await eventually(pod.sidecar.shows(a="ready"))
    heir = pod.b.worker().model_copy(update={"url": pod.a.worker().url})
    state = await pod.sidecar.put(heir, generation="g2")
    assert {(w.id, w.engine_id, str(w.status)) for w in state.workers} == {
        ("b", "run-1", "absent"),
        ("a", None, "draining"),
    }
    await eventually(pod.sidecar.shows(b="ready"))


async def test_s099_killed_sidecar_finds_its_list_and_keeps_smgs_key(pod: Pod) -> None:
    await pod.sidecar.put(pod.a.worker(), pod.b.worker())
    await eventually(pod.sidecar.shows(a="ready", b="ready"))
    key = (pod.smg.run_dir / "admin-key").read_text()
    await pod.sidecar.stop(signal.SIGKILL)
    await pod.sidecar.start()
    assert (await pod.sidecar.state()).generation == "g1"
    await eventually(pod.sidecar.is_ready)
    assert await pod.sidecar.shows(a="ready", b="ready")()
    assert (pod.smg.run_dir / "admin-key").read_text() == key


async def test_s099_new_router_takes_the_list_of_a_sibling_while_the_operator_is_away(pod: Pod, tmp_path: Path) -> None:
    await pod.sidecar.put(pod.a.worker())
    # Siblings share the port and differ in their address, as pods do.
    settings = {"host": "127.0.0.2", "port": pod.sidecar.config.port, "sibling_host": "127.0.0.1"}
    async with running_pod(tmp_path / "new", **settings) as new:
        await eventually(new.sidecar.is_ready)
        state = await new.sidecar.state()
        assert state.generation == "g1"
        assert [(w.id, w.status) for w in state.workers] == [("a", WorkerStatus.READY)]


async def test_sigterm_ends_it_soon(pod: Pod) -> None:
    await pod.sidecar.put(pod.a.worker())
    started = time.monotonic()
    assert await pod.sidecar.stop() == 0
    assert time.monotonic() - started < 2


async def test_wrong_configuration_names_the_variable_and_exits() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from sluice.router.main import main; main()",
        env={**os.environ, "SLUICE_ROUTER_CONFIG": "{}"},
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == 2
    assert b"SLUICE_ROUTER_CONFIG" in stderr
    assert b"operatorSubject" in stderr


async def test_a_volume_that_cannot_be_written_ends_no_sidecar_and_is_caught_up_with(pod: Pod) -> None:
    """A full disk: smg serves on with what it has; a sidecar that ended would take the whole pod out of service."""
    await pod.sidecar.put(pod.a.worker(), pod.b.worker())
    await eventually(pod.sidecar.shows(a="ready", b="ready"))
    in_the_way = pod.smg.run_dir / "workers.tmp"
    in_the_way.mkdir()
    before = pod.b.asked
    pod.b.say(EnginePhase.HUNG)

    async def has_tried() -> bool:
        return pod.b.asked > before + 3

    await eventually(has_tried)
    assert await pod.sidecar.status("/healthz") == 200
    assert await pod.sidecar.is_ready()
    in_the_way.rmdir()
    await eventually(pod.sidecar.shows(a="ready", b="withheld"))
