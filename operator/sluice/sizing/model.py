"""What a model's `config.json` says about its shape, in one form for all families.

Read raw: transformers (from 5.4) renames keys and changes values (`qk_rope_head_dim`), so all spellings are accepted
here. A family that is not in `FAMILIES`, or one with state that is no KV cache (Mamba, linear attention), has no
`Shape`: its weights are known from the files only and its KV from the user only, and nothing is refused because of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from sluice.sizing.fields import Config, FactsError, Fields, printable, shown
from sluice.sizing.quantization import Quantization, read_quantization

MAX_LAYERS: Final = 1000


class Family(StrEnum):
    """How weights and attention are laid out; several `model_type`s share one."""

    DENSE = "dense"
    MIXTURE = "mixture"
    LATENT = "latent"


FAMILIES: Final[Mapping[str, Family]] = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "qwen3", "phi3"), Family.DENSE),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "gemma3"), Family.DENSE),
    **dict.fromkeys(("qwen2_5_vl_text", "qwen2_5_vl", "qwen2_vl_text", "qwen2_vl", "qwen3_vl_text"), Family.DENSE),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"), Family.MIXTURE),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"), Family.LATENT),
}
QKV_BIAS: Final = ("qwen2", "qwen2_moe", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text", "gpt_oss")
QK_NORM: Final = ("qwen3", "qwen3_moe", "qwen3_vl_text", "gemma3", "gemma3_text")
FOUR_NORMS: Final = ("gemma2", "gemma3", "gemma3_text")
TIED: Final = ("gemma", "gemma2", "gemma3", "gemma3_text")
"""Families whose embedding and output head are one table unless the config says otherwise."""
FAMILY_DEFAULTS: Final[Mapping[str, Config]] = {
    # transformers' Gemma3TextConfig: published configs leave these out.
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window_pattern": 6,
    },
    "gemma3": {"sliding_window_pattern": 6},
    "gemma2": {"sliding_window_pattern": 2},
    "gpt_oss": {"sliding_window_pattern": 2},
}


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (MLA): one compressed vector per token instead of keys and values."""

    q_rank: int
    """0: the query is not compressed."""
    kv_rank: int
    nope: int
    rope: int
    value: int
    indexer: int
    """Head size of the sparse-attention indexer (DeepSeek-V3.2); 0: none."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture part of a layer."""

    count: int
    active: int
    width: int
    """Intermediate size of one routed expert."""
    shared_width: int
    """Intermediate size of all shared experts together; 0: none."""
    has_bias: bool
    """gpt-oss: router and experts have bias vectors."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A transformer whose weights and KV cache we can count."""

    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    """Intermediate size of a dense layer's MLP."""
    is_tied: bool
    mixture: tuple[bool, ...]
    """One per layer: experts instead of a dense MLP."""
    windows: tuple[int, ...]
    """One per layer: sliding window in tokens, 0 for full attention."""
    latent: Latent | None = None
    experts: Experts | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    """RMS norms per layer over the hidden size."""
    next_layers: int = 0
    """Multi-token-prediction layers in the files; loaded only with speculative decoding."""

    @property
    def has_windows(self) -> bool:
        return any(self.windows)

    @property
    def attention_width(self) -> int:
        """Numbers per token and layer that attention itself multiplies: query and value heads together, twice h*Hq."""
        if self.latent:
            return self.heads * (self.latent.nope + self.latent.rope + self.latent.value)
        return 2 * self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One model; `shape` None: the architecture is unknown or only partly modelled, `partial` says why."""

    architecture: str
    shape: Shape | None
    partial: str
    context: int | None
    """Longest context that the config allows, tokens; None: not said."""
    quantization: Quantization
    file_bytes_per_parameter: int = 2
    """4: the files hold FP32, which engines load as 16 bit."""
    has_vision: bool = False
    hidden: int | None = None
    vocab: int | None = None
    """Told even when the shape is not known, for a rough idea of the activations."""
    notes: tuple[str, ...] = field(default=())


def from_config(config: Config) -> ModelFacts:
    """The facts of a `config.json`.

    Raises:
        FactsError: no object, or a field of a known family is missing or of an unusable value.
    """
    if not isinstance(config, Mapping):
        raise FactsError(f"config.json: expected an object, found {shown(config)}")
    inner = config.get("text_config")
    nested = isinstance(inner, Mapping)
    text: Config = {**config, **inner} if isinstance(inner, Mapping) else config
    kind = _kind(text, config)
    fields = Fields({**FAMILY_DEFAULTS.get(kind, {}), **{k: v for k, v in text.items() if v is not None}})
    quantization = read_quantization(fields)
    architecture = _architecture(config, kind)
    reason = _unmodelled(fields, kind, architecture)
    notes = ["vision or audio encoder: counted from files only"] if nested and _has_encoder(config) else []
    return ModelFacts(
        architecture=architecture,
        shape=None if reason else _shape(fields, kind),
        partial=reason,
        context=fields.maybe("max_position_embeddings", "n_positions", "max_seq_len"),
        quantization=quantization,
        file_bytes_per_parameter=4 if _dtype(config, text) == "float32" else 2,
        has_vision=bool(notes),
        hidden=fields.maybe("hidden_size", "n_embd", "d_model"),
        vocab=fields.maybe("vocab_size"),
        notes=tuple(notes),
    )


def _kind(text: Config, config: Config) -> str:
    found = text.get("model_type") or config.get("model_type")
    return found if isinstance(found, str) else ""


def _architecture(config: Config, kind: str) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return printable(names[0][:128])
    return printable(kind[:128]) or "unknown"


def _dtype(config: Config, text: Config) -> str:
    found = [source.get(key) for source in (config, text) for key in ("torch_dtype", "dtype")]
    return next((str(f) for f in found if f), "bfloat16")


def _has_encoder(config: Config) -> bool:
    return any(key in config for key in ("vision_config", "audio_config", "vision_tower"))


def _unmodelled(fields: Fields, kind: str, architecture: str) -> str:
    """Why this model has no `Shape`; "" if it has one."""
    if kind not in FAMILIES and not fields.has("kv_lora_rank"):
        return f'unknown architecture "{architecture}": weights from files, KV unknown; pass --kv-bytes-per-token'
    state = [k for k in fields.names() if k.startswith(("linear_", "mamba_")) or k == "compress_ratios"]
    types = fields.texts("layer_types")
    other = sorted({t for t in types if t not in ("full_attention", "sliding_attention")})
    if state or other:
        what = ", ".join([*sorted(state)[:3], *(f"layer type {t}" for t in other[:3])])
        what = printable(what[:200])
        return (
            f'architecture "{architecture}" is modelled in part only ({what}): weights from files, KV unknown; '
            "pass --kv-bytes-per-token"
        )
    return ""


def _shape(fields: Fields, kind: str) -> Shape:
    layers = fields.whole("num_hidden_layers", "n_layer", most=MAX_LAYERS)
    hidden = fields.whole("hidden_size", "n_embd")
    heads = fields.whole("num_attention_heads", "n_head", most=65_536)
    latent = _latent(fields)
    experts = _experts(fields, kind)
    width = fields.whole("intermediate_size", default=experts.width if experts else None)
    head_dim = fields.whole("head_dim", default=max(1, hidden // heads))
    return Shape(
        layers=layers,
        hidden=hidden,
        vocab=fields.whole("vocab_size"),
        heads=heads,
        kv_heads=heads if latent else fields.whole("num_key_value_heads", default=heads, most=65_536),
        head_dim=head_dim,
        width=width,
        is_tied=fields.flag("tie_word_embeddings", kind in TIED),
        mixture=_mixture(fields, layers, experts),
        windows=_windows(fields, kind, layers),
        latent=latent,
        experts=experts,
        qkv_bias=fields.flag("attention_bias", False) or kind in QKV_BIAS,
        o_bias=kind == "gpt_oss" or (kind == "llama" and fields.flag("attention_bias", False)),
        qk_norm=kind in QK_NORM,
        norms=4 if kind in FOUR_NORMS else 2,
        next_layers=fields.whole("num_nextn_predict_layers", default=0, least=0, most=16),
    )


def _latent(fields: Fields) -> Latent | None:
    """MLA is told by `kv_lora_rank`; such configs also carry a `head_dim` and KV heads that mean nothing."""
    if not fields.has("kv_lora_rank"):
        return None
    return Latent(
        q_rank=fields.whole("q_lora_rank", default=0, least=0),
        kv_rank=fields.whole("kv_lora_rank"),
        nope=fields.whole("qk_nope_head_dim"),
        rope=fields.whole("qk_rope_head_dim"),
        value=fields.whole("v_head_dim"),
        indexer=fields.whole("index_head_dim", default=0, least=0),
    )


def _experts(fields: Fields, kind: str) -> Experts | None:
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    family = FAMILIES.get(kind, Family.LATENT)
    if family is Family.DENSE or not (fields.has(*names) or family is Family.MIXTURE):
        return None
    count = fields.whole(*names, most=65_536)
    narrow = kind not in ("mixtral", "gpt_oss")
    width = fields.whole(*(("moe_intermediate_size",) if narrow else ()), "intermediate_size")
    shared = fields.whole("n_shared_experts", default=0, least=0, most=1024) * width
    return Experts(
        count=count,
        active=fields.whole("num_experts_per_tok", "experts_per_token", most=count),
        width=width,
        shared_width=fields.whole("shared_expert_intermediate_size", default=shared, least=0),
        has_bias=kind == "gpt_oss",
    )


def _mixture(fields: Fields, layers: int, experts: Experts | None) -> tuple[bool, ...]:
    if experts is None:
        return (False,) * layers
    first = fields.whole("first_k_dense_replace", default=0, least=0, most=MAX_LAYERS)
    step = fields.whole("decoder_sparse_step", "moe_layer_freq", default=1)
    dense = set(fields.numbers("mlp_only_layers"))
    offset = 1 if fields.has("decoder_sparse_step") else 0
    return tuple(i >= first and i not in dense and (i + offset) % step == 0 for i in range(layers))


def _windows(fields: Fields, kind: str, layers: int) -> tuple[int, ...]:
    """Sliding window per layer; 0 where attention is full."""
    window = fields.maybe("sliding_window")
    full = (0,) * layers
    if window is None or kind == "phi3":  # phi3 names one, but engines hold its whole context
        return full
    types = fields.texts("layer_types")
    if len(types) == layers:
        return tuple(window if t == "sliding_attention" else 0 for t in types)
    if kind.startswith("qwen"):
        if not fields.flag("use_sliding_window", False):
            return full
        first = fields.whole("max_window_layers", default=layers, least=0, most=MAX_LAYERS)
        return tuple(window if i >= first else 0 for i in range(layers))
    pattern = fields.maybe("sliding_window_pattern", "_sliding_window_pattern")
    if pattern is not None:
        return tuple(0 if (i + 1) % pattern == 0 else window for i in range(layers))
    return (window,) * layers if kind in ("mistral", "ministral", "mixtral") else full
