"""What the agent reads of each engine with the adapter's orders: one file per engine and shape of its metrics page.

To add an engine, add a file: what is declared, what the engine answers, what the agent has to make of it.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from sluice.agent.engine import Engine
from sluice.agent.facts import Contact
from sluice.api.agent import AgentConfig
from sluice.plan.declared import PoolDeclaration
from sluice.plan.engines import ADAPTERS
from sluice.plan.engines.adapter import engine_port

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("*.yaml"))


def answering(config: AgentConfig, fixture: dict[str, Any]) -> web.Application:
    """The engine of the fixture: its pages at the paths that the agent is told."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": config.served_model}]})

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=fixture["metrics"])

    async def load(request: web.Request) -> web.Response:
        asked = request.path_qs == config.load_path
        return web.Response(text=fixture["load"] if asked else "", content_type="application/json")

    async def version(_: web.Request) -> web.Response:
        return web.Response(text=fixture["version"], content_type="application/json")

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_get(config.metrics_path, metrics)
    paths = {path: path.partition("?")[0] for path in (config.load_path, config.version_path) if path}
    if config.load_path:
        app.router.add_get(paths[config.load_path], load)
    if config.version_path and paths[config.version_path] not in (paths.get(config.load_path or ""),):
        app.router.add_get(paths[config.version_path], version)
    return app


def orders(declaration: PoolDeclaration, port: int) -> AgentConfig:
    publishes = ADAPTERS[declaration.engine.type].publishes(declaration)
    return AgentConfig(
        instance="i",
        engine=declaration.engine.type,
        engine_port=port,
        served_model=declaration.served_model,
        metrics_path=publishes.metrics_path,
        load_path=publishes.load_path,
        load_fields=list(publishes.load_fields) or None,
        version_path=publishes.version_path,
        signals={signal: list(sources) for signal, sources in publishes.signals.items()},
        drain_token="t",
    )


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
async def test_the_agent_reads_what_the_engine_means(path: Path) -> None:
    fixture: dict[str, Any] = yaml.safe_load(path.read_text())
    declaration = PoolDeclaration.model_validate(fixture["declared"])
    server = TestServer(answering(orders(declaration, engine_port(declaration)), fixture), host="127.0.0.1")
    await server.start_server()
    engine = Engine(orders(declaration, server.port or 0))
    try:
        seen = await engine.observe()
    finally:
        await engine.close()
        await server.close()
    expected = fixture["expect"]
    assert seen.contact is Contact.ANSWERED
    assert seen.serves_model is True
    assert {str(signal): value for signal, value in seen.signals.items()} == expected["signals"]
    assert (seen.load, seen.version) == (expected["load"], expected["version"])
