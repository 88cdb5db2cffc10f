"""Says what the agent holds true: the wire's `AgentState` and Prometheus metrics.

Wall time is computed from the node's monotonic clock with one fixed offset per agent process, so reported times do not
wobble. Texts are cut and stripped of control characters: they come from an engine and end in a user's status.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sluice.agent.facts import EngineState, TestKind
from sluice.api.agent import AgentConfig, AgentState, EnginePhase, SelfTest, Signal

MAX_TEXT = 1024
"""Characters of a reason or message."""


def clean(text: str, limit: int = MAX_TEXT) -> str:
    """The text without control characters, cut to `limit`."""
    printable = "".join(c if c.isprintable() else " " for c in text[: limit + 1])
    return printable if len(printable) <= limit else printable[: limit - 1] + "…"


@dataclass(frozen=True, slots=True)
class Clock:
    """Turns times of the node's monotonic clock into seconds since the epoch."""

    offset_s: float

    def wall(self, monotonic_s: float) -> float:
        return round(monotonic_s + self.offset_s, 3)

    def wall_or_none(self, monotonic_s: float | None) -> float | None:
        return None if monotonic_s is None else self.wall(monotonic_s)


def report(state: EngineState, config: AgentConfig, clock: Clock, said_at: float | None = None) -> AgentState:
    """The state as it goes over the wire; `said_at` is the node's wall clock now."""
    load = state.load
    return AgentState(
        said_at=None if said_at is None else round(said_at, 3),
        seq=state.seq,
        instance=config.instance,
        engine=config.engine,
        version=clean(state.version, 128) if state.version else None,
        engine_id=state.engine_id,
        phase=state.phase,
        reason=clean(state.reason),
        message=clean(state.message),
        phase_since=clock.wall(state.phase_since),
        started_at=clock.wall(state.run_started_at),
        loaded_at=clock.wall_or_none(state.loaded_at),
        verified_at=clock.wall_or_none(state.verified_at),
        self_test=_report_test(state, clock),
        progress_at=clock.wall_or_none(state.progress_at),
        in_flight=load.in_flight,
        running=load.running,
        waiting=load.waiting,
        kv_utilization=load.kv_utilization,
        generation_tokens=state.user_tokens.get(Signal.GENERATION_TOKENS),
        prompt_tokens=state.user_tokens.get(Signal.PROMPT_TOKENS),
        missing=list(load.missing),
    )


def _report_test(state: EngineState, clock: Clock) -> SelfTest:
    last = state.last_test
    if last is None:
        return SelfTest()
    return SelfTest(
        passed=last.kind is TestKind.PASSED,
        reason=str(last.kind),
        message=clean(last.message),
        answered_at=clock.wall_or_none(state.answered_at),
        latency_ms=round((last.ended_at - last.sent_at) * 1000, 3) if last.kind is TestKind.PASSED else None,
    )


class StateCollector(Collector):
    """The present state as gauges; a number that is unknown has no sample."""

    def __init__(self, current: Callable[[], AgentState]) -> None:
        self._current = current

    def collect(self) -> Iterable[Metric]:
        state = self._current()
        phase = GaugeMetricFamily(
            "sluice_agent_phase", "1 for the phase the engine is in", labels=["instance", "phase"]
        )
        for each in EnginePhase:
            phase.add_metric([state.instance, str(each)], float(each is state.phase))
        yield phase
        numbers: dict[str, tuple[str, float | None]] = {
            "in_flight": ("Requests inside the engine, the agent's own left out", state.in_flight),
            "running": ("Requests running in the engine", state.running),
            "waiting": ("Requests waiting in the engine", state.waiting),
            "kv_utilization_ratio": ("Share of KV blocks held by live requests, 0-1", state.kv_utilization),
            "self_test_latency_seconds": ("Latency of the last passed self-test", _seconds(state.self_test.latency_ms)),
            "self_test_passed": ("1 if the last finished self-test passed", _flag(state.self_test.passed)),
            "missing_signals": ("Signals that the engine should publish and does not", float(len(state.missing))),
            "engine_started_timestamp_seconds": ("When the engine run was first seen", state.started_at),
        }
        for name, (documentation, value) in numbers.items():
            if value is not None:
                family = GaugeMetricFamily(f"sluice_agent_{name}", documentation, labels=["instance"])
                family.add_metric([state.instance], float(value))
                yield family


def _seconds(latency_ms: float | None) -> float | None:
    return None if latency_ms is None else latency_ms / 1000


def _flag(value: bool | None) -> float | None:
    return None if value is None else float(value)
