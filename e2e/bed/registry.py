"""The read half of the distribution API over an image store, so that charts keep real image names on the bed.

containerd is told to ask this registry for *every* host and sends the host as ``?ns=HOST``; a request without it means
the address itself, which is the ``Host`` header. Nothing is written through it, and names added to the store later are
served at once.

Tests count resolutions and let a name fail or answer late: this is how ErrImagePull and slow weights are made.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections import Counter
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from e2e.bed.oci import INDEX, MANIFEST, Descriptor, ImageError, ImageStore, Reference

_ROUTE = re.compile(r"/v2/(?P<name>.+)/(?P<kind>manifests|blobs)/(?P<version>[^/]+)")
# An idle connection of containerd's pool holds one thread; 30 s is longer than any pause within a pull.
_IDLE_TIMEOUT_S = 30


class Registry:
    """Serves a store on a *listening* socket from threads of its own, until ``close``.

    The caller makes the socket, because it may belong to another network namespace.
    """

    def __init__(self, store: ImageStore, listener: socket.socket) -> None:
        self.store = store
        self._changed = threading.Condition()
        self._pulls: Counter[str] = Counter()
        self._failing: dict[str, int] = {}
        self._delays: dict[str, float] = {}
        self._closed = False
        self._server = _Server(listener, self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="bed-registry", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """TCP port of the socket."""
        port: int = self._server.socket.getsockname()[1]
        return port

    def pulls(self, ref: str) -> int:
        """How often a client asked what a name stands for.

        Once per pull by containerd, also if it has the layers; more often when the answer is an error: it asks again.
        """
        with self._changed:
            return self._pulls[str(Reference.parse(ref))]

    def fail(self, ref: str, status: int = HTTPStatus.SERVICE_UNAVAILABLE) -> None:
        """Answer a name with an HTTP error from now on, until ``restore``."""
        with self._changed:
            self._failing[str(Reference.parse(ref))] = status

    def delay(self, ref: str, seconds: float) -> None:
        """Hold answers for a name so long from when they are asked; 0 lets those waiting go at once."""
        with self._changed:
            self._delays[str(Reference.parse(ref))] = seconds
            self._changed.notify_all()

    def restore(self, ref: str) -> None:
        """End ``fail`` and ``delay`` of a name."""
        with self._changed:
            self._failing.pop(str(Reference.parse(ref)), None)
        self.delay(ref, 0)

    def close(self) -> None:
        """Stop serving and close the socket; a connection that a client keeps open gets no further answer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def admit(self, ref: Reference) -> int:
        """Count a request for a name and hold it as told; 200 or the status of the failure."""
        name, asked = str(ref), time.monotonic()
        with self._changed:
            self._pulls[name] += 1
            while not self._closed:
                left = asked + self._delays.get(name, 0) - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return self._failing.get(name, HTTPStatus.OK)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, registry: Registry) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()  # the base class always makes one
        self.socket = listener
        self.registry = registry


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_TIMEOUT_S
    server: _Server

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Silent: pulls are counted, and failures are seen by containerd."""

    def _answer(self) -> None:
        if self.server.registry.closed:
            self.close_connection = True
            return
        url = urlsplit(self.path)
        if url.path in ("/v2", "/v2/"):
            self._send(HTTPStatus.OK, b"{}", "application/json")
            return
        route = _ROUTE.fullmatch(url.path)
        if route is None:
            self._refuse(HTTPStatus.NOT_FOUND, "UNSUPPORTED", f"no such path: {url.path}")
            return
        domain = parse_qs(url.query).get("ns", [self.headers.get("Host", "localhost")])[0]
        try:
            if route["kind"] == "blobs":
                self._send_blob(route["version"])
            else:
                separator = "@" if ":" in route["version"] else ":"
                self._send_manifest(Reference.parse(f"{domain}/{route['name']}{separator}{route['version']}"))
        except ImageError as error:
            self._refuse(HTTPStatus.NOT_FOUND, "NAME_UNKNOWN", str(error))

    def _send_manifest(self, ref: Reference) -> None:
        registry = self.server.registry
        by_digest = ":" in ref.version
        # containerd resolves by HEAD, whatever the name, then gets by digest: the second is not another pull.
        if not by_digest or self.command == "HEAD":
            status = registry.admit(ref)
            if status != HTTPStatus.OK:
                self._refuse(status, "UNAVAILABLE", f"{ref} fails because a test asked for it")
                return
        found = registry.store.resolve(str(ref))
        if found is None and by_digest and registry.store.blob(ref.version).exists():
            found = self._nested(ref.version)
        if found is None:
            self._refuse(HTTPStatus.NOT_FOUND, "MANIFEST_UNKNOWN", f"no image {ref}")
            return
        data = registry.store.blob(found.digest).read_bytes()
        self._send(HTTPStatus.OK, data, found.media_type, found.digest)

    def _nested(self, digest: str) -> Descriptor:
        """A manifest inside an index has no name of its own; its media type is in its content."""
        path = self.server.registry.store.blob(digest)
        document = json.loads(path.read_bytes())
        fallback = INDEX if "manifests" in document else MANIFEST
        return Descriptor(digest, path.stat().st_size, document.get("mediaType", fallback))

    def _send_blob(self, digest: str) -> None:
        try:
            content = self.server.registry.store.blob(digest).open("rb")
        except FileNotFoundError:
            self._refuse(HTTPStatus.NOT_FOUND, "BLOB_UNKNOWN", f"no blob {digest}")
            return
        with content:
            size = content.seek(0, 2)
            content.seek(0)
            self._head(HTTPStatus.OK, size, "application/octet-stream", digest)
            if self.command == "GET":
                self.wfile.flush()
                self.connection.sendfile(content)

    def _send(self, status: int, data: bytes, media_type: str, digest: str = "") -> None:
        self._head(status, len(data), media_type, digest)
        if self.command == "GET":
            self.wfile.write(data)

    def _head(self, status: int, size: int, media_type: str, digest: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(size))
        if digest:
            self.send_header("Docker-Content-Digest", digest)
        self.end_headers()

    def _refuse(self, status: int, code: str, message: str) -> None:
        body = json.dumps({"errors": [{"code": code, "message": message}]}).encode()
        self._send(status, body, "application/json")
