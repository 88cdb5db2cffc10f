"""Models of `status`: what the operator reports, bounded so that any service stays far below 16 KiB.

The planner fills plain dictionaries of this shape; the API server checks them against the CRD made from here.
"""

from enum import StrEnum

from pydantic import Field

from sluice.api.base import ApiModel
from sluice.api.markers import atomic, list_map

MAX_PROBLEMS = 16
"""Entries of `status.problems`; the rest is only counted."""

MAX_DRAINS = 16
"""Entries of `status.drains`; `pools[].draining` counts them all."""


MAX_FAILURES = 8
"""Entries of `status.lastFailures`."""
MAX_AVOIDED = 16
"""Entries of `status.avoidedNodes`."""
MAX_BACKOFF = 8
"""Entries of `status.pools[].backoff`."""


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ApiModel):
    """One aspect of the object's state, as `metav1.Condition`."""

    type: str = Field(min_length=1, max_length=316)
    """Ready, Reconciling, Stalled, Accepted, WeightsReady, Routed or RolloutComplete."""
    status: ConditionStatus
    """True, False or Unknown."""
    reason: str = Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
    """One word for the cause, the same in Events, logs and metrics."""
    message: str = Field(max_length=1024)
    """What it means for this object, and what to do."""
    observed_generation: int | None = Field(None, ge=0)
    """Generation of the spec that this was said about."""
    last_transition_time: str = Field(max_length=64, json_schema_extra={"format": "date-time"})
    """When `status` last changed."""


class RevisionStatus(ApiModel):
    """Revisions of what was declared; equal when no rollout is under way."""

    current: str = Field("", max_length=63)
    """The revision that served last in full."""
    target: str = Field("", max_length=63)
    """The revision of the present spec."""


class RolloutStatus(ApiModel):
    """A rollout that is not complete: what decides whether it still moves."""

    revision: str = Field("", max_length=63)
    """The revision that is rolled out."""
    attempt: str = Field("", max_length=16)
    """Digest of the spec without replicas and of the annotation `retry-at`; another one is a new try."""
    progress_at: str = Field("", max_length=64)
    """When it last moved on: an instance more serves on the revision, or one of an older revision is gone."""
    serving: int = Field(0, ge=0, le=100000)
    """Most instances that served on the revision at one time."""
    older: int = Field(0, ge=0, le=100000)
    """Fewest instances of other revisions that were left."""
    failed: str = Field("", max_length=64)
    """Why it failed, as a reason code; empty while it goes on."""
    message: str = Field("", max_length=512)
    """What happened."""


class SlotBackoff(ApiModel):
    """A place in a pool whose instances failed one after the other: the next one waits."""

    index: int = Field(0, ge=0, le=100000)
    """Of the instance in its pool."""
    revision: str = Field("", max_length=63)
    """Revision of those instances."""
    epoch: int = Field(0, ge=0)
    """Build number of the last one that failed."""
    failures: int = Field(0, ge=0, le=100000)
    """Instances that failed in a row."""
    reason: str = Field("", max_length=64)
    """Why the last one failed."""
    retry_at: str = Field("", max_length=64)
    """From when the next one may be created."""


class PoolStatus(ApiModel):
    """Instances of one pool, counted from what is observed."""

    name: str = Field(min_length=1, max_length=20)
    """Of the pool."""
    role: str = Field("", max_length=16)
    """Of its instances."""
    desired: int = Field(0, ge=0, le=100000)
    """Instances that should serve."""
    current: int = Field(0, ge=0, le=100000)
    """Instances that exist and do not leave."""
    serving: int = Field(0, ge=0, le=100000)
    """Instances that answered a real inference and that every router lists."""
    updated: int = Field(0, ge=0, le=100000)
    """Instances of the target revision."""
    draining: int = Field(0, ge=0, le=100000)
    """Instances that leave and finish their requests."""
    unhealthy: int = Field(0, ge=0, le=100000)
    """Instances that failed, hang, or are suspect."""
    epoch: int = Field(0, ge=0)
    """Highest build number that an instance of this pool ever had; new instances get a higher one."""
    revision: RevisionStatus | None = None
    """Revisions of this pool."""
    rollout: RolloutStatus | None = None
    """The rollout under way, or the one that failed."""
    backoff: list[SlotBackoff] = Field([], max_length=MAX_BACKOFF, json_schema_extra=atomic())
    """Places whose instances failed, the last failure first, at most 8."""


class Problem(ApiModel):
    """An instance that does not serve as it should."""

    name: str = Field(max_length=63)
    """Of the instance, which is the name of its pod."""
    phase: str = Field(max_length=32)
    """Pending, Loading, Verifying, Suspect, Hung, Failed or Draining."""
    reason: str = Field(max_length=64)
    """One word for the cause, the same as in Events, logs and metrics."""
    message: str = Field("", max_length=1024)
    """What happened, and what to do."""
    node: str = Field("", max_length=253)
    """Where the pod runs; empty while it has no node."""
    since: str = Field("", max_length=64)
    """When this began, as an RFC 3339 time."""


class DrainStatus(ApiModel):
    """An instance that leaves and finishes its requests; the numbers are those of the moment `elapsedSeconds`."""

    instance: str = Field(max_length=63)
    """Name of the instance, which is the name of its pod."""
    reason: str = Field(max_length=64)
    """Why it leaves, the same word as in Events."""
    in_flight: int | None = Field(None, ge=0)
    """Requests in the engine, as it counts them; absent: unknown."""
    of: int | None = Field(None, ge=0)
    """Requests in the engine when the drain began; absent: unknown."""
    elapsed_seconds: int | None = Field(None, ge=0)
    """Seconds since the drain began, rounded down to tens; absent: unknown."""
    timeout_seconds: int = Field(0, ge=0)
    """Seconds after which the requests that are left are cut."""


class Failure(ApiModel):
    """How an instance failed, kept after its pod is gone."""

    instance: str = Field(max_length=63)
    """Name of the instance, which was the name of its pod."""
    node: str = Field("", max_length=253)
    """Where it ran; empty if it had no node."""
    revision: str = Field("", max_length=63)
    """Its revision."""
    reason: str = Field(max_length=64)
    """CrashLoop, OutOfMemory, StartupTimeout, SelfTestFailed, AdmissionFailed or PodFailed."""
    exit_code: int | None = Field(None, ge=-2147483648, le=2147483647)
    """Of the engine's container; absent if it never ended."""
    message: str = Field("", max_length=2048)
    """End of the engine's log or termination message, or the kubelet's words; older entries are cut shorter."""
    at: str = Field("", max_length=64)
    """When."""
    replaced: bool = False
    """True: the instance was given up; false: the kubelet restarted it in place."""


class AvoidedNode(ApiModel):
    """A node on which several instances failed; new ones are kept away from it."""

    node: str = Field(min_length=1, max_length=253)
    """Name of the node."""
    until: str = Field(max_length=64)
    """When it is used again; a time in the past means that it is."""
    reason: str = Field("", max_length=256)
    """What failed there, or why it is used again early."""


class Summary(ApiModel):
    """Short texts for `kubectl get`."""

    model: str = Field("", max_length=128)
    """Served model name."""
    serving: str = Field("", max_length=128)
    """Serving/desired instances of each pool, for example `2/2`."""


class InferenceServiceStatus(ApiModel):
    """What the operator last saw; rebuilt from facts in every pass."""

    observed_generation: int = Field(-1, ge=-1)
    """Generation of the spec that this status is about; -1 until the operator saw the object."""
    conditions: list[Condition] = Field([], max_length=16, json_schema_extra=list_map("type"))
    """Ready, Reconciling, Stalled, Accepted, WeightsReady, Routed, RolloutComplete."""
    url: str | None = Field(None, max_length=512)
    """Base address of the OpenAI API inside the cluster."""
    revision: RevisionStatus | None = None
    """Revisions of the service: one digest over all its pools."""
    pools: list[PoolStatus] = Field([], max_length=16, json_schema_extra=list_map("name"))
    """Counts per pool; a removed pool stays until its last instance is gone."""
    summary: Summary | None = None
    """Short texts for `kubectl get`."""
    problems: list[Problem] = Field([], max_length=MAX_PROBLEMS, json_schema_extra=atomic())
    """Instances that do not serve as they should, worst first, at most 16."""
    drains: list[DrainStatus] = Field([], max_length=MAX_DRAINS, json_schema_extra=atomic())
    """Instances that leave and finish their requests, the longest under way first, at most 16."""
    last_failures: list[Failure] = Field([], max_length=MAX_FAILURES, json_schema_extra=atomic())
    """How instances failed, the last first, at most 8; stays after their pods are gone."""
    avoided_nodes: list[AvoidedNode] = Field([], max_length=MAX_AVOIDED, json_schema_extra=list_map("node"))
    """Nodes that new instances are kept away from, at most 16."""
    drift: int | None = Field(None, ge=0)
    """Instances whose images or default arguments are not those of the operator's present configuration."""
    last_handled_retry_at: str | None = Field(None, max_length=256)
    """Value of the annotation `serving.sluice.dev/retry-at` that the operator last acted on."""
    last_handled_reconcile_at: str | None = Field(None, max_length=256)
    """Value of the annotation `serving.sluice.dev/reconcile-at` that the operator last acted on."""
