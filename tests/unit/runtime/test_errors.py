"""Answers of the API server, sorted into classes."""

import json
import random
from typing import Any

import pytest

from sluice.runtime import errors
from sluice.runtime.errors import KubeError, Throttled, classify


def a_status(*, reason: str = "", message: str = "", causes: list[dict[str, str]] | None = None) -> bytes:
    details: dict[str, Any] = {"causes": causes or []}
    return json.dumps({"kind": "Status", "reason": reason, "message": message, "details": details}).encode()


UID = [{"field": "metadata.uid", "message": "field is immutable"}]
BUDGET = [{"reason": "DisruptionBudget", "message": "needs 1"}]


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (400, {"reason": "BadRequest"}, errors.Invalid),
        (401, {}, errors.Unauthorized),
        (403, {"reason": "Forbidden"}, errors.Forbidden),
        (403, {"message": 'pods "p" is forbidden: exceeded quota: q, requested: ...'}, errors.QuotaExceeded),
        (404, {}, errors.NotFound),
        (406, {}, errors.Invalid),
        (409, {"reason": "AlreadyExists"}, errors.AlreadyExists),
        (409, {"reason": "Conflict", "message": "the object has been modified"}, errors.Stale),
        (409, {"reason": "Conflict", "message": "Precondition failed: UID in precondition: a, UID in object meta: b"},
         errors.Replaced),
        (409, {"reason": "Conflict", "message": "the UID in the precondition (a) does not match the UID in record (b)"},
         errors.Replaced),
        (409, {"reason": "Conflict", "message": "uid mismatch: the provided object specified uid"}, errors.Replaced),
        (410, {"reason": "Expired"}, errors.Expired),
        (422, {"reason": "Invalid"}, errors.Invalid),
        (422, {"reason": "Invalid", "causes": UID}, errors.Replaced),
        (429, {}, errors.Throttled),
        (429, {"causes": BUDGET}, errors.DisruptionRefused),
        (500, {}, errors.Unavailable),
        (500, {"message": ".spec.x: field not declared in schema"}, errors.Invalid),
        (500, {"message": "duplicate entries for key [name=\"a\"]"}, errors.Invalid),
        (503, {}, errors.Unavailable),
        (504, {}, errors.Unavailable),
    ],
)  # fmt: skip
def test_class_of_an_answer(code: int, status: dict[str, Any], kind: type[KubeError]) -> None:
    error = classify("get", "pods", "t/p", code, {}, a_status(**status), random.Random(1))
    assert type(error) is kind
    assert (error.verb, error.resource, error.name, error.status) == ("get", "pods", "t/p", code)


@pytest.mark.parametrize(
    ("headers", "low", "high"),
    [
        ({"Retry-After": "7"}, 7, 7.7),
        ({"Retry-After": "900"}, 30, 33),
        ({"Retry-After": "soon"}, 1, 1.1),
        ({}, 1, 1.1),
    ],
)
def test_throttled_says_how_long_to_wait(headers: dict[str, str], low: float, high: float) -> None:
    error = classify("get", "pods", "", 429, headers, b"", random.Random(1))
    assert isinstance(error, Throttled)
    assert low <= error.retry_after_s <= high


def test_answer_that_is_no_status_is_quoted() -> None:
    error = classify("get", "pods", "t/p", 502, {}, b"<html>bad gateway</html>", random.Random(1))
    assert str(error) == "get pods t/p: 502 : <html>bad gateway</html>"


def test_causes_name_the_fields() -> None:
    data = a_status(reason="Invalid", causes=[{"field": "spec.x", "message": "too long"}])
    error = classify("create", "pods", "t/p", 422, {}, data, random.Random(1))
    assert error.causes == (("spec.x", "too long"),)
