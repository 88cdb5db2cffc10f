"""The two Services of an InferenceService: the address that users call, and the one by which routers find siblings."""

from typing import Any

from sluice.api import names
from sluice.plan.metadata import child_metadata, router_selector
from sluice.plan.snapshot import ServiceSnapshot


def service_name(snapshot: ServiceSnapshot) -> str:
    """The object's own name: the one child name without a hash (D8); admission makes sure that it fits (S001)."""
    return snapshot.name


def service_url(snapshot: ServiceSnapshot) -> str:
    """Base address of the OpenAI API inside the cluster."""
    return f"http://{service_name(snapshot)}.{snapshot.namespace}.svc/v1"


def sibling_name(snapshot: ServiceSnapshot) -> str:
    return names.child_name(snapshot.name, snapshot.uid, "routers")


def sibling_host(snapshot: ServiceSnapshot) -> str:
    return f"{sibling_name(snapshot)}.{snapshot.namespace}.svc"


def build_service(snapshot: ServiceSnapshot) -> dict[str, Any]:
    """What users call; leads to ready routers only, never to engines (S106)."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": child_metadata(snapshot, service_name(snapshot), names.COMPONENT_ROUTER),
        "spec": {
            "type": "ClusterIP",
            "selector": router_selector(snapshot),
            "ports": [
                {"name": "http", "port": names.PORT_SERVICE, "targetPort": names.PORT_ROUTER, "protocol": "TCP"},
            ],
        },
    }


def build_sibling_service(snapshot: ServiceSnapshot) -> dict[str, Any]:
    """Headless; not-ready routers too, because a router without a list asks its siblings before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": child_metadata(snapshot, sibling_name(snapshot), names.COMPONENT_ROUTER),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": router_selector(snapshot),
            "ports": [
                {"name": "sidecar", "port": names.PORT_SIDECAR, "targetPort": names.PORT_SIDECAR, "protocol": "TCP"},
            ],
        },
    }
