"""Counting writes: the API server's audit log, limited to writes and metadata.

Tests use it to show that an idle operator writes nothing. The log names who wrote (user and user agent), so writes of
Kubernetes' own controllers are told apart from those of the code under test.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [
        {"level": "Metadata", "verbs": ["create", "update", "patch", "delete", "deletecollection"]},
        {"level": "None"},
    ],
}


@dataclass(frozen=True, slots=True)
class Write:
    """One finished write request; ``code`` is the HTTP status, ``at`` the API server's time of receipt (RFC 3339)."""

    user: str
    agent: str
    verb: str
    group: str
    resource: str
    subresource: str
    namespace: str
    name: str
    code: int
    at: str
    dry_run: bool


def _write_of(event: dict[str, Any]) -> Write:
    target = event.get("objectRef", {})
    return Write(
        user=event.get("user", {}).get("username", ""),
        agent=event.get("userAgent", ""),
        verb=event.get("verb", ""),
        group=target.get("apiGroup", ""),
        resource=target.get("resource", ""),
        subresource=target.get("subresource", ""),
        namespace=target.get("namespace", ""),
        name=target.get("name", ""),
        code=event.get("responseStatus", {}).get("code", 0),
        at=event.get("requestReceivedTimestamp", ""),
        dry_run="dryRun=" in event.get("requestURI", ""),
    )


class Audit:
    """The audit log of one API server. It is written before the client gets its answer (mode blocking)."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "audit.log"
        self.policy = directory / "audit-policy.yaml"
        self.policy.write_text(json.dumps(POLICY))

    def arguments(self) -> tuple[str, ...]:
        """kube-apiserver's arguments."""
        return (
            f"--audit-policy-file={self.policy}",
            f"--audit-log-path={self.path}",
            "--audit-log-mode=blocking",
            "--audit-log-maxsize=0",
        )

    def mark(self) -> int:
        """The present end of the log, in bytes: pass it to ``since``."""
        return self.path.stat().st_size if self.path.exists() else 0

    def since(self, mark: int = 0) -> list[Write]:
        """All writes logged after ``mark``, refused ones too, in log order."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(mark)
            return [_write_of(json.loads(line)) for line in file if line.endswith(b"\n")]
