"""Process start of the agent (`sluice-agent`): configuration, signals, ports.

Environment: `SLUICE_AGENT_CONFIG` (JSON of `sluice.api.agent.AgentConfig`, required), `SLUICE_AGENT_STATE_DIR`
(default `/run/sluice`, an emptyDir), `SLUICE_AGENT_HOST` and `SLUICE_AGENT_PORT` (0.0.0.0:9900). SIGTERM ends the agent
within about a second: in a pod it comes after the engine has ended.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from aiohttp import web

from sluice.agent.engine import Engine
from sluice.agent.memory import BOOT_ID, Memory
from sluice.agent.report import Clock
from sluice.agent.server import Server
from sluice.agent.watch import Watch
from sluice.api import names
from sluice.api.agent import AgentConfig

log = logging.getLogger("sluice.agent")

CONFIG_VARIABLE = "SLUICE_AGENT_CONFIG"
EXIT_CONFIG = 2


def read_config(environ: Mapping[str, str]) -> AgentConfig:
    """The agent's configuration; ValueError with the reason if it is missing or wrong."""
    return AgentConfig.from_environment(CONFIG_VARIABLE, environ)


async def serve(config: AgentConfig, *, state_dir: Path, host: str, port: int) -> None:
    """Run until SIGTERM or SIGINT; a bug in the loop ends the process, so that the kubelet restarts it."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    engine = Engine(config)
    watch = Watch(config, engine, Memory(state_dir / "agent.json", config.instance, BOOT_ID.read_text().strip()))
    server = Server(watch, Clock(offset_s=time.time() - time.monotonic()))
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    log.info("watching %s instance %s on port %d", config.engine, config.instance, config.engine_port)
    rounds = asyncio.create_task(watch.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({rounds, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if rounds.done():
            rounds.result()
    finally:
        rounds.cancel()
        stopping.cancel()
        await runner.cleanup()
        await engine.close()


def main() -> None:
    """Entry point; exit code 2 means that the configuration is wrong."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    environ = os.environ
    try:
        config = read_config(environ)
        port = int(environ.get("SLUICE_AGENT_PORT", names.PORT_AGENT))
    except ValueError as error:
        log.error("%s", error)
        sys.exit(EXIT_CONFIG)
    state_dir = Path(environ.get("SLUICE_AGENT_STATE_DIR", "/run/sluice"))
    asyncio.run(serve(config, state_dir=state_dir, host=environ.get("SLUICE_AGENT_HOST", "0.0.0.0"), port=port))
