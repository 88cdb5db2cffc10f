"""Reads smg: its workers (control plane, with the admin key) and its readiness (own port, no key)."""

import json
import logging
from typing import Any

import aiohttp

from sluice.api.router import WorkerStatus
from sluice.router.worklist import Reach, SmgView, SmgWorker

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
READINESS_TIMEOUT_S = 0.8
"""Below the 1 s that the kubelet gives a readiness probe."""
DISCOVERY_LABEL = "smg.ai/discovery-id"
STATUSES = {str(s): s for s in WorkerStatus if s not in (WorkerStatus.WITHHELD, WorkerStatus.ABSENT)}
UNKNOWN_VIEW = SmgView(reach=Reach.UNKNOWN)


class Smg:
    """Client of the smg in this pod; `close` it. Never raises for what smg answers."""

    def __init__(self, url: str, health_url: str, admin_key: str) -> None:
        self._url = url
        self._health_url = health_url
        self._headers = {"Authorization": f"Bearer {admin_key}"}
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))

    async def close(self) -> None:
        await self._session.close()

    async def view(self) -> SmgView:
        """The workers that smg has now."""
        try:
            async with self._session.get(f"{self._url}/workers", headers=self._headers) as response:
                text = await response.text()
                if response.status != 200:
                    log.warning("smg answers GET /workers with %d: %.200s", response.status, text)
                    return UNKNOWN_VIEW
        except aiohttp.ClientConnectorError as error:
            refused = isinstance(error.os_error, ConnectionRefusedError)
            return SmgView(reach=Reach.DOWN) if refused else UNKNOWN_VIEW
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            log.warning("smg does not answer GET /workers: %s: %s", type(error).__name__, error)
            return UNKNOWN_VIEW
        try:
            return SmgView(reach=Reach.ANSWERED, workers=tuple(_worker(w) for w in json.loads(text)["workers"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("smg's GET /workers is not what smg 1.13 answers (%r): %.200s", error, text)
            return UNKNOWN_VIEW

    async def is_ready(self) -> bool:
        """Whether smg has a healthy worker and is not shutting down."""
        timeout = aiohttp.ClientTimeout(total=READINESS_TIMEOUT_S)
        try:
            async with self._session.get(f"{self._health_url}/readiness", timeout=timeout) as response:
                return response.status == 200
        except (TimeoutError, aiohttp.ClientError, OSError):
            return False


def _worker(entry: dict[str, Any]) -> SmgWorker:
    """One entry of smg's answer; a status word that we do not know counts as not ready."""
    labels = entry.get("labels") or {}
    return SmgWorker(
        id=labels.get(DISCOVERY_LABEL),
        url=entry["url"],
        status=STATUSES.get(entry["status"], WorkerStatus.NOT_READY),
    )
