"""Reading an engine's metrics page: the right sample, and never a zero for something unreadable."""

import pytest

from sluice.agent.exposition import read_process_start, read_samples, read_signals, wanted_names
from sluice.api.agent import MetricSource, Signal

PAGE = """\
# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.2
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.4
vllm:num_requests_waiting{engine="0",model_name="m"} NaN
vllm:generation_tokens_total{engine="0",model_name="say \\"hi, {you}\\""} 1.2e+03 1700000000000
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 2
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 5
process_start_time_seconds 1.75e+09
vllm:broken{engine="0" 7
"""
SOURCES = {
    Signal.RUNNING: [MetricSource(name="vllm:num_requests_running")],
    Signal.WAITING: [MetricSource(name="vllm:num_requests_waiting")],
    Signal.KV_UTILIZATION: [
        MetricSource(name="vllm:kv_cache_usage_perc", reduce="mean"),
        MetricSource(name="vllm:gpu_cache_usage_perc", reduce="mean"),
    ],
    Signal.GENERATION_TOKENS: [MetricSource(name="vllm:generation_tokens_total")],
}


def _read(page: str, sources: dict[Signal, list[MetricSource]]) -> dict[Signal, float]:
    return read_signals(read_samples(page, wanted_names(sources)), sources)


def test_ranks_are_summed_and_kv_is_averaged_and_nan_is_unknown() -> None:
    signals = _read(PAGE, SOURCES)
    assert signals == {
        Signal.RUNNING: 7.0,
        Signal.KV_UTILIZATION: pytest.approx(0.3),
        Signal.GENERATION_TOKENS: 1200.0,
    }


def test_a_core_that_publishes_no_number_makes_the_signal_unknown_instead_of_too_small() -> None:
    page = PAGE.replace('vllm:num_requests_running{engine="1",model_name="m"} 4.0', "{}")
    for unreadable in ("NaN", "+Inf", "many"):
        line = f'vllm:num_requests_running{{engine="1",model_name="m"}} {unreadable}'
        assert Signal.RUNNING not in _read(page + line, SOURCES)
    assert Signal.RUNNING not in _read(page + 'vllm:num_requests_running{engine="1 3', SOURCES)


def test_an_unreadable_new_name_does_not_fall_back_to_a_stale_old_one() -> None:
    page = PAGE.replace("0.4", "NaN") + 'vllm:gpu_cache_usage_perc{engine="0"} 0.9\n'
    assert Signal.KV_UTILIZATION not in _read(page, SOURCES)


@pytest.mark.parametrize(("reduce", "expected"), [("sum", 5.0), ("mean", 2.5)])
def test_ranks_of_one_core_count_once(reduce: str, expected: float) -> None:
    page = """\
queue{dp_rank="0",tp_rank="0"} 3
queue{dp_rank="0",tp_rank="1"} 2
queue{dp_rank="1",tp_rank="2"} 2
queue{dp_rank="1",tp_rank="3"} 2
"""
    source = MetricSource(name="queue", per="dp_rank", reduce=reduce)
    assert _read(page, {Signal.WAITING: [source]}) == {Signal.WAITING: expected}


def test_ranks_without_the_label_are_one_core() -> None:
    source = MetricSource(name="queue", per="dp_rank")
    assert _read('queue{pp_rank="0"} 3\nqueue{pp_rank="1"} 1\n', {Signal.WAITING: [source]}) == {Signal.WAITING: 3.0}


def test_first_present_name_wins() -> None:
    old = PAGE.replace("kv_cache_usage_perc", "gpu_cache_usage_perc")
    assert _read(old, SOURCES)[Signal.KV_UTILIZATION] == pytest.approx(0.3)


def test_only_samples_with_the_wanted_labels_count() -> None:
    source = MetricSource(name="vllm:num_requests_waiting_by_reason", labels={"reason": "capacity"})
    assert _read(PAGE, {Signal.WAITING: [source]}) == {Signal.WAITING: 5.0}


def test_process_start_is_read() -> None:
    assert read_process_start(read_samples(PAGE, wanted_names({}))) == 1.75e9
    assert read_process_start(read_samples("", wanted_names({}))) is None


@pytest.mark.parametrize("page", ["", "\x00\xff garbage", 'vllm:num_requests_running{engine="0"', "a" * 100_000])
def test_garbage_gives_nothing(page: str) -> None:
    assert _read(page, SOURCES) == {}


def test_a_line_end_of_unicode_inside_a_label_ends_no_line() -> None:
    page = 'x{a="one\u2028two"} 3\nx{a="b\x85c"} 4\n'
    assert read_signals(read_samples(page, {"x"}), {Signal.RUNNING: [MetricSource(name="x")]}) == {Signal.RUNNING: 7.0}
