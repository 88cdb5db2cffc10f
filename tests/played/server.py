"""One HTTP server that is all agents (port 9900) and all router sidecars (port 9910) of a `World`.

Bound to 0.0.0.0; which pod is asked follows from the local address of the connection, since every played pod has its
own address in 127.0.0.0/8. Runs in its own thread. Only one can run per machine: a lock file makes others wait.
"""

import asyncio
import fcntl
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

from aiohttp import web
from pydantic import ValidationError

from sluice.api import names
from sluice.api.router import WorkerList
from tests.played.world import PlayedEngine, PlayedRouter, World

HOLD_S = 5.0
"""How long a `/state?after=` question is held, as in the real agent."""
WAIT_FOR_PORTS_S = 300.0
START_TIMEOUT_S = 10.0


class PlayedServer:
    """`with PlayedServer(world):` answers for every pod of the world until the block ends."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="played", daemon=True)
        self._lock_file: IO[str] | None = None

    def __enter__(self) -> "PlayedServer":
        """Raises: TimeoutError (another played world holds the ports), OSError (somebody else does)."""
        self._lock_file = _take_turn()
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            raise TimeoutError("the server of played pods did not start")
        if self._error:
            raise self._error
        self.world.on_change.append(self._wake)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._wake in self.world.on_change:
            self.world.on_change.remove(self._wake)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(START_TIMEOUT_S)
        if self._lock_file:
            self._lock_file.close()

    def _wake(self) -> None:
        self._loop.call_soon_threadsafe(self._changed.set)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_get("/state", self._state)
        app.router.add_get("/workers", self._get_workers)
        app.router.add_put("/workers", self._put_workers)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            for port in (names.PORT_AGENT, names.PORT_SIDECAR):
                await web.TCPSite(runner, "0.0.0.0", port, backlog=1024).start()
        except OSError as error:
            self._error = error
            self._stop.set()
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()

    def _asked(self, request: web.Request) -> PlayedEngine | PlayedRouter | None:
        if request.transport is None:
            return None  # the asker went away while we held the question
        return self.world.at(request.transport.get_extra_info("sockname")[0])

    async def _state(self, request: web.Request) -> web.Response:
        after = request.query.get("after", "")
        end = time.monotonic() + HOLD_S
        while True:
            engine = self._asked(request)
            if not isinstance(engine, PlayedEngine) or engine.silent:
                return _hang_up(request)
            with self.world.lock:
                now = self.world.clock()
                state = engine.state(now)
                change = engine.next_change(now)
            left = end - time.monotonic()
            if not after or str(state.seq) != after or left <= 0:
                return web.json_response(text=state.model_dump_json(by_alias=True))
            self._changed.clear()
            wait = left if change is None else min(left, max(change - now, 0.0) + 0.001)
            try:
                await asyncio.wait_for(self._changed.wait(), wait)
            except TimeoutError:
                continue

    async def _get_workers(self, request: web.Request) -> web.Response:
        router = self._asked(request)
        if not isinstance(router, PlayedRouter) or router.silent:
            return _hang_up(request)
        with self.world.lock:
            state = self.world.router_state(router, self.world.clock())
        return web.json_response(text=state.model_dump_json(by_alias=True))

    async def _put_workers(self, request: web.Request) -> web.Response:
        router = self._asked(request)
        if not isinstance(router, PlayedRouter) or router.silent:
            return _hang_up(request)
        token = request.headers.get("Authorization", "")
        if not token.startswith("Bearer "):
            return web.json_response({"error": "a bearer token is needed"}, status=401)
        try:
            wanted = WorkerList.model_validate_json(await request.read())
        except ValidationError as error:
            return web.json_response({"error": str(error)}, status=400)
        with self.world.lock:
            router.tokens.append(token)
            router.put(wanted, self.world.clock())
            state = self.world.router_state(router, self.world.clock())
        self.world.changed()
        return web.json_response(text=state.model_dump_json(by_alias=True))


def _hang_up(request: web.Request) -> web.Response:
    """Nobody is there: the connection breaks, as it does to a dead pod on a live node."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=502)


def _take_turn() -> IO[str]:
    path = Path(tempfile.gettempdir()) / f"sluice-played-{os.getuid()}.lock"
    file = path.open("w")
    end = time.monotonic() + WAIT_FOR_PORTS_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                file.close()
                raise TimeoutError(f"another played world holds {path} for {WAIT_FOR_PORTS_S} s") from None
            time.sleep(0.1)
        else:
            return file
