"""The cluster's public ServiceAccount signing keys, which the router sidecars check our token with.

Fetched at start and every five minutes: a key that the API server rotates in must reach the sidecars before the first
token is signed with it. A failed fetch keeps the last known keys.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sluice.runtime.errors import KubeError
from sluice.runtime.kube import Client

log = logging.getLogger(__name__)

PERIOD_S: Final = 300.0
RETRY_S: Final = 15.0


@dataclass(slots=True)
class SigningKeys:
    """A JSON Web Key Set as text; "" until the first fetch."""

    text: str = ""


async def refresh(client: Client, keys: SigningKeys) -> bool:
    """Fetch once; True if the keys changed. Raises: KubeError."""
    text = await client.signing_keys()
    changed = text != keys.text
    keys.text = text
    return changed


async def keep_fresh(client: Client, keys: SigningKeys, on_change: Callable[[], None]) -> None:
    """Fetch for ever."""
    while True:
        pause_s = PERIOD_S
        try:
            if await refresh(client, keys):
                on_change()
        except KubeError as error:
            log.warning("signing keys for the routers: %s", error)
            pause_s = RETRY_S
        await asyncio.sleep(pause_s)
