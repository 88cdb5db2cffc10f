"""The agent's loop: look, decide, remember, tell those who wait.

One round per second, and one at once when a self-test ends, so that a new instance is Ready without waiting for
the next tick.
"""

import asyncio
import contextlib
import logging
import secrets
import time

from sluice.agent.engine import Engine
from sluice.agent.facts import EngineState, first_state
from sluice.agent.memory import Memory
from sluice.agent.verdict import DrainEnd, advance, drain_end, is_test_due, start_drain
from sluice.api.agent import AgentConfig

log = logging.getLogger(__name__)

ROUND_S = 1.0


class Watch:
    """Holds the present state; `changed` wakes everyone who waits for news."""

    def __init__(self, config: AgentConfig, engine: Engine, memory: Memory) -> None:
        self.config = config
        self._engine = engine
        self._memory = memory
        self._changed = asyncio.Condition()
        remembered = memory.load()
        self.state: EngineState = remembered if remembered is not None else first_state(time.monotonic())
        if remembered is not None:
            log.info("resumed: engine run %s was %s", remembered.engine_id, remembered.phase)

    async def run(self) -> None:
        """Look at the engine until cancelled."""
        while True:
            started = time.monotonic()
            await self._round()
            test = self._engine.test_under_way
            pause_s = max(0.0, started + ROUND_S - time.monotonic())
            if test is None:
                await asyncio.sleep(pause_s)
            else:
                await asyncio.wait({test}, timeout=pause_s)

    async def wait_for_news(self, after: int, timeout_s: float) -> None:
        """Return when the state's `seq` is not `after`, or after the time-out."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.state.seq != after)

    async def drain(self, *, unrouted: bool) -> DrainEnd:
        """Set Draining and return when the engine may be stopped; never later than the drain deadline."""
        await self._take(start_drain(self.state, time.monotonic()))
        while (end := drain_end(self.state, time.monotonic(), self.config, unrouted=unrouted)) is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ROUND_S), self._changed:
                    await self._changed.wait()
        log.info("drain ended: %s: %s", end.reason, end.message)
        return end

    async def _round(self) -> None:
        seen = await self._engine.observe()
        now = time.monotonic()
        before = self.state
        state = advance(before, seen, now, config=self.config, new_engine_id=secrets.token_hex(8))
        if before.engine_id is not None and state.engine_id != before.engine_id:
            await self._engine.forget_run()
        if state.phase is not before.phase or state.reason != before.reason:
            log.info("%s -> %s %s %s", before.phase, state.phase, state.reason, state.message)
        await self._take(state)
        if self._engine.test_under_way is None and is_test_due(state, now, self.config):
            self._engine.start_test(secrets.token_hex(8))

    async def _take(self, state: EngineState) -> None:
        self.state = state
        self._memory.save(state)
        async with self._changed:
            self._changed.notify_all()
