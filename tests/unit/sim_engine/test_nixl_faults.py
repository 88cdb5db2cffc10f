"""Faults of the transfer in the vLLM flavour, set on either side."""

from typing import Any

import pytest

from tests.unit.sim_engine.harness import LEND, InLoop, eventually, running, said, through_pair
from tests.unit.sim_engine.nixl_pairs import MORE, PROMPT, alone, connector, held, pair


async def set_on(side: str, engines: tuple[InLoop, InLoop], name: str, **fault: Any) -> None:
    status, body = await engines[side == "decode"].faults({"name": name, "count": 1, **fault})
    assert status == 200, body


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_corrupt_kv_is_wrong_text_in_a_200(side: str) -> None:
    async with pair() as engines:
        await set_on(side, engines, "kvCorrupt")
        status, body = await through_pair(*engines, PROMPT, **MORE)
        assert status == 200
        assert said(body) != await alone(PROMPT, **MORE)
        assert (await engines[1].metrics())["vllm:nixl_num_failed_transfers_total"] == 0
        other = "z" + PROMPT
        assert said((await through_pair(*engines, other, **MORE))[1]) == await alone(other, **MORE)


async def test_wrong_kv_stays_in_the_prefix_cache_of_decode() -> None:
    async with pair() as (prefill, decode):
        await decode.faults({"name": "kvCorrupt", "count": 1})
        wrong = said((await through_pair(prefill, decode, PROMPT, **MORE))[1])
        assert said((await decode.complete(PROMPT, **MORE))[1]) == wrong


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
async def test_failed_transfer_follows_the_policy(side: str, policy: str) -> None:
    async with pair(decode=connector("consumer", policy=policy)) as engines:
        await set_on(side, engines, "kvFail")
        status, body = await through_pair(*engines, PROMPT, **MORE)
        assert status == (500 if policy == "fail" else 200)
        assert policy == "fail" or said(body) == await alone(PROMPT, **MORE)
        assert (await engines[1].metrics())["vllm:nixl_num_failed_transfers_total"] == 1
        assert await held(engines[0]) == (1, 7)  # until the lease is over
        assert (await through_pair(*engines, PROMPT))[0] == 200


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_slow_transfer_delays_the_first_token(side: str) -> None:
    async with pair() as engines:
        await set_on(side, engines, "kvSlow", args={"seconds": 0.3})
        assert (await through_pair(*engines, PROMPT))[0] == 200
        assert (await engines[1].metrics())["vllm:time_to_first_token_seconds_sum"] > 0.3


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_kv_that_is_never_pulled_stays_until_its_lease_is_over(side: str) -> None:
    expected = await alone(PROMPT, **MORE)
    async with pair(prefill=connector("producer", kv_lease_duration=1)) as engines:
        prefill, decode = engines
        await set_on(side, engines, "kvNeverPulled")
        _, first = await prefill.complete(PROMPT, max_tokens=1, kv_transfer_params=LEND)
        assert ("kv_transfer_params" in first) == (side == "decode")
        _, body = await decode.complete(PROMPT, **MORE, kv_transfer_params=first.get("kv_transfer_params"))
        assert said(body) == expected
        assert await held(prefill) == (1, 7)
        await eventually(lambda: prefill.process.sim.engine.kv.live == 0, "lease is over")
        assert (await prefill.metrics())["vllm:nixl_num_kv_expired_reqs_total"] == 1


async def test_stale_on_prefill_is_wrong_text_and_counted_there() -> None:
    async with pair() as engines:
        await set_on("prefill", engines, "kvStale")
        status, body = await through_pair(*engines, PROMPT, **MORE)
        assert status == 200
        assert said(body) != await alone(PROMPT, **MORE)
        assert (await engines[1].metrics())["vllm:nixl_num_failed_transfers_total"] == 0
        metrics = await engines[0].metrics()
        assert metrics["vllm:nixl_num_kv_expired_reqs_total"] == 1
        assert metrics["vllm:nixl_num_notifications_after_expiry_total"] == 1


async def test_stale_on_decode_waits_out_the_lease_without_heartbeats() -> None:
    lease: dict[str, Any] = {"kv_lease_duration": 0.3}
    sides = {"prefill": connector("producer", **lease), "decode": connector("consumer", **lease)}
    async with pair(**sides) as engines:
        await set_on("decode", engines, "kvStale")
        assert (await through_pair(*engines, PROMPT))[0] == 200
        metrics = await engines[0].metrics()
        assert metrics["vllm:nixl_num_kv_expired_reqs_total"] == 1
        assert metrics["vllm:nixl_num_notifications_after_expiry_total"] == 1


async def test_transfer_faults_are_refused_by_an_engine_that_hands_nothing_over() -> None:
    async with running() as engine:
        for name, args in (("kvCorrupt", {}), ("kvSlow", {"seconds": 1}), ("kvStale", {})):
            status, body = await engine.faults({"name": name, "args": args})
            assert status == 400
            assert name in body["error"]
            assert "--role prefill or decode" in body["error"]
