"""Everything that knows kopf: it is our event source, nothing more.

What kopf would keep (indices, memos, annotations, progress) is ours or does not exist. Rules that this module keeps,
each against a behaviour of kopf 1.45 that was measured:
- handlers return None and never touch `patch`: a return value is PATCHed into the object's status;
- handlers only hand the event on: an exception in one is logged and the event is lost;
- own diff-base storage: the default copies every body twice per event;
- own finalizer name: kopf removes the one of this name from every object it sees;
- every login makes a new session on the shared connector: kopf closes the session it got and refuses it afterwards.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import aiohttp
import kopf

from sluice.api import names
from sluice.runtime.kinds import Kind
from sluice.runtime.kube import USER_AGENT, Client

EventHandler = Callable[[Kind, str | None, dict[str, Any]], None]
"""(kind, ADDED | MODIFIED | DELETED | None for an object found by listing, the object)."""

ERROR_BACKOFFS_S = (1, 2, 5, 10, 20, 30, 60, 60)
"""188 s in all, which survives the upgrade of a control plane; after that kopf ends the process."""


class NoDiffBase(kopf.DiffBaseStorage):
    """Keeps nothing: we never ask kopf for differences."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None) -> kopf.BodyEssence:
        del body, extra_fields
        return kopf.BodyEssence({})

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        del body
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        del body, patch, essence


def make_settings(watched: Iterable[Kind], *, namespaced: bool) -> kopf.OperatorSettings:
    """The settings; `namespaced` turns off what needs rights on CRDs and namespaces."""
    settings = kopf.OperatorSettings()
    settings.persistence.diffbase_storage = NoDiffBase()
    settings.persistence.finalizer = f"kopf.{names.GROUP}/unused"
    for kind in watched:
        if kind.selector:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = kind.selector
    settings.watching.chunk_size = 500
    settings.queueing.worker_limit = None  # a limit throttles the start to limit / idle_timeout objects a second
    settings.queueing.idle_timeout = 1
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.networking.enforce_retry_after = True
    settings.networking.error_backoffs = ERROR_BACKOFFS_S
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = namespaced
    settings.execution.max_workers = 1
    return settings


def make_registry(client: Client, watched: Iterable[Kind], on_event: EventHandler) -> kopf.OperatorRegistry:
    """One login and one event handler per kind; selectors are (group, version, plural), never a bare name."""
    registry = kopf.OperatorRegistry()
    logins = 0

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        nonlocal logins
        logins += 1
        if logins > 1:  # kopf was refused with the credentials it had
            await client.relogin()
        return kopf.AiohttpSession(server=client.server, aiohttp_session=new_session(client))

    for kind in watched:
        _register(registry, kind, on_event)
    return registry


def _register(registry: kopf.OperatorRegistry, kind: Kind, on_event: EventHandler) -> None:
    @kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=f"watch-{kind.plural}")
    async def watch(event: Mapping[str, Any], **_: Any) -> None:
        obj = event["object"]
        if "kind" not in obj:
            obj = {**obj, "kind": kind.name, "apiVersion": kind.api_version}
        on_event(kind, event["type"], obj)


def new_session(client: Client) -> aiohttp.ClientSession:
    """A session on the client's connector that survives being closed; the token is looked up for each request."""

    async def authorize(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        value = await client.authorization()
        if value is not None:
            request.headers["Authorization"] = value
        return await handler(request)

    return aiohttp.ClientSession(
        connector=client.connector,
        connector_owner=False,
        trust_env=False,
        read_bufsize=2**21,  # one line of a watch is one object, up to 1.5 MB
        headers={"User-Agent": USER_AGENT},
        middlewares=(authorize,),
    )


async def run(
    client: Client,
    watched: Iterable[Kind],
    on_event: EventHandler,
    *,
    namespaces: tuple[str, ...],
    stop: asyncio.Event,
    ready: asyncio.Event,
) -> None:
    """Watch until `stop` is set. Call in the main thread; kopf sets its own signal handlers before `ready`.

    Returns early, or raises, when kopf gave up: then the process must end.
    """
    watched = tuple(watched)
    logging.getLogger("kopf").setLevel(logging.WARNING)
    await kopf.operator(
        registry=make_registry(client, watched, on_event),
        settings=make_settings(watched, namespaced=bool(namespaces)),
        clusterwide=not namespaces,
        namespaces=namespaces,
        standalone=True,
        stop_flag=stop,
        ready_flag=ready,
    )
