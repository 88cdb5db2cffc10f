"""Condition types and reason codes, shared by conditions, Events, logs and metrics.

`condition()` is the only place that makes a condition, so that `lastTransitionTime` moves with `status` alone.
"""

from enum import StrEnum
from typing import Any

MAX_MESSAGE = 1024


class ConditionType(StrEnum):
    READY = "Ready"
    """All desired instances serve; during a change it stays as it last was. Unknown: nothing served yet."""
    RECONCILING = "Reconciling"
    """Something is under way or waits for something that can heal by itself."""
    STALLED = "Stalled"
    """It will not succeed before a human changes something."""
    ACCEPTED = "Accepted"
    """The spec and what it refers to can be carried out."""
    WEIGHTS_READY = "WeightsReady"
    """Where the engines read their weights from; a claim is not checked before they start."""
    ROUTED = "Routed"
    """The routers that take requests list every serving instance."""
    ROLLOUT_COMPLETE = "RolloutComplete"
    """Every instance is of the present revision."""


class Reason(StrEnum):
    """One word per cause; the message beside it says what it means for the object and what to do."""

    # Accepted
    VALID = "Valid"
    """Nothing is wrong with the spec, nothing needs a change by a human."""
    INVALID_SPEC = "InvalidSpec"
    """A field can't be carried out; the message names it and the fix. Running pods are left alone."""
    PROFILE_NOT_FOUND = "ProfileNotFound"
    """The AcceleratorProfile is missing, unreadable or invalid: create it or name another one."""
    # Ready, Reconciling
    SERVING = "Serving"
    """All desired instances answered a real inference and every router lists them."""
    IDLE = "Idle"
    """`replicas` is 0 in every pool."""
    SUSPENDED = "Suspended"
    """`spec.suspend` is true; no instance is wanted."""
    STARTING = "Starting"
    """Instances are missing or on their way to their first answered inference."""
    SCALING = "Scaling"
    """Instances beyond the wanted number leave."""
    ROLLING_OUT = "RollingOut"
    """A new revision replaces the one before, one step at a time."""
    ROLLOUT_PAUSED = "RolloutPaused"
    """`spec.rollout.paused` holds a new revision back; what runs is repaired on the old one."""
    DRAINING = "Draining"
    """Instances finish their requests before they go, or the whole service is being deleted."""
    UP_TO_DATE = "UpToDate"
    """What runs is what is declared."""
    NODE_DRAIN_BLOCKED = "NodeDrainBlocked"
    """An instance has to leave its node, or was asked to, and its replacement finds no place; the message has the
    scheduler's words. Add capacity, or set `rollout.maxUnavailable` to let it go without."""
    INTERNAL_ERROR = "InternalError"
    """A bug in the operator: the service is not planned, its pods are left alone. Report the message."""
    # Why something was refused or failed
    NAME_CONFLICT = "NameConflict"
    """An object of somebody else stands at a name that is needed: delete or rename one of the two."""
    FORBIDDEN = "Forbidden"
    """The API server refused for lack of rights or by admission; the message has its words."""
    QUOTA_EXCEEDED = "QuotaExceeded"
    """A ResourceQuota refuses a pod or object; tried again with growing pauses, at most 5 min."""
    REJECTED = "Rejected"
    """The API server refused an object as invalid, or its namespace or kind is missing."""
    API_UNAVAILABLE = "APIUnavailable"
    """The API server did not answer or failed; tried again, at most 30 s apart."""
    CREATION_LIMIT = "CreationLimit"
    """Too many pods were created within a minute, so something removes or fails them; creation pauses."""
    # Instances
    UNSCHEDULABLE = "Unschedulable"
    """The scheduler finds no node; the message has its words."""
    IMAGE_PULL = "ImagePull"
    """The kubelet can't pull an image."""
    CRASH_LOOP = "CrashLoop"
    """The engine's container ended; the kubelet restarts it. The message has exit code and last log lines."""
    OUT_OF_MEMORY = "OutOfMemory"
    """The engine's container was killed for its memory (not accelerator memory)."""
    STARTUP_TIMEOUT = "StartupTimeout"
    """No answered self-test within `startupTimeoutSeconds`; an engine that never listed its model is restarted."""
    LOADING = "Loading"
    """The engine does not list its model yet."""
    VERIFYING = "Verifying"
    """The engine lists its model; its first self-test is not answered yet."""
    SELF_TEST_FAILED = "SelfTestFailed"
    """Self-tests fail: an error, or none answered yet. The message has the answer; not routed."""
    SELF_TEST_UNAUTHORIZED = "SelfTestUnauthorized"
    """The engine answers 401 or 403: take its API key away. Never a reason for a restart."""
    SUSPECT = "Suspect"
    """Idle, yet a self-test is unanswered (or no progress can be read): unrouted until one is answered."""
    HUNG = "Hung"
    """Neither an answered self-test nor token progress for `hangTimeoutSeconds`: the kubelet restarts the engine."""
    AGENT_SILENT = "AgentSilent"
    """The agent never answered, or not for 15 s; what is routed stays routed."""
    POD_FAILED = "PodFailed"
    """The pod ended (it is replaced), or the kubelet can't create a container of it."""
    NODE_LOST = "NodeLost"
    """The node is not ready and the agent is silent; the instance is replaced."""
    RESTARTS_EXHAUSTED = "RestartsExhausted"
    """More container restarts than `maxRestarts` in `restartWindowSeconds`: the instance is replaced."""
    ADMISSION_FAILED = "AdmissionFailed"
    """A node's kubelet refused the pod (a device is gone, the node is full): replaced, preferably on another node."""
    METRICS_MISSING = "MetricsMissing"
    """A serving engine does not publish what we read (renamed metric?): those numbers are unknown; never a restart."""
    # Rollout
    ROLLED_BACK = "RolledBack"
    """The new revision failed and the one before serves again: change the spec, or set `retry-at`."""
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    """Nothing of the new revision came to serve within `progressDeadlineSeconds` of the last progress."""
    NO_SURGE_CAPACITY = "NoSurgeCapacity"
    """There is no room for an instance above `replicas`; the message says what is missing and what is done."""
    # Routing
    ROUTED = "Routed"
    """Every router that takes requests lists every serving instance."""
    ROUTERS_STARTING = "RoutersStarting"
    """An instance is verified; not every router lists it yet."""
    ROUTER_UNREACHABLE = "RouterUnreachable"
    """A router does not say what it routes to, takes no list, or can't reach an instance."""
    NO_INSTANCE_SERVING = "NoInstanceServing"
    """No instance has answered an inference yet."""
    # Weights
    NOT_NEEDED = "NotNeeded"
    """The simulated engine reads no weights."""
    CLAIM = "PersistentVolumeClaim"
    """The engines read from a PersistentVolumeClaim."""
    # Why an instance is drained, and Events
    SCALE_IN = "ScaleIn"
    """Fewer instances are wanted, or the pool was removed."""
    SUPERSEDED = "Superseded"
    """Instances of a newer revision take its place."""
    NODE_DRAIN = "NodeDrain"
    """The node is cordoned or will be removed; a replacement serves elsewhere before the instance leaves."""
    NODE_SHUTDOWN = "NodeShutdown"
    """The kubelet ends the pod: its node shuts down, or is short of a resource."""
    DRAIN_REQUESTED = "DrainRequested"
    """The annotation `serving.sluice.dev/drain-requested` asks for it; remove it to call the drain off."""
    DRAIN_CANCELLED = "DrainCancelled"
    """A drain was called off while it ran; the instance is routed again."""
    EXTERNAL_DELETE = "ExternalDelete"
    """Somebody else deleted or evicted the pod."""
    CREATED = "Created"
    """An instance's pod was created."""
    INSTANCE_SERVING = "InstanceServing"
    """An instance serves for the first time; the message has how long each part of its start took."""
    NODE_AVOIDED = "NodeAvoided"
    """Several instances failed on a node: new ones stay away from it until a time that status shows."""
    DRAINED = "Drained"
    """An instance left with no request in flight."""
    REQUESTS_CUT = "RequestsCut"
    """An instance ended with requests in flight: at the drain deadline, or because its engine hangs."""


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
