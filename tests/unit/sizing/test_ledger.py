"""Memory of one GPU, as the engines account for it; settings from their arguments."""

from dataclasses import replace
from typing import Any

import pytest

from sluice.sizing.fields import FactsError
from sluice.sizing.hardware import GIB, MIB, from_memory, from_profile
from sluice.sizing.ledger import Layout, concurrency, keep, request_bytes
from sluice.sizing.limits import Fit, judge
from sluice.sizing.settings import EngineKind, EngineSettings, read_args
from sluice.sizing.weights import FileFacts, WeightSource
from tests.unit.sizing.configs import (
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GEMMA3_27B,
    GPT_OSS_120B,
    H100,
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_70B_128K,
    Config,
    dense,
    ledger,
    shipped,
    sized,
)

MQA = dense("llama", 4, 1024, 8, 1, 4096, 32000, 8192)


@pytest.mark.parametrize(
    ("config", "tensor", "each"),
    [(LLAMA_8B, 1, 131_072), (LLAMA_8B, 2, 65_536), (MQA, 1, 2048), (MQA, 2, 2048), (DEEPSEEK_V3, 8, 70_272)],
)
def test_kv_tokens_are_whole_blocks_of_the_room(config: Config, tensor: int, each: int) -> None:
    """Measured on vLLM 0.32: a KV head is never cut, and every rank holds the whole latent vector."""
    found = ledger(config, Layout(tensor), kv_cache_bytes=10_000_000_000)
    assert found.kv_per_token == each
    assert found.tokens == 10_000_000_000 // (each * 16) * 16


def test_ledger_adds_up() -> None:
    g = ledger(LLAMA_70B, Layout(4))
    assert g.room is not None and g.activations is not None
    assert g.usable == g.weights + g.activations + g.runtime + g.graphs + g.room


def test_no_graphs_with_eager_execution() -> None:
    assert ledger(LLAMA_8B, Layout(), has_graphs=False).graphs == 0


@pytest.mark.parametrize(("dtype", "each"), [("fp8", 576), ("fp8_ds_mla", 656), ("nvfp4_ds_mla", 352), ("auto", 1152)])
def test_latent_cache_forms(dtype: str, each: int) -> None:
    assert ledger(DEEPSEEK_V3, Layout(8, 2), kv_dtype=dtype).kv_per_token == each * 31
    assert ledger(DEEPSEEK_V32, Layout(8, 2), kv_dtype=dtype).kv_per_token == (each + 132) * 31


def test_context_parallelism_divides_what_ranks_hold_in_copies() -> None:
    assert ledger(DEEPSEEK_V3, Layout(8, 2), context_parallel=8).kv_per_token == 1152 * 31 / 8


def test_stages_before_the_last_get_the_layers_that_are_left_over() -> None:
    assert [len(s) for s in Layout(pipeline=4).stages(62)] == [15, 16, 16, 15]
    assert [len(s) for s in Layout(pipeline=2).stages(61)] == [31, 30]
    assert [s.start for s in Layout(pipeline=3).stages(7)] == [0, 2, 5]


def test_a_window_layer_holds_its_window_and_what_one_pass_writes() -> None:
    sizing = sized(GPT_OSS_120B, settings=EngineSettings(max_batched_tokens=2048))
    layer = 2 * 8 * 64 * 2
    full, window = 131_072, (128 - 1 + 2 * 2048 + 15) // 16 * 16 + 16
    assert request_bytes(sizing, Layout(), 131_072) == 18 * layer * (full + window)
    off = replace(sizing, settings=replace(sizing.settings, is_hybrid=False))
    assert request_bytes(off, Layout(), 131_072) == 36 * layer * full


def test_groups_of_unequal_kinds_of_layers_are_padded() -> None:
    sizing = sized(GEMMA3_27B, settings=EngineSettings(max_batched_tokens=2048))
    layer = 2 * 16 * 128 * 2
    window = (1024 - 1 + 2 * 2048 + 15) // 16 * 16 + 16
    assert request_bytes(sizing, Layout(), 100_000) == layer * (10 * 100_000 + 60 * window)


def test_tokens_of_a_window_model_are_how_often_its_context_fits() -> None:
    sizing = sized(GPT_OSS_120B)
    g, need = keep(sizing, Layout()), request_bytes(sizing, Layout(), 131_072)
    assert g.room and need and g.tokens == int(g.room * 131_072 // need)


@pytest.mark.parametrize(
    ("name", "tokens", "seqs"),
    [
        ("h100-80g", 8192, 1024),
        ("a100-80g", 2048, 256),
        ("l4", 2048, 256),
        ("mi300x", 16_384, 1024),
        ("b200", 16_384, 1024),
    ],
)
def test_the_engines_defaults_depend_on_the_gpu(name: str, tokens: int, seqs: int) -> None:
    settings = EngineSettings()
    assert (settings.batched_tokens(shipped(name)), settings.seqs(shipped(name))) == (tokens, seqs)


def test_sglang_reserves_one_sum() -> None:
    sizing = sized(LLAMA_8B, settings=EngineSettings(engine=EngineKind.SGLANG))
    g = keep(sizing, Layout())
    reserved = 512 + 1.5 * 8192 + 128 + 2 * 256
    assert g.usable == pytest.approx(H100.memory_bytes - reserved * MIB, abs=2)
    small = replace(sizing, settings=replace(sizing.settings, max_batched_tokens=2048, max_seqs=8))
    assert keep(small, Layout()).usable == pytest.approx(H100.memory_bytes - 10_240 * MIB, abs=2)
    told = replace(sizing, settings=replace(sizing.settings, static_fraction=0.8))
    assert keep(told, Layout()).usable == pytest.approx(0.8 * H100.memory_bytes, abs=2)


def test_a_gpu_of_which_only_the_memory_is_known_has_a_ledger() -> None:
    g = keep(sized(LLAMA_8B, from_memory("80Gi")), Layout())
    assert g.total == 80 * GIB and g.tokens


@pytest.mark.parametrize("text", ["", "0", "80", "lots", "1e3Gi", "999999P"])
def test_memory_is_a_quantity(text: str) -> None:
    with pytest.raises(FactsError, match="expected a quantity from 1Gi to 1Pi"):
        from_memory(text)


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({}, "spec.resourceName"),
        ({"metadata": {"name": "x"}, "spec": {"resourceName": "nvidia.com/gpu"}}, "x: spec.hardware is missing"),
        ({"spec": {"resourceName": "nvidia.com/gpu", "hardware": {}}}, "spec.hardware.memory"),
    ],
)
def test_a_profile_that_says_too_little_is_told_what_is_missing(document: Config, says: str) -> None:
    with pytest.raises(FactsError, match=says):
        from_profile(document)


@pytest.mark.parametrize(
    ("config", "layout", "settings", "fit"),
    [
        (LLAMA_8B, Layout(), {}, Fit.FITS),
        (LLAMA_70B_128K, Layout(2), {"max_model_len": 8192}, Fit.FITS),
        (LLAMA_70B_128K, Layout(2), {"max_model_len": 28_000}, Fit.TIGHT),
        (LLAMA_70B_128K, Layout(2), {"fits_context": True}, Fit.FITS),
        (LLAMA_70B_128K, Layout(2), {}, Fit.DOES_NOT_FIT),
    ],
)
def test_verdicts(config: Config, layout: Layout, settings: dict[str, Any], fit: Fit) -> None:
    assert judge(sized(config, settings=EngineSettings(**settings)), layout).reason == fit


def test_an_unknown_architecture_is_never_refused() -> None:
    config = {**LLAMA_70B, "model_type": "new_thing"}
    sizing = sized(config, files=FileFacts(141_000_000_000, WeightSource.INDEX))
    for tensor in (1, 3, 8):
        assert judge(sizing, Layout(tensor)).feasible is None
    assert keep(sizing, Layout(8)).room is not None and keep(sizing, Layout(8)).tokens is None


def test_an_unknown_architecture_is_judged_when_its_cache_is_told() -> None:
    config = {**LLAMA_70B, "model_type": "new_thing"}
    sizing = sized(config, files=FileFacts(141_000_000_000, WeightSource.INDEX), kv_bytes_per_token=327_680)
    assert judge(sizing, Layout(8)).feasible and not judge(sizing, Layout(1)).feasible
    held = concurrency(sizing, Layout(8), keep(sizing, Layout(8)), 8192)
    known = concurrency(sized(LLAMA_70B), Layout(8), ledger(LLAMA_70B, Layout(8)), 8192)
    assert held and known and held == pytest.approx(known, rel=0.05)


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["--max-model-len=8k"], {"max_model_len": 8000}),
        (["--max-model-len", "8K"], {"max_model_len": 8192}),
        (["--max_model_len", "25.6k"], {"max_model_len": 25_600}),
        (["--max-model-len", "-1"], {"fits_context": True}),
        (["--max-model-len=9", "--max-model-len=10"], {"max_model_len": 10}),
        (["--gpu-memory-utilization", "0.8"], {"utilization": 0.8}),
        (["--max-num-seqs=7", "--max-num-batched-tokens=9"], {"max_seqs": 7, "max_batched_tokens": 9}),
        (["--enforce-eager", "--kv-cache-dtype", "fp8"], {"has_graphs": False, "kv_dtype": "fp8"}),
        (["--speculative-config", '{"method": "deepseek_mtp"}'], {"loads_next": True}),
        (["--speculative-config", '{"method": "ngram"}'], {}),
        (["--trust-remote-code", "--seed", "3"], {}),
    ],
)
def test_arguments_of_vllm(args: list[str], wanted: dict[str, Any]) -> None:
    assert read_args(args, EngineSettings()) == EngineSettings(**wanted)


def test_arguments_of_sglang() -> None:
    args = ["--mem-fraction-static=0.85", "--context-length=4096", "--chunked-prefill-size", "2048", "--max-num-seqs=3"]
    wanted = EngineSettings(EngineKind.SGLANG, static_fraction=0.85, max_model_len=4096, max_batched_tokens=2048)
    assert read_args(args, EngineSettings(EngineKind.SGLANG)) == wanted


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--gpu-memory-utilization=1.2"], "--gpu-memory-utilization: '1.2' is no fraction"),
        (["--max-model-len=many"], "--max-model-len: 'many' is no whole number"),
        (["--max-num-seqs"], "--max-num-seqs: '' is no whole number"),
        (["--max-num-seqs=0"], "--max-num-seqs 0: must be from 1"),
        (["--kv-cache-dtype=int3"], "--kv-cache-dtype int3: known are auto"),
    ],
)
def test_arguments_that_the_engine_would_refuse_are_named(args: list[str], says: str) -> None:
    with pytest.raises(FactsError) as refused:
        read_args(args, EngineSettings())
    assert says in str(refused.value)
