"""What must hold for any model, accelerator and load."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.sizing import perf
from sluice.sizing.fields import FactsError
from sluice.sizing.layout import assess, candidates
from sluice.sizing.ledger import Layout, Sizing, keep, request_bytes, stage_weights
from sluice.sizing.limits import find_broken, judge
from sluice.sizing.model import from_config
from sluice.sizing.planning import Question, make_plan
from sluice.sizing.settings import EngineSettings, read_args
from sluice.sizing.weights import weigh
from sluice.sizing.workload import Pools, Workload, count_pools, instance_of, transfer_of
from tests.unit.sizing.configs import CATALOGUE, DEEPSEEK_V3, H100, LLAMA_70B, Config, shipped, sized

KNOWN = {name: config for name, config in CATALOGUE.items() if from_config(config).shape}
CONFIGS = st.sampled_from(sorted(KNOWN)).map(KNOWN.__getitem__)
POWERS = st.sampled_from([1, 2, 4, 8, 16, 32])
TOKENS = st.integers(1, 200_000)
quick = settings(max_examples=60, deadline=None)


def is_possible(sizing: Sizing, layout: Layout) -> bool:
    return find_broken(sizing, layout) is None


@quick
@given(CONFIGS, POWERS)
def test_more_tensor_ranks_never_raise_what_one_gpu_holds(config: Config, tensor: int) -> None:
    sizing = sized(config)
    before, after = Layout(tensor), Layout(tensor * 2)
    if not (is_possible(sizing, before) and is_possible(sizing, after)):
        return
    one, two = keep(sizing, before), keep(sizing, after)
    assert two.weights <= one.weights
    assert (two.kv_per_token or 0) <= (one.kv_per_token or 0)
    bounds = [perf.batch_one_bound(ledger.weights, H100) for ledger in (one, two)]
    assert bounds[1] is not None and bounds[0] is not None and bounds[1] <= bounds[0]


@quick
@given(CONFIGS, POWERS, TOKENS, TOKENS)
def test_the_need_of_a_request_never_falls_with_its_length(config: Config, tensor: int, a: int, b: int) -> None:
    sizing = sized(config)
    if not is_possible(sizing, Layout(tensor)):
        return
    short, long = (request_bytes(sizing, Layout(tensor), n) or 0 for n in sorted((a, b)))
    assert 0 < short <= long


@quick
@given(CONFIGS, st.integers(256, 40_000), st.integers(1, 256), st.integers(0, 3))
def test_room_never_rises_with_tokens_sequences_or_redundant_experts(
    config: Config, tokens: int, seqs: int, steps: int
) -> None:
    sizing = sized(config, settings=EngineSettings(max_batched_tokens=tokens, max_seqs=seqs))
    base = keep(sizing, Layout()).room
    assert base is not None
    for change in ({"max_batched_tokens": tokens * 2}, {"max_seqs": seqs * 2}):
        room = keep(replace(sizing, settings=replace(sizing.settings, **change)), Layout()).room
        assert room is not None and room <= base
    experts = sizing.shape and sizing.shape.experts
    if experts:
        layout = Layout(data=2, expert=True)
        rooms = [
            keep(replace(sizing, settings=replace(sizing.settings, redundant_experts=2 * n)), layout).room or 0
            for n in (steps, steps + 1)
        ]
        assert rooms[1] <= rooms[0]


@quick
@given(CONFIGS, st.integers(50, 90), st.integers(20, 200))
def test_more_memory_utilisation_or_smaller_numbers_never_lower_tokens(config: Config, util: int, gib: int) -> None:
    own = EngineSettings(utilization=util / 100, max_batched_tokens=8192, max_seqs=256)
    sizing = sized(config, replace(H100, memory_bytes=gib << 30), own)
    base = keep(sizing, Layout()).tokens or 0
    better = (
        replace(sizing, settings=replace(own, utilization=(util + 5) / 100)),
        replace(sizing, accelerator=replace(H100, memory_bytes=(gib + 8) << 30)),
        replace(sizing, settings=replace(own, kv_dtype="fp8")),
    )
    assert all((keep(one, Layout()).tokens or 0) >= base for one in better)


@quick
@given(CONFIGS, POWERS, st.integers(1, 6))
def test_shards_hold_at_least_the_model(config: Config, tensor: int, pipeline: int) -> None:
    sizing = sized(config)
    layout = Layout(tensor, pipeline)
    if not is_possible(sizing, layout):
        return
    assert sum(stage_weights(sizing, layout)) * tensor >= sizing.weights.total_bytes


@quick
@given(CONFIGS, POWERS, st.integers(1, 500), st.integers(1, 30_000), st.sampled_from([1, 2, 4]))
def test_a_step_rises_with_batch_and_length(
    config: Config, tensor: int, batch: int, tokens: int, pipeline: int
) -> None:
    sizing = sized(config)
    layout = Layout(tensor, pipeline)
    if not is_possible(sizing, layout):
        return
    base = perf.decode_step(sizing, layout, batch, tokens)
    for other in ((batch + 7, tokens), (batch, tokens + 777)):
        step = perf.decode_step(sizing, layout, *other)
        assert base and step and step.total_s >= base.total_s


@given(st.floats(1, 1e12), st.floats(1e6, 1e12), st.integers(1, 200), st.floats(0, 100))
def test_a_layered_transfer_is_never_slower_than_a_whole_one(
    size: float, rate: float, layers: int, prefill_s: float
) -> None:
    layered = perf.transfer_s(size, rate, layers=layers, prefill_s=prefill_s)
    assert layered <= perf.transfer_s(size, rate) * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([4, 8]),
    st.floats(0.05, 40),
    st.floats(1, 3),
    st.floats(0.3, 1),
    st.integers(64, 6000),
    st.integers(16, 1000),
)
def test_pools_never_shrink_with_load_or_tighter_goals(
    tensor: int, rps: float, more: float, tighter: float, prompt: int, answer: int
) -> None:
    sizing, layout = sized(LLAMA_70B), Layout(tensor)
    ledger = keep(sizing, layout)
    load = Workload(rps, prompt, answer, ttft_s=1.5, tpot_s=0.05, is_told=True)
    harder = (
        replace(load, rps=rps * more),
        replace(load, ttft_s=1.5 * tighter),
        replace(load, tpot_s=0.05 * tighter),
    )

    def count(load: Workload) -> Pools:
        one = instance_of(sizing, layout, ledger, load)
        assert one and load.rps
        return count_pools(one, load.rps, transfer_of(sizing, layout, load.input_tokens))

    base = count(load)
    for one in harder:
        pools = count(one)
        for name in ("unified", "prefill", "decode"):
            before, after = getattr(base, name), getattr(pools, name)
            assert (math.inf if after is None else after) >= (math.inf if before is None else before)


WORDS = st.sampled_from(sorted({key for config in KNOWN.values() for key in config}))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(CONFIGS, st.dictionaries(WORDS | st.text(max_size=8), JSON, max_size=4), st.sets(WORDS, max_size=2))
def test_any_config_gives_a_report_or_a_typed_error(config: Config, odd: Config, gone: set[str]) -> None:
    broken: dict[str, Any] = {key: value for key, value in {**config, **odd}.items() if key not in gone}
    try:
        model = from_config(broken)
        sizing = Sizing(model, weigh(model, None), H100)
        plan = make_plan(Question(sizing))
    except FactsError as error:
        assert str(error)
    else:
        assert plan.layouts


@given(JSON)
def test_anything_that_is_no_config_is_told_so(value: Any) -> None:
    with pytest.raises(FactsError):
        weigh(from_config(value), None)


@given(st.lists(st.text(max_size=12) | st.sampled_from(["--max-model-len", "--max-num-seqs=8", "--block-size", "-1"])))
def test_any_arguments_give_settings_or_a_typed_error(args: list[str]) -> None:
    try:
        read_args(args, EngineSettings())
    except FactsError as error:
        assert str(error)


@pytest.mark.parametrize("accelerator", ["h100-80g", "l4", "mi300x"])
@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_every_model_of_the_catalogue_gets_a_plan(name: str, accelerator: str) -> None:
    sizing_of = CATALOGUE[name]
    if name not in KNOWN:
        with pytest.raises(FactsError, match="KV unknown; pass --kv-bytes-per-token"):
            sized(sizing_of)
        return
    plan = make_plan(Question(sized(sizing_of, shipped(accelerator))))
    assert plan.chosen and plan.model.kv_bytes_per_token
    assert all(x.message for x in plan.layouts if x.feasible == "False")


def test_there_are_forty_models() -> None:
    assert len(KNOWN) >= 40


def test_the_same_question_gives_the_same_bytes() -> None:
    question = Question(sized(DEEPSEEK_V3), Workload(2, 2000, 300, ttft_s=5, tpot_s=0.05, is_told=True))
    assert make_plan(question).model_dump_json() == make_plan(question).model_dump_json()


def test_a_layout_that_is_refused_is_never_said_to_fit_elsewhere() -> None:
    sizing = sized(DEEPSEEK_V3)
    for layout in candidates(sizing):
        a = assess(sizing, layout, Workload())
        assert a.verdict == judge(sizing, layout)
        assert a.verdict.feasible or not a.is_comfortable
