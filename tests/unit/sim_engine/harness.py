"""A simulated engine in the test's own event loop, or as a real process, on free loopback ports."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from sluice_sim.cli import parse
from sluice_sim.kv import KvCache
from sluice_sim.main import Process
from sluice_sim.state import Phase, Sim

LIMIT_S = 20.0
"""Upper time limit of every test that opens sockets."""

ENGINE_IMAGE = Path(__file__).parents[3] / "engine-image"
COMMON = ["--served-model-name", "m", "--host", "127.0.0.1", "--port", "0", "--fault-port", "0"]
FAST = ["--speed", "10000"]
SMALL = ["--num-gpu-blocks-override", "4096"]
"""Starts sooner than with all the blocks of a GPU."""
SGLANG = ["--flavor", "sglang", "--enable-metrics", "--max-total-tokens", "65536"]
SIDE_PORT = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": "0"}


async def eventually(holds: Callable[[], Any], what: str) -> None:
    """Wait until `holds()` is true, within the limit of the test."""
    deadline = time.monotonic() + LIMIT_S / 2
    while not holds():
        assert time.monotonic() < deadline, f"never: {what}"
        await asyncio.sleep(0.005)


class Client:
    """Speaks to one engine."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session
        self.port = 0
        self.fault_port = 0
        self.side_port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def fault_url(self) -> str:
        return f"http://127.0.0.1:{self.fault_port}"

    async def get(self, path: str, **options: Any) -> tuple[int, str]:
        async with self.session.get(self.url + path, **options) as answer:
            return answer.status, await answer.text()

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, **options) as answer:
            return answer.status, json.loads(await answer.text())

    async def complete(self, prompt: str = "hello", **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/completions", {"model": "m", "prompt": prompt, **fields})

    async def stream(
        self, prompt: str = "hello", *, path: str = "/v1/completions", **fields: Any
    ) -> tuple[list[Any], str]:
        """The events of a streamed answer and how it ended: `[DONE]`, or the error of the connection."""
        body = {"model": "m", "prompt": prompt, "stream": True, **fields}
        events: list[Any] = []
        async with self.session.post(self.url + path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            try:
                async for line in answer.content:
                    if line.startswith(b"data: [DONE]"):
                        return events, "[DONE]"
                    if line.startswith(b"data: "):
                        events.append(json.loads(line[6:]))
            except aiohttp.ClientError as error:
                return events, type(error).__name__
        return events, "no [DONE]"

    async def faults(self, *faults: dict[str, Any]) -> tuple[int, Any]:
        async with self.session.put(f"{self.fault_url}/sim/faults", json=list(faults)) as answer:
            return answer.status, await answer.json()

    async def sim(self, path: str) -> Any:
        async with self.session.get(f"{self.fault_url}/sim/{path}") as answer:
            return await answer.json()

    async def last_record(self) -> dict[str, Any]:
        record: dict[str, Any] = (await self.sim("ledger"))["records"][-1]
        return record

    async def metrics(self) -> dict[str, float]:
        """Sum per sample name."""
        values: dict[str, float] = {}
        for line in (await self.get("/metrics"))[1].splitlines():
            if not line.startswith("#"):
                name = line.split("{")[0].split(" ")[0]
                values[name] = values.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return values


LEND = {"do_remote_decode": True, "do_remote_prefill": False}


async def lend(prefill: Client, prompt: str, **fields: Any) -> dict[str, Any]:
    """The prefill leg as a router asks for it; the parameters for the decode leg."""
    status, body = await prefill.complete(prompt, **{**fields, "max_tokens": 1}, kv_transfer_params=LEND)
    assert status == 200, body
    params: dict[str, Any] = body["kv_transfer_params"]
    return params


async def through_pair(prefill: Client, decode: Client, prompt: str, **fields: Any) -> tuple[int, Any]:
    """Both legs of a request; the answer of the decode side."""
    return await decode.complete(prompt, **fields, kv_transfer_params=await lend(prefill, prompt))


class InLoop(Client):
    """An engine in the test's own loop."""

    process: Process
    exit_codes: list[int]
    """What the engine would have exited with, by faults."""


def said(body: Any) -> str:
    """The text of a plain completion."""
    text: str = body["choices"][0]["text"]
    return text


def text_of(events: list[Any]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


def is_up(sim: Sim) -> bool:
    """It serves or follows."""
    return sim.phase is Phase.FOLLOWING or (sim.phase is Phase.SERVING and sim.port is not None)


def is_empty(kv: KvCache) -> bool:
    return kv.live == 0


@asynccontextmanager
async def running(
    *flags: str, model: str = "model", env: dict[str, str] | None = None, wait: bool = True
) -> AsyncIterator[InLoop]:
    """A served engine; with `wait` False as soon as its fault port is open."""
    async with asyncio.timeout(LIMIT_S), aiohttp.ClientSession() as session:
        client = InLoop(session)
        client.exit_codes = []
        small = [] if "sglang" in flags else SMALL
        config = parse(["serve", model, *COMMON, *FAST, *small, *flags], {**SIDE_PORT, **(env or {})})
        client.process = Process(config, env=env or {}, exit_process=client.exit_codes.append)
        task = asyncio.create_task(client.process.run())
        try:
            await eventually(lambda: task.done() or client.process.fault_port, "fault port open")
            client.fault_port = client.process.fault_port or 0
            if wait:
                await eventually(lambda: task.done() or is_up(client.process.sim), "ready")
                client.port = client.process.sim.port or 0
                client.side_port = client.process.side_port or 0
            yield client
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()


class Spawned(Client):
    """An engine in a process of its own."""

    process: asyncio.subprocess.Process
    log: list[dict[str, Any]]
    """Lines of its log so far."""

    def sigterm(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def logged(self, event: str) -> dict[str, Any] | None:
        return next((line for line in self.log if line["event"] == event), None)

    async def exit_code(self) -> int:
        return await self.process.wait()


async def in_flight(engine: Client, count: int = 1) -> None:
    """Wait until so many requests run."""
    deadline = time.monotonic() + LIMIT_S / 2
    while (await engine.sim("state"))["running"] < count:
        assert time.monotonic() < deadline, f"never: {count} requests run"


@asynccontextmanager
async def spawned(*flags: str, env: dict[str, str] | None = None, until: str = "serving") -> AsyncIterator[Spawned]:
    """An engine that has logged the event `until`, or has exited."""
    async with asyncio.timeout(LIMIT_S), aiohttp.ClientSession() as session:
        client = Spawned(session)
        client.log = []
        client.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sluice_sim.main", "serve", "model", *COMMON, *flags),
            env={**os.environ, "PYTHONPATH": str(ENGINE_IMAGE), **SIDE_PORT, **(env or {})},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        reader = asyncio.create_task(_read_log(client))
        try:
            await eventually(lambda: client.logged(until) or reader.done(), f"{until}, or exit")
            serving = client.logged("serving") or {}
            client.port, client.side_port = serving.get("port", 0), serving.get("sidePort") or 0
            client.fault_port = (client.logged("loading") or {}).get("faultPort", 0)
            yield client
        finally:
            if client.process.returncode is None:
                client.process.kill()
            await client.process.wait()
            await reader


async def _read_log(client: Spawned) -> None:
    assert client.process.stdout is not None
    async for line in client.process.stdout:
        client.log.append(json.loads(line))
