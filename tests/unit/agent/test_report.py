"""What goes over the wire: wall time, clean and bounded texts."""

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from pydantic import ValidationError

from sluice.agent.engine import Answer, judge_answer
from sluice.agent.facts import TestKind, TestResult
from sluice.agent.report import Clock, StateCollector, clean, report
from sluice.api.agent import MAX_COUNT, MAX_STATE_BYTES, AgentState
from tests.unit.agent.timeline import CONFIG, Timeline


def test_times_are_wall_clock_and_numbers_unknown_are_null() -> None:
    state = Timeline().serving().state
    told = report(replace(state, load=replace(state.load, in_flight=None)), CONFIG, Clock(offset_s=1_000_000.0))
    assert told.started_at == state.run_started_at + 1_000_000.0
    assert told.self_test.passed is True
    assert told.in_flight is None
    assert '"inFlight":null' in told.model_dump_json(by_alias=True)


def test_texts_of_the_engine_are_cut_and_stripped() -> None:
    assert clean("a\x00b\n\x1b[31m" + "x" * 5000).startswith("a b  [31mx")
    nasty = TestResult(0.0, 1.0, TestKind.FAILED, "\n\x07" * 100_000)
    state = replace(Timeline().serving().state, last_test=nasty, message="m" * 100_000)
    told = report(state, CONFIG, Clock(0.0)).model_dump_json(by_alias=True)
    assert len(told.encode()) < MAX_STATE_BYTES


def test_metrics_have_no_sample_for_an_unknown_number() -> None:
    state = Timeline().serving().state
    registry = CollectorRegistry(auto_describe=False)
    registry.register(
        StateCollector(lambda: report(replace(state, load=replace(state.load, in_flight=None)), CONFIG, Clock(0.0)))
    )
    page = generate_latest(registry).decode()
    assert 'sluice_agent_phase{instance="chat-default-0-1",phase="Ready"} 1.0' in page
    assert "sluice_agent_running{" in page
    assert "sluice_agent_in_flight{" not in page


def test_self_test_passes_only_with_one_finished_choice_and_no_error() -> None:
    good = '{"choices": [{"text": "a", "finish_reason": "length"}]}'
    table = {
        Answer(200, good): TestKind.PASSED,
        Answer(200, '{"error": {"message": "boom"}, "choices": [{"finish_reason": "stop"}]}'): TestKind.FAILED,
        Answer(200, '{"choices": []}'): TestKind.FAILED,
        Answer(200, '{"choices": [{"text": "a", "finish_reason": null}]}'): TestKind.FAILED,
        Answer(200, '{"choices": ["a"]}'): TestKind.FAILED,
        Answer(200, "[]"): TestKind.FAILED,
        Answer(200, "<html>"): TestKind.FAILED,
        Answer(307, ""): TestKind.FAILED,
        Answer(500, "boom"): TestKind.FAILED,
        Answer(503, "full"): TestKind.OVERLOADED,
        Answer(429, "full"): TestKind.OVERLOADED,
        Answer(401, ""): TestKind.UNAUTHORIZED,
        Answer(403, ""): TestKind.UNAUTHORIZED,
        Answer(404, ""): TestKind.REJECTED,
        Answer(error="no answer in time"): TestKind.UNANSWERED,
    }
    assert {answer: judge_answer(answer)[0] for answer in table} == table


def test_tokens_of_self_tests_are_not_counted_as_users() -> None:
    line = Timeline().serving()
    line.costs = (7, 1)
    line.play(60)
    tests = line.tests_sent
    line.tokens_per_s = 5.0
    line.play(10)
    told = report(line.state, line.config, Clock(0.0))
    assert tests > 3
    assert told.generation_tokens == line.users_tokens


def test_token_counters_never_fall_whichever_of_counter_and_answer_is_seen_first() -> None:
    line = Timeline().serving()
    line.costs = (7, 1)
    line.early = True  # the engine counts the test's token one round before its answer is seen
    shown = []
    for _ in range(60):
        line.play(1)
        shown.append(report(line.state, line.config, Clock(0.0)).generation_tokens or 0.0)
    assert shown == sorted(shown)
    assert shown[-1] <= line.users_tokens + 1


def test_the_nodes_own_time_goes_along() -> None:
    state = Timeline().serving().state
    assert report(state, CONFIG, Clock(0.0), said_at=1234.5678).said_at == 1234.568


@pytest.mark.parametrize("field", ["inFlight", "running", "waiting"])
@pytest.mark.parametrize("count", ["1" + "0" * 400, str(MAX_COUNT + 1), "-5", "NaN", "Infinity"])
def test_a_count_that_cannot_be_one_is_no_answer(field: str, count: str) -> None:
    good = report(Timeline().serving().state, CONFIG, Clock(0.0)).model_dump_json(by_alias=True)
    assert f'"{field}":0' in good
    with pytest.raises(ValidationError, match=field):
        AgentState.model_validate_json(good.replace(f'"{field}":0', f'"{field}":{count}'))
