"""What every child of a service carries: owner, labels, and the digest by which a later pass knows its own work.

Nothing is copied from the user's object: labels of GitOps tools on a pod would make them prune it (argo-cd#8683).
"""

import json
from collections.abc import Mapping
from typing import Any

from sluice.api import names
from sluice.plan.snapshot import ServiceSnapshot


def owner_reference(snapshot: ServiceSnapshot) -> dict[str, Any]:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.SERVICE_KIND,
        "name": snapshot.name,
        "uid": snapshot.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def child_labels(snapshot: ServiceSnapshot, component: str) -> dict[str, str]:
    return {
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
        names.LABEL_NAME: names.label_value(snapshot.name),
        names.LABEL_COMPONENT: component,
        names.LABEL_SERVICE: names.label_value(snapshot.name),
        names.LABEL_SERVICE_UID: snapshot.uid,
    }


def child_metadata(
    snapshot: ServiceSnapshot, name: str, component: str, labels: Mapping[str, str] | None = None
) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": snapshot.namespace,
        "labels": {**child_labels(snapshot, component), **(labels or {})},
        "ownerReferences": [owner_reference(snapshot)],
    }


def router_selector(snapshot: ServiceSnapshot) -> dict[str, str]:
    """By UID, so that services of similar names never share pods (S002)."""
    return {names.LABEL_SERVICE_UID: snapshot.uid, names.LABEL_COMPONENT: names.COMPONENT_ROUTER}


def engine_selector(snapshot: ServiceSnapshot) -> dict[str, str]:
    return {names.LABEL_SERVICE_UID: snapshot.uid, names.LABEL_COMPONENT: names.COMPONENT_ENGINE}


def spec_digest(body: Any) -> str:
    """Digest of something rendered; equal content gives equal digests whatever the order of keys."""
    return names.short_hash(json.dumps(body, sort_keys=True, separators=(",", ":")), length=16)


def stamped(body: dict[str, Any], digest: str | None = None) -> dict[str, Any]:
    """The body with the digest of itself (or the given one) as annotation."""
    annotations = {
        **body["metadata"].get("annotations", {}),
        names.ANNOTATION_SPEC_HASH: digest or spec_digest(body),
    }
    return {**body, "metadata": {**body["metadata"], "annotations": annotations}}
