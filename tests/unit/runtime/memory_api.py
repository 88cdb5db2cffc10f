"""An API server of a few dozen lines in memory, for the runtime's unit tests: the verbs that the executor needs.

It knows names, UIDs and versions, no schemas and no merging; the contract suite runs on better ones.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from sluice.runtime.errors import AlreadyExists, KubeError, NotFound, Replaced, Stale
from sluice.runtime.kinds import Kind

Object = dict[str, Any]


class MemoryApi:
    """`fail` may raise in place of any call: `fail(verb, kind, name)`."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.calls: list[tuple[str, str, str]] = []
        """(verb, kind, name) in order; reads too."""
        self.fail: Callable[[str, str, str], None] = lambda *_: None
        self._version = 100

    def writes(self) -> list[tuple[str, str, str]]:
        return [call for call in self.calls if call[0] != "get"]

    def put(self, obj: Mapping[str, Any]) -> Object:
        """Store an object as if somebody had written it."""
        meta = obj["metadata"]
        self._version += 1
        key = (obj["kind"], meta.get("namespace", ""), meta["name"])
        uid = meta.get("uid") or f"uid-{meta['name']}-{self._version}"
        body = {**obj, "metadata": {**meta, "uid": uid, "resourceVersion": str(self._version)}}
        self.objects[key] = json.loads(json.dumps(body))  # as it comes over the wire
        return self.objects[key]

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        self._enter("get", kind, name)
        return self._find("get", kind, namespace, name)

    async def create(self, kind: Kind, body: Mapping[str, Any]) -> Object:
        meta = body["metadata"]
        self._enter("create", kind, meta["name"])
        if (kind.name, meta.get("namespace", ""), meta["name"]) in self.objects:
            raise AlreadyExists("create", kind.resource, meta["name"], 409, "AlreadyExists", "exists")
        return self.put(body)

    async def apply(self, kind: Kind, body: Mapping[str, Any], *, uid: str | None = None) -> Object:
        meta = body["metadata"]
        self._enter("apply", kind, meta["name"])
        live = self.objects.get((kind.name, meta.get("namespace", ""), meta["name"]))
        if uid is None and live is not None:
            raise AlreadyExists("apply", kind.resource, meta["name"], 409, "Conflict", "modified")
        if uid is not None and (live is None or live["metadata"]["uid"] != uid):
            raise Replaced("apply", kind.resource, meta["name"], 409, "Conflict", "uid mismatch")
        if live is None:
            return self.put(body)
        merged = {**live, **body, "metadata": {**live["metadata"], **meta}}
        return live if merged == live else self.put(merged)

    async def apply_status(self, kind: Kind, body: Mapping[str, Any]) -> Object:
        meta = body["metadata"]
        self._enter("apply_status", kind, meta["name"])
        live = self._find("apply", kind, meta["namespace"], meta["name"])
        if live["metadata"]["resourceVersion"] != meta["resourceVersion"]:
            raise Stale("apply", kind.resource, meta["name"], 409, "Conflict", "modified")
        return self.put({**live, "status": body["status"]})

    async def patch(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        patch: Mapping[str, Any],
        *,
        uid: str = "",
        subresource: str = "",
        strategic: bool = False,
    ) -> Object:
        self._enter(f"patch {subresource}".strip() + (" strategic" if strategic else ""), kind, name)
        live = self._find("patch", kind, namespace, name)
        if uid and live["metadata"]["uid"] != uid:
            raise Replaced("patch", kind.resource, name, 422, "Invalid", "metadata.uid")
        meta = {**live["metadata"]}
        for key, values in patch.get("metadata", {}).items():
            merged = {**(meta.get(key) or {}), **values}
            meta[key] = {name: value for name, value in merged.items() if value is not None}
        rest = {key: value for key, value in patch.items() if key != "metadata"}
        return self.put({**live, **rest, "metadata": meta})

    async def replace(self, kind: Kind, body: Mapping[str, Any]) -> Object:
        meta = body["metadata"]
        self._enter("replace", kind, meta["name"])
        live = self._find("replace", kind, meta["namespace"], meta["name"])
        if live["metadata"]["resourceVersion"] != meta["resourceVersion"]:
            raise Stale("update", kind.resource, meta["name"], 409, "Conflict", "modified")
        return self.put(body)

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str, grace_s: int | None = None
    ) -> Object | None:
        self._enter("delete" if grace_s is None else f"delete in {grace_s} s", kind, name)
        live = self.objects.get((kind.name, namespace, name))
        if live is None or live["metadata"]["uid"] != uid:
            return None
        del self.objects[kind.name, namespace, name]
        return None

    def _enter(self, verb: str, kind: Kind, name: str) -> None:
        self.calls.append((verb, kind.name, name))
        self.fail(verb, kind.name, name)

    def _find(self, verb: str, kind: Kind, namespace: str, name: str) -> Object:
        try:
            return self.objects[kind.name, namespace, name]
        except KeyError:
            raise NotFound(verb, kind.resource, name, 404, "NotFound", "not found") from None


def failing(error: type[KubeError], verb: str, name: str = "", message: str = "no") -> Callable[[str, str, str], None]:
    """A `fail` hook: this verb (on this object, if given) is answered with the error."""

    def fail(called: str, kind: str, called_name: str) -> None:
        if called.startswith(verb) and name in ("", called_name):
            raise error(verb, f"{kind.lower()}s", called_name, 500, error.__name__, message)

    return fail
