"""Listens to the agents of the wanted workers: one long poll each, so that a change is heard at once.

A silent agent changes nothing: its last word stays. A refused, broken or oversized answer is silence too.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

import aiohttp
from pydantic import ValidationError

from sluice.api.agent import MAX_STATE_BYTES, AgentState

log = logging.getLogger(__name__)

TIMEOUT_S = 7.0
"""An agent holds a poll for 5 s; 2 s over that it is silent."""
FIRST_TIMEOUT_S = 2.0
PAUSE_S = 1.0
"""Between polls that brought no news or no answer."""
NEWS_PAUSE_S = 0.05


class AgentWatch:
    """Keeps the last word of each agent in `heard` (agent URL to state); `on_news` is called when one changed."""

    def __init__(self, on_news: Callable[[], None]) -> None:
        self.heard: dict[str, AgentState] = {}
        self._on_news = on_news
        self._tasks: dict[str, asyncio.Task[None]] = {}
        connector = aiohttp.TCPConnector(limit=0)  # one held connection per worker, at most MAX_WORKERS
        self._session = aiohttp.ClientSession(connector=connector)

    def follow(self, urls: Iterable[str]) -> None:
        """Listen to exactly these agents; what others said is forgotten."""
        wanted = set(urls)
        for url in self._tasks.keys() - wanted:
            self._tasks.pop(url).cancel()
            self.heard.pop(url, None)
        for url in wanted - self._tasks.keys():
            self._tasks[url] = asyncio.create_task(self._listen(url))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self.follow(())
        if tasks:
            await asyncio.wait(tasks)
        await self._session.close()

    async def _listen(self, url: str) -> None:
        while True:
            started = time.monotonic()
            last = self.heard.get(url)
            state = await self._ask(url, last)
            if state is not None and (last is None or state.seq != last.seq):
                self.heard[url] = state
                self._on_news()
                await asyncio.sleep(NEWS_PAUSE_S)
            else:
                await asyncio.sleep(max(NEWS_PAUSE_S, started + PAUSE_S - time.monotonic()))

    async def _ask(self, url: str, last: AgentState | None) -> AgentState | None:
        """The agent's state, held back by it while nothing changed; None if it can't be had."""
        params = {} if last is None else {"after": str(last.seq)}
        timeout = aiohttp.ClientTimeout(total=FIRST_TIMEOUT_S if last is None else TIMEOUT_S, sock_connect=2.0)
        try:
            async with self._session.get(
                f"{url}/state", params=params, timeout=timeout, allow_redirects=False
            ) as response:
                raw = await response.content.read(MAX_STATE_BYTES + 1)
                while len(raw) <= MAX_STATE_BYTES and (more := await response.content.read(MAX_STATE_BYTES)):
                    raw += more
                if response.status != 200 or len(raw) > MAX_STATE_BYTES:
                    return None
            return AgentState.model_validate_json(raw)
        except (TimeoutError, aiohttp.ClientError, OSError, ValidationError) as error:
            log.debug("agent %s is silent: %s", url, error)
            return None
