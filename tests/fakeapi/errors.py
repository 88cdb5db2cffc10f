"""The API server's way to say no: one exception that renders itself as a `metav1.Status`.

Every refusal of the fake is made here, so that codes, reasons and details have one source. The texts follow
what kube-apiserver 1.36 says closely enough for clients that look at reason, details and causes (not at prose).
"""

from typing import Any

JsonObject = dict[str, Any]


class ApiError(Exception):
    """A refused request; `body()` is the `Status` that goes over the wire."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        details: JsonObject | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details or {}
        self.headers = headers or {}

    def body(self) -> JsonObject:
        status: JsonObject = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }
        if self.details:
            status["details"] = self.details
        return status


def not_found(plural: str, group: str, name: str) -> ApiError:
    what = f"{plural}.{group}" if group else plural
    details = {"name": name, "group": group, "kind": plural}
    return ApiError(404, "NotFound", f'{what} "{name}" not found', details=details)


def path_not_found() -> ApiError:
    return ApiError(404, "NotFound", "the server could not find the requested resource")


def already_exists(plural: str, group: str, name: str) -> ApiError:
    what = f"{plural}.{group}" if group else plural
    details = {"name": name, "group": group, "kind": plural}
    return ApiError(409, "AlreadyExists", f'{what} "{name}" already exists', details=details)


def conflict(plural: str, name: str, why: str) -> ApiError:
    message = f'Operation cannot be fulfilled on {plural} "{name}": {why}'
    return ApiError(409, "Conflict", message, details={"name": name, "kind": plural})


def apply_conflict(manager: str, paths: list[str]) -> ApiError:
    causes = [{"reason": "FieldManagerConflict", "message": f'conflict with "{manager}"', "field": p} for p in paths]
    message = f"Apply failed with {len(paths)} conflict(s): conflicts with {manager!r}: {', '.join(paths)}"
    return ApiError(409, "Conflict", message, details={"causes": causes})


def invalid(kind: str, name: str, causes: list[tuple[str, str]]) -> ApiError:
    """422 with one cause per (field path, message)."""
    listed = [{"reason": "FieldValueInvalid", "message": message, "field": path} for path, message in causes]
    text = "; ".join(f"{path}: {message}" for path, message in causes)
    return ApiError(
        422, "Invalid", f'{kind} "{name}" is invalid: {text}', details={"name": name, "kind": kind, "causes": listed}
    )


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def typed_patch_failure(path: str, why: str) -> ApiError:
    """What server-side apply answers for an unknown field or a duplicate list key: a 500, though it is our fault."""
    return ApiError(500, "InternalServerError", f"failed to create typed patch object: {path}: {why}")


def expired(message: str) -> ApiError:
    return ApiError(410, "Expired", message)


def disruption_budget(pod: str, budget: str) -> ApiError:
    return ApiError(
        429,
        "TooManyRequests",
        "Cannot evict pod as it would violate the pod's disruption budget.",
        details={
            "name": pod,
            "kind": "pods",
            "causes": [{"reason": "DisruptionBudget", "message": f"The disruption budget {budget} needs more pods"}],
        },
    )
