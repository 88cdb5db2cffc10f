"""Parameters and bytes of a model's weights: in all, and on the fullest GPU of a layout.

Three sources, best first: headers of the safetensors files, `total_size` of their index, a count from the config.
The files win: what was counted is scaled to them, part by part, so that the split over GPUs keeps its shape.
Layers behind the last one (multi-token prediction) lie in the files but load only with speculative decoding.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any, Final

from sluice.sizing.fields import FactsError
from sluice.sizing.model import ModelFacts, Shape

PLAIN: Final = 2
"""Bytes of a parameter that is not quantised."""
MISMATCH: Final = Fraction(2, 100)
"""Files and count further apart than this are reported."""
MAX_BYTES: Final = 1 << 60
"""Of all files of a model; more is a broken file, and no number that can be shown."""
_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")


class WeightSource(StrEnum):
    HEADERS = "safetensors headers"
    INDEX = "safetensors index"
    CONFIG = "config"


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What the files say."""

    total_bytes: int
    """Of headers: what an engine loads. Of an index: all tensors in the files."""
    source: WeightSource


@dataclass(frozen=True, slots=True)
class Part:
    """A kind of weights: how many parameters are stored in which form."""

    quantised: int = 0
    plain: int = 0

    @property
    def parameters(self) -> int:
        return self.quantised + self.plain

    def __add__(self, other: "Part") -> "Part":
        return Part(self.quantised + other.quantised, self.plain + other.plain)

    def times(self, count: int) -> "Part":
        return Part(self.quantised * count, self.plain * count)


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One layer's weights by the way in which a layout splits them."""

    split: Part
    """Divided by the tensor-parallel size: query, output, MLP, shared experts, MLA up-projections."""
    kv: Part
    """Divided by min(tensor, KV heads): a KV head is never cut."""
    whole: Part
    """On every GPU: norms, router, MLA down-projections."""
    expert: Part
    """One routed expert."""
    experts: int

    @property
    def parameters(self) -> int:
        return (self.split + self.kv + self.whole + self.expert.times(self.experts)).parameters


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of a model, in all and in parts. `shape` None: only `total_bytes` is known."""

    total_bytes: int
    source: WeightSource
    parameters: int | None
    active: int | None
    dense: LayerParts | None
    mixture: LayerParts | None
    embedding: Part
    bits: float
    scale: Fraction
    """What the files hold, relative to the count."""
    encoder_bytes: int
    """Vision or audio encoder, held whole by every rank; 0 when unknown or none."""
    next_bytes: int
    """Multi-token-prediction layers that are loaded; 0 without speculative decoding."""
    notes: tuple[str, ...]

    def bytes_of(self, part: Part, divisor: int = 1) -> int:
        """Bytes of one GPU's share, rounded up."""
        exact = Fraction(part.quantised) * Fraction(self.bits) / 8 + part.plain * PLAIN
        return _ceil(exact * self.scale / divisor)


def weigh(model: ModelFacts, files: FileFacts | None, *, with_next: bool = False) -> Weights:
    """`with_next`: speculative decoding loads the multi-token-prediction layers too.

    Raises:
        FactsError: neither the files nor the config say how large the model is.
    """
    if model.shape is None:
        if files is None:
            raise FactsError(f"{model.partial}; no safetensors headers or index were found either")
        return _by_files_only(model, files)
    shape = model.shape
    dense, mixture = layer_parts(model, False), layer_parts(model, True) if shape.experts else None
    embedding = Part(plain=shape.vocab * shape.hidden)
    count = _count(shape, dense, mixture, embedding)
    extra = _next_layers(shape, dense, mixture) if shape.next_layers else Part()
    bits = model.quantization.bits
    made = Weights(0, WeightSource.CONFIG, 0, 0, dense, mixture, embedding, bits, Fraction(1), 0, 0, ())
    counted, next_bytes = made.bytes_of(count), made.bytes_of(extra)
    scale, encoder, notes = _by_files(model, files, counted, next_bytes)
    loaded_next = _ceil(next_bytes * scale) if with_next else 0
    idle = (
        mixture.expert.times(sum(shape.mixture) * (shape.experts.count - shape.experts.active))
        if mixture and shape.experts
        else Part()
    )
    return Weights(
        total_bytes=_ceil(counted * scale) + encoder + loaded_next,
        source=files.source if files else WeightSource.CONFIG,
        parameters=count.parameters,
        active=count.parameters - idle.parameters,
        dense=dense,
        mixture=mixture,
        embedding=embedding,
        bits=bits,
        scale=scale,
        encoder_bytes=encoder,
        next_bytes=loaded_next,
        notes=notes,
    )


def _by_files_only(model: ModelFacts, files: FileFacts) -> Weights:
    size = files.total_bytes
    return Weights(size, files.source, None, None, None, None, Part(), 16.0, Fraction(1), 0, 0, (model.partial,))


def _by_files(
    model: ModelFacts, files: FileFacts | None, counted: int, next_bytes: int
) -> tuple[Fraction, int, tuple[str, ...]]:
    """(scale of the count, bytes of an encoder, what is to be said)."""
    if files is None:
        notes = ["no safetensors headers or index: counted from config"]
        if not model.quantization.is_known:
            notes.append(
                f"quantisation {model.quantization.method} is not known: counted as 16 bit; pass the model's directory"
            )
        return Fraction(1), 0, tuple(notes)
    held = files.total_bytes * PLAIN // model.file_bytes_per_parameter
    if files.source is WeightSource.INDEX:
        # Is the prediction layer in the files? Whichever reading is nearer to the file's size.
        held -= next_bytes if abs(held - counted - next_bytes) < abs(held - counted) else 0
    if model.has_vision:
        return Fraction(1), max(0, held - counted), ()
    scale = Fraction(max(1, held), max(1, counted))
    notes = []
    if not model.quantization.is_known:
        notes.append(f"quantisation {model.quantization.method}: size from the files")
    elif abs(scale - 1) > MISMATCH:
        notes.append(
            f"WeightsMismatch: the files hold {held / 1e9:.1f} GB, the config counts {counted / 1e9:.1f} GB; "
            "the files win"
        )
    return scale, 0, tuple(notes)


def read_headers(headers: Iterable[Mapping[str, Any]], layers: int | None) -> FileFacts:
    """Bytes that an engine loads, from the JSON headers of safetensors files (one mapping per file).

    Layers from number `layers` on are left out; None keeps all.

    Raises:
        FactsError: a header is no safetensors header.
    """
    total = 0
    for header in headers:
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            offsets = tensor.get("data_offsets") if isinstance(tensor, Mapping) else None
            if not (isinstance(offsets, list) and len(offsets) == 2 and all(_is_offset(o) for o in offsets)):
                raise FactsError(f"safetensors header: tensor {str(name)[:80]!r} has no data_offsets [begin, end]")
            found = _LAYER.search(str(name))
            if layers is None or found is None or int(found[1]) < layers:
                total += max(0, offsets[1] - offsets[0])
    return FileFacts(total, WeightSource.HEADERS)


def _is_offset(value: object) -> bool:
    return isinstance(value, int) and 0 <= value <= MAX_BYTES


def read_index(index: Mapping[str, Any]) -> FileFacts | None:
    """From `model.safetensors.index.json`; None when it does not say its size."""
    metadata = index.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    if isinstance(size, float) and size.is_integer():
        size = int(size)
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= MAX_BYTES:
        return None
    return FileFacts(size, WeightSource.INDEX)


def layer_parts(model: ModelFacts, with_experts: bool) -> LayerParts:
    """The weights of one layer; `with_experts`: of a mixture layer."""
    shape = model.shape
    if shape is None:
        raise FactsError(model.partial)
    d = shape.hidden
    split, kv, whole = _attention(shape)
    whole += Part(plain=shape.norms * d)
    expert, count = Part(), 0
    if with_experts and shape.experts:
        e = shape.experts
        count = e.count
        expert = Part(quantised=3 * d * e.width, plain=(2 * e.width + d) if e.has_bias else 0)
        split += Part(quantised=3 * d * e.shared_width)
        whole += Part(plain=d * e.count + (e.count if e.has_bias else 0))
        if e.shared_width and shape.latent is None:
            whole += Part(plain=d)  # qwen2_moe: the gate of the shared expert
    else:
        split += Part(quantised=3 * d * shape.width)
    if model.quantization.only_experts:
        split, kv, whole = (Part(plain=p.parameters) for p in (split, kv, whole))
    return LayerParts(split, kv, whole, expert, count)


def _attention(shape: Shape) -> tuple[Part, Part, Part]:
    """(split, kv, whole) of the attention block."""
    d, heads = shape.hidden, shape.heads
    if shape.latent:
        m = shape.latent
        query = m.nope + m.rope
        up = (m.q_rank or d) * heads * query + m.kv_rank * heads * (m.nope + m.value) + heads * m.value * d
        down = d * m.q_rank + d * (m.kv_rank + m.rope)
        return Part(quantised=up), Part(), Part(quantised=down, plain=m.q_rank + m.kv_rank)
    h, kv_heads = shape.head_dim, shape.kv_heads
    bias_q = h * heads if shape.qkv_bias else 0
    bias_kv = 2 * h * kv_heads if shape.qkv_bias else 0
    whole = (2 * h if shape.qk_norm else 0) + (d if shape.o_bias else 0)
    return (
        Part(quantised=2 * d * h * heads, plain=bias_q),
        Part(quantised=2 * d * h * kv_heads, plain=bias_kv),
        Part(plain=whole),
    )


def _count(shape: Shape, dense: LayerParts, mixture: LayerParts | None, embedding: Part) -> Part:
    total = embedding.times(1 if shape.is_tied else 2) + Part(plain=shape.hidden)
    for with_experts in (False, True):
        number = shape.mixture.count(with_experts)
        layer = mixture if with_experts and mixture else dense
        total += (layer.split + layer.kv + layer.whole + layer.expert.times(layer.experts)).times(number)
    return total


def _next_layers(shape: Shape, dense: LayerParts, mixture: LayerParts | None) -> Part:
    """Multi-token prediction: a layer, a projection of two hidden vectors, and copies of embedding and head."""
    layer = mixture or dense
    one = layer.split + layer.kv + layer.whole + layer.expert.times(layer.experts)
    one += Part(plain=2 * shape.hidden * shape.hidden + 3 * shape.hidden + 2 * shape.vocab * shape.hidden)
    return one.times(shape.next_layers)


def _ceil(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)
