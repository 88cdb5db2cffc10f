"""Engine adapters: the command line, and what a user may not put on it."""

from typing import Any

import pytest

from sluice.api.agent import Signal
from sluice.api.v1alpha1 import EngineType
from sluice.plan.declared import PoolDeclaration
from sluice.plan.engines import ADAPTERS
from sluice.plan.engines.adapter import check_args


def declaration(kind: str = "vLLM", uri: str = "pvc://weights/llama/8b", **more: Any) -> PoolDeclaration:
    fields = {"model": {"uri": uri, "name": "llama"}, "engine": {"type": kind}, **more}
    return PoolDeclaration.model_validate(fields)


def complaints(made: PoolDeclaration) -> list[str]:
    return [refused.message for refused in ADAPTERS[made.engine.type].check(made)]


def test_vllm_serves_the_claim_under_its_name_with_the_drain_time_set() -> None:
    made = declaration(parallelism={"tensor": 4}, engine={"type": "vLLM", "args": ["--max-model-len=1024"]})
    launch = ADAPTERS[EngineType.VLLM].launch(made, ("--enforce-eager",))
    assert launch.command == ("vllm", "serve")
    assert launch.args[0] == "/weights/llama/8b"
    assert launch.claim == "weights"
    assert "--served-model-name=llama" in launch.args
    assert "--tensor-parallel-size=4" in launch.args
    assert "--shutdown-timeout=30" in launch.args  # S020
    assert launch.args[-2:] == ("--enforce-eager", "--max-model-len=1024")  # the user's win over defaults
    assert launch.shm_gib == 8


def test_vllm_is_offline_writes_to_its_home_and_knows_its_address() -> None:
    launch = ADAPTERS[EngineType.VLLM].launch(declaration(health={"startupTimeoutSeconds": 1234}), ())
    env = {entry["name"]: entry.get("value") for entry in launch.env}
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["VLLM_HOST_IP"] == "$(POD_IP)"
    assert env["VLLM_ENGINE_READY_TIMEOUT_S"] == "1234"
    assert str(env["VLLM_CACHE_ROOT"]).startswith(str(env["HOME"]))
    names = [entry["name"] for entry in launch.env]
    assert names.index("POD_IP") < names.index("VLLM_HOST_IP")
    assert len(names) == len(set(names))


def test_the_users_variables_win_over_defaults_and_the_pools_over_the_services() -> None:
    made = declaration(
        engine={"type": "vLLM", "env": [{"name": "HOME", "value": "/a"}, {"name": "X", "value": "1"}]},
        poolEngine={"env": [{"name": "X", "value": "2"}]},
    )
    env = {entry["name"]: entry.get("value") for entry in ADAPTERS[EngineType.VLLM].launch(made, ()).env}
    assert (env["HOME"], env["X"]) == ("/a", "2")


def test_the_simulated_engine_takes_any_uri_and_the_same_flags() -> None:
    launch = ADAPTERS[EngineType.SIMULATED].launch(declaration("Simulated", uri="hf://org/model"), ())
    assert launch.command == ("sluice-sim", "serve")
    assert launch.args[0] == "hf://org/model"
    assert "--port=8000" in launch.args
    assert launch.claim == ""
    assert complaints(declaration("Simulated", uri="hf://org/model")) == []


def test_the_simulators_own_parser_takes_the_command_line() -> None:
    cli = pytest.importorskip("sluice_sim.cli")
    made = declaration("Simulated", uri="sim://tiny", parallelism={"tensor": 2})
    launch = ADAPTERS[EngineType.SIMULATED].launch(made, ("--seed=3",))
    config = cli.parse([*launch.command[1:], *launch.args], {})
    assert (config.port, config.served_names, config.shutdown_timeout_s) == (8000, ("llama",), 30.0)


@pytest.mark.parametrize("kind", list(EngineType))
def test_s057_every_signal_has_a_metric_and_renamed_ones_keep_their_old_name(kind: EngineType) -> None:
    signals = ADAPTERS[kind].publishes().signals
    assert set(signals) == set(Signal)
    assert [source.name for source in signals[Signal.KV_UTILIZATION]] == [
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
    ]


@pytest.mark.parametrize(
    "uri", ["hf://org/model", "pvc://claim/../other", "pvc://claim/a/..", "pvc://Claim/x", "s3://b/k"]
)
def test_vllm_takes_claims_only(uri: str) -> None:
    [complaint] = complaints(declaration(uri=uri))
    assert "spec.model.uri" in complaint
    assert "pvc://<claim>/<path>" in complaint


@pytest.mark.parametrize("uri", ["pvc://claim", "pvc://claim/", "pvc://claim/a", "pvc://claim/a/b/"])
def test_a_claims_root_or_a_directory_in_it(uri: str) -> None:
    made = declaration(uri=uri)
    assert complaints(made) == []
    assert ADAPTERS[EngineType.VLLM].launch(made, ()).args[0] == "/weights" + uri.removeprefix("pvc://claim").rstrip(
        "/"
    )


@pytest.mark.parametrize(
    "arg",
    [
        "--host",
        "--port=9",
        "--served_model_name=x",
        "--tensor-parallel-size=2",
        "-tp",
        "-tp=2",
        "--tensor-par=2",  # argparse completes abbreviations
        "--hos=0.0.0.0",
        "--kv-transfer-config.kv_role=kv_producer",
        "--no-enable-server-load-tracking",
        "--api-key=secret",
        "--shutdown-timeout=0",
        "--config=/x.yaml",
    ],
)
def test_owned_flags_are_refused_in_every_spelling_with_index_and_text(arg: str) -> None:
    [refused] = check_args(["--max-num-seqs=4", arg], "spec.engine.args")
    assert refused.message.startswith(f"spec.engine.args[1]: '{arg}' sets")


@pytest.mark.parametrize(
    "arg",
    [
        "--max-model-len=1",
        "--config-format=hf",
        "--model-impl=vllm",
        "4096",
        "--dtype",
        "-O3",
        "--data-parallel-backend=mp",
    ],
)
def test_the_users_own_flags_pass(arg: str) -> None:
    assert list(check_args([arg], "spec.engine.args")) == []


def test_owned_variables_are_refused_by_name() -> None:
    made = declaration(engine={"type": "vLLM", "env": [{"name": "VLLM_SERVER_DEV_MODE", "value": "1"}]})
    [complaint] = complaints(made)
    assert "spec.engine.env[0]: VLLM_SERVER_DEV_MODE" in complaint
