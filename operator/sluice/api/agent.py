"""What the agent in an engine pod is told (`AgentConfig`) and what it says (`AgentState`)."""

from enum import StrEnum

from pydantic import Field

from sluice.api.wire import Wire

MAX_STATE_BYTES = 64 * 1024
MAX_COUNT = 2**31 - 1
"""Requests; beyond it an answer is no answer (a count that no float holds must not end a pass)."""


class MetricKind(StrEnum):
    GAUGE = "Gauge"
    COUNTER = "Counter"


class MetricSource(Wire):
    """One name under which an engine version publishes a signal."""

    name: str
    """Prometheus sample name, for example `vllm:num_requests_running`."""
    kind: MetricKind = MetricKind.GAUGE
    labels: dict[str, str] = {}
    """Only samples with these label values count."""
    reduce: str = "sum"
    """How samples of several engine cores (data-parallel ranks) become one number: `sum` or `mean`."""
    per: str | None = None
    """Label that tells the cores apart where several ranks of one core publish the same number (SGLang: tensor and
    pipeline ranks each publish their core's queue): of samples with one value of it the largest stands for all.
    Null: every sample is a core of its own."""


class Signal(StrEnum):
    """What we read from an engine; which metric carries it is the engine adapter's knowledge."""

    RUNNING = "running"
    WAITING = "waiting"
    KV_UTILIZATION = "kvUtilization"
    GENERATION_TOKENS = "generationTokens"
    PROMPT_TOKENS = "promptTokens"
    ITERATIONS = "iterations"


class AgentConfig(Wire):
    """Mounted or passed as JSON in the environment variable `SLUICE_AGENT_CONFIG` of the agent's container."""

    instance: str
    engine: str
    """Engine type as in `spec.engine.type`."""
    engine_port: int
    served_model: str
    metrics_path: str = "/metrics"
    load_path: str | None = None
    """Endpoint with the engine's own count of running and waiting requests (vLLM `/load`), if it has one."""
    load_fields: list[str] | None = None
    """Where the count stands in that JSON: dotted paths, added up, also over the entries of lists on the way. Null:
    `server_load`."""
    version_path: str | None = None
    signals: dict[Signal, list[MetricSource]]
    """Signal to its possible metrics, first present wins; an absent key means that the engine lacks the signal."""
    self_test_path: str = "/v1/completions"
    self_test_period_s: int = Field(10, ge=1)
    self_test_timeout_s: int = Field(3, ge=1)
    hang_timeout_s: int = Field(60, ge=1)
    startup_timeout_s: int = Field(3600, ge=1)
    drain_timeout_s: int = Field(600, ge=0)
    drain_token: str
    """Value of the header `X-Sluice-Drain` that `/drain` asks for; known to the pod's own preStop hook only."""


class EnginePhase(StrEnum):
    """What the agent itself can see of its engine; the operator adds pod status and routing to it."""

    LOADING = "Loading"
    """Not answering yet, or not listing the served model."""
    VERIFYING = "Verifying"
    """Lists the model; no self-test answered yet in this engine run."""
    READY = "Ready"
    """A real inference was answered in this engine run and nothing speaks against it since."""
    SUSPECT = "Suspect"
    """Idle, yet a self-test went unanswered for its time-out."""
    HUNG = "Hung"
    """Neither an answered self-test nor token progress for the hang time-out."""
    DRAINING = "Draining"
    """preStop (or a drain request) arrived."""


class SelfTest(Wire):
    passed: bool | None = None
    """Verdict of the last finished self-test of this engine run; null before the first."""
    reason: str = ""
    message: str = ""
    answered_at: float | None = None
    """Seconds since the epoch of the last answered self-test."""
    latency_ms: float | None = None


class AgentState(Wire):
    """Answer of `GET /state`. A number that could not be read is null: unknown is not zero."""

    said_at: float | None = None
    """When this was said, by the node's own clock; seconds since the epoch. A second opinion on what time it is."""
    seq: int
    """Rises with each change of phase, verdict or of in-flight to or from 0; `GET /state?after=<seq>` waits for it."""
    instance: str
    engine: str
    version: str | None = None
    engine_id: str | None = None
    """Identity of the running engine process: changes when its container restarts, survives a restart of the agent."""
    phase: EnginePhase
    reason: str = ""
    message: str = ""
    phase_since: float
    """Seconds since the epoch."""
    started_at: float
    """When the agent first saw this engine run; seconds since the epoch."""
    loaded_at: float | None = None
    """When this engine run first listed its model; seconds since the epoch."""
    verified_at: float | None = None
    """When this engine run first answered a self-test; seconds since the epoch."""
    self_test: SelfTest = SelfTest()
    progress_at: float | None = None
    """When a token or iteration counter last grew; seconds since the epoch."""
    in_flight: int | None = Field(None, ge=0, le=MAX_COUNT)
    """Requests running or waiting inside the engine, our own self-test left out."""
    running: int | None = Field(None, ge=0, le=MAX_COUNT)
    waiting: int | None = Field(None, ge=0, le=MAX_COUNT)
    kv_utilization: float | None = None
    """0..1, share of KV blocks held by live requests."""
    generation_tokens: float | None = None
    """Counter of this engine run; tokens of our own self-tests left out."""
    prompt_tokens: float | None = None
    """The same for prompts."""
    missing: list[Signal] = []
    """Signals that the engine should publish and does not."""
