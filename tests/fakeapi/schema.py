"""Structural schemas of custom resources: defaults, unknown fields, validation.

Covers what our CRDs use, without CEL: cross-field rules are proven against the real API server. An unknown schema
keyword is ignored, an unknown type is a bug of the caller.
"""

import re
from collections.abc import Iterator
from typing import Any

from tests.fakeapi.errors import JsonObject
from tests.fakeapi.patching import copy_json

Cause = tuple[str, str]
_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}


def with_defaults(value: Any, schema: JsonObject) -> Any:
    """A copy with the schema's defaults filled in, nested ones only below objects that are there or defaulted."""
    if isinstance(value, dict):
        result = {}
        properties = schema.get("properties") or {}
        extra = schema.get("additionalProperties")
        for key, item in value.items():
            below = properties.get(key) or (extra if isinstance(extra, dict) else {})
            if item is None and not below.get("nullable"):
                continue  # a plain create drops nulls silently
            result[key] = with_defaults(item, below)
        for key, below in properties.items():
            if key not in result and "default" in below:
                result[key] = with_defaults(copy_json(below["default"]), below)
        return result
    if isinstance(value, list):
        return [with_defaults(item, schema.get("items") or {}) for item in value]
    return value


def unknown_fields(value: Any, schema: JsonObject, path: str = "") -> Iterator[str]:
    """Paths such as `.spec.pools[0].replica` that the schema doesn't declare."""
    if isinstance(value, dict):
        if schema.get("x-kubernetes-preserve-unknown-fields"):
            return
        properties = schema.get("properties") or {}
        extra = schema.get("additionalProperties")
        for key, item in value.items():
            if key in properties:
                yield from unknown_fields(item, properties[key], f"{path}.{key}")
            elif isinstance(extra, dict):
                yield from unknown_fields(item, extra, f"{path}.{key}")
            elif not extra and not _is_open(schema):
                yield f"{path}.{key}"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from unknown_fields(item, schema.get("items") or {}, f"{path}[{index}]")


def _is_open(schema: JsonObject) -> bool:
    return schema.get("type") != "object"


def pruned(value: Any, schema: JsonObject) -> Any:
    """A copy without the fields that the schema doesn't declare (what the server does unless asked to be strict)."""
    if isinstance(value, dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        properties = schema.get("properties") or {}
        extra = schema.get("additionalProperties")
        known = {}
        for key, item in value.items():
            if key in properties:
                known[key] = pruned(item, properties[key])
            elif isinstance(extra, dict):
                known[key] = pruned(item, extra)
            elif extra or _is_open(schema):
                known[key] = item
        return known
    if isinstance(value, list):
        return [pruned(item, schema.get("items") or {}) for item in value]
    return value


def violations(value: Any, schema: JsonObject, path: str = "") -> Iterator[Cause]:
    """What is wrong, as (field path, message)."""
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, int | str) or isinstance(value, bool):
            yield path, "Invalid value: must be an integer or a string"
        return
    expected = schema.get("type")
    if expected and not _has_type(value, expected):
        yield path, f'Invalid value: "{type(value).__name__}": {path} in body must be of type {expected}'
        return
    if "enum" in schema and value not in schema["enum"]:
        supported = ", ".join(f'"{v}"' for v in schema["enum"])
        yield path, f'Unsupported value: "{value}": supported values: {supported}'
    if isinstance(value, bool):
        return
    if isinstance(value, dict):
        yield from _object_violations(value, schema, path)
    elif isinstance(value, list):
        yield from _list_violations(value, schema, path)
    elif isinstance(value, str):
        yield from _string_violations(value, schema, path)
    elif isinstance(value, int | float):
        if "minimum" in schema and value < schema["minimum"]:
            yield path, f"Invalid value: {value}: {path} in body should be greater than or equal to {schema['minimum']}"
        if "maximum" in schema and value > schema["maximum"]:
            yield path, f"Invalid value: {value}: {path} in body should be less than or equal to {schema['maximum']}"


def _has_type(value: Any, expected: str) -> bool:
    if isinstance(value, bool):
        return expected == "boolean"
    return isinstance(value, _TYPES[expected])


def _object_violations(value: JsonObject, schema: JsonObject, path: str) -> Iterator[Cause]:
    for key in schema.get("required") or []:
        if key not in value:
            yield f"{path}.{key}".lstrip("."), "Required value"
    if len(value) > schema.get("maxProperties", len(value)):
        yield path, f"Too many: {len(value)}: must have at most {schema['maxProperties']} items"
    properties = schema.get("properties") or {}
    extra = schema.get("additionalProperties")
    for key, item in value.items():
        below = properties.get(key) or (extra if isinstance(extra, dict) else None)
        if below:
            yield from violations(item, below, f"{path}.{key}".lstrip("."))


def _list_violations(value: list[Any], schema: JsonObject, path: str) -> Iterator[Cause]:
    if len(value) > schema.get("maxItems", len(value)):
        yield path, f"Too many: {len(value)}: must have at most {schema['maxItems']} items"
    if len(value) < schema.get("minItems", 0):
        yield path, f"Invalid value: {len(value)}: {path} in body should have at least {schema['minItems']} items"
    keys = schema.get("x-kubernetes-list-map-keys")
    seen: set[tuple[Any, ...]] = set()
    for index, item in enumerate(value):
        yield from violations(item, schema.get("items") or {}, f"{path}[{index}]")
        if keys and isinstance(item, dict):
            identity = tuple(item.get(key) for key in keys)
            if identity in seen:
                yield f"{path}[{index}]", f"Duplicate value: {identity}"
            seen.add(identity)


def _string_violations(value: str, schema: JsonObject, path: str) -> Iterator[Cause]:
    if len(value) > schema.get("maxLength", len(value)):
        yield path, f"Too long: may not be more than {schema['maxLength']} bytes"
    if len(value) < schema.get("minLength", 0):
        yield (
            path,
            f'Invalid value: "{value}": {path} in body should be at least {schema["minLength"]} chars long',
        )
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield path, f"Invalid value: \"{value}\": {path} in body should match '{schema['pattern']}'"
