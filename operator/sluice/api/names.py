"""Fixed names and the one function that derives every other name.

Everything that two processes must agree on by spelling stands here: labels, annotations, ports, owners.
Invariants: a derived name is a pure function of its inputs, never longer than `MAX_CHILD_NAME`, a valid
DNS-1035 label (so it fits Services, pod host names and label values alike), and carries a hash over the
owner's UID, so that two owners never meet in one name (S001, S002).
"""

import hashlib
import re
from typing import Final

GROUP: Final = "serving.sluice.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
SERVICE_KIND: Final = "InferenceService"
SERVICE_PLURAL: Final = "inferenceservices"
PROFILE_KIND: Final = "AcceleratorProfile"
PROFILE_PLURAL: Final = "acceleratorprofiles"

FIELD_MANAGER: Final = "sluice"
MANAGED_BY: Final = "sluice"
SYSTEM_NAMESPACE: Final = "sluice-system"
OPERATOR_LEASE: Final = "sluice-operator"
OPERATOR_SERVICE_ACCOUNT: Final = "sluice-operator"
ROUTER_TOKEN_AUDIENCE: Final = "sluice-router"

# Labels on our objects.
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
"""`sluice` on everything that the operator makes; it lists and watches only that."""
LABEL_NAME: Final = "app.kubernetes.io/name"
"""Name of the InferenceService; `sluice` on the operator's own objects."""
LABEL_COMPONENT: Final = "app.kubernetes.io/component"
"""`engine`, `router` or `operator`."""
LABEL_SERVICE: Final = f"{GROUP}/service"
"""Name of the InferenceService; a name over 63 characters is cut and carries a hash."""
LABEL_SERVICE_UID: Final = f"{GROUP}/service-uid"
"""UID of the InferenceService; what all selectors use."""
LABEL_POOL: Final = f"{GROUP}/pool"
"""Name of the pool."""
LABEL_ROLE: Final = f"{GROUP}/role"
"""Role of the pool."""
LABEL_REVISION: Final = f"{GROUP}/revision"
"""Revision that the instance was built from; also on its ControllerRevision."""
LABEL_EPOCH: Final = f"{GROUP}/epoch"
"""Build number: higher than that of any earlier instance of the pool."""
LABEL_INSTANCE: Final = f"{GROUP}/instance"
"""Name of the instance, which is the name of its pod."""
LABEL_INDEX: Final = f"{GROUP}/index"
"""Place of the instance in its pool, from 0; the smallest free one is taken."""
LABEL_RANK: Final = f"{GROUP}/rank"
"""Number of the pod in its instance; always 0, as an instance is one pod."""

COMPONENT_ENGINE: Final = "engine"
COMPONENT_ROUTER: Final = "router"
COMPONENT_OPERATOR: Final = "operator"

# Annotations on our pods; the first two say where a drain stands, so that a restarted operator goes on there.
ANNOTATION_DRAIN_STARTED_AT: Final = f"{GROUP}/drain-started-at"
"""On an engine pod: when its drain began."""
ANNOTATION_DRAIN_REASON: Final = f"{GROUP}/drain-reason"
"""On an engine pod: why it is drained, as a reason code."""
ANNOTATION_DRAIN_IN_FLIGHT: Final = f"{GROUP}/drain-in-flight"
"""On an engine pod: requests in it when it began to leave, as the engine counted them; absent if unknown."""
ANNOTATION_DRAIN_CANCELLED_AT: Final = f"{GROUP}/drain-cancelled-at"
"""On an engine pod: when its drain was called off; for ten minutes it is the last that a scale-in picks."""
ANNOTATION_DRAIN_REQUESTED: Final = f"{GROUP}/drain-requested"
"""Set on an engine pod by a user (`kubectl sluice drain`), to a time or a reason: the instance is replaced, then
drained and deleted. Removed before the pod is deleted, the drain is called off and the instance serves again."""
ANNOTATION_SPEC_HASH: Final = f"{GROUP}/spec-hash"
"""Digest of what the object was rendered from; equal means nothing to apply."""
ANNOTATION_ROUTER_TEMPLATE: Final = f"{GROUP}/router-template"
"""On a router Deployment: the pod template that we rendered for it, as JSON. A hand edit is brought back to this one,
not to what a newer operator would render (which would restart routers)."""
ANNOTATION_SCHEMA_VERSION: Final = f"{GROUP}/schema-version"
"""On our CRDs, by the generator: the operator refuses to work on an older schema than its own."""
ANNOTATION_RECONCILE_AT: Final = f"{GROUP}/reconcile-at"
"""A user may set this on an InferenceService, to any new value, to have it looked at again now; status echoes it."""

ANNOTATION_RETRY_AT: Final = f"{GROUP}/retry-at"
"""A user may set this on an InferenceService, to any new value: what failed is tried again; status echoes it."""
ANNOTATION_AVOIDS: Final = f"{GROUP}/avoids"
"""On an engine pod: nodes that it was built to stay away from, separated by commas."""

READINESS_GATE: Final = f"{GROUP}/routable"
"""Condition of an engine pod, set by the operator: every router lists the instance."""

# Containers of an engine pod and of a router pod.
CONTAINER_ENGINE: Final = "engine"
CONTAINER_AGENT: Final = "agent"
CONTAINER_ROUTER: Final = "smg"
CONTAINER_SIDECAR: Final = "sidecar"

# Ports.
PORT_OPERATOR: Final = 8080
"""Operator: `/healthz`, `/readyz`, `/metrics`."""
PORT_AGENT: Final = 9900
"""Agent in an engine pod: `/state`, the engine's probes, `/drain` (preStop), `/metrics`."""
PORT_ROUTER: Final = 30000
"""Router pod: OpenAI API; where the Service leads to."""
PORT_ROUTER_HEALTH: Final = 30001
"""Router pod: smg's own probes."""
PORT_ROUTER_METRICS: Final = 29000
"""Router pod: smg's `/metrics`."""
PORT_SIDECAR: Final = 9910
"""Sidecar in a router pod: `/workers`, `/ready`, `/healthz`, `/metrics`."""
PORT_SERVICE: Final = 80
"""Service of an InferenceService: OpenAI API."""
PORT_SIM_FAULTS: Final = 9876
"""Simulated engine: fault switches and request ledger, without authentication."""

MAX_CHILD_NAME: Final = 52
"""Characters. 63 is the limit of a label value and of a Service name; 11 are left to what Kubernetes adds
to a Deployment's name for its pods' `pod-template-hash` names and for suffixes of third parties."""

_HASH_CHARS: Final = 8
_NOT_DNS = re.compile(r"[^a-z0-9-]+")


def short_hash(*parts: str, length: int = _HASH_CHARS) -> str:
    """Lower-case hexadecimal digest of the parts; the separator can't occur in any Kubernetes name."""
    return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()[:length]


def child_name(service: str, uid: str, *parts: str) -> str:
    """Name of a child of the service: `<service, cut>-<parts>-<hash>`.

    The hash covers the owner's UID, the whole service name and all parts: cutting never makes two names equal.
    The parts are kept readable (they are ours and short); the service name gives way.

    Raises:
        ValueError: the parts alone leave no room for one character of the service name.
    """
    tail = "-".join([*parts, short_hash(uid, service, *parts)])
    room = MAX_CHILD_NAME - len(tail) - 1
    if room < 1:
        raise ValueError(
            f"child name parts {parts!r} are too long: {len(tail)} characters, at most {MAX_CHILD_NAME - 2}"
        )
    head = _NOT_DNS.sub("-", service.lower())[:room].strip("-") or "s"
    if not head[0].isalpha():  # a Service name (DNS-1035) starts with a letter; an object name may not
        head = ("s" + head)[:room].strip("-")
    return f"{head}-{tail}"


def label_value(text: str) -> str:
    """A readable label value of at most 63 characters; equal texts give equal values, cut ones carry a hash."""
    if len(text) <= 63:
        return text
    return f"{text[:54].rstrip('-._')}-{short_hash(text)}"
