"""What the contract suite needs from a backend, and its two backends' common part.

The suite's test functions stand in `test_contract_*.py` here, where the fixture `contract` is the fake; `tests/api`
imports the same functions, and there `contract` is a real API server with its controllers. A difference is a bug of
the fake.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from sluice.api import names
from sluice.runtime.kinds import Kind
from sluice.runtime.kube import Client

Object = dict[str, Any]

NAMESPACE = Kind("Namespace", "", "v1", "namespaces", namespaced=False)
DEADLINE_S = 90.0
"""Generous for a real garbage collector, which learns of new kinds once in 30 seconds."""
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Contract:
    """A client on some API server, and a namespace of the test's own."""

    client: Client
    namespace: str
    is_real: bool

    async def raw(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content_type: str = "application/json",
        query: tuple[tuple[str, str], ...] = (),
    ) -> tuple[int, Object]:
        """Any request, past our client's verbs: other field managers, other patch types. (HTTP status, answer)."""
        verb, url, headers, _, _ = await self.client.api.param_serialize(
            method,
            path,
            query_params=list(query),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            auth_settings=["BearerToken"],
        )
        response = await self.client.api.call_api(verb, url, header_params=headers, body=body)
        answer: Object = json.loads(await response.read())  # type: ignore[no-untyped-call]  # kubernetes.aio is untyped
        return response.status, answer

    async def until(self, what: str, probe: Callable[[], Awaitable[bool]], deadline_s: float = DEADLINE_S) -> None:
        """Poll until the probe holds. Raises: AssertionError naming `what` at the deadline."""
        end = time.monotonic() + deadline_s
        while not await probe():
            assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
            await asyncio.sleep(POLL_S)


def a_config_map(name: str, namespace: str, *, data: dict[str, str] | None = None, **metadata: Any) -> Object:
    meta = {"name": name, "namespace": namespace, **metadata}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data or {"key": "value"}}


def a_pod(name: str, namespace: str, *, node: str = "", **metadata: Any) -> Object:
    """A pod with our label; with a node it counts as running there, so that it is deleted with grace."""
    labels = {names.LABEL_MANAGED_BY: names.MANAGED_BY, names.LABEL_SERVICE_UID: "u", "app": name} | metadata.pop(
        "labels", {}
    )
    spec: Object = {"containers": [{"name": "engine", "image": "engine:1"}], "readinessGates": []}
    spec["readinessGates"] = [{"conditionType": names.READINESS_GATE}]
    if node:
        spec["nodeName"] = node
    meta = {"name": name, "namespace": namespace, "labels": labels, **metadata}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def a_service(name: str, namespace: str, *, replicas: int = 1, spec: Object | None = None, **metadata: Any) -> Object:
    """An InferenceService with the simulated engine and one router."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.SERVICE_KIND,
        "metadata": {"name": name, "namespace": namespace, **metadata},
        "spec": {
            "model": {"uri": "hf://example/model"},
            "engine": {"type": "Simulated"},
            "pools": [{"name": "default", "replicas": replicas}],
            "routing": {"replicas": 1},
            **(spec or {}),
        },
    }


def owner_of(service: Object) -> Object:
    """The owner reference that makes an object a child of the service."""
    meta = service["metadata"]
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.SERVICE_KIND,
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
