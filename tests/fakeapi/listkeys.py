"""Which lists are maps: the merge keys that strategic merge and server-side apply go by.

For built-in kinds a table by field name (from their OpenAPI `x-kubernetes-list-map-keys`); for custom kinds the
schema of the CRD. A list that is neither a map nor a set is atomic: one owner, replaced whole.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tests.fakeapi.errors import JsonObject

KeyFinder = Callable[[Sequence[str]], "tuple[str, ...] | None"]
"""Field path without list positions, for example ("spec", "containers"), to merge keys; () is a set of scalars."""

_METADATA: dict[str, tuple[str, ...]] = {"ownerReferences": ("uid",), "finalizers": ()}
_BUILT_IN: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "imagePullSecrets": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "schedulingGates": ("name",),
    "hostAliases": ("ip",),
    "conditions": ("type",),
    "podIPs": ("ip",),
}
KEY_DEFAULTS = {"protocol": "TCP"}
"""A merge key that may be left out because the schema defaults it."""


def for_built_in(path: Sequence[str]) -> tuple[str, ...] | None:
    if path[0] == "metadata":
        return _METADATA.get(path[-1]) if len(path) == 2 else None
    if path[-1] == "ports":
        if "containers" in path or "initContainers" in path:
            return ("containerPort", "protocol")
        return ("port", "protocol") if len(path) == 2 else None
    return _BUILT_IN.get(path[-1])


def for_schema(schema: JsonObject) -> KeyFinder:
    def find(path: Sequence[str]) -> tuple[str, ...] | None:
        if path[0] == "metadata":
            return for_built_in(path)
        here: Any = schema
        for step in path:
            if here.get("type") == "array":
                here = here.get("items", {})
            here = here.get("properties", {}).get(step) or here.get("additionalProperties") or {}
        kind = here.get("x-kubernetes-list-type")
        if kind == "map":
            return tuple(here["x-kubernetes-list-map-keys"])
        return () if kind == "set" else None

    return find


def item_key(item: JsonObject, keys: tuple[str, ...]) -> tuple[Any, ...]:
    """Identity of one list item; None stands for a missing key."""
    return tuple(item.get(key, KEY_DEFAULTS.get(key)) for key in keys)
