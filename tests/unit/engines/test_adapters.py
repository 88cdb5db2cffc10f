"""Engine adapters: the command line, and what a user may not put on it."""

from pathlib import Path
from typing import Any

import pytest

from sluice.api import owned
from sluice.api.agent import Signal
from sluice.api.v1alpha1 import EngineType, Parallelism
from sluice.plan.declared import PoolDeclaration
from sluice.plan.engines import ADAPTERS
from sluice.plan.engines.adapter import check_args, engine_port


def declaration(kind: str = "vLLM", uri: str = "pvc://weights/llama/8b", **more: Any) -> PoolDeclaration:
    fields = {"model": {"uri": uri, "name": "llama"}, "engine": {"type": kind}, **more}
    return PoolDeclaration.model_validate(fields)


def custom(uri: str = "pvc://weights/llama/8b", image: str | None = "i:1", **engine: Any) -> PoolDeclaration:
    engine = {"command": ["serve", "$(SLUICE_MODEL_PATH)"], **engine}
    return declaration(uri=uri, engine={"type": "Custom", "image": image, "custom": engine})


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


@pytest.mark.parametrize("kind", ["vLLM", "SGLang", "Simulated"])
def test_every_signal_has_a_metric(kind: str) -> None:
    assert set(ADAPTERS[EngineType(kind)].publishes(declaration(kind)).signals) == set(Signal)


@pytest.mark.parametrize("kind", ["vLLM", "Simulated"])
def test_s057_renamed_metrics_keep_their_old_name(kind: str) -> None:
    signals = ADAPTERS[EngineType(kind)].publishes(declaration(kind)).signals
    assert [source.name for source in signals[Signal.KV_UTILIZATION]] == [
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
    ]


@pytest.mark.parametrize("kind", ["vLLM", "SGLang", "Custom"])
@pytest.mark.parametrize(
    "uri", ["hf://org/model", "pvc://claim/../other", "pvc://claim/a/..", "pvc://Claim/x", "s3://b/k"]
)
def test_engines_that_read_weights_take_claims_only(kind: str, uri: str) -> None:
    made = custom(uri=uri) if kind == "Custom" else declaration(kind, uri=uri)
    [complaint] = complaints(made)
    assert "spec.model.uri" in complaint
    assert f"engine type {kind}" in complaint
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
        "--ho=0.0.0.0",
        "--nn=2",
        "--kv-transfer-config.kv_role=kv_producer",
        "--no-enable-server-load-tracking",
        "--api-key=secret",
        "--shutdown-timeout=0",
        "--config=/x.yaml",
        # vLLM's short forms, with the value glued on, and what argparse completes
        *("-pp", "-pp=2", "-dp=8", "-ep", "-n", "-n2", "-r0", "-n=2", "-dpl", "-dpa=10.0.0.1", "-asc=4", "-pcp"),
        *("-t", "-dpn=1"),
        *("--data-parallel-size", "--data_parallel_size_local=4", "--data-parallel-hybrid-lb", "--api-server-count=8"),
        *("--enable-expert-parallel", "--no-enable-expert-parallel", "--prefill-context-parallel-size=2"),
        # SGLang's
        *("--tp", "--tp=8", "--tp-size=8", "--tp_size", "--dp", "--dp-size=2", "--pp-size=2", "--ep=8", "--ep-size"),
        *("--attn-dp-size=4", "--attn-dp=4", "--enable-dp-attention", "--expert-parallel-size=2", "--model-path=/x"),
        *(
            "--dist-init-addr=a:1",
            "--nccl-init-addr",
            "--disaggregation-mode=prefill",
            "--enable-metrics",
            "--grpc-mode",
        ),
        *("--grpc-mode", "--admin-api-key=x", "--fastapi-root-path=/x", "--enable-metrics-for-all-schedulers"),
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
        *("-dpb=mp", "-q=fp8", "-cc", "-ac", "-sc", "-1", "-", "--", "-dcp=2", "--decode-context-parallel-size=2"),
        *("--moe-a2a-backend=deepep", "--deepep-mode=auto", "--ep-num-redundant-experts=8", "--enable-eplb"),
        *("--disaggregation-ib-device=mlx5_0", "--tp-comm", "--enable-mixed-chunk", "--context-length=8192"),
    ],
)
def test_the_users_own_flags_pass(arg: str) -> None:
    assert list(check_args([arg], "spec.engine.args")) == []


def test_owned_variables_are_refused_by_name() -> None:
    made = declaration(engine={"type": "vLLM", "env": [{"name": "VLLM_SERVER_DEV_MODE", "value": "1"}]})
    [complaint] = complaints(made)
    assert "spec.engine.env[0]: VLLM_SERVER_DEV_MODE" in complaint


@pytest.mark.parametrize("kind", ["vLLM", "SGLang", "Simulated"])
def test_flags_against_ours_are_refused_for_service_and_pool(kind: str) -> None:
    made = declaration(kind, engine={"type": kind, "args": ["-tp=2"]}, poolEngine={"args": ["--tp-size", "2"]})
    first, second = complaints(made)
    assert first.startswith("spec.engine.args[0]: '-tp=2' sets -tp")
    assert second.startswith("spec.pools[].engine.args[0]: '--tp-size' sets --tp-size")


@pytest.mark.parametrize(
    ("layout", "vllm", "sglang"),
    [
        ({}, ["--tensor-parallel-size=1"], ["--tp-size=1"]),
        (
            {"tensor": 4, "pipeline": 2},
            ["--tensor-parallel-size=4", "--pipeline-parallel-size=2"],
            ["--tp-size=4", "--pp-size=2"],
        ),
        (
            {"tensor": 2, "data": 4, "expert": True},
            ["--tensor-parallel-size=2", "--data-parallel-size=4", "--api-server-count=1", "--enable-expert-parallel"],
            ["--tp-size=8", "--attn-dp-size=4", "--enable-metrics-for-all-schedulers", "--ep-size=8"],
        ),
        (
            {"tensor": 8, "expert": True},
            ["--tensor-parallel-size=8", "--enable-expert-parallel"],
            ["--tp-size=8", "--ep-size=8"],
        ),
    ],
)
def test_a_layout_is_spelled_as_each_engine_counts(layout: dict[str, Any], vllm: list[str], sglang: list[str]) -> None:
    for kind, expected in (("vLLM", vllm), ("SGLang", sglang)):
        args = ADAPTERS[EngineType(kind)].launch(declaration(kind, parallelism=layout), ()).args
        assert list(args)[-len(expected) :] == expected


def test_shared_memory_grows_with_the_ranks_up_to_a_bound() -> None:
    layouts: list[dict[str, Any]] = [{}, {"pipeline": 2}, {"tensor": 2, "data": 2, "expert": True}, {"tensor": 64}]
    made = [ADAPTERS[EngineType.VLLM].launch(declaration(parallelism=layout), ()).shm_gib for layout in layouts]
    assert made == [2, 4, 8, 16]


def test_sglang_listens_on_all_addresses_publishes_metrics_and_has_a_cheap_health_endpoint() -> None:
    launch = ADAPTERS[EngineType.SGLANG].launch(declaration("SGLang"), ())
    assert {"--host=0.0.0.0", "--enable-metrics", "--port=8000"} <= set(launch.args)
    env = {entry["name"]: entry.get("value") for entry in launch.env}
    assert env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"
    assert not any(name.startswith("VLLM") for name in env)


def test_a_custom_engine_gets_its_own_command_and_the_users_arguments_as_they_are() -> None:
    made = custom(port=9000)
    made = made.model_copy(update={"engine": made.engine.model_copy(update={"args": ["--workers=2"]})})
    launch = ADAPTERS[EngineType.CUSTOM].launch(made, ())
    assert (launch.command, launch.args) == (("serve", "$(SLUICE_MODEL_PATH)"), ("--workers=2",))
    env = {entry["name"]: entry.get("value") for entry in launch.env}
    assert (env["SLUICE_MODEL_PATH"], env["SLUICE_PORT"]) == ("/weights/llama/8b", "9000")
    assert engine_port(made) == 9000
    assert complaints(made) == []


@pytest.mark.parametrize(("layout", "size"), [({"tensor": 4}, "1"), ({"tensor": 2, "data": 2, "expert": True}, "4")])
def test_a_custom_engine_is_told_its_experts_as_a_size(layout: dict[str, Any], size: str) -> None:
    made = custom().model_copy(update={"parallelism": Parallelism.model_validate(layout)})
    env = {entry["name"]: entry.get("value") for entry in ADAPTERS[EngineType.CUSTOM].launch(made, ()).env}
    assert env["SLUICE_EXPERT"] == size


def test_a_signal_that_a_custom_engine_does_not_name_is_not_asked_for() -> None:
    publishes = ADAPTERS[EngineType.CUSTOM].publishes(custom(metrics={"waiting": "queue"}))
    assert {signal: source.name for signal, (source,) in publishes.signals.items()} == {Signal.WAITING: "queue"}
    assert ADAPTERS[EngineType.CUSTOM].publishes(custom()).signals == {}


def test_a_custom_engine_without_command_or_image_is_refused_also_when_stored_before_the_rule() -> None:
    made = declaration(engine={"type": "Custom"})
    first, second = complaints(made)
    assert first.startswith("spec.engine.custom: ")
    assert second.startswith("spec.engine.image: ")


@pytest.mark.parametrize("kind", ["vLLM", "SGLang", "Simulated"])
def test_engines_with_an_adapter_serve_on_one_port(kind: str) -> None:
    made = declaration(kind)
    assert f"--port={engine_port(made)}" in ADAPTERS[EngineType(kind)].launch(made, ()).args
    assert engine_port(made) == 8000


PAGE = (Path(__file__).parents[3] / "docs" / "engines.md").read_text()


@pytest.mark.parametrize("kind", ["vLLM", "SGLang"])
def test_the_page_on_engines_names_every_metric_endpoint_and_variable(kind: str) -> None:
    adapter, made = ADAPTERS[EngineType(kind)], declaration(kind)
    publishes = adapter.publishes(made)
    names = {source.name for sources in publishes.signals.values() for source in sources}
    paths = {path for path in (publishes.load_path, publishes.version_path) if path}
    own = {entry["name"] for entry in adapter.launch(made, ()).env if entry["name"].startswith(("VLLM", "SGLANG"))}
    in_tables = own - {"VLLM_CACHE_ROOT"}  # one of the caches
    assert {word for word in names | paths | in_tables if word not in PAGE} == set()


@pytest.mark.parametrize("kind", ["vLLM", "SGLang"])
def test_the_page_on_engines_names_every_flag_that_we_set(kind: str) -> None:
    layout = {"tensor": 2, "pipeline": 2, "data": 2, "expert": True}
    args = ADAPTERS[EngineType(kind)].launch(declaration(kind, parallelism=layout), ()).args
    flags = {arg.partition("=")[0] for arg in args if arg.startswith("--")}
    unnamed = {"--enable-request-id-headers", "--model-path"}
    assert {flag for flag in flags - unnamed if flag not in PAGE} == set()
    assert all(owned.is_owned_flag(flag) for flag in flags - {"--enable-request-id-headers"})


def test_the_page_on_engines_names_everything_that_a_custom_command_may_refer_to() -> None:
    env = ADAPTERS[EngineType.CUSTOM].launch(custom(), ()).env
    told = {entry["name"] for entry in env if entry["name"].startswith("SLUICE_")}
    assert {name for name in told if f"$({name})" not in PAGE} == set()
