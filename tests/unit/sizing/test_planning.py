"""Layouts that are chosen, warnings, limits and remedies, and the document that comes out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sluice.api.v1alpha1 import MAX_ACCELERATORS
from sluice.sizing import perf
from sluice.sizing.layout import Assessment, Caution, assess, rank, warn
from sluice.sizing.ledger import Layout, Sizing
from sluice.sizing.planning import Question, make_plan
from sluice.sizing.remedies import assess_all
from sluice.sizing.report import Plan, json_schema
from sluice.sizing.settings import EngineKind, EngineSettings
from sluice.sizing.weights import FileFacts, WeightSource
from sluice.sizing.workload import Workload, wait_s
from tests.unit.sizing.configs import (
    CATALOGUE,
    DEEPSEEK_V3,
    GPT_OSS_120B,
    H100,
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_70B_128K,
    MIXTRAL,
    QWEN3_30B,
    Config,
    shipped,
    sized,
)

SCHEMA = Path(__file__).parents[3] / "docs" / "plan.schema.json"


def plan_of(config: Config, load: Workload | None = None, **more: Any) -> Plan:
    accelerator = shipped(more.pop("accelerator", "h100-80g"))
    settings = more.pop("settings", None)
    return make_plan(Question(sized(config, accelerator, settings), load or Workload(), **more))


def chosen(plan: Plan) -> str:
    assert plan.chosen
    p = plan.chosen.parallelism
    return f"{p.tensor} {p.pipeline} {p.data} {p.expert}"


@pytest.mark.parametrize(
    ("config", "accelerator", "wanted"),
    [
        (LLAMA_8B, "h100-80g", "1 1 1 False"),
        (MIXTRAL, "h100-80g", "2 1 1 False"),
        (LLAMA_70B, "h100-80g", "4 1 1 False"),
        (LLAMA_70B, "h200-141g", "2 1 1 False"),
        (LLAMA_70B, "mi300x", "1 1 1 False"),
        (CATALOGUE["llama-3.1-405b-fp8"], "h100-80g", "8 1 1 False"),
        ({**CATALOGUE["llama-3.1-405b-fp8"], "quantization_config": None}, "h100-80g", "8 2 1 False"),
        (QWEN3_30B, "h100-80g", "1 1 1 False"),
        (DEEPSEEK_V3, "h100-80g", "1 1 16 True"),
        (DEEPSEEK_V3, "b200", "8 1 1 False"),
    ],
)
def test_the_smallest_layout_with_room_is_chosen(config: Config, accelerator: str, wanted: str) -> None:
    assert chosen(plan_of(config, accelerator=accelerator)) == wanted


def test_the_layout_of_the_object_is_judged_and_not_replaced() -> None:
    plan = plan_of(LLAMA_70B, wanted=Layout(8))
    assert chosen(plan) == "8 1 1 False" and plan.chosen and plan.chosen.is_wanted
    refused = plan_of(LLAMA_70B, wanted=Layout(1))
    assert refused.chosen is None
    assert any(x.message.endswith("fits with tensor 2") for x in refused.layouts)


def cautions(sizing: Sizing, layout: Layout, load: Workload | None = None) -> dict[str, Caution]:
    load = load or Workload()
    found = assess_all(sizing, load, layout)
    one = next(a for a in found if a.layout == layout)
    return {c.code: c for c in warn(sizing, one, found)}


@pytest.mark.parametrize(
    ("sizing", "layout", "code", "is_hint"),
    [
        (sized(LLAMA_70B), Layout(2), "LowKVRoom", False),
        (sized(LLAMA_70B), Layout(16), "TPAcrossDomain", False),
        (sized(LLAMA_70B), Layout(16), "CommShare", False),
        (sized(LLAMA_70B), Layout(16), "LowTPGain", True),
        (sized(LLAMA_70B), Layout(16), "TPExceedsKVHeads", False),
        (sized(LLAMA_70B), Layout(8), "CommShare", True),
        (sized(LLAMA_70B), Layout(8, 2), "DistributedNotNeeded", True),
        (sized(LLAMA_70B), Layout(8, 2), "PPNoLatencyGain", True),
        (sized(DEEPSEEK_V3), Layout(8, 2), "MLATensorCopies", True),
        (sized(DEEPSEEK_V3), Layout(data=32, expert=True), "HotExpert", False),
        (
            sized(LLAMA_8B, settings=EngineSettings(block=8192, max_model_len=8192)),
            Layout(),
            "StaticReservation",
            False,
        ),
        (sized(LLAMA_8B, shipped("l40s")), Layout(2), "TPAcrossDomain", False),
    ],
)
def test_warnings(sizing: Sizing, layout: Layout, code: str, is_hint: bool) -> None:
    found = cautions(sizing, layout)
    assert code in found and found[code].is_hint == is_hint and found[code].message


def test_a_layout_with_room_in_one_domain_has_nothing_to_warn_of() -> None:
    assert cautions(sized(LLAMA_70B), Layout(4)) == {}
    redundant = sized(DEEPSEEK_V3, settings=EngineSettings(redundant_experts=32))
    assert "HotExpert" not in cautions(redundant, Layout(data=32, expert=True))


def test_affinity_without_a_cap_is_warned_of() -> None:
    codes = [w.code for w in plan_of(LLAMA_8B, has_uncapped_affinity=True).warnings]
    assert codes == ["AffinityNoLoadCap"]


def test_a_slow_network_makes_the_transfer_a_warning() -> None:
    slow = replace(H100, nic=1e9)
    load = Workload(4, 4096, 512, ttft_s=3, tpot_s=0.04, is_told=True)
    plan = make_plan(Question(sized(LLAMA_70B, slow), load, is_disaggregated=True))
    assert "PDTransferSlow" in [w.code for w in plan.warnings]


def test_apart_pools_are_chosen_when_they_serve_clearly_more() -> None:
    """Long prompts and a strict time per token: prefills would stretch every step of a unified instance."""
    load = Workload(20, 8000, 400, ttft_s=2.5, tpot_s=0.022, is_told=True)
    plan = plan_of(LLAMA_70B, load)
    unified = plan_of(LLAMA_70B, replace(load, input_tokens=2000))
    assert [p.role for p in plan.pools] == ["Prefill", "Decode"]
    assert [p.role for p in unified.pools] == ["Unified"]


def goals(config: Config, load: Workload, **more: Any) -> tuple[str | None, str]:
    plan = plan_of(config, load, accelerators=(shipped("b200"), shipped("h200-141g")), **more)
    assert plan.slo
    return plan.slo.binding, "; ".join(plan.slo.remedies)


def test_goals_that_are_met_bind_nothing() -> None:
    assert goals(LLAMA_70B, Workload(4, 4096, 512, ttft_s=1.5, tpot_s=0.04, is_told=True)) == (None, "")


@pytest.mark.parametrize(
    ("load", "layout", "replicas", "binding", "remedy"),
    [
        (Workload(1, 8192, 100, ttft_s=0.4, is_told=True), Layout(4), None, "TTFTCompute", "layout tensor=8 (8 GPUs)"),
        (Workload(1, 8192, 100, ttft_s=0.4, is_told=True), Layout(4), None, "TTFTCompute", "FP8 weights"),
        (
            Workload(1, 8192, 100, ttft_s=0.4, is_told=True),
            Layout(4),
            None,
            "TTFTCompute",
            "first token of at least 597",
        ),
        (Workload(1, 500, 100, tpot_s=0.012, is_told=True), Layout(4), None, "TPOTBandwidth", "accelerator h200-141g"),
        (
            Workload(1, 500, 100, tpot_s=0.012, is_told=True),
            Layout(4),
            None,
            "TPOTBandwidth",
            "output token of at least",
        ),
        (Workload(4, 4096, 512, ttft_s=1.5, tpot_s=0.04, is_told=True), Layout(4), 2, "Queue", "3 instances"),
    ],
)
def test_a_goal_out_of_reach_names_its_limit_and_the_least_change(
    load: Workload, layout: Layout, replicas: int | None, binding: str, remedy: str
) -> None:
    found, remedies = goals(LLAMA_70B, load, wanted=layout, replicas=replicas)
    assert found == binding
    assert remedy in remedies


def test_memory_can_be_what_binds() -> None:
    settings = EngineSettings(max_model_len=30_000)
    load = Workload(1, 28_000, 400, tpot_s=1.0, is_told=True)
    binding, remedies = goals(LLAMA_70B_128K, load, wanted=Layout(2), settings=settings)
    assert binding == "KV" and "layout tensor=4" in remedies


def test_waiting_grows_without_bound_and_is_nothing_when_idle() -> None:
    waits = [wait_s(rho, 1.0, 0.0, 0.95) for rho in (0.0, 0.04, 0.5, 0.9, 0.99, 1.0)]
    assert waits == sorted(waits) and waits[1] == 0 and waits[-1] == float("inf")
    assert wait_s(0.5, 1.0, 1.0, 0.95) == 2 * wait_s(0.5, 1.0, 0.0, 0.95)


def test_cost_needs_a_price_and_a_load() -> None:
    load = Workload(4, 4096, 512, ttft_s=1.5, tpot_s=0.04, is_told=True)
    assert plan_of(LLAMA_70B, load).cost is None
    priced = make_plan(Question(sized(LLAMA_70B, replace(H100, price_per_hour=2.5)), load)).cost
    assert priced and priced.gpus == 12 and priced.per_million_output_tokens == pytest.approx(4.07, rel=0.01)


def test_what_is_not_known_is_null_and_not_zero() -> None:
    bare = replace(H100, hbm=None, flops=None, link=None, nic=None, disk=None, host_link=None)
    plan = make_plan(Question(sized(LLAMA_70B, bare), Workload(1, ttft_s=1, is_told=True)))
    one = plan.chosen_layout
    assert one and one.decode_step_ms is None and one.ttft_ms is None and one.communication_share is None
    assert plan.slo and plan.slo.feasible == "Unknown"
    assert plan.pools[0].replicas is None and plan.pools[0].load_seconds is None
    assert plan.chosen and plan.chosen.reuse == []


def test_times_across_nodes_need_the_networks_rate() -> None:
    sizing = sized(LLAMA_70B, replace(H100, nic=None))
    assert perf.decode_step(sizing, Layout(8), 1, 100) and perf.decode_step(sizing, Layout(16), 1, 100) is None
    assert perf.decode_step(sizing, Layout(8, 2), 1, 100) is None


def test_overlap_hides_expert_traffic_behind_arithmetic() -> None:
    layout = Layout(data=32, expert=True)
    own = EngineSettings(redundant_experts=32)
    plain = perf.decode_step(sized(DEEPSEEK_V3, settings=own), layout, 2048, 4096)
    overlapped = perf.decode_step(sized(DEEPSEEK_V3, settings=replace(own, dual_batch=True)), layout, 2048, 4096)
    assert plain and overlapped and overlapped.collectives_s < plain.collectives_s


def test_loading_a_prefix_wins_from_some_length_on_or_never() -> None:
    lengths = [16, 32, 64]
    assert perf.break_even(lengths, [3, 3, 3], [1, 2, 4]) == 64
    assert perf.break_even(lengths, [1, 3, 3], [2, 4, 4]) == 16
    assert perf.break_even(lengths, [9, 9, 9], [1, 2, 4]) is None


def test_copies_do_not_make_moving_the_cache_faster() -> None:
    """Every tensor rank of a latent model takes the whole cache over its own link; KV heads are shared out."""
    latent = [perf.move_s(sized(DEEPSEEK_V3), Layout(t, 2), 8192, 50e9) for t in (1, 8)]
    heads = [perf.move_s(sized(LLAMA_70B), Layout(t), 8192, 50e9) for t in (1, 8, 16)]
    assert latent[0] == latent[1]
    assert heads[0] and heads[1] and heads[0] == pytest.approx(8 * heads[1]) and heads[1] == heads[2]


def test_ranking_prefers_room_then_fewer_gpus() -> None:
    sizing, load = sized(LLAMA_70B), Workload()
    found: list[Assessment] = rank(sizing, load, [assess(sizing, Layout(t), load) for t in (1, 2, 8, 4)])
    assert [a.layout.tensor for a in found] == [4, 8, 2, 1]


@pytest.mark.parametrize("load", [None, Workload(4, 4096, 512, ttft_s=0.2, tpot_s=0.04, is_told=True)])
@pytest.mark.parametrize("config", [LLAMA_8B, DEEPSEEK_V3])
def test_the_document_is_valid_by_its_schema(config: Config, load: Workload | None) -> None:
    document = json.loads(json.dumps(plan_of(config, load, accelerators=(shipped("b200"),)).to_dict()))
    jsonschema.validate(document, json_schema())
    assert document["version"] == "sluice.plan/v1"


def test_an_unknown_architecture_gets_a_document_too() -> None:
    files = FileFacts(141_000_000_000, WeightSource.INDEX)
    plan = make_plan(Question(sized({**LLAMA_70B, "model_type": "new_thing"}, files=files)))
    jsonschema.validate(plan.to_dict(), json_schema())
    assert plan.chosen is None and {x.feasible for x in plan.layouts} == {"Unknown"}
    assert plan.model.kv_bytes_per_token is None


def test_the_schema_file_is_the_models() -> None:
    assert json.loads(SCHEMA.read_text()) == json_schema()


def test_more_stages_than_layers_of_a_window_model_are_refused_like_others() -> None:
    """Some stages have no layer, so nothing of a request; engines of SGLang look at that layout for their reserve."""
    for engine in EngineKind:
        sizing = sized(GPT_OSS_120B, settings=EngineSettings(engine=engine))
        plan = make_plan(Question(sizing, wanted=Layout(pipeline=64)))
        asked = next(x for x in plan.layouts if x.parallelism.pipeline == 64)
        assert plan.chosen is None and asked.reason == "NotDivisible"


@pytest.mark.parametrize("config", [DEEPSEEK_V3, {**DEEPSEEK_V3, "num_hidden_layers": 300}])
def test_layouts_larger_than_the_api_takes_are_not_proposed(config: Config) -> None:
    for accelerator in ("rtx4090", "h100-80g", "b200"):
        plan = plan_of(config, Workload(50, 2000, 300, ttft_s=0.2, is_told=True), accelerator=accelerator)
        assert max(x.gpus_per_instance for x in plan.layouts) <= MAX_ACCELERATORS
