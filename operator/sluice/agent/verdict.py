"""What an observation means for the engine: (state, observation, now) -> state, without any I/O.

Rules (decisions D3, D4, D14 and D15 of docs/scenarios.md):
- *Busy is never hung.* A late self-test counts only when no token or iteration counter grew since it was sent.
- *Unknown is never zero.* In-flight is 0 only if every configured source said so; without a readable progress counter
  nobody is called Hung, only Suspect (unrouted, reversible), unless `/metrics` itself no longer answers.
- *Another process is another engine.* A closed port, a changed process start time or a counter that fell end
  the run: new `engine_id`, and the engine must prove itself again.
- *Time in which the agent itself did not look* (stopped, restarted) is never held against the engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sluice.agent.facts import (
    PROGRESS_SIGNALS,
    Contact,
    EngineState,
    Load,
    Observation,
    TestKind,
    TestResult,
    first_state,
)
from sluice.api.agent import AgentConfig, EnginePhase, MetricKind, Signal

BLIND_S = 5.0
"""Rounds come each second and last at most 2 s: a longer gap means that the agent did not look."""
FAILURE_LIMIT = 2
"""Wrong answers in a row before a verified engine is unrouted: one may be bad luck of one request."""
RETRY_S = 1.0
"""Between self-tests while the engine has to prove itself."""
ALIVE_GRACE_S = 10.0
"""`/alive` fails this long after Hung, so that the operator and the routers unroute first."""
SETTLE_S = 3.0
"""From Draining until in-flight counts: router sidecars react within about a second, smg within 0.2 s (measured);
requests that still arrive meanwhile are served."""
ZERO_ROUNDS = 2
"""Rounds in a row with in-flight 0 that end a drain."""
DRAIN_REASON = "Draining"
DRAIN_MESSAGE = "a drain was asked for"


def advance(
    state: EngineState, seen: Observation, now: float, *, config: AgentConfig, new_engine_id: str
) -> EngineState:
    """The state after one more observation; `new_engine_id` is used if this is the first sight of a run."""
    before = state
    state = _forgive_blind_time(state, now)
    if _is_run_over(state, seen):
        state = replace(first_state(now), seq=state.seq)
    if state.engine_id is None and seen.contact is Contact.ANSWERED:
        state = replace(state, engine_id=new_engine_id, alive_at=now)
    state = _note_progress(state, seen, now)
    for test in seen.tests:
        state = _note_test(state, test)
    state = replace(state, user_tokens=_user_tokens(state))
    if seen.unauthorized or seen.serves_model is not None:
        state = replace(state, unauthorized=seen.unauthorized)
    if state.loaded_at is None and seen.serves_model:
        state = replace(state, loaded_at=now)
    load = _read_load(seen, config)
    state = replace(
        state,
        observed_at=now,
        version=seen.version or state.version,
        load=load,
        zero_rounds=state.zero_rounds + 1 if load.in_flight == 0 else 0,
    )
    return _with_verdict(before, state, _judge(state, seen, now, config), now)


def start_drain(state: EngineState, now: float) -> EngineState:
    """Draining from now on; a second request changes nothing, the deadline counts from the first."""
    if state.draining_since is not None:
        return state
    draining = replace(state, draining_since=now, phase_since=now, zero_rounds=0, seq=state.seq + 1)
    return replace(draining, reason=DRAIN_REASON, message=DRAIN_MESSAGE)


def is_test_due(state: EngineState, now: float, config: AgentConfig) -> bool:
    """Whether to send a self-test now, given that none is under way."""
    if state.engine_id is None:
        return False
    last = state.last_test
    if not is_started(state):
        return False
    if state.draining_since is not None and state.load.in_flight == 0:
        return False  # our own request would only prolong the drain
    if last is None:
        return True
    since_last = now - last.ended_at
    if since_last >= config.self_test_period_s:
        return True
    if last.kind is TestKind.UNAUTHORIZED:
        return False
    if state.verified_at is None or state.failures or state.unanswered_since is not None:
        return since_last >= RETRY_S
    stalled = bool(state.load.in_flight) and now - state.alive_at >= config.self_test_timeout_s
    return stalled and since_last >= config.self_test_timeout_s


def is_started(state: EngineState) -> bool:
    """Answer of `/startup`: this run once listed its model, or refuses us (D15: no restart for that)."""
    return state.loaded_at is not None or state.unauthorized


def is_alive(state: EngineState, now: float) -> bool:
    """Answer of `/alive`: False only when the process is beyond repair, 10 s after Hung (D4)."""
    return state.verdict is not EnginePhase.HUNG or now - state.verdict_since < ALIVE_GRACE_S


@dataclass(frozen=True, slots=True)
class DrainEnd:
    reason: str
    message: str


def drain_end(state: EngineState, now: float, config: AgentConfig, *, unrouted: bool) -> DrainEnd | None:
    """Why a drain is over, or None while it has to go on.

    `unrouted`: the caller knows that no router has the instance any more, so nothing has to settle.
    """
    if state.draining_since is None or state.engine_id is None:
        return DrainEnd("EngineGone", "the engine run that was draining is gone")
    if state.verdict is EnginePhase.HUNG:
        return DrainEnd("Hung", "the engine is hung: waiting would not finish any request")
    if state.loaded_at is None:
        return DrainEnd("NotLoaded", "the engine never served its model")
    if now - state.draining_since >= config.drain_timeout_s:
        return DrainEnd("Deadline", f"drain deadline of {config.drain_timeout_s} s, in flight: {state.load.in_flight}")
    settled = unrouted or state.observed_at - state.draining_since >= SETTLE_S
    if settled and state.zero_rounds >= ZERO_ROUNDS:
        return DrainEnd("Idle", "no request in flight")
    return None


def _forgive_blind_time(state: EngineState, now: float) -> EngineState:
    """Move proofs of life forward by the time in which nobody looked."""
    gap = now - state.observed_at
    if gap <= BLIND_S:
        return state
    unanswered = None if state.unanswered_since is None else min(now, state.unanswered_since + gap)
    verdict_since = min(now, state.verdict_since + gap)
    return replace(
        state, alive_at=min(now, state.alive_at + gap), unanswered_since=unanswered, verdict_since=verdict_since
    )


def _is_run_over(state: EngineState, seen: Observation) -> bool:
    """Whether the engine process that we knew is gone or another one answers in its place."""
    if state.engine_id is None:
        return False
    if seen.contact is Contact.CLOSED:
        return True
    restarted = None not in (state.process_start, seen.process_start) and state.process_start != seen.process_start
    return restarted or any(seen.signals[s] < state.counters[s] for s in state.counters if s in seen.signals)


def _note_progress(state: EngineState, seen: Observation, now: float) -> EngineState:
    now_read = {s: seen.signals[s] for s in PROGRESS_SIGNALS if s in seen.signals}
    grew = any(value > state.counters[s] for s, value in now_read.items() if s in state.counters)
    counters: Mapping[Signal, float] = {**state.counters, **now_read}
    return replace(
        state,
        counters=counters,
        process_start=seen.process_start if seen.process_start is not None else state.process_start,
        progress_at=now if grew else state.progress_at,
        alive_at=now if grew else state.alive_at,
    )


def _note_test(state: EngineState, test: TestResult) -> EngineState:
    """Take a finished self-test into account; one that was sent to an earlier run says nothing."""
    if test.sent_at < state.run_started_at:
        return state
    state = replace(state, last_test=test, own_tokens=_own_tokens(state, test))
    alive_at = max(state.alive_at, test.ended_at)
    match test.kind:
        case TestKind.PASSED:
            verified_at = state.verified_at if state.verified_at is not None else test.ended_at
            return replace(
                state,
                verified_at=verified_at,
                alive_at=alive_at,
                answered_at=test.ended_at,
                unanswered_since=None,
                failures=0,
            )
        case TestKind.UNAUTHORIZED:
            return replace(state, alive_at=alive_at, unanswered_since=None, failures=0)
        case TestKind.REJECTED:
            return replace(state, alive_at=alive_at, unanswered_since=None, failures=state.failures + 1)
        case _:
            first = state.unanswered_since if state.unanswered_since is not None else test.sent_at
            failures = state.failures + 1 if test.kind is TestKind.FAILED else state.failures
            return replace(state, unanswered_since=first, failures=failures)


def _own_tokens(state: EngineState, test: TestResult) -> Mapping[Signal, float]:
    cost = {Signal.PROMPT_TOKENS: test.prompt_tokens, Signal.GENERATION_TOKENS: test.generation_tokens}
    return {signal: state.own_tokens.get(signal, 0.0) + tokens for signal, tokens in cost.items()}


def _user_tokens(state: EngineState) -> Mapping[Signal, float]:
    """Token counters without our self-tests, for everyone who looks at load (progress counts them all)."""
    return {
        signal: max(state.user_tokens.get(signal, 0.0), state.counters[signal] - state.own_tokens.get(signal, 0.0))
        for signal in (Signal.PROMPT_TOKENS, Signal.GENERATION_TOKENS)
        if signal in state.counters
    }


def _read_load(seen: Observation, config: AgentConfig) -> Load:
    """In-flight is the larger of the engine's two counts without our own self-test.

    0 is believed only if every configured source could be read; a number above 0 from any of them.
    """
    running, waiting = seen.signals.get(Signal.RUNNING), seen.signals.get(Signal.WAITING)
    queue = running + waiting if running is not None and waiting is not None else None
    configured = [seen.load] if config.load_path else []
    if Signal.RUNNING in config.signals and Signal.WAITING in config.signals:
        configured.append(queue)
    read = [value for value in configured if value is not None]
    own = 1 if seen.own_test_inside else 0
    in_flight = max(0, round(max(read)) - own) if read else None
    if in_flight == 0 and len(read) < len(configured):
        in_flight = None
    # The youngest request waits, if any does.
    own_waits = own if waiting else 0
    return Load(
        in_flight=in_flight,
        running=None if running is None else max(0, round(running) - (own - own_waits)),
        waiting=None if waiting is None else max(0, round(waiting) - own_waits),
        kv_utilization=seen.signals.get(Signal.KV_UTILIZATION),
        missing=tuple(s for s in config.signals if s not in seen.signals) if seen.metrics_answered else (),
    )


@dataclass(frozen=True, slots=True)
class _Verdict:
    phase: EnginePhase
    reason: str
    message: str


def _judge(state: EngineState, seen: Observation, now: float, config: AgentConfig) -> _Verdict:
    """The engine's phase, drain left aside: first matching rule."""
    if state.engine_id is None or (state.loaded_at is None and not state.unauthorized):
        return _judge_loading(state, seen, now, config)
    waiting_since = state.unanswered_since if state.unanswered_since is not None else seen.pending_since
    quiet_s = 0.0 if waiting_since is None else now - max(waiting_since, state.alive_at)
    if quiet_s >= config.hang_timeout_s and _can_tell_progress(seen, config):
        return _Verdict(
            EnginePhase.HUNG, "Hung", f"neither a passed self-test nor token progress for {config.hang_timeout_s} s"
        )
    last = state.last_test
    if state.unauthorized or (last is not None and last.kind is TestKind.UNAUTHORIZED):
        message = "the engine answers 401 or 403: give the agent the engine's key, or take the key away"
        phase = EnginePhase.READY if state.verified_at is not None else EnginePhase.VERIFYING
        return _Verdict(phase, str(TestKind.UNAUTHORIZED), message)
    if state.verified_at is None:
        if last is None or last.kind is TestKind.PASSED:
            return _Verdict(EnginePhase.VERIFYING, "Verifying", "waiting for the first answered self-test")
        return _Verdict(EnginePhase.VERIFYING, "SelfTestFailed", f"self-test: {last.kind}: {last.message}")
    if state.failures >= FAILURE_LIMIT and last is not None:
        message = f"{state.failures} self-tests in a row failed; the last: {last.kind}: {last.message}"
        return _Verdict(EnginePhase.SUSPECT, "SelfTestFailed", message)
    if quiet_s >= config.self_test_timeout_s and state.load.in_flight == 0:
        return _Verdict(
            EnginePhase.SUSPECT, "Suspect", f"idle, yet a self-test is unanswered for {config.self_test_timeout_s} s"
        )
    if quiet_s >= config.hang_timeout_s:
        message = f"a self-test is unanswered for {config.hang_timeout_s} s and no progress counter can be read"
        return _Verdict(EnginePhase.SUSPECT, "Suspect", message)
    return _Verdict(EnginePhase.READY, "", "")


def _judge_loading(state: EngineState, seen: Observation, now: float, config: AgentConfig) -> _Verdict:
    waited_s = now - state.run_started_at
    what = {
        Contact.CLOSED: f"port {config.engine_port} is closed",
        Contact.SILENT: f"port {config.engine_port} is open and does not answer",
        Contact.ANSWERED: f"the model list does not have {config.served_model!r}",
    }[seen.contact]
    reason = "StartupTimeout" if waited_s >= config.startup_timeout_s else "Loading"
    return _Verdict(EnginePhase.LOADING, reason, what)


def _can_tell_progress(seen: Observation, config: AgentConfig) -> bool:
    """Whether "no progress" is a finding: a counter was read, none is to be had, or `/metrics` itself is dead."""
    configured = [s for s in PROGRESS_SIGNALS if any(m.kind is MetricKind.COUNTER for m in config.signals.get(s, []))]
    return not seen.metrics_answered or not configured or any(s in seen.signals for s in configured)


def _with_verdict(before: EngineState, state: EngineState, verdict: _Verdict, now: float) -> EngineState:
    """Take the verdict over; `seq` rises if a reader who waits for news should hear of it."""
    if verdict.phase is not state.verdict:
        state = replace(state, verdict=verdict.phase, verdict_since=now)
    reason, message = verdict.reason, verdict.message
    if state.draining_since is not None and verdict.phase is EnginePhase.READY:
        reason, message = DRAIN_REASON, DRAIN_MESSAGE
    state = replace(state, reason=reason, message=message)
    if state.phase is not before.phase:
        state = replace(state, phase_since=now)
    if _news(state) != _news(before):
        state = replace(state, seq=before.seq + 1)
    return state


def _news(state: EngineState) -> tuple[object, ...]:
    kind = state.last_test.kind if state.last_test else None
    in_flight = state.load.in_flight
    return state.phase, state.reason, state.engine_id, kind, in_flight is None, in_flight == 0
