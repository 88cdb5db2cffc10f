from pathlib import Path

import pytest

from sluice_sim.cli import build_time_model, parse


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


@pytest.mark.parametrize("flag", ["--role", "--enable-expert-parallel", "--max-num-seq", "--metrics"])
def test_unknown_flag_is_refused_by_name(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert flag in refused(capsys, flag, "1")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--flavor", "sglang"], "--flavor"),
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
