"""Models of `status`: what the operator reports, bounded so that any service stays far below 16 KiB.

The planner fills plain dictionaries of this shape; the API server checks them against the CRD made from here.
"""

from enum import StrEnum

from pydantic import Field

from sluice.api.base import ApiModel
from sluice.api.markers import atomic, list_map

MAX_PROBLEMS = 16
"""Entries of `status.problems`; the rest is only counted."""


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
    last_handled_reconcile_at: str | None = Field(None, max_length=256)
    """Value of the annotation `serving.sluice.dev/reconcile-at` that the operator last acted on."""
