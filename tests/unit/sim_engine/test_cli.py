import json
from pathlib import Path
from typing import Any

import pytest

from sluice_sim.cli import parse
from sluice_sim.config import NixlTransfer, Role
from sluice_sim.hardware import build_time_model


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as error:
        parse(["serve", "m", *argv], {})
    assert error.value.code == 2
    return capsys.readouterr().err


def test_takes_the_command_line_made_for_the_real_engine() -> None:
    config = parse(
        [
            *("serve", "/weights/abc", "--served-model-name", "tiny", "--host", "0.0.0.0", "--port", "8000"),
            *("--tensor-parallel-size", "2", "--shutdown-timeout", "30", "--enable-server-load-tracking"),
            *("--enable-request-id-headers", "--max-num-seqs", "64", "--max-model-len", "4096"),
            *("--max-num-batched-tokens", "2048", "--block-size", "32", "--num-gpu-blocks-override", "40"),
            *("--gpu-memory-utilization", "0.8", "--max-num-queued-reqs", "100", "--api-key", "k1", "k2"),
            *("--dtype", "bfloat16", "--seed", "7"),
        ],
        {},
    )
    assert config.served_names == ("tiny",)
    assert (config.port, config.fault_port, config.num_blocks, config.block_size) == (8000, 9876, 40, 32)
    assert (config.shutdown_timeout_s, config.tracks_load, config.sends_request_ids) == (30, True, True)
    assert (config.max_num_queued_reqs, config.api_keys, config.max_model_len) == (100, ("k1", "k2"), 4096)
    assert config.faults_file == Path("/etc/sim/faults.json")


@pytest.mark.parametrize(
    "flag", ["--kv-events-config", "--data-parallel-hybrid-lb", "--max-num-seq", "--metrics", "--tp"]
)
def test_unknown_flag_is_refused_by_name(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert flag in refused(capsys, flag, "1")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--flavor", "trt"], "--flavor"),
        (["--role", "middle"], "--role"),
        (["--port", "70000"], "0..65535"),
        (["--max-num-seqs", "0"], "at least 1"),
        (["--gpu-memory-utilization", "1.5"], "at most 1"),
        (["--speed", "0"], "0.001"),
        (["--dtype", "int3"], "--dtype"),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "32"], "less than --max-num-seqs"),
        (["--gpu-memory-utilization", "0.1"], "no room for KV"),
        (["--gpu-memory-utilization", "0.21", "--max-model-len", "100000"], "--max-model-len 100000 does not fit"),
    ],
)
def test_bad_value_is_refused_with_what_to_do(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *argv)


def test_key_can_come_from_the_environment_and_the_flag_wins() -> None:
    assert parse(["serve", "m"], {"VLLM_API_KEY": "e"}).api_keys == ("e",)
    assert parse(["serve", "m", "--api-key", "f"], {"VLLM_API_KEY": "e"}).api_keys == ("f",)


def test_tensor_parallelism_and_dtype_change_room_and_time() -> None:
    one, two = parse(["serve", "m"], {}), parse(["serve", "m", "-tp", "2"], {})
    wide = parse(["serve", "m", "--dtype", "float32"], {})
    assert wide.num_blocks < one.num_blocks < two.num_blocks
    assert wide.time_model.base_s > one.time_model.base_s > two.time_model.base_s


def test_time_model_is_that_of_an_8b_model_on_an_h100() -> None:
    model = build_time_model(1, 2, 1.0)
    assert 0.006 < model.step_s(0, 1, 1000) < 0.008
    assert 0.15 < model.step_s(8192, 1, 0) < 0.25
    assert build_time_model(1, 2, 10.0).step_s(100, 2, 50) == pytest.approx(model.step_s(100, 2, 50) / 10)


def transfer_config(**fields: Any) -> list[str]:
    return ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_producer", **fields})]


def test_connector_gives_role_lease_and_policy() -> None:
    extra = {"kv_lease_duration": 120, "enforce_handshake_compat": False}
    flags = transfer_config(
        kv_role="kv_consumer",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=extra,
        kv_buffer_device="cpu",
    )
    env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.7", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5601"}
    config = parse(["serve", "m", *flags], env)
    assert config.role is Role.DECODE
    assert config.transfer == NixlTransfer("10.0.0.7", 5601, 120.0, True, False, None)


def test_role_alone_stands_for_a_connector_with_the_real_engines_defaults() -> None:
    config = parse(["serve", "m", "--role", "prefill"], {})
    assert config.transfer == NixlTransfer("localhost", 5600, 30.0, False, True, None)
    assert parse(["serve", "m", "--role", "unified"], {}).transfer is None
    assert parse(["serve", "m"], {}).role is Role.UNIFIED


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-transfer-config", "{"], "--kv-transfer-config: not JSON"),
        (["--kv-transfer-config", "[]"], "expected an object"),
        (transfer_config(kv_connector="LMCacheMPConnector"), "'LMCacheMPConnector' is not simulated"),
        (transfer_config(kv_role="producer"), "known: kv_producer, kv_consumer, kv_both"),
        (transfer_config(kv_port=1), "field 'kv_port' is unknown; known: kv_connector"),
        (transfer_config(kv_load_failure_policy="retry"), "known: fail, recompute"),
        (transfer_config(kv_connector_extra_config={"lease": 1}), "field 'lease' is unknown; known: kv_lease_duration"),
        (transfer_config(kv_connector_extra_config={"kv_lease_duration": "1m"}), "not a number of seconds"),
        ([*transfer_config(), "--role", "decode"], "contradicts kv_role kv_producer"),
    ],
)
def test_wrong_connector_is_refused_with_what_is_known(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *flags)


def test_pipeline_and_data_parallel_ranks_add_room() -> None:
    one = parse(["serve", "m"], {}).num_blocks
    assert parse(["serve", "m", "-pp", "2"], {}).num_blocks > 2 * one
    assert parse(["serve", "m", "-dp", "2", "--api-server-count=1"], {}).num_blocks == 2 * one
