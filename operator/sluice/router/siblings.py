"""Asks the other router pods of the service for their list, when this one has none (a new pod, no operator).

They are found through the headless Service of the routers. Of several lists the newest counts; the operator's next PUT
replaces whatever was taken over.
"""

import asyncio
import logging
import socket

import aiohttp
from pydantic import ValidationError

from sluice.api.router import RouterState
from sluice.router.files import HeldList

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
MAX_BYTES = 2 * 1024 * 1024
"""1024 workers are below 700 kB."""


async def fetch_newest(host: str, port: int, own_ip: str | None) -> HeldList | None:
    """The newest list that a sibling holds; None if nobody has one. Never raises for what siblings do."""
    addresses = [address for address in await _resolve(host) if address != own_ip]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        lists = await asyncio.gather(*(_ask(session, address, port) for address in addresses))
    return max((held for held in lists if held is not None), key=lambda held: held.received_at, default=None)


async def _resolve(host: str) -> list[str]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:  # no sibling yet, or no DNS: both are normal at the first start
        log.debug("no siblings under %s: %s", host, error)
        return []
    return sorted({str(entry[4][0]) for entry in found})


async def _ask(session: aiohttp.ClientSession, address: str, port: int) -> HeldList | None:
    host = f"[{address}]" if ":" in address else address
    try:
        async with session.get(f"http://{host}:{port}/workers", allow_redirects=False) as response:
            raw = bytearray()
            async for chunk in response.content.iter_any():
                raw += chunk
                if len(raw) > MAX_BYTES:
                    return None
            if response.status != 200:
                return None
        state = RouterState.model_validate_json(bytes(raw))
    except (TimeoutError, aiohttp.ClientError, OSError, ValidationError) as error:
        log.debug("sibling %s has no list for us: %s", address, error)
        return None
    if state.wanted is None or state.wanted_at is None:
        return None
    return HeldList(wanted=state.wanted, received_at=state.wanted_at)
