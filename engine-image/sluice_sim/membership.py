"""One node's part in its group: coming together at start, and what a death of another node does to this one.

| a rank dies | vLLM (measured) | SGLang (from its source: the ranks talk over Gloo at every turn of their loop) |
|---|---|---|
| above 0, requests open | leader: they fail, exit 1 after 5 s | all others exit 131 after 2 s |
| above 0, idle | leader: nothing until the next request, then as above | the same |
| above 0, while loading | leader: exit 1 after 5 s | the same |
| 0 | the others stay, of no use, until SIGTERM | all others exit 131 after 2 s |

A rank that lives and hangs (a fault, a stopped process, a broken network) holds the leader's engine up, as `hang` does.
The times are `--death-exit-seconds`.
"""

import asyncio
from contextlib import AsyncExitStack
from typing import Final

from sluice_sim.config import Flavor, Group
from sluice_sim.effects import Effects
from sluice_sim.group import Follower, Leader
from sluice_sim.log import log_event
from sluice_sim.state import Phase, Sim

_SIGQUIT_EXIT_CODE: Final = 131
"""128 + SIGQUIT, by which SGLang's processes end each other."""


class Membership:
    def __init__(self, sim: Sim, effects: Effects, group: Group) -> None:
        self._sim = sim
        self._effects = effects
        self._group = group
        self._leader: Leader | None = None
        self._follower: Follower | None = None

    @property
    def port(self) -> int | None:
        """Where the leader listens; null on other ranks."""
        return None if self._leader is None else self._leader.port

    async def join(self, stack: AsyncExitStack) -> None:
        """Come together with the other nodes; the connections are open until the stack is closed.

        Raises:
            GroupError: not all came in time.
            OSError: the leader's port can't be opened.
        """
        if self._group.rank == 0:
            self._leader = await stack.enter_async_context(Leader(self._sim.config, self._group, self._rank_lost))
            self._effects.kill_follower = self._leader.kill
            log_event("rendezvous", port=self._leader.port, nodes=self._group.size)
            await self._leader.joining()
            self._sim.joined = self._leader.joined
        else:
            self._follower = Follower(self._sim.config, self._group)
            stack.push_async_callback(self._follower.close)
            await self._follower.join()
        log_event("joined", rank=self._group.rank)

    async def loaded(self, stack: AsyncExitStack) -> None:
        """This node has loaded; the leader returns when all have, and steps with them until the stack is closed."""
        if self._leader is not None:
            await self._leader.loading()
            watch = asyncio.create_task(self._leader.watch(self._stall))
            stack.callback(watch.cancel)
        elif self._follower is not None:
            self._follower.loaded()

    async def follow(self) -> None:
        """Do as the leader says, for ever."""
        assert self._follower is not None
        code = await self._follower.order(lambda: self._sim.engine.is_paused)
        if code is not None:
            self._effects.exit(code, "followerDeath")
        log_event("leaderLost")
        if self._sim.config.flavor is Flavor.SGLANG:
            await asyncio.sleep(self._group.death_exit_s)
            self._effects.exit(_SIGQUIT_EXIT_CODE, "leader lost")
        await asyncio.Event().wait()

    def _stall(self, is_stalled: bool) -> None:
        log_event("stalledByRank" if is_stalled else "goesOn")
        self._sim.is_stalled = is_stalled
        self._effects.apply()

    def _rank_lost(self, rank: int) -> None:
        sim = self._sim
        sim.joined = [other for other in sim.joined if other != rank]
        if sim.phase in (Phase.DEAD, Phase.STOPPED):
            return
        if sim.config.flavor is Flavor.SGLANG:
            assert self._leader is not None
            self._effects.crash_of_lost_rank(_SIGQUIT_EXIT_CODE)
            self._leader.let_go()  # its ranks talk to each other too: all see it at once
        elif sim.phase is Phase.LOADING or sim.engine.in_flight > 0:
            self._effects.crash_of_lost_rank()
        else:
            sim.is_broken = True
