"""What is known of one service at one moment: its object, its instances, its drains. Pure.

Phases come from one place, `plan.health`, with what a person can see: the operator's own word in `status.problems`
first (it also sees routers and nodes), then the agent if it could be asked, then the pod. A number that nobody said
is None.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sluice.api import names
from sluice.api.agent import AgentState
from sluice.api.conditions import ConditionType
from sluice.cli import advice, timeline
from sluice.plan.facts import controller_uid, pod_facts
from sluice.plan.health import InstancePhase, assess
from sluice.plan.snapshot import AgentFacts, ContainerPhase, PodFacts
from sluice.plan.times import format_time, parse_time

Object = Mapping[str, Any]

_NO_CONDITION: Final[Object] = {}


@dataclass(frozen=True, slots=True)
class InstanceReport:
    """One instance as a person sees it. Times are seconds since the epoch."""

    pod: PodFacts
    phase: str
    reason: str
    message: str
    in_flight: int | None
    """Requests in the engine, as the agent or `status.drains` counts them."""
    restarts: int | None
    """Of the engine's container; None: it has no status yet."""
    is_requested: bool
    """Somebody asked to drain it."""
    startup: tuple[timeline.Span, ...]
    startup_s: float | None
    """From creation to routed; None: not routed yet, restarted since, or not known."""

    @property
    def name(self) -> str:
        return self.pod.name

    @property
    def is_leaving(self) -> bool:
        return self.pod.deletion_at is not None or self.pod.drain_started_at is not None or self.is_requested


@dataclass(frozen=True, slots=True)
class ServiceReport:
    """A service and its instances, in the order of pool, index and build number."""

    service: Object
    instances: tuple[InstanceReport, ...]
    now: float

    @property
    def name(self) -> str:
        return str(self.service["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.service["metadata"]["namespace"])

    @property
    def status(self) -> Object:
        return mapping(self.service.get("status"))

    @property
    def is_seen(self) -> bool:
        """The operator has looked at the present generation of the spec."""
        return bool(self.status.get("observedGeneration") == self.service["metadata"].get("generation"))

    @property
    def is_ready(self) -> bool:
        """Ready for the spec as it is now."""
        return self.is_seen and self.condition(ConditionType.READY).get("status") == "True"

    def condition(self, kind: str) -> Object:
        """Empty when the operator has not set it."""
        return next((c for c in self.entries("conditions") if c.get("type") == kind), _NO_CONDITION)

    def entries(self, key: str) -> list[Object]:
        """A list of `status`, whatever else stands there."""
        return maps(self.status.get(key))

    def drain_entry(self, instance: str) -> Object:
        """The operator's word on one drain."""
        return entry_of(self.entries("drains"), instance)

    def seconds_since(self, text: Any) -> float | None:
        """Age of an RFC 3339 time; None for anything else."""
        moment = parse_time(text)
        return None if moment is None else self.now - moment

    def to_dict(self) -> dict[str, Any]:
        """What `-o json` shows; keys are never removed, only added."""
        ready = self.condition(ConditionType.READY)
        return {
            "name": self.name,
            "namespace": self.namespace,
            "ready": ready.get("status", "Unknown"),
            "reason": ready.get("reason", ""),
            "message": ready.get("message", ""),
            "since": ready.get("lastTransitionTime"),
            "generation": self.service["metadata"].get("generation"),
            "observedGeneration": self.status.get("observedGeneration"),
            "url": self.status.get("url"),
            "model": mapping(self.status.get("summary")).get("model"),
            "revision": dict(mapping(self.status.get("revision"))),
            "conditions": self.entries("conditions"),
            "pools": self.entries("pools"),
            "instances": [_instance_dict(i, self.now) for i in self.instances],
            "problems": [{**p, "nextStep": self.next_step(p)} for p in self.entries("problems")],
            "drains": self.entries("drains"),
            "lastFailures": self.entries("lastFailures"),
            "avoidedNodes": self.entries("avoidedNodes"),
        }

    def next_step(self, problem: Object) -> str:
        """What a person does about an entry of `problems`; "" for nothing."""
        return advice.next_step(text_of(problem, "reason"), self.namespace, text_of(problem, "name"))


def report(service: Object, pods: Iterable[Object], agents: Mapping[str, AgentState], now: float) -> ServiceReport:
    """`pods`: any pods; those that the service owns count. `agents`: pod UID to what its agent just said."""
    uid = service["metadata"]["uid"]
    status = mapping(service.get("status"))
    own = [pod for pod in pods if is_engine_pod(pod) and controller_uid(pod["metadata"]) == uid]
    instances = [_instance(pod, agents.get(pod["metadata"]["uid"]), status, now) for pod in own]
    instances.sort(key=lambda i: (i.pod.pool, i.pod.index, i.pod.epoch, i.name))
    return ServiceReport(service, tuple(instances), now)


def is_engine_pod(pod: Object) -> bool:
    """An engine pod that an InferenceService owns; labels alone prove nothing."""
    meta = mapping(pod.get("metadata"))
    labels = mapping(meta.get("labels"))
    owners = [o for o in maps(meta.get("ownerReferences")) if o.get("controller") is True]
    return (
        labels.get(names.LABEL_MANAGED_BY) == names.MANAGED_BY
        and labels.get(names.LABEL_COMPONENT) == names.COMPONENT_ENGINE
        and any(o.get("kind") == names.SERVICE_KIND for o in owners)
    )


def is_drain_requested(pod: Object) -> bool:
    return names.ANNOTATION_DRAIN_REQUESTED in mapping(mapping(pod.get("metadata")).get("annotations"))


def _instance(pod: Object, agent: AgentState | None, status: Object, now: float) -> InstanceReport:
    facts = pod_facts(pod)
    phase, reason, message = _phase(facts, agent, entry_of(maps(status.get("problems")), facts.name), now)
    engine = facts.container(names.CONTAINER_ENGINE)
    drain = entry_of(maps(status.get("drains")), facts.name)
    spans = timeline.startup(pod, agent)
    return InstanceReport(
        pod=facts,
        phase=phase,
        reason=reason,
        message=message,
        in_flight=agent.in_flight if agent is not None else whole(drain.get("inFlight")),
        restarts=engine.restarts if engine is not None else None,
        is_requested=is_drain_requested(pod),
        startup=spans,
        startup_s=timeline.total_seconds(pod, spans),
    )


def _phase(pod: PodFacts, agent: AgentState | None, problem: Object, now: float) -> tuple[str, str, str]:
    """(phase, reason, message) of an instance."""
    heard = AgentFacts(agent, 0.0) if agent is not None else None
    seen = assess(pod, heard, None, now, math.inf)
    if seen.is_leaving or seen.is_dead:
        return seen.phase, seen.reason, seen.message
    if problem.get("phase"):
        return text_of(problem, "phase"), text_of(problem, "reason"), text_of(problem, "message")
    if pod.gate:
        return InstancePhase.SERVING, "Serving", ""
    engine = pod.container(names.CONTAINER_ENGINE)
    if agent is None and engine is not None and engine.phase is ContainerPhase.RUNNING:
        # Nobody asked the agent; the kubelet did, by its probes.
        return (InstancePhase.VERIFYING if engine.started else InstancePhase.LOADING), "", ""
    return seen.phase, seen.reason, seen.message


def _instance_dict(instance: InstanceReport, now: float) -> dict[str, Any]:
    pod = instance.pod
    return {
        "name": pod.name,
        "pool": pod.pool,
        "phase": str(instance.phase),
        "reason": str(instance.reason),
        "message": instance.message,
        "node": pod.node,
        "revision": pod.revision,
        "createdAt": format_time(pod.created_at) if pod.created_at else None,
        "inFlight": instance.in_flight,
        "restarts": instance.restarts,
        "drainRequested": instance.is_requested,
        "drainStartedAt": format_time(pod.drain_started_at) if pod.drain_started_at is not None else None,
        "drainReason": pod.drain_reason,
        "startup": [
            {"stage": str(span.stage), "seconds": span.seconds(now), "underWay": span.is_under_way}
            for span in instance.startup
        ],
        "startupSeconds": instance.startup_s,
    }


# Tolerant reading of dicts.


def mapping(value: Any) -> Object:
    return value if isinstance(value, Mapping) else {}


def maps(value: Any) -> list[Object]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def text_of(entry: Object, *keys: str) -> str:
    """The first of the keys that has a text; "" if none has."""
    return next((value for key in keys if isinstance(value := entry.get(key), str) and value), "")


def whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def entry_of(entries: Sequence[Object], instance: str) -> Object:
    """The entry about one instance; empty if there is none."""
    return next((e for e in entries if instance and text_of(e, "name", "instance", "pod") == instance), {})
