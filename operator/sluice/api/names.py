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
LABEL_NAME: Final = "app.kubernetes.io/name"
LABEL_COMPONENT: Final = "app.kubernetes.io/component"
LABEL_SERVICE: Final = f"{GROUP}/service"
LABEL_SERVICE_UID: Final = f"{GROUP}/service-uid"
LABEL_POOL: Final = f"{GROUP}/pool"
LABEL_ROLE: Final = f"{GROUP}/role"
LABEL_REVISION: Final = f"{GROUP}/revision"
LABEL_EPOCH: Final = f"{GROUP}/epoch"
LABEL_INSTANCE: Final = f"{GROUP}/instance"
LABEL_INDEX: Final = f"{GROUP}/index"
LABEL_RANK: Final = f"{GROUP}/rank"

COMPONENT_ENGINE: Final = "engine"
COMPONENT_ROUTER: Final = "router"
COMPONENT_OPERATOR: Final = "operator"

# Annotations on our pods; the first two say where a drain stands, so that a restarted operator goes on there.
ANNOTATION_DRAIN_STARTED_AT: Final = f"{GROUP}/drain-started-at"
ANNOTATION_DRAIN_REASON: Final = f"{GROUP}/drain-reason"
ANNOTATION_SPEC_HASH: Final = f"{GROUP}/spec-hash"
# Set by an administrator on a CRD by our generator: the operator refuses to run on an older schema.
ANNOTATION_SCHEMA_VERSION: Final = f"{GROUP}/schema-version"
# A user may set these on an InferenceService; they are echoed in status.
ANNOTATION_RECONCILE_AT: Final = f"{GROUP}/reconcile-at"

READINESS_GATE: Final = f"{GROUP}/routable"

# Containers of an engine pod and of a router pod.
CONTAINER_ENGINE: Final = "engine"
CONTAINER_AGENT: Final = "agent"
CONTAINER_ROUTER: Final = "smg"
CONTAINER_SIDECAR: Final = "sidecar"

# Ports.
PORT_OPERATOR: Final = 8080
PORT_AGENT: Final = 9900
PORT_ROUTER: Final = 30000
PORT_ROUTER_HEALTH: Final = 30001
PORT_ROUTER_METRICS: Final = 29000
PORT_SIDECAR: Final = 9910
PORT_SERVICE: Final = 80
PORT_SIM_FAULTS: Final = 9876

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
