"""SGLang's prefill side: the bootstrap port, and the rooms in which both sides of a request meet.

A request waits until its decode side has come to its room, is computed, and stays open until that side has the KV.

| request on the bootstrap port | meaning |
|---|---|
| `GET /health` | it is there |
| `GET /route` | what the two sides must agree on |
| `POST /room/<number>` | the decode side is here; the answer, once there is one, is the KV |
"""

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

from sluice_sim.clock import Clock
from sluice_sim.config import Config, RoomTransfer
from sluice_sim.engine import Engine
from sluice_sim.faults import FaultBook
from sluice_sim.metrics import Metrics
from sluice_sim.protocol import ApiError, Inference
from sluice_sim.transfer import Leg, TransferError, corrupted

FAKE_HOST: Final = "2.2.2.2"
"""As bootstrap host it stands for "no other side": SGLang's own health requests use it."""


def layout_of(config: Config) -> dict[str, Any]:
    """What the decode side compares; as in SGLang neither version nor model is part of it."""
    return {
        "attn_tp_size": config.layout.tensor,
        "page_size": config.block_size,
        "kv_cache_dtype": f"{8 * config.value_bytes} bit",
    }


def room_of(body: Mapping[str, Any]) -> int:
    """The request's room.

    Raises:
        ApiError: 400, it has none.
    """
    room = body.get("bootstrap_room")
    if isinstance(room, bool) or not isinstance(room, int):
        raise ApiError(400, "Disaggregated request received without bootstrap room id.", "bootstrap_room")
    return room


def checksum(contents: list[bytes]) -> str:
    return hashlib.blake2b(b"|".join(contents), digest_size=8).hexdigest()


def _future() -> "asyncio.Future[Any]":
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True)
class Room:
    visited: "asyncio.Future[None]" = field(default_factory=_future)
    """The decode side came."""
    contents: "asyncio.Future[list[bytes]]" = field(default_factory=_future)
    delivered: "asyncio.Future[None]" = field(default_factory=_future)
    slow_s: float = 0.0
    fails: bool = False
    corrupts: bool = False


class RoomPrefill:
    """The prefill side of all requests."""

    def __init__(
        self, config: Config, settings: RoomTransfer, engine: Engine, metrics: Metrics, faults: FaultBook, clock: Clock
    ) -> None:
        self._config = config
        self._settings = settings
        self._engine = engine
        self._metrics = metrics
        self._faults = faults
        self._clock = clock
        self._rooms: dict[int, Room] = {}
        self._port = settings.port
        self._bootstrapping = 0
        self.sending = 0

    @property
    def address(self) -> tuple[str, int]:
        return self._config.host, self._settings.port

    def listens_on(self, port: int) -> None:
        self._port = port

    def queues(self) -> tuple[int, int]:
        return self._bootstrapping, self.sending

    def state(self) -> dict[str, Any]:
        return {"sidePort": self._port, "rooms": len(self._rooms), "heldRequests": self.sending}

    async def run(self) -> None:
        """Nothing happens by itself."""
        await asyncio.Event().wait()

    async def open(self, body: Mapping[str, Any], inference: Inference, request_id: str) -> Leg:  # noqa: ARG002  # rooms name requests
        if body.get("bootstrap_host") == FAKE_HOST:
            return Leg()
        number = room_of(body)
        now = self._clock.now()
        if self._faults.take("kvNeverPulled", now) is not None:
            number = -1 - number  # a room that nobody knows
        room = self._room(number)
        self._bootstrapping += 1
        try:
            await asyncio.wait_for(asyncio.shield(room.visited), self._settings.bootstrap_timeout_s)
        except TimeoutError:
            self._leave(number, room)
            self._metrics.bootstrap_failed()
            raise ApiError(500, f"The decode side of room {number} did not come.") from None
        except asyncio.CancelledError:
            self._leave(number, room)
            raise
        finally:
            self._bootstrapping -= 1
        slow = self._faults.take("kvSlow", now)
        room.slow_s = 0.0 if slow is None else slow["seconds"]
        room.fails = self._faults.take("kvFail", now) is not None
        room.corrupts = self._faults.take("kvCorrupt", now) is not None
        return _SendingLeg(self, number, room, len(inference.prompt))

    def contents(self, blocks: list[int], prompt_tokens: int) -> list[bytes]:
        return self._engine.kv.contents(blocks[: self._engine.kv.blocks_for(prompt_tokens)])

    def end(self, number: int, room: Room, blocks: list[int]) -> None:
        """The request is over: nobody is to wait for it, and its blocks are free."""
        self._leave(number, room)
        if blocks:
            self._engine.release(blocks)

    def failed(self) -> None:
        self._metrics.transfer_failed()

    def _room(self, number: int) -> Room:
        return self._rooms.setdefault(number, Room())

    def _leave(self, number: int, room: Room) -> None:
        if self._rooms.get(number) is room:
            del self._rooms[number]
        if not room.contents.done():
            room.contents.cancel()

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/route", self._route),
                web.post("/room/{number:-?\\d+}", self._visit),
            ]
        )
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def _route(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                **layout_of(self._config),
                "attn_cp_size": 1,
                "dp_size": 1,
                "pp_size": self._config.layout.pipeline,
                "follow_bootstrap_room": True,
            }
        )

    async def _visit(self, request: web.Request) -> web.StreamResponse:
        """Held open until the KV is there; cancelled when the decode side goes away."""
        number = int(request.match_info["number"])
        room = self._room(number)
        if not room.visited.done():
            room.visited.set_result(None)
        try:
            contents = await asyncio.wait_for(asyncio.shield(room.contents), self._settings.bootstrap_timeout_s)
        except TimeoutError:
            self._leave(number, room)
            return web.json_response({"error": f"no request for room {number}"}, status=504)
        except asyncio.CancelledError:
            if room.contents.cancelled():
                return web.json_response({"error": f"the request of room {number} ended"}, status=410)
            self._break(room, number)
            raise
        return await self._deliver(request, number, room, contents)

    async def _deliver(
        self, request: web.Request, number: int, room: Room, contents: list[bytes]
    ) -> web.StreamResponse:
        started = self._clock.now()
        body = {"sum": checksum(contents)}
        if room.corrupts:
            contents = corrupted(contents)
        response = web.json_response({**body, "contents": [content.hex() for content in contents]})
        try:
            await self._clock.sleep_until(started + room.slow_s)
            if room.fails:
                raise ConnectionResetError("kvFail fault")
            await response.prepare(request)
            await response.write_eof()
        except (ConnectionResetError, asyncio.CancelledError):
            self._break(room, number)
            if request.transport is not None:
                request.transport.abort()
            raise
        size_bytes = len(contents) * self._config.block_size * self._config.kv_token_bytes
        self._metrics.moved(size_bytes, len(contents), self._clock.now() - started)
        if not room.delivered.done():
            room.delivered.set_result(None)
        return response

    def _break(self, room: Room, number: int) -> None:
        if not room.delivered.done():
            reason = f"KVTransferError(bootstrap_room={number}): the decode side is gone"
            room.delivered.set_exception(TransferError(reason))
            room.delivered.exception()  # seen: a request that is not computed yet may never ask
        self._rooms.pop(number, None)


class _SendingLeg(Leg):
    keeps = True
    max_tokens = 1

    def __init__(self, side: RoomPrefill, number: int, room: Room, prompt_tokens: int) -> None:
        self._side = side
        self._number = number
        self._room = room
        self._prompt_tokens = prompt_tokens
        self._blocks: list[int] = []

    def keep(self, blocks: list[int]) -> None:
        self._blocks = blocks
        self._side.sending += 1
        if not self._room.contents.done():
            self._room.contents.set_result(self._side.contents(blocks, self._prompt_tokens))

    async def settle(self) -> Mapping[str, Any]:
        try:
            await asyncio.shield(self._room.delivered)
        except TransferError:
            self._side.failed()
            raise
        return {}

    def close(self) -> None:
        if self._blocks:
            self._side.sending -= 1
        self._side.end(self._number, self._room, self._blocks)
        self._blocks = []
