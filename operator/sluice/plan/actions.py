"""What a plan asks for: frozen, ordered, each idempotent; `runtime.executor` carries them out.

Order inside a plan is safety first: workers leave routers and gates close before anything is deleted, prerequisites
come before pods. An action carries all it needs; nothing is looked up while it runs. `scope` ties actions
together: when one is refused (403, 422, quota, name conflict), the rest of the same scope is skipped and other
scopes go on (S010, D20).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sluice.api.router import WorkerList


@dataclass(frozen=True, slots=True)
class ObjectRef:
    kind: str
    namespace: str
    name: str
    uid: str = ""
    """Precondition; "" only for objects that do not exist yet."""


@dataclass(frozen=True, slots=True)
class PutWorkers:
    """Send the whole wanted list to one router pod's sidecar.

    A failure, also a transient one, stops only this action (its scope is that router): a router that can't be
    reached must not keep a lost instance from being replaced. Nothing is deleted on the strength of a PUT: the plan
    waits until the routers' own words say that they let go.
    """

    router: ObjectRef
    ip: str
    workers: WorkerList
    scope: str


@dataclass(frozen=True, slots=True)
class SetGate:
    """Set the readiness gate of an engine pod (strategic merge on `pods/status`)."""

    pod: ObjectRef
    routable: bool
    reason: str
    message: str
    scope: str


@dataclass(frozen=True, slots=True)
class Annotate:
    """Merge annotations into a pod of ours, guarded by its UID; a null value removes."""

    pod: ObjectRef
    annotations: Mapping[str, str | None]
    scope: str


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of the full desired object (manager `sluice`, forced)."""

    body: Mapping[str, Any]
    scope: str


@dataclass(frozen=True, slots=True)
class Create:
    """POST an immutable object with a deterministic name; AlreadyExists with our owner UID is success."""

    body: Mapping[str, Any]
    scope: str
    instance: str = ""


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete with a UID precondition; absent or another UID is success."""

    target: ObjectRef
    reason: str
    scope: str
    grace_s: int | None = None
    instance: str = ""


Action = PutWorkers | SetGate | Annotate | Apply | Create | Delete


class Outcome(StrEnum):
    DONE = "Done"
    UNCHANGED = "Unchanged"
    REFUSED = "Refused"
    """The API said no for good (403, 422, quota, name conflict): needs a change by a human or other objects."""
    FAILED = "Failed"
    """Transient; ends the pass, the key is retried with back-off."""
    SKIPPED = "Skipped"


@dataclass(frozen=True, slots=True)
class Result:
    action: Action
    outcome: Outcome
    reason: str = ""
    """A `Reason` code when refused or failed."""
    message: str = ""


def target_of(action: Action) -> tuple[str, str, str]:
    """(kind, namespace, name) of the object that the action touches."""
    match action:
        case PutWorkers(router=ref) | SetGate(pod=ref) | Annotate(pod=ref) | Delete(target=ref):
            return ref.kind, ref.namespace, ref.name
        case Apply(body=body) | Create(body=body):
            meta = body["metadata"]
            return body["kind"], meta.get("namespace", ""), meta["name"]
