"""Condition types and reason codes, shared by conditions, Events, logs and metrics.

`condition()` is the only place that makes a condition, so that `lastTransitionTime` moves with `status` alone.
"""

from enum import StrEnum
from typing import Any

MAX_MESSAGE = 1024


class ConditionType(StrEnum):
    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    ACCEPTED = "Accepted"
    WEIGHTS_READY = "WeightsReady"
    ROUTED = "Routed"
    ROLLOUT_COMPLETE = "RolloutComplete"


class Reason(StrEnum):
    """One word per cause; the message beside it says what it means for the object and what to do."""

    # Accepted
    VALID = "Valid"
    INVALID_SPEC = "InvalidSpec"
    PROFILE_NOT_FOUND = "ProfileNotFound"
    # Ready, Reconciling
    SERVING = "Serving"
    IDLE = "Idle"
    SUSPENDED = "Suspended"
    STARTING = "Starting"
    SCALING = "Scaling"
    ROLLING_OUT = "RollingOut"
    ROLLOUT_PAUSED = "RolloutPaused"
    DRAINING = "Draining"
    UP_TO_DATE = "UpToDate"
    INTERNAL_ERROR = "InternalError"
    # Why something was refused or failed
    NAME_CONFLICT = "NameConflict"
    FORBIDDEN = "Forbidden"
    QUOTA_EXCEEDED = "QuotaExceeded"
    REJECTED = "Rejected"
    API_UNAVAILABLE = "APIUnavailable"
    CREATION_LIMIT = "CreationLimit"
    # Instances
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_PULL = "ImagePull"
    CRASH_LOOP = "CrashLoop"
    OUT_OF_MEMORY = "OutOfMemory"
    STARTUP_TIMEOUT = "StartupTimeout"
    LOADING = "Loading"
    VERIFYING = "Verifying"
    SELF_TEST_FAILED = "SelfTestFailed"
    SELF_TEST_UNAUTHORIZED = "SelfTestUnauthorized"
    SUSPECT = "Suspect"
    HUNG = "Hung"
    AGENT_SILENT = "AgentSilent"
    POD_FAILED = "PodFailed"
    NODE_LOST = "NodeLost"
    # Routing
    ROUTED = "Routed"
    ROUTERS_STARTING = "RoutersStarting"
    ROUTER_UNREACHABLE = "RouterUnreachable"
    NO_INSTANCE_SERVING = "NoInstanceServing"
    # Weights
    NOT_NEEDED = "NotNeeded"
    CLAIM = "PersistentVolumeClaim"
    # Why an instance is drained, and Events
    SCALE_IN = "ScaleIn"
    SUPERSEDED = "Superseded"
    EXTERNAL_DELETE = "ExternalDelete"
    CREATED = "Created"
    DRAINED = "Drained"
    REQUESTS_CUT = "RequestsCut"


def condition(
    kind: ConditionType,
    status: bool | None,
    reason: Reason,
    message: str,
    *,
    generation: int,
    now: str,
    previous: dict[str, Any] | None,
) -> dict[str, Any]:
    """A `metav1.Condition`; `status` None is Unknown, `now` an RFC 3339 time, `previous` the one it replaces."""
    text = {True: "True", False: "False", None: "Unknown"}[status]
    same = previous is not None and previous.get("status") == text
    return {
        "type": str(kind),
        "status": text,
        "reason": str(reason),
        "message": message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…",
        "observedGeneration": generation,
        "lastTransitionTime": previous["lastTransitionTime"] if same and previous else now,
    }
