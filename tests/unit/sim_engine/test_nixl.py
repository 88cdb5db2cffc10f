"""Prefill and decode of the vLLM flavour: KV that is pulled, leases, heartbeats, failures."""

import asyncio
import functools
import json
import random
from contextlib import suppress
from typing import Any

import aiohttp
import pytest

from tests.unit.sim_engine.harness import (
    LEND,
    eventually,
    is_empty,
    lend,
    running,
    said,
    spawned,
    text_of,
    through_pair,
)
from tests.unit.sim_engine.nixl_pairs import MORE, PROMPT, alone, connector, held, pair

BLOCK_BYTES = 16 * 2 * 32 * 8 * 128 * 2
"""KV of one block: 16 tokens of an 8B model in 16 bits."""


async def test_pair_says_what_one_engine_says_for_many_prompts() -> None:
    rng = random.Random(7)
    prompts = ["".join(rng.choices("abc ", k=rng.randint(1, 900))) for _ in range(40)]
    prompts += [prompts[0] + prompts[1], "y" * 64, "y" * 64 + "z", "y" * 128]
    async with pair() as (prefill, decode), running() as unified:
        for prompt in prompts:
            status, body = await through_pair(prefill, decode, prompt, **MORE)
            assert status == 200
            assert said(body) == said((await unified.complete(prompt, **MORE))[1])
        metrics = await decode.metrics()
        assert metrics["vllm:nixl_num_failed_transfers_total"] == 0
        assert metrics["vllm:nixl_bytes_transferred_count"] == len(prompts)
        assert metrics["vllm:nixl_bytes_transferred_sum"] > 0
        assert (await prefill.metrics())["vllm:kv_cache_usage_perc"] == 0


async def test_streams_and_chats_are_handed_over_too() -> None:
    chat: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 9}
    path = "/v1/chat/completions"
    async with pair() as (prefill, decode), running() as unified:
        events, end = await decode.stream(PROMPT, **MORE, kv_transfer_params=await lend(prefill, PROMPT))
        assert end == "[DONE]"
        assert text_of(events) == said((await unified.complete(PROMPT, **MORE))[1])
        _, first = await prefill.post(path, {**chat, "max_tokens": 1, "kv_transfer_params": LEND})
        _, body = await decode.post(path, {**chat, "kv_transfer_params": first["kv_transfer_params"]})
        assert body["choices"] == (await unified.post(path, chat))[1]["choices"]
        assert (await decode.metrics())["vllm:nixl_bytes_transferred_count"] == 2


async def test_prefill_answers_with_what_the_decode_side_needs() -> None:
    async with pair() as (prefill, _):
        params = await lend(prefill, PROMPT)
        assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
        assert len(params["remote_block_ids"][0]) == 7
        assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", prefill.side_port)
        assert (params["tp_size"], params["remote_num_tokens"]) == (1, 100)
        assert params["remote_engine_id"] == (await prefill.sim("state"))["transfer"]["engineId"]


async def test_only_the_part_that_is_not_cached_is_pulled_and_counted() -> None:
    async with pair() as (prefill, decode):
        for _ in range(2):
            await through_pair(prefill, decode, PROMPT, **MORE)
        metrics = await decode.metrics()
        assert metrics["vllm:nixl_bytes_transferred_sum"] == (7 + 1) * BLOCK_BYTES
        page = (await decode.get("/metrics"))[1]
        assert 'source="external_kv_transfer"} 104.0' in page  # 100, then 4
        assert 'source="local_cache_hit"} 96.0' in page
        assert 'source="local_compute"} 0.0' in page
        assert metrics["vllm:external_prefix_cache_hits_total"] == 104
        record = await decode.last_record()
        assert (record["cachedTokens"], record["externalTokens"]) == (96, 4)


async def test_kv_that_waits_shows_in_the_use_of_blocks_alone() -> None:
    flags = ["--enable-server-load-tracking", "--num-gpu-blocks-override", "70"]
    async with pair(prefill=flags) as (prefill, decode):
        params = await lend(prefill, PROMPT)
        metrics = await prefill.metrics()
        assert metrics["vllm:num_requests_running"] == metrics["vllm:num_requests_waiting"] == 0
        assert json.loads((await prefill.get("/load"))[1]) == {"server_load": 0}
        assert metrics["vllm:kv_cache_usage_perc"] == pytest.approx(0.1)
        assert await held(prefill) == (1, 7)
        await decode.complete(PROMPT, kv_transfer_params=params)
        assert await held(prefill) == (0, 0)
        assert (await prefill.metrics())["vllm:kv_cache_usage_perc"] == 0


async def test_lease_frees_what_nobody_pulls() -> None:
    async with pair(prefill=connector("producer", kv_lease_duration=0.2)) as (prefill, decode):
        params = await lend(prefill, PROMPT)
        await eventually(lambda: prefill.process.sim.engine.kv.live == 0, "lease is over")
        assert (await prefill.metrics())["vllm:nixl_num_kv_expired_reqs_total"] == 1
        status, body = await decode.complete(PROMPT, **MORE, kv_transfer_params=params)
        assert (status, said(body)) == (200, await alone(PROMPT, **MORE))  # late, but nobody had used the blocks
        assert (await prefill.metrics())["vllm:nixl_num_notifications_after_expiry_total"] == 1


async def test_pull_after_reuse_gives_wrong_text_silently_and_only_prefill_counts_it() -> None:
    flags = [*connector("producer", kv_lease_duration=0.2), "--num-gpu-blocks-override", "8"]
    async with pair(prefill=flags) as (prefill, decode):
        params = await lend(prefill, PROMPT)
        await eventually(lambda: prefill.process.sim.engine.kv.live == 0, "lease is over")
        await prefill.complete("another prompt that needs all the blocks " * 12)
        status, body = await decode.complete(PROMPT, **MORE, kv_transfer_params=params)
        assert status == 200
        assert said(body) != await alone(PROMPT, **MORE)
        assert (await decode.metrics())["vllm:nixl_num_failed_transfers_total"] == 0
        metrics = await prefill.metrics()
        assert metrics["vllm:nixl_num_kv_expired_reqs_total"] == 1
        assert metrics["vllm:nixl_num_notifications_after_expiry_total"] == 1


async def test_heartbeats_keep_the_lease_while_the_request_queues_at_decode() -> None:
    lease: dict[str, Any] = {"kv_lease_duration": 0.5}
    full = [*connector("consumer", **lease), "--num-gpu-blocks-override", "8"]
    async with pair(prefill=connector("producer", **lease), decode=full) as (prefill, decode):
        await decode.faults({"name": "stall", "args": {"seconds": 2}, "count": 1})
        blocker = asyncio.create_task(decode.complete("b" * 400, max_tokens=20, ignore_eos=True))
        await eventually(lambda: decode.process.sim.engine.kv.live == 7, "decode is full")
        status, body = await through_pair(prefill, decode, PROMPT, **MORE)
        assert (status, said(body)) == (200, await alone(PROMPT, **MORE))
        assert (await decode.metrics())["vllm:request_queue_time_seconds_sum"] > 3 * lease["kv_lease_duration"]
        assert (await prefill.metrics())["vllm:nixl_num_kv_expired_reqs_total"] == 0
        await blocker


async def test_hung_decode_sends_no_heartbeats() -> None:
    lease: dict[str, Any] = {"kv_lease_duration": 0.3}
    async with pair(prefill=connector("producer", **lease), decode=connector("consumer", **lease)) as (prefill, decode):
        await decode.faults({"name": "hang"})
        params = await lend(prefill, PROMPT)
        stuck = asyncio.create_task(decode.complete(PROMPT, kv_transfer_params=params))
        await eventually(lambda: decode.process.sim.engine.in_flight == 1, "request accepted")
        await eventually(lambda: prefill.process.sim.engine.kv.live == 0, "lease is over")
        stuck.cancel()


async def test_request_that_ends_before_its_pull_lets_the_kv_go() -> None:
    async with pair() as (prefill, decode):
        await decode.faults({"name": "hang"})
        params = await lend(prefill, PROMPT)
        leaving = asyncio.create_task(decode.complete(PROMPT, kv_transfer_params=params))
        await eventually(lambda: decode.process.sim.engine.in_flight == 1, "request accepted")
        leaving.cancel()
        await eventually(lambda: prefill.process.sim.engine.kv.live == 0, "prefill was told")
        assert (await prefill.metrics())["vllm:nixl_num_kv_expired_reqs_total"] == 0


async def test_waiting_for_kv_is_waiting_with_the_reason_deferred() -> None:
    async with pair() as (prefill, decode):
        await decode.faults({"name": "kvSlow", "args": {"seconds": 30}})
        task = asyncio.create_task(through_pair(prefill, decode, PROMPT))
        await eventually(lambda: decode.process.sim.engine.gauges.deferred == 1, "transfer under way")
        page = (await decode.get("/metrics"))[1]
        assert 'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 1.0' in page
        assert (await decode.metrics())["vllm:num_requests_running"] == 0
        task.cancel()
        await eventually(lambda: decode.process.sim.engine.kv.live == 0, "blocks are free again")


@pytest.mark.parametrize("missing", ["remote_block_ids", "remote_engine_id", "remote_port"])
async def test_incomplete_parameters_mean_that_decode_computes_the_prompt(missing: str) -> None:
    async with pair() as (prefill, decode):
        params = await lend(prefill, PROMPT)
        del params[missing]
        status, body = await decode.complete(PROMPT, **MORE, kv_transfer_params=params)
        assert (status, said(body)) == (200, await alone(PROMPT, **MORE))
        assert (await decode.metrics())["vllm:nixl_bytes_transferred_count"] == 0


async def test_each_side_serves_requests_that_name_no_other() -> None:
    async with pair() as (prefill, decode):
        for engine in (prefill, decode):
            assert said((await engine.complete(PROMPT, **MORE))[1]) == await alone(PROMPT, **MORE)


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--engine-version", "0.31.0"), ("--block-size", "32"), ("--tensor-parallel-size", "2"), ("--dtype", "float32")],
)
async def test_sides_that_differ_refuse_each_other(flag: str, value: str) -> None:
    async with pair(decode=[flag, value]) as (prefill, decode):
        status, body = await through_pair(prefill, decode, PROMPT)
        assert status == 500
        assert "handshake refused" in body["error"]["message"]
        assert (await decode.metrics())["vllm:nixl_num_failed_transfers_total"] == 1


async def test_other_model_is_refused_and_recomputed_where_the_policy_says_so() -> None:
    recompute = connector("consumer", policy="recompute")
    async with running(*connector("producer"), model="other") as prefill, running(*recompute) as decode:
        status, body = await through_pair(prefill, decode, PROMPT, **MORE)
        assert (status, said(body)) == (200, await alone(PROMPT, **MORE))


async def test_other_version_is_taken_when_the_check_is_off() -> None:
    off = [*connector("consumer", enforce_handshake_compat=False), "--engine-version", "0.31.0"]
    async with pair(decode=off) as (prefill, decode):
        assert (await through_pair(prefill, decode, PROMPT))[0] == 200


async def test_parameters_of_a_process_that_was_replaced_at_its_address_fail() -> None:
    async with pair() as (prefill, decode):
        params = await lend(prefill, PROMPT)
        status, body = await decode.complete(PROMPT, kv_transfer_params={**params, "remote_engine_id": "gone"})
        assert status == 500
        assert "not gone" in body["error"]["message"]
        assert (await through_pair(prefill, decode, PROMPT))[0] == 200  # the new process is met with a new handshake


async def test_other_prompt_than_the_one_that_was_computed_fails() -> None:
    async with pair() as (prefill, decode):
        params = await lend(prefill, "short")
        status, body = await decode.complete(PROMPT, kv_transfer_params=params)
        assert (status, "the prompt has 7 blocks" in body["error"]["message"]) == (500, True)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
async def test_prefill_killed_while_it_is_read(policy: str) -> None:
    slow = json.dumps([{"name": "kvSlow", "args": {"seconds": 60}}])
    async with (
        spawned(*connector("producer"), "--speed", "10000", env={"SIM_FAULTS": slow}) as prefill,
        running(*connector("consumer", policy=policy)) as decode,
    ):
        params = await lend(prefill, PROMPT)
        request = asyncio.create_task(decode.complete(PROMPT, **MORE, kv_transfer_params=params))
        await eventually(lambda: decode.process.sim.engine.gauges.deferred == 1, "the pull has begun")
        prefill.process.kill()
        status, body = await request
        metrics = await decode.metrics()
        assert metrics["vllm:nixl_num_failed_transfers_total"] == 1
        assert metrics["vllm:nixl_bytes_transferred_count"] == 0
        external = 'source="external_kv_transfer"} ' + ("0.0" if policy == "recompute" else "100.0")
        assert external in (await decode.get("/metrics"))[1]
        if policy == "recompute":
            assert (status, said(body)) == (200, await alone(PROMPT, **MORE))
        else:
            assert status == 500
            assert (await decode.sim("ledger"))["totals"]["failed"] == 1
        assert (await decode.get("/health"))[0] == 200
        assert (await decode.complete())[0] == 200


async def test_pair_of_real_processes_says_what_one_engine_says() -> None:
    async with (
        spawned("--role", "prefill", "--speed", "10000") as prefill,
        spawned("--role", "decode", "--speed", "10000") as decode,
    ):
        assert (await prefill.sim("state"))["role"] == "prefill"
        answers = await asyncio.gather(
            *(through_pair(prefill, decode, f"number {number} {PROMPT}", **MORE) for number in range(20))
        )
        async with running() as unified:
            for number, (status, body) in enumerate(answers):
                assert status == 200
                assert said(body) == said((await unified.complete(f"number {number} {PROMPT}", **MORE))[1])
        prefill.sigterm()
        assert await prefill.exit_code() == 0


async def test_whatever_clients_do_nothing_is_held_in_the_end() -> None:
    rng = random.Random(3)
    lease: dict[str, Any] = {"kv_lease_duration": 1}
    sides = {
        "prefill": [*connector("producer", **lease), "--num-gpu-blocks-override", "60"],
        "decode": [*connector("consumer", policy="recompute", **lease), "--num-gpu-blocks-override", "40"],
    }
    async with pair(**sides) as (prefill, decode):
        await decode.faults(
            {"name": "kvFail", "probability": 0.2},
            {"name": "kvSlow", "args": {"seconds": 0.05}, "probability": 0.3},
            {"name": "halfStream", "args": {"tokens": 3}, "probability": 0.1},
        )

        async def impatient(number: int) -> None:
            leaves_after_s = rng.choice([0.01, 0.05, 0.2, 5.0])
            with suppress(TimeoutError, aiohttp.ClientError):
                async with asyncio.timeout(leaves_after_s):
                    await through_pair(prefill, decode, f"{number % 7} " * rng.randint(1, 200), **MORE)

        await asyncio.gather(*(impatient(number) for number in range(120)))
        for engine in (prefill, decode):
            kv = engine.process.sim.engine.kv
            await eventually(functools.partial(is_empty, kv), "all blocks are free")
            kv.check()
            assert engine.process.sim.engine.in_flight == engine.process.sim.handled == 0
        assert await held(prefill) == (0, 0)
