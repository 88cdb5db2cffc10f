"""Prefill and decode of the SGLang flavour: both sides have the request at once and meet in a room."""

import asyncio
import functools
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import pytest

from tests.unit.sim_engine.harness import SGLANG, Client, InLoop, eventually, is_empty, running, said, spawned, text_of

PROMPT = "x" * 4 * 100
"""100 tokens: 7 pages of 16."""
PAGE_MB = 16 * 2 * 32 * 8 * 128 * 2 / 1024 / 1024
MORE: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
texts: dict[Any, str] = {}
"""What was found out by `alone` already."""
PREFILL = [*SGLANG, "--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "0"]
DECODE = [*SGLANG, "--disaggregation-mode", "decode"]

rooms = itertools.count(1)


@asynccontextmanager
async def pair(
    prefill: list[str] | None = None, decode: list[str] | None = None, env: dict[str, str] | None = None
) -> AsyncIterator[tuple[InLoop, InLoop]]:
    """Started with further flags for either side, and this environment for both."""
    async with (
        running(*PREFILL, *(prefill or []), env=env) as sender,
        running(*DECODE, *(decode or []), env=env) as receiver,
    ):
        yield sender, receiver


def room(prefill: Client) -> dict[str, Any]:
    return {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.side_port, "bootstrap_room": next(rooms)}


async def both(prefill: Client, decode: Client, prompt: str, **fields: Any) -> tuple[tuple[int, Any], tuple[int, Any]]:
    """The answers of both sides to one request, which they get at once."""
    fields = {**fields, **room(prefill)}
    first, second = await asyncio.gather(prefill.complete(prompt, **fields), decode.complete(prompt, **fields))
    return first, second


async def alone(prompt: str, **fields: Any) -> str:
    """What an engine says that does everything itself."""
    key = (prompt, *sorted(fields.items()))
    if key not in texts:
        async with running(*SGLANG) as engine:
            texts[key] = said((await engine.complete(prompt, **fields))[1])
    return texts[key]


async def test_pair_says_what_one_engine_says_for_many_prompts() -> None:
    rng = random.Random(7)
    prompts = ["".join(rng.choices("abc ", k=rng.randint(1, 900))) for _ in range(30)]
    async with pair() as (prefill, decode), running(*SGLANG) as unified:
        for prompt in prompts:
            (first, _), (second, body) = await both(prefill, decode, prompt, **MORE)
            assert (first, second) == (200, 200)
            assert said(body) == said((await unified.complete(prompt, **MORE))[1])
        assert (await decode.metrics())["sglang:kv_transfer_total_mb_count"] == len(prompts)


async def test_prefill_gives_one_token_and_keeps_nothing() -> None:
    async with pair() as (prefill, decode):
        (_, body), _ = await both(prefill, decode, PROMPT, **MORE)
        assert body["usage"]["completion_tokens"] == 1
        assert prefill.process.sim.engine.kv.live == 0
        assert (await decode.metrics())["sglang:kv_transfer_total_mb_sum"] == pytest.approx(7 * PAGE_MB)


async def test_streams_are_handed_over_too() -> None:
    async with pair() as (prefill, decode):
        fields = {**MORE, **room(prefill)}
        (_, end), (events, _) = await asyncio.gather(prefill.stream(PROMPT, **fields), decode.stream(PROMPT, **fields))
        assert end == "[DONE]"
        assert text_of(events) == await alone(PROMPT, **MORE)


async def test_whoever_comes_first_waits_for_the_other() -> None:
    async with pair() as (prefill, decode):
        fields = {**MORE, **room(prefill)}
        early = asyncio.create_task(prefill.complete(PROMPT, **fields))
        await eventually(lambda: prefill.process.sim.gauges.bootstrapping == 1, "prefill waits")
        assert (await prefill.metrics())["sglang:num_prefill_bootstrap_queue_reqs"] == 1
        assert (await decode.complete(PROMPT, **fields))[0] == 200
        assert (await early)[0] == 200
        fields = {**MORE, **room(prefill)}
        early = asyncio.create_task(decode.complete(PROMPT, **fields))
        await eventually(lambda: decode.process.sim.gauges.deferred == 1, "decode waits")
        assert (await decode.metrics())["sglang:num_decode_transfer_queue_reqs"] == 1
        assert (await prefill.complete(PROMPT, **fields))[0] == 200
        assert (await early)[0] == 200


async def test_request_without_a_room_is_refused_on_both_sides() -> None:
    async with pair() as engines:
        for engine in engines:
            status, body = await engine.complete(PROMPT)
            assert status == 400
            assert "without bootstrap room" in body["error"]["message"]


async def test_side_that_is_left_alone_gives_up_after_its_time() -> None:
    times = {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "0.2", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "0.2"}
    async with pair(env=times) as (prefill, decode):
        assert (await prefill.complete(PROMPT, **room(prefill)))[0] == 500
        assert (await prefill.metrics())["sglang:num_bootstrap_failed_reqs_total"] == 1
        assert (await decode.complete(PROMPT, **room(prefill)))[0] == 500
        assert (await decode.metrics())["sglang:num_transfer_failed_reqs_total"] == 1
        assert [engine.process.sim.engine.kv.live for engine in (prefill, decode)] == [0, 0]


async def test_decode_that_leaves_ends_the_prefill_leg_and_frees_its_pages() -> None:
    async with pair(prefill=["--speed", "1"]) as (prefill, decode):
        await prefill.faults({"name": "kvSlow", "args": {"seconds": 30}})
        fields = room(prefill)
        leaving = asyncio.create_task(decode.complete(PROMPT, **fields))
        staying = asyncio.create_task(prefill.complete(PROMPT, **fields))
        await eventually(lambda: prefill.process.sim.gauges.sending == 1, "prefill hands over")
        assert prefill.process.sim.engine.kv.live == 7
        leaving.cancel()
        assert (await staying)[0] == 500
        assert prefill.process.sim.engine.kv.live == 0
        assert (await prefill.metrics())["sglang:num_transfer_failed_reqs_total"] == 1


async def test_prefill_killed_ends_the_decode_leg() -> None:
    async with spawned(*PREFILL) as prefill, running(*DECODE) as decode:
        request = asyncio.create_task(decode.complete(PROMPT, **room(prefill)))
        await eventually(lambda: decode.process.sim.gauges.deferred == 1, "decode waits")
        prefill.process.kill()
        assert (await request)[0] == 500
        assert (await decode.metrics())["sglang:num_transfer_failed_reqs_total"] == 1
        assert decode.process.sim.engine.kv.live == 0


@pytest.mark.parametrize("flags", [["--page-size", "32"], ["--tp", "2"], ["--dtype", "float32"]])
async def test_sides_of_another_layout_do_not_pair(flags: list[str]) -> None:
    async with pair(decode=flags) as (prefill, decode):
        status, body = await decode.complete(PROMPT, **room(prefill))
        assert status == 500
        assert "another layout" in body["error"]["message"]
        assert (await decode.metrics())["sglang:num_bootstrap_failed_reqs_total"] == 1


async def test_other_model_is_not_noticed_and_gives_wrong_text() -> None:
    async with running(*PREFILL, model="other") as prefill, running(*DECODE) as decode:
        _, (status, body) = await both(prefill, decode, PROMPT, **MORE)
        assert status == 200
        assert said(body) != await alone(PROMPT, **MORE)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("checks", [False, True])
async def test_corrupt_kv_is_wrong_text_unless_checksums_are_on(side: str, checks: bool) -> None:
    async with pair(decode=["--disaggregation-enable-kv-checksum"] if checks else []) as engines:
        await engines[side == "decode"].faults({"name": "kvCorrupt", "count": 1})
        _, (status, body) = await both(*engines, PROMPT, **MORE)
        assert status == (500 if checks else 200)
        assert checks or said(body) != await alone(PROMPT, **MORE)
        assert (await engines[1].metrics())["sglang:num_transfer_failed_reqs_total"] == checks


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_failed_transfer_ends_both_legs(side: str) -> None:
    async with pair(env={"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "1"}) as engines:
        await engines[side == "decode"].faults({"name": "kvFail", "count": 1})
        (first, _), (second, _) = await both(*engines, PROMPT)
        assert (first, second) == (500, 500)
        assert (await engines[1].metrics())["sglang:num_transfer_failed_reqs_total"] == 1
        assert [status for status, _ in await both(*engines, PROMPT)] == [200, 200]


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_slow_transfer_delays_the_first_token(side: str) -> None:
    async with pair() as engines:
        await engines[side == "decode"].faults({"name": "kvSlow", "args": {"seconds": 0.3}, "count": 1})
        await both(*engines, PROMPT)
        assert (await engines[1].metrics())["sglang:time_to_first_token_seconds_sum"] > 0.3


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_kv_that_is_never_asked_for_ends_both_legs_after_their_time(side: str) -> None:
    times = {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "0.3", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "0.3"}
    async with pair(env=times) as engines:
        await engines[side == "decode"].faults({"name": "kvNeverPulled", "count": 1})
        (first, _), (second, _) = await both(*engines, PROMPT)
        assert (first, second) == (500, 500)
        assert (await engines[0].metrics())["sglang:num_bootstrap_failed_reqs_total"] == 1


async def test_whatever_clients_do_nothing_is_held_in_the_end() -> None:
    rng = random.Random(3)
    times = {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "0.5", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "0.5"}
    async with pair(["--max-total-tokens", "960"], ["--max-total-tokens", "960"], env=times) as (prefill, decode):
        await decode.faults({"name": "kvFail", "probability": 0.1})
        await prefill.faults({"name": "kvSlow", "args": {"seconds": 0.05}, "probability": 0.3})

        async def impatient(number: int) -> None:
            prompt, fields = f"{number % 7} " * rng.randint(1, 200), {**MORE, **room(prefill)}

            async def leg(side: Client) -> None:
                with suppress(TimeoutError, aiohttp.ClientError):
                    async with asyncio.timeout(rng.choice([0.01, 0.05, 5.0, 5.0])):
                        await side.complete(prompt, **fields)

            await asyncio.gather(leg(prefill), leg(decode))

        await asyncio.gather(*(impatient(number) for number in range(120)))
        for engine in (prefill, decode):
            sim = engine.process.sim
            await eventually(functools.partial(is_empty, sim.engine.kv), "all pages are free")
            sim.engine.kv.check()
            assert sim.engine.in_flight == sim.handled == 0
            assert (sim.gauges.bootstrapping, sim.gauges.sending) == (0, 0)
        transfer = prefill.process.sim.transfer
        assert transfer is not None
        await eventually(lambda: transfer.state()["rooms"] == 0, "no room is left")


async def test_there_are_no_leases_to_run_out() -> None:
    async with pair() as (prefill, _):
        status, body = await prefill.faults({"name": "kvStale"})
        assert status == 400
        assert "flavour vllm" in body["error"]


async def test_health_needs_no_other_side() -> None:
    async with pair(env={"SGLANG_HEALTH_CHECK_TIMEOUT": "0.3"}) as engines:
        assert [status for status, _ in await asyncio.gather(*(e.get("/health") for e in engines))] == [200, 200]
