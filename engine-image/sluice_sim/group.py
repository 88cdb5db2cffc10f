"""Several nodes as one instance: the followers dial the leader, and each learns of the other's death.

A connection stands for a node's life: it breaks when the process at its other end is gone. One JSON object per line.
The follower says `join` (its rank and what must be equal on all nodes), waits for `welcome`, which comes when all are
there, loads, and says `loaded`. Then the leader says `step` now and then and the follower `done`, unless it hangs: no
step of a real engine ends without all ranks. The leader may also say `die`. A process that is not wanted (a rank that
is there already, as after a restart, or one of another group) gets no answer: it waits, as at a real rendezvous.
"""

import asyncio
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from sluice_sim.config import Config, Group
from sluice_sim.log import log_event

_DIAL_PAUSE_S: Final = 0.1
_STEP_PERIOD_S: Final = 0.25
_STALL_S: Final = 2.0
"""A follower that has not answered for so long holds the leader's engine up; a busy machine is sooner than that."""


class GroupError(Exception):
    """The group did not come together in time."""


def _shared(config: Config, group: Group) -> dict[str, Any]:
    """What all nodes of a group must have in common."""
    return {"model": config.model, "version": config.version, "nodes": group.size}


def _say(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


async def _hear(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next message; None when the other side is gone, or speaks something else."""
    try:
        line = await reader.readline()
        message = json.loads(line) if line else None
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None


class Leader:
    """Rank 0. Use as a context: the port is open inside."""

    def __init__(self, config: Config, group: Group, on_lost: Callable[[int], None]) -> None:
        """`on_lost` is called with the rank of each follower that dies."""
        self._config = config
        self._group = group
        self._on_lost = on_lost
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loaded: set[int] = set()
        self._heard_at: dict[int, float] = {}
        self._all_joined = asyncio.Event()
        self._all_loaded = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> "Leader":
        """Open the port.

        Raises:
            OSError: it can't be opened.
        """
        # On all addresses: the name that the others dial need not be one of this machine's yet.
        if socket.has_dualstack_ipv6():
            listening = socket.create_server(("", self._group.port), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            listening = socket.create_server(("", self._group.port))
        self._server = await asyncio.start_server(self._serve, sock=listening)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def joined(self) -> list[int]:
        """Ranks of the followers that are here."""
        return sorted(self._writers)

    async def joining(self) -> None:
        """Return when all followers are here.

        Raises:
            GroupError: the time is over.
        """
        try:
            await asyncio.wait_for(self._all_joined.wait(), self._group.join_timeout_s)
        except TimeoutError:
            missing = [rank for rank in range(1, self._group.size) if rank not in self._writers]
            raise GroupError(f"ranks {missing} did not join within {self._group.join_timeout_s:g} s") from None

    async def loading(self) -> None:
        """Return when all followers have loaded."""
        await self._all_loaded.wait()

    async def watch(self, on_stall: Callable[[bool], None]) -> None:
        """Say for ever, at each change, whether a follower that lives does not answer; cancel to stop."""
        clock = asyncio.get_running_loop().time
        self._heard_at = dict.fromkeys(self._writers, clock())
        was_stalled = False
        while True:
            for writer in self._writers.values():
                _say(writer, {"say": "step"})
            await asyncio.sleep(_STEP_PERIOD_S)
            is_stalled = any(clock() - self._heard_at[rank] > _STALL_S for rank in self._writers)
            if is_stalled != was_stalled:
                was_stalled = is_stalled
                on_stall(is_stalled)

    def kill(self, rank: int | None, code: int) -> None:
        """Make a follower exit (the last one, if none is named)."""
        writer = self._writers.get(self._group.size - 1 if rank is None else rank)
        if writer is not None:
            _say(writer, {"say": "die", "code": code})

    def let_go(self) -> None:
        """Break the connections to all followers."""
        for writer in self._writers.values():
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        rank: int | None = None
        try:
            message = await _hear(reader)
            rank = self._admit(message, writer)
            while message is not None:
                message = await _hear(reader)
                if rank is not None and message is not None:
                    self._take(rank, message)
        finally:
            self._tasks.discard(task)
            writer.close()
            if rank is not None:
                del self._writers[rank]
        if rank is not None:
            log_event("followerLost", rank=rank)
            self._on_lost(rank)

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        match message.get("say"):
            case "done":
                self._heard_at[rank] = asyncio.get_running_loop().time()
            case "loaded":
                self._loaded.add(rank)
                if len(self._loaded) == self._group.size - 1:
                    self._all_loaded.set()

    def _admit(self, message: dict[str, Any] | None, writer: asyncio.StreamWriter) -> int | None:
        """The rank of a follower that is welcome; None if it is not."""
        rank = None if message is None else message.get("rank")
        mine = {"say": "join", "rank": rank, **_shared(self._config, self._group)}
        is_free = isinstance(rank, int) and 0 < rank < self._group.size and rank not in self._writers
        if message != mine or not is_free or self._all_joined.is_set():
            log_event("followerIgnored", said=message)
            return None
        assert isinstance(rank, int)
        self._writers[rank] = writer
        log_event("followerJoined", rank=rank)
        if len(self._writers) == self._group.size - 1:
            self._all_joined.set()
            for other in self._writers.values():
                _say(other, {"say": "welcome"})
        return rank


class Follower:
    """Any rank above 0."""

    def __init__(self, config: Config, group: Group) -> None:
        self._config = config
        self._group = group
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def join(self) -> None:
        """Dial the leader until it is there, and wait until all are.

        Raises:
            GroupError: the time is over, or the leader went away meanwhile.
        """
        try:
            await asyncio.wait_for(self._join(), self._group.join_timeout_s)
        except TimeoutError:
            where = f"{self._group.host}:{self._group.port}"
            raise GroupError(f"no welcome from {where} within {self._group.join_timeout_s:g} s") from None

    async def _join(self) -> None:
        while self._writer is None:
            try:
                self._reader, self._writer = await asyncio.open_connection(self._group.host, self._group.port)
            except OSError:  # no such name yet, nobody listens yet
                await asyncio.sleep(_DIAL_PAUSE_S)
        assert self._reader is not None
        _say(self._writer, {"say": "join", "rank": self._group.rank, **_shared(self._config, self._group)})
        if await _hear(self._reader) is None:
            raise GroupError("the leader went away while the group came together")

    def loaded(self) -> None:
        assert self._writer is not None
        _say(self._writer, {"say": "loaded"})

    async def order(self, hangs: Callable[[], bool]) -> int | None:
        """Step with the leader, unless this rank `hangs`, until that is gone (None), or orders to exit (the code)."""
        assert self._reader is not None
        assert self._writer is not None
        message = await _hear(self._reader)
        while message is not None and message.get("say") != "die":
            if not hangs():
                _say(self._writer, {"say": "done"})
            message = await _hear(self._reader)
        return None if message is None else int(message["code"])

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            with suppress(OSError):
                await self._writer.wait_closed()
