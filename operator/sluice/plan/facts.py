"""From the API's dicts to frozen facts, at the door of the store.

Tolerant by design: a missing or malformed field becomes "unknown" in the terms of `snapshot` ("", None, -1, empty),
never an exception and never a zero that means something. Another writer's pod must not stop a pass.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from sluice.api import names
from sluice.plan.snapshot import ContainerFacts, ContainerPhase, NodeFacts, PodFacts
from sluice.plan.times import parse_time

MAX_TEXT = 1024
"""Characters kept of foreign text (scheduler, kubelet); cut and cleaned of control characters."""

MAX_TERMINATION = 2048
"""Characters kept of the end of a termination message; the kubelet itself keeps 2 KiB of a log."""

_REPELLING = ("NoSchedule", "NoExecute")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]+")


def pod_facts(obj: Mapping[str, Any]) -> PodFacts:
    """Facts of one pod; `obj` is the API's dict, with or without `managedFields`."""
    meta, spec, status = _map(obj.get("metadata")), _map(obj.get("spec")), _map(obj.get("status"))
    labels, annotations = _map(meta.get("labels")), _map(meta.get("annotations"))
    conditions = {c["type"]: c for c in _maps(status.get("conditions")) if isinstance(c.get("type"), str)}
    scheduled = conditions.get("PodScheduled", {})
    disruption = conditions.get("DisruptionTarget", {})
    node = _text(spec.get("nodeName"))
    return PodFacts(
        namespace=_text(meta.get("namespace")),
        name=_text(meta.get("name")),
        uid=_text(meta.get("uid")),
        resource_version=_text(meta.get("resourceVersion")),
        owner_uid=controller_uid(meta),
        service=_text(labels.get(names.LABEL_SERVICE)),
        service_uid=_text(labels.get(names.LABEL_SERVICE_UID)),
        component=_text(labels.get(names.LABEL_COMPONENT)),
        pool=_text(labels.get(names.LABEL_POOL)),
        role=_text(labels.get(names.LABEL_ROLE)),
        revision=_text(labels.get(names.LABEL_REVISION)),
        epoch=_number(labels.get(names.LABEL_EPOCH)),
        index=_number(labels.get(names.LABEL_INDEX)),
        instance=_text(labels.get(names.LABEL_INSTANCE)),
        spec_hash=_text(annotations.get(names.ANNOTATION_SPEC_HASH)),
        drain_started_at=parse_time(annotations.get(names.ANNOTATION_DRAIN_STARTED_AT)),
        drain_reason=_text(annotations.get(names.ANNOTATION_DRAIN_REASON)),
        phase=_text(status.get("phase")),
        reason=_text(status.get("reason")),
        message=_text(status.get("message")),
        node=node,
        ip=_text(status.get("podIP")),
        created_at=parse_time(meta.get("creationTimestamp")) or 0.0,
        scheduled=bool(node) or scheduled.get("status") == "True",
        scheduling_message=_text(scheduled.get("message")) if scheduled.get("status") == "False" else "",
        gate=_is_true(conditions.get(names.READINESS_GATE)),
        ready=_is_true(conditions.get("Ready")),
        disruption_target=(_text(disruption.get("reason")) or "Unknown") if _is_true(disruption) else "",
        deletion_at=parse_time(meta.get("deletionTimestamp")),
        containers=tuple(_containers(status)),
        deletion_grace_s=_seconds(meta.get("deletionGracePeriodSeconds")),
        drain_in_flight=number if (number := _number(annotations.get(names.ANNOTATION_DRAIN_IN_FLIGHT))) >= 0 else None,
        drain_requested=_request(annotations),
        drain_cancelled_at=parse_time(annotations.get(names.ANNOTATION_DRAIN_CANCELLED_AT)),
        scheduled_at=_since(scheduled, "True"),
        unschedulable_since=None if node else _since(scheduled, "False"),
        gate_was_set=names.READINESS_GATE in conditions,
        not_ready_since=_since(conditions.get("Ready", {}), "False"),
        avoids=tuple(filter(None, _text(annotations.get(names.ANNOTATION_AVOIDS)).split(","))),
    )


def node_facts(obj: Mapping[str, Any]) -> NodeFacts:
    """Facts of one node; `ready` is None when the condition is missing or Unknown."""
    meta, spec, status = _map(obj.get("metadata")), _map(obj.get("spec")), _map(obj.get("status"))
    ready = next((c.get("status") for c in _maps(status.get("conditions")) if c.get("type") == "Ready"), None)
    return NodeFacts(
        name=_text(meta.get("name")),
        uid=_text(meta.get("uid")),
        ready={"True": True, "False": False}.get(ready) if isinstance(ready, str) else None,
        unschedulable=spec.get("unschedulable") is True,
        taints=tuple(sorted(_text(t.get("key")) for t in _maps(spec.get("taints")) if t.get("effect") in _REPELLING)),
        is_being_deleted=bool(meta.get("deletionTimestamp")),
        allocatable={str(k): str(v) for k, v in _map(status.get("allocatable")).items()},
    )


def controller_uid(meta: Mapping[str, Any]) -> str:
    """UID of the controlling owner, "" without one."""
    owners = (o for o in _maps(meta.get("ownerReferences")) if o.get("controller") is True)
    return next((_text(o.get("uid")) for o in owners), "")


def _containers(status: Mapping[str, Any]) -> Iterable[ContainerFacts]:
    """Init containers (native sidecars among them) first, as the pod's status lists them."""
    for key in ("initContainerStatuses", "containerStatuses"):
        for entry in _maps(status.get(key)):
            yield _container(entry)


def _container(entry: Mapping[str, Any]) -> ContainerFacts:
    state = _map(entry.get("state"))
    last = _map(_map(entry.get("lastState")).get("terminated"))
    if "running" in state:
        phase, detail = ContainerPhase.RUNNING, _map(state["running"])
    elif "terminated" in state:
        phase, detail = ContainerPhase.TERMINATED, _map(state["terminated"])
    else:
        phase, detail = ContainerPhase.WAITING, _map(state.get("waiting"))
    ended = detail if phase is ContainerPhase.TERMINATED else last
    code = (detail if phase is ContainerPhase.TERMINATED else last).get("exitCode")
    restarts = entry.get("restartCount")
    return ContainerFacts(
        name=_text(entry.get("name")),
        container_id=_text(entry.get("containerID")),
        phase=phase,
        reason=_text(detail.get("reason")),
        message=_end(detail.get("message")) if phase is ContainerPhase.TERMINATED else _text(detail.get("message")),
        exit_code=code if isinstance(code, int) else None,
        last_reason=_text(last.get("reason")),
        last_message=_end(last.get("message")),
        ready=entry.get("ready") is True,
        started=entry.get("started") is True,
        restarts=restarts if isinstance(restarts, int) else 0,
        started_at=parse_time(detail.get("startedAt")) if phase is ContainerPhase.RUNNING else None,
        ended_at=parse_time(ended.get("finishedAt")),
        ended_run_started_at=parse_time(ended.get("startedAt")),
    )


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _maps(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _text(value: Any) -> str:
    if not isinstance(value, str):
        return ""
    text = _CONTROL.sub(" ", value)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _end(value: Any) -> str:
    """A termination message: its end tells what happened."""
    if not isinstance(value, str):
        return ""
    text = _CONTROL.sub(" ", value)
    return text if len(text) <= MAX_TERMINATION else "…" + text[1 - MAX_TERMINATION :]


def _since(condition: Mapping[str, Any], status: str) -> float | None:
    return parse_time(condition.get("lastTransitionTime")) if condition.get("status") == status else None


def _number(value: Any) -> int:
    """A label's number; -1 when absent or not one."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 9 else -1


def _seconds(value: Any) -> float | None:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _request(annotations: Mapping[str, Any]) -> str:
    """What a user wrote into the drain request; an empty value is a request too."""
    if names.ANNOTATION_DRAIN_REQUESTED not in annotations:
        return ""
    return _text(annotations[names.ANNOTATION_DRAIN_REQUESTED]) or "requested"


def _is_true(condition: Any) -> bool:
    return isinstance(condition, Mapping) and condition.get("status") == "True"
