"""Talks to the engine over loopback: one round of reads per second, and self-tests beside it.

Never raises for what an engine may do: a closed port, silence, redirects, broken JSON and oversized bodies all end as
facts in an `Observation` or a `TestResult`.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from sluice.agent.exposition import read_process_start, read_samples, read_signals, wanted_names
from sluice.agent.facts import Contact, Observation, TestKind, TestResult
from sluice.api.agent import MAX_COUNT, AgentConfig

ROUND_TIMEOUT_S = 2.0
"""Seconds for each read of the engine: twice the polling period, so a slow answer delays one round at most."""
MAX_PAGE_BYTES = 8 * 1024 * 1024
"""A metrics page of a real vLLM is below 200 kB; beyond this the page counts as unreadable."""
VLLM_LOAD_FIELDS = ("server_load",)
OWN_TEST_AGE_S = 0.2
"""A self-test younger than this may not have reached the engine's counters yet."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request gave; `status` 0 means no complete answer."""

    status: int = 0
    body: str = ""
    refused: bool = False
    error: str = ""


class Engine:
    """Client of one engine; `close` it."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._base = f"http://127.0.0.1:{config.engine_port}"
        # Two sessions: a self-test that waits in a busy engine must not hold a connection that the reads need.
        self._reads = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ROUND_TIMEOUT_S))
        self._tests = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=config.hang_timeout_s))
        self._wanted = wanted_names(config.signals)
        self._version: str | None = None
        self._test: asyncio.Task[TestResult] | None = None
        self._test_sent_at: float | None = None
        self._ended: list[TestResult] = []

    async def close(self) -> None:
        await self.forget_run()
        await self._reads.close()
        await self._tests.close()

    async def observe(self) -> Observation:
        """One round of reads, at most 2 s."""
        config = self._config
        test, sent_at = self._test, self._test_sent_at
        inside = test is not None and sent_at is not None and time.monotonic() - sent_at >= OWN_TEST_AGE_S
        models, metrics, load = await asyncio.gather(
            self._get("/v1/models"),
            self._get(config.metrics_path),
            self._get(config.load_path) if config.load_path else _nothing(),
        )
        contact = _contact(models, metrics)
        if contact is Contact.CLOSED:
            self._version = None
        elif self._version is None and config.version_path and contact is Contact.ANSWERED:
            self._version = _read_version(await self._get(config.version_path))
        samples = read_samples(metrics.body, self._wanted) if metrics.status == 200 else {}
        return Observation(
            contact=contact,
            serves_model=_serves(models, config.served_model),
            unauthorized=models.status in (401, 403),
            metrics_answered=metrics.status == 200,
            signals=read_signals(samples, config.signals),
            process_start=read_process_start(samples),
            load=_read_load(load, config.load_fields or VLLM_LOAD_FIELDS),
            version=self._version,
            own_test_inside=inside and test is self._test and test is not None and not test.done(),
            tests=self._take_ended(),
            pending_since=self._test_sent_at,
        )

    @property
    def test_under_way(self) -> asyncio.Task[TestResult] | None:
        return self._test

    def start_test(self, nonce: str) -> None:
        """Send a self-test; only one at a time. `nonce` makes its prompt new, so that no cached answer passes."""
        if self._test is not None:
            raise RuntimeError("a self-test is already under way")
        self._test_sent_at = time.monotonic()
        self._test = asyncio.create_task(self._run_test(nonce, self._test_sent_at))
        self._test.add_done_callback(self._note_ended)

    async def forget_run(self) -> None:
        """The engine run is over: its version, and the self-test that was sent to it, say nothing any more."""
        self._version = None
        test = self._test
        if test is not None:
            test.cancel()
            await asyncio.wait({test})
        self._ended.clear()

    def _note_ended(self, test: asyncio.Task[TestResult]) -> None:
        self._test = self._test_sent_at = None
        if not test.cancelled():
            self._ended.append(test.result())

    def _take_ended(self) -> tuple[TestResult, ...]:
        ended = tuple(self._ended)
        self._ended.clear()
        return ended

    async def _run_test(self, nonce: str, sent_at: float) -> TestResult:
        """A real inference of one token. Late is not failed: only the hang time-out ends the wait."""
        body = {
            "model": self._config.served_model,
            "prompt": f"Self-test {nonce}",
            "max_tokens": 1,
            "temperature": 0,
            "stream": False,
        }
        answer = await self._request(self._tests, "POST", self._config.self_test_path, body)
        kind, message = judge_answer(answer)
        prompt_tokens, generation_tokens = read_usage(answer)
        return TestResult(
            sent_at=sent_at,
            ended_at=time.monotonic(),
            kind=kind,
            message=message,
            prompt_tokens=prompt_tokens,
            generation_tokens=generation_tokens,
        )

    async def _get(self, path: str) -> Answer:
        return await self._request(self._reads, "GET", path, None)

    async def _request(self, session: aiohttp.ClientSession, method: str, path: str, body: Any) -> Answer:
        try:
            async with session.request(method, self._base + path, json=body, allow_redirects=False) as response:
                raw = bytearray()
                async for chunk in response.content.iter_any():
                    raw += chunk
                    if len(raw) > MAX_PAGE_BYTES:
                        return Answer(error=f"{path}: more than {MAX_PAGE_BYTES} bytes")
                return Answer(status=response.status, body=raw.decode("utf-8", "replace"))
        except aiohttp.ClientConnectorError as error:
            return Answer(refused=isinstance(error.os_error, ConnectionRefusedError), error=f"{path}: {error}")
        except TimeoutError:
            return Answer(error=f"{path}: no answer in time")
        except (aiohttp.ClientError, OSError) as error:
            return Answer(error=f"{path}: {type(error).__name__}: {error}")


def judge_answer(answer: Answer) -> tuple[TestKind, str]:
    """Whether a self-test passed: 200, no error in the body, one choice with a finish reason."""
    if answer.status == 0:
        return TestKind.UNANSWERED, answer.error
    excerpt = answer.body[:300]
    if answer.status in (401, 403):
        return TestKind.UNAUTHORIZED, f"HTTP {answer.status}: {excerpt}"
    if answer.status in (429, 503):
        return TestKind.OVERLOADED, f"HTTP {answer.status}: {excerpt}"
    if 400 <= answer.status < 500:
        return TestKind.REJECTED, f"HTTP {answer.status}: {excerpt}"
    if answer.status != 200:
        return TestKind.FAILED, f"HTTP {answer.status}: {excerpt}"
    body = _json_object(answer.body)
    choices = body.get("choices")
    if body.get("error") or not isinstance(choices, list) or len(choices) != 1:
        return TestKind.FAILED, f"HTTP 200 without exactly one choice, or with an error: {excerpt}"
    if not isinstance(choices[0], dict) or not choices[0].get("finish_reason"):
        return TestKind.FAILED, f"HTTP 200 with a choice that has no finish_reason: {excerpt}"
    return TestKind.PASSED, ""


def read_usage(answer: Answer) -> tuple[int, int]:
    """(prompt, generated) tokens that the answer says it cost; 0 where it does not say."""
    usage = _json_object(answer.body).get("usage") if answer.status == 200 else None
    if not isinstance(usage, dict):
        return 0, 0
    counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    prompt, generated = (n if isinstance(n, int) and not isinstance(n, bool) and n > 0 else 0 for n in counts)
    return prompt, generated


async def _nothing() -> Answer:
    return Answer()


def _contact(*answers: Answer) -> Contact:
    if any(answer.status for answer in answers):
        return Contact.ANSWERED
    return Contact.CLOSED if all(answer.refused for answer in answers) else Contact.SILENT


def _json_object(text: str) -> dict[str, Any]:
    """The JSON object in the text; {} if it is anything else."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _serves(answer: Answer, model: str) -> bool | None:
    """Whether the list of models has ours; None if the list could not be read."""
    models = _json_object(answer.body).get("data") if answer.status == 200 else None
    if not isinstance(models, list):
        return None
    return any(isinstance(entry, dict) and entry.get("id") == model for entry in models)


def _read_load(answer: Answer, fields: Sequence[str] = VLLM_LOAD_FIELDS) -> float | None:
    """The engine's own count of its requests, all fields added up; unknown if one of them is missing or no count."""
    body = _json_object(answer.body) if answer.status == 200 else {}
    counts = [_count_at(body, field.split(".")) for field in fields]
    known = [count for count in counts if count is not None]
    total = sum(known)
    return float(total) if len(known) == len(counts) and total <= MAX_COUNT else None


def _count_at(node: object, path: Sequence[str]) -> float | None:
    """The count at the path, summed over the entries of lists on the way; None if there is none in any of them.

    A list in a list is no entry, so an engine's answer can't make this deeper than the path.
    """
    if isinstance(node, list):
        counts = [None if isinstance(entry, list) else _count_at(entry, path) for entry in node]
        known = [count for count in counts if count is not None]
        return sum(known) if counts and len(known) == len(counts) else None
    if path:
        return _count_at(node.get(path[0]), path[1:]) if isinstance(node, dict) else None
    if not isinstance(node, int | float) or isinstance(node, bool) or not 0 <= node <= MAX_COUNT:
        return None
    return node


def _read_version(answer: Answer) -> str | None:
    version = _json_object(answer.body).get("version") if answer.status == 200 else None
    return version if isinstance(version, str) and version else None
