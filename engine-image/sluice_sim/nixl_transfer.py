"""vLLM's NIXL connector as a whole: which requests lend KV, which borrow it.

The role of the engine decides nothing: `kv_transfer_params` of the request do, as in vLLM. A request without them is
served here alone.
"""

import asyncio
import itertools
import uuid
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from sluice_sim.clock import Clock
from sluice_sim.config import Config, NixlTransfer
from sluice_sim.engine import Engine
from sluice_sim.faults import FaultBook
from sluice_sim.metrics import Metrics
from sluice_sim.nixl_decode import Borrower, Remote, parse_remote
from sluice_sim.nixl_prefill import Lender
from sluice_sim.protocol import ApiError, Inference
from sluice_sim.transfer import Leg, TransferError


class Nixl:
    def __init__(
        self, config: Config, settings: NixlTransfer, engine: Engine, metrics: Metrics, faults: FaultBook, clock: Clock
    ) -> None:
        self._settings = settings
        engine_id = settings.engine_id or str(uuid.uuid4())
        self._lender = Lender(
            config, settings, engine_id=engine_id, engine=engine, metrics=metrics, faults=faults, clock=clock
        )
        self._borrower = Borrower(config, settings, engine=engine, metrics=metrics, faults=faults, clock=clock)
        self._numbers = itertools.count()

    @property
    def address(self) -> tuple[str, int]:
        return self._settings.host, self._settings.port

    def listens_on(self, port: int) -> None:
        self._lender.port = port

    def app(self) -> web.Application:
        return self._lender.app()

    async def open(self, body: Mapping[str, Any], inference: Inference, request_id: str) -> Leg:
        params = body.get("kv_transfer_params")
        if params is None:
            return Leg()
        if not isinstance(params, dict):
            raise ApiError(400, "kv_transfer_params must be an object.", "kv_transfer_params")
        if params.get("do_remote_decode"):
            return _LendingLeg(self._lender, f"{request_id}-{next(self._numbers)}", len(inference.prompt))
        remote = parse_remote(params) if params.get("do_remote_prefill") else None
        return Leg() if remote is None else _BorrowingLeg(self._borrower, remote, len(inference.prompt))

    async def run(self) -> None:
        await asyncio.gather(self._lender.run(), self._borrower.run())

    def queues(self) -> tuple[int, int]:
        return 0, 0

    def state(self) -> dict[str, Any]:
        return self._lender.state()


class _LendingLeg(Leg):
    keeps = True

    def __init__(self, lender: Lender, request_id: str, prompt_tokens: int) -> None:
        self._lender = lender
        self._request_id = request_id
        self._prompt_tokens = prompt_tokens
        self._params: Mapping[str, Any] = {}

    def keep(self, blocks: list[int]) -> None:
        self._params = self._lender.hold(self._request_id, blocks, self._prompt_tokens)

    async def settle(self) -> Mapping[str, Any]:
        return {"kv_transfer_params": self._params} if self._params else {}


class _BorrowingLeg(Leg):
    pulls = True

    def __init__(self, borrower: Borrower, remote: Remote, prompt_tokens: int) -> None:
        self._borrower = borrower
        self._remote = remote
        self._prompt_tokens = prompt_tokens
        self._is_decided = False
        borrower.expect(remote)

    async def pull(self, first: int) -> list[bytes] | None:
        try:
            contents = await self._borrower.pull(self._remote, first, self._prompt_tokens)
        except TransferError:
            self._is_decided = True
            raise
        self._is_decided = True
        return contents

    def close(self) -> None:
        if not self._is_decided:
            self._borrower.decline(self._remote)
