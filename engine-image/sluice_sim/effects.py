"""Faults of the whole process: pausing the engine, exits, the wall clock, memory; and where faults are set from.

Invariants: the engine is paused exactly while `hang` or `frozen` holds, a rank of its group does not answer, the model
crashed, or the process went silent;
a wrong faults file never replaces a right one (its error is in `/sim/state` and in the log).
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from sluice_sim.config import NixlTransfer
from sluice_sim.fault_catalog import Fault, FaultError, Needs, parse_faults
from sluice_sim.faults import Source
from sluice_sim.log import log_event
from sluice_sim.state import Phase, Sim

OOM_EXIT_CODE: Final = 137
"""128 + SIGKILL, what a container's status says after an OOM kill."""

_FILE_PERIOD_S: Final = 1.0
_MEMORY_PERIOD_S: Final = 0.1
_MB: Final = 1_000_000


class Effects:
    def __init__(self, sim: Sim, exit_process: Callable[[int], None]) -> None:
        """`exit_process` ends the process at once with the code, whatever is open."""
        self._sim = sim
        self._exit_process = exit_process
        self._waiters: list[asyncio.Future[None]] = []
        self._is_silent = False
        self._file_text = ""
        self._file_error = ""
        self._memory: list[bytes] = []
        self._memory_at: float | None = None
        self.kill_follower: Callable[[int | None, int], None] = lambda _rank, _code: None
        """Makes a follower exit (the last one for None); the leader sets it."""

    def next_change(self) -> "asyncio.Future[None]":
        """Done at the next moment at which faults may have changed."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def set_faults(self, source: Source, text: str) -> None:
        """Put the faults of one source in force.

        Raises:
            FaultError: the text is wrong, or has faults of the start though the model is loaded. Nothing changes.
        """
        faults = parse_faults(text, self._sim.metrics.names())
        for fault in faults:
            self._check_needs(fault)
        if source is Source.PUT and self._sim.phase is not Phase.LOADING:
            late = [fault.name for fault in faults if fault.spec.only_at_start]
            if late:
                raise FaultError(
                    f"{', '.join(late)}: acts only until the model is loaded; set it in SIM_FAULTS or the faults file"
                )
        self._sim.faults.replace(source, faults, self._sim.clock.now())
        if faults:
            log_event("faults", source=source, names=[fault.name for fault in faults])
        self.apply()

    def _check_needs(self, fault: Fault) -> None:
        """A fault that can have no effect here would make a test believe what it never tried."""
        transfer, group = self._sim.config.transfer, self._sim.config.group
        problem = None
        match fault.spec.needs:
            case Needs.TRANSFER if transfer is None:
                problem = "this engine hands no KV over; start it with --role prefill or decode"
            case Needs.LEASE if not isinstance(transfer, NixlTransfer):
                problem = "only an engine of flavour vllm with --role prefill or decode has leases"
            case Needs.GROUP if group is None:
                problem = "this engine is not one of several nodes; start it with --nnodes"
        rank = fault.args.get("rank")
        if problem is None and group is not None and rank is not None and rank >= group.size:
            problem = f"rank {rank} is not within the {group.size} nodes of this group"
        if problem is not None:
            raise FaultError(f"{fault.name}: {problem}")

    def read_file(self) -> None:
        """Put the faults file in force if its text changed; a missing file has no faults.

        Raises:
            FaultError: the text is wrong, or the file can't be read; what was in force stays.
        """
        path = self._sim.config.faults_file
        try:
            text = path.read_text()
        except (FileNotFoundError, NotADirectoryError):
            text = ""
        except (OSError, UnicodeDecodeError) as error:
            raise FaultError(f"{path}: {error}") from error
        if text != self._file_text:
            self._file_text = text
            self._file_error = ""
            try:
                self.set_faults(Source.FILE, text)
            except FaultError as error:
                self._file_error = f"{path}: {error}"
        if self._file_error:
            raise FaultError(self._file_error)
        self._sim.faults_file_error = ""

    def remove_faults(self, name: str | None) -> int:
        removed = self._sim.faults.remove(name)
        self.apply()
        return removed

    def apply(self) -> None:
        """Make the process be as the faults say now; call after anything that may arm one."""
        sim = self._sim
        now = sim.clock.now()
        for fault in sim.faults.due_events(now):
            self._happen(fault)
        is_frozen = sim.faults.state("frozen", now) is not None
        if is_frozen:
            sim.metrics.freeze(sim.gauges)
        else:
            sim.metrics.thaw()
        is_hung = is_frozen or sim.faults.state("hang", now) is not None
        if is_hung or sim.is_stalled or self._is_silent or sim.phase is Phase.DEAD:
            sim.engine.pause()
        else:
            sim.engine.resume()
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def go_silent(self) -> None:
        """No token ever again (`hangOnSigterm`)."""
        self._is_silent = True
        self.apply()

    def crash_model(self, exit_in_s: float, why: str, code: int = 1) -> None:
        """The engine core dies: open requests fail now, the process exits after so many seconds."""
        self._sim.phase = Phase.DEAD
        self._sim.engine.end_all("error")
        self.apply()
        asyncio.get_running_loop().call_later(exit_in_s, self.exit, code, why)

    async def run(self) -> None:
        """Follow time and the faults file for ever; cancel to stop."""
        next_read = self._sim.clock.now()
        while True:
            now = self._sim.clock.now()
            if now >= next_read:
                next_read = now + _FILE_PERIOD_S
                try:
                    self.read_file()
                except FaultError as error:
                    if str(error) != self._sim.faults_file_error:
                        log_event("faultsFileRefused", error=str(error))
                    self._sim.faults_file_error = str(error)
            self.apply()
            self._grow_memory()
            wake_at = min(next_read, self._sim.faults.next_change(now) or next_read)
            if self._memory_at is not None:
                wake_at = min(wake_at, now + _MEMORY_PERIOD_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.next_change(), max(0.0, wake_at - now))

    def _happen(self, fault: Fault) -> None:
        log_event("faultHappens", name=fault.name, args=dict(fault.args))
        match fault.name:
            case "exit":
                self.exit(fault.args["code"], fault.name)
            case "oom":
                self.exit(OOM_EXIT_CODE, fault.name)
            case "followerDeath" | "leaderDeath":
                self._kill_rank(fault)
            case "clockJump":
                self._sim.clock.jump(fault.args["seconds"])
            case "metricsReset":
                self._sim.metrics.reset(fault.args["metric"], self._sim.clock.wall())
            case _:
                raise AssertionError(f"fault {fault.name} is an event without an effect")

    def _kill_rank(self, fault: Fault) -> None:
        """The node that is meant exits; the leader also passes the order on. On all other nodes nothing happens."""
        group = self._sim.config.group
        assert group is not None, "checked when the fault was set"
        code = fault.args["code"]
        if fault.name == "leaderDeath":
            victim = 0
        else:
            victim = group.size - 1 if fault.args["rank"] is None else fault.args["rank"]
        if victim == group.rank:
            self.exit(code, fault.name)
        elif group.rank == 0:
            self.kill_follower(victim, code)

    def crash_of_lost_rank(self, code: int = 1) -> None:
        """The engine core dies because another rank of the group is dead."""
        group = self._sim.config.group
        assert group is not None, "only a group can lose a rank"
        self.crash_model(group.death_exit_s, "rank lost", code)

    def exit(self, code: int, why: str) -> None:
        """End the process now, whatever is open."""
        log_event("exit", code=code, why=why, totals=dict(self._sim.ledger.totals))
        self._exit_process(code)

    def _grow_memory(self) -> None:
        now = self._sim.clock.now()
        args = self._sim.faults.state("memoryGrow", now)
        if args is None:
            self._memory.clear()
            self._memory_at = None
            self._sim.memory_mb = 0.0
            return
        since = now if self._memory_at is None else self._memory_at
        grow_mb = args["mbPerSecond"] * (now - since)
        if args["maxMb"] is not None:
            grow_mb = min(grow_mb, args["maxMb"] - self._sim.memory_mb)
        self._memory_at = now
        if grow_mb > 0:
            self._memory.append(b"\x01" * int(grow_mb * _MB))  # not zeros: those pages would not be resident
            self._sim.memory_mb += grow_mb
