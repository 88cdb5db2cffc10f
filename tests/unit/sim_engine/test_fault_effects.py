"""Each fault that needs no process of its own, seen from outside; those of exit and SIGTERM are in test_process."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.unit.sim_engine.harness import InLoop, eventually, running, text_of

SHORT_S = 0.15
"""How long a test waits to see that nothing comes."""


async def is_silent(engine: InLoop) -> bool:
    try:
        await asyncio.wait_for(engine.complete(), SHORT_S)
    except TimeoutError:
        return True
    return False


async def set_fault(engine: InLoop, name: str, **fault: Any) -> None:
    status, body = await engine.faults({"name": name, **fault})
    assert status == 200, body


async def clear(engine: InLoop) -> None:
    async with engine.session.delete(engine.fault_url + "/sim/faults") as answer:
        assert (await answer.json())["faults"] == []


async def test_hang_answers_nothing_but_health_and_goes_on_when_removed() -> None:
    async with running() as engine:
        await set_fault(engine, "hang")
        stuck = asyncio.create_task(engine.complete())
        await eventually(lambda: engine.process.sim.engine.in_flight == 1, "request accepted")
        assert (await engine.get("/health"))[0] == 200
        assert (await engine.metrics())["vllm:num_requests_waiting"] == 1
        assert await is_silent(engine)
        await clear(engine)
        assert (await stuck)[0] == 200


async def test_hang_for_some_seconds_ends_by_itself() -> None:
    async with running() as engine:
        await set_fault(engine, "hang", args={"seconds": 0.3})
        assert await is_silent(engine)
        assert (await engine.complete())[0] == 200


async def test_frozen_engine_has_frozen_metrics_too() -> None:
    async with running() as engine:
        await engine.complete()
        before = await engine.metrics()
        await set_fault(engine, "frozen")
        assert await is_silent(engine)
        stuck = asyncio.create_task(engine.complete())
        await eventually(lambda: engine.process.sim.engine.in_flight == 1, "request accepted")
        during = await engine.metrics()
        assert {k: v for k, v in during.items() if k.startswith("vllm:")} == {
            k: v for k, v in before.items() if k.startswith("vllm:")
        }
        assert (await engine.get("/health"))[0] == 200
        await clear(engine)
        assert (await stuck)[0] == 200
        assert (await engine.metrics())["vllm:request_success_total"] == 2


async def test_crash_first_fails_this_and_open_requests_then_health_then_exits() -> None:
    async with running("--speed", "0.1") as engine:
        stream = asyncio.create_task(engine.stream(max_tokens=1000, ignore_eos=True))
        await eventually(lambda: engine.process.sim.engine.gauges.running == 1, "stream runs")
        await set_fault(engine, "crashFirst", args={"seconds": 0.1})
        assert (await engine.get("/health"))[0] == 200
        status, body = await engine.complete()
        assert (status, body["error"]["code"]) == (500, 500)
        events, end = await stream
        assert (events[-1]["error"]["code"], end) == (500, "[DONE]")
        assert (await engine.get("/health"))[0] == 503
        assert (await engine.complete())[0] == 500
        await eventually(lambda: engine.exit_codes == [1], "exit 1")
        assert (await engine.sim("ledger"))["totals"]["failed"] == 3


async def test_stall_stops_one_stream_and_no_other() -> None:
    async with running() as engine:
        await set_fault(engine, "stall", args={"seconds": 0.4, "afterTokens": 3}, count=1)
        stalled = asyncio.create_task(engine.stream(max_tokens=6, ignore_eos=True))
        await eventually(lambda: engine.process.sim.engine.in_flight == 1, "stalled stream runs")
        assert (await engine.complete())[0] == 200
        assert not stalled.done()
        events, end = await stalled
        assert (len(text_of(events)), end) == (24, "[DONE]")


STEP_S = 0.006
"""No step of the modelled engine is shorter at speed 1."""


@pytest.mark.parametrize(
    ("name", "metric", "tokens"),
    [("slowFirstToken", "time_to_first_token", 1), ("slowTokens", "inter_token_latency", 5)],
)
async def test_slow_tokens_are_slow_in_the_metrics(name: str, metric: str, tokens: int) -> None:
    async with running("--speed", "1") as engine:
        await set_fault(engine, name, args={"factor": 10})
        await engine.complete(max_tokens=6, ignore_eos=True)
        assert (await engine.metrics())[f"vllm:{metric}_seconds_sum"] > tokens * 10 * STEP_S


@pytest.mark.parametrize("stream", [True, False])
async def test_half_stream_breaks_the_connection_after_some_tokens(stream: bool) -> None:
    async with running() as engine:
        await set_fault(engine, "halfStream", args={"tokens": 3}, count=1)
        if stream:
            events, end = await engine.stream(max_tokens=10, ignore_eos=True)
            assert end != "[DONE]"
            assert len(text_of(events)) == 12
        else:
            with pytest.raises(Exception, match=r"disconnected|reset"):
                await engine.complete(max_tokens=10, ignore_eos=True)
        record = await engine.last_record()
        assert (record["ended"], record["detail"], record["tokensSent"]) == ("cut", "halfStream", 3 if stream else 0)
        assert engine.process.sim.engine.kv.live == 0
        assert (await engine.complete())[0] == 200


async def test_error_body_is_an_error_in_a_200() -> None:
    async with running() as engine:
        await set_fault(engine, "errorBody", args={"message": "oh"})
        status, body = await engine.complete()
        assert (status, body["error"]["message"]) == (200, "oh")
        events, end = await engine.stream()
        assert (events[0]["error"]["message"], end) == ("oh", "[DONE]")
        assert (await engine.sim("ledger"))["totals"]["failed"] == 2


async def test_status_answers_with_a_code_per_path() -> None:
    async with running() as engine:
        await engine.faults(
            {"name": "status", "args": {"code": 401, "path": "/v1/models"}},
            {"name": "status", "args": {"code": 429}, "count": 1},
        )
        assert (await engine.get("/v1/models"))[0] == 401
        assert (await engine.complete())[0] == 429
        assert (await engine.complete())[0] == 200
        assert (await engine.sim("ledger"))["totals"]["refused"] == 1


async def test_metric_faults_change_the_page_and_not_the_values() -> None:
    async with running() as engine:
        await engine.complete(max_tokens=5, ignore_eos=True)
        await engine.faults(
            {"name": "metricsDrop", "args": {"metric": "vllm:num_requests_running"}},
            {"name": "metricsRename", "args": {"metric": "vllm:generation_tokens_total", "to": "vllm:out_total"}},
            {"name": "metricsNaN", "args": {"metric": "vllm:kv_cache_usage_perc"}},
        )
        page = await engine.metrics()
        assert "vllm:num_requests_running" not in page
        assert "vllm:generation_tokens_total" not in page
        assert page["vllm:out_total"] == 5
        assert math.isnan(page["vllm:kv_cache_usage_perc"])
        await clear(engine)
        page = await engine.metrics()
        assert (page["vllm:generation_tokens_total"], page["vllm:kv_cache_usage_perc"]) == (5, 0)


async def test_metrics_drop_all_leaves_an_empty_page() -> None:
    async with running() as engine:
        await set_fault(engine, "metricsDrop", args={"metric": "*"})
        assert await engine.get("/metrics") == (200, "")


async def test_metrics_reset_starts_counters_again_at_zero() -> None:
    async with running() as engine:
        await engine.complete(max_tokens=5, ignore_eos=True)
        created = (await engine.metrics())["vllm:generation_tokens_created"]
        await set_fault(engine, "metricsReset", args={"metric": "*"})
        page = await engine.metrics()
        assert page["vllm:generation_tokens_total"] == page["vllm:time_to_first_token_seconds_count"] == 0
        assert page["vllm:generation_tokens_created"] > created
        await engine.complete(max_tokens=3, ignore_eos=True)
        assert (await engine.metrics())["vllm:generation_tokens_total"] == 3


async def test_metrics_slow_delays_the_page_alone() -> None:
    async with running() as engine:
        await set_fault(engine, "metricsSlow", args={"seconds": 60})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.metrics(), SHORT_S)
        assert (await engine.complete())[0] == 200


async def test_clock_jump_moves_the_wall_clock_and_nothing_that_is_measured() -> None:
    async with running() as engine:
        before = (await engine.complete())[1]["created"]
        start = (await engine.metrics())["process_start_time_seconds"]
        await set_fault(engine, "clockJump", args={"seconds": -86400})
        assert (await engine.complete())[1]["created"] <= before - 86390
        page = await engine.metrics()
        assert page["process_start_time_seconds"] == start
        assert 0 <= page["vllm:e2e_request_latency_seconds_sum"] < 10


async def test_memory_grows_to_its_maximum_and_is_given_back() -> None:
    async with running() as engine:
        await set_fault(engine, "memoryGrow", args={"mbPerSecond": 200, "maxMb": 20})
        await eventually(lambda: engine.process.sim.memory_mb == 20, "20 MB held")
        await clear(engine)
        await eventually(lambda: engine.process.sim.memory_mb == 0, "given back")


async def test_slow_load_and_never_ready_keep_the_port_closed_until_removed() -> None:
    faults = json.dumps([{"name": "neverReady"}, {"name": "slowLoad", "args": {"seconds": 0.2}}])
    async with running(env={"SIM_FAULTS": faults}, wait=False) as engine:
        assert (await engine.sim("state"))["phase"] == "loading"
        async with engine.session.delete(engine.fault_url + "/sim/faults?name=neverReady") as answer:
            assert (await answer.json())["removed"] == 1
        assert (await engine.sim("state"))["phase"] == "loading"
        await eventually(lambda: engine.process.sim.port, "loaded in the end")


async def test_start_fault_can_be_put_while_loading() -> None:
    async with running("--load-seconds", "30", wait=False) as engine:
        await set_fault(engine, "neverReady")
        assert (await engine.sim("faults"))["faults"][0]["active"] is True


async def test_faults_file_is_read_again_and_a_wrong_one_is_reported_not_obeyed(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text('[{"name": "hang"}]')
    async with running("--faults-file", str(path)) as engine:
        assert await is_silent(engine)
        path.write_text('[{"name": "nonsense"}]')
        await eventually(lambda: engine.process.sim.faults_file_error, "error reported")
        assert "unknown fault 'nonsense'" in (await engine.sim("state"))["faultsFileError"]
        assert (await engine.sim("faults"))["faults"][0]["name"] == "hang"
        path.unlink()
        await eventually(lambda: not engine.process.sim.engine.is_paused, "hang is over")
        assert (await engine.sim("state"))["faultsFileError"] is None


async def test_fault_after_seconds_comes_by_itself() -> None:
    async with running() as engine:
        await set_fault(engine, "hang", when={"afterSeconds": 0.2})
        assert (await engine.complete())[0] == 200
        await eventually(lambda: engine.process.sim.engine.is_paused, "hangs after a while")
