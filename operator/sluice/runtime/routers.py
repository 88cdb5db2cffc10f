"""Routers' sidecars: read what each router really routes to, send the whole wanted list.

The sidecar takes the list only with our projected token (audience `sluice-router`). The token goes out with a PUT and
never with a read; it is read from its file again every half minute, because the kubelet rotates it, and at once after
a 401.
"""

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from time import monotonic
from typing import Final

from pydantic import ValidationError

from sluice.api import names
from sluice.api.router import RouterState, WorkerList
from sluice.plan.actions import ObjectRef
from sluice.plan.snapshot import PodFacts, RouterFacts
from sluice.runtime.executor import RouterUnreachable
from sluice.runtime.observer import AT_ONCE, Follower, Target, period_s
from sluice.runtime.podhttp import PodHttp, PodUnreachable, Rejected, pod_url

log = logging.getLogger(__name__)

TIMEOUT_S: Final = 3.0
TOKEN_PERIOD_S: Final = 30.0
MAX_ANSWER_BYTES: Final = 1024 * 1024
"""A list of 1,024 workers, wanted and real, is about 500 KB."""


class Token:
    """The operator's token for sidecars, from the projected file."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = monotonic) -> None:
        self._path = path
        self._clock = clock
        self._value = ""
        self._read_at: float | None = None

    def value(self) -> str:
        """Raises: PodUnreachable if the file can't be read (nothing can be sent then)."""
        if self._read_at is None or self._clock() - self._read_at > TOKEN_PERIOD_S:
            try:
                self._value = self._path.read_text().strip()
            except OSError as error:
                raise PodUnreachable(f"router token file {self._path}: {error.strerror}") from error
            self._read_at = self._clock()
        return self._value

    def expire(self) -> None:
        """Read the file again next time."""
        self._read_at = None


class Routers:
    """The sidecars' protocol: `GET /workers`, `PUT /workers`."""

    def __init__(self, http: PodHttp, token: Token) -> None:
        self._http = http
        self._token = token
        self._slots = asyncio.Semaphore(AT_ONCE)

    def wants(self, pod: PodFacts) -> bool:
        return pod.component == names.COMPONENT_ROUTER

    async def fetch(self, target: Target, last: RouterState | None, crowd: int) -> tuple[RouterState, float]:
        del last
        return await self.call("GET", target.ip), period_s(crowd)

    async def call(self, method: str, ip: str, body: bytes | None = None) -> RouterState:
        """Ask or tell one sidecar. Raises: PodUnreachable."""
        url = pod_url(ip, names.PORT_SIDECAR, "/workers")
        async with self._slots:
            try:
                data = await self._send(method, url, body)
            except Rejected as error:
                if error.status != 401:
                    raise
                self._token.expire()
                data = await self._send(method, url, body)
        try:
            return RouterState.model_validate_json(data)
        except ValidationError as error:
            raise PodUnreachable(f"{method} {url}: not a router's state: {error.errors()[0]['msg']}") from error

    async def _send(self, method: str, url: str, body: bytes | None) -> bytes:
        headers = {}
        if body is not None:
            headers = {"Authorization": f"Bearer {self._token.value()}", "Content-Type": "application/json"}
        return await self._http.call(
            method, url, timeout_s=TIMEOUT_S, max_bytes=MAX_ANSWER_BYTES, headers=headers, body=body
        )

    def digest(self, target: Target, state: RouterState) -> Hashable:
        del target
        workers = tuple(sorted((w.id, w.url, w.engine_id or "", str(w.status), w.reason) for w in state.workers))
        return state.generation, state.open, state.smg_reachable, workers


class Sender:
    """`executor.WorkerSender`: a PUT, whose answer is at once the router's newest word."""

    def __init__(self, routers: Routers, follower: Follower[RouterState]) -> None:
        self._routers = routers
        self._follower = follower

    async def put(self, router: ObjectRef, ip: str, workers: WorkerList) -> None:
        """Raises: RouterUnreachable."""
        body = workers.model_dump_json(by_alias=True).encode()
        try:
            state = await self._routers.call("PUT", ip, body)
        except PodUnreachable as error:
            raise RouterUnreachable(f"router {router.namespace}/{router.name}: {error}") from error
        self._follower.heard(router.uid, state)
        if state.generation != workers.generation:
            raise RouterUnreachable(
                f"router {router.namespace}/{router.name} answers a PUT of list {workers.generation} "
                f"with list {state.generation}"
            )
        self._follower.nudge(router.uid)


def router_facts(routers: Follower[RouterState], pods: Iterable[PodFacts]) -> dict[str, RouterFacts]:
    """Pod UID to its sidecar's last word."""
    heard = ((pod.uid, routers.last(pod.uid)) for pod in pods)
    return {uid: RouterFacts(*word) for uid, word in heard if word is not None}
