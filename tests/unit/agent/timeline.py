"""A story of one engine, second by second: builder for verdict tests."""

from sluice.agent.facts import Contact, EngineState, Observation, TestKind, TestResult, first_state
from sluice.agent.verdict import advance, is_test_due
from sluice.api.agent import AgentConfig, EnginePhase, MetricKind, MetricSource, Signal

CONFIG = AgentConfig(
    instance="chat-default-0-1",
    engine="vLLM",
    engine_port=8000,
    served_model="m",
    load_path="/load",
    signals={
        Signal.RUNNING: [MetricSource(name="running")],
        Signal.WAITING: [MetricSource(name="waiting")],
        Signal.GENERATION_TOKENS: [MetricSource(name="tokens_total", kind=MetricKind.COUNTER)],
    },
    self_test_period_s=10,
    self_test_timeout_s=3,
    hang_timeout_s=60,
    startup_timeout_s=600,
    drain_timeout_s=120,
    drain_token="secret",
)


class Timeline:
    """Plays rounds one second apart; self-tests are sent when the verdict logic wants one.

    `answers` is what the engine does with a self-test (None: never answers), `tokens` its counter.
    """

    def __init__(self, config: AgentConfig = CONFIG, state: EngineState | None = None, now: float = 1000.0) -> None:
        self.config = config
        self.now = now
        self.state = state or first_state(now)
        self.contact = Contact.ANSWERED
        self.serves_model: bool | None = True
        self.unauthorized = False
        self.answers: TestKind | None = TestKind.PASSED
        self.running: float | None = 0.0
        self.tokens: float | None = 100.0
        self.tokens_per_s = 0.0
        self.process_start: float | None = 1.0
        self.metrics_answered = True
        self.load: float | None = None
        self.pending_since: float | None = None
        self.runs = 0
        self.tests_sent = 0
        self.costs = (0, 0)
        """(prompt, generated) tokens of a self-test, as the engine's answer says."""
        self.early = False
        """The engine's counter shows a self-test's tokens one round before its answer is seen."""
        self.users_tokens = 100.0

    def play(self, seconds: float) -> EngineState:
        """Let time pass, one round per second."""
        for _ in range(round(seconds)):
            self.now += 1
            self.round()
        return self.state

    def until(self, phase: EnginePhase, limit_s: float = 300) -> float:
        """Seconds until the phase is reached."""
        started = self.now
        while self.state.phase is not phase:
            assert self.now - started < limit_s, f"{phase} not reached in {limit_s} s: {self.state}"
            self.play(1)
        return self.now - started

    def serving(self) -> "Timeline":
        self.until(EnginePhase.READY)
        return self

    def restart(self) -> None:
        """Another process of the engine, one second later."""
        self.process_start = (self.process_start or 0) + 1000
        self.tokens = 0.0
        self.pending_since = None

    def round(self) -> None:
        tests: tuple[TestResult, ...] = ()
        if self.pending_since is not None and self.answers is not None:
            prompt, generated = self.costs
            tests = (TestResult(self.pending_since, self.now, self.answers, "as told", prompt, generated),)
            self.pending_since = None
            if not self.early:
                self._count(generated)
        self._count(self.tokens_per_s)
        self.users_tokens += self.tokens_per_s
        answered = self.contact is Contact.ANSWERED
        self.runs += 1
        engine_id = self.state.engine_id
        self.state = advance(
            self.state, self._observe(tests, answered), self.now, config=self.config, new_engine_id=f"run-{self.runs}"
        )
        if engine_id is not None and self.state.engine_id != engine_id:
            self.pending_since = None
        if self.pending_since is None and is_test_due(self.state, self.now, self.config):
            self.pending_since = self.now
            self.tests_sent += 1
            if self.early:
                self._count(self.costs[1])

    def _count(self, tokens: float) -> None:
        if self.tokens is not None:
            self.tokens += tokens

    def _observe(self, tests: tuple[TestResult, ...], answered: bool) -> Observation:
        signals: dict[Signal, float] = {}
        if answered and self.metrics_answered:
            if self.running is not None:
                signals |= {Signal.RUNNING: self.running, Signal.WAITING: 0.0}
            if self.tokens is not None:
                signals[Signal.GENERATION_TOKENS] = self.tokens
        return Observation(
            contact=self.contact,
            serves_model=self.serves_model if answered and not self.unauthorized else None,
            unauthorized=self.unauthorized and answered,
            metrics_answered=answered and self.metrics_answered,
            signals=signals,
            process_start=self.process_start if answered and self.metrics_answered else None,
            load=(self.running if self.load is None else self.load) if answered else None,
            tests=tests,
            pending_since=self.pending_since,
        )
