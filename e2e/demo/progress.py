"""Steps with elapsed time: one line when a step starts, a beat while it lasts, one line when it ends."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

BEAT_S = 15


class Progress:
    """Prints to the terminal; times count from construction."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Announce a step; while it runs, say every 15 s that it does."""
        began = time.monotonic()
        done = threading.Event()
        self._say(f"==> {title}")

        def beat() -> None:
            while not done.wait(BEAT_S):
                self._say(f"    … {title}: {time.monotonic() - began:.0f} s")

        ticker = threading.Thread(target=beat, daemon=True)
        ticker.start()
        try:
            yield
        finally:
            done.set()
            ticker.join()
        self._say(f"    done in {time.monotonic() - began:.1f} s")

    def detail(self, text: str) -> None:
        """A line of what the present step does."""
        self._say(f"    {text}")

    def _say(self, text: str) -> None:
        print(f"[{self.elapsed_s:6.1f} s] {text}", file=sys.stderr, flush=True)
