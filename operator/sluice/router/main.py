"""Process start of the router's sidecar (`sluice-router-sidecar`): configuration, signals, ports.

Environment: `SLUICE_ROUTER_CONFIG` (JSON of `sluice.api.router.SidecarConfig`, required), `POD_IP` (the pod's own
address, to leave itself out among the siblings; optional). SIGTERM ends it within about a second; as a native sidecar
it is stopped after smg.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from aiohttp import web

from sluice.api.router import SidecarConfig
from sluice.router.auth import Verifier
from sluice.router.files import RunDir
from sluice.router.server import Server
from sluice.router.sidecar import Sidecar
from sluice.router.smg import Smg

log = logging.getLogger("sluice.router")

CONFIG_VARIABLE = "SLUICE_ROUTER_CONFIG"
EXIT_CONFIG = 2


def read_config(environ: Mapping[str, str]) -> SidecarConfig:
    """The sidecar's configuration; ValueError with the reason if it is missing or wrong."""
    return SidecarConfig.from_environment(CONFIG_VARIABLE, environ)


async def serve(config: SidecarConfig, *, own_ip: str | None) -> None:
    """Run until SIGTERM or SIGINT; a bug ends the process, so that the kubelet restarts it."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    run_dir = RunDir(Path(config.run_dir))
    smg = Smg(config.smg_url, config.smg_health_url, run_dir.admin_key())
    sidecar = Sidecar(config, run_dir, smg, own_ip=own_ip)
    verifier = Verifier(Path(config.keys_file), audience=config.audience, subject=config.operator_subject)
    runner = web.AppRunner(Server(sidecar, verifier).app(), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, config.host, config.port).start()
    log.info("sidecar of %s on port %d", config.service, config.port)
    rounds = asyncio.create_task(sidecar.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({rounds, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if rounds.done():
            rounds.result()
    finally:
        rounds.cancel()
        stopping.cancel()
        await runner.cleanup()
        await sidecar.close()
        await smg.close()


def main() -> None:
    """Entry point; exit code 2 means that the configuration is wrong."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        config = read_config(os.environ)
    except ValueError as error:
        log.error("%s", error)
        sys.exit(EXIT_CONFIG)
    asyncio.run(serve(config, own_ip=os.environ.get("POD_IP") or None))
