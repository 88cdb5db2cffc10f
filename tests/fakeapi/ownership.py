"""Server-side apply: merging a manager's whole intent and tracking who owns which field.

A field is named by its path: `f:name` for a field, `k:{...}` for an item of a list with merge keys, `v:"x"` for a
member of a set. Only leaves and items are tracked; that is enough for conflicts, for the removal of what a manager
no longer mentions, and for a `managedFields` that clients can read.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.fakeapi.errors import JsonObject, apply_conflict, typed_patch_failure
from tests.fakeapi.listkeys import KEY_DEFAULTS, KeyFinder, item_key
from tests.fakeapi.patching import copy_json

Path = tuple[str, ...]

_ITEM = object()
SYSTEM_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "managedFields",
    "selfLink",
    "generateName",
)


@dataclass(frozen=True, slots=True)
class Ownership:
    """Fields of one object that one manager holds through one kind of write."""

    manager: str
    operation: str
    """`Apply` or `Update`."""
    subresource: str
    paths: frozenset[Path]
    time: str


def owned_content(body: JsonObject) -> JsonObject:
    """The part of an object that can be owned."""
    content = {key: value for key, value in body.items() if key not in ("apiVersion", "kind", "metadata")}
    metadata = {k: v for k, v in (body.get("metadata") or {}).items() if k not in SYSTEM_METADATA}
    if metadata:
        content["metadata"] = metadata
    return content


def leaves(value: Any, keys: KeyFinder, path: Path = (), names: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All owned paths below `value` with what stands there.

    Raises:
        ApiError: 500, two items of a list carry the same merge keys.
    """
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, keys, (*path, f"f:{key}"), (*names, key))
    elif isinstance(value, list) and names and (merge_keys := keys(names)) is not None:
        seen = set()
        for item in value:
            step = _step(item, merge_keys)
            if step in seen:
                raise typed_patch_failure("." + ".".join(names), f"duplicate entries for key {step[2:]}")
            seen.add(step)
            yield (*path, step), _ITEM if merge_keys else item
            if merge_keys:
                yield from leaves(item, keys, (*path, step), names)
    else:
        yield path, value


def _step(item: Any, merge_keys: tuple[str, ...]) -> str:
    if not merge_keys:
        return "v:" + json.dumps(item)
    named = dict(zip(merge_keys, item_key(item, merge_keys), strict=True))
    return "k:" + json.dumps({key: value for key, value in named.items() if value is not None}, sort_keys=True)


@dataclass(frozen=True, slots=True)
class Applied:
    content: JsonObject
    owners: tuple[Ownership, ...]


def apply_intent(
    live: JsonObject,
    desired: JsonObject,
    owners: tuple[Ownership, ...],
    *,
    manager: str,
    subresource: str,
    force: bool,
    keys: KeyFinder,
    now: str,
) -> Applied:
    """The object after one apply; `live` is {} for an object that isn't there yet.

    Raises:
        ApiError: 409 when another manager holds a field with another value and `force` is off; 500 for
            duplicate list keys.
    """
    wanted = dict(leaves(desired, keys))
    present = dict(leaves(live, keys)) if live else {}
    mine = next((o for o in owners if _is(o, manager, "Apply", subresource)), None)
    others = [o for o in owners if o is not mine]
    differing = {p for p, v in wanted.items() if p in present and present[p] != v}
    kept = []
    for other in others:
        clash = other.paths & differing
        if clash and not force and other.manager != manager:
            raise apply_conflict(other.manager, sorted(_readable(path) for path in clash))
        kept.append(_without(other, clash))
    held_by_others = frozenset[Path]().union(*(o.paths for o in kept)) if kept else frozenset()
    dropped = (mine.paths if mine else frozenset()) - frozenset(wanted) - held_by_others
    result = _merge(live, desired, keys, ())
    for path in sorted(dropped, key=len):  # an item before its fields, which identify it
        if not _is_item_key(path):
            _drop(result, path, held_by_others | frozenset(wanted))
    paths = frozenset(wanted)
    time = mine.time if mine and mine.paths == paths and result == live else now
    entry = Ownership(manager, "Apply", subresource, paths, time)
    return Applied(result, tuple(o for o in (*kept, entry) if o.paths))


def after_update(
    old: JsonObject,
    new: JsonObject,
    owners: tuple[Ownership, ...],
    *,
    manager: str,
    subresource: str,
    keys: KeyFinder,
    now: str,
) -> tuple[Ownership, ...]:
    """Owners after a write that isn't an apply: changed fields go to the writer, removed ones to nobody."""
    before, after = dict(leaves(old, keys)) if old else {}, dict(leaves(new, keys)) if new else {}
    changed = frozenset(p for p, v in after.items() if before.get(p, _ABSENT) != v)
    gone = frozenset(before) - frozenset(after)
    result = []
    mine: frozenset[Path] = changed
    for owner in owners:
        if _is(owner, manager, "Update", subresource):
            mine |= owner.paths - gone
        else:
            result.append(_without(owner, changed | gone))
    if mine:
        result.append(Ownership(manager, "Update", subresource, mine, now))
    return tuple(o for o in result if o.paths)


_ABSENT = object()


def _is(owner: Ownership, manager: str, operation: str, subresource: str) -> bool:
    return (owner.manager, owner.operation, owner.subresource) == (manager, operation, subresource)


def _without(owner: Ownership, paths: Iterable[Path]) -> Ownership:
    rest = owner.paths - frozenset(paths)
    return Ownership(owner.manager, owner.operation, owner.subresource, rest, owner.time)


def _readable(path: Path) -> str:
    return "".join(f".{step[2:]}" if step.startswith("f:") else f"[{step[2:]}]" for step in path)


def _merge(live: Any, desired: Any, keys: KeyFinder, names: Path) -> Any:
    if isinstance(desired, dict) and isinstance(live, dict):
        result = dict(live)
        for key, value in desired.items():
            result[key] = _merge(live.get(key), value, keys, (*names, key)) if key in live else copy_json(value)
        return result
    if isinstance(desired, list) and isinstance(live, list) and names:
        merge_keys = keys(names)
        if merge_keys is not None:
            return _merge_list(live, desired, merge_keys, keys, names)
    return copy_json(desired)


def _merge_list(
    live: list[Any], desired: list[Any], merge_keys: tuple[str, ...], keys: KeyFinder, names: Path
) -> list[Any]:
    wanted = {_step(item, merge_keys): item for item in desired}
    result = []
    for item in live:
        step = _step(item, merge_keys)
        result.append(_merge(item, wanted.pop(step), keys, names) if step in wanted else item)
    return result + [copy_json(item) for item in wanted.values()]


def _is_item_key(path: Path) -> bool:
    return len(path) > 1 and path[-2].startswith("k:") and path[-1][2:] in json.loads(path[-2][2:])


def _drop(obj: Any, path: Path, still_owned: frozenset[Path]) -> None:
    """Remove what stands at `path`, and parents that it leaves empty and nobody owns; absent is fine."""
    step, rest = path[0], path[1:]
    if step.startswith("f:"):
        name = step[2:]
        if not isinstance(obj, dict) or name not in obj:
            return
        if rest:
            obj[name] = copy_json(obj[name])
            _drop(obj[name], rest, _below(still_owned, step))
            if obj[name] in ({}, []) and not any(p[0] == step for p in still_owned):
                del obj[name]
        else:
            del obj[name]
    elif isinstance(obj, list):
        position = next((i for i, item in enumerate(obj) if _matches(item, step)), None)
        if position is None:
            return
        if rest:
            _drop(obj[position], rest, _below(still_owned, step))
        elif not any(p[0] == step for p in still_owned if p):
            del obj[position]


def _below(paths: frozenset[Path], step: str) -> frozenset[Path]:
    return frozenset(p[1:] for p in paths if len(p) > 1 and p[0] == step)


def _matches(item: Any, step: str) -> bool:
    wanted = json.loads(step[2:])
    if step.startswith("v:"):
        return bool(item == wanted)
    return all(item.get(key, KEY_DEFAULTS.get(key)) == value for key, value in wanted.items())


def managed_fields(owners: tuple[Ownership, ...], api_version: str) -> list[JsonObject]:
    """`metadata.managedFields` for the wire."""
    result = []
    for owner in owners:
        tree: JsonObject = {}
        for path in sorted(owner.paths):
            here = tree
            for step in path:
                here = here.setdefault(step, {})
        entry: JsonObject = {
            "manager": owner.manager,
            "operation": owner.operation,
            "apiVersion": api_version,
            "time": owner.time,
            "fieldsType": "FieldsV1",
            "fieldsV1": tree,
        }
        if owner.subresource:
            entry["subresource"] = owner.subresource
        result.append(entry)
    return result


def without_times(owners: tuple[Ownership, ...]) -> frozenset[tuple[str, str, str, frozenset[Path]]]:
    """Who holds what, for comparing: an apply that changes neither content nor owners is no write."""
    return frozenset((o.manager, o.operation, o.subresource, o.paths) for o in owners)
