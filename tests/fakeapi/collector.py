"""Garbage collection as a step: owner references, foreground deletion, orphaning, namespaces.

`collect()` does one round over what is there now and says whether it did anything; a real collector does the same
as fast as it can. Dependents are deleted with a UID precondition, as the real one does.
"""

from tests.fakeapi.cluster import FakeCluster, Options, owned_by
from tests.fakeapi.errors import ApiError, JsonObject
from tests.fakeapi.resources import Resource

GC = Options(manager="garbage-collector")


def collect(cluster: FakeCluster) -> bool:
    """One round. True if something was deleted or released."""
    with cluster.lock:
        everything = [(cluster.resource(*key), obj) for key, obj in cluster.storage.everything()]
        alive = {obj["metadata"]["uid"]: obj for _, obj in everything}
        worked = False
        for resource, obj in everything:
            if obj["metadata"].get("ownerReferences"):
                worked |= _collect_orphan(cluster, resource, obj, alive)
        for resource, obj in everything:
            if "deletionTimestamp" in obj["metadata"]:
                worked |= _finish(cluster, resource, obj, everything)
        return worked


def collect_all(cluster: FakeCluster) -> None:
    """Rounds until nothing is left to do."""
    while collect(cluster):
        pass


def _collect_orphan(cluster: FakeCluster, resource: Resource, obj: JsonObject, alive: dict[str, JsonObject]) -> bool:
    owners = [alive.get(ref["uid"]) for ref in obj["metadata"]["ownerReferences"]]
    if "deletionTimestamp" in obj["metadata"] or any(o is not None for o in owners):
        return False
    return _delete(cluster, resource, obj, "Background")


def _finish(
    cluster: FakeCluster, resource: Resource, obj: JsonObject, everything: list[tuple[Resource, JsonObject]]
) -> bool:
    finalizers = obj["metadata"].get("finalizers") or []
    uid = obj["metadata"]["uid"]
    if "orphan" in finalizers:
        for kind, child in everything:
            if owned_by(child, [uid]):
                kept = [r for r in child["metadata"]["ownerReferences"] if r["uid"] != uid]
                _patch(cluster, kind, child, {"ownerReferences": kept or None})
        return _patch(cluster, resource, obj, {"finalizers": [f for f in finalizers if f != "orphan"] or None})
    if "foregroundDeletion" in finalizers:
        children = [(kind, child) for kind, child in everything if owned_by(child, [uid])]
        living = [(k, c) for k, c in children if cluster.storage.get(k, _key(c)) is not None]
        if not living:
            left = [f for f in finalizers if f != "foregroundDeletion"]
            return _patch(cluster, resource, obj, {"finalizers": left or None})
        pending = [(k, c) for k, c in living if "deletionTimestamp" not in c["metadata"]]
        return sum(_delete(cluster, kind, child, "Foreground") for kind, child in pending) > 0
    if resource.kind == "Namespace":
        return _empty_namespace(cluster, resource, obj, everything)
    return False


def _empty_namespace(
    cluster: FakeCluster, resource: Resource, obj: JsonObject, everything: list[tuple[Resource, JsonObject]]
) -> bool:
    name = obj["metadata"]["name"]
    inside = [(k, c) for k, c in everything if c["metadata"].get("namespace") == name]
    inside = [(k, c) for k, c in inside if cluster.storage.get(k, _key(c)) is not None]
    if not inside:
        return _patch(cluster, resource, obj, {"finalizers": None})
    fresh = [(k, c) for k, c in inside if "deletionTimestamp" not in c["metadata"]]
    return sum(_delete(cluster, kind, child, "Background") for kind, child in fresh) > 0


def _delete(cluster: FakeCluster, resource: Resource, obj: JsonObject, policy: str) -> bool:
    body = {"preconditions": {"uid": obj["metadata"]["uid"]}, "propagationPolicy": policy}
    if policy == "Foreground" and not any(
        owned_by(child, [obj["metadata"]["uid"]]) for _, child in cluster.storage.everything()
    ):
        body["propagationPolicy"] = "Background"
    try:
        cluster.delete(resource, *_key(obj), body, GC)
    except ApiError as error:
        if error.code in (404, 409):
            return False
        raise
    return True


def _patch(cluster: FakeCluster, resource: Resource, obj: JsonObject, metadata: JsonObject) -> bool:
    try:
        cluster.patch(resource, *_key(obj), {"metadata": metadata}, options=GC)
    except ApiError as error:
        if error.code == 404:
            return False
        raise
    return True


def _key(obj: JsonObject) -> tuple[str, str]:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]
