"""Configs as they are published, with their traps: aliases, second copies, tied tables, quantisation, windows."""

from typing import Any

import pytest

from sluice.sizing.fields import FactsError
from sluice.sizing.hardware import GIB
from sluice.sizing.model import from_config
from sluice.sizing.weights import FileFacts, WeightSource, read_headers, read_index, weigh
from tests.unit.sizing.configs import (
    CATALOGUE,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    FP8_BLOCKS,
    GEMMA3_27B,
    GPT_OSS_120B,
    LLAMA_8B,
    LLAMA_70B,
    MISTRAL_WINDOW,
    QWEN3_30B,
    Config,
    dense,
    sized,
)


def parameters(config: Config) -> int | None:
    return sized(config).weights.parameters


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.738),
        ("llama-3.2-1b", 1.236),
        ("llama-3.1-405b-fp8", 405.85),
        ("qwen2.5-7b", 7.616),
        ("qwen3-8b", 8.191),
        ("qwen3-30b-a3b", 30.532),
        ("qwen3-235b-a22b", 235.09),
        ("qwen1.5-moe", 14.316),
        ("gemma-2b", 2.506),
        ("gemma-2-9b", 9.242),
        ("phi-3-mini", 3.821),
        ("gpt-oss-120b", 116.83),
        ("gpt-oss-20b", 20.91),
        ("deepseek-v2-lite", 15.706),
        ("mixtral-8x22b", 140.62),
        ("gemma-3-27b", 27.009),
    ],
)
def test_parameters_are_those_that_the_authors_name(name: str, billions: float) -> None:
    assert (parameters(CATALOGUE[name]) or 0) / 1e9 == pytest.approx(billions, rel=0.001)


def test_other_spellings_mean_the_same() -> None:
    renamed = {**QWEN3_30B, "num_local_experts": QWEN3_30B["num_experts"], "dtype": "bfloat16"}
    del renamed["num_experts"], renamed["torch_dtype"]
    assert from_config(renamed) == from_config(QWEN3_30B)


def test_heads_of_a_latent_model_say_nothing_about_its_cache() -> None:
    other = {**DEEPSEEK_V3, "head_dim": 192, "num_key_value_heads": 1}
    assert sized(other).shape == sized({**DEEPSEEK_V3, "num_key_value_heads": 128, "head_dim": 192}).shape
    shape = sized(DEEPSEEK_V32).shape
    assert shape and shape.latent and shape.latent.indexer == 128


def test_tied_tables_are_held_once() -> None:
    untied = parameters(LLAMA_8B) or 0
    assert untied - (parameters({**LLAMA_8B, "tie_word_embeddings": True}) or 0) == 128256 * 4096


def test_a_multimodal_model_is_read_through_its_text_config() -> None:
    model = from_config(GEMMA3_27B)
    assert model.architecture == "Gemma3ForConditionalGeneration" and model.has_vision
    assert model.shape and model.shape.vocab == 262_208 and model.shape.is_tied
    files = FileFacts(sized(GEMMA3_27B).weights.total_bytes + 800_000_000, WeightSource.HEADERS)
    assert weigh(model, files).encoder_bytes == 800_000_000


@pytest.mark.parametrize(
    ("raw", "size"),
    [
        (FP8_BLOCKS, 1 + 4 / 16384),
        ({"quant_method": "fbgemm_fp8"}, 1),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 1),
        (CATALOGUE["llama-3.1-8b-fp8"]["quantization_config"], 1),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 0.52),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 0.52),
        ({"quant_method": "mxfp4"}, 0.531),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.563),
    ],
)
def test_bytes_of_a_quantised_parameter(raw: Config, size: float) -> None:
    quantization = from_config({**LLAMA_8B, "quantization_config": raw}).quantization
    assert quantization.is_known and quantization.bits / 8 == pytest.approx(size, rel=0.002)


def test_only_the_experts_of_gpt_oss_are_four_bit() -> None:
    assert sized(GPT_OSS_120B).weights.total_bytes / GIB == pytest.approx(60.8, rel=0.02)


def test_another_quantisation_is_sized_by_its_files_and_said_so() -> None:
    config = CATALOGUE["llama-3.1-8b-bnb"]
    assert "counted as 16 bit" in " ".join(sized(config).weights.notes)
    weights = sized(config, files=FileFacts(5_700_000_000, WeightSource.INDEX)).weights
    assert weights.total_bytes == 5_700_000_000
    assert weights.notes == ("quantisation bitsandbytes: size from the files",)


def test_files_win_over_the_count_and_a_mismatch_is_told() -> None:
    weights = sized(LLAMA_8B, files=FileFacts(17_000_000_000, WeightSource.INDEX)).weights
    assert (weights.total_bytes, weights.source) == (17_000_000_000, WeightSource.INDEX)
    assert weights.notes[0].startswith("WeightsMismatch: the files hold 17.0 GB, the config counts 16.1 GB")
    close = sized(LLAMA_8B, files=FileFacts(16_200_000_000, WeightSource.INDEX)).weights
    assert (close.total_bytes, close.notes) == (16_200_000_000, ())


def test_files_in_fp32_load_as_sixteen_bit() -> None:
    config = {**LLAMA_8B, "torch_dtype": "float32"}
    weights = sized(config, files=FileFacts(4 * 8_030_261_248, WeightSource.INDEX)).weights
    assert (weights.total_bytes, weights.notes) == (2 * 8_030_261_248, ())


def test_headers_count_without_layers_that_are_not_loaded() -> None:
    def tensor(size: int) -> Config:
        return {"dtype": "BF16", "shape": [1], "data_offsets": [100, 100 + size]}

    header = {
        "__metadata__": {"format": "pt"},
        "model.layers.60.mlp.weight": tensor(10),
        "model.layers.61.x": tensor(500),
        "lm_head.weight": tensor(7),
    }
    assert read_headers([header, {"a": tensor(3)}], 61) == FileFacts(20, WeightSource.HEADERS)
    with pytest.raises(FactsError, match="'a' has no data_offsets"):
        read_headers([{"a": [1]}], 61)


@pytest.mark.parametrize(
    "index", [{}, {"metadata": []}, {"metadata": {"total_size": "1"}}, {"metadata": {"total_size": -1}}]
)
def test_an_index_without_a_size_says_nothing(index: Config) -> None:
    assert read_index(index) is None


def windows(config: Config) -> tuple[int, int]:
    """(layers with a window, layers without)."""
    shape = from_config(config).shape
    assert shape
    return sum(1 for w in shape.windows if w), shape.windows.count(0)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (GEMMA3_27B, (52, 10)),
        (CATALOGUE["gemma-2-9b"], (21, 21)),
        (GPT_OSS_120B, (18, 18)),
        ({k: v for k, v in GPT_OSS_120B.items() if k != "layer_types"}, (18, 18)),
        (MISTRAL_WINDOW, (32, 0)),
        (CATALOGUE["mistral-7b-v0.3"], (0, 32)),
        (CATALOGUE["qwen2.5-7b"], (0, 28)),
        ({**CATALOGUE["qwen2.5-7b"], "use_sliding_window": True, "max_window_layers": 20}, (8, 20)),
        (LLAMA_8B, (0, 32)),
    ],
)
def test_which_layers_have_a_window(config: Config, wanted: tuple[int, int]) -> None:
    assert windows(config) == wanted


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"hidden_size": "4096"}, "hidden_size: expected a whole number from 1 to 10000000, found '4096'"),
        ({"num_attention_heads": 0}, "num_attention_heads: expected"),
        ({"vocab_size": True}, "vocab_size: expected"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers: expected a whole number from 1 to 1000"),
        ({"intermediate_size": float("nan")}, "intermediate_size: expected"),
    ],
)
def test_a_field_that_can_not_be_used_is_named(change: Config, says: str) -> None:
    with pytest.raises(FactsError) as refused:
        from_config({**LLAMA_70B, **change})
    assert says in str(refused.value)


@pytest.mark.parametrize("config", [None, [], "x", 7])
def test_a_config_is_an_object(config: Any) -> None:
    with pytest.raises(FactsError, match="expected an object"):
        from_config(config)


def test_an_unknown_architecture_is_sized_by_its_files_only() -> None:
    config = {**LLAMA_8B, "model_type": "new_thing", "architectures": ["NewThing"]}
    with pytest.raises(FactsError, match='unknown architecture "NewThing": weights from files, KV unknown'):
        sized(config)
    sizing = sized(config, files=FileFacts(10**10, WeightSource.INDEX))
    assert sizing.weights.total_bytes == 10**10 and sizing.shape is None


@pytest.mark.parametrize("key", ["mamba_d_state", "linear_num_key_heads", "compress_ratios"])
def test_state_that_is_no_kv_cache_is_not_guessed(key: str) -> None:
    model = from_config({**LLAMA_8B, key: 4})
    assert model.shape is None and "modelled in part only" in model.partial and key in model.partial


def test_a_mixture_may_begin_with_dense_layers_and_step_over_some() -> None:
    shape = from_config(DEEPSEEK_V3).shape
    assert shape and shape.mixture.count(False) == 3 and not any(shape.mixture[:3])
    shape = from_config({**QWEN3_30B, "decoder_sparse_step": 2, "mlp_only_layers": [1]}).shape
    assert shape and shape.mixture[:6] == (False, False, False, True, False, True)


def test_head_size_need_not_be_hidden_size_over_heads() -> None:
    shape = from_config(dense("qwen3", 2, 5120, 64, 8, 25600, 1000, 1024, head_dim=128)).shape
    assert shape and shape.head_dim == 128
