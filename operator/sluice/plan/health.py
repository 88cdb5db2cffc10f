"""What one instance is, from the facts about its pod and the last word of its agent.

Two answers per instance: a phase with a reason for people, and a verdict for routing. The rules are a list; the first
one that has something to say decides. Invariants:
- Nothing heard is Unknown: what is routed stays routed, what is not stays out (never zero, never a restart).
- Busy is not dead: only the agent calls an engine Suspect or Hung (D3), and only what it says now counts.
- A pod that leaves (deletionTimestamp, drain mark), has ended, or is lost with its node is never routable again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sluice.api import names
from sluice.api.agent import AgentState, EnginePhase
from sluice.api.conditions import Reason
from sluice.plan.snapshot import AgentFacts, ContainerFacts, ContainerPhase, NodeFacts, PodFacts

SILENT_S: Final = 15.0
"""Age in seconds from which an agent's or router's last word counts as none; three of the observer's periods."""

MAX_LOG_TEXT: Final = 300
"""Characters of a termination message that a reason's message carries; `status.lastFailures` has more."""

SERVES: Final = "answers inferences and every router lists it"

_PULL_REASONS: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
_CONFIG_REASONS: Final = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})


class InstancePhase(StrEnum):
    PENDING = "Pending"
    LOADING = "Loading"
    VERIFYING = "Verifying"
    SERVING = "Serving"
    DRAINING = "Draining"
    TERMINATING = "Terminating"
    SUSPECT = "Suspect"
    HUNG = "Hung"
    FAILED = "Failed"


class Verdict(StrEnum):
    ROUTE = "Route"
    """A real inference was answered in this engine run."""
    HOLD = "Hold"
    """Nothing heard: leave the routing as it is."""
    UNROUTE = "Unroute"


@dataclass(frozen=True, slots=True)
class Finding:
    phase: InstancePhase
    reason: Reason
    message: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Why an instance has to be replaced; decided by `failures` and `quarantine`."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance as this pass sees it."""

    pod: PodFacts
    phase: InstancePhase
    reason: Reason
    message: str
    verdict: Verdict
    state: AgentState | None
    """The agent's word, if it is fresh."""
    heard_at: float
    """When `state` was said, seconds since the epoch; 0 without one."""
    is_lost: bool = False
    """Its node is not ready and its agent is silent: no supply, replaced at once (D17)."""
    gives_up: GiveUp | None = None
    """It failed for good: no supply, drained and replaced."""
    asked_s: float | None = None
    """Seconds since this process asks its agent; null: it can't be asked."""

    @property
    def name(self) -> str:
        return self.pod.name

    @property
    def is_dead(self) -> bool:
        """All its containers ended for good."""
        return self.pod.phase in ("Failed", "Succeeded")

    @property
    def is_ended_by_kubelet(self) -> bool:
        """Its node shuts down or is short of a resource: the kubelet ends the pod without deleting it. The other
        reasons of a DisruptionTarget (eviction, pre-emption) come with a deletion, or are taken back."""
        return self.pod.disruption_target == "TerminationByKubelet"

    @property
    def is_leaving(self) -> bool:
        return self.pod.deletion_at is not None or self.pod.drain_started_at is not None

    @property
    def is_live(self) -> bool:
        """Counts as one of the pool's instances, serving or on the way to it."""
        return not (self.is_leaving or self.is_dead or self.is_lost or self.gives_up)

    @property
    def is_serving(self) -> bool:
        return self.phase is InstancePhase.SERVING

    @property
    def in_flight(self) -> int | None:
        """Requests in the engine; None: unknown."""
        return self.state.in_flight if self.state else None

    @property
    def engine_cannot_have_requests(self) -> bool:
        """The engine does not run, or runs and never answered in this run: nobody was ever routed to it."""
        if self.pod.phase == "Pending" or not self.pod.scheduled:
            return True
        engine = self.pod.container(names.CONTAINER_ENGINE)
        if engine is not None and engine.phase is not ContainerPhase.RUNNING:
            return True
        return self.state is not None and self.state.phase in (EnginePhase.LOADING, EnginePhase.VERIFYING)


@dataclass(frozen=True, slots=True)
class Seen:
    """Input of the rules."""

    pod: PodFacts
    state: AgentState | None
    """Fresh words only."""
    was_heard: bool
    """The agent said something at some time since this operator runs; False right after its start."""
    node: NodeFacts | None
    now: float
    asked_s: float
    """How long the agent was asked, which tells silence from not having asked yet."""
    startup_timeout_s: float
    """From the start of an engine run to its first answered self-test; infinite where unknown."""

    @property
    def is_lost(self) -> bool:
        """An absent node object proves nothing here (it may not be readable); Kubernetes' own pod garbage collector
        deletes the pods of nodes that are gone, and that is a deletion like any other."""
        is_silent = self.state is None and (self.was_heard or self.asked_s > SILENT_S)
        return is_silent and self.node is not None and self.node.ready is not True


def assess(
    pod: PodFacts,
    agent: AgentFacts | None,
    node: NodeFacts | None,
    now: float,
    startup_timeout_s: float,
    asked_s: float | None = None,
) -> Instance:
    """The instance before its routing is looked at: Serving is decided by `routing`, which asks the routers."""
    fresh = agent is not None and agent.age_s <= SILENT_S
    state = agent.state if agent is not None and fresh else None
    patience_s = now - pod.created_at if asked_s is None else asked_s
    seen = Seen(pod, state, agent is not None, node, now, patience_s, startup_timeout_s)
    finding = next(found for rule in RULES if (found := rule(seen)))
    return Instance(
        pod=pod,
        phase=finding.phase,
        reason=finding.reason,
        message=finding.message,
        verdict=finding.verdict,
        state=state,
        heard_at=now - agent.age_s if agent is not None and fresh else 0.0,
        is_lost=seen.is_lost and pod.deletion_at is None,
        asked_s=asked_s,
    )


def _dead(seen: Seen) -> Finding | None:
    pod = seen.pod
    if pod.phase not in ("Failed", "Succeeded"):
        return None
    said = ": ".join(part for part in (pod.reason, pod.message) if part) or _how_it_ended(pod)
    return Finding(InstancePhase.FAILED, Reason.POD_FAILED, f"the pod ended ({said}); it is replaced", Verdict.UNROUTE)


def _leaving(seen: Seen) -> Finding | None:
    pod = seen.pod
    if pod.deletion_at is not None:
        reason = _reason(pod.drain_reason, Reason.EXTERNAL_DELETE)
        message = "the pod was told to stop and finishes its requests"
        return Finding(InstancePhase.TERMINATING, reason, message, Verdict.UNROUTE)
    if pod.drain_started_at is not None:
        reason = _reason(pod.drain_reason, Reason.DRAINING)
        message = "no new requests; it is deleted when those in flight are answered"
        return Finding(InstancePhase.DRAINING, reason, message, Verdict.UNROUTE)
    return None


def _lost(seen: Seen) -> Finding | None:
    if not seen.is_lost:
        return None
    message = f"node {seen.pod.node} is not ready and the agent does not answer; the instance is replaced"
    return Finding(InstancePhase.FAILED, Reason.NODE_LOST, message, Verdict.UNROUTE)


def _unscheduled(seen: Seen) -> Finding | None:
    pod = seen.pod
    if pod.scheduled:
        return None
    if pod.scheduling_message:
        return Finding(InstancePhase.PENDING, Reason.UNSCHEDULABLE, pod.scheduling_message, Verdict.UNROUTE)
    return Finding(InstancePhase.PENDING, Reason.STARTING, "waits to be scheduled", Verdict.UNROUTE)


def _not_startable(seen: Seen) -> Finding | None:
    """A container that the kubelet can't start: image, configuration. A running engine serves on without an agent."""
    engine = seen.pod.container(names.CONTAINER_ENGINE)
    if engine is not None and engine.phase is ContainerPhase.RUNNING:
        return None
    for container in seen.pod.containers:
        if container.phase is not ContainerPhase.WAITING:
            continue
        said = f"container {container.name}: {container.reason}: {container.message}".rstrip(": ")
        if container.reason in _PULL_REASONS:
            return Finding(InstancePhase.PENDING, Reason.IMAGE_PULL, said, Verdict.UNROUTE)
        if container.reason in _CONFIG_REASONS:
            return Finding(InstancePhase.FAILED, Reason.POD_FAILED, said, Verdict.UNROUTE)
    return None


def _crashed(seen: Seen) -> Finding | None:
    """The engine's container ended; the kubelet restarts it in place."""
    engine = seen.pod.container(names.CONTAINER_ENGINE)
    if engine is None or engine.phase is ContainerPhase.RUNNING or engine.exit_code is None:
        return None
    return Finding(InstancePhase.FAILED, exit_reason(engine), _exit_text(engine), Verdict.UNROUTE)


def _silent(seen: Seen) -> Finding | None:
    pod = seen.pod
    if seen.state is not None:
        return None
    if pod.gate and not seen.was_heard:
        # Right after the operator's start: not asked yet is no news, so nothing may change, not even in status.
        return Finding(InstancePhase.SERVING, Reason.SERVING, SERVES, Verdict.HOLD)
    if pod.gate:
        message = "the agent does not answer; the instance keeps its routing until something speaks against it"
        return Finding(InstancePhase.SERVING, Reason.AGENT_SILENT, message, Verdict.HOLD)
    agent = pod.container(names.CONTAINER_AGENT)
    if pod.phase == "Pending" or agent is None or agent.phase is not ContainerPhase.RUNNING:
        return Finding(InstancePhase.PENDING, Reason.STARTING, "containers are starting", Verdict.HOLD)
    if seen.now - pod.created_at > seen.startup_timeout_s:
        return Finding(InstancePhase.LOADING, Reason.STARTUP_TIMEOUT, _late(seen), Verdict.HOLD)
    return Finding(InstancePhase.LOADING, Reason.AGENT_SILENT, "the agent has not answered yet", Verdict.HOLD)


def _agents_word(seen: Seen) -> Finding:
    """The last rule: what the agent says now."""
    state = seen.state
    if state is None:
        raise AssertionError("a silent agent is the rule before this one")
    message = state.message
    match state.phase:
        case EnginePhase.READY if state.engine_id and seen.pod.ip:
            if state.reason == Reason.SELF_TEST_UNAUTHORIZED:  # it served before: a configuration fault, not illness
                message = message or "the engine refuses the self-test's key"
                return Finding(InstancePhase.VERIFYING, Reason.SELF_TEST_UNAUTHORIZED, message, Verdict.ROUTE)
            if state.missing:
                return Finding(InstancePhase.VERIFYING, Reason.METRICS_MISSING, _missing(state), Verdict.ROUTE)
            message = "answered a real inference; waits until every router lists it"
            return Finding(InstancePhase.VERIFYING, Reason.ROUTERS_STARTING, message, Verdict.ROUTE)
        case EnginePhase.SUSPECT:
            reason = _reason(state.reason, Reason.SUSPECT)
            message = message or "idle, yet a self-test went unanswered; no new requests until it answers"
            return Finding(InstancePhase.SUSPECT, reason, message, Verdict.UNROUTE)
        case EnginePhase.HUNG:
            message = message or "no answered self-test and no token progress; the kubelet restarts the engine"
            return Finding(InstancePhase.HUNG, Reason.HUNG, message, Verdict.UNROUTE)
        case EnginePhase.DRAINING:
            message = message or "the pod was told to stop and finishes its requests"
            return Finding(InstancePhase.TERMINATING, Reason.EXTERNAL_DELETE, message, Verdict.UNROUTE)
    if state.reason == Reason.SELF_TEST_UNAUTHORIZED:  # a configuration fault: never too late, never replaced (D15)
        message = message or "the engine refuses the self-test's key"
        return Finding(InstancePhase.VERIFYING, Reason.SELF_TEST_UNAUTHORIZED, message, Verdict.UNROUTE)
    if seen.now - state.started_at > seen.startup_timeout_s:
        return Finding(InstancePhase.LOADING, Reason.STARTUP_TIMEOUT, _late(seen), Verdict.UNROUTE)
    if state.phase is EnginePhase.LOADING:
        engine = seen.pod.container(names.CONTAINER_ENGINE)
        if engine is not None and engine.restarts > 0 and engine.exit_code is not None:
            # Between two crashes the engine loads again: the evidence must not vanish meanwhile (S080).
            return Finding(InstancePhase.LOADING, exit_reason(engine), _exit_text(engine), Verdict.UNROUTE)
        message = message or "the engine does not list its model yet"
        return Finding(InstancePhase.LOADING, Reason.LOADING, message, Verdict.UNROUTE)
    reason = _reason(state.reason, Reason.VERIFYING)
    return Finding(
        InstancePhase.VERIFYING, reason, message or "waits for its first answered self-test", Verdict.UNROUTE
    )


RULES: Final[tuple[Callable[[Seen], Finding | None], ...]] = (
    _dead,
    _leaving,
    _lost,
    _unscheduled,
    _not_startable,
    _crashed,
    _silent,
    _agents_word,
)


def _late(seen: Seen) -> str:
    said = f" ({seen.state.message})" if seen.state and seen.state.message else ""
    limit = f"{int(seen.startup_timeout_s)} s (spec.health.startupTimeoutSeconds)"
    return f"did not answer a self-test within {limit} of its start{said}"


def _how_it_ended(pod: PodFacts) -> str:
    engine = pod.container(names.CONTAINER_ENGINE)
    return _exit_text(engine) if engine is not None and engine.exit_code is not None else pod.phase


def _missing(state: AgentState) -> str:
    """Unknown is not zero, and no reason for a restart: only what needs these numbers is blind."""
    signals = ", ".join(sorted(state.missing))
    version = f" {state.version}" if state.version else ""
    return (
        f"the engine ({state.engine}{version}) does not publish {signals}: those numbers are unknown. "
        "Was the metric renamed in this engine version?"
    )


def exit_reason(container: ContainerFacts) -> Reason:
    killed = "OOMKilled" in (container.reason, container.last_reason)
    return Reason.OUT_OF_MEMORY if killed else Reason.CRASH_LOOP


def _exit_text(container: ContainerFacts) -> str:
    """Exit code and the end of the log, as the kubelet kept it (`FallbackToLogsOnError`)."""
    ended = container.phase is ContainerPhase.TERMINATED
    reason = container.reason if ended else container.last_reason
    message = (container.message if ended else container.last_message).strip()
    text = f"container {container.name} ended with exit code {container.exit_code}"
    text += f" ({reason})" if reason else ""
    if len(message) > MAX_LOG_TEXT:
        message = "…" + message[1 - MAX_LOG_TEXT :]  # the last lines say what happened
    return f"{text}: {message}" if message else text


def _reason(text: str, otherwise: Reason) -> Reason:
    """The text as one of our codes; an agent or annotation of another version may know others."""
    return Reason(text) if text in Reason.__members__.values() else otherwise
