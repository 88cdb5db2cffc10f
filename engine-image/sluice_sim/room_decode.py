"""SGLang's decode side: goes to the request's room at the prefill side and waits there for the KV.

There is no lease and no second try: KV that does not come ends the request.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import aiohttp

from sluice_sim.clock import Clock
from sluice_sim.config import Config, RoomTransfer
from sluice_sim.faults import FaultBook
from sluice_sim.hardware import TRANSFER_BYTES_S
from sluice_sim.log import log_event
from sluice_sim.metrics import Metrics
from sluice_sim.protocol import ApiError, Inference
from sluice_sim.room_prefill import FAKE_HOST, checksum, layout_of, room_of
from sluice_sim.transfer import Leg, TransferError, corrupted, peer_url

_PEER_TIMEOUT_S: Final = 5.0
_DEFAULT_BOOTSTRAP_PORT: Final = 8998


class RoomDecode:
    """The decode side of all requests."""

    def __init__(
        self, config: Config, settings: RoomTransfer, metrics: Metrics, faults: FaultBook, clock: Clock
    ) -> None:
        self._config = config
        self._settings = settings
        self._metrics = metrics
        self._faults = faults
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None

    @property
    def address(self) -> tuple[str, int]:
        return self._config.host, 0

    def listens_on(self, port: int) -> None:
        raise AssertionError(f"the decode side listens on no side port, and not on {port}")

    def app(self) -> None:
        return None

    def queues(self) -> tuple[int, int]:
        return 0, 0

    def state(self) -> dict[str, Any]:
        return {}

    async def run(self) -> None:
        """Nothing happens by itself; closes the connections at the end."""
        try:
            await asyncio.Event().wait()
        finally:
            if self._session is not None:
                await self._session.close()

    async def open(self, body: Mapping[str, Any], inference: Inference, request_id: str) -> Leg:  # noqa: ARG002  # rooms name requests
        blocks = -(-len(inference.prompt) // self._config.block_size)
        if body.get("bootstrap_host") == FAKE_HOST:
            return _FakeLeg(blocks)
        number = room_of(body)
        host, port = body.get("bootstrap_host"), body.get("bootstrap_port") or _DEFAULT_BOOTSTRAP_PORT
        if not isinstance(host, str) or not host or not isinstance(port, int):
            raise ApiError(400, "bootstrap_host must be a text and bootstrap_port an integer.", "bootstrap_host")
        return _ReceivingLeg(self, peer_url(host, port), number, blocks)

    async def receive(self, url: str, number: int, blocks: int) -> list[bytes]:
        """All blocks of the prompt's KV.

        Raises:
            TransferError: they do not come.
        """
        now = self._clock.now()
        try:
            if self._faults.take("kvNeverPulled", now) is not None:
                await self._clock.sleep_until(now + self._settings.waiting_timeout_s)
                raise TransferError("timed out in KVPoll.WaitingForInput")
            if self._faults.take("kvFail", now) is not None:
                raise TransferError("kvFail fault")
            await self._check_layout(url)
            contents = await self._visit(url, number)
            if len(contents) != blocks:
                raise TransferError(f"{len(contents)} blocks came, the prompt has {blocks}")
        except (TransferError, aiohttp.ClientError, TimeoutError, OSError, LookupError, TypeError, ValueError) as error:
            log_event("transferFailed", room=number, peer=url, error=repr(error))
            self._metrics.transfer_failed()
            raise TransferError(f"KVTransferError(bootstrap_room={number}): {error!r}") from error
        size_bytes = blocks * self._config.block_size * self._config.kv_token_bytes
        took_s = size_bytes / TRANSFER_BYTES_S / self._config.speed
        await self._clock.sleep_until(self._clock.now() + took_s)
        self._metrics.moved(size_bytes, blocks, took_s)
        return contents

    async def _check_layout(self, url: str) -> None:
        timeout = aiohttp.ClientTimeout(total=_PEER_TIMEOUT_S)
        try:
            async with self._client().get(f"{url}/route", timeout=timeout, raise_for_status=True) as answer:
                theirs = await answer.json()
        except (aiohttp.ClientError, TimeoutError, OSError):
            self._metrics.bootstrap_failed()
            raise
        ours = layout_of(self._config)
        differing = [f"{name} {theirs.get(name)}, here {ours[name]}" for name in ours if theirs.get(name) != ours[name]]
        if differing:
            self._metrics.bootstrap_failed()
            raise TransferError(f"prefill side has another layout: {'; '.join(differing)}")

    async def _visit(self, url: str, number: int) -> list[bytes]:
        now = self._clock.now()
        timeout = aiohttp.ClientTimeout(total=self._settings.waiting_timeout_s, sock_connect=_PEER_TIMEOUT_S)
        async with self._client().post(f"{url}/room/{number}", timeout=timeout, raise_for_status=True) as answer:
            body = await answer.json()
        slow = self._faults.take("kvSlow", now)
        if slow is not None:
            await self._clock.sleep_until(self._clock.now() + slow["seconds"])
        contents = [bytes.fromhex(content) for content in body["contents"]]
        if self._faults.take("kvCorrupt", now) is not None:
            contents = corrupted(contents)
        if self._settings.checks_sum and checksum(contents) != body["sum"]:
            raise TransferError("KV checksum mismatch")
        return contents

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session


class _ReceivingLeg(Leg):
    pulls = True

    def __init__(self, side: RoomDecode, url: str, number: int, blocks: int) -> None:
        self._side = side
        self._url = url
        self._number = number
        self._blocks = blocks

    async def pull(self, first: int) -> list[bytes] | None:
        return (await self._side.receive(self._url, self._number, self._blocks))[first:]


class _FakeLeg(Leg):
    """No other side: whatever is in the blocks is taken for the prompt's KV, as in SGLang's own health requests."""

    pulls = True

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks

    async def pull(self, first: int) -> list[bytes] | None:
        return [b""] * (self._blocks - first)
