"""Which kinds the fake API server knows: a registry like the one behind discovery.

Built-in kinds stand in a table; custom ones come from CustomResourceDefinition objects (`Registry.add_crd`), with
their schemas, as on a real server. A kind that is not here is a 404, which is how a client learns of its absence.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.fakeapi.errors import JsonObject


@dataclass(frozen=True, slots=True)
class Resource:
    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    subresources: frozenset[str] = frozenset()
    has_generation: bool = False
    schema: JsonObject | None = field(default=None, compare=False, hash=False)
    """OpenAPI v3 schema of a custom resource; None for built-in kinds (not validated here)."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def key(self) -> tuple[str, str]:
        """Where objects of the resource are stored: one version per resource is enough."""
        return self.group, self.plural

    @property
    def is_custom(self) -> bool:
        return self.schema is not None


_STATUS = frozenset({"status"})
BUILT_IN = (
    Resource("", "v1", "pods", "Pod", True, frozenset({"status", "eviction"}), True),
    Resource("", "v1", "services", "Service", True, _STATUS),
    Resource("", "v1", "configmaps", "ConfigMap"),
    Resource("", "v1", "secrets", "Secret"),
    Resource("", "v1", "serviceaccounts", "ServiceAccount"),
    Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", True, _STATUS),
    Resource("", "v1", "events", "Event"),
    Resource("", "v1", "nodes", "Node", False, _STATUS),
    Resource("", "v1", "namespaces", "Namespace", False, _STATUS),
    Resource("apps", "v1", "deployments", "Deployment", True, _STATUS, True),
    Resource("apps", "v1", "replicasets", "ReplicaSet", True, _STATUS, True),
    Resource("apps", "v1", "controllerrevisions", "ControllerRevision"),
    Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", True, _STATUS, True),
    Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", True, frozenset(), True),
    Resource("coordination.k8s.io", "v1", "leases", "Lease"),
    Resource("events.k8s.io", "v1", "events", "Event"),
    Resource("authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview", False),
    Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", False, _STATUS),
)


class Registry:
    """All resources served now, by (group, plural) and by kind."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, str], Resource] = {r.key: r for r in BUILT_IN}

    def __iter__(self) -> Iterator[Resource]:
        return iter(self._by_key.values())

    def find(self, group: str, plural: str) -> Resource | None:
        return self._by_key.get((group, plural))

    def of_kind(self, api_version: str, kind: str) -> Resource:
        """The resource of an object's apiVersion and kind.

        Raises:
            KeyError: it isn't served.
        """
        for resource in self._by_key.values():
            if resource.kind == kind and resource.api_version == api_version:
                return resource
        raise KeyError(f"{api_version} {kind} is not served by the fake API server")

    def add_crd(self, crd: JsonObject) -> Resource:
        spec = crd["spec"]
        version = next(v for v in spec["versions"] if v.get("served") and v.get("storage"))
        resource = Resource(
            spec["group"],
            version["name"],
            spec["names"]["plural"],
            spec["names"]["kind"],
            spec.get("scope", "Namespaced") == "Namespaced",
            frozenset(version.get("subresources") or ()),
            True,
            version["schema"]["openAPIV3Schema"],
        )
        self._by_key[resource.key] = resource
        return resource

    def remove(self, group: str, plural: str) -> None:
        self._by_key.pop((group, plural), None)
