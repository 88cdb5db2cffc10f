"""What the tests of the API need of a structural schema: walking it, and filling in its defaults as the server does."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
Schema = dict[str, Any]


def crds() -> dict[str, Schema]:
    """Kind to CustomResourceDefinition, as checked in."""
    found = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "crds").glob("*.yaml"))]
    return {crd["spec"]["names"]["kind"]: crd for crd in found}


def schema_of(crd: Schema) -> Schema:
    schema: Schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def nodes(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every node of a schema with its path."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")


def with_defaults(value: Any, schema: Schema) -> Any:
    """What the API server stores: defaults of absent fields, but only inside objects that are there."""
    if isinstance(value, dict) and "properties" in schema:
        filled = copy.deepcopy(value)
        for name, child in schema["properties"].items():
            if name not in filled and "default" in child:
                filled[name] = copy.deepcopy(child["default"])
            if name in filled:
                filled[name] = with_defaults(filled[name], child)
        return filled
    if isinstance(value, list):
        return [with_defaults(item, schema["items"]) for item in value]
    return value
