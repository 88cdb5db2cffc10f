"""Time as a parameter: a steady clock for everything that is measured, a wall clock that a fault may move."""

import asyncio
import time
from typing import Final, Protocol

_SHORTEST_SLEEP_S: Final = 0.0005
"""Below this the event loop's own resolution (epoll: 1 ms) would cost more than the wait."""


class Clock(Protocol):
    def now(self) -> float:
        """Seconds of a clock that never jumps."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, as this engine believes."""
        ...

    def jump(self, seconds: float) -> None:
        """Move the wall clock; negative is back."""
        ...

    async def sleep_until(self, when: float) -> None:
        """Return at `when` on the steady clock; always lets other tasks run."""
        ...


class RealClock:
    def __init__(self) -> None:
        self._offset_s = 0.0

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time() + self._offset_s

    def jump(self, seconds: float) -> None:
        self._offset_s += seconds

    async def sleep_until(self, when: float) -> None:
        remaining = when - time.monotonic()
        await asyncio.sleep(remaining if remaining > _SHORTEST_SLEEP_S else 0)
