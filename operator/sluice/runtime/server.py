"""Probes and metrics of the operator, on an own small server that is up before the Lease is asked for.

`/healthz` fails only when a restart helps: a loop that lags, a refresh that hangs, a dead watch. An API server that is
away is no reason. `/readyz` fails until the start barrier is passed, with the reason as text; a standby is ready, else
a rolling update would wait for ever.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from sluice.runtime.metrics import Metrics

log = logging.getLogger(__name__)

MAX_LAG_S: Final = 10.0
TICK_S: Final = 0.5


@dataclass(slots=True)
class Health:
    """What the probes answer; the parts of the process write here."""

    waiting_for: str = "starting"
    """Why work can't begin; "" once it may."""
    checks: list[Callable[[], str]] = field(default_factory=list)
    """Each returns why the process should be restarted, or ""."""
    lag_s: float = 0.0
    """Lag of the event loop over the last ticks."""

    def unhealthy(self) -> str:
        if self.lag_s > MAX_LAG_S:
            return f"the event loop lags {self.lag_s:.1f} s"
        return next((problem for check in self.checks if (problem := check())), "")


async def watch_lag(health: Health, metrics: Metrics) -> None:
    """Measure how late the loop wakes us, for ever."""
    while True:
        due = monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        health.lag_s = max(monotonic() - due, 0.0)
        metrics.lagged(health.lag_s)


class Server:
    """`start`, later `stop`."""

    def __init__(self, health: Health, metrics: Metrics) -> None:
        self._health = health
        self._metrics = metrics
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._show_metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)

    async def start(self, host: str, port: int) -> int:
        """Listen; port 0 takes a free one. Returns the port. Raises: OSError, the port is taken."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        problem = self._health.unhealthy()
        return web.Response(text=problem or "ok", status=500 if problem else 200)

    async def _readyz(self, _: web.Request) -> web.Response:
        problem = self._health.waiting_for
        return web.Response(text=problem or "ok", status=503 if problem else 200)

    async def _show_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})
