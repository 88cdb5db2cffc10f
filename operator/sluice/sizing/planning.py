"""From a question to the plan: assess all layouts, choose one, say why, count pools, price them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from sluice.sizing import perf
from sluice.sizing.hardware import Accelerator
from sluice.sizing.layout import MANY_EXPERTS, QUOTED_BATCH, Assessment, Caution, explain, rank, warn
from sluice.sizing.ledger import Layout, Sizing, keep, stage_kv_per_token
from sluice.sizing.remedies import Missed, assess_all, find_remedies
from sluice.sizing.report import (
    AcceleratorReport,
    ChosenReport,
    CostReport,
    LayoutReport,
    LedgerReport,
    ModelReport,
    ParallelismReport,
    Plan,
    PoolReport,
    ReuseReport,
    SloReport,
    Truth,
    WarningReport,
)
from sluice.sizing.settings import EngineKind
from sluice.sizing.workload import Binding, Workload, binding_of, cost_per_million

LONG_PROMPT: Final = 4096
"""Mean input from which on separate prefill is looked at."""
PD_GAIN: Final = 1.1
"""Prefill and decode apart must serve so many times as much per GPU."""
SLOW_TRANSFER: Final = 0.10
"""Of the time to the first token."""
REUSE_LENGTHS: Final = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. `wanted`: a layout that the user's object names; it is judged, and not replaced."""

    sizing: Sizing
    load: Workload = field(default_factory=Workload)
    wanted: Layout | None = None
    pool: str = "default"
    replicas: int | None = None
    accelerators: Sequence[Accelerator] = ()
    """Others that could be bought."""
    is_disaggregated: bool = False
    """The object has prefill and decode pools."""
    has_uncapped_affinity: bool = False
    """Its router binds requests to instances whatever their load."""
    notes: tuple[str, ...] = ()
    """What the asker takes for granted; told among the assumptions."""


def make_plan(question: Question) -> Plan:
    sizing, load = question.sizing, question.load
    found = assess_all(sizing, load, question.wanted)
    ordered = [replace(a, warnings=warn(sizing, a, found)) for a in rank(sizing, load, found)]
    chosen = _choose(question, ordered)
    asked = next((a for a in ordered if a.layout == question.wanted), ordered[0])
    one = chosen.instance if chosen else None
    binding = binding_of(one, question.replicas, chosen.pools) if chosen and one else None
    cautions = _service_cautions(question, chosen)
    return Plan(
        model=_model(sizing),
        accelerator=AcceleratorReport(
            name=sizing.accelerator.name,
            memory_bytes=sizing.accelerator.memory_bytes,
            calibration="default" if sizing.accelerator.calibration.is_default else "fitted",
        ),
        context=sizing.wanted_context,
        layouts=[_layout(sizing, a, is_explained=a is asked) for a in ordered],
        chosen=_chosen(question, chosen) if chosen else None,
        pools=list(_pools(question, chosen)) if chosen else [],
        slo=_slo(question, chosen, binding),
        cost=_cost(question, chosen),
        warnings=_warnings([*cautions, *(chosen.warnings if chosen else ())]),
        assumptions=list(_assumptions(question)),
    )


def _choose(question: Question, ordered: Sequence[Assessment]) -> Assessment | None:
    """The object's own layout if it has one that may start, else the best that fits; None: nothing is known to."""
    if question.wanted is not None:
        own = next(a for a in ordered if a.layout == question.wanted)
        return own if own.verdict.feasible else None
    return ordered[0] if ordered[0].verdict.feasible else None


def _model(sizing: Sizing) -> ModelReport:
    kv = stage_kv_per_token(sizing, Layout())
    return ModelReport(
        architecture=sizing.model.architecture,
        parameters=sizing.weights.parameters,
        active_parameters=sizing.weights.active,
        weight_bytes=sizing.weights.total_bytes,
        weight_source=str(sizing.weights.source),
        kv_bytes_per_token=kv[0] if kv else None,
    )


def _parallelism(layout: Layout) -> ParallelismReport:
    return ParallelismReport(tensor=layout.tensor, pipeline=layout.pipeline, data=layout.data, expert=layout.expert)


def _layout(sizing: Sizing, a: Assessment, *, is_explained: bool) -> LayoutReport:
    """`is_explained`: look for what fits instead, which costs time."""
    g, layout = a.ledger, a.layout
    message = explain(sizing, layout, a.verdict) if is_explained else a.verdict.message
    return LayoutReport(
        parallelism=_parallelism(layout),
        gpus_per_instance=layout.gpus,
        pods_per_instance=max(1, math.ceil(layout.gpus / sizing.accelerator.gpus_per_node)),
        ledger=g
        and LedgerReport(
            usable=g.usable, weights=g.weights, activations=g.activations, runtime=g.runtime, graphs=g.graphs, kv=g.room
        ),
        weights_per_gpu=g.weights if g else None,
        kv_per_gpu=None if g is None or g.room is None else max(0, g.room),
        kv_tokens=g.tokens if g else None,
        concurrency_tokens=a.context,
        max_concurrency=_rounded(a.concurrency),
        max_context=g.max_context if g else None,
        decode_step_ms=_ms(a.decode.total_s if a.decode else None),
        ttft_ms=_ms(a.prefill.total_s if a.prefill and a.verdict.feasible else None),
        communication_share=_rounded(a.decode.communication_share if a.decode else None),
        feasible=_truth(a.verdict.feasible),
        reason=str(a.verdict.reason),
        message=message,
        is_comfortable=a.is_comfortable,
        warnings=_warnings(a.warnings),
    )


def _chosen(question: Question, one: Assessment) -> ChosenReport:
    moved = one.pools.transfer_s if one.pools else None
    return ChosenReport(
        parallelism=_parallelism(one.layout),
        is_wanted=question.wanted is not None,
        instances=one.pools.unified if one.pools else None,
        reasons=list(_reasons(question, one)),
        pd_transfer_ms=_ms(moved),
        reuse=list(_reuse(question.sizing, one.layout, one.context or LONG_PROMPT)),
    )


def _reasons(question: Question, one: Assessment) -> Iterator[str]:
    sizing, layout = question.sizing, one.layout
    shape = sizing.shape
    if question.wanted is not None:
        yield "the object asks for this layout"
    elif layout.gpus == 1:
        yield "one GPU holds the model with room for requests: more load needs more instances, not larger ones"
    elif layout.expert:
        experts = shape.experts.count if shape and shape.experts else 0
        yield (
            f"beyond one node, {experts} experts ({MANY_EXPERTS} or more) are spread over {layout.gpus} GPUs and each "
            "rank attends to its own requests"
        )
    elif layout.pipeline > 1:
        yield f"no single node has room: tensor {layout.tensor} inside a node, {layout.pipeline} stages over nodes"
    else:
        yield f"{layout.gpus} GPUs that need no network between them are the fewest with room for requests"
    if not one.is_comfortable:
        yield "it starts, but has little room: see its warnings"
    if one.pools and one.pools.unified:
        yield f"{one.pools.unified} instances meet the load"
    yield from _disaggregation(question, one)


def _pd_gpus(one: Assessment) -> tuple[int, int] | None:
    """(instances unified, instances apart) for the load; None: one of them can't meet it."""
    p = one.pools
    return (p.unified, p.prefill + p.decode) if p and p.unified and p.prefill and p.decode else None


def pays_apart(question: Question, one: Assessment) -> bool:
    """Whether separate prefill and decode pools serve clearly more per GPU at this load."""
    load, counts = question.load, _pd_gpus(one)
    has_goals = load.ttft_s is not None and load.tpot_s is not None
    return bool(counts and has_goals and load.input_tokens >= LONG_PROMPT and counts[0] > PD_GAIN * counts[1])


def _disaggregation(question: Question, one: Assessment) -> Iterator[str]:
    counts, p = _pd_gpus(one), one.pools
    if counts is None or p is None:
        return
    unified, apart = counts
    word = "pay" if pays_apart(question, one) else "do not pay at this load (PDTooEarly)"
    yield f"prefill and decode pools {word}: {p.prefill} + {p.decode} = {apart} instances against {unified} unified"


def _reuse(sizing: Sizing, layout: Layout, tokens: int) -> Iterator[ReuseReport]:
    """Load a prefix or compute it: per tier, for a prefix of `tokens`, and the length from which loading wins."""
    lengths = [n for n in REUSE_LENGTHS if n <= max(tokens, REUSE_LENGTHS[0])]
    compute = [step.total_s for n in (*lengths, tokens) if (step := perf.prefill(sizing, layout, n))]
    if len(compute) <= len(lengths):
        return
    for tier in ("HostMemory", "Disk", "Network"):
        loads = [seconds for n in (*lengths, tokens) if (seconds := _load_s(sizing, layout, tier, n)) is not None]
        if len(loads) <= len(lengths):
            continue
        yield ReuseReport(
            tier=tier,
            prefix_tokens=tokens,
            load_ms=round(loads[-1] * 1e3, 3),
            compute_ms=round(compute[-1] * 1e3, 3),
            break_even_tokens=perf.break_even(lengths, loads[:-1], compute[:-1]),
        )


def _load_s(sizing: Sizing, layout: Layout, tier: str, tokens: int) -> float | None:
    """Seconds to load the KV of a prefix; None: the tier's rate is not known. All GPUs of a node share its disk."""
    a = sizing.accelerator
    if tier == "Disk":
        size = perf.kv_bytes(sizing, layout, tokens)
        return None if size is None or a.disk is None else perf.transfer_s(size, a.disk)
    rate = a.host_link if tier == "HostMemory" else a.nic
    return None if rate is None else perf.move_s(sizing, layout, tokens, rate)


def _pools(question: Question, one: Assessment) -> Iterator[PoolReport]:
    """What the autoscaler starts from, too."""
    sizing, load, p = question.sizing, question.load, one.pools
    prompt = one.instance.prompt if one.instance else None
    decode = one.instance.decode_within(load.tpot_s) if one.instance else None
    rate = load.computed_input * prompt.servers / prompt.seconds if prompt and prompt.seconds else None

    def pool(name: str, role: Literal["Unified", "Prefill", "Decode"], replicas: int | None) -> PoolReport:
        return PoolReport(
            name=name,
            role=role,
            replicas=replicas,
            prefill_tokens_per_second=_rounded(rate) if role != "Decode" else None,
            max_batch=decode.batch if decode and role != "Prefill" else None,
            kv_tokens=one.ledger.tokens if one.ledger else None,
            load_seconds=_load_seconds(sizing, one),
        )

    if p and pays_apart(question, one):
        yield pool("prefill", "Prefill", p.prefill)
        yield pool("decode", "Decode", p.decode)
    else:
        yield pool(question.pool, "Unified", p.unified if p else None)


def _load_seconds(sizing: Sizing, one: Assessment) -> float | None:
    disk = sizing.accelerator.disk
    if disk is None or one.ledger is None:
        return None
    in_node = min(one.layout.gpus, sizing.accelerator.gpus_per_node)
    return _rounded(min(one.ledger.weights * in_node, sizing.weights.total_bytes) / disk)


def _slo(question: Question, one: Assessment | None, binding: Binding | None) -> SloReport | None:
    load, sizing = question.load, question.sizing
    if load.ttft_s is None and load.tpot_s is None and load.rps is None:
        return None
    if one is None or one.instance is None:
        return SloReport(feasible="Unknown", binding=None, remedies=[])
    if binding is None:
        return SloReport(feasible="True", binding=None, remedies=[])
    instances = one.pools.unified if one.pools else None
    missed = Missed(sizing, one.layout, load, binding, question.accelerators, instances)
    return SloReport(feasible="False", binding=str(binding), remedies=find_remedies(missed))


def _cost(question: Question, one: Assessment | None) -> CostReport | None:
    price = question.sizing.accelerator.price_per_hour
    if one is None or price is None or not one.goodput:
        return None
    count = (one.pools.unified if one.pools else None) or 1
    rps = min(question.load.rps or math.inf, one.goodput * count)
    gpus = one.layout.gpus * count
    return CostReport(
        gpus=gpus,
        requests_per_second=round(rps, 3),
        per_million_output_tokens=round(cost_per_million(gpus, price, rps, question.load.output_tokens), 4),
    )


def _service_cautions(question: Question, one: Assessment | None) -> Iterator[Caution]:
    if question.has_uncapped_affinity:
        yield Caution("AffinityNoLoadCap", "requests stick to their instance whatever its load; use CacheAware")
    if one is None or not (question.is_disaggregated or pays_apart(question, one)):
        return
    if question.load.rps and not pays_apart(question, one):
        yield Caution("PDTooEarly", "prefill and decode pools do not pay at this load; one Unified pool serves as much")
    p = one.pools
    if p and p.transfer_s and one.prefill and p.transfer_s > SLOW_TRANSFER * (one.prefill.total_s + p.transfer_s):
        yield Caution("PDTransferSlow", f"sending a prompt's KV takes {p.transfer_s * 1e3:.0f} ms of the first token")


def _assumptions(question: Question) -> Iterator[str]:
    sizing, load = question.sizing, question.load
    yield from dict.fromkeys([*question.notes, *sizing.weights.notes, *sizing.model.notes])
    if sizing.weights.encoder_bytes == 0 and sizing.model.has_vision:
        yield "the encoder's weights are not counted; pass the model's directory"
    a, s = sizing.accelerator, sizing.settings
    yield (
        f"{s.engine}: {sizing.tokens_per_pass} tokens and {sizing.seqs} sequences per pass, KV cache {s.kv_dtype}, "
        f"blocks of {s.block} tokens"
    )
    if s.engine is EngineKind.SGLANG:
        reserve = sizing.accelerator.memory_bytes - keep(sizing, question.wanted or Layout()).usable
        yield f"SGLang: {reserve / 1e9:.1f} GB are reserved for activations, runtime and graphs together"
    if a.calibration.is_default:
        yield f"calibration: default (fitted to H100, {a.name} may differ by 30 %)"
    missing = [n for n, v in (("bandwidth", a.hbm), ("arithmetic", a.flops), ("link", a.link), ("NIC", a.nic)) if not v]
    if missing:
        yield f"{a.name}: {', '.join(missing)} not known, so times that need it are absent"
    lengths = "" if load.is_told else " (default)"
    yield f"decode steps: batch {QUOTED_BATCH}, {load.mean_context} tokens each{lengths}"
    if sizing.shape and sizing.shape.experts:
        yield f"expert-parallel ranks: the busiest has {a.calibration.expert_skew:g} times the mean load"
    if sizing.shape and sizing.shape.has_windows and not s.is_hybrid:
        yield "window layers hold the full length (hybrid KV cache off)"


def _warnings(cautions: Sequence[Caution]) -> list[WarningReport]:
    return [
        WarningReport(code=c.code, message=c.message, severity="Hint" if c.is_hint else "Warning") for c in cautions
    ]


def _truth(value: bool | None) -> Truth:
    return "Unknown" if value is None else "True" if value else "False"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
