"""Process start, loading, drain and exit.

The life of a vLLM: fault port opens, the nodes of a group come together, the model "loads" with the engine's port
closed, side port and port open, SIGTERM starts the drain (open requests get `--shutdown-timeout` seconds, new ones
500), exit 0. SGLang's port is open from the start and says 503 until the model is loaded; its drain takes new requests
and has no end. A rank above 0 serves nothing and has no drain. SIGTERM is handled from the first moment, because a
process that is PID 1 of a container gets no default action for it.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Final

from aiohttp import web

from sluice_sim.cli import parse
from sluice_sim.clock import Clock, RealClock
from sluice_sim.config import Config, Flavor
from sluice_sim.control import build_control_app
from sluice_sim.effects import Effects
from sluice_sim.fault_catalog import FaultError
from sluice_sim.faults import Source
from sluice_sim.group import GroupError
from sluice_sim.log import log_event
from sluice_sim.membership import Membership
from sluice_sim.server import build_app
from sluice_sim.sglang_server import build_follower_app
from sluice_sim.state import Phase, Sim

_LAST_WORDS_S: Final = 1.0
"""Aborted requests get so long to write their last bytes."""
_SGLANG_DRAIN_LOOK_S: Final = 5.0
"""SGLang looks so often whether its drain is done."""


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
        self.side_port: int | None = None
        """Where KV is handed over, once open."""
        self.membership = None if config.group is None else Membership(self.sim, self.effects, config.group)
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
        if self.sim.config.follows and self.sim.config.flavor is Flavor.SGLANG:
            log_event("sigtermIgnored")
        elif self.sim.faults.state("ignoreSigterm", now) is None:
            (self._hurry if self._sigterm.is_set() else self._sigterm).set()
        else:
            log_event("sigtermIgnored")
        self.effects.apply()

    async def run(self) -> None:
        """Serve until SIGTERM and the drain after it.

        Raises:
            OSError: a port can't be opened.
            GroupError: the other nodes did not come in time.
        """
        async with AsyncExitStack() as stack:
            background = [asyncio.create_task(self.sim.engine.run()), asyncio.create_task(self.effects.run())]
            if self.sim.transfer is not None:
                background.append(asyncio.create_task(self.sim.transfer.run()))
            for task in background:
                stack.push_async_callback(_cancelled, task)
            life = asyncio.create_task(self._live(stack))
            try:
                done, _ = await asyncio.wait([life, *background], return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:  # before what it opened is closed under it
                await _cancelled(life)

    async def _live(self, stack: AsyncExitStack) -> None:
        sim, config = self.sim, self.sim.config
        control = await _listen(stack, build_control_app(sim, self.effects), config.host, config.fault_port)
        self.fault_port = _port_of(control)
        log_event("loading", faultPort=self.fault_port, model=config.model, pid=os.getpid())
        if config.flavor is Flavor.SGLANG:
            await self._open_port(stack)
        await self._unless_sigterm(self._start(stack))
        if not self._sigterm.is_set():
            await self._serve(stack)
        log_event("sigterm", openRequests=sim.handled)
        await self._stop()
        log_event("exit", code=0, why="sigterm", totals=dict(sim.ledger.totals))

    async def _start(self, stack: AsyncExitStack) -> None:
        """Everything before the first request can be served."""
        if self.membership is not None:
            await self.membership.join(stack)
        await self._load()
        if self.membership is not None and not self._sigterm.is_set():
            await self.membership.loaded(stack)
        transfer = self.sim.transfer
        app = None if transfer is None else transfer.app()
        if transfer is not None and app is not None:
            side = await _listen(stack, app, *transfer.address)
            self.side_port = _port_of(side)
            transfer.listens_on(self.side_port)

    async def _serve(self, stack: AsyncExitStack) -> None:
        """Until SIGTERM."""
        sim = self.sim
        if sim.config.follows:
            assert self.membership is not None
            sim.phase = Phase.FOLLOWING
            log_event("following")
            await self._unless_sigterm(self.membership.follow())
            return
        if sim.phase is not Phase.DEAD:  # a rank may have died while this one loaded
            sim.phase = Phase.SERVING
        if self._site is None:
            await self._open_port(stack)
        log_event("serving", port=sim.port, sidePort=self.side_port)
        await self._sigterm.wait()

    async def _open_port(self, stack: AsyncExitStack) -> None:
        sim, config = self.sim, self.sim.config
        moved = sim.faults.state("portChange", sim.clock.now())
        port = config.port if moved is None else moved["port"]
        app = build_follower_app() if config.follows else build_app(sim, self.effects)
        self._site = await _listen(stack, app, config.host, port)
        sim.port = _port_of(self._site)

    async def _unless_sigterm(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, or as much of it as there is time for before SIGTERM."""
        task, sigterm = asyncio.create_task(work), asyncio.create_task(self._sigterm.wait())
        try:
            done, _ = await asyncio.wait([task, sigterm], return_when=asyncio.FIRST_COMPLETED)
            if task in done:
                task.result()
        finally:
            await _cancelled(sigterm)
            await _cancelled(task)

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
        if sim.config.shutdown_timeout_s is not None:
            await self._until_idle(sim.config.shutdown_timeout_s, hurry=self._hurry)
        elif not sim.is_unhealthy:  # an SGLang that failed its own health request exits without a drain
            while sim.handled and not self._hurry.is_set():
                await self._until_idle(_SGLANG_DRAIN_LOOK_S, hurry=self._hurry)
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
    except GroupError as error:
        sys.exit(_complain(str(error), 1))
    except OSError as error:
        sys.exit(_complain(f"can't listen on {config.host}, port {config.port} or {config.fault_port}: {error}", 1))


def _complain(message: str, code: int) -> int:
    sys.stderr.write(f"sluice-sim: {message}\n")
    return code


if __name__ == "__main__":
    main()
