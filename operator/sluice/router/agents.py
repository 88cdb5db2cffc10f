"""Listens to the agents of the wanted workers: one long poll each, so that a change is heard at once.

A silent agent says nothing against its engine: its last word stays. A refused, broken or oversized answer is silence
too. When an agent falls silent its engine's port is tried as well, and only if neither can be reached the whole data
path to that instance counts as gone (`unreachable`); what follows from it is `worklist`'s to say.

How long that takes at most: 6 s for the poll under way, 2 s for a new connection to the agent and, beside it, to the
engine; then the worker leaves smg's manifest (0.2 s). A link that is cut is noticed within 10 s.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import aiohttp
from pydantic import ValidationError

from sluice.api.agent import MAX_STATE_BYTES, AgentState
from sluice.router.worklist import DataPath

log = logging.getLogger(__name__)

TIMEOUT_S = 6.0
"""An agent holds a poll for 5 s; 1 s over that the poll has failed, which alone changes nothing."""
FIRST_TIMEOUT_S = 2.0
CONNECT_TIMEOUT_S = 2.0
"""For a connection to the engine's port: time for the first SYN and one repetition (after 1 s)."""
PAUSE_S = 1.0
"""Between polls that brought no news or no answer."""
NEWS_PAUSE_S = 0.05


class AgentWatch:
    """Keeps the last word of each agent in `heard` and the way to it in `paths`, both by agent URL; `on_news` is called
    when a word or the reach of an instance changed."""

    def __init__(self, on_news: Callable[[], None]) -> None:
        self.heard: dict[str, AgentState] = {}
        self.paths: dict[str, DataPath] = {}
        self._on_news = on_news
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._engines: dict[str, str] = {}
        connector = aiohttp.TCPConnector(limit=0)  # one held connection per worker, at most MAX_WORKERS
        self._session = aiohttp.ClientSession(connector=connector)

    def follow(self, engines: Mapping[str, str]) -> None:
        """Listen to exactly these agents (agent URL to engine URL); what others said is forgotten."""
        for url in [known for known, engine in self._engines.items() if engines.get(known) != engine]:
            del self._engines[url]
            self._tasks.pop(url).cancel()
            self.heard.pop(url, None)
            self.paths.pop(url, None)
        for url in engines.keys() - self._tasks.keys():
            self._engines[url] = engines[url]
            self._tasks[url] = asyncio.create_task(self._listen(url, engines[url]))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self.follow({})
        if tasks:
            await asyncio.wait(tasks)
        await self._session.close()

    async def _listen(self, url: str, engine: str) -> None:
        while True:
            started = time.monotonic()
            last = self.heard.get(url)
            # Of an agent that was silent no poll is held: its first word has to come at once.
            state = await self._ask(url, last if self.paths.get(url) is DataPath.ANSWERS else None)
            self._note(url, DataPath.ANSWERS if state is not None else await self._try(url, engine))
            if state is not None and (last is None or state.seq != last.seq):
                self.heard[url] = state
                self._on_news()
                await asyncio.sleep(NEWS_PAUSE_S)
            else:
                await asyncio.sleep(max(NEWS_PAUSE_S, started + PAUSE_S - time.monotonic()))

    async def _try(self, url: str, engine: str) -> DataPath:
        """The way to an instance whose agent did not answer a poll just now."""
        state, connects = await asyncio.gather(self._ask(url, None), _connects(engine))
        if state is not None:
            return DataPath.ANSWERS
        return DataPath.CONNECTS if connects else DataPath.UNREACHABLE

    def _note(self, url: str, path: DataPath) -> None:
        before = self.paths.get(url)
        if path is before:
            return
        self.paths[url] = path
        if DataPath.UNREACHABLE in (path, before):
            log.warning("agent %s and its engine: %s", url, path)
        self._on_news()

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


async def _connects(url: str) -> bool:
    """Whether the engine's port takes a TCP connection. The kernel does that for a busy or frozen engine too, so a
    refusal or silence is about the process or the way to it, never about load."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except (TimeoutError, OSError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
