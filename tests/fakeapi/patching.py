"""The three patch formats that change a document directly: JSON merge, JSON patch, strategic merge.

All are pure: the input is never changed. Server-side apply, which also tracks owners, is in `ownership`.
"""

from collections.abc import Sequence
from typing import Any

from tests.fakeapi.errors import ApiError, JsonObject, bad_request
from tests.fakeapi.listkeys import KeyFinder, item_key


def copy_json(value: Any) -> Any:
    """Deep copy of JSON data; several times faster than `copy.deepcopy`, which the simulation would feel."""
    if isinstance(value, dict):
        return {key: copy_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copy_json(item) for item in value]
    return value


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7386: null removes, objects merge, everything else (lists included) replaces."""
    if not isinstance(patch, dict):
        return copy_json(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result


def strategic_merge(target: Any, patch: Any, keys: KeyFinder, path: Sequence[str] = ()) -> Any:
    """Like a merge patch, but lists with merge keys are merged item by item; `$patch: delete` removes an item."""
    if not isinstance(patch, dict):
        return copy_json(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if key.startswith("$"):
            continue
        here = (*path, key)
        if value is None:
            result.pop(key, None)
        elif isinstance(value, list) and (merge_keys := keys(here)):
            result[key] = _merge_items(result.get(key) or [], value, merge_keys, keys, here)
        else:
            result[key] = strategic_merge(result.get(key), value, keys, here)
    return result


def _merge_items(
    live: list[JsonObject],
    patch: list[JsonObject],
    merge_keys: tuple[str, ...],
    keys: KeyFinder,
    path: Sequence[str],
) -> list[JsonObject]:
    result = list(live)
    for item in patch:
        identity = item_key(item, merge_keys)
        position = next((i for i, old in enumerate(result) if item_key(old, merge_keys) == identity), None)
        if item.get("$patch") == "delete":
            if position is not None:
                del result[position]
        elif position is None:
            result.append(copy_json(item))
        else:
            result[position] = strategic_merge(result[position], item, keys, path)
    return result


def json_patch(target: JsonObject, operations: Any) -> JsonObject:
    """RFC 6902 with add, remove, replace, test, copy and move.

    Raises:
        ApiError: 422 without details for a failed `test` or a path that isn't there (as the API server does),
            400 for something that is no JSON patch.
    """
    if not isinstance(operations, list):
        raise bad_request("json: cannot unmarshal object into Go value of type jsonpatch.Patch")
    result = copy_json(target)
    for operation in operations:
        _apply_operation(result, operation)
    return result  # type: ignore[no-any-return]  # JSON in, JSON out


def _apply_operation(document: Any, operation: JsonObject) -> None:
    kind, path = operation.get("op"), _pointer(operation.get("path", ""))
    match kind:
        case "test":
            if _read(document, path) != operation.get("value"):
                raise _cannot_process()
        case "add" | "replace":
            if kind == "replace":
                _read(document, path)
            _write(document, path, copy_json(operation.get("value")), insert=kind == "add")
        case "remove":
            _remove(document, path)
        case "copy" | "move":
            source = _pointer(operation["from"])
            value = copy_json(_read(document, source))
            if kind == "move":
                _remove(document, source)
            _write(document, path, value, insert=True)
        case _:
            raise bad_request(f"unexpected JSON patch operation {kind!r}")


def _cannot_process() -> ApiError:
    return ApiError(422, "Invalid", "the server rejected our request due to an error in our request")


def _pointer(text: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def _read(document: Any, path: list[str]) -> Any:
    here = document
    for step in path:
        try:
            here = here[int(step)] if isinstance(here, list) else here[step]
        except (KeyError, IndexError, ValueError, TypeError):
            raise _cannot_process() from None
    return here


def _write(document: Any, path: list[str], value: Any, *, insert: bool) -> None:
    parent, last = _read(document, path[:-1]), path[-1]
    if isinstance(parent, list):
        position = len(parent) if last == "-" else int(last)
        if insert:
            parent.insert(position, value)
        else:
            parent[position] = value
    elif isinstance(parent, dict):
        parent[last] = value
    else:
        raise _cannot_process()


def _remove(document: Any, path: list[str]) -> None:
    _read(document, path)
    parent, last = _read(document, path[:-1]), path[-1]
    del parent[int(last) if isinstance(parent, list) else last]
