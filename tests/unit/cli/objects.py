"""Objects as the API server sends them, for the command line's tests."""

from typing import Any

from sluice.api import names
from sluice.plan.times import format_time

Object = dict[str, Any]

NOW = 1_800_000_000.0
"""Seconds since the epoch."""
UID = "11111111-2222-3333-4444-555555555555"


def moment(ago_s: float) -> str:
    return format_time(NOW - ago_s)


def condition(kind: str, status: str, reason: str, message: str, *, ago_s: float = 180) -> Object:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "observedGeneration": 3,
        "lastTransitionTime": moment(ago_s),
    }


def a_pool(**more: Any) -> Object:
    counts = {"desired": 2, "current": 2, "serving": 2, "updated": 2, "draining": 0, "unhealthy": 0}
    return {"name": "default", **counts, **more}


def a_service(*conditions: Object, generation: int = 3, seen: int = 3, **status: Any) -> Object:
    """Ready unless conditions are given."""
    ready = (
        condition("Ready", "True", "Serving", "pool default: 2 of 2 instances serve"),
        condition("Reconciling", "False", "UpToDate", "what runs is what is declared"),
        condition("Stalled", "False", "Valid", "nothing needs a change by a human"),
        condition("RolloutComplete", "True", "UpToDate", "all instances are of the present revision"),
    )
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.SERVICE_KIND,
        "metadata": {
            "name": "qwen",
            "namespace": "chat",
            "uid": UID,
            "generation": generation,
            "creationTimestamp": moment(3600),
        },
        "spec": {"model": {"uri": "hf://Qwen/Qwen3-8B"}, "engine": {"type": "Simulated"}},
        "status": {
            "observedGeneration": seen,
            "conditions": list(conditions or ready),
            "url": "http://qwen.chat.svc",
            "summary": {"model": "qwen", "serving": "2/2"},
            "pools": [a_pool()],
            **status,
        },
    }


def a_pod(
    name: str = "qwen-default-0-1",
    *,
    node: str = "n1",
    scheduled_s: float | None = 2,
    running_s: float | None = 12,
    ready_s: float | None = 40,
    routed_s: float | None = 42,
    age_s: float = 600,
    started: bool = True,
    restarts: int = 0,
    annotations: dict[str, str] | None = None,
    **metadata: Any,
) -> Object:
    """An engine pod; marks are seconds after its creation, None: not reached."""

    def at(mark: float) -> str:
        return moment(age_s - mark)

    marks = {"PodScheduled": scheduled_s, "ContainersReady": ready_s, names.READINESS_GATE: routed_s}
    conditions = [
        {"type": kind, "status": "False" if mark is None else "True", "lastTransitionTime": at(mark or 0)}
        for kind, mark in marks.items()
    ]
    state = (
        {"waiting": {"reason": "ContainerCreating"}} if running_s is None else {"running": {"startedAt": at(running_s)}}
    )
    engine = {
        "name": "engine",
        "state": state,
        "restartCount": restarts,
        "started": started,
        "ready": ready_s is not None,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "chat",
            "uid": f"uid-{name}",
            "creationTimestamp": moment(age_s),
            "labels": {
                names.LABEL_MANAGED_BY: names.MANAGED_BY,
                names.LABEL_COMPONENT: names.COMPONENT_ENGINE,
                names.LABEL_SERVICE_UID: UID,
                names.LABEL_POOL: "default",
                names.LABEL_REVISION: "7c9d",
                names.LABEL_INDEX: "0",
                names.LABEL_EPOCH: "1",
            },
            "annotations": annotations or {},
            "ownerReferences": [owner()],
            **metadata,
        },
        "spec": {"nodeName": node if scheduled_s is not None else "", "containers": [{"name": "engine"}]},
        "status": {
            "phase": "Running" if running_s is not None else "Pending",
            "conditions": conditions,
            "containerStatuses": [engine] if scheduled_s is not None else [],
        },
    }


def owner(uid: str = UID, name: str = "qwen") -> Object:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.SERVICE_KIND,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
