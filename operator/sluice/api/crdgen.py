"""CRDs from our pydantic models: `python -m sluice.api.crdgen [--check] CRD_DIR [CHART_TEMPLATE_DIR]`.

pydantic's JSON schema is not what the Kubernetes API server calls structural; some of the difference it refuses,
some it drops in silence, so that a check vanishes. Hence one recursive function that knows each keyword it meets and
raises on any other, and that refuses whatever lacks a bound. The output is byte-stable, in the order of the models.
"""

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import yaml

from sluice.api import names
from sluice.api.kinds import KINDS, SCHEMA_VERSION, Kind
from sluice.api.markers import RULES

Schema = dict[str, Any]

KEPT = ("minLength", "maxLength", "pattern", "minimum", "maximum", "minItems", "maxItems", "maxProperties", "enum")
MARKERS = (
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-int-or-string",
    "x-kubernetes-preserve-unknown-fields",
    RULES,
)
DROPPED = ("title",)
HANDLED = ("type", "description", "default", "properties", "required", "items", "additionalProperties", "format")
MAX_INT32 = 2**31 - 1
MAX_BYTES = 100_000
HEADER = "# Generated from operator/sluice/api by `python -m sluice.api.crdgen`; do not edit.\n"


class CrdError(ValueError):
    """The models use something that a CRD can't say or must not leave open; the text names the path."""


def structural(node: Schema, defs: Schema, path: str, seen: tuple[str, ...] = ()) -> Schema:
    """The structural form of one node of a pydantic JSON schema; an absent field and null are the same.

    Raises:
        CrdError: unknown keyword, union, recursion, missing bound or missing description.
    """
    while "$ref" in node or "anyOf" in node:
        node, seen = _resolved(node, defs, path, seen)
    unknown = set(node) - {*KEPT, *MARKERS, *DROPPED, *HANDLED}
    if unknown:
        raise CrdError(f"{path}: no rule for {sorted(unknown)}")
    made: Schema = {}
    if "description" in node:
        made["description"] = " ".join(node["description"].split())
    if "x-kubernetes-int-or-string" not in node:
        made["type"] = node.get("type")
    made |= {key: node[key] for key in (*KEPT, *MARKERS) if key in node}
    if any(f"self.matches(r'{node.get('pattern')}')" in rule["rule"] for rule in node.get(RULES, ())):
        made.pop("pattern")  # said by a rule, with a message for humans
    made |= _typed(node, made, defs, path, seen)
    default = _minimal(node.get("default"), made)
    if default is not None:
        made["default"] = default
    return made


def _typed(node: Schema, made: Schema, defs: Schema, path: str, seen: tuple[str, ...]) -> Schema:
    """What the type of a node adds to its schema; every type that can grow needs a bound."""
    match made.get("type"):
        case "object":
            return _object(node, defs, path, seen)
        case "array":
            _need(made, "maxItems", path)
            return {"items": structural(node["items"], defs, f"{path}[]", seen)}
        case "string":
            if "enum" not in made:
                _need(made, "maxLength", path)
            return {"format": node["format"]} if "format" in node else {}
        case "integer":
            return {"format": "int32" if made.get("maximum", MAX_INT32 + 1) <= MAX_INT32 else "int64"}
        case None if node.get("x-kubernetes-int-or-string"):
            _need(made, "maxLength", path)
            return {}
        case "boolean":
            return {}
        case other:
            raise CrdError(f"{path}: type {other!r} is not used in our API")


def _resolved(node: Schema, defs: Schema, path: str, seen: tuple[str, ...]) -> tuple[Schema, tuple[str, ...]]:
    """One `$ref` or `Optional` less; what stands beside it wins over what it points to, rules are joined."""
    outer = {key: value for key, value in node.items() if key not in ("$ref", "anyOf")}
    if "$ref" in node:
        name = node["$ref"].removeprefix("#/$defs/")
        if name in seen:
            raise CrdError(f"{path}: {name} contains itself")
        inner, seen = defs[name], (*seen, name)
    else:
        options = [option for option in node["anyOf"] if option != {"type": "null"}]
        if len(options) != 1:
            raise CrdError(f"{path}: a union; use a tagged object with rules instead")
        inner = options[0]
    merged = {**inner, **outer}
    if RULES in inner and RULES in outer:
        merged[RULES] = inner[RULES] + outer[RULES]
    return merged, seen


def _object(node: Schema, defs: Schema, path: str, seen: tuple[str, ...]) -> Schema:
    """Properties of a model, or values of a bounded map; `additionalProperties: false` is what pruning does anyway."""
    if node.get("x-kubernetes-preserve-unknown-fields"):
        return {}
    if "properties" not in node:
        if not isinstance(node.get("additionalProperties"), dict):
            raise CrdError(f"{path}: an object of unknown shape; use a model, a typed map or FreeObject")
        _need(node, "maxProperties", path)
        return {"additionalProperties": structural(node["additionalProperties"], defs, f"{path}{{}}", seen)}
    if node.get("additionalProperties") is not False:
        raise CrdError(f"{path}: a model that accepts unknown fields")
    made: Schema = {"properties": {}}
    for name, child in node["properties"].items():
        made["properties"][name] = structural(child, defs, f"{path}.{name}", seen)
        if "description" not in made["properties"][name]:
            raise CrdError(f"{path}.{name}: no description for kubectl explain")
    if node.get("required"):
        made["required"] = node["required"]
    return made


def _need(schema: Schema, key: str, path: str) -> None:
    if key not in schema:
        raise CrdError(f"{path}: no {key}; the API server refuses rules over unbounded values")


def _minimal(default: Any, schema: Schema) -> Any:
    """The default less what nested defaults say; None if that leaves nothing to say.

    An object stays `{}` when it has defaults inside, as those apply only to an object that is there. One with rules
    keeps all, as the API server checks the rules on the default itself before it fills in nested ones.
    """
    if isinstance(default, dict):
        properties = {} if RULES in schema else schema.get("properties", {})
        inner = {key: _minimal(value, properties.get(key, {})) for key, value in default.items()}
        kept = {k: v for k, v in inner.items() if v is not None and v != properties.get(k, {}).get("default")}
        return kept or ({} if any("default" in child for child in properties.values()) else None)
    if isinstance(default, list):
        keys = schema.get("x-kubernetes-list-map-keys", ())
        return [
            {key: item[key] for key in keys if key in item} | (_minimal(item, schema["items"]) or {})
            if isinstance(item, dict)
            else item
            for item in default
        ] or None
    return None if default == "" else default


def crd(kind: Kind) -> Schema:
    """The CustomResourceDefinition of one kind."""
    raw = kind.model.model_json_schema()
    root = structural(raw, raw.pop("$defs", {}), kind.kind)
    root["properties"] = {
        "apiVersion": {"type": "string", "description": f"`{names.API_VERSION}`."},
        "kind": {"type": "string", "description": f"`{kind.kind}`."},
        # Declared because a rule's fieldPath must exist in the schema; the API server knows the rest of metadata.
        "metadata": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 253}}},
        **root["properties"],
    }
    scope = "Namespaced" if kind.namespaced else "Cluster"
    version: Schema = {
        "name": names.VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [
            {"name": c.name, "type": c.type, "description": c.description, "jsonPath": c.path}
            | ({"priority": c.priority} if c.priority else {})
            for c in kind.columns
        ],
        "schema": {"openAPIV3Schema": root},
    }
    if kind.has_status:
        version["subresources"] = {"status": {}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": kind.crd_name,
            "annotations": {names.ANNOTATION_SCHEMA_VERSION: str(SCHEMA_VERSION)},
        },
        "spec": {
            "group": names.GROUP,
            "names": {
                "kind": kind.kind,
                "listKind": f"{kind.kind}List",
                "plural": kind.plural,
                "singular": kind.singular,
                "shortNames": list(kind.short_names),
            },
            "scope": scope,
            "versions": [version],
        },
    }


def render(kind: Kind, *, for_chart: bool = False) -> str:
    """The file of one CRD. In the chart it carries the annotation that keeps it (and all objects) at an uninstall.

    Raises:
        CrdError: too large for client-side apply (S005), or text that a Helm template would take as its own.
    """
    made = copy.deepcopy(crd(kind))
    if for_chart:
        made["metadata"]["annotations"]["helm.sh/resource-policy"] = "keep"
    text = HEADER + yaml.dump(made, Dumper=_NoAliases, sort_keys=False, allow_unicode=True, width=118)
    if len(text.encode()) >= MAX_BYTES:
        raise CrdError(f"{kind.crd_name}: {len(text.encode())} bytes, the limit is {MAX_BYTES}")
    if "{{" in text:
        raise CrdError(f"{kind.crd_name}: '{{{{' would be read as a template by Helm")
    return text


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  # equal subtrees are written out, not linked
        return True


def files(crd_dir: Path, chart_dir: Path | None) -> dict[Path, str]:
    """Path to content of everything that is generated."""
    made = {crd_dir / f"{kind.plural}.yaml": render(kind) for kind in KINDS}
    if chart_dir is not None:
        made |= {chart_dir / f"{kind.plural}.yaml": render(kind, for_chart=True) for kind in KINDS}
    return made


def main(arguments: list[str] | None = None) -> int:
    """Write the files, or with `--check` say which ones differ (exit code 1)."""
    parser = argparse.ArgumentParser(prog="python -m sluice.api.crdgen", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file differs")
    parser.add_argument("crd_dir", type=Path)
    parser.add_argument("chart_dir", type=Path, nargs="?", help="templates folder of the CRD chart")
    options = parser.parse_args(arguments)
    made = files(options.crd_dir, options.chart_dir)
    if options.check:
        stale = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
        for path in stale:
            print(f"{path}: differs from the models; run `make generate`", file=sys.stderr)
        return 1 if stale else 0
    for path, text in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
