"""Objects as the API server sends them, for the runtime's unit tests."""

import asyncio
from collections.abc import Callable
from typing import Any

from sluice.api import names

Object = dict[str, Any]

NAMESPACE = "t"
KEY = (names.SERVICE_KIND, NAMESPACE, "svc")
SERVICE_UID = "uid-svc"


def an_object(
    kind: str, name: str, *, uid: str = "", version: int = 1, labels: dict[str, str] | None = None, **rest: Any
) -> Object:
    meta = {
        "name": name,
        "namespace": NAMESPACE,
        "uid": uid or f"uid-{name}",
        "resourceVersion": str(version),
        "labels": labels or {},
    }
    return {"apiVersion": "v1", "kind": kind, "metadata": meta, **rest}


def a_service(name: str = "svc", *, uid: str = "", version: int = 1, **rest: Any) -> Object:
    return {**an_object(names.SERVICE_KIND, name, uid=uid, version=version, **rest), "apiVersion": names.API_VERSION}


def owned(obj: Object, owner_uid: str = SERVICE_UID) -> Object:
    """The object as a child of the service with this UID."""
    reference = {
        "apiVersion": names.API_VERSION,
        "kind": names.SERVICE_KIND,
        "name": "svc",
        "uid": owner_uid,
        "controller": True,
    }
    return {**obj, "metadata": {**obj["metadata"], "ownerReferences": [reference]}}


def a_pod(
    name: str, *, version: int = 1, owner_uid: str = SERVICE_UID, node: str = "", uid: str = "", ip: str = ""
) -> Object:
    labels = {
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
        names.LABEL_SERVICE_UID: owner_uid,
        names.LABEL_COMPONENT: names.COMPONENT_ENGINE,
        names.LABEL_INSTANCE: name,
    }
    status = {"phase": "Running", "podIP": ip}
    pod = an_object("Pod", name, uid=uid, version=version, labels=labels, spec={"nodeName": node}, status=status)
    return owned(pod, owner_uid)


def a_config_map(name: str, *, version: int = 1, uid: str = "", owner_uid: str = SERVICE_UID, **data: str) -> Object:
    return owned(an_object("ConfigMap", name, uid=uid, version=version, data=data), owner_uid)


def a_node(name: str, *, version: int = 1, ready: str = "True") -> Object:
    node = an_object("Node", name, version=version, status={"conditions": [{"type": "Ready", "status": ready}]})
    del node["metadata"]["namespace"]
    return node


class FakeClock:
    """A clock that moves only when told; seconds."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


async def until(probe: Callable[[], object], deadline_s: float = 3.0) -> None:
    """Let other tasks run until the probe is true. Raises: TimeoutError at the deadline."""
    async with asyncio.timeout(deadline_s):
        while True:
            if probe():
                return
            await asyncio.sleep(0.001)
