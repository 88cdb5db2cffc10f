"""SGLang's own endpoints, as read in the source of 0.5.23; never compared with a run.

`/health` is a real generation: it is slow, waits behind other work, and fails while the engine hangs. A rank above 0
answers 200 to it, whatever is the matter.
"""

import asyncio
from typing import Any, Final

from aiohttp import web

from sluice_sim.config import Role
from sluice_sim.engine import Engine
from sluice_sim.protocol import ApiError, Inference
from sluice_sim.room_prefill import FAKE_HOST
from sluice_sim.scheduler import NORMAL_PACE
from sluice_sim.state import Phase, Sim
from sluice_sim.text import StopRules, tokenize
from sluice_sim.transfer import Leg

HEALTH_PATHS: Final = ("/health", "/health_generate")
OPEN_PATHS: Final = (*HEALTH_PATHS, "/ready", "/ping", "/metrics")
"""Paths that no API key guards."""

_HEALTH_LOOK_S: Final = 1.0
"""SGLang looks for its answer once a second, so no health request is faster."""
_MODE_OF: Final = {Role.UNIFIED: "null", Role.PREFILL: "prefill", Role.DECODE: "decode"}


def build_follower_app() -> web.Application:
    """A rank above 0: it says that it is well."""

    async def fine(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.get(path, fine) for path in (*HEALTH_PATHS, "/ready", "/ping")])
    return app


class SglangEndpoints:
    def __init__(self, sim: Sim) -> None:
        self._sim = sim

    def routes(self) -> list[web.RouteDef]:
        return [
            *(web.get(path, self.health) for path in HEALTH_PATHS),
            web.get("/ready", self.ready),
            web.get("/ping", self.ping),
            web.get("/v1/loads", self.loads),
            *(web.get(path, self.model_info) for path in ("/model_info", "/get_model_info")),
            *(web.get(path, self.server_info) for path in ("/server_info", "/get_server_info")),
        ]

    async def health(self, _: web.Request) -> web.Response:
        """200 once the scheduler has put out anything since the question came; 503 while it drains, or too late."""
        sim = self._sim
        if sim.phase is not Phase.SERVING:
            return web.Response(status=503)
        engine, seen = sim.engine, sim.engine.outputs
        ticket = engine.submit(
            _health_request(sim), NORMAL_PACE, await self._leg(), arrived_at=sim.clock.now(), wakes_per_token=False
        )
        try:
            is_well = await _puts_out(engine, seen, sim.config.health_timeout_s)
        finally:
            engine.abort(ticket)
        sim.is_unhealthy = not is_well
        return web.Response(status=200 if is_well else 503)

    async def _leg(self) -> Leg:
        """Never the real transfer: a health request has no other side."""
        if self._sim.transfer is None:
            return Leg()
        try:
            return await self._sim.transfer.open({"bootstrap_host": FAKE_HOST}, _health_request(self._sim), "health")
        except ApiError as error:
            raise AssertionError(f"a health request was refused: {error}") from error

    async def ready(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._sim.phase is Phase.SERVING and not self._sim.is_unhealthy else 503)

    async def ping(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._sim.phase is Phase.DEAD else 200)

    async def loads(self, _: web.Request) -> web.Response:
        sim, gauges, kv = self._sim, self._sim.gauges, self._sim.engine.kv
        load: dict[str, Any] = {
            "dp_rank": 0,
            "num_running_reqs": gauges.running,
            "num_waiting_reqs": gauges.waiting,
            "num_total_reqs": gauges.running + gauges.waiting,
            "num_used_tokens": kv.live * kv.block_size,
            "max_total_num_tokens": kv.num_blocks * kv.block_size,
            "token_usage": kv.usage,
            "max_running_requests": sim.config.limits.max_num_seqs,
            "disaggregation": {
                "mode": _MODE_OF[sim.config.role],
                "prefill_bootstrap_queue_reqs": gauges.bootstrapping,
                "prefill_inflight_queue_reqs": gauges.sending,
                "decode_transfer_queue_reqs": gauges.deferred,
            },
        }
        return web.json_response({"version": sim.config.version, "dp_rank_count": 1, "loads": [load]})

    async def model_info(self, _: web.Request) -> web.Response:
        config = self._sim.config
        return web.json_response(
            {"model_path": config.model, "served_model_name": config.served_names[0], "is_generation": True}
        )

    async def server_info(self, _: web.Request) -> web.Response:
        config, kv = self._sim.config, self._sim.engine.kv
        return web.json_response(
            {
                "version": config.version,
                "model_path": config.model,
                "served_model_name": config.served_names[0],
                "tp_size": config.layout.tensor,
                "pp_size": config.layout.pipeline,
                "dp_size": config.layout.data,
                "page_size": config.block_size,
                "max_running_requests": config.limits.max_num_seqs,
                "max_total_num_tokens": kv.num_blocks * kv.block_size,
                "disaggregation_mode": _MODE_OF[config.role],
            }
        )


def _health_request(sim: Sim) -> Inference:
    return Inference(
        is_chat=False,
        model=sim.config.served_names[0],
        prompt=tokenize("health"),
        rules=StopRules(max_tokens=1),
        stream=False,
        include_usage=False,
        continuous_usage=False,
        seed=None,
    )


async def _puts_out(engine: Engine, seen: int, timeout_s: float) -> bool:
    """Whether more than `seen` tokens are out by one of the looks within the time."""
    waited_s = 0.0
    while waited_s < timeout_s:
        look_s = min(_HEALTH_LOOK_S, timeout_s - waited_s)
        await asyncio.sleep(look_s)
        waited_s += look_s
        if engine.outputs > seen:
            return True
    return False
