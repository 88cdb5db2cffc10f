"""The memory of one GPU: what fills it, what is left for the KV cache, and what fits into that.

All figures are of the fullest GPU of the layout; with several pipeline stages tokens are the least over the stages.
The numbers follow the engines' own accounting (vLLM 0.32.0, SGLang 0.5.23, read in their source), so the KV tokens
are those that vLLM logs. None: not known, because the model's shape is not.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from sluice.sizing.hardware import MIB, Accelerator
from sluice.sizing.model import ModelFacts, Shape
from sluice.sizing.settings import KV_BYTES, EngineKind, EngineSettings
from sluice.sizing.weights import LayerParts, Weights

RUNTIME_ONE: Final = 350_000_000
"""Bytes besides torch's own with one GPU per instance (logs: 0.16 to 0.43 GiB)."""
RUNTIME_MANY: Final = 500_000_000
GRAPHS: Final = 700_000_000
"""CUDA graphs (logs: 0.1 to 0.75 GiB); inside the utilisation since vLLM 0.21."""
CONTEXT: Final = 500_000_000
"""CUDA context, allocated before vLLM looks at the free memory; the same again for NCCL with several GPUs."""
LATENT_BYTES: Final = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Bytes per token and layer of these MLA layouts, whatever the ranks (vLLM 0.32)."""
INDEXER_EXTRA: Final = 4
"""Scale of the FP8 indexer key of DeepSeek-V3.2: 128 + 4 bytes per token and layer."""
PADDING: Final = 1.25
"""Layer groups closer in size than this are padded to the larger one (vLLM 0.32, hybrid KV cache)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One instance over GPUs: `tensor * pipeline * data` of them."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    """Attention data-parallel ranks; each has its own KV cache and whole attention weights."""
    expert: bool = False
    """Experts are spread over all tensor * data ranks instead of being cut."""

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def expert_ranks(self) -> int:
        """GPUs that share the experts of one layer."""
        return self.tensor * self.data if self.expert else 1

    def stages(self, layers: int) -> list[range]:
        """Layers of each pipeline stage; those before the last get one more when it does not come out even (vLLM)."""
        least, more = divmod(layers, self.pipeline)
        sizes = [
            least + (1 if more and i >= self.pipeline - 1 - more and i < self.pipeline - 1 else 0)
            for i in range(self.pipeline)
        ]
        starts = [sum(sizes[:i]) for i in range(self.pipeline)]
        return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]

    def __str__(self) -> str:
        parts = [f"tensor={self.tensor}"]
        parts += [f"pipeline={self.pipeline}"] * (self.pipeline > 1) + [f"data={self.data}"] * (self.data > 1)
        return " ".join([*parts, *(["expert"] * self.expert)])


@dataclass(frozen=True, slots=True)
class Sizing:
    """What a ledger is made of; the same for all layouts of one question."""

    model: ModelFacts
    weights: Weights
    accelerator: Accelerator
    settings: EngineSettings = field(default_factory=EngineSettings)
    kv_bytes_per_token: int | None = None
    """Of the whole model, told by the user for an architecture that we don't know."""

    @property
    def shape(self) -> Shape | None:
        return self.model.shape

    @property
    def wanted_context(self) -> int | None:
        """Tokens of the longest request that the engine must hold to start; None: not known."""
        return self.settings.max_model_len or self.model.context

    @property
    def tokens_per_pass(self) -> int:
        return self.settings.batched_tokens(self.accelerator)

    @property
    def seqs(self) -> int:
        return self.settings.seqs(self.accelerator)


@dataclass(frozen=True, slots=True)
class Ledger:
    """Bytes on the fullest GPU."""

    total: int
    usable: int
    weights: int
    activations: int | None
    runtime: int
    graphs: int
    room: int | None
    """For the KV cache; negative: so much is missing."""
    kv_per_token: int | None
    """Of the stage with most layers."""
    tokens: int | None
    """That the KV cache of one data-parallel rank holds, whole blocks; 0: not one."""
    max_context: int | None
    """Longest single request in tokens, at most the model's context."""


def keep(sizing: Sizing, layout: Layout) -> Ledger:
    """The ledger of one GPU of the layout. The layout must be one that `limits.broken` has nothing against."""
    usable, activations, runtime, graphs = _overhead(sizing, layout)
    per_stage = list(stage_weights(sizing, layout))
    weights = max(per_stage)
    kv = stage_kv_per_token(sizing, layout)
    room = tokens = longest = None
    if activations is not None:
        rooms = [usable - w - activations - runtime - graphs for w in per_stage]
        if sizing.settings.kv_cache_bytes is not None:
            rooms = [sizing.settings.kv_cache_bytes] * len(per_stage)
        room = min(rooms)
        if kv is not None:
            longest = _longest(sizing, layout, rooms)
            tokens = _tokens(sizing, layout, rooms, kv)
    return Ledger(
        total=sizing.accelerator.memory_bytes,
        usable=usable,
        weights=weights,
        activations=activations,
        runtime=runtime,
        graphs=graphs,
        room=room,
        kv_per_token=max(kv) if kv is not None else None,
        tokens=tokens,
        max_context=longest,
    )


def _overhead(sizing: Sizing, layout: Layout) -> tuple[int, int | None, int, int]:
    """(usable, activations, runtime, graphs)."""
    total, settings = sizing.accelerator.memory_bytes, sizing.settings
    if settings.engine is EngineKind.SGLANG:
        # SGLang reserves one sum for all of them and gives the rest to weights and KV.
        if settings.static_fraction is not None:
            return math.ceil(total * settings.static_fraction), 0, 0, 0
        reserved = 512 + 1.5 * max(sizing.tokens_per_pass, 2048) + 128 * layout.tensor * layout.pipeline
        reserved += 2 * sizing.seqs
        if total > 60 * 1024 * MIB:
            reserved = max(reserved, 10_240)
        return max(0, total - math.ceil(reserved * MIB)), 0, 0, 0
    runtime = RUNTIME_MANY if layout.tensor > 1 else RUNTIME_ONE
    graphs = GRAPHS if settings.has_graphs else 0
    return math.ceil(total * settings.utilization), activation_bytes(sizing, layout.tensor), runtime, graphs


def activation_bytes(sizing: Sizing, tensor: int) -> int | None:
    """Peak of temporary tensors in vLLM's profile run: the widest layer, or the logits of a full batch."""
    shape = sizing.shape
    if shape is None:
        return _rough_activations(sizing)
    tokens, d, bytes_each = sizing.tokens_per_pass, shape.hidden, 2
    logits = min(sizing.seqs, tokens) * shape.vocab * sizing.settings.logit_bytes
    latent = 2 * shape.attention_width
    grouped = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    inner = [(latent if shape.latent else grouped) / tensor]
    if shape.experts:
        inner.append(shape.experts.active * (3 * shape.experts.width / tensor + d))
    if not all(shape.mixture):
        inner.append(3 * shape.width / tensor)
    return max(math.ceil(tokens * bytes_each * (2 * d + max(inner))), 2 * tokens * d * bytes_each + logits)


def _rough_activations(sizing: Sizing) -> int | None:
    """Of a model whose shape is not known: as if its MLP were four times as wide as its hidden vectors."""
    hidden, vocab, tokens = sizing.model.hidden, sizing.model.vocab, sizing.tokens_per_pass
    if hidden is None or vocab is None:
        return None
    logits = min(sizing.seqs, tokens) * vocab * sizing.settings.logit_bytes
    return max(tokens * 2 * 14 * hidden, 4 * tokens * hidden + logits)


def stage_weights(sizing: Sizing, layout: Layout) -> Iterator[int]:
    """Bytes of weights per GPU, one number per pipeline stage."""
    shape, weights = sizing.shape, sizing.weights
    if shape is None or weights.dense is None:
        # Split evenly for want of better knowledge; a rank holds at least its share.
        yield from [-(-weights.total_bytes // (layout.tensor * layout.pipeline))] * layout.pipeline
        return
    kinds = [(kind, layer_bytes(sizing, layout, kind)) for kind in (weights.dense, weights.mixture) if kind]
    dense, mixture = kinds[0][1], kinds[-1][1]
    table = weights.bytes_of(weights.embedding, layout.tensor)
    for number, stage in enumerate(layout.stages(shape.layers)):
        is_first, is_last = number == 0, number == layout.pipeline - 1
        held = sum(mixture if shape.mixture[i] else dense for i in stage) + weights.encoder_bytes
        held += table if is_first else 0
        if is_last:
            shares = layout.expert_ranks if layout.expert else layout.tensor
            held += -(-weights.next_bytes // shares) + 2 * shape.hidden
            held += 0 if shape.is_tied and is_first else table
        yield held


def layer_bytes(sizing: Sizing, layout: Layout, layer: LayerParts) -> int:
    """One layer's weights on one GPU."""
    shape, weights = sizing.shape, sizing.weights
    heads = shape.kv_heads if shape else 1
    held = weights.bytes_of(layer.split, layout.tensor) + weights.bytes_of(layer.kv, min(layout.tensor, heads))
    held += weights.bytes_of(layer.whole)
    if layer.experts:
        copies = layer.experts + sizing.settings.redundant_experts
        shares = layout.expert_ranks if layout.expert else layout.tensor
        held += weights.bytes_of(layer.expert.times(copies), shares)
    return held


def stage_kv_per_token(sizing: Sizing, layout: Layout) -> list[int] | None:
    """KV bytes of one token per GPU, one number per stage, window layers counted in full; None: not known."""
    shape = sizing.shape
    if shape is None:
        if sizing.kv_bytes_per_token is None:
            return None
        return [-(-sizing.kv_bytes_per_token // (layout.tensor * layout.pipeline))] * layout.pipeline
    per_layer = layer_kv_bytes(sizing, layout)
    return [max(1, math.ceil(len(stage) * per_layer)) for stage in layout.stages(shape.layers)]


def layer_kv_bytes(sizing: Sizing, layout: Layout) -> float:
    """KV bytes of one token in one layer on one GPU. A tensor group larger than the KV heads holds copies."""
    shape, settings = sizing.shape, sizing.settings
    if shape is None:
        return 0.0
    number = KV_BYTES[settings.kv_dtype]
    if shape.latent:
        own = LATENT_BYTES.get(settings.kv_dtype, (shape.latent.kv_rank + shape.latent.rope) * number)
        own += shape.latent.indexer + INDEXER_EXTRA if shape.latent.indexer else 0
    else:
        own = 2 * max(1.0, shape.kv_heads / layout.tensor) * shape.head_dim * number
    return own / settings.context_parallel


def request_bytes(sizing: Sizing, layout: Layout, tokens: int) -> int | None:
    """KV bytes of one request of so many tokens per GPU, on the stage that needs most; None: not known."""
    return max(stage_requests(sizing, layout, tokens), default=None)


def stage_requests(sizing: Sizing, layout: Layout, tokens: int) -> list[int]:
    """KV bytes of one request, per stage; empty: not known."""
    kv = stage_kv_per_token(sizing, layout)
    if kv is None:
        return []
    block = sizing.settings.block
    shape = sizing.shape
    if shape is None or not (shape.has_windows and sizing.settings.is_hybrid):
        return [-(-tokens // block) * block * each for each in kv]
    per_layer = layer_kv_bytes(sizing, layout)
    return [_windowed(sizing, layout, stage, tokens, per_layer) for stage in layout.stages(shape.layers)]


def _windowed(sizing: Sizing, layout: Layout, stage: range, tokens: int, per_layer: float) -> int:
    """One request where some layers keep only a window; layers are held in groups of equal size."""
    shape, block = sizing.shape, sizing.settings.block
    if shape is None:
        return 0
    kinds: dict[int, int] = {}
    for layer in stage:
        kinds[shape.windows[layer]] = kinds.get(shape.windows[layer], 0) + 1
    if not kinds:
        return 0
    small, large = min(kinds.values()), max(kinds.values())
    group = large if large < small * PADDING else small
    passes = layout.pipeline + 1 if sizing.settings.is_async else layout.pipeline
    total = 0.0
    for window, count in kinds.items():
        held = tokens if not window else min(window - 1 + passes * sizing.tokens_per_pass, tokens)
        blocks = -(-held // block) + (1 if window else 0)
        total += blocks * block * -(-count // group) * group * per_layer
    return math.ceil(total)


def _tokens(sizing: Sizing, layout: Layout, rooms: list[int], kv: list[int]) -> int:
    """As the engine counts them: whole blocks; for window models the context times how often it fits."""
    shape, block = sizing.shape, sizing.settings.block
    context = sizing.wanted_context
    if shape is not None and shape.has_windows and sizing.settings.is_hybrid and context:
        needs = stage_requests(sizing, layout, context)
        # a stage without a layer holds nothing of a request and limits none
        held = [int(room * context // need) for room, need in zip(rooms, needs, strict=True) if need]
        return max(0, min(held, default=0))
    # `kv` is rounded up per token; a block is what is really taken
    return max(0, min(room // (each * block) * block for room, each in zip(rooms, kv, strict=True)))


def _longest(sizing: Sizing, layout: Layout, rooms: list[int]) -> int:
    """Binary search: the need of a request never falls with its length."""
    low, high = 0, sizing.model.context or 10_000_000

    def fits(tokens: int) -> bool:
        return all(n <= room for n, room in zip(stage_requests(sizing, layout, tokens), rooms, strict=True))

    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def concurrency(sizing: Sizing, layout: Layout, ledger: Ledger, tokens: int) -> float | None:
    """Requests of so many tokens that fit into one instance at the same time; None: not known."""
    need = request_bytes(sizing, layout, tokens)
    if ledger.room is None or not need:
        return None
    return min(max(0, ledger.room) / need, float(sizing.seqs)) * layout.data
