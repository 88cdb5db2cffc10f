"""The router's Deployment and what it needs: signing keys, disruption budget.

A router pod is smg beside our sidecar, which alone writes smg's worker list. The Deployment is rendered anew only when
what the service declares about routing changed: a new operator's images or wiring must not restart routers under
traffic (S096). What was rendered is therefore kept on the Deployment itself; edits by others are brought back to it.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from sluice.api import names
from sluice.api.router import SidecarConfig
from sluice.api.v1alpha1 import EngineType, InferenceServiceSpec
from sluice.plan.metadata import child_labels, child_metadata, router_selector, spec_digest, stamped
from sluice.plan.pods import OWN_USER, RESTRICTED, http_probe
from sluice.plan.services import sibling_host
from sluice.plan.snapshot import ServiceSnapshot

GRACE_MARGIN_S: Final = 20
"""Seconds beyond the drain: 5 in preStop (endpoints leave first), 5 in which smg still serves after SIGTERM, 10 spare.
The streams of a router outlast those of the engines behind it."""
_KEYS: Final = "jwks.json"


def router_name(snapshot: ServiceSnapshot) -> str:
    return names.child_name(snapshot.name, snapshot.uid, "router")


def keys_name(snapshot: ServiceSnapshot) -> str:
    return names.child_name(snapshot.name, snapshot.uid, "keys")


def build_keys(snapshot: ServiceSnapshot) -> dict[str, Any]:
    """The cluster's public keys: the sidecar checks the operator's token with them, also while the API is away."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": child_metadata(snapshot, keys_name(snapshot), names.COMPONENT_ROUTER),
        "data": {_KEYS: snapshot.signing_keys},
    }


def build_budget(snapshot: ServiceSnapshot) -> dict[str, Any]:
    """Voluntary disruptions take one router at a time; a router that is not ready never holds up a node drain."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": child_metadata(snapshot, router_name(snapshot), names.COMPONENT_ROUTER),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": router_selector(snapshot)},
        },
    }


def build_deployment(
    snapshot: ServiceSnapshot, spec: InferenceServiceSpec, live: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The Deployment; `live` is the present one of ours: the template rendered for it stays while the declaration is
    the same."""
    template = _kept_template(live, spec)
    if template is None or _subject(template) != snapshot.config.operator_subject:
        template = _template(snapshot, spec)
    kept = {names.ANNOTATION_ROUTER_TEMPLATE: json.dumps(template, sort_keys=True, separators=(",", ":"))}
    body = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            **child_metadata(snapshot, router_name(snapshot), names.COMPONENT_ROUTER),
            "annotations": kept,
        },
        "spec": {
            "replicas": spec.routing.replicas,
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": router_selector(snapshot)},
            # Make before break: a new router is ready only once it holds a list and smg answers.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": template,
        },
    }
    return stamped(body, _digest(spec, template))


def _declared(spec: InferenceServiceSpec) -> dict[str, Any]:
    """What decides a router pod; the number of replicas does not."""
    declared = {"policy": str(spec.routing.policy), "drainSeconds": spec.drain.timeout_seconds}
    return declared | ({"backend": "sglang"} if spec.engine.type is EngineType.SGLANG else {})


def _digest(spec: InferenceServiceSpec, template: Mapping[str, Any]) -> str:
    """Of the template too, so that an edited record of it is none of ours."""
    return spec_digest({"declared": _declared(spec), "template": template})


def _kept_template(live: Mapping[str, Any] | None, spec: InferenceServiceSpec) -> dict[str, Any] | None:
    """The template that the live Deployment was rendered with; None if there is none for this declaration."""
    annotations = (live["metadata"].get("annotations") or {}) if live is not None else {}
    try:
        template = json.loads(annotations.get(names.ANNOTATION_ROUTER_TEMPLATE) or "null")
    except (ValueError, RecursionError):
        return None
    if not isinstance(template, dict) or annotations.get(names.ANNOTATION_SPEC_HASH) != _digest(spec, template):
        return None
    return template


def _subject(template: Mapping[str, Any]) -> str:
    """Whose lists the router takes: one that refuses the present operator (it moved) has to be made anew."""
    for container in (template.get("spec") or {}).get("initContainers") or []:
        for variable in container.get("env") or []:
            if variable.get("name") == "SLUICE_ROUTER_CONFIG":
                try:
                    return SidecarConfig.model_validate_json(variable.get("value") or "").operator_subject
                except ValidationError:
                    return ""
    return ""


def _template(snapshot: ServiceSnapshot, spec: InferenceServiceSpec) -> dict[str, Any]:
    selector = router_selector(snapshot)
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector},
    }
    return {
        "metadata": {"labels": child_labels(snapshot, names.COMPONENT_ROUTER)},
        "spec": {
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": spec.drain.timeout_seconds + GRACE_MARGIN_S,
            "securityContext": {"runAsNonRoot": True, "runAsUser": OWN_USER, "runAsGroup": OWN_USER},
            "topologySpreadConstraints": [spread],
            "initContainers": [_sidecar(snapshot)],
            "containers": [_smg(snapshot, spec)],
            "volumes": [
                {"name": "run", "emptyDir": {}},
                {"name": "tmp", "emptyDir": {}},
                {"name": "keys", "configMap": {"name": keys_name(snapshot), "optional": True}},
            ],
        },
    }


def _sidecar(snapshot: ServiceSnapshot) -> dict[str, Any]:
    config = SidecarConfig(
        service=f"{snapshot.namespace}/{snapshot.name}",
        operator_subject=snapshot.config.operator_subject,
        sibling_host=sibling_host(snapshot),
    ).model_dump_json(by_alias=True, exclude_defaults=True)
    return {
        "name": names.CONTAINER_SIDECAR,
        "image": snapshot.config.images.engine,
        "imagePullPolicy": snapshot.config.images.pull_policy,
        "restartPolicy": "Always",
        "command": ["sluice-router-sidecar"],
        "env": [
            {"name": "SLUICE_ROUTER_CONFIG", "value": config},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "ports": [{"name": "sidecar", "containerPort": names.PORT_SIDECAR, "protocol": "TCP"}],
        # The whole pod's readiness: a list is held, and smg has a healthy worker (S064).
        "readinessProbe": http_probe("/ready", names.PORT_SIDECAR, period=1, timeout=1, failures=3),
        "livenessProbe": http_probe("/healthz", names.PORT_SIDECAR, period=5, timeout=3, failures=6),
        "resources": {"requests": {"cpu": "50m", "memory": "96Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": {**RESTRICTED, "readOnlyRootFilesystem": True},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "run", "mountPath": "/run/r"},
            {"name": "keys", "mountPath": "/etc/sluice/keys", "readOnly": True},
        ],
    }


def _smg(snapshot: ServiceSnapshot, spec: InferenceServiceSpec) -> dict[str, Any]:
    # On its own port: needs neither load nor workers (S062).
    alive = {"httpGet": {"path": "/liveness", "port": names.PORT_ROUTER_HEALTH}}
    return {
        "name": names.CONTAINER_ROUTER,
        "image": snapshot.config.images.router,
        "imagePullPolicy": snapshot.config.images.pull_policy,
        "args": _smg_args(spec),
        "ports": [
            {"name": "http", "containerPort": names.PORT_ROUTER, "protocol": "TCP"},
            {"name": "health", "containerPort": names.PORT_ROUTER_HEALTH, "protocol": "TCP"},
            {"name": "metrics", "containerPort": names.PORT_ROUTER_METRICS, "protocol": "TCP"},
        ],
        "startupProbe": {**alive, "periodSeconds": 1, "failureThreshold": 120},
        "livenessProbe": {**alive, "periodSeconds": 5, "timeoutSeconds": 3, "failureThreshold": 6},
        "lifecycle": {"preStop": {"sleep": {"seconds": 5}}},
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
        "securityContext": {**RESTRICTED, "readOnlyRootFilesystem": True},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "run", "mountPath": "/run/r"}, {"name": "tmp", "mountPath": "/tmp"}],
    }


def _smg_args(spec: InferenceServiceSpec) -> list[str]:
    args = ["--policy", str(spec.routing.policy), "--drain-seconds", str(spec.drain.timeout_seconds)]
    return [*args, "--backend", "sglang"] if spec.engine.type is EngineType.SGLANG else args
