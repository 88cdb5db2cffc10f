"""What can go wrong between a client and the API server, on order.

A `Fault` matches requests by verb and path parts and strikes a given number of times: an error answer, a delay, a
dropped connection, before the write or after it was committed (the answer is lost, which is the case that makes
duplicates). Faults are consulted at the door (HTTP server, simulation adapter), never inside the cluster.
"""

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from tests.fakeapi.errors import ApiError


@dataclass(frozen=True, slots=True)
class Request:
    """A request as faults see it; `verb` is the RBAC verb: get, list, watch, create, update, patch, delete, evict."""

    verb: str
    plural: str
    subresource: str = ""
    namespace: str = ""
    name: str = ""


@dataclass(slots=True)
class Fault:
    verb: str = "*"
    plural: str = "*"
    subresource: str = "*"
    name: str = "*"
    times: int | None = 1
    """How often it strikes; None: until removed."""
    error: ApiError | None = None
    latency_s: float = 0.0
    reset: bool = False
    """Drop the connection instead of answering."""
    after: bool = False
    """True: the request is carried out first; only its answer is lost or replaced by the error."""
    hits: int = field(default=0, init=False)

    def matches(self, request: Request) -> bool:
        return (
            (self.times is None or self.hits < self.times)
            and fnmatchcase(request.verb, self.verb)
            and fnmatchcase(request.plural, self.plural)
            and fnmatchcase(request.subresource, self.subresource)
            and fnmatchcase(request.name, self.name)
        )


@dataclass(slots=True)
class Faults:
    """The faults in force."""

    active: list[Fault] = field(default_factory=list)

    def add(self, fault: Fault) -> Fault:
        self.active.append(fault)
        return fault

    def clear(self) -> None:
        self.active.clear()

    def take(self, request: Request) -> Fault | None:
        """The first fault that strikes this request, counted."""
        for fault in self.active:
            if fault.matches(request):
                fault.hits += 1
                return fault
        return None


def unavailable() -> ApiError:
    return ApiError(503, "ServiceUnavailable", "the server is currently unable to handle the request")


def throttled(seconds: int = 1) -> ApiError:
    return ApiError(
        429,
        "TooManyRequests",
        "the server has received too many requests, please try again later",
        details={"retryAfterSeconds": seconds},
        headers={"Retry-After": str(seconds)},
    )


def unauthorized() -> ApiError:
    return ApiError(401, "Unauthorized", "Unauthorized")


def quota_exceeded(kind: str, name: str) -> ApiError:
    message = f'{kind} "{name}" is forbidden: exceeded quota: compute, requested: pods=1, used: pods=2, limited: pods=2'
    return ApiError(403, "Forbidden", message, details={"name": name, "kind": kind})
