"""NetworkPolicies of a service: engine ports are administration ports and nobody but our own may reach them (S106).

Engines answer the service's routers, and Prometheus, because their metrics are on the same port; agents answer
routers, operator and Prometheus; a router's sidecar takes lists from the operator and its siblings only. Engines load
from a mounted claim, so their way out is DNS.
"""

from collections.abc import Sequence
from typing import Any, Final

from sluice.api import names
from sluice.plan.metadata import child_metadata, engine_selector, router_selector
from sluice.plan.snapshot import ServiceSnapshot

_DNS: Final = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
_PROMETHEUS: Final = {
    "namespaceSelector": {},
    "podSelector": {"matchLabels": {names.LABEL_NAME: "prometheus"}},
}


def engine_policy_name(snapshot: ServiceSnapshot) -> str:
    return names.child_name(snapshot.name, snapshot.uid, "engine")


def router_policy_name(snapshot: ServiceSnapshot) -> str:
    return names.child_name(snapshot.name, snapshot.uid, "router")


def build_engine_policy(snapshot: ServiceSnapshot, engine_ports: Sequence[int]) -> dict[str, Any]:
    """`engine_ports`: of all revisions that instances may be of."""
    router = {"podSelector": {"matchLabels": router_selector(snapshot)}}
    return _policy(
        snapshot,
        engine_policy_name(snapshot),
        engine_selector(snapshot),
        ingress=[
            {"from": [router, _PROMETHEUS], "ports": _tcp(*engine_ports)},
            {"from": [router, _operator(snapshot), _PROMETHEUS], "ports": _tcp(names.PORT_AGENT)},
        ],
        egress=[_DNS],
    )


def build_router_policy(snapshot: ServiceSnapshot, engine_ports: Sequence[int]) -> dict[str, Any]:
    router = {"podSelector": {"matchLabels": router_selector(snapshot)}}
    engine = {"podSelector": {"matchLabels": engine_selector(snapshot)}}
    return _policy(
        snapshot,
        router_policy_name(snapshot),
        router_selector(snapshot),
        ingress=[
            {"ports": _tcp(names.PORT_ROUTER)},
            {"from": [router, _operator(snapshot)], "ports": _tcp(names.PORT_SIDECAR)},
            {"from": [_PROMETHEUS], "ports": _tcp(names.PORT_ROUTER_METRICS, names.PORT_SIDECAR)},
        ],
        egress=[
            {"to": [engine], "ports": _tcp(*engine_ports, names.PORT_AGENT)},
            {"to": [router], "ports": _tcp(names.PORT_SIDECAR)},
            _DNS,
        ],
    )


def _operator(snapshot: ServiceSnapshot) -> dict[str, Any]:
    namespace = {"kubernetes.io/metadata.name": snapshot.config.lease_namespace}
    return {
        "namespaceSelector": {"matchLabels": namespace},
        "podSelector": {"matchLabels": {names.LABEL_COMPONENT: names.COMPONENT_OPERATOR}},
    }


def _tcp(*ports: int) -> list[dict[str, Any]]:
    return [{"port": port, "protocol": "TCP"} for port in ports]


def _policy(
    snapshot: ServiceSnapshot,
    name: str,
    selector: dict[str, str],
    *,
    ingress: list[dict[str, Any]],
    egress: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": child_metadata(snapshot, name, names.COMPONENT_ROUTER),
        "spec": {
            "podSelector": {"matchLabels": selector},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress,
            "egress": egress,
        },
    }
