"""Layouts and settings that no engine starts: each is refused with numbers and with the nearest that fits.

One row per kind of impossibility; `e2e/bench/sizing.py` counts them.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from sluice.sizing.layout import explain
from sluice.sizing.ledger import Layout
from sluice.sizing.limits import Fit, judge
from sluice.sizing.settings import EngineKind, EngineSettings
from tests.unit.sizing.configs import (
    CATALOGUE,
    DEEPSEEK_V3,
    FP8_BLOCKS,
    GPT_OSS_120B,
    H100,
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_70B_128K,
    MIXTRAL,
    QWEN3_235B,
    Config,
    dense,
    shipped,
    sized,
)

ODD = dense("llama", 30, 4608, 36, 6, 12288, 32000, 8192)
"""36 attention heads and 6 KV heads."""
EP = {"expert": True}


@dataclass(frozen=True)
class Kind:
    name: str
    config: Config
    layout: Layout
    reason: Fit
    says: str
    """Of the message."""
    fits: str
    """Of what is offered instead."""
    settings: dict[str, Any] = field(default_factory=dict)
    accelerator: str = H100.name


NO, ODDS, SIZE = Fit.NOT_SUPPORTED, Fit.NOT_DIVISIBLE, Fit.DOES_NOT_FIT
KINDS = [
    Kind("no GPU at all", LLAMA_8B, Layout(0), NO, "tensor 0", "tensor 1"),
    Kind("negative stages", LLAMA_8B, Layout(1, -2), NO, "pipeline -2", "tensor 1"),
    Kind("no data ranks", DEEPSEEK_V3, Layout(8, 1, 0), NO, "data 0", "data 16"),
    Kind("more GPUs than there are", LLAMA_8B, Layout(4096), NO, "1024", "tensor"),
    Kind("heads by three", LLAMA_8B, Layout(3), ODDS, "32 attention heads", "tensor 4"),
    Kind("more ranks than heads", CATALOGUE["qwen2-0.5b"], Layout(16), ODDS, "14 attention heads", "tensor 2"),
    Kind("KV heads neither split nor copied", ODD, Layout(4), ODDS, "6 KV heads", "tensor 2"),
    Kind("dense width", dense("llama", 8, 4096, 32, 8, 14338, 32000, 8192), Layout(4), ODDS, "14338", "tensor 2"),
    Kind("expert width", {**MIXTRAL, "intermediate_size": 14338}, Layout(4), ODDS, "expert width 14338", "tensor 2"),
    Kind(
        "FP8 blocks cut",
        {**QWEN3_235B, "quantization_config": FP8_BLOCKS},
        Layout(8),
        ODDS,
        "blocks of 128",
        "with expert parallelism",
    ),
    Kind(
        "groups of 4-bit scales cut",
        {**CATALOGUE["qwen2.5-7b"], "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
        Layout(8),
        ODDS,
        "28 attention heads",
        "tensor",
    ),
    Kind(
        "AWQ groups cut",
        {
            **LLAMA_8B,
            "intermediate_size": 14400,
            "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128},
        },
        Layout(4),
        ODDS,
        "3600",
        "tensor 1",
    ),
    Kind("more stages than layers", CATALOGUE["llama-3.2-1b"], Layout(1, 17), ODDS, "16 layers", "tensor"),
    Kind("experts of a dense model", LLAMA_70B, Layout(8, **EP), NO, "0 experts", "tensor 8"),
    Kind("attention data parallelism of a dense model", LLAMA_8B, Layout(1, 1, 4), NO, "4 replicas", "tensor 4"),
    Kind(
        "experts that do not divide", DEEPSEEK_V3, Layout(1, 1, 24, True), ODDS, "10.67 per rank", "8 redundant experts"
    ),
    Kind(
        "redundant experts that do not divide",
        DEEPSEEK_V3,
        Layout(1, 1, 32, True),
        ODDS,
        "256 + 10",
        "32 redundant experts",
        {"redundant_experts": 10},
    ),
    Kind(
        "redundant experts without ranks",
        DEEPSEEK_V3,
        Layout(8, 2),
        NO,
        "32 redundant",
        "expert parallel",
        {"redundant_experts": 32},
    ),
    Kind(
        "context beyond the model",
        LLAMA_70B,
        Layout(4),
        NO,
        "8192 tokens",
        "max-model-len 8192",
        {"max_model_len": 32768},
    ),
    Kind(
        "more sequences than tokens",
        LLAMA_8B,
        Layout(),
        NO,
        "4096 is more than",
        "max-num-seqs 2048",
        {"max_seqs": 4096, "max_batched_tokens": 2048},
    ),
    Kind(
        "prompts that are never cut", LLAMA_8B, Layout(), NO, "131072 tokens", "chunked prefill", {"is_chunked": False}
    ),
    Kind(
        "nothing left for CUDA",
        LLAMA_8B,
        Layout(),
        SIZE,
        "0.4 of 85.1 GB",
        "memory utilization 0.99",
        {"utilization": 0.995},
    ),
    Kind(
        "nothing left for NCCL",
        LLAMA_70B,
        Layout(4),
        SIZE,
        "NCCL, which need 1.0 GB",
        "memory utilization 0.98",
        {"utilization": 0.99},
    ),
    Kind(
        "context parallelism without copies",
        LLAMA_70B,
        Layout(8),
        ODDS,
        "8 KV heads",
        "decode-context-parallel-size 1",
        {"context_parallel": 4},
    ),
    Kind(
        "context parallelism beyond the ranks",
        DEEPSEEK_V3,
        Layout(8, 2),
        ODDS,
        "at most 8",
        "decode-context-parallel-size 8",
        {"context_parallel": 16},
    ),
    Kind(
        "latent KV form without latent attention",
        LLAMA_8B,
        Layout(),
        NO,
        "8 KV heads",
        "kv-cache-dtype fp8",
        {"kv_dtype": "fp8_ds_mla"},
    ),
    Kind(
        "prediction layers that are not there",
        LLAMA_8B,
        Layout(),
        NO,
        "0 of them",
        "speculative-config",
        {"loads_next": True},
    ),
    Kind("weights larger than a GPU", LLAMA_70B, Layout(), SIZE, "weights 141.1", "tensor 2"),
    Kind("weights larger than a node", DEEPSEEK_V3, Layout(8), SIZE, "weights 85.1", "data 16 with expert"),
    Kind("expert parallelism in one node", DEEPSEEK_V3, Layout(1, 1, 8, True), SIZE, "weights 100.8", "data 16"),
    Kind(
        "weights fit, one request does not",
        LLAMA_70B_128K,
        Layout(2),
        SIZE,
        "one request of 131072 tokens needs 21.5 GB KV per GPU, room is 3.9 GB (usable 78.3 = weights 70.6 + "
        "activations 2.6 + runtime 0.5 + graphs 0.7 + room)",
        "tensor 4, or max-model-len 23616",
    ),
    Kind(
        "passes that are too large",
        LLAMA_8B,
        Layout(),
        SIZE,
        "activations",
        "max-num-batched-tokens 524288",
        {"max_batched_tokens": 1_048_576},
    ),
    Kind(
        "batches that are too large",
        LLAMA_8B,
        Layout(),
        SIZE,
        "activations",
        "max-num-seqs 32768",
        {"max_seqs": 65_536, "max_batched_tokens": 65_536},
    ),
    Kind(
        "windows that are not used",
        GPT_OSS_120B,
        Layout(),
        SIZE,
        "one request",
        "tensor 2",
        {"is_hybrid": False, "max_batched_tokens": 65_536},
    ),
    Kind(
        "KV cache told too small",
        LLAMA_8B,
        Layout(),
        SIZE,
        "room is 1.0 GB",
        "max-model-len 7616",
        {"kv_cache_bytes": 1_000_000_000},
    ),
    Kind(
        "KV cache told too large",
        LLAMA_8B,
        Layout(),
        SIZE,
        "KV cache 80.0",
        "kv-cache-memory-bytes",
        {"kv_cache_bytes": 80_000_000_000},
    ),
    Kind("a small GPU", LLAMA_8B, Layout(), SIZE, "per GPU", "tensor", accelerator="l4"),
    Kind("SGLang, too", LLAMA_70B, Layout(), SIZE, "weights 141.1", "tensor 4", {"engine": EngineKind.SGLANG}),
    Kind(
        "SGLang's static part takes all",
        LLAMA_8B,
        Layout(),
        SIZE,
        "0.998",
        "memory utilization",
        {"engine": EngineKind.SGLANG, "static_fraction": 0.998},
    ),
    Kind(
        "no block of an automatic context",
        CATALOGUE["llama-3-70b"],
        Layout(),
        SIZE,
        "one request of 16 tokens",
        "tensor 2",
        {"fits_context": True},
    ),
    Kind(
        "nothing of this kind is large enough",
        {**DEEPSEEK_V3, "num_hidden_layers": 900, "quantization_config": None},
        Layout(),
        SIZE,
        "no layout of up to 64 rtx4090 fits",
        "more memory",
        accelerator="rtx4090",
    ),
]


def test_there_are_thirty_kinds_and_more() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS) >= 30


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_is_refused_with_numbers_and_the_nearest_fit(kind: Kind) -> None:
    accelerator = H100 if kind.accelerator == H100.name else shipped(kind.accelerator)
    sizing = sized(kind.config, accelerator, EngineSettings(**kind.settings))
    verdict = judge(sizing, kind.layout)
    text = explain(sizing, kind.layout, verdict)
    assert (verdict.feasible, verdict.reason) == (False, kind.reason)
    assert kind.says in text
    assert re.search(r"\d", text)
    offered = text.partition("fits with ")[2] or text.partition("fits: ")[2]
    assert kind.fits in offered, text
