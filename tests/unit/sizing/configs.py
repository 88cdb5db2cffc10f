"""Configs of public models, as far as sizing reads them, and builders of accelerators and questions.

Dimensions are those that the models' authors publish; nothing else of their files is here.
"""

from typing import Any

from sluice.cli.catalogue import read_shipped
from sluice.sizing.hardware import Accelerator, from_profile
from sluice.sizing.ledger import Layout, Ledger, Sizing, keep
from sluice.sizing.model import from_config
from sluice.sizing.settings import EngineSettings
from sluice.sizing.weights import FileFacts, weigh

Config = dict[str, Any]

FP8_BLOCKS: Config = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def dense(
    kind: str, layers: int, hidden: int, heads: int, kv: int, width: int, vocab: int, context: int, **more: Any
) -> Config:
    return {
        "model_type": kind,
        "architectures": [f"{kind}ForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": width,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "torch_dtype": "bfloat16",
        **more,
    }


LLAMA_8B = dense("llama", 32, 4096, 32, 8, 14336, 128256, 131072)
LLAMA_70B = dense("llama", 80, 8192, 64, 8, 28672, 128256, 8192)
LLAMA_70B_128K = {**LLAMA_70B, "max_position_embeddings": 131072}
MIXTRAL = dense(
    "mixtral", 32, 4096, 32, 8, 14336, 32000, 32768, num_local_experts=8, num_experts_per_tok=2, sliding_window=None
)
DEEPSEEK_V3 = dense(
    "deepseek_v3",
    61,
    7168,
    128,
    128,
    18432,
    129280,
    163840,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    first_k_dense_replace=3,
    moe_layer_freq=1,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    head_dim=64,
    num_nextn_predict_layers=1,
    quantization_config=FP8_BLOCKS,
)
DEEPSEEK_V32 = {**DEEPSEEK_V3, "model_type": "deepseek_v32", "index_head_dim": 128}
QWEN3_30B = dense(
    "qwen3_moe",
    48,
    2048,
    32,
    4,
    6144,
    151936,
    40960,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
QWEN3_235B = dense(
    "qwen3_moe",
    94,
    4096,
    64,
    4,
    12288,
    151936,
    40960,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=1536,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
GPT_OSS_120B = dense(
    "gpt_oss",
    36,
    2880,
    64,
    8,
    2880,
    201088,
    131072,
    head_dim=64,
    num_local_experts=128,
    num_experts_per_tok=4,
    sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 18,
    quantization_config={"quant_method": "mxfp4"},
)
GEMMA3_27B: Config = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "vision_config": {"hidden_size": 1152},
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
    },
}
MISTRAL_WINDOW = dense("mistral", 32, 4096, 32, 8, 14336, 32000, 32768, sliding_window=4096)
AWQ: Config = {"quant_method": "awq", "bits": 4, "group_size": 128}
COMPRESSED: Config = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {"weights": {"num_bits": 8, "type": "float"}, "input_activations": {"num_bits": 8, "type": "float"}}
    },
}


def _mla(kind: str, layers: int, hidden: int, heads: int, width: int, vocab: int, experts: int, **more: Any) -> Config:
    base = {
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "q_lora_rank": 1536,
    }
    return dense(kind, layers, hidden, heads, heads, width, vocab, 131072, **{**base, **more})


CATALOGUE: dict[str, Config] = {
    "llama-2-7b": dense("llama", 32, 4096, 32, 32, 11008, 32000, 4096),
    "llama-2-13b": dense("llama", 40, 5120, 40, 40, 13824, 32000, 4096),
    "llama-2-70b": dense("llama", 80, 8192, 64, 8, 28672, 32000, 4096),
    "llama-3-8b": {**LLAMA_8B, "max_position_embeddings": 8192},
    "llama-3.1-8b": LLAMA_8B,
    "llama-3-70b": LLAMA_70B,
    "llama-3.1-70b": LLAMA_70B_128K,
    "llama-3.1-405b-fp8": dense(
        "llama", 126, 16384, 128, 8, 53248, 128256, 131072, quantization_config={"quant_method": "fbgemm_fp8"}
    ),
    "llama-3.2-1b": dense("llama", 16, 2048, 32, 8, 8192, 128256, 131072, tie_word_embeddings=True, head_dim=64),
    "llama-3.2-3b": dense("llama", 28, 3072, 24, 8, 8192, 128256, 131072, tie_word_embeddings=True, head_dim=128),
    "llama-3.1-70b-awq": {**LLAMA_70B_128K, "quantization_config": AWQ},
    "llama-3.1-70b-gptq": {**LLAMA_70B_128K, "quantization_config": {**AWQ, "quant_method": "gptq"}},
    "llama-3.1-8b-fp8": {**LLAMA_8B, "quantization_config": COMPRESSED},
    "llama-3.1-8b-bnb": {**LLAMA_8B, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    "mistral-7b-v0.1": MISTRAL_WINDOW,
    "mistral-7b-v0.3": {**MISTRAL_WINDOW, "sliding_window": None, "vocab_size": 32768},
    "mistral-nemo": dense("mistral", 40, 5120, 32, 8, 14336, 131072, 131072, head_dim=128),
    "mistral-large": dense("mistral", 88, 12288, 96, 8, 28672, 32768, 131072, head_dim=128),
    "mixtral-8x7b": MIXTRAL,
    "mixtral-8x22b": dense("mixtral", 56, 6144, 48, 8, 16384, 32768, 65536, num_local_experts=8, num_experts_per_tok=2),
    "qwen2-0.5b": dense("qwen2", 24, 896, 14, 2, 4864, 151936, 32768, tie_word_embeddings=True),
    "qwen2.5-7b": dense(
        "qwen2", 28, 3584, 28, 4, 18944, 152064, 32768, use_sliding_window=False, sliding_window=131072
    ),
    "qwen2.5-32b": dense("qwen2", 64, 5120, 40, 8, 27648, 152064, 32768),
    "qwen2.5-72b": dense("qwen2", 80, 8192, 64, 8, 29568, 152064, 32768),
    "qwen3-8b": dense("qwen3", 36, 4096, 32, 8, 12288, 151936, 40960, head_dim=128),
    "qwen3-14b": dense("qwen3", 40, 5120, 40, 8, 17408, 151936, 40960, head_dim=128),
    "qwen3-32b": dense("qwen3", 64, 5120, 64, 8, 25600, 151936, 40960, head_dim=128),
    "qwen3-30b-a3b": QWEN3_30B,
    "qwen3-235b-a22b": QWEN3_235B,
    "qwen1.5-moe": dense(
        "qwen2_moe",
        24,
        2048,
        16,
        16,
        5632,
        151936,
        8192,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        decoder_sparse_step=1,
    ),
    "gpt-oss-20b": {
        **GPT_OSS_120B,
        "num_hidden_layers": 24,
        "num_local_experts": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "gpt-oss-120b": GPT_OSS_120B,
    "gemma-2b": dense("gemma", 18, 2048, 8, 1, 16384, 256000, 8192, head_dim=256),
    "gemma-2-9b": dense("gemma2", 42, 3584, 16, 8, 14336, 256000, 8192, head_dim=256, sliding_window=4096),
    "gemma-3-27b": GEMMA3_27B,
    "gemma-3-4b": {
        **GEMMA3_27B,
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
    },
    "phi-3-mini": dense("phi3", 32, 3072, 32, 32, 8192, 32064, 4096, sliding_window=2047),
    "phi-3-medium": dense("phi3", 40, 5120, 40, 10, 17920, 32064, 4096),
    "deepseek-v2-lite": _mla(
        "deepseek_v2",
        27,
        2048,
        16,
        10944,
        102400,
        64,
        moe_intermediate_size=1408,
        n_shared_experts=2,
        num_experts_per_tok=6,
        q_lora_rank=None,
    ),
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3.2": DEEPSEEK_V32,
    "kimi-k2": _mla("kimi_k2", 61, 7168, 64, 18432, 163840, 384, quantization_config=FP8_BLOCKS),
    "mamba": {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 4096, "vocab_size": 50280},
    "qwen3-next": dense(
        "qwen3_next",
        48,
        2048,
        16,
        2,
        5120,
        151936,
        262144,
        linear_num_key_heads=16,
        num_experts=512,
        num_experts_per_tok=10,
    ),
}


def shipped(name: str) -> Accelerator:
    profile = read_shipped(name)
    assert profile is not None
    return from_profile(profile)


H100 = shipped("h100-80g")


def sized(
    config: Config,
    accelerator: Accelerator = H100,
    settings: EngineSettings | None = None,
    files: FileFacts | None = None,
    kv_bytes_per_token: int | None = None,
) -> Sizing:
    settings = settings or EngineSettings()
    model = from_config(config)
    weights = weigh(model, files, with_next=settings.loads_next)
    return Sizing(model, weights, accelerator, settings, kv_bytes_per_token)


def ledger(config: Config, layout: Layout, **settings: Any) -> Ledger:
    return keep(sized(config, settings=EngineSettings(**settings)), layout)
