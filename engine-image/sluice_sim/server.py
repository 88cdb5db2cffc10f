"""The engine's port: API key, request ids, and the endpoints of the flavour (SGLang's own are in `sglang_server`)."""

import hmac
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from sluice_sim.config import Flavor
from sluice_sim.effects import Effects
from sluice_sim.faults import INFERENCE_PATHS
from sluice_sim.inference import REQUEST_ID, InferenceApi
from sluice_sim.protocol import ApiError, error_body, parse_json, parse_tokenize
from sluice_sim.sglang_server import OPEN_PATHS, SglangEndpoints
from sluice_sim.state import Phase, Sim

_MAX_BODY_BYTES: Final = 16 * 1024 * 1024
_MAX_REQUEST_ID: Final = 256

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(sim: Sim, effects: Effects) -> web.Application:
    """The application of the engine's port."""
    endpoints = _Endpoints(sim)
    inference = InferenceApi(sim, effects, endpoints.turn_away)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = request.headers.get("X-Request-Id", "")[:_MAX_REQUEST_ID] or uuid.uuid4().hex
        if sim.phase is Phase.STOPPED:  # a kept-alive connection outlived the closed port
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        if sim.phase is Phase.LOADING:  # only SGLang's port is open by now
            return web.json_response(error_body(503, "The model is not loaded yet."), status=503)
        if request.path not in INFERENCE_PATHS:  # those are turned away inside, so that the ledger has them
            refusal = endpoints.turn_away(request)
            if refusal is not None:
                return refusal
        return await handler(request)

    async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["X-Request-Id"] = request[REQUEST_ID]

    app = web.Application(middlewares=[middleware], client_max_size=_MAX_BODY_BYTES)
    if sim.config.sends_request_ids:
        app.on_response_prepare.append(add_request_id)
    app.add_routes(
        [
            web.get("/v1/models", endpoints.models),
            web.post("/tokenize", endpoints.tokenize),
            web.post("/v1/completions", inference.completions),
            web.post("/v1/chat/completions", inference.chat_completions),
        ]
    )
    if sim.config.has_metrics:
        app.router.add_get("/metrics", endpoints.metrics)
    if sim.config.flavor is Flavor.SGLANG:
        app.add_routes(SglangEndpoints(sim).routes())
    else:
        app.add_routes(
            [
                web.get("/health", endpoints.health),
                web.get("/ping", endpoints.health),
                web.post("/ping", endpoints.health),
                web.get("/load", endpoints.load),
                web.get("/version", endpoints.version),
            ]
        )
    return app


class _Endpoints:
    def __init__(self, sim: Sim) -> None:
        self._sim = sim

    def turn_away(self, request: web.Request) -> web.Response | None:
        """401 without the API key where one is asked for, the code of a `status` fault, or None."""
        if self._sim.config.api_keys and self._is_guarded(request.path) and not self._has_key(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        args = self._sim.faults.take("status", self._sim.clock.now(), request.path)
        if args is not None:
            return web.json_response(error_body(args["code"], "status fault"), status=args["code"])
        return None

    def _is_guarded(self, path: str) -> bool:
        """vLLM's key guards only what is below /v1, SGLang's all but a few paths."""
        if self._sim.config.flavor is Flavor.SGLANG:
            return path not in OPEN_PATHS
        return path.startswith("/v1/")

    def _has_key(self, request: web.Request) -> bool:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        known = [hmac.compare_digest(token.encode(), key.encode()) for key in self._sim.config.api_keys]
        return scheme.lower() == "bearer" and any(known)

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._sim.phase is Phase.DEAD else 200)

    async def load(self, _: web.Request) -> web.Response:
        return web.json_response({"server_load": self._sim.handled if self._sim.config.tracks_load else 0})

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self._sim.config.version})

    async def metrics(self, _: web.Request) -> web.Response:
        sim = self._sim
        slow = sim.faults.state("metricsSlow", sim.clock.now())
        if slow is not None:
            await sim.clock.sleep_until(sim.clock.now() + slow["seconds"])
        page = sim.metrics.render(sim.gauges, sim.faults, sim.clock.now())
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def models(self, _: web.Request) -> web.Response:
        config = self._sim.config
        cards: list[dict[str, Any]] = [
            {
                "id": name,
                "object": "model",
                "created": int(self._sim.clock.wall()),
                "owned_by": config.flavor,
                "root": config.model,
                "parent": None,
                "max_model_len": config.max_model_len,
            }
            for name in config.served_names
        ]
        return web.json_response({"object": "list", "data": cards})

    async def tokenize(self, request: web.Request) -> web.Response:
        limits = self._sim.request_limits
        try:
            tokens = parse_tokenize(parse_json(await request.read()), limits)
        except ApiError as error:
            return web.json_response(error.body(), status=error.status)
        return web.json_response({"count": len(tokens), "max_model_len": limits.max_model_len, "tokens": tokens})
