"""What each engine is started with and watched by, layout by layout: the container, its volumes, the agent's orders."""

import json
import os
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from sluice.api.agent import AgentConfig
from sluice.plan.pods import build_pod
from sluice.plan.view import observe
from tests.unit.plan.cluster import Cluster, a_service

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parent / "golden"


def served(kind: str, model: str, **layout: Any) -> dict[str, Any]:
    return {
        "engine": {"type": kind},
        "model": {"uri": f"pvc://models/{model}", "name": model},
        "accelerator": {"resourceName": "nvidia.com/gpu"},
        "pools": [{"name": "default", "parallelism": layout}],
    }


def example(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load((ROOT / "manifests" / "examples" / name).read_text())["spec"]
    return spec


CASES: dict[str, dict[str, Any]] = {
    "vllm-single": served("vLLM", "llama-3.1-8b"),
    "vllm-tp8": served("vLLM", "llama-3.1-405b-fp8", tensor=8),
    "vllm-tp4-pp2": served("vLLM", "llama-3.1-70b", tensor=4, pipeline=2),
    "vllm-moe-dp8-ep": served("vLLM", "deepseek-v3", data=8, expert=True),
    "vllm-moe-tp8-ep": served("vLLM", "deepseek-v3", tensor=8, expert=True),
    "sglang-single": served("SGLang", "llama-3.1-8b"),
    "sglang-tp8": served("SGLang", "llama-3.1-405b-fp8", tensor=8),
    "sglang-tp4-pp2": served("SGLang", "llama-3.1-70b", tensor=4, pipeline=2),
    "sglang-moe-dp8-ep": served("SGLang", "deepseek-v3", data=8, expert=True),
    "sglang-moe-tp2-dp4-ep": served("SGLang", "deepseek-v3", tensor=2, data=4, expert=True),
    "custom-trtllm": example("trtllm-custom.yaml"),
}


def pod_of(spec: dict[str, Any]) -> dict[str, Any]:
    snapshot = Cluster(a_service(spec)).snapshot()
    view = observe(snapshot, 0)
    target = view.pools[0].target
    assert target is not None, view.refusals
    return build_pod(snapshot, target, 0, 1)


@pytest.mark.parametrize("case", CASES)
def test_the_container_is_the_golden_one(case: str) -> None:
    """Change goldens with `make golden` and read the diff. `make bench-flags` gives their arguments to the engines' own
    parsers."""
    pod = pod_of(CASES[case])
    [engine], [agent] = pod["spec"]["containers"], pod["spec"]["initContainers"]
    said = {"engine": engine, "volumes": pod["spec"]["volumes"], "agent": json.loads(agent["env"][0]["value"])}
    path = GOLDEN / f"{case}.yaml"
    text = yaml.safe_dump(json.loads(json.dumps(said)), sort_keys=False, width=120)
    if os.environ.get("GOLDEN_UPDATE"):
        path.write_text(text)
    assert text == path.read_text()


def test_no_golden_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_the_pod_passes_the_strict_schema_of_kubernetes(case: str) -> None:
    kubernetes_validate.validate(pod_of(CASES[case]), "1.36", strict=True)


@pytest.mark.parametrize("case", CASES)
def test_an_instance_asks_for_as_many_accelerators_as_its_layout_has_ranks(case: str) -> None:
    layout = CASES[case]["pools"][0]["parallelism"]
    ranks = layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("data", 1)
    resources = pod_of(CASES[case])["spec"]["containers"][0]["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == str(ranks)


@pytest.mark.parametrize("case", CASES)
def test_agent_container_and_command_agree_on_the_port(case: str) -> None:
    pod = pod_of(CASES[case])
    [engine], [agent] = pod["spec"]["containers"], pod["spec"]["initContainers"]
    port = AgentConfig.model_validate_json(agent["env"][0]["value"]).engine_port
    assert [p["containerPort"] for p in engine["ports"]] == [port]
    told = {entry["name"]: entry.get("value") for entry in engine["env"]}
    words = [*engine["command"], *engine.get("args", [])]
    assert f"--port={port}" in [word.replace("$(SLUICE_PORT)", told.get("SLUICE_PORT", "?")) for word in words]


def test_a_custom_command_refers_only_to_what_it_is_told() -> None:
    [engine] = pod_of(CASES["custom-trtllm"])["spec"]["containers"]
    told = {entry["name"]: entry.get("value") for entry in engine["env"]}
    line = " ".join(engine["command"])
    for name, value in told.items():
        line = line.replace(f"$({name})", str(value))
    assert line == (
        "trtllm-serve /weights/llama-3.3-70b-fp8 --backend=pytorch --host=0.0.0.0 --port=8000 --tp_size=4 --pp_size=1 "
        "--ep_size=1"
    )


@pytest.mark.parametrize("case", CASES)
def test_s018_every_engine_has_all_probes_and_waits_in_pre_stop(case: str) -> None:
    [engine] = pod_of(CASES[case])["spec"]["containers"]
    asked = {kind: engine[kind]["httpGet"]["path"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert asked == {"startupProbe": "/startup", "readinessProbe": "/ready", "livenessProbe": "/alive"}
    assert engine["lifecycle"]["preStop"]["httpGet"]["path"] == "/drain"


@pytest.mark.parametrize("case", CASES)
def test_engines_run_restricted_without_token_and_service_links(case: str) -> None:
    spec = pod_of(CASES[case])["spec"]
    assert (spec["enableServiceLinks"], spec["automountServiceAccountToken"]) == (False, False)
    for container in (*spec["initContainers"], *spec["containers"]):
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["runAsNonRoot"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("sglang")])
def test_the_simulated_sglang_takes_the_command_line(case: str) -> None:
    cli = pytest.importorskip("sluice_sim.cli")
    [engine] = pod_of(CASES[case])["spec"]["containers"]
    config = cli.parse(["serve", "--flavor=sglang", *engine["args"]], {})
    assert (config.host, config.port) == ("0.0.0.0", 8000)
    assert config.served_names == (CASES[case]["model"]["name"],)
