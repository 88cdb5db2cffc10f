"""Send chat completions and check each answer for completeness: the instrument behind "no request is lost".

A run has a bounded number of requests in flight and ends after a count or a time, whichever comes first. A request is
*complete* only if the engine finished it with exactly the tokens asked for and no error event came (smg ends a
broken stream with an error event, then `[DONE]` and HTTP 200). Everything else is counted by what was seen.

`python -m e2e.traffic --url … --model … --count … [--seconds …]` prints how many requests have ended, twice a second,
and one JSON line at the end; SIGTERM ends it early.
"""

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import aiohttp


class Verdict(StrEnum):
    COMPLETE = "complete"
    TRUNCATED = "truncated"
    """Ended without the tokens or the finish reason that were due."""
    FAILED = "failed"
    """Refused, an error status, an error event, or the connection broke."""
    HUNG = "hung"
    """Nothing arrived for `idle_timeout_s`."""


@dataclass(frozen=True, slots=True)
class Load:
    """`tokens`: completion lengths to draw from; half of the requests stream."""

    url: str
    model: str
    concurrency: int = 8
    count: int = 1000
    seconds: float | None = None
    tokens: tuple[int, ...] = (8, 16, 32, 128)
    prompt_words: int = 40
    """Prompts have up to so many words, of five characters each."""
    idle_timeout_s: float = 30
    pause_s: float = 0.0
    """Seconds between two requests of one client."""
    reconnects: int = 0
    """New tries when no connection could be made, as OpenAI's clients do; nothing was sent then. 0: every refused
    connection counts as a failed request."""
    seed: int = 1


@dataclass(slots=True)
class Tally:
    """What became of the requests; latencies in seconds."""

    sent: int = 0
    resent: int = 0
    """Sent again on another connection, because the kept one was closed under the request, before a byte of an answer.
    A router that ends closes its idle connections and can't announce it, and a client may be just about to use one (RFC
    9112, 9.3.1): OpenAI's and most HTTP clients send again by themselves."""
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    first_token_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """The first 20 that were not complete, with the time since the start."""

    @property
    def ended(self) -> int:
        return sum(self.verdicts.values())

    @property
    def lost(self) -> int:
        return self.sent - self.verdicts[Verdict.COMPLETE]

    def as_dict(self) -> dict[str, Any]:
        return {
            "sent": self.sent,
            "resent": self.resent,
            **{str(v): self.verdicts[v] for v in Verdict},
            "ttft_p50_s": _percentile(self.first_token_s, 50),
            "ttft_p99_s": _percentile(self.first_token_s, 99),
            "total_p50_s": _percentile(self.total_s, 50),
            "total_p99_s": _percentile(self.total_s, 99),
            "errors": self.errors,
        }


def _percentile(values: list[float], percent: int) -> float | None:
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, len(ordered) * percent // 100)], 4)


async def run(load: Load, stop: asyncio.Event, tally: Tally | None = None) -> Tally:
    """Drive the load until the count, the time or `stop`; requests in flight are always finished.

    `tally` may be given to watch it grow.
    """
    tally = tally or Tally()
    started = time.monotonic()
    draw = random.Random(load.seed)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=load.idle_timeout_s)

    def may_send() -> bool:
        in_time = load.seconds is None or time.monotonic() - started < load.seconds
        return in_time and tally.sent < load.count and not stop.is_set()

    async def client(session: aiohttp.ClientSession) -> None:
        while may_send():
            tally.sent += 1
            verdict, detail = await _request(session, load, tally.sent, draw, tally)
            tally.verdicts[verdict] += 1
            if verdict is not Verdict.COMPLETE and len(tally.errors) < 20:
                tally.errors.append(f"{time.monotonic() - started:.1f} s: {verdict}: {detail}")
            await asyncio.sleep(load.pause_s)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, trace_configs=[_trace()]) as session:
        await asyncio.gather(*(client(session) for _ in range(load.concurrency)))
    return tally


async def _request(
    session: aiohttp.ClientSession, load: Load, number: int, draw: random.Random, tally: Tally
) -> tuple[Verdict, str]:
    tokens = draw.choice(load.tokens)
    stream = number % 2 == 0
    body = {
        "model": load.model,
        "messages": [
            {
                "role": "user",
                "content": f"request {number}: {draw.random()} " + "word " * draw.randrange(load.prompt_words),
            }
        ],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }
    started = time.monotonic()
    try:
        answer = await _connect(session, load, body, tally)
        async with answer:
            if answer.status != 200:
                return Verdict.FAILED, f"HTTP {answer.status}: {(await answer.text())[:200]}"
            check = _read_stream if stream else _read_plain
            verdict, detail, first_at = await check(answer, tokens)
    except TimeoutError:
        return Verdict.HUNG, f"silent for {load.idle_timeout_s:g} s"
    except aiohttp.ClientError as error:
        return Verdict.FAILED, f"{type(error).__name__}: {error}"
    if verdict is Verdict.COMPLETE:
        tally.first_token_s.append(first_at - started)
        tally.total_s.append(time.monotonic() - started)
    return verdict, detail


@dataclass(slots=True)
class Kept:
    """Whether a request went over a connection that was kept from one before."""

    connection: bool = False


def _trace() -> aiohttp.TraceConfig:
    async def reused(_: aiohttp.ClientSession, context: Any, __: object) -> None:
        context.trace_request_ctx.connection = True

    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(reused)
    return trace


async def _connect(
    session: aiohttp.ClientSession, load: Load, body: dict[str, Any], tally: Tally
) -> aiohttp.ClientResponse:
    left, may_resend = load.reconnects, True
    while True:
        kept = Kept()
        try:
            return await session.post(f"{load.url}/v1/chat/completions", json=body, trace_request_ctx=kept)
        except aiohttp.ClientConnectorError:
            if not left:
                raise
            left -= 1
            await asyncio.sleep(0.5)
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
            if not kept.connection or not may_resend:
                raise
            may_resend = False
            tally.resent += 1


async def _read_plain(answer: aiohttp.ClientResponse, tokens: int) -> tuple[Verdict, str, float]:
    body = await answer.json()
    if "error" in body:
        return Verdict.FAILED, str(body["error"])[:200], 0.0
    return *_judge(body["choices"][0].get("finish_reason"), body.get("usage"), tokens), time.monotonic()


async def _read_stream(answer: aiohttp.ClientResponse, tokens: int) -> tuple[Verdict, str, float]:
    first_at, finish, usage, done = 0.0, None, None, False
    async for raw in answer.content:
        line = raw.decode().strip()
        if line.startswith("event: error"):
            return Verdict.FAILED, "error event", first_at
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            done = True
            continue
        event = json.loads(data)
        if "error" in event:
            return Verdict.FAILED, str(event["error"])[:200], first_at
        usage = event.get("usage") or usage
        for choice in event.get("choices", []):
            if choice.get("delta", {}).get("content") and not first_at:
                first_at = time.monotonic()
            finish = choice.get("finish_reason") or finish
    if not done:
        return Verdict.TRUNCATED, "the stream ended without [DONE]", first_at
    return *_judge(finish, usage, tokens), first_at


def _judge(finish: str | None, usage: dict[str, Any] | None, tokens: int) -> tuple[Verdict, str]:
    got = (usage or {}).get("completion_tokens")
    if finish != "length" or got != tokens:
        return Verdict.TRUNCATED, f"finish_reason {finish}, {got} of {tokens} tokens"
    return Verdict.COMPLETE, ""
