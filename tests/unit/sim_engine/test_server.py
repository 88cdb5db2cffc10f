"""The engine's port over real loopback sockets, nothing wrong with it."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from sluice_sim.text import tokenize
from tests.unit.sim_engine.harness import FAST, eventually, running, text_of

GAUGES = ("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc")
TOTALS = (
    *("generation_tokens", "prompt_tokens", "prompt_tokens_cached", "prompt_tokens_by_source", "prefix_cache_queries"),
    *("prefix_cache_hits", "request_success", "num_preemptions"),
)
HISTOGRAMS = (
    *("iteration_tokens_total", "time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("request_queue_time_seconds", "e2e_request_latency_seconds"),
)
NEW_NAMES = [
    *GAUGES,
    "cache_config_info",
    *(f"{name}{end}" for name in TOTALS for end in ("_total", "_created")),
    *(f"{name}{end}" for name in HISTOGRAMS for end in ("_bucket", "_sum", "_count", "_created")),
]
OLD_NAMES = ["gpu_cache_usage_perc", "gpu_prefix_cache_queries_total", "time_per_output_token_seconds_sum"]


async def test_answers_completions_and_chats_plain_and_streamed_alike() -> None:
    async with running() as engine:
        status, plain = await engine.complete("tell me", max_tokens=20, ignore_eos=True)
        events, end = await engine.stream("tell me", max_tokens=20, ignore_eos=True)
        assert (status, end) == (200, "[DONE]")
        assert text_of(events) == plain["choices"][0]["text"]
        assert len(plain["choices"][0]["text"]) == 80
        assert plain["usage"] == {
            "prompt_tokens": 2,
            "completion_tokens": 20,
            "total_tokens": 22,
            "prompt_tokens_details": None,
        }
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        chat: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "tell me"}], "max_tokens": 5}
        status, plain = await engine.post("/v1/chat/completions", chat)
        assert (status, plain["object"]) == (200, "chat.completion")
        events, end = await engine.stream(path="/v1/chat/completions", stream_options={"include_usage": True}, **chat)
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        said = "".join(event["choices"][0]["delta"]["content"] for event in events[:-1])
        assert said == plain["choices"][0]["message"]["content"]
        assert events[-1]["choices"] == []
        assert events[-1]["usage"] == plain["usage"]


async def test_all_replicas_give_the_same_answer_and_another_model_another() -> None:
    async def said(*flags: str, model: str = "model") -> str:
        async with running(*flags, model=model) as engine:
            text: str = (await engine.complete(max_tokens=30, ignore_eos=True))[1]["choices"][0]["text"]
            return text

    assert await said() == await said("--seed", "5", "--speed", "99") != await said(model="other")


async def test_plain_endpoints_answer_as_vllm() -> None:
    async with running("--max-model-len", "500") as engine:
        assert await engine.get("/health") == (200, "")
        assert await engine.get("/ping") == (200, "")
        assert json.loads((await engine.get("/version"))[1])["version"].startswith("0.32")
        [card] = json.loads((await engine.get("/v1/models"))[1])["data"]
        assert (card["id"], card["max_model_len"], card["root"]) == ("m", 500, "model")
        status, tokens = await engine.post("/tokenize", {"model": "m", "prompt": "hello"})
        assert (status, tokens["count"], tokens["tokens"]) == (200, 2, tokenize("hello"))
        assert (await engine.post("/tokenize", {"model": "x", "prompt": "hello"}))[0] == 404


async def test_errors_have_the_openai_shape_and_are_refusals_in_the_ledger() -> None:
    async with running("--max-model-len", "50") as engine:
        status, body = await engine.complete("x" * 400)
        assert (status, body["error"]["code"], body["error"]["type"]) == (400, 400, "BadRequestError")
        status, body = await engine.complete(model="nobody")
        assert (status, body["error"]["type"]) == (404, "NotFoundError")
        async with engine.session.post(engine.url + "/v1/completions", data=b"{") as answer:
            assert answer.status == 400
        assert (await engine.sim("ledger"))["totals"]["refused"] == 3


async def test_api_key_guards_v1_only() -> None:
    async with running("--api-key", "secret") as engine:
        for path in ("/health", "/metrics", "/load", "/version"):
            assert (await engine.get(path))[0] == 200
        assert (await engine.get("/v1/models"))[0] == 401
        assert await engine.complete() == (401, {"error": "Unauthorized"})
        assert (await engine.get("/v1/models", headers={"Authorization": "Bearer wrong"}))[0] == 401
        key = {"Authorization": "Bearer secret"}
        assert (await engine.post("/v1/completions", {"prompt": "x"}, headers=key))[0] == 200


async def test_request_id_comes_back_and_stands_in_the_ledger() -> None:
    async with running("--enable-request-id-headers") as engine:
        body = {"model": "m", "prompt": "x"}
        headers = {"X-Request-Id": "my-id", "User-Agent": "self-test"}
        async with engine.session.post(engine.url + "/v1/completions", json=body, headers=headers) as answer:
            assert answer.headers["X-Request-Id"] == "my-id"
            assert (await answer.json())["id"] == "cmpl-my-id"
        async with engine.session.get(engine.url + "/health") as answer:
            assert answer.headers["X-Request-Id"]
        record = await engine.last_record()
        assert (record["id"], record["userAgent"], record["ended"]) == ("my-id", "self-test", "complete")
    async with running() as engine, engine.session.get(engine.url + "/health") as answer:
        assert "X-Request-Id" not in answer.headers


@pytest.mark.parametrize(("version", "names"), [("new", NEW_NAMES), ("old", OLD_NAMES)])
async def test_metrics_have_vllms_names(version: str, names: list[str]) -> None:
    async with running("--metrics-version", version) as engine:
        await engine.complete()
        page = (await engine.get("/metrics"))[1]
        published = {line.split("{")[0] for line in page.splitlines() if line.startswith("vllm:")}
        assert {f"vllm:{name}" for name in names} <= published
        assert ("vllm:kv_cache_usage_perc" in published) == (version == "new")
        labelled = [line for line in page.splitlines() if line.startswith("vllm:num_requests_running")]
        assert labelled == ['vllm:num_requests_running{engine="0",model_name="m"} 0.0']
        assert "process_start_time_seconds " in page


async def test_counters_count_what_was_done() -> None:
    async with running() as engine:
        await engine.complete("x" * 256, max_tokens=10, ignore_eos=True)
        await engine.complete("x" * 256, max_tokens=10, ignore_eos=True)
        metrics = await engine.metrics()
        assert metrics["vllm:prompt_tokens_total"] == 128
        assert metrics["vllm:generation_tokens_total"] == 20
        assert metrics["vllm:prompt_tokens_cached_total"] == metrics["vllm:prefix_cache_hits_total"] == 48
        assert metrics["vllm:request_success_total"] == 2
        assert metrics["vllm:time_to_first_token_seconds_count"] == 2
        assert metrics["vllm:inter_token_latency_seconds_count"] == 18
        assert metrics["vllm:iteration_tokens_total_count"] == 20
        assert metrics["vllm:kv_cache_usage_perc"] == 0
        assert (await engine.last_record())["cachedTokens"] == 48


async def test_running_waiting_load_and_kv_use_are_seen_while_requests_run() -> None:
    flags = ["--speed", "1", "--max-num-seqs", "2", "--num-gpu-blocks-override", "100", "--enable-server-load-tracking"]
    async with running(*flags) as engine:
        tasks = [asyncio.create_task(engine.complete("x" * 640, max_tokens=400, ignore_eos=True)) for _ in range(3)]
        await eventually(lambda: engine.process.sim.engine.gauges.waiting == 1, "two run, one waits")
        metrics = await engine.metrics()
        assert (metrics["vllm:num_requests_running"], metrics["vllm:num_requests_waiting"]) == (2, 1)
        assert metrics["vllm:num_requests_waiting_by_reason"] == 1
        assert 0 < metrics["vllm:kv_cache_usage_perc"] < 1
        assert json.loads((await engine.get("/load"))[1]) == {"server_load": 3}
        for task in tasks:
            task.cancel()


async def test_load_is_zero_without_tracking() -> None:
    async with running("--speed", "1") as engine:
        task = asyncio.create_task(engine.complete(max_tokens=400, ignore_eos=True))
        await eventually(lambda: engine.process.sim.handled == 1, "one request in flight")
        assert json.loads((await engine.get("/load"))[1]) == {"server_load": 0}
        task.cancel()


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_goes_frees_slot_and_blocks_at_once(stream: bool) -> None:
    async with running("--speed", "0.1") as engine:
        sim = engine.process.sim
        task = asyncio.create_task(engine.complete("x" * 640, max_tokens=1000, ignore_eos=True, stream=stream))
        await eventually(lambda: sim.engine.kv.live > 0, "request runs")
        task.cancel()
        await eventually(lambda: sim.ledger.totals["client_gone"] == 1, "disconnect noticed")
        assert (sim.engine.gauges.running, sim.engine.kv.live, sim.handled) == (0, 0, 0)
        record = await engine.last_record()
        assert (record["ended"], record["promptTokens"]) == ("client_gone", 160)
        assert (await engine.metrics())["vllm:request_success_total"] == 0


async def test_full_queue_is_503_for_plain_requests_and_an_sse_error_in_a_200_for_streams() -> None:
    async with running("--speed", "0.1", "--max-num-queued-reqs", "1") as engine:
        task = asyncio.create_task(engine.complete(max_tokens=1000, ignore_eos=True))
        await eventually(lambda: engine.process.sim.engine.in_flight == 1, "one request in flight")
        assert (await engine.complete())[0] == 503
        events, end = await engine.stream()
        assert (events[0]["error"]["code"], end) == (503, "[DONE]")
        assert (await engine.metrics())["vllm:admission_rejections_total"] == 2
        assert (await engine.sim("ledger"))["totals"]["refused"] == 2
        task.cancel()


async def test_stop_string_ends_plain_and_streamed_answers() -> None:
    async with running() as engine:
        _, free = await engine.complete(max_tokens=12, ignore_eos=True)
        text = free["choices"][0]["text"]
        _, body = await engine.complete(max_tokens=12, stop=text[18:26])
        assert body["choices"][0]["text"] == text[: text.index(text[18:26])]
        assert body["choices"][0]["finish_reason"] == "stop"
        events, _ = await engine.stream(max_tokens=12, stop=[text[18:26]])
        assert text_of(events) == body["choices"][0]["text"]


async def test_port_is_closed_while_loading_and_the_fault_port_open() -> None:
    async with running("--load-seconds", "0.3", wait=False) as engine:
        state = await engine.sim("state")
        assert (state["phase"], state["port"]) == ("loading", None)
        await eventually(lambda: engine.process.sim.port, "loaded")
        assert (await engine.sim("state"))["phase"] == "serving"


async def test_fault_port_refuses_what_it_does_not_know() -> None:
    async with running() as engine:
        status, body = await engine.faults({"name": "nonsense"})
        assert status == 400
        assert "known: hang" in body["error"]
        status, body = await engine.faults({"name": "slowLoad", "args": {"seconds": 5}})
        assert status == 400
        assert "acts only until the model is loaded" in body["error"]
        assert (await engine.sim("faults"))["faults"] == []
        assert "portChange" in (await engine.sim("faults"))["known"]
        async with engine.session.delete(engine.fault_url + "/sim/faults?name=nonsense") as answer:
            assert answer.status == 404
        async with engine.session.get(engine.fault_url + "/sim/ledger?since=1") as answer:
            assert answer.status == 400


async def test_five_hundred_requests_at_once_all_complete_with_their_own_answer() -> None:
    """Throughput as a count: every request completes, none waits for another client's token."""
    async with running(*FAST) as engine:

        async def one(number: int) -> Any:
            return await engine.complete(f"prompt number {number}", max_tokens=4, ignore_eos=True)

        answers = await asyncio.gather(*(one(number) for number in range(500)))
        assert {status for status, _ in answers} == {200}
        assert len({body["choices"][0]["text"] for _, body in answers}) > 490
        totals = (await engine.sim("ledger"))["totals"]
        assert (totals["complete"], totals["open"]) == (500, 0)
        assert (await engine.metrics())["vllm:generation_tokens_total"] == 2000


async def test_bodies_over_the_limit_are_refused_in_the_ledger() -> None:
    async with running() as engine:
        body = b'{"prompt": "' + b"x" * (16 * 1024 * 1024) + b'"}'
        try:
            async with engine.session.post(engine.url + "/v1/completions", data=body) as answer:
                assert answer.status == 413
        except aiohttp.ClientError:
            pass  # the engine may close before the client has written everything
        await eventually(lambda: engine.process.sim.ledger.totals["refused"] == 1, "refusal in the ledger")
