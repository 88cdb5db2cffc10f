"""Which layouts come into question, how they compare, and what to be warned of.

`assess` puts everything known about one layout together; `candidates` are those worth comparing; `rank` orders them:
meets the goals, fewest GPUs, most load per GPU, simplest. `WARNINGS` is a table of small functions.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from sluice.api.v1alpha1 import MAX_ACCELERATORS
from sluice.sizing import perf
from sluice.sizing.ledger import Layout, Ledger, Sizing, concurrency, keep
from sluice.sizing.limits import Fit, Verdict, find_broken, judge
from sluice.sizing.workload import Instance, Pools, Workload, count_pools, goodput, instance_of, transfer_of

MEAN_REQUEST: Final = 4096
"""Tokens of a request for the question whether KV room is comfortable, unless the user names lengths."""
COMFORT_REQUESTS: Final = 8
COMFORT_ROOM: Final = 0.10
"""Of the usable memory."""
COMM_SHARE: Final = 0.30
TP_GAIN: Final = 1.5
QUOTED_BATCH: Final = 64
QUOTED_PROMPT: Final = 8192
MANY_EXPERTS: Final = 64
"""From so many on, experts are spread over nodes instead of being cut."""
FEW_PER_RANK: Final = 8
"""Experts per rank from which on one hot expert is felt by the whole step."""
MAX_NODES: Final = 16


@dataclass(frozen=True, slots=True)
class Caution:
    """A hint is worth knowing; a warning makes `--strict` fail."""

    code: str
    message: str
    is_hint: bool = False


@dataclass(frozen=True, slots=True)
class Assessment:
    """One layout. Times are seconds; None: not known, or not possible."""

    layout: Layout
    verdict: Verdict
    ledger: Ledger | None = None
    """None: a rule speaks against the layout, there is nothing to count."""
    context: int | None = None
    """Tokens that `concurrency` is of."""
    concurrency: float | None = None
    decode: perf.Step | None = None
    """With `batch` sequences of the workload's mean context; None also when so many don't fit."""
    prefill: perf.Step | None = None
    instance: Instance | None = None
    """Under the load; None: times are not known, or it does not fit."""
    pools: Pools | None = None
    goodput: float | None = None
    is_comfortable: bool = False
    warnings: tuple[Caution, ...] = ()

    @property
    def meets_goals(self) -> bool:
        return self.pools is not None and self.pools.unified is not None

    @property
    def gpus_in_all(self) -> int:
        """For the whole load; of one instance when there is no load."""
        count = self.pools.unified if self.pools else None
        return self.layout.gpus * (count or 1)


def assess(sizing: Sizing, layout: Layout, load: Workload) -> Assessment:
    """Everything about one layout but for warnings, which need the others to compare with."""
    broken = find_broken(sizing, layout)
    if broken:
        return Assessment(layout, broken)
    verdict, ledger = judge(sizing, layout), keep(sizing, layout)
    context = sizing.wanted_context
    quoted = min(QUOTED_PROMPT, context or QUOTED_PROMPT)
    made = Assessment(
        layout,
        verdict,
        ledger,
        quoted,
        concurrency(sizing, layout, ledger, quoted),
        prefill=perf.prefill(sizing, layout, quoted),
    )
    if verdict.feasible is not True:
        return made
    held = concurrency(sizing, layout, ledger, load.mean_context)
    has_place = held is not None and held >= QUOTED_BATCH
    one = instance_of(sizing, layout, ledger, load)
    moved = transfer_of(sizing, layout, load.input_tokens)
    return replace(
        made,
        decode=one.decode.step(QUOTED_BATCH) if one and has_place else None,
        instance=one,
        pools=count_pools(one, load.rps, moved) if one and load.rps else None,
        goodput=goodput(one) if one and load.is_told else None,
        is_comfortable=_is_comfortable(sizing, layout, ledger, load),
    )


def _is_comfortable(sizing: Sizing, layout: Layout, ledger: Ledger, load: Workload) -> bool:
    context = sizing.wanted_context or MEAN_REQUEST
    mean = min(load.input_tokens + load.output_tokens if load.is_told else MEAN_REQUEST, context)
    held, longest = concurrency(sizing, layout, ledger, mean), ledger.max_context
    if ledger.room is None or held is None or longest is None:
        return False
    has_longest = sizing.settings.fits_context or longest >= context
    return ledger.room >= COMFORT_ROOM * ledger.usable and held >= COMFORT_REQUESTS and has_longest


def candidates(sizing: Sizing) -> list[Layout]:
    """Layouts worth comparing, from one GPU on; no two are the same, and the API has words for the size of each."""
    a, shape = sizing.accelerator, sizing.shape
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= a.reach]
    found = [Layout(tensor=size) for size in sizes]
    if a.domain == 1:
        found += [Layout(pipeline=size) for size in sizes if size > 1]
    full = sizes[-1]
    found += [Layout(tensor=full, pipeline=nodes) for nodes in (2, 3, 4, 6, 8, 12, 16) if nodes <= MAX_NODES]
    if shape and shape.experts and shape.experts.count >= MANY_EXPERTS:
        spread = [size for size in (4, 8, 16, 32, 64, 128) if size >= a.gpus_per_node]
        found += [Layout(data=size, expert=True) for size in spread]
    return [layout for layout in found if layout.gpus <= MAX_ACCELERATORS]


def rank(sizing: Sizing, load: Workload, found: Sequence[Assessment]) -> list[Assessment]:
    """Best first: comfortable before merely feasible before the rest."""

    def order(a: Assessment) -> tuple[bool, bool, bool, int, float, int]:
        is_met = not load.rps or a.meets_goals
        per_gpu = (a.goodput or 0.0) / a.layout.gpus
        return (
            a.verdict.feasible is not True,
            not a.is_comfortable,
            not is_met,
            a.gpus_in_all,
            -per_gpu,
            _complexity(sizing, a.layout),
        )

    return sorted(found, key=order)


def _complexity(sizing: Sizing, layout: Layout) -> int:
    """Replicas of one GPU, tensor in the domain, expert parallel, pipeline over nodes."""
    if layout.gpus == 1:
        return 0
    if layout.pipeline == 1 and layout.data == 1:
        return 1 if layout.tensor <= sizing.accelerator.domain else 3
    return 2 if layout.expert else 4


def nearest_fit(sizing: Sizing, layout: Layout) -> str:
    """What would fit instead, in words: `tensor 4, or max-model-len 23616`; "" when nothing of ours does."""
    ways = []
    others = [c for c in candidates(sizing) if c != layout and judge(sizing, c).feasible]
    if others:
        size = max(1, layout.gpus)
        best = min(others, key=lambda c: (max(c.gpus, size) / min(c.gpus, size), _complexity(sizing, c)))
        ways.append(_in_words(best))
    verdict = judge(sizing, layout)
    if verdict.reason is Fit.DOES_NOT_FIT and not find_broken(sizing, layout):
        longest = keep(sizing, layout).max_context or 0
        shorter = longest // sizing.settings.block * sizing.settings.block
        settings = replace(sizing.settings, max_model_len=shorter, fits_context=False)
        if shorter and judge(replace(sizing, settings=settings), layout).feasible:
            ways.append(f"max-model-len {shorter}")
        ways += _smaller_passes(sizing, layout)
    return ", or ".join(ways)


def _smaller_passes(sizing: Sizing, layout: Layout) -> Iterator[str]:
    """Fewer sequences or tokens per pass make the temporary tensors smaller: often the cheapest way."""
    tokens, seqs = sizing.tokens_per_pass, sizing.seqs
    for name, settings in (
        *((f"max-num-seqs {n}", replace(sizing.settings, max_seqs=n)) for n in _halves(seqs, 16)),
        *(
            (f"max-num-batched-tokens {n}", replace(sizing.settings, max_batched_tokens=n, max_seqs=min(seqs, n)))
            for n in _halves(tokens, 512)
        ),
    ):
        if judge(replace(sizing, settings=settings), layout).feasible:
            yield name
            return


def _halves(size: int, least: int) -> Iterator[int]:
    while size // 2 >= least:
        size //= 2
        yield size


def _in_words(layout: Layout) -> str:
    words = [f"tensor {layout.tensor}"] if layout.tensor > 1 or layout.gpus == 1 else []
    words += [f"pipeline {layout.pipeline}"] * (layout.pipeline > 1) + [f"data {layout.data}"] * (layout.data > 1)
    return " ".join(words) + (" with expert parallelism" if layout.expert else "")


def explain(sizing: Sizing, layout: Layout, verdict: Verdict) -> str:
    """The verdict's message with what fits instead."""
    if verdict.feasible is not False:
        return verdict.message
    ways = [way for way in (verdict.fix, nearest_fit(sizing, layout)) if way]
    if ways:
        return f"{verdict.message}; fits with {', or '.join(ways)}"
    most = max(candidates(sizing), key=lambda c: c.gpus).gpus
    return (
        f"{verdict.message}; no layout of up to {most} {sizing.accelerator.name} fits: use an accelerator with more "
        "memory, quantised weights, or a shorter max-model-len"
    )


Look = Callable[[Sizing, Assessment, Sequence[Assessment]], Iterator[Caution]]


def warn(sizing: Sizing, one: Assessment, others: Sequence[Assessment]) -> tuple[Caution, ...]:
    """All warnings and hints of a layout; `others` are what it is compared with."""
    if one.ledger is None:
        return ()
    return tuple(w for look in WARNINGS for w in look(sizing, one, others))


def _low_room(_sizing: Sizing, one: Assessment, _others: Sequence[Assessment]) -> Iterator[Caution]:
    if one.verdict.feasible and not one.is_comfortable and one.ledger and one.ledger.room is not None:
        room, usable = one.ledger.room, one.ledger.usable
        yield Caution("LowKVRoom", f"{room / 1e9:.1f} of {usable / 1e9:.1f} GB are left for KV: few requests at a time")


def _across(sizing: Sizing, one: Assessment, _others: Sequence[Assessment]) -> Iterator[Caution]:
    tensor, domain = one.layout.tensor, sizing.accelerator.domain
    if sizing.accelerator.link is not None and tensor > 1 and tensor > domain:
        yield Caution(
            "TPAcrossDomain",
            f"tensor {tensor} reaches beyond the fast link's {domain} GPU: every layer waits for the slower path",
        )


def _kv_heads(sizing: Sizing, one: Assessment, _others: Sequence[Assessment]) -> Iterator[Caution]:
    shape, tensor = sizing.shape, one.layout.tensor
    if shape and not shape.latent and tensor > shape.kv_heads:
        yield Caution(
            "TPExceedsKVHeads",
            f"tensor {tensor} and {shape.kv_heads} KV heads: GPUs hold copies, KV room gains nothing",
        )


def _latent_copies(sizing: Sizing, one: Assessment, _others: Sequence[Assessment]) -> Iterator[Caution]:
    shape = sizing.shape
    if shape and shape.latent and one.layout.tensor > sizing.settings.context_parallel:
        yield Caution(
            "MLATensorCopies",
            f"latent attention: each of {one.layout.tensor} ranks holds the whole KV; attention data parallelism or "
            "--decode-context-parallel-size divides it",
            is_hint=True,
        )


def _share(sizing: Sizing, one: Assessment, _others: Sequence[Assessment]) -> Iterator[Caution]:
    if one.decode and one.decode.communication_share > COMM_SHARE:
        spans = one.layout.tensor > sizing.accelerator.domain
        share = one.decode.communication_share
        yield Caution("CommShare", f"{share:.2f} of the rest of a step is communication", is_hint=not spans)


def _gain(_sizing: Sizing, one: Assessment, others: Sequence[Assessment]) -> Iterator[Caution]:
    half = replace(one.layout, tensor=one.layout.tensor // 2)
    smaller = next((o for o in others if o.layout == half and o.decode), None)
    if one.decode and smaller and smaller.decode:
        gain = smaller.decode.total_s / one.decode.total_s
        if is_low_gain(gain):
            yield Caution(
                "LowTPGain",
                f"steps are {gain:.2f} times as fast as with tensor {half.tensor}, for twice the GPUs",
                True,
            )


def is_low_gain(gain: float) -> bool:
    """Twice the GPUs for less than this; judged to two digits, as it is shown."""
    return round(gain, 2) < TP_GAIN


def _not_needed(sizing: Sizing, one: Assessment, others: Sequence[Assessment]) -> Iterator[Caution]:
    node = sizing.accelerator.reach
    small = next((o for o in others if o.is_comfortable and o.layout.gpus <= node), None)
    if one.layout.gpus > node and small:
        yield Caution("DistributedNotNeeded", f"{small.layout} fits with room inside one node", is_hint=True)


def _pipeline(sizing: Sizing, one: Assessment, others: Sequence[Assessment]) -> Iterator[Caution]:
    if one.layout.pipeline == 1:
        return
    domain = sizing.accelerator.domain
    better = next(
        (
            o
            for o in others
            if o.verdict.feasible
            and o.layout.pipeline == 1
            and 1 < o.layout.tensor <= domain
            and o.layout.gpus <= one.layout.gpus
        ),
        None,
    )
    if better:
        yield Caution("PPNoLatencyGain", f"stages do not shorten a token's time; {better.layout} does", is_hint=True)


def _hot(sizing: Sizing, one: Assessment, _others: Sequence[Assessment]) -> Iterator[Caution]:
    shape, ranks = sizing.shape, one.layout.expert_ranks
    if shape is None or shape.experts is None or ranks == 1 or sizing.settings.redundant_experts:
        return
    if shape.experts.count / ranks <= FEW_PER_RANK:
        skew = sizing.accelerator.calibration.expert_skew
        yield Caution(
            "HotExpert",
            f"{shape.experts.count / ranks:g} experts per rank: the busiest of {ranks} ranks gets {skew:g} times the "
            "mean and all wait for it; redundant experts even that out",
        )


def _static(sizing: Sizing, _one: Assessment, _others: Sequence[Assessment]) -> Iterator[Caution]:
    context = sizing.wanted_context
    if context and sizing.settings.block >= context:
        yield Caution(
            "StaticReservation", f"blocks of {sizing.settings.block} tokens reserve the full length per request"
        )


WARNINGS: Final[tuple[Look, ...]] = (
    _low_room,
    _across,
    _kv_heads,
    _share,
    _gain,
    _not_needed,
    _pipeline,
    _hot,
    _static,
    _latent_copies,
)
