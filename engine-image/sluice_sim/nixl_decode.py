"""vLLM's NIXL connector, the side that reads: pulls the prompt's KV, keeps leases alive while requests queue here.

As in the real engine, no time of expiry travels with the request and nothing is compared after the read: KV that comes
too late is taken for good, and only the prefill side's counters tell.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from sluice_sim.clock import Clock
from sluice_sim.config import Config, NixlTransfer
from sluice_sim.engine import Engine
from sluice_sim.faults import FaultBook
from sluice_sim.hardware import TRANSFER_BYTES_S
from sluice_sim.log import log_event
from sluice_sim.metrics import Metrics
from sluice_sim.nixl_prefill import identity
from sluice_sim.transfer import TransferError, corrupted, peer_url

_HEARTBEATS_PER_LEASE: Final = 6
_SHORTEST_HEARTBEAT_S: Final = 0.02
_PEER_TIMEOUT_S: Final = 5.0
"""For connecting, handshakes, notifications and heartbeats."""


@dataclass(frozen=True, slots=True)
class Remote:
    """Where a request's KV is."""

    engine_id: str
    request_id: str
    host: str
    port: int
    blocks: tuple[int, ...]

    @property
    def url(self) -> str:
        return peer_url(self.host, self.port)


def parse_remote(params: Mapping[str, Any]) -> Remote | None:
    """None if a field is missing or no such thing: vLLM then computes the prompt itself, with a warning in its log."""
    blocks = params.get("remote_block_ids")
    if isinstance(blocks, list) and blocks and isinstance(blocks[0], list):
        blocks = blocks[0]  # one group of layers
    if not isinstance(blocks, list) or not blocks or not all(isinstance(block, int) for block in blocks):
        return None
    texts = [params.get(name) for name in ("remote_engine_id", "remote_request_id", "remote_host")]
    port = params.get("remote_port")
    if not all(isinstance(text, str) and text for text in texts) or not isinstance(port, int):
        return None
    engine_id, request_id, host = (str(text) for text in texts)
    return Remote(engine_id, request_id, host, port, tuple(blocks))


class Borrower:
    def __init__(
        self,
        config: Config,
        settings: NixlTransfer,
        *,
        engine: Engine,
        metrics: Metrics,
        faults: FaultBook,
        clock: Clock,
    ) -> None:
        self._config = config
        self._settings = settings
        self._engine = engine
        self._metrics = metrics
        self._faults = faults
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._known: set[str] = set()
        """Engine ids of processes whose handshake is done."""
        self._queued: dict[int, Remote] = {}
        """Requests that are here and not pulled yet, by the id of their `Remote`."""
        self._notifying: set[asyncio.Task[None]] = set()

    def expect(self, remote: Remote) -> None:
        """A request for this KV is in the queue: heartbeats keep the lease until it is pulled or forgotten."""
        self._queued[id(remote)] = remote

    def forget(self, remote: Remote) -> None:
        self._queued.pop(id(remote), None)

    def decline(self, remote: Remote) -> None:
        """The request ended before its KV was pulled: tell the prefill side, so that it keeps nothing for it."""
        self.forget(remote)
        task = asyncio.create_task(self._notify(remote))
        self._notifying.add(task)
        task.add_done_callback(self._notifying.discard)

    async def pull(self, remote: Remote, first: int, prompt_tokens: int) -> list[bytes] | None:
        """Contents of the remote blocks from index `first` on; None: the prompt is to be computed here.

        Raises:
            TransferError: they don't come and the policy is to fail.
        """
        now = self._clock.now()
        if self._faults.take("kvNeverPulled", now) is not None:
            self.forget(remote)
            return None
        stale = self._faults.take("kvStale", now)
        if stale is not None:
            self.forget(remote)
            wait_s = stale["seconds"]
            await self._clock.sleep_until(now + (self._settings.lease_s * 1.1 if wait_s is None else wait_s))
        slow = self._faults.take("kvSlow", now)
        if slow is not None:
            await self._clock.sleep_until(now + slow["seconds"])
        try:
            if self._faults.take("kvFail", now) is not None:
                raise TransferError("kvFail fault")
            return await self._read(remote, first, prompt_tokens)
        except (TransferError, aiohttp.ClientError, TimeoutError, OSError, LookupError, TypeError, ValueError) as error:
            log_event("transferFailed", request=remote.request_id, peer=remote.url, error=repr(error))
            self._metrics.transfer_failed()
            if self._settings.recomputes:
                return None
            self._metrics.external_counted(prompt_tokens - first * self._config.block_size)
            raise TransferError(f"KV of the prompt could not be loaded from {remote.url}: {error!r}") from error
        finally:
            self.forget(remote)

    async def _read(self, remote: Remote, first: int, prompt_tokens: int) -> list[bytes]:
        await self._shake_hands(remote)
        started = self._clock.now()
        needed = -(-prompt_tokens // self._config.block_size)
        wanted = remote.blocks[first:needed]
        if len(wanted) < needed - first:
            raise TransferError(f"the prompt has {needed} blocks, kv_transfer_params name {len(remote.blocks)}")
        body = {"blocks": wanted, "requestId": remote.request_id}
        answer = await self._post(remote, "/read", body, total_s=None)
        contents = [bytes.fromhex(content) for content in answer["contents"]]
        if len(contents) != len(wanted):
            raise TransferError(f"{len(contents)} blocks came instead of {len(wanted)}")
        size_bytes = len(wanted) * self._config.block_size * self._config.kv_token_bytes
        await self._clock.sleep_until(started + size_bytes / TRANSFER_BYTES_S / self._config.speed)
        if self._faults.take("kvCorrupt", started) is not None:
            contents = corrupted(contents)
        self._metrics.moved(size_bytes, len(wanted), self._clock.now() - started)
        await self._notify(remote)
        return contents

    async def _notify(self, remote: Remote) -> None:
        try:
            await self._post(remote, "/notify", {"requestId": remote.request_id})
        except (aiohttp.ClientError, TimeoutError, OSError):
            self._metrics.notification_failed()

    async def _shake_hands(self, remote: Remote) -> None:
        """Once per process of the other side.

        Raises:
            TransferError: it is another process than the one that computed the KV, or its KV is not like ours.
        """
        if remote.engine_id in self._known:
            return
        timeout = aiohttp.ClientTimeout(total=_PEER_TIMEOUT_S)
        async with self._client().get(f"{remote.url}/handshake", timeout=timeout) as answer:
            theirs = await answer.json()
        if theirs["engineId"] != remote.engine_id:
            raise TransferError(f"engine {theirs['engineId']} is there, not {remote.engine_id}")
        must_agree = identity(self._config)
        if not self._settings.checks_compatibility:  # layouts that differ can't be read in any case
            must_agree = {name: must_agree[name] for name in ("valueBytes", "blockSize", "tensorParallelSize")}
        differing = [
            f"{name} {theirs.get(name)}, here {ours}" for name, ours in must_agree.items() if theirs.get(name) != ours
        ]
        if differing:
            raise TransferError(f"handshake refused: {'; '.join(differing)}")
        self._known.add(remote.engine_id)

    async def _post(
        self, remote: Remote, path: str, body: Mapping[str, Any], total_s: float | None = _PEER_TIMEOUT_S
    ) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=_PEER_TIMEOUT_S)
        async with self._client().post(remote.url + path, json=body, timeout=timeout, raise_for_status=True) as answer:
            found: dict[str, Any] = await answer.json()
            return found

    async def run(self) -> None:
        """Send heartbeats for ever, between steps: a paused engine sends none. Cancel to stop."""
        period_s = max(self._settings.lease_s / _HEARTBEATS_PER_LEASE, _SHORTEST_HEARTBEAT_S)
        try:
            while True:
                await self._clock.sleep_until(self._clock.now() + period_s)
                await self._engine.runs()
                peers = {remote.url: remote for remote in self._queued.values()}
                await asyncio.gather(*(self._beat(remote) for remote in peers.values()))
        finally:
            if self._session is not None:
                await self._session.close()

    async def _beat(self, peer: Remote) -> None:
        ids = [remote.request_id for remote in self._queued.values() if remote.url == peer.url]
        try:
            await self._post(peer, "/heartbeat", {"requestIds": ids})
        except (aiohttp.ClientError, TimeoutError, OSError):
            log_event("heartbeatFailed", peer=peer.url)

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session
