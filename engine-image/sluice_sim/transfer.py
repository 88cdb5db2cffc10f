"""How the KV of one request moves between engines: what every kind of transfer offers to the request and the engine.

`nixl_transfer` (vLLM: the decode side pulls, guarded by a lease) and `room_transfer` (SGLang: both sides meet in a
room) implement it.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

from aiohttp import web

from sluice_sim.protocol import Inference


class TransferError(Exception):
    """KV that should come does not; the message is for the client."""


def peer_url(host: str, port: int) -> str:
    """Where another engine listens; `host` may be a bare IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"http://{host}:{port}"


def corrupted(contents: list[bytes]) -> list[bytes]:
    """The same blocks after a fault on their way: one of them is another one."""
    return [hashlib.blake2b(contents[0], digest_size=16, person=b"corrupt").digest(), *contents[1:]]


class Leg:
    """One request's part of a hand-over; this one: the request is served here from its first token to its last."""

    pulls = False
    """The prompt's KV comes from elsewhere: see `pull`."""
    keeps = False
    """The prompt's KV stays here after the request for the other side: see `keep`."""
    max_tokens: int | None = None
    """The answer is cut to so many tokens; null: as the request says."""

    async def pull(self, first: int) -> list[bytes] | None:
        """Contents of the prompt's blocks from block `first` on; None: compute the prompt here.

        Raises:
            TransferError: they do not come, and the request fails.
        """
        raise NotImplementedError

    def keep(self, blocks: list[int]) -> None:
        """The prompt is computed; from now on the blocks are this leg's to release."""
        raise NotImplementedError

    async def settle(self) -> Mapping[str, Any]:
        """Before the answer's end is written: fields to add to it.

        Raises:
            TransferError: the hand-over failed, and the request with it.
        """
        return {}

    def close(self) -> None:
        """The request ended, however it did."""


class Transfer(Protocol):
    """One engine's side of all hand-overs."""

    def app(self) -> web.Application | None:
        """What listens on the side port; None: this side has none."""
        ...

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to listen on."""
        ...

    def listens_on(self, port: int) -> None:
        """The side port's real number."""
        ...

    async def open(self, body: Mapping[str, Any], inference: Inference, request_id: str) -> Leg:
        """The request's leg, once it may be queued.

        Raises:
            ApiError: the request can't be served, or its other side did not come.
        """
        ...

    async def run(self) -> None:
        """Leases, heartbeats; cancel to stop."""
        ...

    def queues(self) -> tuple[int, int]:
        """Requests that wait for their other side before they are queued, and after they were computed."""
        ...

    def state(self) -> dict[str, Any]:
        """For `/sim/state`."""
        ...
