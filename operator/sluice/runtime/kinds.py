"""The table of API kinds the operator touches: where each lives and how much of it we watch.

One row per kind. A new kind is a row here (plus RBAC in the chart); client, store, kopf adapter and healing take
their lists from this table.
"""

from dataclasses import dataclass
from typing import Final

from sluice.api import names

OURS: Final = names.LABEL_SERVICE_UID
"""Label selector of the objects we made (all carry this label); applied by the API server, so foreign objects never
cost memory. Not `app.kubernetes.io/managed-by`: Helm, policy engines and people change that one, and an object that
leaves the selector is lost to us while it lives on."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One resource of the API."""

    name: str
    """The kind as in `kind:` of a manifest."""
    group: str
    """API group; "" for the core group."""
    version: str
    plural: str
    namespaced: bool = True
    selector: str = ""
    """Label selector of what we list and watch; "": all objects."""
    optional: bool = False
    """True: a cluster that does not serve it, or does not let us read it, degrades a condition, not the start."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """Name for messages and metrics, as RBAC rules spell it: `pods`, `deployments.apps`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """URL path of a collection, object or subresource; an empty namespace means all namespaces."""
        parts = ["/apis", self.group, self.version] if self.group else ["/api", self.version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name:
            parts.append(name)
        if subresource:
            parts.append(subresource)
        return "/".join(parts)


INFERENCE_SERVICE: Final = Kind(names.SERVICE_KIND, names.GROUP, names.VERSION, names.SERVICE_PLURAL)
ACCELERATOR_PROFILE: Final = Kind(
    names.PROFILE_KIND, names.GROUP, names.VERSION, names.PROFILE_PLURAL, namespaced=False, optional=True
)
POD: Final = Kind("Pod", "", "v1", "pods", selector=OURS)
SERVICE: Final = Kind("Service", "", "v1", "services", selector=OURS)
CONFIG_MAP: Final = Kind("ConfigMap", "", "v1", "configmaps", selector=OURS)
DEPLOYMENT: Final = Kind("Deployment", "apps", "v1", "deployments", selector=OURS)
CONTROLLER_REVISION: Final = Kind("ControllerRevision", "apps", "v1", "controllerrevisions", selector=OURS)
POD_DISRUPTION_BUDGET: Final = Kind("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets", selector=OURS)
NETWORK_POLICY: Final = Kind("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies", selector=OURS)
NODE: Final = Kind("Node", "", "v1", "nodes", namespaced=False, optional=True)

LEASE: Final = Kind("Lease", "coordination.k8s.io", "v1", "leases")
EVENT: Final = Kind("Event", "events.k8s.io", "v1", "events")
ACCESS_REVIEW: Final = Kind(
    "SelfSubjectAccessReview", "authorization.k8s.io", "v1", "selfsubjectaccessreviews", namespaced=False
)
CRD: Final = Kind(
    "CustomResourceDefinition", "apiextensions.k8s.io", "v1", "customresourcedefinitions", namespaced=False
)

WATCHED: Final = (
    INFERENCE_SERVICE,
    ACCELERATOR_PROFILE,
    POD,
    SERVICE,
    CONFIG_MAP,
    DEPLOYMENT,
    CONTROLLER_REVISION,
    POD_DISRUPTION_BUDGET,
    NETWORK_POLICY,
    NODE,
)
"""What the store holds, in the order in which it is first listed."""

BY_NAME: Final = {kind.name: kind for kind in (*WATCHED, LEASE, EVENT, ACCESS_REVIEW, CRD)}
