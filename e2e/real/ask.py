"""What the tests ask of a service, of an instance and of its agent."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from e2e.product import Object, Service, fetch
from e2e.traffic.driver import Load, Tally, run

ENGINE_PORT = 8000
AGENT_PORT = 9900


def engine_url(pod: Object) -> str:
    return f"http://{pod['status']['podIP']}:{ENGINE_PORT}"


def chat(service: Service, url: str, tokens: int = 32, prompt: str = "Where do the tokens flow?") -> Object:
    """The most likely answer: its text, and what it cost."""
    body = {
        "model": service.name,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = json.loads(fetch(service.bed, f"{url}/v1/chat/completions", method="POST", body=body, timeout_s=120))
    (choice,) = answer["choices"]
    return {"text": choice["message"]["content"], "finish": choice["finish_reason"], **answer["usage"]}


def page(service: Service, pod: Object) -> dict[str, list[tuple[dict[str, str], float]]]:
    """The engine's own metrics page: (labels, value) of each sample, by the sample's name."""
    return read_page(fetch(service.bed, f"{engine_url(pod)}/metrics"))


def read_page(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def total(samples: dict[str, list[tuple[dict[str, str], float]]], name: str) -> float:
    """Sum over all samples of the name. KeyError if there is none: unknown is not zero."""
    return sum(value for _labels, value in samples[name])


def agent(service: Service, pod: Object) -> Object:
    found: Object = json.loads(fetch(service.bed, f"http://{pod['status']['podIP']}:{AGENT_PORT}/state"))
    return found


class Long:
    """Some long requests at once, half of them streams, from a thread of their own.

    The others are silent until their end, which on a busy machine is minutes away.
    """

    def __init__(self, service: Service, url: str, count: int, tokens: int) -> None:
        self.tally = Tally()
        self._service = service
        self._load = Load(
            url, service.name, concurrency=count, count=count, tokens=(tokens,), prompt_words=4, idle_timeout_s=300
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._service.bed.in_network():
            asyncio.run(run(self._load, asyncio.Event(), self.tally))

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def end(self, deadline_s: float = 300) -> dict[str, Any]:
        """Wait for all of them; the tally."""
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise TimeoutError(f"requests still run after {deadline_s:g} s: {self.tally.as_dict()}")
        return self.tally.as_dict()
