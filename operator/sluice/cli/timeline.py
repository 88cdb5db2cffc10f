"""The start-up of one instance as a row of stages, from what its pod's status says. Pure.

Kubernetes keeps when each condition last changed, not when it first did, and times in whole seconds. So:
- a stage whose end is later than that of the stage after it has ended again since (an engine that was taken out of
  routing and came back): its end is unknown, never guessed;
- after a restart of the engine's container only the present run is shown: the image stage has no end then.
The end of loading is not on the pod: only the engine's agent knows it. Unless it could be asked, loading and first
inference are one span, shown at the first inference.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from sluice.api import names
from sluice.api.agent import AgentState, EnginePhase
from sluice.plan.times import parse_time

WHOLE_SECONDS: Final = 1.0
"""Kubernetes cuts times to seconds, the agent does not: marks so close together are in order."""


class Stage(StrEnum):
    SCHEDULED = "scheduled"
    """From the pod's creation until it has a node."""
    IMAGE = "image"
    """Until the engine's container runs: images pulled, agent started."""
    LOAD = "load"
    """Until the engine lists its model: weights read, compiled, warmed up."""
    FIRST_INFERENCE = "firstInference"
    """Until a real one-token inference was answered."""
    ROUTED = "routed"
    """Until every router lists the instance."""


@dataclass(frozen=True, slots=True)
class Span:
    """One stage; times are seconds since the epoch, None: unknown or not reached."""

    stage: Stage
    began: float | None
    ended: float | None
    is_under_way: bool = False

    def seconds(self, now: float) -> float | None:
        """How long it took, or has taken so far; None: not known."""
        end = now if self.is_under_way else self.ended
        return None if self.began is None or end is None else max(0.0, end - self.began)


def startup(pod: Mapping[str, Any], agent: AgentState | None = None) -> tuple[Span, ...]:
    """One span per stage, in order; at most one is under way."""
    created = parse_time(_map(pod.get("metadata")).get("creationTimestamp"))
    engine = _engine(pod)
    runs_since, is_first_run = _engine_start(engine)
    marks: dict[Stage, float | None] = {
        Stage.SCHEDULED: _became_true(pod, "PodScheduled"),
        Stage.IMAGE: runs_since,
        Stage.LOAD: agent.loaded_at if agent is not None and runs_since is not None else None,
        Stage.FIRST_INFERENCE: (agent.verified_at if agent is not None else None)
        or _became_true(pod, "ContainersReady"),
        Stage.ROUTED: _became_true(pod, names.READINESS_GATE),
    }
    spans = _spans(created, _in_order(marks))
    if not is_first_run:
        spans = [replace(s, ended=None) if s.stage is Stage.IMAGE else s for s in spans]
    return tuple(_mark_under_way(spans, _reached(pod, engine, agent)))


def total_seconds(pod: Mapping[str, Any], spans: tuple[Span, ...]) -> float | None:
    """From the pod's creation until it was routed; None: not routed, restarted since, or not known."""
    created = parse_time(_map(pod.get("metadata")).get("creationTimestamp"))
    by_stage = {span.stage: span for span in spans}
    routed = by_stage[Stage.ROUTED].ended
    if created is None or routed is None or by_stage[Stage.IMAGE].ended is None:
        return None
    return max(0.0, routed - created)


def _spans(created: float | None, marks: Mapping[Stage, float | None]) -> list[Span]:
    """A stage begins where the last known one ended, but loading is skipped over only together with the inference."""
    spans = []
    began = created
    for stage in Stage:
        ended = marks[stage]
        spans.append(Span(stage, began, ended))
        if ended is not None:
            began = ended
        elif stage is not Stage.LOAD:
            began = None
    return spans


def _in_order(marks: Mapping[Stage, float | None]) -> dict[Stage, float | None]:
    """Marks that are later than a later stage's tell of another time than the start-up."""
    kept: dict[Stage, float | None] = {}
    limit = float("inf")
    for stage in reversed(Stage):
        mark = marks[stage]
        kept[stage] = mark if mark is not None and mark <= limit + WHOLE_SECONDS else None
        limit = min(limit, mark) if kept[stage] is not None and mark is not None else limit
    return kept


def _reached(pod: Mapping[str, Any], engine: Mapping[str, Any], agent: AgentState | None) -> Stage | None:
    """The stage under way now; None: routed, leaving or ended."""
    meta, status = _map(pod.get("metadata")), _map(pod.get("status"))
    annotations = _map(meta.get("annotations"))
    is_leaving = "deletionTimestamp" in meta or names.ANNOTATION_DRAIN_STARTED_AT in annotations
    if is_leaving or status.get("phase") in ("Failed", "Succeeded"):
        return None
    if not _is_true(pod, "PodScheduled") and not _map(pod.get("spec")).get("nodeName"):
        return Stage.SCHEDULED
    if "running" not in _map(engine.get("state")):
        return Stage.IMAGE
    if _is_true(pod, names.READINESS_GATE):
        return None
    if _is_true(pod, "ContainersReady"):
        return Stage.ROUTED
    is_loaded = engine.get("started") is True or (agent is not None and agent.phase is not EnginePhase.LOADING)
    return Stage.FIRST_INFERENCE if is_loaded else Stage.LOAD


def _mark_under_way(spans: list[Span], reached: Stage | None) -> list[Span]:
    if reached is None:
        return spans
    order = list(Stage)
    marked = []
    for span in spans:
        if span.stage is reached:
            span = replace(span, ended=None, is_under_way=True)
        elif order.index(span.stage) > order.index(reached):
            span = replace(span, began=None, ended=None)
        marked.append(span)
    return marked


def _engine(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    statuses = _map(pod.get("status")).get("containerStatuses")
    found = statuses if isinstance(statuses, list) else []
    return next((c for c in found if isinstance(c, Mapping) and c.get("name") == names.CONTAINER_ENGINE), {})


def _engine_start(engine: Mapping[str, Any]) -> tuple[float | None, bool]:
    """(start of the present run, whether it is the first run of this pod)."""
    running = _map(_map(engine.get("state")).get("running"))
    return parse_time(running.get("startedAt")), not engine.get("restartCount")


def _condition(pod: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    conditions = _map(pod.get("status")).get("conditions")
    found = conditions if isinstance(conditions, list) else []
    return next((c for c in found if isinstance(c, Mapping) and c.get("type") == kind), {})


def _is_true(pod: Mapping[str, Any], kind: str) -> bool:
    return _condition(pod, kind).get("status") == "True"


def _became_true(pod: Mapping[str, Any], kind: str) -> float | None:
    condition = _condition(pod, kind)
    return parse_time(condition.get("lastTransitionTime")) if condition.get("status") == "True" else None


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
