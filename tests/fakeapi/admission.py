"""What happens to a write between the request and the store: isolation, defaults, validation, deletion rules.

Pure functions over the old and the new object; `FakeCluster` calls them in the order of the API server.
"""

from tests.fakeapi import builtin, errors, schema
from tests.fakeapi.errors import JsonObject
from tests.fakeapi.resources import Resource

SERVER_FIELDS = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation")
_TYPE = ("apiVersion", "kind", "metadata")


def spec_part(obj: JsonObject) -> JsonObject:
    """What `metadata.generation` counts the changes of."""
    return {k: v for k, v in obj.items() if k not in ("metadata", "status")}


def isolate(resource: Resource, old: JsonObject, new: JsonObject, subresource: str) -> JsonObject:
    """Keep what this endpoint can't change: through `/status` all but status, otherwise status and server fields."""
    metadata = dict(new["metadata"]) if subresource != "status" else dict(old["metadata"])
    for key in (*SERVER_FIELDS, "managedFields"):
        metadata.pop(key, None)
    kept = (*SERVER_FIELDS, "resourceVersion", "name", "namespace")
    metadata |= {k: old["metadata"][k] for k in kept if k in old["metadata"]}
    if subresource == "status":
        return {**old, "metadata": metadata, "status": new.get("status") or {}}
    for key in ("labels", "annotations", "finalizers", "ownerReferences"):
        if not metadata.get(key):
            metadata.pop(key, None)
    result = {**new, "apiVersion": old["apiVersion"], "kind": old["kind"], "metadata": metadata}
    if "status" in resource.subresources:
        result.pop("status", None)
        if "status" in old:
            result["status"] = old["status"]
    return result


def admit(resource: Resource, old: JsonObject | None, new: JsonObject, *, strict: bool, serial: int) -> JsonObject:
    """The object as it will be stored: unknown fields pruned, defaults filled in, checked.

    Raises:
        ApiError: 400 (unknown fields, if strict), 422 (schema, names, labels, immutable fields).
    """
    if resource.schema:
        new = _admit_custom(resource, resource.schema, new, strict=strict)
    else:
        new = builtin.with_defaults(resource, new, old, serial=serial)
    builtin.check_metadata(resource, new)
    if old is not None:
        builtin.check_immutable(resource, old, new)
    return new


def _admit_custom(resource: Resource, rules: JsonObject, new: JsonObject, *, strict: bool) -> JsonObject:
    content = {k: v for k, v in new.items() if k not in _TYPE}
    unknown = list(schema.unknown_fields(content, rules))
    if unknown and strict:
        listed = ", ".join(f'unknown field "{path.lstrip(".")}"' for path in unknown)
        raise errors.bad_request(f"strict decoding error: {listed}")
    content = schema.with_defaults(schema.pruned(content, rules), rules)
    causes = list(schema.violations(content, rules))
    if causes:
        raise errors.invalid(resource.kind, new["metadata"]["name"], causes)
    return {**{k: new[k] for k in _TYPE}, **content}


def check_declared(resource: Resource, body: JsonObject) -> None:
    """Raises: ApiError 500, an apply names a field that the schema doesn't have."""
    content = {k: v for k, v in body.items() if k not in _TYPE}
    for path in schema.unknown_fields(content, resource.schema or {}):
        raise errors.typed_patch_failure(path, "field not declared in schema")


def check_preconditions(resource: Resource, old: JsonObject, wanted: JsonObject) -> None:
    """Raises: ApiError 409, the object isn't the one that the caller means."""
    for key, what in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
        live = old["metadata"][key]
        if wanted.get(key) and wanted[key] != live:
            why = (
                f"the {what} in the precondition ({wanted[key]}) does not match the {what} in record ({live}). "
                "The object might have been deleted and then recreated"
            )
            raise errors.conflict(resource.kind, old["metadata"]["name"], why)


def grace_s(resource: Resource, old: JsonObject, wanted: int | None) -> int:
    """Seconds that a deleted object may live on: only pods that a node holds and that still run have any."""
    if resource.kind != "Pod" or not old["spec"].get("nodeName"):
        return 0
    if (old.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return 0
    return wanted if wanted is not None else int(old["spec"].get("terminationGracePeriodSeconds", 30))


def finalizers_for(old: JsonObject, policy: str | None) -> list[str]:
    """Finalizers that a delete leaves or adds."""
    finalizers = list(old["metadata"].get("finalizers") or [])
    added = {"Foreground": "foregroundDeletion", "Orphan": "orphan"}.get(policy or "")
    if old["kind"] == "Namespace":
        added = "kubernetes"
    if added and added not in finalizers:
        finalizers.append(added)
    return finalizers
