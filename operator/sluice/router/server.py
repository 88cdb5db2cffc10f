"""The sidecar's HTTP side, port 9910.

| path | for | answer |
|---|---|---|
| `PUT /workers` | operator's token | `RouterState`; 400 bad list, 401 bad token, 403 other subject, 503 no key |
| `GET /workers` | operator, siblings | `RouterState`, read back from smg now; needs no token (siblings have none) |
| `GET /ready` | readiness probe of the pod | 200 if a list is held, open, not empty, and smg has a healthy worker |
| `GET /healthz` | liveness probe of the sidecar | 200 |
| `GET /metrics` | Prometheus | |
"""

import logging
from collections import Counter
from collections.abc import Iterable

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from pydantic import ValidationError

from sluice.api.router import WorkerList
from sluice.router.auth import Verifier
from sluice.router.sidecar import Sidecar
from sluice.router.worklist import Reach

log = logging.getLogger(__name__)

MAX_LIST_BYTES = 2 * 1024 * 1024


class Server:
    """Handlers over one `Sidecar`."""

    def __init__(self, sidecar: Sidecar, verifier: Verifier) -> None:
        self._sidecar = sidecar
        self._verifier = verifier
        self._puts: Counter[int] = Counter()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(SidecarCollector(sidecar, self._puts))

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_LIST_BYTES)
        app.add_routes(
            [
                web.put("/workers", self.put),
                web.get("/workers", self.get),
                web.get("/ready", self.ready),
                web.get("/healthz", self.healthz),
                web.get("/metrics", self.metrics),
            ]
        )
        return app

    async def put(self, request: web.Request) -> web.Response:
        response = await self._put(request)
        self._puts[response.status] += 1
        return response

    async def _put(self, request: web.Request) -> web.Response:
        refusal = self._verifier.refuse(request.headers.get("Authorization"))
        if refusal is not None:
            log.warning("PUT /workers from %s refused: %d %s", request.remote, refusal.status, refusal.message)
            return _error(refusal.status, refusal.message)
        try:
            wanted = WorkerList.model_validate_json(await request.read())
            await self._sidecar.put(wanted)
        except ValidationError as error:
            return _error(400, f"not a worker list: {error}")
        except ValueError as error:
            return _error(400, str(error))
        except OSError as error:
            return _error(500, f"the shared volume can't be written, the old list stays: {error}")
        return await self.get(request)

    async def get(self, _: web.Request) -> web.Response:
        state = await self._sidecar.state()
        return web.Response(text=state.model_dump_json(by_alias=True), content_type="application/json")

    async def ready(self, _: web.Request) -> web.Response:
        reason = await self._sidecar.why_not_ready()
        return web.Response(status=503 if reason else 200, text=(reason or "ready") + "\n")

    async def healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def metrics(self, _: web.Request) -> web.Response:
        page = generate_latest(self._registry)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message[:2048]}, status=status)


class SidecarCollector(Collector):
    """What is wanted and what smg had in the last round; without smg's answer there is no sample of the latter."""

    def __init__(self, sidecar: Sidecar, puts: Counter[int]) -> None:
        self._sidecar = sidecar
        self._puts = puts

    def collect(self) -> Iterable[Metric]:
        label = self._sidecar.config.service
        held, view = self._sidecar.held, self._sidecar.view
        numbers = {
            "list_held": ("1 once a worker list is held", float(held is not None)),
            "smg_reachable": ("1 if smg said which workers it has", float(view.reach is Reach.ANSWERED)),
            "workers_left_out": ("Wanted workers kept out", float(len(self._sidecar.manifest.left_out))),
        }
        if held is not None:
            numbers["workers_wanted"] = ("Workers on the list", float(len(held.wanted.workers)))
            numbers["list_received_timestamp_seconds"] = ("When the list came from the operator", held.received_at)
        for name, (documentation, value) in numbers.items():
            gauge = GaugeMetricFamily(f"sluice_router_{name}", documentation, labels=["service"])
            gauge.add_metric([label], value)
            yield gauge
        if view.reach is Reach.ANSWERED:
            workers = GaugeMetricFamily(
                "sluice_router_workers", "Workers that smg has, by its own status", labels=["service", "status"]
            )
            for status, count in Counter(str(worker.status) for worker in view.workers).items():
                workers.add_metric([label, status], float(count))
            yield workers
        puts = CounterMetricFamily("sluice_router_puts", "PUT /workers by status code", labels=["service", "code"])
        for code, count in self._puts.items():
            puts.add_metric([label, str(code)], float(count))
        yield puts
