"""The API client: our verbs, error classes and retries on the transport of `kubernetes.aio`.

Configuration, authentication and TLS are the library's; bodies are raw dicts (its models cost eight times
`json.loads`). Invariants: every call has a time limit; every error is one of the classes of `runtime.errors` and
names verb, resource and object; no verb here can touch an object that another owner holds:

- `create` is a POST (409 = `AlreadyExists`);
- `apply(uid=None)` creates and never changes an existing object (`AlreadyExists`): the API server compares
  `metadata.resourceVersion` "1" with the live one, and no stored object ever has that version (etcd counts from 2);
- `apply(uid=...)` changes only the object with that UID (`Replaced` if it is gone or another one).
"""

import asyncio
import json
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final, Protocol

import aiohttp
from kubernetes.aio import config as kube_config
from kubernetes.aio.client import ApiClient, Configuration

from sluice import __version__
from sluice.api import names
from sluice.runtime.errors import (
    AlreadyExists,
    Expired,
    KubeError,
    NotFound,
    Replaced,
    Stale,
    Throttled,
    Unauthorized,
    Unavailable,
    classify,
)
from sluice.runtime.kinds import ACCESS_REVIEW, LEASE, POD, Kind

Object = dict[str, Any]
_Query = tuple[tuple[str, str], ...]

USER_AGENT: Final = f"sluice-operator/{__version__}"
CONCURRENCY: Final = 32
"""Requests of ours in flight; no rate limit beside it, the API server's priority and fairness says 429."""
TRIES: Final = 3
THROTTLE_TRIES: Final = 6
PAGE: Final = 500
LIST_RESTARTS: Final = 3
TIMEOUT_S: Final = 30.0
CONNECT_TIMEOUT_S: Final = 5.0
ABSENT_VERSION: Final = "1"

MERGE_PATCH: Final = "application/merge-patch+json"
STRATEGIC_PATCH: Final = "application/strategic-merge-patch+json"
APPLY_PATCH: Final = "application/apply-patch+yaml"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as the API server's audit log and managedFields name it."""

    user_agent: str
    field_manager: str


OPERATOR: Final = Caller(USER_AGENT, names.FIELD_MANAGER)


@dataclass(frozen=True, slots=True)
class ObjectList:
    items: list[Object]
    """With `kind` and `apiVersion` set, which the API server leaves out in lists of core kinds."""
    resource_version: str


class RequestObserver(Protocol):
    """Told of every answered request; `code` is the HTTP status, 0 if there was no answer."""

    def __call__(self, verb: str, resource: str, code: int, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class _Call:
    verb: str
    method: str
    kind: Kind
    namespace: str = ""
    name: str = ""
    subresource: str = ""
    query: _Query = ()
    body: Any = None
    content_type: str = "application/json"
    accept: str = "application/json"

    @property
    def path(self) -> str:
        return self.kind.path(self.namespace, self.name, self.subresource)


class Client:
    """Verbs on API objects; safe to use from many tasks of one event loop."""

    def __init__(
        self,
        api: ApiClient,
        connector: aiohttp.BaseConnector,
        *,
        caller: Caller = OPERATOR,
        reload: Callable[[], Awaitable[None]] | None = None,
        on_request: RequestObserver | None = None,
        timeout_s: float = TIMEOUT_S,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.api = api
        self.connector = connector
        self.api.user_agent = caller.user_agent
        self._manager = caller.field_manager
        self._reload = reload
        self._on_request = on_request
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        self._rng = rng or random.Random()
        self._sleep = sleep
        self._slots = asyncio.Semaphore(CONCURRENCY)

    @property
    def server(self) -> str:
        """Base address of the API server."""
        return str(self.api.configuration.host)

    async def authorization(self) -> str | None:
        """Value of the Authorization header as of now (token files are re-read); None with client certificates."""
        setting = (await self.api.configuration.auth_settings()).get("BearerToken")
        return None if setting is None else str(setting["value"])

    async def relogin(self) -> None:
        """Read the credentials again after a 401."""
        if self._reload is not None:
            await self._reload()

    # Reading

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        """Raises: NotFound, Forbidden, Unavailable, Throttled."""
        return await self._call(_Call("get", "GET", kind, namespace, name))

    async def pages(
        self, kind: Kind, namespace: str = "", *, selector: str | None = None, field_selector: str = ""
    ) -> AsyncIterator[ObjectList]:
        """The pages of one consistent LIST; `selector` None means the kind's own.

        Paged also for healing: one answer with 4,000 pods would cost 150 MB for a moment and block the loop.

        Raises: NotFound (kind not served), Forbidden, Expired (a page token got too old), Unavailable, Throttled.
        """
        labels = kind.selector if selector is None else selector
        query: _Query = (("limit", str(PAGE)),)
        query += (("labelSelector", labels),) if labels else ()
        query += (("fieldSelector", field_selector),) if field_selector else ()
        token = ""
        while True:
            page = (*query, ("continue", token)) if token else query
            answer = await self._call(_Call("list", "GET", kind, namespace, query=page))
            items = answer.get("items") or []
            for item in items:
                item.setdefault("kind", kind.name)
                item.setdefault("apiVersion", kind.api_version)
            yield ObjectList(items, answer["metadata"].get("resourceVersion", ""))
            token = answer["metadata"].get("continue") or ""
            if not token:
                return

    async def list(
        self, kind: Kind, namespace: str = "", *, selector: str | None = None, field_selector: str = ""
    ) -> ObjectList:
        """All objects of a kind at once, as `pages`; an expired page token restarts the list, at most twice."""
        for _ in range(LIST_RESTARTS - 1):
            try:
                return await self._list_once(kind, namespace, selector, field_selector)
            except Expired:
                continue
        return await self._list_once(kind, namespace, selector, field_selector)

    async def _list_once(self, kind: Kind, namespace: str, selector: str | None, field_selector: str) -> ObjectList:
        items = []
        version = ""
        async for page in self.pages(kind, namespace, selector=selector, field_selector=field_selector):
            items += page.items
            version = page.resource_version
        return ObjectList(items, version)

    async def ask_pod(self, namespace: str, name: str, port: int, path: str) -> Object:
        """GET a JSON document from a pod's port through the API server (`pods/proxy`); tried once.

        Raises: Forbidden, NotFound, Unavailable (the API server can't reach the pod), Throttled, Unauthorized, Invalid.
        """
        call = _Call("get", "GET", POD, namespace, f"{name}:{port}", f"proxy/{path}")
        return await self._send(call, call.path)

    async def api_resources(self, group: str, version: str) -> set[str]:
        """Plural names (and `plural/subresource`) that the API server serves; empty if it lacks the group."""
        kind = Kind("APIResourceList", group, version, "", namespaced=False)
        try:
            answer = await self._call(_Call("discover", "GET", kind))
        except NotFound:
            return set()
        return {resource["name"] for resource in answer.get("resources", [])}

    async def signing_keys(self) -> str:
        """The cluster's public ServiceAccount signing keys, a JSON Web Key Set as text."""
        kind = Kind("JSONWebKeySet", "", "v1", "jwks", namespaced=False)
        call = _Call("get", "GET", kind, accept="application/jwk-set+json, application/json")
        answer = await self._call(call, path="/openid/v1/jwks")
        return json.dumps({"keys": answer["keys"]}, sort_keys=True)

    async def is_allowed(self, verb: str, kind: Kind, namespace: str = "", subresource: str = "") -> bool:
        """Ask the API server whether we may (SelfSubjectAccessReview); an empty namespace means all of them."""
        attributes = {"verb": verb, "group": kind.group, "resource": kind.plural}
        attributes |= {"subresource": subresource} if subresource else {}
        attributes |= {"namespace": namespace} if namespace else {}
        body = {
            "apiVersion": ACCESS_REVIEW.api_version,
            "kind": ACCESS_REVIEW.name,
            "spec": {"resourceAttributes": attributes},
        }
        answer = await self._call(_Call("create", "POST", ACCESS_REVIEW, body=body))
        return bool(answer.get("status", {}).get("allowed"))

    # Writing

    async def create(self, kind: Kind, body: Mapping[str, Any]) -> Object:
        """POST. Raises: AlreadyExists, Invalid, Forbidden, QuotaExceeded, NotFound (namespace), Unavailable."""
        query = (("fieldManager", self._manager), ("fieldValidation", "Strict"))
        return await self._call(
            _Call("create", "POST", kind, body["metadata"].get("namespace", ""), query=query, body=body)
        )

    async def apply(
        self, kind: Kind, body: Mapping[str, Any], *, uid: str | None = None, dry_run: bool = False
    ) -> Object:
        """Server-side apply of the full desired object, forced, manager `sluice`.

        Without `uid` it only creates (`AlreadyExists` if something stands at the name, whoever owns it); with
        `uid` it only changes that object (`Replaced` if it is gone or another stands there).
        """
        guard = {"resourceVersion": ABSENT_VERSION} if uid is None else {"uid": uid}
        guarded = {**body, "metadata": {**body["metadata"], **guard}}
        try:
            return await self._apply(kind, guarded, "", dry_run=dry_run)
        except Stale as error:
            if uid is None:
                raise AlreadyExists.like(error) from error
            raise

    async def apply_status(self, kind: Kind, body: Mapping[str, Any]) -> Object:
        """Server-side apply on `/status`: `body` has all status fields that we own and metadata.resourceVersion.

        Raises: Stale (the object changed since), NotFound, Invalid, Forbidden, Unavailable.
        """
        return await self._apply(kind, body, "status")

    async def _apply(self, kind: Kind, body: Mapping[str, Any], subresource: str, *, dry_run: bool = False) -> Object:
        query = [("fieldManager", self._manager), ("force", "true"), ("fieldValidation", "Strict")]
        if dry_run:
            query.append(("dryRun", "All"))
        meta = body["metadata"]
        return await self._call(
            _Call(
                "apply",
                "PATCH",
                kind,
                meta.get("namespace", ""),
                meta["name"],
                subresource,
                query=tuple(query),
                body=body,
                content_type=APPLY_PATCH,
            )
        )

    async def patch(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        patch: Mapping[str, Any],
        *,
        uid: str = "",
        subresource: str = "",
        strategic: bool = False,
    ) -> Object:
        """Merge patch (or strategic merge: lists keep the entries of others), guarded by `metadata.uid` if given.

        Conditions of a pod are set with `subresource="status", strategic=True`; a plain merge patch would wipe the
        kubelet's. Raises: Replaced (another UID), NotFound, Invalid, Forbidden, Unavailable.
        """
        if uid:
            patch = {**patch, "metadata": {**patch.get("metadata", {}), "uid": uid}}
        content_type = STRATEGIC_PATCH if strategic else MERGE_PATCH
        query = (("fieldManager", self._manager), ("fieldValidation", "Strict"))
        return await self._call(
            _Call("patch", "PATCH", kind, namespace, name, subresource, query, patch, content_type=content_type)
        )

    async def replace(self, kind: Kind, body: Mapping[str, Any]) -> Object:
        """PUT with the body's resourceVersion. Raises: Stale, NotFound, Forbidden, Unavailable."""
        meta = body["metadata"]
        return await self._call(
            _Call("update", "PUT", kind, meta.get("namespace", ""), meta["name"], body=body, query=())
        )

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str, grace_s: int | None = None, foreground: bool = False
    ) -> Object | None:
        """Delete the object with this UID; None when it is gone already (404, or another UID at the name).

        Returns the object if the API server sent it (it may live on, with `metadata.deletionTimestamp`), else None.
        """
        body: Object = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Foreground" if foreground else "Background",
        }
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            answer = await self._call(_Call("delete", "DELETE", kind, namespace, name, body=body))
        except (NotFound, Replaced):
            return None
        return answer if answer.get("kind") == kind.name else None

    async def evict(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        """Evict a pod. Raises: DisruptionRefused (a PodDisruptionBudget says no; not retried), Unavailable."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }
        try:
            await self._call(_Call("evict", "POST", kind, namespace, name, "eviction", body=body))
        except (NotFound, Replaced):
            return

    # Transport

    async def _call(self, call: _Call, *, path: str = "") -> Object:
        """Send with retries: 3 tries on connection errors, time-outs and 5xx; 429 as the server says; 401 once.

        All verbs are retried, POST included: names are deterministic, so a repeated create ends in AlreadyExists.
        """
        tries = throttles = 0
        logged_in_again = False
        while True:
            try:
                # Requests that hang must not keep the Lease from being renewed.
                async with nullcontext() if call.kind is LEASE else self._slots:
                    return await self._send(call, path or call.path)
            except Throttled as error:
                throttles += 1
                if throttles >= THROTTLE_TRIES:
                    raise
                wait_s = error.retry_after_s
            except Unavailable:
                tries += 1
                if tries >= TRIES:
                    raise
                wait_s = 0.1 * 4**tries * self._rng.uniform(0.5, 1.0)
            except Unauthorized:
                if logged_in_again:
                    raise
                logged_in_again = True
                await self.relogin()
                continue
            await self._sleep(wait_s)

    async def _send(self, call: _Call, path: str) -> Object:
        started = monotonic()
        code = 0
        try:
            method, url, headers, _, _ = await self.api.param_serialize(
                call.method,
                path,
                query_params=list(call.query),
                header_params={"Accept": call.accept, "Content-Type": call.content_type},
                auth_settings=["BearerToken"],
            )
            # The body goes past param_serialize, whose model conversion would copy it whole.
            response = await self.api.call_api(
                method, url, header_params=headers, body=call.body, _request_timeout=self._timeout
            )
            code = response.status
            data = await response.read()  # type: ignore[no-untyped-call]  # kubernetes.aio is untyped
        except (aiohttp.ClientError, TimeoutError, OSError, kube_config.ConfigException) as error:
            message = str(error) or type(error).__name__
            raise Unavailable(call.verb, call.kind.resource, _name(call), 0, "NoAnswer", message) from error
        finally:
            if self._on_request is not None:
                self._on_request(call.verb, call.kind.resource, code, monotonic() - started)
        if 200 <= code < 300:
            try:
                answer: Object = json.loads(data)
            except ValueError as error:
                raise Unavailable(
                    call.verb, call.kind.resource, _name(call), code, "NotJSON", f"answer is not JSON: {error}"
                ) from error
            return answer
        raise classify(call.verb, call.kind.resource, _name(call), code, response.headers, data, self._rng)


def _name(call: _Call) -> str:
    name = call.name or (call.body or {}).get("metadata", {}).get("name", "")
    return f"{call.namespace}/{name}" if call.namespace else name


async def load_configuration(kubeconfig: Path | None, context: str | None, into: Configuration) -> None:
    """Fill `into` from the named kubeconfig, or without one from the pod's ServiceAccount.

    No other file is looked at: neither `$KUBECONFIG` nor `~/.kube/config`.

    Raises:
        kubernetes.aio.config.ConfigException: no usable configuration there.
    """
    if kubeconfig is None:
        kube_config.load_incluster_config(into)  # type: ignore[no-untyped-call]  # kubernetes.aio is untyped
    else:
        await kube_config.load_kube_config(  # type: ignore[no-untyped-call]  # kubernetes.aio is untyped
            config_file=str(kubeconfig), context=context, client_configuration=into, persist_config=False
        )


@asynccontextmanager
async def connect(
    kubeconfig: Path | None = None,
    context: str | None = None,
    *,
    caller: Caller = OPERATOR,
    on_request: RequestObserver | None = None,
    timeout_s: float = TIMEOUT_S,
) -> AsyncIterator[Client]:
    """A client for the named kubeconfig and context, or for the pod's own ServiceAccount; closes its connections.

    Raises:
        kubernetes.aio.config.ConfigException: no usable configuration.
    """
    configuration = Configuration()
    await load_configuration(kubeconfig, context, configuration)
    async with connect_with(
        configuration,
        caller=caller,
        reload=lambda: load_configuration(kubeconfig, context, configuration),
        on_request=on_request,
        timeout_s=timeout_s,
    ) as client:
        yield client


@asynccontextmanager
async def connect_with(
    configuration: Configuration,
    *,
    caller: Caller = OPERATOR,
    reload: Callable[[], Awaitable[None]] | None = None,
    on_request: RequestObserver | None = None,
    timeout_s: float = TIMEOUT_S,
) -> AsyncIterator[Client]:
    """A client for a ready `kubernetes.aio` configuration (tests: `Configuration(host="http://127.0.0.1:1234")`)."""
    api = ApiClient(configuration)
    tls: ssl.SSLContext = api.rest_client.ssl_context
    # limit=0: watches hold connections for ever; aiohttp's 100 would starve everybody else once they reach it.
    connector = aiohttp.TCPConnector(limit=0, ssl=tls)
    configuration.client_session_kwargs = {"connector": connector, "trust_env": False}
    try:
        yield Client(api, connector, caller=caller, reload=reload, on_request=on_request, timeout_s=timeout_s)
    finally:
        await api.close()  # type: ignore[no-untyped-call]  # kubernetes.aio is untyped
        await connector.close()


__all__ = ["Caller", "Client", "KubeError", "Object", "ObjectList", "RequestObserver", "connect", "connect_with"]
