"""Scheduler, kubelet and Deployment controller for the fake cluster, as steps that a test orders.

Each function does at most one thing to one object and says whether it did; `settle` repeats them all until nothing
is left. Nothing here decides for the operator: these are the parts of Kubernetes that the operator relies on.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.fakeapi import collector
from tests.fakeapi.cluster import STRATEGIC_PATCH, FakeCluster, Options, owned_by
from tests.fakeapi.disruption import is_ready
from tests.fakeapi.errors import ApiError
from tests.played import pods
from tests.played.world import World

Object = dict[str, Any]

KUBELET = Options(manager="kubelet")
SCHEDULER = Options(manager="scheduler")
CONTROLLER = Options(manager="deployment-controller")
NODE_PODS = 110
"""Pods that a node takes; the kubelet's default."""


@dataclass(eq=False)
class Machinery:
    """The played rest of a fake cluster."""

    cluster: FakeCluster
    world: World
    nodes: tuple[str, ...] = ("node-0", "node-1")
    stopped_nodes: set[str] = field(default_factory=set)
    """Nodes whose kubelet is gone: nothing is reported and nothing is removed there."""

    def __post_init__(self) -> None:
        nodes = self.cluster.resource("", "nodes")
        for name in self.nodes:
            if self.cluster.storage.get(nodes, ("", name)) is None:
                self.cluster.create(nodes, "", {"metadata": {"name": name}}, KUBELET)
                self.report_node(name, ready="True")

    def report_node(self, name: str, *, ready: str) -> None:
        """The node's Ready condition: True, False or Unknown."""
        allocatable = {"pods": str(NODE_PODS), "cpu": "64", "memory": "512Gi"}
        status = {"conditions": [{"type": "Ready", "status": ready}], "allocatable": allocatable}
        nodes = self.cluster.resource("", "nodes")
        self.cluster.patch(
            nodes,
            "",
            name,
            {"status": status},
            patch_type=STRATEGIC_PATCH,
            subresource="status",
            options=KUBELET,
        )

    def cordon(self, name: str, on: bool = True) -> None:
        """`kubectl cordon` and `kubectl uncordon`."""
        nodes = self.cluster.resource("", "nodes")
        self.cluster.patch(nodes, "", name, {"spec": {"unschedulable": on}}, options=Options("user"))

    def cordoned(self) -> set[str]:
        return {n["metadata"]["name"] for n in self.cluster.objects("nodes") if n.get("spec", {}).get("unschedulable")}

    def settle(self, *, limit: int = 10_000) -> None:
        """All steps until none has anything to do.

        Raises:
            RuntimeError: still busy after `limit` rounds (two parts undo each other's work).
        """
        for _ in range(limit):
            if not self.round():
                return
        raise RuntimeError(f"the played cluster did not settle in {limit} rounds")

    def round(self) -> bool:
        """Each step once over everything; True if anything was done."""
        with self.cluster.lock:
            done = [self.step_deployment(d) for d in self.cluster.objects("deployments", "apps")]
            done += [self.step_replica_set(r) for r in self.cluster.objects("replicasets", "apps")]
            done += [self.step_pod(p) for p in self.cluster.objects("pods")]
            done += [collector.collect(self.cluster)]
            self._forget_gone()
            return any(done)

    def _forget_gone(self) -> None:
        alive = {pod["metadata"]["uid"] for pod in self.cluster.objects("pods")}
        for uid in [*self.world.engines, *self.world.routers]:
            if uid not in alive:
                self.world.stop(uid)

    # Pods

    def step_pod(self, pod: Object) -> bool:
        meta = pod["metadata"]
        resource = self.cluster.resource("", "pods")
        if not pod["spec"].get("nodeName"):
            return self._bind(pod)
        if pod["spec"]["nodeName"] in self.stopped_nodes:
            return False
        step = pods.next_step(pod, self.world, self.cluster.clock())
        if step is None:
            return False
        try:
            if step.remove:
                body = {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}}
                self.cluster.delete(resource, meta["namespace"], meta["name"], body, KUBELET)
                self.world.stop(meta["uid"])
            else:
                self.cluster.patch(
                    resource,
                    meta["namespace"],
                    meta["name"],
                    {"status": step.status},
                    patch_type=STRATEGIC_PATCH,
                    subresource="status",
                    options=KUBELET,
                )
        except ApiError as error:
            if error.code not in (404, 409):
                raise
        return True

    def _bind(self, pod: Object) -> bool:
        """To the usable node with the fewest pods; gated pods wait, and so do all while every node is cordoned."""
        if pod["spec"].get("schedulingGates") or "deletionTimestamp" in pod["metadata"]:
            return False
        load = dict.fromkeys((n for n in self.nodes if n not in self.stopped_nodes and n not in self.cordoned()), 0)
        for other in self.cluster.objects("pods"):
            node = other["spec"].get("nodeName")
            if node in load:
                load[node] += 1
        meta = pod["metadata"]
        if not load:
            return self._say_unschedulable(pod)
        target = min(load, key=lambda node: (load[node], node))
        resource = self.cluster.resource("", "pods")
        self.cluster.patch(resource, meta["namespace"], meta["name"], {"spec": {"nodeName": target}}, options=SCHEDULER)
        return True

    def _say_unschedulable(self, pod: Object) -> bool:
        conditions = (pod.get("status") or {}).get("conditions") or []
        if any(c["type"] == "PodScheduled" and c["status"] == "False" for c in conditions):
            return False
        text = f"0/{len(self.nodes)} nodes are available"
        refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}
        self.cluster.patch(
            self.cluster.resource("", "pods"),
            pod["metadata"]["namespace"],
            pod["metadata"]["name"],
            {"status": {"conditions": [refused]}},
            patch_type=STRATEGIC_PATCH,
            subresource="status",
            options=SCHEDULER,
        )
        return True

    # Deployments: one ReplicaSet per template, new ones up at once, old ones down when the new are ready

    def step_deployment(self, deployment: Object) -> bool:
        if "deletionTimestamp" in deployment["metadata"]:
            return False
        meta, spec = deployment["metadata"], deployment["spec"]
        sets = self._owned("replicasets", deployment)
        current = _template_hash(spec["template"])
        new = next((r for r in sets if r["metadata"]["labels"].get("pod-template-hash") == current), None)
        if new is None:
            self._create_replica_set(deployment, current)
            return True
        worked = self._scale(new, spec["replicas"])
        ready = self._ready(new)
        for old in sets:
            if old is not new and ready >= spec["replicas"]:
                worked |= self._scale(old, 0)
        total = [pod for replica_set in sets for pod in self._owned("pods", replica_set)]
        status = {
            "observedGeneration": meta["generation"],
            "replicas": len(total),
            "updatedReplicas": len(self._owned("pods", new)),
            "readyReplicas": sum(is_ready(p) for p in total),
            "availableReplicas": sum(is_ready(p) for p in total),
        }
        if deployment.get("status") != status:
            resource = self.cluster.resource("apps", "deployments")
            body = {**deployment, "status": status}
            self.cluster.update(
                resource, meta["namespace"], meta["name"], body, subresource="status", options=CONTROLLER
            )
            worked = True
        return worked

    def step_replica_set(self, replica_set: Object) -> bool:
        if "deletionTimestamp" in replica_set["metadata"]:
            return False
        owned = [p for p in self._owned("pods", replica_set) if "deletionTimestamp" not in p["metadata"]]
        wanted = replica_set["spec"]["replicas"]
        namespace = replica_set["metadata"]["namespace"]
        resource = self.cluster.resource("", "pods")
        if len(owned) < wanted:
            template = replica_set["spec"]["template"]
            metadata = {
                **template.get("metadata", {}),
                "generateName": f"{replica_set['metadata']['name']}-",
                "ownerReferences": [_owner(replica_set, "apps/v1", "ReplicaSet")],
            }
            metadata["labels"] = {**metadata.get("labels", {}), **replica_set["spec"]["selector"]["matchLabels"]}
            self.cluster.create(resource, namespace, {"metadata": metadata, "spec": template["spec"]}, CONTROLLER)
            return True
        if len(owned) > wanted:
            victim = min(owned, key=lambda p: (is_ready(p), p["metadata"]["name"]))
            self.cluster.delete(resource, namespace, victim["metadata"]["name"], None, CONTROLLER)
            return True
        return False

    def _create_replica_set(self, deployment: Object, template_hash: str) -> None:
        meta, spec = deployment["metadata"], deployment["spec"]
        labels = {**spec["selector"]["matchLabels"], "pod-template-hash": template_hash}
        template = spec["template"]
        body = {
            "metadata": {
                "name": f"{meta['name']}-{template_hash}",
                "labels": labels,
                "ownerReferences": [_owner(deployment, "apps/v1", "Deployment")],
            },
            "spec": {"replicas": 0, "selector": {"matchLabels": labels}, "template": template},
        }
        resource = self.cluster.resource("apps", "replicasets")
        self.cluster.create(resource, meta["namespace"], body, CONTROLLER)

    def _scale(self, replica_set: Object, replicas: int) -> bool:
        if replica_set["spec"]["replicas"] == replicas:
            return False
        meta = replica_set["metadata"]
        resource = self.cluster.resource("apps", "replicasets")
        body = {"spec": {"replicas": replicas}}
        self.cluster.patch(resource, meta["namespace"], meta["name"], body, options=CONTROLLER)
        return True

    def _ready(self, replica_set: Object) -> int:
        return sum(is_ready(pod) for pod in self._owned("pods", replica_set))

    def _owned(self, plural: str, owner: Object) -> list[Object]:
        group = "apps" if plural == "replicasets" else ""
        everything: Iterable[Object] = self.cluster.objects(plural, group, owner["metadata"]["namespace"])
        return [obj for obj in everything if owned_by(obj, [owner["metadata"]["uid"]])]


def _template_hash(template: Object) -> str:
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]


def _owner(obj: Object, api_version: str, kind: str) -> Object:
    meta = obj["metadata"]
    return {
        "apiVersion": api_version,
        "kind": kind,
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
