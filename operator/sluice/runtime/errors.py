# ruff: noqa: N818 - these are answers, and a caller reads better for `except NotFound`
"""The API server's answers as error classes: what went wrong decides what the caller does, not the HTTP code.

| class | caller |
|---|---|
| `Throttled`, `Unavailable` | transient: the client retried already; the pass ends and the key backs off |
| `Unauthorized` | the client read its token again and was still refused |
| `Forbidden`, `QuotaExceeded`, `Invalid` | refused for good: a condition, no retry of the same body |
| `AlreadyExists` | look whose object it is: ours = done, another's = name conflict |
| `Stale`, `Replaced` | our view of the object is old: read it again; `Replaced`: its UID is gone for good |
| `NotFound`, `Expired`, `DisruptionRefused` | see the verb |
"""

import json
import random
from collections.abc import Mapping
from typing import Any, Final, Self

MAX_RETRY_AFTER_S: Final = 30.0
MAX_MESSAGE: Final = 1024


class KubeError(Exception):
    """An answer of the API server, or the lack of one."""

    def __init__(
        self,
        verb: str,
        resource: str,
        name: str,
        status: int,
        reason: str,
        message: str,
        causes: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(verb, resource, name, status, reason, message)
        self.verb = verb
        self.resource = resource
        """`pods`, `deployments.apps`."""
        self.name = name
        """`namespace/name`, `name`, or "" for a collection."""
        self.status = status
        """HTTP status; 0: no answer."""
        self.reason = reason
        self.message = message
        self.causes = causes
        """(field path, message) of each complaint."""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource} {self.name}: {self.status} {self.reason}: {self.message}"

    @classmethod
    def like(cls, other: "KubeError") -> Self:
        """The same answer under another class."""
        return cls(other.verb, other.resource, other.name, other.status, other.reason, other.message, other.causes)


class Throttled(KubeError):
    """429; `retry_after_s` is 0.05-30 seconds."""

    retry_after_s: float = 1.0


class Unavailable(KubeError):
    """5xx, no connection, or no answer in time."""


class Unauthorized(KubeError):
    """401."""


class Forbidden(KubeError):
    """403: RBAC, admission or a terminating namespace; verb and resource say what is missing."""


class QuotaExceeded(Forbidden):
    """403 of the ResourceQuota admission."""


class NotFound(KubeError):
    """404: the object, its namespace, or the whole kind."""


class AlreadyExists(KubeError):
    """409: something stands at the name."""


class Stale(KubeError):
    """409 Conflict: the object changed since we read it."""


class Replaced(Stale):
    """The UID we named is not the one at the name: 422 on metadata.uid, or 409 with a failed UID precondition."""


class Expired(KubeError):
    """410: the resourceVersion or page token is too old."""


class Invalid(KubeError):
    """400, 422 and schema errors of server-side apply: the body is wrong."""


class DisruptionRefused(KubeError):
    """429 on an eviction: a PodDisruptionBudget allows none now."""


_SCHEMA_ERRORS: Final = ("field not declared in schema", "duplicate entries for key")
"""Server-side apply reports these as 500 although the body is wrong."""

_UID_CONFLICTS: Final = ("uid mismatch", "UID in precondition", "UID in the precondition")
"""How the API server words a 409 about the UID (1.36): on apply to an absent name; on delete, by two code paths."""


def classify(
    verb: str,
    resource: str,
    name: str,
    code: int,
    headers: Mapping[str, str],
    data: bytes,
    rng: random.Random,
) -> KubeError:
    """The error for a non-2xx answer."""
    status = _status(data)
    reason = str(status.get("reason") or "")
    message = str(status.get("message") or data[:200].decode(errors="replace"))[:MAX_MESSAGE]
    details = status.get("details") or {}
    causes = tuple((str(c.get("field", "")), str(c.get("message", ""))) for c in details.get("causes") or [])
    budget = any(c.get("reason") == "DisruptionBudget" for c in details.get("causes") or [])
    kind = _class_of(code, reason, message, causes, budget)
    error = kind(verb, resource, name, code, reason, message, causes)
    if isinstance(error, Throttled):
        error.retry_after_s = _retry_after(headers, details, rng)
    return error


def _class_of(
    code: int, reason: str, message: str, causes: tuple[tuple[str, str], ...], budget: bool
) -> type[KubeError]:
    if code == 429:
        return DisruptionRefused if budget else Throttled
    if code == 403:
        return QuotaExceeded if "exceeded quota" in message else Forbidden
    if code == 409:
        if reason == "AlreadyExists":
            return AlreadyExists
        return Replaced if any(text in message for text in _UID_CONFLICTS) else Stale
    if code == 422 and any(field == "metadata.uid" for field, _ in causes):
        return Replaced
    if code == 500 and any(text in message for text in _SCHEMA_ERRORS):
        return Invalid
    if code >= 500:
        return Unavailable
    return {401: Unauthorized, 404: NotFound, 410: Expired}.get(code, Invalid)


def _status(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _retry_after(headers: Mapping[str, str], details: Mapping[str, Any], rng: random.Random) -> float:
    """Seconds to wait: the header, else the Status' details, else one; up to a tenth more spreads the callers."""
    try:
        seconds = float(headers.get("Retry-After") or details.get("retryAfterSeconds") or 1)
    except (TypeError, ValueError):
        seconds = 1.0
    return min(max(seconds, 0.05), MAX_RETRY_AFTER_S) * rng.uniform(1.0, 1.1)
