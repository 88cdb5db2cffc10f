"""Pairs of the vLLM flavour in the test's own loop, and what they are compared with."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.unit.sim_engine.harness import Client, InLoop, running, said

PROMPT = "x" * 4 * 100
"""100 tokens: 7 blocks."""
MORE: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
texts: dict[Any, str] = {}
"""What was found out by `alone` already."""


def connector(role: str, *, policy: str = "fail", **extra: Any) -> list[str]:
    config = {
        "kv_connector": "NixlConnector",
        "kv_role": f"kv_{role}",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }
    return ["--kv-transfer-config", json.dumps(config)]


@asynccontextmanager
async def pair(
    prefill: list[str] | None = None, decode: list[str] | None = None
) -> AsyncIterator[tuple[InLoop, InLoop]]:
    """Started with further flags for either side."""
    async with (
        running(*connector("producer"), *(prefill or [])) as lender,
        running(*connector("consumer"), *(decode or [])) as borrower,
    ):
        yield lender, borrower


async def alone(prompt: str, **fields: Any) -> str:
    """What an engine says that does everything itself."""
    key = (prompt, *sorted(fields.items()))
    if key not in texts:
        async with running() as engine:
            texts[key] = said((await engine.complete(prompt, **fields))[1])
    return texts[key]


async def held(engine: Client) -> tuple[int, int]:
    """Requests and blocks that wait to be pulled."""
    transfer = (await engine.sim("state"))["transfer"]
    return transfer["heldRequests"], transfer["heldBlocks"]
