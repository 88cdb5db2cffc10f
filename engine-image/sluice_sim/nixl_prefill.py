"""vLLM's NIXL connector, the side that is read: keeps blocks for the time of a lease and answers on the side port.

| request on the side port | meaning |
|---|---|
| `GET /handshake` | what the two sides must agree on, and this process's engine id |
| `POST /read {"blocks", "requestId"}` | what is in these blocks *now*: as over RDMA, nobody is asked whose they are |
| `POST /notify {"requestId"}` | the blocks were read and may be used again |
| `POST /heartbeat {"requestIds"}` | the other side has these requests and will come: leases start again |

`/read` is told the request for the faults alone.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from sluice_sim.clock import Clock
from sluice_sim.config import Config, NixlTransfer
from sluice_sim.engine import Engine
from sluice_sim.faults import FaultBook
from sluice_sim.leases import LeaseBook, Notice
from sluice_sim.log import log_event
from sluice_sim.metrics import Metrics
from sluice_sim.transfer import corrupted


def identity(config: Config) -> dict[str, Any]:
    """What two engines must share to understand each other's KV."""
    return {
        "version": config.version,
        "model": config.model,
        "valueBytes": config.value_bytes,
        "blockSize": config.block_size,
        "tensorParallelSize": config.layout.tensor,
    }


@dataclass(frozen=True, slots=True)
class _ReadFault:
    """What happens to the one read of a request."""

    corrupts: bool = False
    fails: bool = False
    slow_s: float = 0.0


_NO_FAULT: Final = _ReadFault()


class Lender:
    def __init__(
        self,
        config: Config,
        settings: NixlTransfer,
        *,
        engine_id: str,
        engine: Engine,
        metrics: Metrics,
        faults: FaultBook,
        clock: Clock,
    ) -> None:
        self._config = config
        self._settings = settings
        self._engine_id = engine_id
        self._engine = engine
        self._metrics = metrics
        self._faults = faults
        self._clock = clock
        self._leases = LeaseBook(settings.lease_s)
        self._changed = asyncio.Event()
        self._read_faults: dict[str, _ReadFault] = {}
        self.port = settings.port

    def hold(self, request_id: str, blocks: list[int], tokens: int) -> Mapping[str, Any]:
        """Keep the blocks; the parameters that the other side needs to pull them (empty by fault `kvNeverPulled`)."""
        now = self._clock.now()
        self._leases.hold(request_id, blocks, now)
        self._changed.set()
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(blocks)],
            "remote_engine_id": self._engine_id,
            "remote_request_id": request_id,
            "remote_host": self._settings.host,
            "remote_port": self.port,
            "tp_size": self._config.layout.tensor,
            "pp_size": self._config.layout.pipeline,
            "remote_num_tokens": tokens,
            "transfer_mode": "pull",
        }
        slow = self._faults.take("kvSlow", now)
        fault = _ReadFault(
            corrupts=self._faults.take("kvCorrupt", now) is not None,
            fails=self._faults.take("kvFail", now) is not None,
            slow_s=0.0 if slow is None else slow["seconds"],
        )
        if fault != _NO_FAULT:
            self._read_faults[request_id] = fault
        if self._faults.take("kvStale", now) is not None:
            kept = list(blocks)
            self._expire(request_id)
            self._engine.kv.overwrite_free(kept)
        return {} if self._faults.take("kvNeverPulled", now) is not None else params

    async def run(self) -> None:
        """End leases for ever; a paused engine ends none, as its worker does so between steps."""
        while True:
            self._changed.clear()
            now = self._clock.now()
            expiry = self._leases.next_expiry
            if expiry is not None and expiry <= now:
                await self._engine.runs()
                for request_id in self._leases.due(self._clock.now()):
                    self._expire(request_id)
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), None if expiry is None else expiry - now)

    def _expire(self, request_id: str) -> None:
        log_event("leaseExpired", request=request_id)
        self._metrics.lease_expired()
        self._engine.release(self._leases.expire(request_id))

    def state(self) -> dict[str, Any]:
        return {
            "engineId": self._engine_id,
            "sidePort": self.port,
            "heldRequests": self._leases.held,
            "heldBlocks": self._leases.held_blocks,
        }

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/handshake", self._handshake),
                web.post("/read", self._read),
                web.post("/notify", self._notify),
                web.post("/heartbeat", self._heartbeat),
            ]
        )
        return app

    async def _handshake(self, _: web.Request) -> web.Response:
        return web.json_response({"engineId": self._engine_id, **identity(self._config)})

    async def _read(self, request: web.Request) -> web.Response:
        body = await request.json()
        blocks, num_blocks = body["blocks"], self._engine.kv.num_blocks
        if not blocks or not all(isinstance(block, int) and 0 <= block < num_blocks for block in blocks):
            return web.json_response({"error": f"blocks must be numbers from 0 to {num_blocks - 1}"}, status=400)
        fault = self._read_faults.pop(body["requestId"], _NO_FAULT)
        if fault.slow_s:
            await self._clock.sleep_until(self._clock.now() + fault.slow_s)
        if fault.fails and request.transport is not None:
            request.transport.abort()
        contents = self._engine.kv.contents(blocks)
        if fault.corrupts:
            contents = corrupted(contents)
        return web.json_response({"contents": [content.hex() for content in contents]})

    async def _notify(self, request: web.Request) -> web.Response:
        request_id = (await request.json())["requestId"]
        self._read_faults.pop(request_id, None)
        notice, blocks = self._leases.pulled(request_id)
        if notice is Notice.LATE:
            log_event("readAfterExpiry", request=request_id)
            self._metrics.late_notification()
        self._engine.release(blocks)
        return web.json_response({"notice": notice})

    async def _heartbeat(self, request: web.Request) -> web.Response:
        now = self._clock.now()
        known = [self._leases.extend(request_id, now) for request_id in (await request.json())["requestIds"]]
        return web.json_response({"extended": sum(known)})
