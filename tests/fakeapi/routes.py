"""URL paths of the Kubernetes API and discovery documents, as data."""

from dataclasses import dataclass

from tests.fakeapi.errors import JsonObject
from tests.fakeapi.resources import Registry, Resource

VERSION = {"major": "1", "minor": "36", "gitVersion": "v1.36.0-fake", "platform": "linux/amd64"}
JWKS = {"keys": [{"use": "sig", "kty": "EC", "kid": "fake", "crv": "P-256", "alg": "ES256", "x": "AA", "y": "AA"}]}


@dataclass(frozen=True, slots=True)
class Route:
    group: str
    version: str
    namespace: str
    plural: str
    name: str
    subresource: str


def parse(path: str) -> Route | None:
    """Parts of `/api/v1/namespaces/<ns>/pods/<name>/status` and its like; None if it is no resource path."""
    parts = path.strip("/").split("/")
    if parts[0] == "api" and len(parts) >= 3:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[0] == "apis" and len(parts) >= 4:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return None
    namespace = ""
    if rest[0] == "namespaces" and len(rest) >= 3 and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    rest += [""] * (3 - len(rest))
    return Route(group, version, namespace, rest[0], rest[1], rest[2])


def discovery(registry: Registry, path: str) -> JsonObject | None:
    """The document at `/api`, `/apis`, `/api/v1`, `/apis/<group>` or `/apis/<group>/<version>`; None elsewhere."""
    parts = path.strip("/").split("/")
    match parts:
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            groups = sorted({(r.group, r.version) for r in registry if r.group})
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(*g) for g in groups]}
        case ["apis", group]:
            found = next((r for r in registry if r.group == group), None)
            return {"kind": "APIGroup", "apiVersion": "v1", **_group(group, found.version)} if found else None
        case ["api", "v1"]:
            return _resource_list("v1", [r for r in registry if not r.group])
        case ["apis", group, version]:
            served = [r for r in registry if (r.group, r.version) == (group, version)]
            return _resource_list(f"{group}/{version}", served) if served else None
    return None


def _group(group: str, version: str) -> JsonObject:
    entry = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [entry], "preferredVersion": entry}


def _resource_list(group_version: str, served: list[Resource]) -> JsonObject:
    entries: list[JsonObject] = []
    for resource in served:
        verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
        if resource.kind == "SelfSubjectAccessReview":
            verbs = ["create"]
        entries.append(
            {
                "name": resource.plural,
                "singularName": resource.kind.lower(),
                "namespaced": resource.namespaced,
                "kind": resource.kind,
                "verbs": verbs,
            }
        )
        for sub in sorted(resource.subresources):
            verbs = ["create"] if sub == "eviction" else ["get", "patch", "update"]
            entries.append(
                {
                    "name": f"{resource.plural}/{sub}",
                    "singularName": "",
                    "namespaced": resource.namespaced,
                    "kind": "Eviction" if sub == "eviction" else resource.kind,
                    "verbs": verbs,
                }
            )
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": entries}
