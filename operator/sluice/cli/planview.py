"""A plan as people read it. Pure."""

from collections.abc import Iterator, Sequence
from typing import Final

from sluice.cli.text import UNKNOWN, clean, count, section, table
from sluice.sizing.layout import QUOTED_BATCH
from sluice.sizing.report import LayoutReport, Plan, PoolReport, WarningReport

MAX_ROOMY: Final = 5
MAX_TIGHT: Final = 3
"""Rows of the table; JSON has all."""


def describe(plan: Plan) -> list[str]:
    """Paragraphs as lines."""
    paragraphs = [
        list(_head(plan)),
        list(_ledger(plan)),
        _layouts(plan),
        section("Why", [clean(r) for r in plan.chosen.reasons] if plan.chosen else []),
        _pools(plan.pools),
        list(_goals(plan)),
        section("Prefix reuse", list(_reuse(plan))),
        section("Warnings", _said(plan.warnings, "Warning")),
        section("Hints", _said(plan.warnings, "Hint")),
        section("Assumptions", plan.assumptions),
    ]
    lines: list[str] = []
    for paragraph in paragraphs:
        lines += ["", *paragraph] if lines and paragraph else paragraph
    return lines


def _head(plan: Plan) -> Iterator[str]:
    m, a = plan.model, plan.accelerator
    parts = [m.architecture]
    if m.parameters is not None:
        active = (
            f" ({_billions(m.active_parameters)} active)" if m.active_parameters not in (None, m.parameters) else ""
        )
        parts.append(f"{_billions(m.parameters)} parameters{active}")
    parts.append(f"{_gb(m.weight_bytes)} GB ({m.weight_source})")
    if m.kv_bytes_per_token is not None:
        parts.append(f"{m.kv_bytes_per_token:,} B KV per token")
    yield f"Model        {clean(', '.join(parts))}"
    yield f"Accelerator  {clean(a.name)}, {_gb(a.memory_bytes)} GB"
    yield f"Context      {UNKNOWN if plan.context is None else f'{plan.context:,} tokens'}"


def _ledger(plan: Plan) -> Iterator[str]:
    one = plan.chosen_layout or next((x for x in plan.layouts if x.ledger), None)
    if one is None or one.ledger is None:
        return
    g = one.ledger
    yield f"Memory per GPU in GB, {_name(one)}:"
    for word, value in (
        ("usable", g.usable),
        ("weights", g.weights),
        ("activations", g.activations),
        ("runtime", g.runtime),
        ("graphs", g.graphs),
        ("room for KV", g.kv),
    ):
        if value == 0 and word not in ("usable", "weights", "room for KV"):
            continue  # no graphs, or the engine (SGLang) reserves one sum for these
        tokens = f"   {one.kv_tokens:,} tokens" if word == "room for KV" and one.kv_tokens else ""
        yield f"  {word:12}{_gb(value):>8}{tokens}"


def _layouts(plan: Plan) -> list[str]:
    """`*` is the chosen one."""
    tokens = next((x.concurrency_tokens for x in plan.layouts if x.concurrency_tokens), UNKNOWN)
    head = ("LAYOUT", "GPUS", "W/GPU", "KV/GPU", f"CONC@{tokens}", f"TPOT@{QUOTED_BATCH}", f"TTFT@{tokens}", "NOTE")
    chosen, shown = plan.chosen_layout, _worth_showing(plan)
    lines = table(head, [_row(x) for x in shown])
    return [f"{'*' if x is chosen else ' '} {line}" for x, line in zip((None, *shown), lines, strict=False)]


def _worth_showing(plan: Plan) -> list[LayoutReport]:
    """The best with room, some that are tight, and those that don't fit only when there is nothing else."""
    chosen = plan.chosen_layout
    roomy = [x for x in plan.layouts if x.is_comfortable][:MAX_ROOMY]
    tight = [x for x in plan.layouts if x.feasible != "False" and not x.is_comfortable][:MAX_TIGHT]
    own = [] if chosen is None or chosen in (*roomy, *tight) else [chosen]
    return [*own, *roomy, *tight] or plan.layouts[:MAX_ROOMY]


def _row(one: LayoutReport) -> tuple[str, ...]:
    notes = [_note(one, w) for w in one.warnings]
    if one.feasible != "True":
        notes = [one.reason]
    return (
        _name(one),
        str(one.gpus_per_instance),
        _gb(one.weights_per_gpu),
        _gb(one.kv_per_gpu) if one.feasible != "False" else UNKNOWN,
        UNKNOWN if one.max_concurrency is None or one.feasible == "False" else f"{one.max_concurrency:.1f}",
        _milliseconds(one.decode_step_ms),
        _milliseconds(one.ttft_ms),
        " ".join(notes),
    )


def _note(one: LayoutReport, warning: WarningReport) -> str:
    if warning.code == "CommShare" and one.communication_share is not None:
        return f"CommShare {one.communication_share:.2f}"
    return warning.code


def _name(one: LayoutReport) -> str:
    p = one.parallelism
    parts = [f"tensor={p.tensor}"] + [f"pipeline={p.pipeline}"] * (p.pipeline > 1) + [f"data={p.data}"] * (p.data > 1)
    return ",".join([*parts, *(["expert"] * p.expert)])


def _pools(pools: Sequence[PoolReport]) -> list[str]:
    rows = [
        (
            clean(p.name),
            p.role,
            UNKNOWN if p.replicas is None else str(p.replicas),
            UNKNOWN if p.prefill_tokens_per_second is None else f"{p.prefill_tokens_per_second:.0f}",
            UNKNOWN if p.max_batch is None else str(p.max_batch),
            UNKNOWN if p.kv_tokens is None else str(p.kv_tokens),
            UNKNOWN if p.load_seconds is None else f"{p.load_seconds:.0f} s",
        )
        for p in pools
    ]
    return table(("POOL", "ROLE", "REPLICAS", "PREFILL-TOKENS/S", "MAX-BATCH", "KV-TOKENS", "LOAD"), rows)


def _goals(plan: Plan) -> Iterator[str]:
    if plan.slo:
        word = {"True": "reached", "False": f"not reached: {plan.slo.binding}"}.get(plan.slo.feasible, "not known")
        yield f"Goals        {word}"
        for remedy in plan.slo.remedies:
            yield f"             helps: {clean(remedy)}"
    if plan.cost:
        c = plan.cost
        yield (
            f"Cost         {c.per_million_output_tokens:.2f} per million output tokens "
            f"({count(c.gpus, 'GPU')}, {c.requests_per_second:.2f} requests/s)"
        )
    if plan.chosen and plan.chosen.pd_transfer_ms is not None:
        yield f"KV transfer  {plan.chosen.pd_transfer_ms:.1f} ms from a prefill to a decode instance"


def _reuse(plan: Plan) -> Iterator[str]:
    for one in plan.chosen.reuse if plan.chosen else ():
        wins = "never faster" if one.break_even_tokens is None else f"faster from {one.break_even_tokens} tokens on"
        yield (
            f"{one.tier}: {one.prefix_tokens} tokens load in {one.load_ms:.1f} ms, compute in {one.compute_ms:.0f} ms; "
            f"{wins}"
        )


def _said(warnings: Sequence[WarningReport], severity: str) -> list[str]:
    return [f"{w.code}: {w.message}" for w in warnings if w.severity == severity]


def _gb(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value / 1e9:.1f}"


def _billions(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value / 1e9:.2f} B"


def _milliseconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"
