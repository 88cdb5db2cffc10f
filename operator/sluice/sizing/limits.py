"""What no engine would start: rules of layouts and settings, then whether memory suffices.

`RULES` is a table; each rule looks at one thing and says what is wrong with numbers. A `fix` is told where a setting
is to blame; where the layout is, `layout.assess` finds the nearest that fits. A model that we don't know is never
refused: nothing about it is certain.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sluice.sizing.ledger import CONTEXT, Layout, Ledger, Sizing, keep, stage_requests, stage_weights
from sluice.sizing.settings import EngineKind

MAX_SIZE: Final = 1024
"""Largest parallel size of one kind that is looked at."""
SURE: Final = 1.3
"""Overheads may be so many times the estimate and it still fits: `Fits`."""
HOPEFUL: Final = 0.5
"""If it does not fit with overheads of half the estimate, it does not fit."""


class Fit(StrEnum):
    """Reasons of the condition Feasible."""

    FITS = "Fits"
    TIGHT = "Tight"
    DOES_NOT_FIT = "DoesNotFit"
    NOT_DIVISIBLE = "NotDivisible"
    NOT_SUPPORTED = "NotSupported"
    FACTS_MISSING = "FactsMissing"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`feasible` None: not known. The message names numbers; `fix` what to change besides the layout."""

    feasible: bool | None
    reason: Fit
    message: str = ""
    fix: str = ""


Rule = Callable[[Sizing, Layout], Verdict | None]


def _no(reason: Fit, message: str, fix: str = "") -> Verdict:
    return Verdict(False, reason, message, fix)


def judge(sizing: Sizing, layout: Layout) -> Verdict:
    """Whether engines of this layout start, and if not, why."""
    broken = find_broken(sizing, layout)
    return broken or _memory(sizing, layout, keep(sizing, layout))


def find_broken(sizing: Sizing, layout: Layout) -> Verdict | None:
    """The first rule that speaks against the layout or the settings; None: there is none."""
    size = _sizes(sizing, layout)
    if size:
        return size
    return next((verdict for rule in RULES if (verdict := rule(sizing, layout))), None)


def _sizes(_sizing: Sizing, layout: Layout) -> Verdict | None:
    for name, size in (("tensor", layout.tensor), ("pipeline", layout.pipeline), ("data", layout.data)):
        if not 1 <= size <= MAX_SIZE:
            return _no(Fit.NOT_SUPPORTED, f"{name} {size}: parallel sizes go from 1 to {MAX_SIZE}")
    return None


def _heads(sizing: Sizing, layout: Layout) -> Verdict | None:
    shape, tensor = sizing.shape, layout.tensor
    if shape is None:
        return None
    if shape.heads % tensor:
        return _no(
            Fit.NOT_DIVISIBLE,
            f"tensor {tensor}: {shape.heads} attention heads can't be split into {tensor} equal parts",
        )
    if not shape.latent and shape.kv_heads % tensor and tensor % shape.kv_heads:
        return _no(
            Fit.NOT_DIVISIBLE,
            f"tensor {tensor}: {shape.kv_heads} KV heads can neither be split nor copied evenly over {tensor} GPUs",
        )
    return None


def _widths(sizing: Sizing, layout: Layout) -> Verdict | None:
    """Matrices are cut by the tensor size; scales of quantised ones must not be cut apart (vLLM 0.32, fp8 and GPTQ)."""
    shape, tensor = sizing.shape, layout.tensor
    if shape is None:
        return None
    widths = [("MLP width", shape.width)] if not all(shape.mixture) else []
    if shape.experts and not layout.expert:
        widths.append(("expert width", shape.experts.width))
    quantization = sizing.model.quantization
    for name, width in widths:
        if width % tensor:
            return _no(Fit.NOT_DIVISIBLE, f"tensor {tensor}: {name} {width} can't be split into {tensor} equal parts")
        part = width // tensor
        if tensor > 1 and part % quantization.block:
            hint = "; expert parallelism does not cut experts" if name.startswith("expert") else ""
            return _no(
                Fit.NOT_DIVISIBLE,
                f"tensor {tensor}: {name} {width} gives parts of {part}, but {quantization.method} scales cover blocks "
                f"of {quantization.block}{hint}",
            )
    return None


def _stages(sizing: Sizing, layout: Layout) -> Verdict | None:
    shape = sizing.shape
    if shape is None or layout.pipeline <= shape.layers:
        return None
    return _no(Fit.NOT_DIVISIBLE, f"pipeline {layout.pipeline}: the model has {shape.layers} layers, fewer than stages")


def _replicas(sizing: Sizing, layout: Layout) -> Verdict | None:
    shape = sizing.shape
    if shape is None or shape.experts:
        return None
    if layout.expert:
        return _no(Fit.NOT_SUPPORTED, "expert parallelism: the model has 0 experts; leave it out")
    if layout.data > 1:
        return _no(
            Fit.NOT_SUPPORTED,
            f"data {layout.data}: without experts the ranks share nothing; use {layout.data} replicas of one instance",
        )
    return None


def _experts(sizing: Sizing, layout: Layout) -> Verdict | None:
    shape, redundant = sizing.shape, sizing.settings.redundant_experts
    if shape is None or not shape.experts:
        return None
    if redundant and not layout.expert:
        return _no(
            Fit.NOT_SUPPORTED,
            f"{redundant} redundant experts: they balance expert-parallel ranks, and this layout has none",
            "no redundant experts, or expert parallelism",
        )
    copies, ranks = shape.experts.count + redundant, layout.expert_ranks
    if copies % ranks:
        more = -copies % ranks
        return _no(
            Fit.NOT_DIVISIBLE,
            f"expert parallelism over {ranks} ranks: {shape.experts.count} + {redundant} redundant experts give "
            f"{copies / ranks:.2f} per rank",
            f"{redundant + more} redundant experts ({(copies + more) // ranks} per rank)",
        )
    return None


def _context(sizing: Sizing, _layout: Layout) -> Verdict | None:
    wanted, context = sizing.settings.max_model_len, sizing.model.context
    if wanted is None or context is None or wanted <= context:
        return None
    return _no(
        Fit.NOT_SUPPORTED,
        f"max-model-len {wanted}: the model's config allows {context} tokens",
        f"max-model-len {context}",
    )


def _batch(sizing: Sizing, _layout: Layout) -> Verdict | None:
    if sizing.settings.engine is not EngineKind.VLLM:
        return None
    tokens, seqs = sizing.tokens_per_pass, sizing.seqs
    if seqs > tokens:
        return _no(
            Fit.NOT_SUPPORTED,
            f"max-num-seqs {seqs} is more than max-num-batched-tokens {tokens}: each sequence needs a token per step",
            f"max-num-seqs {tokens}, or max-num-batched-tokens {seqs}",
        )
    context = sizing.wanted_context
    if not sizing.settings.is_chunked and context and context > tokens:
        return _no(
            Fit.NOT_SUPPORTED,
            f"without chunked prefill a prompt of {context} tokens must fit into max-num-batched-tokens {tokens}",
            f"chunked prefill, max-num-batched-tokens {context}, or max-model-len {tokens}",
        )
    return None


def _outside(sizing: Sizing, layout: Layout) -> Verdict | None:
    """The CUDA context and NCCL are allocated before the engine takes its share."""
    settings, total = sizing.settings, sizing.accelerator.memory_bytes
    needed = CONTEXT * (2 if layout.tensor > 1 else 1)
    fraction = settings.utilization if settings.engine is EngineKind.VLLM else settings.static_fraction
    if settings.kv_cache_bytes is not None or fraction is None or total * (1 - fraction) >= needed:
        return None
    best = int((total - needed) / total * 100) / 100
    return _no(
        Fit.DOES_NOT_FIT,
        f"memory utilization {fraction:g} leaves {gb(total * (1 - fraction))} of {gb(total)} GB for the CUDA context"
        f"{' and NCCL' if layout.tensor > 1 else ''}, which need {gb(needed)} GB",
        f"memory utilization {best:g}",
    )


def _context_parallel(sizing: Sizing, layout: Layout) -> Verdict | None:
    size, shape, tensor = sizing.settings.context_parallel, sizing.shape, layout.tensor
    if size == 1 or shape is None:
        return None
    most = tensor if shape.latent else max(1, tensor // shape.kv_heads)
    if tensor % size == 0 and size <= most:
        return None
    return _no(
        Fit.NOT_DIVISIBLE,
        f"decode-context-parallel-size {size}: with tensor {tensor} and "
        f"{'one latent vector' if shape.latent else f'{shape.kv_heads} KV heads'} at most {most} ranks hold copies",
        f"decode-context-parallel-size {most}",
    )


def _kv_form(sizing: Sizing, _layout: Layout) -> Verdict | None:
    shape, dtype = sizing.shape, sizing.settings.kv_dtype
    if shape is None or shape.latent or not dtype.endswith("_ds_mla"):
        return None
    return _no(
        Fit.NOT_SUPPORTED,
        f"kv-cache-dtype {dtype} is for latent attention; this model has {shape.kv_heads} KV heads",
        "kv-cache-dtype fp8",
    )


def _next_layers(sizing: Sizing, _layout: Layout) -> Verdict | None:
    shape = sizing.shape
    if shape is None or shape.next_layers or not sizing.settings.loads_next:
        return None
    return _no(
        Fit.NOT_SUPPORTED,
        "speculative decoding by prediction layers: the model has 0 of them",
        "another method of speculative-config",
    )


RULES: Final[tuple[Rule, ...]] = (
    _heads,
    _stages,
    _replicas,
    _experts,
    _widths,
    _context,
    _batch,
    _outside,
    _context_parallel,
    _kv_form,
    _next_layers,
)


def _memory(sizing: Sizing, layout: Layout, ledger: Ledger) -> Verdict:
    needs = least_need(sizing, layout)
    if ledger.activations is None or not needs:
        why = sizing.model.partial or "the longest context is not known; pass --max-model-len"
        return Verdict(None, Fit.FACTS_MISSING, why)
    overhead = ledger.activations + ledger.runtime + ledger.graphs
    budget = ledger.usable
    held = [w + need for w, need in zip(stage_weights(sizing, layout), needs, strict=True)]
    if sizing.settings.kv_cache_bytes is not None:
        own = sizing.settings.kv_cache_bytes
        if max(needs) > own:
            return _no(Fit.DOES_NOT_FIT, _missing(sizing, ledger, max(needs)))
        budget = ledger.total - CONTEXT * (2 if layout.tensor > 1 else 1)
        held = [w + own for w in stage_weights(sizing, layout)]
    if max(held) + SURE * overhead <= budget:
        return Verdict(True, Fit.FITS)
    if max(held) + HOPEFUL * overhead <= budget:
        return Verdict(
            True,
            Fit.TIGHT,
            f"tight: {gb(max(held))} GB of weights and KV and about {gb(overhead)} GB of overheads in {gb(budget)} GB",
        )
    if sizing.settings.kv_cache_bytes is not None:
        spare = budget - max(held) + sizing.settings.kv_cache_bytes - overhead
        return _no(
            Fit.DOES_NOT_FIT,
            f"does not fit: weights {gb(ledger.weights)} + KV cache {gb(sizing.settings.kv_cache_bytes)} + overheads "
            f"{gb(overhead)} GB are more than {gb(budget)} GB",
            f"kv-cache-memory-bytes {max(0, spare)}" if spare >= max(needs) else "",
        )
    return _no(Fit.DOES_NOT_FIT, _missing(sizing, ledger, max(needs)))


def least_need(sizing: Sizing, layout: Layout) -> list[int]:
    """KV bytes without which the engine refuses to start, per stage; empty: not known."""
    tokens = sizing.settings.block if sizing.settings.fits_context else sizing.wanted_context
    return stage_requests(sizing, layout, tokens) if tokens else []


def _missing(sizing: Sizing, ledger: Ledger, need: int) -> str:
    tokens = sizing.settings.block if sizing.settings.fits_context else sizing.wanted_context
    room = ledger.room or 0
    parts = " + ".join(f"{name} {gb(value)}" for name, value in ledger_lines(ledger))
    if room <= 0:
        return (
            f"does not fit: {parts} GB are {gb(-room)} GB more than the usable {gb(ledger.usable)} GB per GPU; one "
            f"request of {tokens} tokens needs {gb(need)} GB KV besides"
        )
    where = f"usable {gb(ledger.usable)} = {parts} + room"
    if sizing.settings.kv_cache_bytes is not None:
        where = "kv-cache-memory-bytes"
    return (
        f"does not fit: one request of {tokens} tokens needs {gb(need)} GB KV per GPU, room is {gb(room)} GB ({where})"
    )


def ledger_lines(ledger: Ledger) -> Iterator[tuple[str, int]]:
    """What stands between the usable memory and the room for KV."""
    yield "weights", ledger.weights
    for name, value in (("activations", ledger.activations), ("runtime", ledger.runtime), ("graphs", ledger.graphs)):
        if value:
            yield name, value


def gb(size: float) -> str:
    """`78.3`: GB of 10^9 bytes."""
    return f"{size / 1e9:.1f}"
