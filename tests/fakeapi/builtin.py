"""What the API server itself does to built-in objects: defaults, name and label checks, immutable fields.

Only what an operator can notice: defaults make the live object a superset of the desired one, label and name limits
refuse badly derived names, immutable fields refuse what has to be replaced instead.
"""

import re
from typing import Any

from tests.fakeapi.errors import JsonObject, invalid
from tests.fakeapi.resources import Resource

_SUBDOMAIN = re.compile(r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
_DNS_LABEL_1035 = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
_LABEL_VALUE = re.compile(r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$")
_LABEL_KEY = re.compile(r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")
_DEFAULT_TOLERATIONS = [
    {"key": f"node.kubernetes.io/{k}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
    for k in ("not-ready", "unreachable")
]


def check_metadata(resource: Resource, body: JsonObject) -> None:
    """Names and labels as the API server checks them.

    Raises:
        ApiError: 422 with the field path.
    """
    metadata = body["metadata"]
    name = metadata["name"]
    causes = []
    if resource.kind == "Service":
        if len(name) > 63 or not _DNS_LABEL_1035.match(name):
            causes.append(("metadata.name", f'Invalid value: "{name}": must be a DNS-1035 label of at most 63'))
    elif len(name) > 253 or not _SUBDOMAIN.match(name):
        causes.append(("metadata.name", f'Invalid value: "{name}": must be a DNS-1123 subdomain of at most 253'))
    labels = dict(metadata.get("labels") or {})
    template = (body.get("spec") or {}).get("template") if resource.group == "apps" else None
    if template:
        labels |= (template.get("metadata") or {}).get("labels") or {}
    for key, value in labels.items():
        if not _LABEL_KEY.match(key):
            causes.append(("metadata.labels", f'Invalid value: "{key}": not a qualified name'))
        if not isinstance(value, str) or len(value) > 63 or not _LABEL_VALUE.match(value):
            causes.append(("metadata.labels", f'Invalid value: "{value}": must be no more than 63 bytes'))
    if causes:
        raise invalid(resource.kind, name, causes)


def with_defaults(resource: Resource, body: JsonObject, old: JsonObject | None, *, serial: int) -> JsonObject:
    """The object with the fields that the server fills in; `serial` makes addresses unique."""
    if resource.kind == "Service" and old is not None and "spec" in body:
        address = old["spec"]["clusterIP"]
        body = {**body, "spec": {"clusterIP": address, **body["spec"]}}
    match resource.kind:
        case "Pod":
            spec = _pod_spec(body.get("spec") or {})
            tolerations = spec.get("tolerations") or []
            missing = [d for d in _DEFAULT_TOLERATIONS if not any(t.get("key") == d["key"] for t in tolerations)]
            status = body.get("status") or {"phase": "Pending", "qosClass": "Burstable"}
            spec = {"serviceAccountName": "default", "priority": 0, **spec, "tolerations": [*tolerations, *missing]}
            return {**body, "spec": spec, "status": status}
        case "Service":
            return {**body, "spec": _service_spec(body.get("spec") or {}, serial)}
        case "Deployment":
            return {**body, "spec": _deployment_spec(body.get("spec") or {}), "status": body.get("status") or {}}
        case "Namespace" if old is None:
            return {**body, "spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"}}
        case "CustomResourceDefinition" if old is None:
            established = [{"type": t, "status": "True"} for t in ("NamesAccepted", "Established")]
            return {**body, "status": {"conditions": established, "acceptedNames": body["spec"]["names"]}}
    return body


def _pod_spec(spec: JsonObject) -> JsonObject:
    filled = {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 30,
        "dnsPolicy": "ClusterFirst",
        "schedulerName": "default-scheduler",
        "securityContext": {},
        "enableServiceLinks": True,
        **spec,
    }
    for group in ("containers", "initContainers"):
        if group in spec:
            filled[group] = [_container(c) for c in spec[group]]
    return filled


def _container(container: JsonObject) -> JsonObject:
    policy = "Always" if container.get("image", "").endswith(":latest") else "IfNotPresent"
    filled = {
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "imagePullPolicy": policy,
        "resources": {},
        **container,
    }
    if "ports" in container:
        filled["ports"] = [{"protocol": "TCP", **port} for port in container["ports"]]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if probe in container:
            defaults = {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3}
            filled[probe] = {**defaults, **container[probe]}
    return filled


def _service_spec(spec: JsonObject, serial: int) -> JsonObject:
    filled = {
        "type": "ClusterIP",
        "sessionAffinity": "None",
        "internalTrafficPolicy": "Cluster",
        "ipFamilies": ["IPv4"],
        "ipFamilyPolicy": "SingleStack",
        **spec,
    }
    if not filled.get("clusterIP"):
        filled["clusterIP"] = f"10.96.{serial // 250 % 250}.{serial % 250 + 1}"
    filled["clusterIPs"] = [filled["clusterIP"]]
    ports = spec.get("ports") or []
    filled["ports"] = [{"protocol": "TCP", "targetPort": port["port"], **port} for port in ports]
    return filled


def _deployment_spec(spec: JsonObject) -> JsonObject:
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "25%", "maxSurge": "25%"}}
    template = spec.get("template") or {}
    return {
        "replicas": 1,
        "revisionHistoryLimit": 10,
        "progressDeadlineSeconds": 600,
        "strategy": rolling,
        **spec,
        "template": {**template, "spec": _pod_spec(template.get("spec") or {})},
    }


def check_immutable(resource: Resource, old: JsonObject, new: JsonObject) -> None:
    """Refuse a change of a field that the server keeps.

    Raises:
        ApiError: 422 naming the field.
    """
    paths: tuple[tuple[str, ...], ...] = {
        "Deployment": (("spec", "selector"),),
        "ReplicaSet": (("spec", "selector"),),
        "Service": (("spec", "clusterIP"),),
        "ControllerRevision": (("data",),),
    }.get(resource.kind, ())
    if resource.kind == "Event" and resource.group == "events.k8s.io":
        paths = (("note",), ("reason",), ("regarding",))
    changed = [".".join(path) for path in paths if _at(old, path) != _at(new, path)]
    if resource.kind == "Pod" and _fixed_pod_spec(old) != _fixed_pod_spec(new):
        changed.append("spec")
    if changed:
        name = new["metadata"]["name"]
        raise invalid(resource.kind, name, [(path, "Forbidden: field is immutable") for path in changed])


def _at(obj: JsonObject, path: tuple[str, ...]) -> Any:
    here: Any = obj
    for step in path:
        here = (here or {}).get(step)
    return here


def _fixed_pod_spec(pod: JsonObject) -> JsonObject:
    """A pod's spec without what may change: images, scheduling gates, tolerations, the node (by binding)."""
    spec = {k: v for k, v in pod["spec"].items() if k not in ("schedulingGates", "tolerations", "nodeName")}
    for group in ("containers", "initContainers"):
        if group in spec:
            spec[group] = [{k: v for k, v in c.items() if k != "image"} for c in spec[group]]
    return spec
