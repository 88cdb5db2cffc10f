"""The facts a plan is made from, all frozen.

`runtime.store` makes the facts at the door (a pod is 1 KiB here, 31 KiB as the API's dict), `runtime.observer`
adds what agents and routers say. Times are seconds since the epoch unless a name says otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sluice.api.agent import AgentState
from sluice.api.config import OperatorConfig
from sluice.api.router import RouterState


class ContainerPhase(StrEnum):
    WAITING = "Waiting"
    RUNNING = "Running"
    TERMINATED = "Terminated"


@dataclass(frozen=True, slots=True)
class ContainerFacts:
    """State of one container (native sidecars included), from the pod's status."""

    name: str
    container_id: str
    phase: ContainerPhase
    reason: str
    """Of the present state: `ImagePullBackOff`, `CrashLoopBackOff`, `OOMKilled`…"""
    message: str
    exit_code: int | None
    """Of the present state if Terminated, else of the last termination; null if it never ended."""
    last_reason: str
    last_message: str
    ready: bool
    started: bool
    restarts: int
    started_at: float | None = None
    """Start of the present run if Running; null otherwise."""
    ended_at: float | None = None
    """End of the last run that ended (the present state if Terminated); null if none ended."""
    ended_run_started_at: float | None = None
    """Start of that run."""


@dataclass(frozen=True, slots=True)
class PodFacts:
    """An engine or router pod of ours. Index, epoch and revision come from labels; -1 or "" if absent."""

    namespace: str
    name: str
    uid: str
    resource_version: str
    owner_uid: str
    """UID of the controlling owner; the InferenceService for engine pods, a ReplicaSet for router pods."""
    service: str
    """Name of the InferenceService as labelled (possibly cut: compare `service_uid`)."""
    service_uid: str
    component: str
    pool: str
    role: str
    revision: str
    epoch: int
    index: int
    instance: str
    spec_hash: str
    drain_started_at: float | None
    drain_reason: str
    phase: str
    reason: str
    message: str
    node: str
    ip: str
    created_at: float
    scheduled: bool
    scheduling_message: str
    """The scheduler's last word while not scheduled."""
    gate: bool
    """Condition `serving.sluice.dev/routable` is True."""
    ready: bool
    """The pod's Ready condition."""
    disruption_target: str
    """Reason of a true DisruptionTarget condition, else ""."""
    deletion_at: float | None
    """deletionTimestamp; null while nobody deleted the pod."""
    containers: tuple[ContainerFacts, ...]
    deletion_grace_s: float | None = None
    """Grace period that the deletion was given; `deletion_at` is its end. Null while nobody deleted the pod."""
    drain_in_flight: int | None = None
    """Requests when the drain began, from our annotation; null: not noted."""
    drain_requested: str = ""
    """Value of the annotation by which a user asks for a drain; "" without one."""
    drain_cancelled_at: float | None = None

    scheduled_at: float | None = None
    """When the scheduler bound it; null while it is not, or if unknown."""
    unschedulable_since: float | None = None
    """When the scheduler first found no node for it; null once bound."""
    gate_was_set: bool = False
    """The routable condition stands there, True or False: the instance served at some time."""
    not_ready_since: float | None = None
    """When the Ready condition became False, by the kubelet's clock or the node controller's; null if it is not, or if
    unknown."""
    avoids: tuple[str, ...] = ()
    """Nodes that the pod was built to stay away from, from our annotation."""

    def container(self, name: str) -> ContainerFacts | None:
        return next((c for c in self.containers if c.name == name), None)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    name: str
    uid: str
    ready: bool | None
    """Null: the Ready condition is Unknown (the node's kubelet went silent)."""
    unschedulable: bool
    allocatable: Mapping[str, str]
    taints: tuple[str, ...] = ()
    """Keys of the taints that keep new pods away or drive pods out (NoSchedule, NoExecute), sorted."""
    is_being_deleted: bool = False


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """Last word of an agent. `age_s` is how old it is; older than 15 s counts as silent (`plan.health`)."""

    state: AgentState
    age_s: float


@dataclass(frozen=True, slots=True)
class RouterFacts:
    """Last word of a router's sidecar."""

    state: RouterState
    age_s: float


@dataclass(frozen=True, slots=True)
class ServiceSnapshot:
    """Everything one pass may look at; the raw objects are read-only by convention."""

    service: Mapping[str, Any]
    """The InferenceService as the API has it (without managedFields)."""
    pods: tuple[PodFacts, ...]
    """Engine and router pods labelled with this service's UID, oldest first."""
    children: Mapping[tuple[str, str], Mapping[str, Any]]
    """(kind, name) to the live object, for every other child kind and for name conflicts: objects of another owner
    that stand at a name we want are here too."""
    profiles: Mapping[str, Mapping[str, Any]]
    """AcceleratorProfile name to object."""
    nodes: Mapping[str, NodeFacts]
    """Nodes that carry a pod of this service."""
    agents: Mapping[str, AgentFacts]
    """Engine pod UID to its agent's last word; absent: never heard."""
    routers: Mapping[str, RouterFacts]
    """Router pod UID to its sidecar's last word; absent: never heard."""
    config: OperatorConfig
    signing_keys: str
    """The cluster's public ServiceAccount signing keys (JSON Web Key Set) for the routers; "" while unknown."""
    asked_s: Mapping[str, float] = field(default_factory=dict)
    """Engine pod UID to the seconds since its agent is asked; without an entry it can't be asked (no address)."""
    recent_creations: int = 0
    """Pods created for this service in the last minute (circuit breaker)."""
    others_rolling: int = 0
    """Other services with a rollout under way."""
    profiles_known: bool = True
    """False: the AcceleratorProfile kind is not served or not readable, so absence proves nothing."""
    nodes_known: bool = False
    """True: nodes are readable and were listed, so a node that is not in `nodes` does not exist."""

    @property
    def uid(self) -> str:
        return str(self.service["metadata"]["uid"])

    @property
    def name(self) -> str:
        return str(self.service["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.service["metadata"]["namespace"])

    @property
    def generation(self) -> int:
        return int(self.service["metadata"].get("generation", 0))

    @property
    def is_being_deleted(self) -> bool:
        return bool(self.service["metadata"].get("deletionTimestamp"))

    @property
    def status(self) -> Mapping[str, Any]:
        return self.service.get("status") or {}


@dataclass(frozen=True, slots=True)
class Event:
    """One thing worth telling a user; `runtime.events` dedupes by (object, reason, instance, note without numbers)."""

    reason: str
    note: str
    warning: bool = False
    instance: str = ""
    action: str = field(default="Reconcile")
