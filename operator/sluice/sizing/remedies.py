"""A goal that can't be reached: the least change of each kind that helps. `KINDS` is a table of small functions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from sluice.sizing.hardware import Accelerator
from sluice.sizing.layout import Assessment, assess, candidates
from sluice.sizing.ledger import Layout, Sizing, keep
from sluice.sizing.limits import judge
from sluice.sizing.quantization import Quantization
from sluice.sizing.weights import weigh
from sluice.sizing.workload import Binding, Workload, binding_of, count_pools, instance_of

FP8: Final = Quantization("fp8", 8.0 + 32 / (128 * 128), True, is_w8a8=True, block=128)


@dataclass(frozen=True, slots=True)
class Missed:
    """A layout, its load, and the goal that it misses."""

    sizing: Sizing
    layout: Layout
    load: Workload
    binding: Binding
    accelerators: Sequence[Accelerator]
    """Others that could be bought."""
    instances: int | None
    """Unified instances that the load needs; None: no number helps."""


def find_remedies(missed: Missed) -> list[str]:
    return [text for kind in KINDS for text in kind(missed)]


def reaches(sizing: Sizing, layout: Layout, load: Workload) -> bool:
    """Whether some number of instances of this layout meets the goals."""
    if judge(sizing, layout).feasible is not True:
        return False
    one = instance_of(sizing, layout, keep(sizing, layout), load)
    if one is None:
        return False
    pools = count_pools(one, load.rps, None) if load.rps else None
    return binding_of(one, None, pools) is None


def _instances(missed: Missed) -> Iterator[str]:
    if missed.binding is Binding.QUEUE and missed.instances is not None:
        yield f"{missed.instances} instances"


def _layout(missed: Missed) -> Iterator[str]:
    larger = (c for c in candidates(missed.sizing) if c.gpus > missed.layout.gpus)
    best = min((c for c in larger if reaches(missed.sizing, c, missed.load)), key=lambda c: c.gpus, default=None)
    if best:
        yield f"layout {best} ({best.gpus} GPUs)"


def _accelerator(missed: Missed) -> Iterator[str]:
    own = missed.sizing.accelerator
    others = (a for a in missed.accelerators if a.name != own.name)
    fit = (a for a in others if reaches(replace(missed.sizing, accelerator=a), missed.layout, missed.load))
    best = min(fit, key=lambda a: (a.hbm or 0.0, a.flops or 0.0, a.name), default=None)
    if best:
        yield f"accelerator {best.name} in the same layout"


def _fp8(missed: Missed) -> Iterator[str]:
    sizing = missed.sizing
    if sizing.model.quantization.bits <= FP8.bits or not sizing.accelerator.flops8:
        return
    model = replace(sizing.model, quantization=FP8)
    if reaches(replace(sizing, model=model, weights=weigh(model, None)), missed.layout, missed.load):
        yield "FP8 weights in the same layout"


def _goal(missed: Missed) -> Iterator[str]:
    """What the layout reaches at best, with as many instances as it takes."""
    one = instance_of(missed.sizing, missed.layout, keep(missed.sizing, missed.layout), missed.load)
    step = one.decode.step(1) if one else None
    if missed.binding is Binding.TTFT_COMPUTE and one:
        yield f"a goal for the first token of at least {one.prompt.seconds * 1.1 * 1e3:.0f} ms"
    if missed.binding is Binding.TPOT_BANDWIDTH and step:
        yield f"a goal per output token of at least {step.total_s * 1.1 * 1e3:.0f} ms"


Kind = Callable[[Missed], Iterator[str]]
KINDS: Final[tuple[Kind, ...]] = (_instances, _layout, _accelerator, _fp8, _goal)


def assess_all(sizing: Sizing, load: Workload, wanted: Layout | None) -> list[Assessment]:
    """All candidates, and what the user asked for, each once."""
    found = candidates(sizing)
    if wanted is not None and wanted not in found:
        found.insert(0, wanted)
    return [assess(sizing, layout, load) for layout in found]
