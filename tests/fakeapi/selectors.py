"""Label and field selectors as they stand in query strings."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from tests.fakeapi.errors import bad_request

Predicate = Callable[[Mapping[str, Any]], bool]

_SET_BASED = re.compile(r"^\s*(\S+)\s+(in|notin)\s*\(([^)]*)\)\s*$")
_EQUALITY = re.compile(r"^\s*([^=!\s]+)\s*(==|=|!=)\s*([^=\s]*)\s*$")
_EXISTS = re.compile(r"^\s*(!?)\s*([A-Za-z0-9./_-]+)\s*$")
_COMMA_OUTSIDE = re.compile(r",(?![^(]*\))")


def label_selector(text: str) -> Predicate:
    """Predicate over an object's labels for `a=b,c!=d,e in (f,g),h,!i`; an empty text selects everything.

    Raises:
        ApiError: 400, the text is no selector.
    """
    tests = [_label_requirement(part) for part in _COMMA_OUTSIDE.split(text)] if text.strip() else []

    def matches(obj: Mapping[str, Any]) -> bool:
        labels = obj.get("metadata", {}).get("labels") or {}
        return all(test(labels) for test in tests)

    return matches


def _label_requirement(part: str) -> Callable[[Mapping[str, str]], bool]:
    if found := _SET_BASED.match(part):
        key, operator, listed = found.groups()
        values = {value.strip() for value in listed.split(",")}
        if operator == "in":
            return lambda labels: labels.get(key) in values
        return lambda labels: labels.get(key) not in values
    if found := _EQUALITY.match(part):
        key, operator, value = found.groups()
        if operator == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if found := _EXISTS.match(part):
        absent, key = found.groups()
        return lambda labels: (key in labels) != bool(absent)
    raise bad_request(f'unable to parse requirement: invalid label selector "{part}"')


def field_selector(text: str) -> Predicate:
    """Predicate for `metadata.name=x,status.phase!=Running`; compares strings, an absent field is "".

    Raises:
        ApiError: 400, the text is no selector.
    """
    tests: list[tuple[list[str], bool, str]] = []
    for part in filter(None, text.split(",")):
        found = _EQUALITY.match(part)
        if not found:
            raise bad_request(f'invalid field selector "{part}"')
        path, operator, value = found.groups()
        tests.append((path.split("."), operator != "!=", value))

    def value_at(obj: Mapping[str, Any], path: list[str]) -> str:
        here: Any = obj
        for step in path:
            here = here.get(step, "") if isinstance(here, Mapping) else ""
        return str(here)

    return lambda obj: all((value_at(obj, path) == value) == equal for path, equal, value in tests)


def match_labels(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """A `metav1.LabelSelector` (as in a Deployment or PodDisruptionBudget) against labels."""
    for key, value in (selector.get("matchLabels") or {}).items():
        if labels.get(key) != value:
            return False
    for rule in selector.get("matchExpressions") or []:
        key, operator, values = rule["key"], rule["operator"], rule.get("values") or []
        holds = {
            "In": labels.get(key) in values,
            "NotIn": labels.get(key) not in values,
            "Exists": key in labels,
            "DoesNotExist": key not in labels,
        }[operator]
        if not holds:
            return False
    return True
