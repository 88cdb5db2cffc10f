"""The agent's HTTP side, port 9900.

| path | for | answer |
|---|---|---|
| `GET /state?after=<seq>` | operator, router sidecars | `AgentState`; held up to 5 s while `seq` equals `after` |
| `GET /startup` | startup probe of the engine container | 200 once this run lists its model (or answers 401/403) |
| `GET /ready` | its readiness probe | 200 while the phase is Ready |
| `GET /alive` | its liveness probe | 503 only from 10 s after Hung |
| `GET /drain` | its preStop hook | returns when the engine may be stopped; 403 without the right `X-Sluice-Drain` |
| `GET /healthz` | liveness probe of the agent itself | 503 if the agent stopped looking at its engine |
| `GET /metrics` | Prometheus | |

`/drain?unrouted=true`: the caller knows that no router has the instance, so there is no settle time.
Everything but `/drain` only reads.
"""

import hmac
import time

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from sluice.agent.report import Clock, StateCollector, report
from sluice.agent.verdict import is_alive, is_started
from sluice.agent.watch import Watch
from sluice.api.agent import MAX_STATE_BYTES, AgentState, EnginePhase

HOLD_S = 5.0
"""Longest a `GET /state` is held."""
DRAIN_HEADER = "X-Sluice-Drain"
STUCK_S = 30.0
"""Without a round for this long the agent is stuck: a round lasts 2 s at most."""


class Server:
    """Handlers over one `Watch`."""

    def __init__(self, watch: Watch, clock: Clock) -> None:
        self._watch = watch
        self._clock = clock
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(StateCollector(self._report))

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 1024)
        app.add_routes(
            [
                web.get("/state", self.state),
                web.get("/startup", self.startup),
                web.get("/ready", self.ready),
                web.get("/alive", self.alive),
                web.get("/drain", self.drain),
                web.get("/healthz", self.healthz),
                web.get("/metrics", self.metrics),
            ]
        )
        return app

    async def state(self, request: web.Request) -> web.Response:
        after = request.query.get("after")
        if after is not None:
            if not after.isdecimal():
                raise web.HTTPBadRequest(
                    text=f"after={after[:40]!r} is not a sequence number; use the last state's seq"
                )
            await self._watch.wait_for_news(int(after), HOLD_S)
        body = self._report().model_dump_json(by_alias=True)
        if len(body.encode()) > MAX_STATE_BYTES:  # texts are cut, so only a configuration with thousands of signals
            raise web.HTTPInternalServerError(text=f"state exceeds {MAX_STATE_BYTES} bytes")
        return web.Response(text=body, content_type="application/json")

    async def startup(self, _: web.Request) -> web.Response:
        return self._probe(is_started(self._watch.state))

    async def ready(self, _: web.Request) -> web.Response:
        return self._probe(self._watch.state.phase is EnginePhase.READY)

    async def alive(self, _: web.Request) -> web.Response:
        return self._probe(is_alive(self._watch.state, time.monotonic()))

    async def healthz(self, _: web.Request) -> web.Response:
        return self._probe(time.monotonic() - self._watch.state.observed_at < STUCK_S)

    async def drain(self, request: web.Request) -> web.Response:
        given = request.headers.get(DRAIN_HEADER, "")
        if not hmac.compare_digest(given.encode(), self._watch.config.drain_token.encode()):
            raise web.HTTPForbidden(
                text=f"header {DRAIN_HEADER} is missing or wrong: only the pod's own preStop drains"
            )
        end = await self._watch.drain(unrouted=request.query.get("unrouted") == "true")
        return web.Response(text=f"{end.reason}: {end.message}\n")

    async def metrics(self, _: web.Request) -> web.Response:
        page = generate_latest(self._registry)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    def _report(self) -> AgentState:
        return report(self._watch.state, self._watch.config, self._clock, said_at=time.time())

    def _probe(self, good: bool) -> web.Response:
        """The phase goes into the body: the kubelet shows it in the Event of a failed probe."""
        state = self._watch.state
        return web.Response(
            status=200 if good else 503, text=f"{state.phase} {state.reason} {state.message}".strip() + "\n"
        )
