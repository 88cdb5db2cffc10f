"""The fault port: what the simulator knows of itself, which faults are set, how every request ended.

It is open from the first moment of the process, also while the engine loads, hangs or drains, and asks for no key:
it belongs to tests and must not be reachable for others.
"""

import os
from dataclasses import asdict
from typing import Any

from aiohttp import web

from sluice_sim.effects import Effects
from sluice_sim.fault_catalog import SPECS, FaultError
from sluice_sim.faults import Source
from sluice_sim.state import Sim


def build_control_app(sim: Sim, effects: Effects) -> web.Application:
    control = _Control(sim, effects)
    app = web.Application()
    app.add_routes(
        [
            web.get("/sim/state", control.state),
            web.get("/sim/faults", control.get_faults),
            web.put("/sim/faults", control.put_faults),
            web.delete("/sim/faults", control.delete_faults),
            web.get("/sim/ledger", control.ledger),
        ]
    )
    return app


class _Control:
    def __init__(self, sim: Sim, effects: Effects) -> None:
        self._sim = sim
        self._effects = effects

    async def state(self, _: web.Request) -> web.Response:
        sim, kv = self._sim, self._sim.engine.kv
        gauges, config = sim.gauges, sim.config
        group = config.group
        return web.json_response(
            {
                "phase": sim.phase,
                "paused": sim.engine.is_paused,
                "flavor": config.flavor,
                "role": config.role,
                "version": config.version,
                "pid": os.getpid(),
                "startedAt": sim.started_at,
                "wallClock": sim.clock.wall(),
                "port": sim.port,
                "model": config.model,
                "servedNames": config.served_names,
                "layout": asdict(config.layout),
                "group": group and {"rank": group.rank, "nodes": group.size, "joined": sim.joined},
                "transfer": None if sim.transfer is None else sim.transfer.state(),
                "running": gauges.running,
                "waiting": gauges.waiting,
                "deferred": gauges.deferred,
                "kv": {"blocks": kv.num_blocks, "blockSize": kv.block_size, "live": kv.live, "cached": kv.cached},
                "requests": sim.ledger.totals,
                "memoryGrownMb": sim.memory_mb,
                "faultsFileError": sim.faults_file_error or None,
            }
        )

    async def get_faults(self, _: web.Request) -> web.Response:
        known = {
            name: {
                "scope": spec.scope,
                "effect": spec.effect,
                "args": list(spec.params),
                "onlyAtStart": spec.only_at_start,
                "needs": spec.needs,
            }
            for name, spec in SPECS.items()
        }
        return web.json_response({"faults": self._faults(), "known": known})

    async def put_faults(self, request: web.Request) -> web.Response:
        """The body is the whole set of faults of this source; those of environment and file stay."""
        try:
            self._effects.set_faults(Source.PUT, await request.text())
        except FaultError as error:
            return web.json_response({"error": str(error)}, status=400)
        return web.json_response({"faults": self._faults()})

    async def delete_faults(self, request: web.Request) -> web.Response:
        """All faults of every source, or with `?name=` those of one name (unknown: 404)."""
        name = request.query.get("name")
        if name is not None and name not in SPECS:
            return web.json_response({"error": f"unknown fault {name!r}; known: {', '.join(SPECS)}"}, status=404)
        return web.json_response({"removed": self._effects.remove_faults(name), "faults": self._faults()})

    async def ledger(self, request: web.Request) -> web.Response:
        """Records after `?after=<seq>`, at most `?limit=`."""
        numbers: dict[str, int] = {}
        for name, value in request.query.items():
            if name not in ("after", "limit") or not value.isdecimal():
                return web.json_response({"error": "known: after and limit, both whole numbers"}, status=400)
            numbers[name] = int(value)
        return web.json_response(self._sim.ledger.to_json(numbers.get("after", 0), numbers.get("limit")))

    def _faults(self) -> list[dict[str, Any]]:
        return self._sim.faults.to_json(self._sim.clock.now())
