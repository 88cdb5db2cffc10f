"""One chat completion through the service's router, printed token by token as it streams."""

import http.client
import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from e2e.target import DemoError, Target


@contextmanager
def forwarded(target: Target, namespace: str, service: str) -> Iterator[int]:
    """A local port to port 80 of the Service, by `kubectl port-forward`, for the length of the block."""
    command = target.kubectl("--namespace", namespace, "port-forward", f"service/{service}", ":80")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"127\.0\.0\.1:(\d+)", line)
        if not found:
            raise DemoError(f"kubectl port-forward gave no port: {line.strip()}")
        yield int(found[1])
    finally:
        process.terminate()
        process.wait(timeout=10)


def stream(port: int, model: str, prompt: str) -> Iterator[str]:
    """The pieces of the answer as they come.

    Raises:
        DemoError: an error status, an error event, or an answer that ended before it was complete.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"model": model, "stream": True, "max_tokens": 48, "messages": [{"role": "user", "content": prompt}]}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise DemoError(f"chat completion: HTTP {answer.status}: {answer.read(500).decode(errors='replace')}")
    finish = None
    for raw in answer:
        line = raw.decode().strip()
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            break
        event = json.loads(data)
        if "error" in event:
            raise DemoError(f"chat completion: {event['error']}")
        for choice in event.get("choices", []):
            finish = choice.get("finish_reason") or finish
            if text := choice.get("delta", {}).get("content"):
                yield text
    connection.close()
    if finish is None:
        raise DemoError("the stream ended without a finish reason")


def show(pieces: Iterator[str]) -> float:
    """Print the pieces; the monotonic time of the first one."""
    first = 0.0
    for piece in pieces:
        first = first or time.monotonic()
        print(piece, end="", flush=True)
    print(flush=True)
    return first
