"""The HTTP face of `FakeCluster`: an aiohttp server in its own thread and event loop.

Its own loop because kopf, in the test's loop, waits five seconds at exit for every task it finds there. Streams can
be dropped, silenced or told 410 while they are open, as real networks and API servers do.
"""

import asyncio
import json
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.fakeapi import collector, errors, routes
from tests.fakeapi.cluster import APPLY_PATCH, FakeCluster, Options
from tests.fakeapi.errors import ApiError, JsonObject
from tests.fakeapi.faults import Faults, Request
from tests.fakeapi.resources import Resource
from tests.fakeapi.storage import Watch, WatchEvent

START_TIMEOUT_S = 10.0


@dataclass(slots=True)
class Seen:
    """One HTTP request as it arrived, for contract tests on what clients send."""

    method: str
    path: str
    query: Mapping[str, str]
    content_type: str
    user_agent: str
    authorization: str
    code: int = 0
    """HTTP status of the answer; 0 until it is given (a watch's comes at its end)."""


@dataclass(eq=False, slots=True)
class _Stream:
    watch: Watch
    wake: asyncio.Event
    silent: bool = False
    dropped: bool = False
    bookmark: bool = False


@dataclass(eq=False)
class FakeServer:
    """`with FakeServer(cluster) as server:` serves the cluster at `server.url` until the block ends."""

    cluster: FakeCluster
    auto_collect: bool = True
    """Run the garbage collector after every write (as a real one does, only at once)."""
    bookmark_s: float = 60.0
    port: int = 0
    """0: the system picks one; a restarted server may ask for its old port."""
    token: str = ""
    """Not empty: requests without this bearer token are answered 401."""
    faults: Faults = field(default_factory=Faults)
    seen: deque[Seen] = field(default_factory=lambda: deque(maxlen=200_000))

    def __post_init__(self) -> None:
        self._streams: list[_Stream] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fake-api", daemon=True)
        self._started = threading.Event()
        self._stop = asyncio.Event()

    def __enter__(self) -> "FakeServer":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Raises: TimeoutError, it didn't come up (the port is taken, for example)."""
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            raise TimeoutError(f"fake API server did not start within {START_TIMEOUT_S} s")

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(START_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        app = web.Application(client_max_size=4 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        await site.start()
        self.port = runner.addresses[0][1]
        self._started.set()
        await self._stop.wait()
        self._drop_all("*")
        await runner.cleanup()

    # Watch streams

    def drop_watches(self, plural: str = "*") -> None:
        """Close open streams; the client has to connect again."""
        self._loop.call_soon_threadsafe(self._drop_all, plural)

    def silence_watches(self, plural: str = "*") -> None:
        """Open streams stay open and say nothing more (a half-dead connection); new ones are fine."""
        self._loop.call_soon_threadsafe(self._mark, plural, "silent")

    def send_bookmarks(self, plural: str = "*") -> None:
        self._loop.call_soon_threadsafe(self._mark, plural, "bookmark")

    def expire_watches(self, plural: str = "*") -> None:
        """Forget the history and send ERROR 410 into open streams: what happened meanwhile is never told."""
        with self.cluster.lock:
            self.cluster.storage.compact()
            for stream in list(self._streams):
                if plural in ("*", stream.watch.resource.plural):
                    stream.watch.take()
                    self.cluster.storage.close(stream.watch)
                    stream.watch.put(WatchEvent("ERROR", errors.expired("too old resource version").body()))

    def watching(self, plural: str) -> int:
        """Open streams of a resource."""
        return sum(stream.watch.resource.plural == plural for stream in list(self._streams))

    def _mark(self, plural: str, attribute: str) -> None:
        for stream in self._streams:
            if plural in ("*", stream.watch.resource.plural):
                setattr(stream, attribute, True)
                stream.wake.set()

    def _drop_all(self, plural: str) -> None:
        self._mark(plural, "dropped")

    # Requests

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(
            request.method,
            request.path,
            dict(request.query),
            request.content_type,
            request.headers.get("User-Agent", ""),
            request.headers.get("Authorization", ""),
        )
        self.seen.append(seen)
        try:
            response = await self._answer(request)
        except ApiError as error:
            seen.code = error.code
            return web.json_response(error.body(), status=error.code, headers=error.headers)
        seen.code = response.status
        return response

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            raise ApiError(401, "Unauthorized", "Unauthorized")
        plain = {"/version": routes.VERSION, "/openid/v1/jwks": routes.JWKS}.get(request.path)
        plain = plain or routes.discovery(self.cluster.registry, request.path)
        if plain is not None:
            return web.json_response(plain)
        if request.path in ("/readyz", "/livez", "/healthz"):
            return web.Response(text="ok")
        route = routes.parse(request.path)
        if route is None:
            raise errors.path_not_found()
        resource = self.cluster.resource(route.group, route.plural)
        if resource.version != route.version:
            raise errors.path_not_found()
        if route.subresource and route.subresource not in resource.subresources:
            raise errors.path_not_found()
        asked = Request(_verb(request, route), route.plural, route.subresource, route.namespace, route.name)
        fault = self.faults.take(asked)
        body = await _body(request)
        if fault and fault.latency_s:
            await asyncio.sleep(fault.latency_s)
        if fault is None or fault.after or not (fault.reset or fault.error):
            response = await self._carry_out(request, resource, route, asked.verb, body)
        if fault and fault.reset:
            assert request.transport is not None
            request.transport.abort()
            raise ApiError(500, "InternalError", "connection reset on order")
        if fault and fault.error:
            raise fault.error
        return response

    async def _carry_out(
        self, request: web.Request, resource: Resource, route: routes.Route, verb: str, body: Any
    ) -> web.StreamResponse:
        if verb == "watch":
            return await self._watch(request, resource, route)
        options = _options(request)
        with self.cluster.lock:
            code, answer = self._dispatch(request, resource, route, verb, body, options)
            if self.auto_collect and verb not in ("get", "list"):
                collector.collect_all(self.cluster)
        return web.json_response(answer, status=code)

    def _dispatch(
        self, request: web.Request, resource: Resource, route: routes.Route, verb: str, body: Any, options: Options
    ) -> tuple[int, JsonObject]:
        cluster, at = self.cluster, (route.namespace, route.name)
        match verb:
            case "get":
                return 200, cluster.with_managed_fields(cluster.get(resource, *at))
            case "list":
                return 200, self._list(request, resource, route)
            case "create" if route.subresource == "eviction":
                cluster.evict(*at, body, options)
                return 201, {"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}
            case "create":
                return 201, cluster.with_managed_fields(cluster.create(resource, route.namespace, body, options))
            case "update":
                changed = cluster.update(resource, *at, body, subresource=route.subresource, options=options)
                return 200, cluster.with_managed_fields(changed)
            case "patch":
                existed = cluster.storage.get(resource, at) is not None
                kind = request.content_type
                patched = cluster.patch(
                    resource, *at, body, patch_type=kind, subresource=route.subresource, options=options
                )
                code = 201 if kind == APPLY_PATCH and not existed else 200
                return code, cluster.with_managed_fields(patched)
            case "delete":
                last, gone = cluster.delete(resource, *at, body, options)
                if gone and resource.kind not in ("Pod", "Service"):
                    details = {"name": route.name, "kind": resource.plural, "uid": last["metadata"]["uid"]}
                    return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success", "details": details}
                return 200, last
        raise ApiError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def _list(self, request: web.Request, resource: Resource, route: routes.Route) -> JsonObject:
        query = request.query
        from_cache = query.get("resourceVersion") == "0"  # the watch cache ignores `limit`
        page = self.cluster.list_page(
            resource,
            route.namespace,
            labels=query.get("labelSelector", ""),
            fields=query.get("fieldSelector", ""),
            limit=0 if from_cache else int(query.get("limit") or 0),
            token=query.get("continue", ""),
        )
        items = [self.cluster.with_managed_fields(obj) for obj in page.items]
        if not resource.is_custom:  # items of core kinds carry neither
            items = [{k: v for k, v in obj.items() if k not in ("kind", "apiVersion")} for obj in items]
        metadata: JsonObject = {"resourceVersion": str(page.rv)}
        if page.next_token:
            metadata |= {"continue": page.next_token, "remainingItemCount": page.remaining}
        kind = f"{resource.kind}List"
        return {"kind": kind, "apiVersion": resource.api_version, "metadata": metadata, "items": items}

    async def _watch(self, request: web.Request, resource: Resource, route: routes.Route) -> web.StreamResponse:
        query = request.query
        since = query.get("resourceVersion", "")
        wake = asyncio.Event()
        fields = query.get("fieldSelector", "") + (f"metadata.name={route.name}" if route.name else "")
        watch = self.cluster.watch(
            resource,
            route.namespace,
            labels=query.get("labelSelector", ""),
            fields=fields,
            from_rv=int(since) if since not in ("", "0") else None,
            notify=lambda: _wake(self._loop, wake),
        )
        stream = _Stream(watch, wake)
        self._streams.append(stream)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        deadline = self._loop.time() + float(query.get("timeoutSeconds") or 3600)
        bookmarks = query.get("allowWatchBookmarks") in ("true", "1", "True")
        try:
            await response.prepare(request)
            await self._pump(stream, response, deadline, bookmarks)
        except ConnectionResetError:
            pass
        finally:
            self.cluster.storage.close(watch)
            self._streams.remove(stream)
        return response

    async def _pump(self, stream: _Stream, response: web.StreamResponse, deadline: float, bookmarks: bool) -> None:
        next_bookmark = self._loop.time() + self.bookmark_s
        while not stream.dropped and self._loop.time() < deadline:
            with self.cluster.lock:
                stream.wake.clear()
                events = [] if stream.silent else stream.watch.take()
                lines = [self._line(event) for event in events]
                due = stream.bookmark or self._loop.time() >= next_bookmark
                if bookmarks and due and not stream.silent:
                    lines.append(self._bookmark(stream.watch.resource))
                    next_bookmark = self._loop.time() + self.bookmark_s
                stream.bookmark = False
            if lines:
                await response.write(b"".join(lines))
            if any(event.type == "ERROR" for event in events):
                return
            try:
                await asyncio.wait_for(stream.wake.wait(), min(deadline, next_bookmark) - self._loop.time())
            except TimeoutError:
                continue

    def _line(self, event: WatchEvent) -> bytes:
        obj = event.object if event.type == "ERROR" else self.cluster.with_managed_fields(event.object)
        return json.dumps({"type": event.type, "object": obj}).encode() + b"\n"

    def _bookmark(self, resource: Resource) -> bytes:
        metadata = {"resourceVersion": str(self.cluster.storage.rv), "creationTimestamp": None}
        obj = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}
        return json.dumps({"type": "BOOKMARK", "object": obj}).encode() + b"\n"


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    loop.call_soon_threadsafe(event.set)


def _verb(request: web.Request, route: routes.Route) -> str:
    if request.method == "GET":
        if request.query.get("watch") in ("true", "1", "True"):
            return "watch"
        return "get" if route.name else "list"
    return {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}.get(request.method, "")


async def _body(request: web.Request) -> Any:
    data = await request.read()
    if not data:
        return None
    try:
        return json.loads(data)
    except ValueError as error:
        raise errors.bad_request(f"the body is not JSON: {error}") from error


def _options(request: web.Request) -> Options:
    query = request.query
    agent = request.headers.get("User-Agent", "unknown").split("/")[0]
    return Options(
        manager=query.get("fieldManager") or agent,
        dry_run=query.get("dryRun") == "All",
        strict=query.get("fieldValidation") == "Strict",
        force=query.get("force") in ("true", "1"),
    )
