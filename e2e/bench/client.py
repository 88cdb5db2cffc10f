"""A bare asynchronous Kubernetes client: the yardstick for the operator, and the hand that plays the user.

Knows nothing of Sluice: URLs, JSON bodies, client certificates. No retries, so a refused call shows.
"""

import asyncio
import base64
import json
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import yaml

Object = dict[str, Any]


class BareClient:
    """`async with BareClient(kubeconfig) as api`; uses the file's current context (the bed's own file)."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        context = next(c["context"] for c in config["contexts"] if c["name"] == config["current-context"])
        cluster = next(c["cluster"] for c in config["clusters"] if c["name"] == context["cluster"])
        user = next(u["user"] for u in config["users"] if u["name"] == context["user"])
        self.server: str = cluster["server"]
        self._ssl = ssl.create_default_context(cadata=_inline(cluster, "certificate-authority"))
        with tempfile.NamedTemporaryFile("w") as pem:  # the ssl module takes a client certificate from a file only
            pem.write(_inline(user, "client-certificate") + "\n" + _inline(user, "client-key"))
            pem.flush()
            self._ssl.load_cert_chain(pem.name)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "BareClient":
        connector = aiohttp.TCPConnector(limit=0, ssl=self._ssl)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60))
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._session:
            await self._session.close()

    async def call(
        self, verb: str, path: str, body: Object | None = None, *, content: str = "application/json"
    ) -> Object:
        """One request; the answer's JSON.

        Raises:
            RuntimeError: any status of 400 or more, with the server's message.
        """
        assert self._session is not None
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": content}
        async with self._session.request(verb, self.server + path, data=data, headers=headers) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise RuntimeError(f"{verb} {path}: {answer.status} {text[:300]}")
            parsed: Object = json.loads(text)
            return parsed

    async def items(self, path: str) -> list[Object]:
        found: list[Object] = (await self.call("GET", path)).get("items") or []
        return found

    async def watch(self, path: str, *, metadata_only: bool = False) -> AsyncIterator[tuple[str, Object]]:
        """(type, object) from now on, until the caller stops reading.

        Nothing is polled: a LIST of 4,000 pods, again and again, would slow down what is measured.
        """
        assert self._session is not None
        start = await self.call("GET", f"{path}{'&' if '?' in path else '?'}limit=1")
        version = start["metadata"]["resourceVersion"]
        url = f"{self.server}{path}{'&' if '?' in path else '?'}watch=true&resourceVersion={version}"
        timeout = aiohttp.ClientTimeout(total=None)
        partial = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
        headers = {"Accept": partial if metadata_only else "application/json"}
        async with self._session.get(url, timeout=timeout, headers=headers) as stream:
            buffer = b""
            async for chunk in stream.content.iter_any():
                buffer += chunk
                *lines, buffer = buffer.split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    yield event["type"], event["object"]


def _inline(entry: Object, key: str) -> str:
    if f"{key}-data" in entry:
        return base64.b64decode(entry[f"{key}-data"]).decode()
    return Path(entry[key]).read_text()


async def at_once(limit: int, jobs: Iterable[Callable[[], Awaitable[Any]]]) -> None:
    """Run the jobs, `limit` at a time; the first failure is raised."""
    queue = iter(list(jobs))

    async def worker() -> None:
        for job in queue:
            await job()

    await asyncio.gather(*(worker() for _ in range(limit)))


async def until(what: str, check: Callable[[], Awaitable[bool]], *, deadline_s: float, every_s: float = 0.1) -> float:
    """Seconds until `check` first held.

    Raises:
        TimeoutError: it did not within the deadline; the message says what was waited for.
    """
    loop = asyncio.get_running_loop()
    start = loop.time()
    while not await check():
        if loop.time() - start > deadline_s:
            raise TimeoutError(f"{what}: not within {deadline_s:g} s")
        await asyncio.sleep(every_s)
    return loop.time() - start
