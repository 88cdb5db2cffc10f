"""Process start, loading, drain and exit.

The life of the process: fault port opens, the model "loads" with the engine's port closed, the port opens, SIGTERM
starts the drain (open requests get `--shutdown-timeout` seconds, new ones 500), exit 0. SIGTERM is handled from the
first moment, because a process that is PID 1 of a container gets no default action for it.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Final

from aiohttp import web

from sluice_sim.cli import Config, parse
from sluice_sim.clock import Clock, RealClock
from sluice_sim.control import build_control_app
from sluice_sim.effects import Effects
from sluice_sim.faults import FaultError, Source
from sluice_sim.log import log_event
from sluice_sim.server import build_app
from sluice_sim.state import Phase, Sim

_LAST_WORDS_S: Final = 1.0
"""Aborted requests get so long to write their last bytes."""


class Process:
    """One simulated engine. `run` is its whole life."""

    def __init__(
        self,
        config: Config,
        *,
        env: Mapping[str, str] | None = None,
        clock: Clock | None = None,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        """Needs a running event loop.

        Raises:
            FaultError: SIM_FAULTS or the faults file is wrong.
        """
        self.sim = Sim.build(config, clock or RealClock())
        self.effects = Effects(self.sim, exit_process)
        self.fault_port: int | None = None
        self._faults_text = (os.environ if env is None else env).get("SIM_FAULTS", "")
        self._sigterm = asyncio.Event()
        self._hurry = asyncio.Event()
        self._site: web.TCPSite | None = None
        try:
            self.effects.set_faults(Source.ENV, self._faults_text)
        except FaultError as error:
            raise FaultError(f"SIM_FAULTS: {error}") from error
        self.effects.read_file()

    def terminate(self) -> None:
        """SIGTERM. A second one ends the drain at once."""
        now = self.sim.clock.now()
        self.sim.faults.sigterm_arrived(now)
        if self.sim.faults.state("ignoreSigterm", now) is None:
            (self._hurry if self._sigterm.is_set() else self._sigterm).set()
        else:
            log_event("sigtermIgnored")
        self.effects.apply()

    async def run(self) -> None:
        """Serve until SIGTERM and the drain after it.

        Raises:
            OSError: a port can't be opened.
        """
        async with AsyncExitStack() as stack:
            background = [asyncio.create_task(self.sim.engine.run()), asyncio.create_task(self.effects.run())]
            for task in background:
                stack.push_async_callback(_cancelled, task)
            life = asyncio.create_task(self._live(stack))
            stack.push_async_callback(_cancelled, life)
            done, _ = await asyncio.wait([life, *background], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _live(self, stack: AsyncExitStack) -> None:
        sim, config = self.sim, self.sim.config
        control = await _listen(stack, build_control_app(sim, self.effects), config.host, config.fault_port)
        self.fault_port = _port_of(control)
        log_event("loading", faultPort=self.fault_port, model=config.model, pid=os.getpid())
        await self._load()
        if not self._sigterm.is_set():
            moved = sim.faults.state("portChange", sim.clock.now())
            port = config.port if moved is None else moved["port"]
            sim.phase = Phase.SERVING
            self._site = await _listen(stack, build_app(sim, self.effects), config.host, port)
            sim.port = _port_of(self._site)
            log_event("serving", port=sim.port)
            await self._sigterm.wait()
        log_event("sigterm", openRequests=sim.handled)
        await self._stop()
        log_event("exit", code=0, why="sigterm", totals=dict(sim.ledger.totals))

    async def _load(self) -> None:
        """Return when the model is loaded, or at SIGTERM."""
        sim = self.sim
        started = sim.clock.now()
        while not self._sigterm.is_set():
            now = sim.clock.now()
            slow = sim.faults.state("slowLoad", now)
            done_at = started + sim.config.load_s + (0.0 if slow is None else slow["seconds"])
            is_blocked = sim.faults.state("neverReady", now) is not None
            if not is_blocked and now >= done_at:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self.effects.next_change(), None if is_blocked else done_at - now)

    async def _stop(self) -> None:
        sim = self.sim
        now = sim.clock.now()
        if sim.faults.state("hangOnSigterm", now) is not None:
            await self._close_port()
            self.effects.go_silent()
            log_event("hangsOnSigterm")
            await asyncio.Event().wait()
        if sim.phase is not Phase.DEAD:
            sim.phase = Phase.DRAINING
        await self._until_idle(sim.config.shutdown_timeout_s, hurry=self._hurry)
        sim.engine.end_all("abort")
        await self._until_idle(_LAST_WORDS_S, hurry=None)
        await self._close_port()
        slow = sim.faults.state("slowDrain", sim.clock.now())
        if slow is not None:
            await sim.clock.sleep_until(sim.clock.now() + slow["seconds"])

    async def _until_idle(self, timeout_s: float, hurry: asyncio.Event | None) -> None:
        """Until no request is open, `hurry` is set, or the time is over."""
        waits = [asyncio.create_task(event.wait()) for event in (self.sim.idle, hurry) if event is not None]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            await _cancelled(task)

    async def _close_port(self) -> None:
        self.sim.phase = Phase.STOPPED
        if self._site is not None:
            await self._site.stop()
            self._site = None
            log_event("closed")


async def _listen(stack: AsyncExitStack, app: web.Application, host: str, port: int) -> web.TCPSite:
    # handler_cancellation: the handler learns at once that its client is gone, and frees slot and blocks.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_LAST_WORDS_S)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, host, port)
    await site.start()
    return site


def _port_of(site: web.TCPSite) -> int:
    server = site._server
    assert isinstance(server, asyncio.Server)
    return int(server.sockets[0].getsockname()[1])


async def _cancelled(task: "asyncio.Task[object]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _run(config: Config) -> None:
    process = Process(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, process.terminate)
    await process.run()


def main(argv: Sequence[str] | None = None) -> None:
    """Console script `sluice-sim`. Exit codes: 0 after SIGTERM, 2 wrong arguments or faults, 1 no port to be had."""
    config = parse(sys.argv[1:] if argv is None else argv)
    try:
        asyncio.run(_run(config))
    except FaultError as error:
        sys.exit(_complain(str(error), 2))
    except OSError as error:
        sys.exit(_complain(f"can't listen on {config.host}, port {config.port} or {config.fault_port}: {error}", 1))


def _complain(message: str, code: int) -> int:
    sys.stderr.write(f"sluice-sim: {message}\n")
    return code


if __name__ == "__main__":
    main()
