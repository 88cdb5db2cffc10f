"""What differs in the SGLang flavour when nothing moves between engines."""

import asyncio
import json
from typing import Any

import pytest

from sluice_sim.cli import parse
from sluice_sim.config import Role
from tests.unit.sim_engine.harness import SGLANG, eventually, in_flight, running, said, spawned

NAMES = [
    *("num_running_reqs", "num_queue_reqs", "token_usage", "max_total_num_tokens", "num_prefill_bootstrap_queue_reqs"),
    *("num_prefill_inflight_queue_reqs", "num_decode_prealloc_queue_reqs", "num_decode_transfer_queue_reqs"),
    *("realtime_tokens_total", "generation_tokens_total", "prompt_tokens_total", "cached_tokens_total"),
    *("num_requests_total", "num_aborted_requests_total", "num_retracted_requests_total"),
    *("num_transfer_failed_reqs_total", "num_bootstrap_failed_reqs_total", "time_to_first_token_seconds_bucket"),
    *("inter_token_latency_seconds_sum", "queue_time_seconds_count", "kv_transfer_total_mb_sum"),
]
LONG: dict[str, Any] = {"max_tokens": 80, "ignore_eos": True}
"""About half a second at speed 1."""


def test_takes_the_command_line_made_for_the_real_engine() -> None:
    config = parse(
        [
            *("serve", "--flavor", "sglang", "--model-path", "/weights/abc", "--served-model-name", "tiny"),
            *("--host", "0.0.0.0", "--port", "30000", "--enable-metrics", "--tp", "16", "--pp-size", "2"),
            *("--nnodes", "4", "--node-rank", "3", "--dist-init-addr", "leader.ns:20000", "--attn-dp-size", "8"),
            *("--ep", "16", "--moe-a2a-backend", "deepep", "--deepep-mode", "low_latency", "--enable-eplb"),
            *("--ep-num-redundant-experts", "32", "--enable-metrics-for-all-schedulers"),
            *("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mooncake"),
            *("--disaggregation-ib-device", "mlx5_0", "--disaggregation-enable-kv-checksum"),
            *("--max-running-requests", "64", "--context-length", "4096", "--mem-fraction-static", "0.8"),
        ],
        {},
    )
    assert (config.role, config.model, config.served_names) == (Role.DECODE, "/weights/abc", ("tiny",))
    assert (config.layout.tensor, config.layout.pipeline, config.layout.expert) == (16, 2, True)
    assert config.group is not None
    assert (config.group.size, config.group.rank, config.group.host, config.group.port) == (4, 3, "leader.ns", 20000)
    assert (config.limits.max_num_seqs, config.max_model_len) == (64, 4096)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["m", "--model-path", "n"], "name the model once"),
        ([], "name the model once"),
        (["m", "--role", "prefill", "--disaggregation-mode", "decode"], "contradicts --disaggregation-mode"),
        (["m", "--nnodes", "2", "--tp", "2"], "needs --dist-init-addr"),
        (["m", "--nnodes", "2", "--tp", "3", "--dist-init-addr", "a:1"], "can't be spread"),
        (["m", "--node-rank", "1"], "not within --nnodes"),
        (["m", "--block-size", "16"], "--block-size"),
    ],
)
def test_bad_value_is_refused_with_what_to_do(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["serve", "--flavor=sglang", *argv], {})
    assert message in capsys.readouterr().err


async def test_same_prompt_same_text_as_the_other_flavour() -> None:
    async with running(*SGLANG) as sglang, running() as vllm:
        assert said((await sglang.complete("hello"))[1]) == said((await vllm.complete("hello"))[1])


async def test_port_is_open_while_loading_and_says_503() -> None:
    async with running(*SGLANG, "--load-seconds", "0.4", wait=False) as engine:
        await eventually(lambda: engine.process.sim.port, "port open")
        engine.port = engine.process.sim.port or 0
        for path in ("/health", "/ready", "/v1/models", "/metrics"):
            assert (await engine.get(path))[0] == 503
        assert (await engine.complete())[0] == 503
        await eventually(lambda: engine.process.sim.phase == "serving", "loaded")
        assert (await engine.get("/ready"))[0] == 200
        assert (await engine.complete())[0] == 200


async def test_health_is_a_generation_and_fails_while_the_engine_hangs() -> None:
    async with running(*SGLANG, env={"SGLANG_HEALTH_CHECK_TIMEOUT": "0.3"}) as engine:
        assert (await engine.get("/health_generate"))[0] == 200
        await engine.faults({"name": "hang"})
        assert (await engine.get("/health"))[0] == 503
        assert (await engine.get("/ready"))[0] == 503
        assert (await engine.get("/ping"))[0] == 200
        await engine.faults()
        assert (await engine.get("/health"))[0] == 200
        assert (await engine.get("/ready"))[0] == 200


async def test_metrics_have_sglangs_names_and_generation_is_counted_at_the_end() -> None:
    async with running(*SGLANG, "--speed", "1") as engine:
        task = asyncio.create_task(engine.complete(**LONG))
        await eventually(lambda: engine.process.sim.engine.outputs > 2, "tokens come")
        metrics = await engine.metrics()
        assert {f"sglang:{name}" for name in NAMES} <= set(metrics)
        assert not [name for name in metrics if name.endswith("_created") or name.startswith("vllm:")]
        assert metrics["sglang:num_running_reqs"] == 1
        assert metrics["sglang:realtime_tokens_total"] > 2
        assert metrics["sglang:generation_tokens_total"] == 0
        await task
        assert (await engine.metrics())["sglang:generation_tokens_total"] == 80


async def test_without_the_flag_there_are_no_metrics() -> None:
    async with running("--flavor", "sglang") as engine:
        assert (await engine.get("/metrics"))[0] == 404


async def test_loads_and_infos_tell_what_a_router_asks_for() -> None:
    async with running(*SGLANG, "--tp", "2") as engine:
        load = json.loads((await engine.get("/v1/loads"))[1])["loads"][0]
        assert (load["num_running_reqs"], load["num_waiting_reqs"], load["token_usage"]) == (0, 0, 0)
        info = json.loads((await engine.get("/server_info"))[1])
        assert (info["tp_size"], info["disaggregation_mode"]) == (2, "null")
        assert json.loads((await engine.get("/model_info"))[1])["model_path"] == "model"
        assert (await engine.get("/load"))[0] == 404


async def test_api_key_guards_all_but_health_and_metrics() -> None:
    async with running(*SGLANG, "--api-key", "secret") as engine:
        assert [(await engine.get(path))[0] for path in ("/ready", "/metrics", "/v1/loads", "/v1/models")] == [
            *(200, 200),
            *(401, 401),
        ]
        assert (await engine.complete())[0] == 401


async def test_drain_takes_new_requests_and_ends_when_none_is_open() -> None:
    async with spawned(*SGLANG, "--speed", "1") as engine:
        stream = asyncio.create_task(engine.stream(**LONG))
        await in_flight(engine)
        engine.sigterm()
        await eventually(lambda: engine.logged("sigterm"), "drain begins")
        assert (await engine.get("/health"))[0] == 503
        assert (await engine.complete())[0] == 200
        assert (await stream)[1] == "[DONE]"
        assert await engine.exit_code() == 0


async def test_engine_that_failed_its_health_request_exits_without_a_drain() -> None:
    env = {"SGLANG_HEALTH_CHECK_TIMEOUT": "0.2"}
    async with spawned(*SGLANG, env=env) as engine:
        await engine.faults({"name": "hang"})
        stream = asyncio.create_task(engine.stream(**LONG))
        assert (await engine.get("/health"))[0] == 503
        engine.sigterm()
        assert await engine.exit_code() == 0
        await stream
