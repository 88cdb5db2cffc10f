"""A bare synchronous client for the bed's own API server: what bringing a cluster up and looking at it needs.

Not for the code under test. One connection per request: safe in any thread, and it survives restarts of the server.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from e2e.bed.errors import BedError
from e2e.bed.pki import KeyPair

Object = dict[str, Any]
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"


class RefusedError(BedError):
    """The API server answered with an error status."""

    def __init__(self, method: str, path: str, status: int, answer: Any) -> None:
        message = answer.get("message", "") if isinstance(answer, dict) else str(answer)[:300]
        super().__init__(f"{method} {path}: {status} {message}")
        self.status = status


class Api:
    """Requests with the bed's admin certificate. Network failures come out as OSError."""

    def __init__(self, server: str, ca: Path, client: KeyPair, *, timeout_s: float = 10.0) -> None:
        parts = urlsplit(server)
        if parts.hostname is None or parts.port is None:
            raise BedError(f"{server!r} is not https://HOST:PORT")
        self._host, self._port, self._timeout_s = parts.hostname, parts.port, timeout_s
        self._context = ssl.create_default_context(cafile=str(ca))
        self._context.load_cert_chain(client.certificate, client.key)

    def request(
        self, method: str, path: str, body: object = None, *, content_type: str = "application/json"
    ) -> tuple[int, Any]:
        """Status and decoded body (JSON, else text)."""
        connection = http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=self._context)
        try:
            data = None if body is None else json.dumps(body).encode()
            headers: Mapping[str, str] = {"Content-Type": content_type} if data is not None else {}
            connection.request(method, path, body=data, headers=dict(headers))
            response = connection.getresponse()
            text = response.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"{method} {path}: {error!r}") from error
        finally:
            connection.close()
        if "json" in (response.getheader("Content-Type") or ""):
            return response.status, json.loads(text)
        return response.status, text.decode(errors="replace")

    def _checked(self, method: str, path: str, body: object = None, *, content_type: str = "application/json") -> Any:
        status, answer = self.request(method, path, body, content_type=content_type)
        if status >= 300:
            raise RefusedError(method, path, status, answer)
        return answer

    def get(self, path: str) -> Any:
        """The decoded body; RefusedError unless 2xx."""
        return self._checked("GET", path)

    def create(self, path: str, body: Object) -> Object:
        """POST; an object that exists already is a RefusedError with status 409."""
        answer: Object = self._checked("POST", path, body)
        return answer

    def patch(self, path: str, body: object, content_type: str = MERGE_PATCH) -> Object:
        """PATCH, merge patch unless told otherwise."""
        answer: Object = self._checked("PATCH", path, body, content_type=content_type)
        return answer

    def delete(self, path: str) -> None:
        """DELETE; already gone is fine."""
        status, answer = self.request("DELETE", path)
        if status >= 300 and status != 404:
            raise RefusedError("DELETE", path, status, answer)

    def is_ready(self) -> bool:
        """Whether ``/readyz`` says ok. No connection is "not ready"."""
        try:
            status, _ = self.request("GET", "/readyz")
        except OSError:
            return False
        return status == 200
