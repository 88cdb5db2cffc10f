"""A real process: start, SIGTERM, drain, and the faults that end it."""

import asyncio
import json
import signal
import socket
from typing import Any

import aiohttp
import pytest

from tests.unit.sim_engine.harness import eventually, in_flight, spawned, text_of

SLOW = ["--speed", "1"]
LONG: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True}
"""About a second at speed 1."""
ENDLESS: dict[str, Any] = {"max_tokens": 20_000, "ignore_eos": True}


def with_faults(*faults: dict[str, Any]) -> dict[str, str]:
    return {"SIM_FAULTS": json.dumps(faults)}


async def test_idle_engine_exits_at_once_on_sigterm() -> None:
    async with spawned() as engine:
        engine.sigterm()
        assert await engine.exit_code() == 0


async def test_streams_go_on_during_the_drain_while_new_requests_get_500() -> None:
    async with spawned(*SLOW, "--shutdown-timeout", "15") as engine:
        stream = asyncio.create_task(engine.stream(**LONG))
        await in_flight(engine, 1)
        engine.sigterm()
        await eventually(lambda: engine.logged("sigterm"), "drain begins")
        assert (await engine.get("/health"))[0] == 200
        assert (await engine.get("/v1/models"))[0] == 200
        assert (await engine.complete())[0] == 500
        events, end = await stream
        assert (len(text_of(events)), end) == (480, "[DONE]")
        assert await engine.exit_code() == 0
        totals = (engine.logged("exit") or {})["totals"]
        assert (totals["complete"], totals["refused"], totals["cut"], totals["aborted"]) == (1, 1, 0, 0)


@pytest.mark.parametrize("timeout", ["0", "0.3"])
async def test_streams_still_open_after_the_time_are_aborted_or_broken(timeout: str) -> None:
    async with spawned(*SLOW, "--shutdown-timeout", timeout) as engine:
        streams = [asyncio.create_task(engine.stream(**ENDLESS)) for _ in range(8)]
        await in_flight(engine, 8)
        engine.sigterm()
        ends = []
        for stream in streams:
            events, end = await stream
            reason = events[-1]["choices"][0]["finish_reason"] if events else None
            ends.append((reason, end == "[DONE]"))
        assert set(ends) == {("abort", True), (None, False)}
        assert await engine.exit_code() == 0
        totals = (engine.logged("exit") or {})["totals"]
        assert totals["aborted"] + totals["cut"] == 8
        assert totals["aborted"] == ends.count(("abort", True))


async def test_second_sigterm_ends_the_drain() -> None:
    async with spawned(*SLOW, "--shutdown-timeout", "1000") as engine:
        stream = asyncio.create_task(engine.stream(**ENDLESS))
        await in_flight(engine, 1)
        engine.sigterm()
        await eventually(lambda: engine.logged("sigterm"), "drain begins")
        engine.sigterm()
        assert await engine.exit_code() == 0
        await stream


@pytest.mark.parametrize(("flags", "faults"), [(["--load-seconds", "600"], []), ([], [{"name": "neverReady"}])])
async def test_sigterm_while_loading_ends_the_process(flags: list[str], faults: list[dict[str, Any]]) -> None:
    async with spawned(*flags, env=with_faults(*faults), until="loading") as engine:
        assert (await engine.sim("state"))["phase"] == "loading"
        engine.sigterm()
        assert await engine.exit_code() == 0
        assert engine.logged("serving") is None


@pytest.mark.parametrize(("fault", "code"), [({"name": "exit", "args": {"code": 42}}, 42), ({"name": "oom"}, 137)])
async def test_exit_and_oom_end_the_process_with_their_code_and_cut_what_is_open(
    fault: dict[str, Any], code: int
) -> None:
    async with spawned(*SLOW) as engine:
        stream = asyncio.create_task(engine.stream(**ENDLESS))
        await in_flight(engine, 1)
        with pytest.raises(aiohttp.ClientError):
            await engine.faults(fault)
        assert await engine.exit_code() == code
        assert (await stream)[1] != "[DONE]"


async def test_exit_after_a_number_of_requests() -> None:
    faults = with_faults({"name": "exit", "args": {"code": 3}, "when": {"afterRequests": 3}})
    async with spawned(env=faults) as engine:
        assert [(await engine.complete())[0] for _ in range(2)] == [200, 200]
        with pytest.raises(aiohttp.ClientError):
            await engine.complete()
        assert await engine.exit_code() == 3


async def test_crash_first_exits_1_only_after_it_was_asked_something() -> None:
    async with spawned(env=with_faults({"name": "crashFirst", "args": {"seconds": 0.2}})) as engine:
        assert (await engine.get("/health"))[0] == 200
        assert (await engine.complete())[0] == 500
        assert await engine.exit_code() == 1


async def test_ignored_sigterm_changes_nothing() -> None:
    async with spawned(env=with_faults({"name": "ignoreSigterm"})) as engine:
        engine.sigterm()
        await eventually(lambda: engine.logged("sigtermIgnored"), "signal arrived")
        assert (await engine.complete())[0] == 200
        assert engine.process.returncode is None


async def test_hang_on_sigterm_closes_the_port_and_silences_streams() -> None:
    async with spawned(*SLOW, env=with_faults({"name": "hangOnSigterm"})) as engine:
        stream = asyncio.create_task(engine.stream(**ENDLESS))
        await in_flight(engine, 1)
        engine.sigterm()
        await eventually(lambda: engine.logged("hangsOnSigterm"), "it hangs")
        with pytest.raises(aiohttp.ClientConnectorError):
            async with aiohttp.ClientSession() as fresh, fresh.get(engine.url + "/health"):
                pass
        state = await engine.sim("state")
        assert (state["phase"], state["paused"], state["requests"]["open"]) == ("stopped", True, 1)
        assert not stream.done()
        assert engine.process.returncode is None
        engine.process.kill()
        assert await engine.exit_code() == -signal.SIGKILL
        await stream


async def test_slow_drain_delays_the_exit_behind_a_closed_port() -> None:
    async with spawned(env=with_faults({"name": "slowDrain", "args": {"seconds": 0.5}, "when": "onSigterm"})) as engine:
        engine.sigterm()
        await eventually(lambda: engine.logged("closed"), "port closed")
        assert (await engine.sim("state"))["phase"] == "stopped"
        with pytest.raises(aiohttp.ClientConnectorError):
            await engine.get("/health")
        assert await engine.exit_code() == 0


async def test_port_change_listens_elsewhere() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    async with spawned(env=with_faults({"name": "portChange", "args": {"port": free}})) as engine:
        assert engine.port == free
        assert (await engine.get("/health"))[0] == 200


@pytest.mark.parametrize(
    ("flags", "env", "code", "message"),
    [
        (["--role", "middle"], {}, 2, "--role"),
        ([], {"SIM_FAULTS": '[{"name": "x"}]'}, 2, "SIM_FAULTS: faults[0].name: unknown fault 'x'"),
        (["--faults-file", "/"], {}, 2, "Is a directory"),
        (["--host", "203.0.113.1"], {}, 1, "can't listen on 203.0.113.1"),
    ],
)
async def test_wrong_start_ends_with_a_reason_on_stderr(
    flags: list[str], env: dict[str, str], code: int, message: str
) -> None:
    async with spawned(*flags, env=env) as engine:
        assert await engine.exit_code() == code
        assert engine.process.stderr is not None
        complaint = (await engine.process.stderr.read()).decode()
        assert message in complaint
        assert "Traceback" not in complaint
