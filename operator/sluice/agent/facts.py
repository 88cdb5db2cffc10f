"""What the agent observed and what it holds true of its engine: plain frozen data.

All times are seconds of the node's monotonic clock (`time.monotonic()`, shared by all processes of a node): a
wall clock that jumps must never make an engine look hung. `report` turns them into wall time for the wire.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from sluice.api.agent import EnginePhase, Signal

PROGRESS_SIGNALS = (Signal.GENERATION_TOKENS, Signal.PROMPT_TOKENS, Signal.ITERATIONS)
"""Counters that only grow while the engine's core works."""


class Contact(StrEnum):
    """What became of one round of requests to the engine."""

    CLOSED = "closed"
    """Connection refused: nobody listens, so there is no engine process (vLLM while loading, as measured with 0.32)."""
    SILENT = "silent"
    """Somebody listens, nobody answered in time."""
    ANSWERED = "answered"


class TestKind(StrEnum):
    """How a self-test ended; the values are the wire's `selfTest.reason`."""

    __test__ = False  # not a test class, whatever pytest makes of the name

    PASSED = "Passed"
    """200, no error in the body, one choice with a finish reason."""
    REJECTED = "Rejected"
    """4xx: the process lives and refuses our request."""
    UNAUTHORIZED = "SelfTestUnauthorized"
    """401 or 403: a matter of configuration, never of health (D15)."""
    OVERLOADED = "Overloaded"
    """429 or 503: says nothing about health, a full queue answers like that too."""
    FAILED = "Failed"
    """Other 5xx, or 200 with an error or without a finished choice."""
    UNANSWERED = "Unanswered"


@dataclass(frozen=True, slots=True)
class TestResult:
    """One finished self-test."""

    __test__ = False

    sent_at: float
    ended_at: float
    kind: TestKind
    message: str = ""
    prompt_tokens: int = 0
    """What the engine says that the test cost; 0 where it does not say."""
    generation_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Observation:
    """One round of reading the engine, about a second after the last one. None: could not be read."""

    contact: Contact
    serves_model: bool | None = None
    unauthorized: bool = False
    """The model list was answered with 401 or 403."""
    metrics_answered: bool = False
    signals: Mapping[Signal, float] = field(default_factory=dict)
    """Only what could be read as a finite number."""
    process_start: float | None = None
    """`process_start_time_seconds` as the engine publishes it."""
    load: float | None = None
    """The engine's own count of its requests (`AgentConfig.load_path`)."""
    version: str | None = None
    own_test_inside: bool = False
    """One and the same self-test of ours was under way during the whole round, so the engine counts it."""
    tests: tuple[TestResult, ...] = ()
    """Self-tests that ended since the last round, oldest first."""
    pending_since: float | None = None
    """When the self-test now under way was sent."""


@dataclass(frozen=True, slots=True)
class Load:
    """The engine's work as last read; None: unknown, which is not zero."""

    in_flight: int | None = None
    running: int | None = None
    waiting: int | None = None
    kv_utilization: float | None = None
    missing: tuple[Signal, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineState:
    """All that the agent believes. Facts of one engine run are reset when another run is seen."""

    run_started_at: float
    observed_at: float
    phase_since: float
    seq: int = 1
    # of the present engine run
    engine_id: str | None = None
    process_start: float | None = None
    version: str | None = None
    unauthorized: bool = False
    """The model list was last answered with 401 or 403."""
    loaded_at: float | None = None
    verified_at: float | None = None
    """When a self-test of this run first passed."""
    draining_since: float | None = None
    # proofs of life
    alive_at: float = 0.0
    """Last answer to a self-test or growth of a progress counter."""
    progress_at: float | None = None
    counters: Mapping[Signal, float] = field(default_factory=dict)
    own_tokens: Mapping[Signal, float] = field(default_factory=dict)
    """Of `counters`, what our own self-tests caused, as the engine says in its answers. A test that was never answered
    may have cost some too; those are not known."""
    user_tokens: Mapping[Signal, float] = field(default_factory=dict)
    """The rest: token counters without self-tests. They never fall within a run, whichever of counter and answer is
    seen first."""
    unanswered_since: float | None = None
    """When the first of the self-tests that went unanswered in a row was sent."""
    failures: int = 0
    """Self-tests in a row that were answered, but not as they should be."""
    last_test: TestResult | None = None
    answered_at: float | None = None
    # the last word
    verdict: EnginePhase = EnginePhase.LOADING
    """Never `Draining`: that is `draining_since`, on top of the verdict."""
    verdict_since: float = 0.0
    reason: str = ""
    message: str = ""
    load: Load = Load()
    zero_rounds: int = 0
    """Rounds in a row with in-flight 0."""

    @property
    def phase(self) -> EnginePhase:
        return EnginePhase.DRAINING if self.draining_since is not None else self.verdict


def first_state(now: float) -> EngineState:
    """Nothing seen yet."""
    return EngineState(
        run_started_at=now,
        observed_at=now,
        phase_since=now,
        alive_at=now,
        verdict_since=now,
        reason="Loading",
        message="the engine was not asked yet",
    )
