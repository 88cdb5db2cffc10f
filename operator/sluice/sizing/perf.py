"""Times: decode steps, prefills, collectives, moving and loading KV. Roofline plus fitted overheads.

A time is None when a figure that it needs is not known. Formulas are docs/sizing.md's; efficiencies come from the
accelerator's calibration and are fitted, not derived.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sluice.sizing.hardware import Accelerator
from sluice.sizing.ledger import Layout, Sizing, layer_kv_bytes, request_bytes
from sluice.sizing.model import Shape
from sluice.sizing.weights import LayerParts

WORD: Final = 2
"""Bytes of one number of a hidden vector."""


@dataclass(frozen=True, slots=True)
class Wire:
    """A collective's path: the slowest link of the group."""

    rate: float
    """Bytes per second and GPU, efficiency included."""
    hop_s: float
    floor_s: float


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass, seconds. `work` is the rest of the step, without collectives."""

    work_s: float
    collectives_s: float

    @property
    def total_s(self) -> float:
        return self.work_s + self.collectives_s

    @property
    def communication_share(self) -> float:
        return communication_share(self.collectives_s, self.work_s)


def communication_share(collectives_s: float, rest_s: float) -> float:
    """Collectives relative to the rest of the step (not to its total): 1.0 is as long as the arithmetic."""
    return collectives_s / rest_s if rest_s > 0 else math.inf


def batch_one_bound(weight_bytes: float, accelerator: Accelerator) -> float | None:
    """Least seconds per token: all weights of a GPU are read once."""
    return None if accelerator.hbm is None else weight_bytes / accelerator.hbm


def wire_between(accelerator: Accelerator, group: int, *, prefill: bool) -> Wire | None:
    """The path within a group of consecutive GPUs; None: its rate is not known."""
    c = accelerator.calibration
    inside = group <= accelerator.reach
    rate = accelerator.link if inside else accelerator.nic
    if rate is None:
        return None
    hop = (c.prefill_hop_s if prefill else c.decode_hop_s) if inside else c.net_hop_s
    return Wire(rate * (c.prefill_link_eff if prefill else c.decode_link_eff), hop, c.floor_s)


def all_reduce_bytes(size: float, group: int) -> float:
    """Sent by each GPU of a ring."""
    return 2 * (group - 1) / group * size


def all_reduce_s(size: float, group: int, wire: Wire) -> float:
    """Latency floor: 6 us were measured for 2 GPUs (NVIDIA/nccl#1259)."""
    if group == 1:
        return 0.0
    return max(wire.floor_s, 2 * (group - 1) * wire.hop_s) + all_reduce_bytes(size, group) / wire.rate


def dispatch_bytes(active: int, hidden: int, number_bytes: float) -> float:
    """Expert traffic of one token and mixture layer in one direction, were all experts elsewhere."""
    return active * hidden * number_bytes


def prefill_flops(parameters: float, tokens: int, attention_width: int, layers: int, *, after: int = 0) -> float:
    """Operations for `tokens` behind `after` that are there already; causal attention.

    `parameters`: active, without embedding and head. `attention_width`: 2 * heads * head size.
    """
    return 2 * parameters * tokens + 2 * attention_width * tokens * (after + tokens / 2) * layers


def active_parameters(sizing: Sizing) -> int | None:
    """Parameters that one token passes through, without embedding table and output head."""
    weights, shape = sizing.weights, sizing.shape
    if shape is None or weights.active is None:
        return None
    return weights.active - weights.embedding.parameters * (1 if shape.is_tied else 2)


def flops_rate(sizing: Sizing) -> float | None:
    """FP8 counts only when weights and activations both are."""
    a = sizing.accelerator
    if a.flops is None:
        return None
    rate = a.flops8 if sizing.model.quantization.is_w8a8 and a.flops8 else a.flops
    return rate * a.calibration.prefill_eff


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one pipeline stage costs on one GPU, whatever the batch."""

    layers: int
    mixed: int
    """Of them with experts."""
    bytes: float
    """Weights that every pass reads."""
    expert_bytes: float
    """Of all routed experts here; a pass reads those that are chosen."""
    kv_bytes: float
    """That one sequence reads per decode step."""
    flops: float
    """Of one token in a decode step."""


@dataclass(frozen=True, slots=True)
class DecodeModel:
    """Decode steps of one layout at one mean length; made once, asked for many batches."""

    sizing: Sizing
    layout: Layout
    stages: tuple[StageCost, ...]
    hbm: float
    flops_rate: float

    def step(self, batch: float) -> Step | None:
        """A step of an instance with `batch` sequences: seconds until each has its next token; None: not known.

        With pipeline stages the batch runs as that many micro-batches, so a token takes the sum of all stages.
        """
        sizing, layout = self.sizing, self.layout
        c = sizing.accelerator.calibration
        own = max(1.0, batch / layout.data / layout.pipeline)
        work = c.step_s + c.sequence_s * batch / layout.data
        collectives = 0.0
        for stage in self.stages:
            read = (stage.bytes + stage.expert_bytes * _touched(sizing, layout, own)) / c.decode_eff
            read += own * stage.kv_bytes / c.kv_eff
            busy = max(read / self.hbm, own * stage.flops / self.flops_rate)
            exchanged = _collectives(sizing, layout, stage, own, busy, prefill=False)
            if exchanged is None:
                return None
            work += busy
            collectives += exchanged
        moved = _stage_moves(sizing, layout, own)
        return None if moved is None else Step(work, collectives + moved)


def decode_model(sizing: Sizing, layout: Layout, tokens: float) -> DecodeModel | None:
    """For sequences of `tokens` on average; None: a figure that it needs is not known."""
    a, rate = sizing.accelerator, flops_rate(sizing)
    stages = stage_costs(sizing, layout, tokens)
    if a.hbm is None or rate is None or not stages:
        return None
    return DecodeModel(sizing, layout, stages, a.hbm, rate)


def decode_step(sizing: Sizing, layout: Layout, batch: float, tokens: float) -> Step | None:
    """One decode step of an instance with `batch` sequences of `tokens` each."""
    model = decode_model(sizing, layout, tokens)
    return None if model is None else model.step(batch)


def prefill(sizing: Sizing, layout: Layout, tokens: int) -> Step | None:
    """One prompt of `tokens`, alone on one data-parallel rank of the instance; seconds."""
    a, shape, rate = sizing.accelerator, sizing.shape, flops_rate(sizing)
    parameters = active_parameters(sizing)
    if shape is None or a.hbm is None or rate is None or parameters is None:
        return None
    if tokens <= 0:
        return Step(0.0, 0.0)
    c = a.calibration
    flops = prefill_flops(parameters, tokens, shape.attention_width, shape.layers)
    work, collectives = c.prefill_s, 0.0
    for stage in stage_costs(sizing, layout, tokens, with_head=False):
        read = stage.bytes + stage.expert_bytes * _touched(sizing, layout, float(tokens))
        busy = max(flops * stage.layers / shape.layers / (layout.tensor * rate), read / a.hbm)
        exchanged = _collectives(sizing, layout, stage, float(tokens), busy, prefill=True)
        if exchanged is None:
            return None
        work += busy
        collectives += exchanged
    moved = _stage_moves(sizing, layout, float(tokens))
    return None if moved is None else Step(work, collectives + moved)


def stage_costs(sizing: Sizing, layout: Layout, tokens: float, *, with_head: bool = True) -> tuple[StageCost, ...]:
    """One per pipeline stage; empty: the model's shape is not known. The embedding table is looked up, not read."""
    shape, weights = sizing.shape, sizing.weights
    if shape is None or weights.dense is None:
        return ()
    dense, mixture = _others(sizing, layout, weights.dense), 0
    held = 0.0
    if weights.mixture and shape.experts:
        mixture = _others(sizing, layout, weights.mixture)
        copies = shape.experts.count + sizing.settings.redundant_experts
        shares = layout.expert_ranks if layout.expert else layout.tensor
        held = weights.bytes_of(weights.mixture.expert.times(copies), shares)
    head = weights.bytes_of(weights.embedding, layout.tensor) if with_head else 0
    made = []
    for number, stage in enumerate(layout.stages(shape.layers)):
        mixed = sum(shape.mixture[i] for i in stage)
        made.append(
            StageCost(
                layers=len(stage),
                mixed=mixed,
                bytes=(len(stage) - mixed) * dense + mixed * mixture + (head if number == layout.pipeline - 1 else 0),
                expert_bytes=mixed * held,
                kv_bytes=_kv_read(sizing, layout, stage, tokens),
                flops=_decode_flops(sizing, layout, stage, tokens),
            )
        )
    return tuple(made)


def _touched(sizing: Sizing, layout: Layout, batch: float) -> float:
    """Part of a rank's expert weights that a pass of `batch` tokens per rank reads; the busiest rank counts."""
    shape = sizing.shape
    if shape is None or shape.experts is None:
        return 0.0
    seen = batch * (layout.data if layout.expert else 1)
    skew = sizing.accelerator.calibration.expert_skew if layout.expert_ranks > 1 else 1.0
    missed = math.pow(1 - shape.experts.active / shape.experts.count, seen)
    return min(1.0, (1 - missed) * skew)


def _others(sizing: Sizing, layout: Layout, layer: LayerParts) -> int:
    """A layer's weights on one GPU but for routed experts."""
    weights, shape = sizing.weights, sizing.shape
    heads = shape.kv_heads if shape else 1
    return (
        weights.bytes_of(layer.split, layout.tensor)
        + weights.bytes_of(layer.kv, min(layout.tensor, heads))
        + weights.bytes_of(layer.whole)
    )


def _kv_read(sizing: Sizing, layout: Layout, stage: range, tokens: float) -> float:
    """KV bytes that one sequence reads on one GPU per step."""
    shape = sizing.shape
    if shape is None:
        return 0.0
    each = layer_kv_bytes(sizing, layout)
    return sum(each * (min(tokens, w) if (w := shape.windows[i]) else tokens) for i in stage)


def _decode_flops(sizing: Sizing, layout: Layout, stage: range, tokens: float) -> float:
    """Operations of one token on one GPU; latent attention multiplies against the compressed vector."""
    shape, parameters = sizing.shape, active_parameters(sizing)
    if shape is None or parameters is None:
        return 0.0
    m = shape.latent
    width = shape.heads * (2 * m.kv_rank + m.rope) if m else shape.attention_width
    dense = 2 * parameters * len(stage) / shape.layers
    return (dense + 2 * width * tokens * len(stage)) / layout.tensor


def _collectives(
    sizing: Sizing, layout: Layout, stage: StageCost, tokens: float, busy_s: float, *, prefill: bool
) -> float | None:
    """All-reduces of the tensor group and expert traffic of one stage; None: a link is not known."""
    shape, a = sizing.shape, sizing.accelerator
    if shape is None:
        return None
    spread = layout.expert and layout.data > 1
    reduces = 2 * stage.layers - (stage.mixed if spread else 0)
    total = 0.0
    if layout.tensor > 1:
        wire = wire_between(a, layout.tensor, prefill=prefill)
        if wire is None:
            return None
        total += reduces * all_reduce_s(tokens * shape.hidden * WORD, layout.tensor, wire)
    if spread and stage.mixed and shape.experts:
        wire = wire_between(a, layout.expert_ranks, prefill=prefill)
        if wire is None:
            return None
        exchanged = stage.mixed * _exchange_s(sizing, layout, shape, tokens, wire)
        total += max(0.0, exchanged - busy_s) if sizing.settings.dual_batch else exchanged
    return total


def _exchange_s(sizing: Sizing, layout: Layout, shape: Shape, tokens: float, wire: Wire) -> float:
    """Dispatch and combine of one mixture layer: out in FP8 if the model computes in it, back in 16 bit."""
    if shape.experts is None:
        return 0.0
    out = 1 if sizing.model.quantization.is_w8a8 else WORD
    each = dispatch_bytes(shape.experts.active, shape.hidden, out + WORD) * (1 - 1 / layout.expert_ranks)
    skew = sizing.accelerator.calibration.expert_skew
    return 2 * max(wire.floor_s, wire.hop_s) + tokens / layout.tensor * each * skew / wire.rate


def _stage_moves(sizing: Sizing, layout: Layout, tokens: float) -> float | None:
    """Hidden vectors from stage to stage."""
    if layout.pipeline == 1:
        return 0.0
    shape, a = sizing.shape, sizing.accelerator
    rate = a.link if layout.tensor * layout.data * layout.pipeline <= a.reach else a.nic
    if shape is None or rate is None:
        return None
    return (layout.pipeline - 1) * (tokens * shape.hidden * WORD / rate + a.calibration.net_hop_s)


def kv_parts(sizing: Sizing, layout: Layout) -> int:
    """Tensor ranks that hold different parts of a request's KV; the others hold copies."""
    shape = sizing.shape
    if shape is None:
        return 1
    return sizing.settings.context_parallel if shape.latent else min(layout.tensor, shape.kv_heads)


def kv_bytes(sizing: Sizing, layout: Layout, tokens: int) -> float | None:
    """KV of one request, each part once."""
    each = request_bytes(sizing, Layout(tensor=layout.tensor), tokens)
    return None if each is None else float(each * kv_parts(sizing, layout))


def move_s(sizing: Sizing, layout: Layout, tokens: int, rate: float) -> float | None:
    """Seconds to bring one request's KV to or from all GPUs of an instance, each over a link of `rate`.

    Ranks with copies move the same bytes at the same time, so they make it no faster.
    """
    size = kv_bytes(sizing, layout, tokens)
    return None if size is None else transfer_s(size, rate * kv_parts(sizing, layout) * layout.pipeline)


def transfer_s(size: float, rate: float, *, layers: int = 1, prefill_s: float = 0.0) -> float:
    """Seconds that KV of `size` bytes delays the first token. With several layers: sent layer by layer, while the
    prefill goes on; vLLM's NIXL and Mooncake connectors send it whole (0.32), that is `layers` 1."""
    whole = size / rate
    return max(whole / layers, whole - prefill_s * (layers - 1) / layers)


def break_even(lengths: Sequence[int], load_s: Sequence[float], compute_s: Sequence[float]) -> int | None:
    """The shortest of the lengths from which on loading is faster than computing; None: it never is."""
    better = [load < compute for load, compute in zip(load_s, compute_s, strict=True)]
    for number, length in enumerate(lengths):
        if all(better[number:]):
            return length
    return None
