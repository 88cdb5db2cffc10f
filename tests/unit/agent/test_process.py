"""The agent as a process on loopback, beside a small engine: what probes, operator and preStop see."""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from sluice.api.agent import AgentConfig, AgentState, EnginePhase, MetricKind, MetricSource, Signal

DEADLINE_S = 15.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class FakeEngine:
    """The endpoints that the agent reads, switchable."""

    port: int = field(default_factory=free_port)
    running: int = 0
    tokens: float = 10.0
    started: float = field(default_factory=time.time)
    answering: asyncio.Event = field(default_factory=asyncio.Event)
    status: int = 200
    prompts: list[str] = field(default_factory=list)
    _runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/load", self._load)
        app.router.add_get("/version", self._version)
        app.router.add_post("/v1/completions", self._complete)
        self.started = time.time()
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        text = f"running {self.running}\nwaiting 0\ntokens_total {self.tokens}\n"
        return web.Response(text=text + f"process_start_time_seconds {self.started}\n")

    async def _load(self, _: web.Request) -> web.Response:
        return web.json_response({"server_load": self.running})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _complete(self, request: web.Request) -> web.Response:
        self.prompts.append((await request.json())["prompt"])
        await self.answering.wait()
        self.tokens += 1
        return web.json_response({"choices": [{"text": "x", "finish_reason": "length"}]}, status=self.status)


@dataclass
class AgentProcess:
    config: AgentConfig
    state_dir: Path
    session: aiohttp.ClientSession
    port: int = field(default_factory=free_port)
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        env = {
            **os.environ,
            "SLUICE_AGENT_CONFIG": self.config.model_dump_json(by_alias=True),
            "SLUICE_AGENT_STATE_DIR": str(self.state_dir),
            "SLUICE_AGENT_HOST": "127.0.0.1",
            "SLUICE_AGENT_PORT": str(self.port),
        }
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "from sluice.agent.main import main; main()", env=env
        )
        await eventually(self._listens)

    async def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        with suppress(ProcessLookupError):
            self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), 5)

    async def _listens(self) -> bool:
        try:
            return await self.status("/healthz") == 200
        except aiohttp.ClientConnectorError:
            return False

    async def status(self, path: str, **headers: str) -> int:
        async with self.session.get(f"http://127.0.0.1:{self.port}{path}", headers=headers) as response:
            return response.status

    async def state(self, after: int | None = None) -> AgentState:
        query = "" if after is None else f"?after={after}"
        async with self.session.get(f"http://127.0.0.1:{self.port}/state{query}") as response:
            return AgentState.model_validate_json(await response.read())

    async def reaches(self, phase: EnginePhase) -> AgentState:
        async with asyncio.timeout(DEADLINE_S):
            state = await self.state()
            while state.phase is not phase:
                state = await self.state(state.seq)
            return state


async def eventually(check: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await check():  # noqa: ASYNC110 (another process: there is no event to wait for)
            await asyncio.sleep(0.05)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    engine = FakeEngine()
    engine.answering.set()
    yield engine
    engine.answering.set()
    await engine.stop()


@pytest.fixture
async def agent(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[AgentProcess]:
    config = AgentConfig(
        instance="chat-0",
        engine="vLLM",
        engine_port=engine.port,
        served_model="m",
        load_path="/load",
        version_path="/version",
        signals={
            Signal.RUNNING: [MetricSource(name="running")],
            Signal.WAITING: [MetricSource(name="waiting")],
            Signal.GENERATION_TOKENS: [MetricSource(name="tokens_total", kind=MetricKind.COUNTER)],
        },
        self_test_period_s=1,
        self_test_timeout_s=1,
        hang_timeout_s=3,
        drain_timeout_s=30,
        drain_token="secret",
    )
    async with aiohttp.ClientSession() as session:
        agent = AgentProcess(config, tmp_path, session)
        await agent.start()
        yield agent
        await agent.stop(signal.SIGKILL)


async def test_s017_from_closed_port_to_ready(agent: AgentProcess, engine: FakeEngine) -> None:
    state = await agent.state()
    assert (state.phase, state.engine_id, state.in_flight) == (EnginePhase.LOADING, None, None)
    assert (await agent.status("/startup"), await agent.status("/ready")) == (503, 503)
    assert await agent.status("/alive") == 200
    await engine.start()
    state = await agent.reaches(EnginePhase.READY)
    assert state.engine_id
    assert (state.version, state.in_flight, state.missing, state.self_test.passed) == ("0.32.0", 0, [], True)
    assert (await agent.status("/startup"), await agent.status("/ready")) == (200, 200)
    assert await agent.status("/metrics") == 200

    async def tested_thrice() -> bool:
        return len(engine.prompts) >= 3

    await eventually(tested_thrice)
    assert len(set(engine.prompts)) == len(engine.prompts), "a repeated prompt could be answered from a cache"


async def test_long_poll_is_held_until_there_is_news(agent: AgentProcess, engine: FakeEngine) -> None:
    await engine.start()
    state = await agent.reaches(EnginePhase.READY)
    started = time.monotonic()
    waiting = asyncio.create_task(agent.state(state.seq))
    done, _ = await asyncio.wait({waiting}, timeout=1.5)
    assert not done
    engine.running = 4
    news = await asyncio.wait_for(waiting, DEADLINE_S)
    assert time.monotonic() - started < 4.5
    assert (news.in_flight, news.seq) == (4, state.seq + 1)
    assert await agent.status("/state?after=x") == 400


async def test_s021_drain_holds_until_requests_are_gone_and_needs_its_token(
    agent: AgentProcess, engine: FakeEngine
) -> None:
    await engine.start()
    await agent.reaches(EnginePhase.READY)
    assert await agent.status("/drain") == 403
    assert await agent.status("/drain", **{"X-Sluice-Drain": "guessed"}) == 403
    assert (await agent.state()).phase is EnginePhase.READY
    engine.running = 2
    drain = asyncio.create_task(agent.status("/drain", **{"X-Sluice-Drain": "secret"}))
    await agent.reaches(EnginePhase.DRAINING)
    assert await agent.status("/ready") == 503
    done, _ = await asyncio.wait({drain}, timeout=3.5)
    assert not done, "two requests are still in flight"
    engine.running = 0
    assert await asyncio.wait_for(drain, 5) == 200


async def test_hung_engine_does_not_hold_a_drain(agent: AgentProcess, engine: FakeEngine) -> None:
    await engine.start()
    await agent.reaches(EnginePhase.READY)
    engine.answering.clear()
    await agent.reaches(EnginePhase.SUSPECT)
    await agent.reaches(EnginePhase.HUNG)
    assert await agent.status("/alive") == 200
    started = time.monotonic()
    assert await agent.status("/drain", **{"X-Sluice-Drain": "secret"}) == 200
    assert time.monotonic() - started < 1


async def test_restarted_agent_goes_on_where_it_was(agent: AgentProcess, engine: FakeEngine) -> None:
    await engine.start()
    before = await agent.reaches(EnginePhase.READY)
    await agent.stop(signal.SIGKILL)
    await agent.start()
    after = await agent.state()
    assert (after.phase, after.engine_id) == (EnginePhase.READY, before.engine_id)


async def test_restarted_engine_is_another_run(agent: AgentProcess, engine: FakeEngine) -> None:
    await engine.start()
    before = await agent.reaches(EnginePhase.READY)
    await engine.stop()
    assert (await agent.reaches(EnginePhase.LOADING)).engine_id is None
    await engine.start()
    assert (await agent.reaches(EnginePhase.READY)).engine_id not in (None, before.engine_id)


async def test_sigterm_ends_the_agent_soon_though_polls_are_held(agent: AgentProcess, engine: FakeEngine) -> None:
    await engine.start()
    state = await agent.reaches(EnginePhase.READY)
    held = asyncio.create_task(agent.state(state.seq))
    await asyncio.wait({held}, timeout=0.2)
    started = time.monotonic()
    assert await agent.stop() == 0
    assert time.monotonic() - started < 2
    with suppress(aiohttp.ClientError):
        await held


async def test_wrong_configuration_names_the_variable_and_exits() -> None:
    for text in ("", json.dumps({"instance": "a"})):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "from sluice.agent.main import main; main()",
            env={**os.environ, "SLUICE_AGENT_CONFIG": text},
            stderr=asyncio.subprocess.PIPE,
        )
        _, stderr = await asyncio.wait_for(process.communicate(), DEADLINE_S)
        assert process.returncode == 2
        assert b"SLUICE_AGENT_CONFIG" in stderr
