"""The engine's phase from what is observed: dead, busy, restarted, draining, unreadable."""

from dataclasses import replace

import pytest

from sluice.agent.facts import Contact, Observation, TestKind, first_state
from sluice.agent.verdict import (
    DrainEnd,
    advance,
    drain_end,
    is_alive,
    is_started,
    is_test_due,
    start_drain,
)
from sluice.api.agent import EnginePhase, Signal
from tests.unit.agent.timeline import CONFIG, Timeline


def test_closed_port_is_loading_however_long_it_lasts() -> None:
    line = Timeline()
    line.contact = Contact.CLOSED
    state = line.play(120)
    assert (state.phase, state.reason, state.engine_id) == (EnginePhase.LOADING, "Loading", None)
    assert "port 8000 is closed" in state.message
    assert not is_started(state)
    assert is_alive(state, line.now)
    assert line.play(600).reason == "StartupTimeout"


def test_s017_loaded_model_is_not_ready_before_a_real_inference_passed() -> None:
    line = Timeline()
    line.answers = None
    state = line.play(2)
    assert state.phase is EnginePhase.VERIFYING
    assert is_started(state)
    line.answers = TestKind.PASSED
    assert line.play(1).phase is EnginePhase.READY


def test_engine_that_lists_another_model_is_not_loaded() -> None:
    line = Timeline()
    line.serves_model = False
    state = line.play(5)
    assert state.phase is EnginePhase.LOADING
    assert "'m'" in state.message
    assert line.tests_sent == 0


@pytest.mark.parametrize("kind", [TestKind.FAILED, TestKind.REJECTED])
def test_wrong_answer_to_the_first_self_test_keeps_it_out(kind: TestKind) -> None:
    line = Timeline()
    line.answers = kind
    state = line.play(20)
    assert (state.phase, state.reason) == (EnginePhase.VERIFYING, "SelfTestFailed")
    assert line.tests_sent >= 5, "an unverified engine is asked again soon"


def test_s015_idle_engine_that_does_not_answer_is_suspect_then_hung() -> None:
    line = Timeline().serving()
    line.answers = None
    line.until(EnginePhase.SUSPECT)
    assert line.pending_since is not None
    assert line.now - line.pending_since == pytest.approx(CONFIG.self_test_timeout_s, abs=1)
    line.until(EnginePhase.HUNG)
    assert line.now - line.pending_since == pytest.approx(CONFIG.hang_timeout_s, abs=1)


def test_s015_work_without_tokens_is_hung_within_the_limit() -> None:
    line = Timeline().serving()
    line.answers, line.running = None, 7.0
    assert line.play(3).phase is EnginePhase.READY
    assert line.until(EnginePhase.HUNG) <= CONFIG.hang_timeout_s + 30


def test_s015_stalled_work_is_tested_without_waiting_for_a_long_period() -> None:
    config = CONFIG.model_copy(update={"self_test_period_s": 3600})
    line = Timeline(config).serving()
    line.answers, line.running = None, 7.0
    assert line.until(EnginePhase.HUNG) <= config.hang_timeout_s + 30


def test_s016_busy_engine_is_never_hung_while_tokens_advance() -> None:
    line = Timeline().serving()
    line.answers, line.running, line.tokens_per_s = None, 1280.0, 50.0
    state = line.play(600)
    assert state.phase is EnginePhase.READY
    assert is_alive(state, line.now)
    line.running, line.answers = 0.0, TestKind.PASSED
    assert line.play(2).phase is EnginePhase.READY


def test_suspect_engine_is_ready_again_when_it_answers() -> None:
    line = Timeline().serving()
    line.answers = None
    line.until(EnginePhase.SUSPECT)
    line.answers = TestKind.PASSED
    assert line.until(EnginePhase.READY) <= 2


def test_hung_engine_is_ready_again_when_it_answers() -> None:
    line = Timeline().serving()
    line.answers = None
    line.until(EnginePhase.HUNG)
    line.answers = TestKind.PASSED
    assert line.until(EnginePhase.READY) <= 2


def test_s019_liveness_fails_only_ten_seconds_after_hung() -> None:
    line = Timeline().serving()
    line.answers = None
    line.until(EnginePhase.HUNG)
    assert is_alive(line.state, line.now)
    assert is_alive(line.play(9), line.now)
    assert not is_alive(line.play(2), line.now)


def test_engine_that_hangs_at_its_first_inference_is_hung_after_it_started() -> None:
    line = Timeline()
    line.answers = None
    line.until(EnginePhase.HUNG)
    assert is_started(line.state), "the startup probe has passed, so liveness can act"


@pytest.mark.parametrize(("tokens", "metrics", "phase"), [(None, True, "Suspect"), (None, False, "Hung")])
def test_without_a_readable_counter_nobody_is_hung_unless_metrics_are_dead(
    tokens: float | None, metrics: bool, phase: str
) -> None:
    line = Timeline().serving()
    line.answers, line.running, line.tokens, line.metrics_answered = None, 5.0, tokens, metrics
    line.load = 5.0
    assert line.play(120).phase == phase


def test_one_wrong_answer_is_forgiven_two_unroute_and_a_pass_heals() -> None:
    line = Timeline().serving()
    line.answers = TestKind.FAILED
    while line.state.failures == 0:
        line.play(1)
    assert line.state.phase is EnginePhase.READY
    assert line.until(EnginePhase.SUSPECT) <= 3
    assert line.state.reason == "SelfTestFailed"
    line.answers = TestKind.PASSED
    assert line.until(EnginePhase.READY) <= 3


def test_full_queue_says_nothing_about_health() -> None:
    line = Timeline().serving()
    line.answers, line.running, line.tokens_per_s = TestKind.OVERLOADED, 500.0, 50.0
    assert line.play(300).phase is EnginePhase.READY


def test_s107_unauthorized_new_engine_is_never_ready_and_never_restarted() -> None:
    line = Timeline()
    line.answers = TestKind.UNAUTHORIZED
    state = line.play(300)
    assert (state.phase, state.reason) == (EnginePhase.VERIFYING, "SelfTestUnauthorized")
    assert is_started(state)
    assert is_alive(state, line.now)


def test_s107_unauthorized_model_list_lets_the_startup_probe_pass() -> None:
    line = Timeline()
    line.unauthorized, line.answers = True, TestKind.UNAUTHORIZED
    state = line.play(30)
    assert (state.phase, state.reason) == (EnginePhase.VERIFYING, "SelfTestUnauthorized")
    assert is_started(state)


def test_s107_engine_that_served_keeps_its_routing_when_it_turns_unauthorized() -> None:
    line = Timeline().serving()
    line.answers, line.unauthorized = TestKind.UNAUTHORIZED, True
    state = line.play(300)
    assert (state.phase, state.reason) == (EnginePhase.READY, "SelfTestUnauthorized")
    line.answers, line.unauthorized = TestKind.PASSED, False
    line.play(20)
    assert (line.state.phase, line.state.reason) == (EnginePhase.READY, "")


def test_closed_port_after_loading_is_another_run_that_must_prove_itself() -> None:
    line = Timeline().serving()
    first = line.state.engine_id
    line.contact = Contact.CLOSED
    state = line.play(1)
    assert (state.phase, state.engine_id, state.verified_at) == (EnginePhase.LOADING, None, None)
    line.contact = Contact.ANSWERED
    line.restart()
    line.answers = None
    state = line.play(2)
    assert state.phase is EnginePhase.VERIFYING
    assert state.engine_id not in (None, first)


@pytest.mark.parametrize("sign", ["process start", "counter"])
def test_restart_faster_than_a_round_is_noticed(sign: str) -> None:
    line = Timeline().serving()
    first = line.state.engine_id
    line.answers = None
    if sign == "process start":
        line.process_start = 99.0
    else:
        line.process_start = None
        line.tokens = 1.0
    state = line.play(1)
    assert state.phase is EnginePhase.VERIFYING
    assert state.engine_id != first


def test_silence_is_not_a_restart() -> None:
    line = Timeline().serving()
    first = line.state.engine_id
    line.contact = Contact.SILENT
    state = line.play(2)
    assert (state.engine_id, state.phase, state.load.in_flight) == (first, EnginePhase.READY, None)


def test_answer_to_a_test_of_an_earlier_run_is_ignored() -> None:
    line = Timeline().serving()
    line.answers = None
    line.play(CONFIG.self_test_period_s + 1)
    sent_at = line.pending_since
    assert sent_at is not None
    line.restart()
    line.play(1)
    line.pending_since, line.answers = sent_at, TestKind.PASSED
    assert line.play(1).verified_at is None


def test_time_in_which_the_agent_was_stopped_is_not_held_against_the_engine() -> None:
    line = Timeline().serving()
    line.answers, line.running = None, 3.0
    line.play(CONFIG.self_test_period_s + 1)
    line.now += 3600
    assert line.play(1).phase is EnginePhase.READY


@pytest.mark.parametrize(
    ("signals", "load", "own", "expected"),
    [
        ({Signal.RUNNING: 2.0, Signal.WAITING: 1.0}, 2.0, False, 3),
        ({Signal.RUNNING: 2.0, Signal.WAITING: 1.0}, 5.0, False, 5),
        ({Signal.RUNNING: 1.0, Signal.WAITING: 0.0}, 1.0, True, 0),
        ({Signal.RUNNING: 0.0, Signal.WAITING: 0.0}, 0.0, True, 0),
        ({Signal.RUNNING: 0.0, Signal.WAITING: 0.0}, 0.0, False, 0),
        ({Signal.RUNNING: 0.0, Signal.WAITING: 0.0}, None, False, None),
        ({}, 0.0, False, None),
        ({Signal.RUNNING: 0.0}, 0.0, False, None),
        ({}, 4.0, False, 4),
        ({}, None, False, None),
    ],
)
def test_in_flight_is_zero_only_if_every_source_says_so(
    signals: dict[Signal, float], load: float | None, own: bool, expected: int | None
) -> None:
    seen = Observation(
        Contact.ANSWERED, serves_model=True, metrics_answered=True, signals=signals, load=load, own_test_inside=own
    )
    state = advance(first_state(0.0), seen, 1.0, config=CONFIG, new_engine_id="a")
    assert state.load.in_flight == expected


def test_signal_that_the_engine_should_publish_and_does_not_is_missing() -> None:
    seen = Observation(Contact.ANSWERED, metrics_answered=True, signals={Signal.RUNNING: 0.0})
    state = advance(first_state(0.0), seen, 1.0, config=CONFIG, new_engine_id="a")
    assert state.load.missing == (Signal.WAITING, Signal.GENERATION_TOKENS)
    dead = replace(seen, metrics_answered=False, signals={})
    assert advance(state, dead, 2.0, config=CONFIG, new_engine_id="b").load.missing == ()


def _draining(line: Timeline) -> Timeline:
    line.state = start_drain(line.state, line.now)
    return line


def _end(line: Timeline, *, unrouted: bool = False) -> DrainEnd | None:
    return drain_end(line.state, line.now, line.config, unrouted=unrouted)


def test_s021_idle_drain_still_waits_for_routers_to_notice() -> None:
    line = _draining(Timeline().serving())
    line.play(2)
    assert line.state.phase is EnginePhase.DRAINING
    assert _end(line) is None
    line.play(1)
    assert _end(line) == DrainEnd("Idle", "no request in flight")


def test_drain_of_an_unrouted_instance_needs_two_idle_rounds_only() -> None:
    line = _draining(Timeline().serving())
    line.play(1)
    assert _end(line, unrouted=True) is None
    line.play(1)
    assert _end(line, unrouted=True) is not None


def test_s021_drain_waits_for_requests_in_flight_also_late_ones() -> None:
    line = Timeline().serving()
    line.running = 1.0
    _draining(line).play(30)
    assert _end(line) is None
    line.running = 0.0
    line.play(1)
    line.running = 1.0
    line.play(1)
    assert _end(line) is None, "a request came in between"
    line.running = 0.0
    line.play(2)
    assert _end(line) is not None


def test_unreadable_in_flight_does_not_end_a_drain_but_the_deadline_does() -> None:
    line = Timeline().serving()
    line.running = None
    line.tokens_per_s = 1.0
    _draining(line).play(60)
    assert _end(line) is None
    line.play(CONFIG.drain_timeout_s)
    end = _end(line)
    assert end is not None
    assert end.reason == "Deadline"


def test_drain_of_a_hung_engine_returns_at_once() -> None:
    line = Timeline().serving()
    line.answers, line.running = None, 4.0
    line.until(EnginePhase.HUNG)
    end = _end(_draining(line))
    assert end is not None
    assert end.reason == "Hung"
    assert line.state.phase is EnginePhase.DRAINING


def test_engine_that_hangs_while_draining_ends_the_drain() -> None:
    line = Timeline().serving()
    line.answers, line.running = None, 4.0
    _draining(line).play(90)
    end = _end(line)
    assert end is not None
    assert end.reason == "Hung"


@pytest.mark.parametrize("contact", [Contact.CLOSED, Contact.ANSWERED])
def test_drain_ends_and_is_left_when_the_engine_process_ends(contact: Contact) -> None:
    line = _draining(Timeline().serving())
    line.contact = contact
    line.restart()
    line.answers = None
    line.play(1)
    assert line.state.phase is not EnginePhase.DRAINING
    end = _end(line)
    assert end is not None
    assert end.reason == "EngineGone"


def test_second_drain_request_does_not_move_the_deadline() -> None:
    line = _draining(Timeline().serving())
    first = line.state
    line.play(5)
    assert _draining(line).state.draining_since == first.draining_since


def test_drain_is_not_prolonged_by_our_own_self_tests() -> None:
    line = _draining(Timeline().serving())
    line.play(60)
    assert not is_test_due(line.state, line.now, CONFIG)


def test_seq_rises_with_news_and_only_with_news() -> None:
    line = Timeline().serving()
    line.play(5)
    seq = line.state.seq
    line.play(40)
    assert line.state.seq == seq, "passed self-tests in a row are no news"
    line.running, line.tokens_per_s = 3.0, 1.0
    assert line.play(1).seq == seq + 1
    line.running = 9.0
    assert line.play(5).seq == seq + 1, "more work is no news"
    line.running = 0.0
    assert line.play(1).seq == seq + 2
    assert _draining(line).state.seq == seq + 3
