"""Nodes without a kubelet, so that the real scheduler has somewhere to bind pods to.

They are static: Ready, huge, without taints. No Lease is renewed (that would be noise in an audit of writes), so they
need a node controller with a grace period longer than the bed's life (``ApiOnly``), or it would call them NotReady.
Playing the pods that land there is the tests' business.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from e2e.bed.api import Api, Object

LABEL = "bed.sluice.dev/fake"


def fake_node(index: int, *, gpus: int = 0, labels: Mapping[str, str] | None = None) -> Object:
    """A Ready Node ``fake-<index>`` with room for thousands of pods and ``gpus`` of nvidia.com/gpu."""
    name = f"fake-{index}"
    room = {"cpu": "4000", "memory": "8Ti", "ephemeral-storage": "16Ti", "pods": "10000"}
    if gpus:
        room["nvidia.com/gpu"] = str(gpus)
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "FakeNode",
        "message": "played by the test bed",
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
    }
    status: dict[str, Any] = {
        "capacity": room,
        "allocatable": room,
        "conditions": [ready],
        "addresses": [{"type": "Hostname", "address": name}],
        "nodeInfo": {
            "machineID": "",
            "systemUUID": "",
            "bootID": "",
            "kernelVersion": "fake",
            "osImage": "fake",
            "containerRuntimeVersion": "fake://1",
            "kubeletVersion": "v1.36.3",
            "kubeProxyVersion": "",
            "operatingSystem": "linux",
            "architecture": "amd64",
        },
    }
    all_labels = {
        LABEL: "true",
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        **(labels or {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": all_labels},
        "status": status,
    }


def is_schedulable(api: Api, name: str) -> bool:
    """Whether the node controller has taken the not-ready taint off (admission puts it on every new node)."""
    status, node = api.request("GET", f"/api/v1/nodes/{name}")
    return status == 200 and not node["spec"].get("taints")
