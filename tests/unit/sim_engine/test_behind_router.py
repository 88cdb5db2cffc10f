"""A pair behind the real router: what smg says to each side is what the simulated engines expect."""

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.unit.sim_engine.harness import LIMIT_S, SGLANG, Client, running, said, text_of

SMG = Path(sys.executable).parent / "smg"
MORE: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@asynccontextmanager
async def router(
    session: aiohttp.ClientSession, flavor: str, workers: list[dict[str, Any]], path: Path
) -> AsyncIterator[Client]:
    """smg in its mode for pairs, once both sides are healthy."""
    path.write_text(json.dumps({"version": 1, "workers": workers}))
    client = Client(session)
    client.port, health_port, metrics_port = free_ports(3)
    process = await asyncio.create_subprocess_exec(
        *(SMG, "launch", "--host", "127.0.0.1", "--port", str(client.port), "--backend", flavor),
        *("--discovery-provider", "file", "--discovery-file", path, "--worker-startup-check-interval", "1"),
        *("--health-check-port", str(health_port), "--prometheus-port", str(metrics_port), "--pd-disaggregation"),
        *("--prefill-policy", "cache_aware", "--decode-policy", "power_of_two"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + LIMIT_S / 2
        while not await is_ready(client):
            assert time.monotonic() < deadline, "never: both sides healthy"
        yield client
    finally:
        process.kill()
        await process.wait()


async def is_ready(client: Client) -> bool:
    try:
        return (await client.get("/readiness"))[0] == 200
    except aiohttp.ClientError:
        return False


@pytest.mark.parametrize("flavor", ["vllm", "sglang"])
async def test_pair_behind_the_router_says_what_one_engine_says(flavor: str, tmp_path: Path) -> None:
    is_vllm = flavor == "vllm"
    common = [] if is_vllm else [*SGLANG, "--disaggregation-bootstrap-port", "0"]
    async with (
        running("--role", "prefill", *common) as prefill,
        running("--role", "decode", *common) as decode,
        running() as unified,
    ):
        workers: list[dict[str, Any]] = [
            {"id": "p", "url": prefill.url, "worker_type": "prefill", "model_id": "m"},
            {"id": "d", "url": decode.url, "worker_type": "decode", "model_id": "m"},
        ]
        for worker, role in zip(workers, ("kv_producer", "kv_consumer"), strict=True):
            worker |= {"kv_connector": "NixlConnector", "kv_role": role} if is_vllm else {}
        if not is_vllm:
            workers[0]["bootstrap_port"] = prefill.side_port
        async with router(prefill.session, flavor, workers, tmp_path / "workers.json") as front:
            for prompt in ("hello " * 50, "x" * 640):
                expected = said((await unified.complete(prompt, **MORE))[1])
                assert said((await front.complete(prompt, **MORE))[1]) == expected
                events, end = await front.stream(prompt + "?", **MORE)
                assert end == "[DONE]"
                assert text_of(events) == said((await unified.complete(prompt + "?", **MORE))[1])
        moved = "vllm:nixl_bytes_transferred" if is_vllm else "sglang:kv_transfer_total_mb"
        assert (await decode.metrics())[f"{moved}_count"] == 4
        assert prefill.process.sim.engine.kv.live == 0
