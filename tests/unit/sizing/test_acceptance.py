"""Every worked number, public config, engine log and goal that sizing is accepted by; one row each.

Tolerance is relative. Where the source of a number ignores overheads (the worked numbers do), the row sets them to
nothing. `e2e/bench/sizing.py` counts the rows that fail.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from sluice.sizing import perf
from sluice.sizing.hardware import GB, GIB, Accelerator
from sluice.sizing.layout import Assessment, assess, is_low_gain, rank
from sluice.sizing.ledger import Layout, Ledger, activation_bytes, concurrency, keep, request_bytes
from sluice.sizing.limits import judge
from sluice.sizing.planning import Question, make_plan
from sluice.sizing.remedies import assess_all
from sluice.sizing.settings import EngineSettings
from sluice.sizing.weights import FileFacts, Part, WeightSource, weigh
from sluice.sizing.workload import Workload, cost_per_million, count_decode, count_prefill, transfer_of, wait_s
from tests.unit.sizing.configs import (
    DEEPSEEK_V3,
    H100,
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_70B_128K,
    MIXTRAL,
    QWEN3_30B,
    QWEN3_235B,
    dense,
    ledger,
    sized,
)

PLAIN = replace(
    H100,
    calibration=replace(
        H100.calibration,
        decode_eff=1.0,
        kv_eff=1.0,
        prefill_eff=0.5,
        decode_link_eff=1.0,
        prefill_link_eff=1.0,
        decode_hop_s=0.0,
        prefill_hop_s=0.0,
        net_hop_s=0.0,
        floor_s=0.0,
        step_s=0.0,
        sequence_s=0.0,
        prefill_s=0.0,
    ),
)
"""No latencies, and links at their full rate."""
USABLE = 72e9
KV_TOKEN = 327_680
FLOPS_8 = 8 * 989e12 * 0.5
W70 = 2 * 64 * 128
"""Attention width of the 70B model."""
LOAD = Workload(4, 4096, 512, ttft_s=1.5, tpot_s=0.04, is_told=True)


def reduce_s(accelerator: Accelerator) -> float:
    wire = perf.wire_between(accelerator, 8, prefill=False)
    assert wire
    return 160 * perf.all_reduce_s(64 * 8192 * 2, 8, wire)


def round_70b(tensor: int, total: float = 140e9) -> Ledger:
    """70e9 parameters in so many bytes, on GPUs of which 72 GB are usable."""
    files = FileFacts(int(total), WeightSource.HEADERS)
    return keep(sized(LLAMA_70B, replace(H100, memory_bytes=int(USABLE / 0.92)), files=files), Layout(tensor))


def round_room(tensor: int, total: float = 140e9) -> float:
    """Without overheads."""
    found = round_70b(tensor, total)
    return (found.usable - found.weights) / GB


def bound_ms(tensor: int) -> float:
    found = perf.batch_one_bound(round_70b(tensor).weights, H100)
    assert found
    return found * 1e3


def flops(tokens: int, parameters: float = 70e9) -> float:
    return perf.prefill_flops(parameters, tokens, W70, 80)


def per_gpu(ranks: int, redundant: int) -> float:
    shape = sized(DEEPSEEK_V3).shape
    assert shape and shape.experts
    settings = EngineSettings(redundant_experts=redundant)
    layout = Layout(data=ranks, expert=True)
    assert judge(sized(DEEPSEEK_V3, settings=settings), layout).feasible
    return (shape.experts.count + redundant) / layout.expert_ranks


def weights(config: dict[str, object], layout: Layout, redundant: int = 0) -> float:
    return ledger(config, layout, redundant_experts=redundant).weights / GB


def room(config: dict[str, object], layout: Layout) -> float:
    found = ledger(config, layout).room
    assert found is not None
    return found / GB


def tokens(config: dict[str, object], layout: Layout) -> float:
    found = ledger(config, layout).tokens
    assert found is not None
    return found


def decode_ms(layout: Layout, batch: int, accelerator: Accelerator = H100) -> float:
    step = perf.decode_step(sized(LLAMA_70B, accelerator), layout, batch, 1152)
    assert step
    return step.total_s * 1e3


def prefill_ms(layout: Layout, prompt: int) -> float:
    step = perf.prefill(sized(LLAMA_70B), layout, prompt)
    assert step
    return step.total_s * 1e3


def seventy(load: Workload = LOAD) -> Assessment:
    return assess(sized(LLAMA_70B), Layout(4), load)


def pools(name: str) -> float:
    found = seventy().pools
    assert found
    value = getattr(found, name)
    assert isinstance(value, int)
    return value


def ttft_of_two() -> float:
    """Time to the first token, p95, with two prefill instances."""
    one, moved = seventy().instance, transfer_of(sized(LLAMA_70B), Layout(4), LOAD.input_tokens)
    assert one and moved and LOAD.rps and count_prefill(one, LOAD.rps, moved) == 2
    seconds = one.prompt.seconds
    return seconds + moved + wait_s(one.busy(2, LOAD.rps), seconds, 0.0, 0.95)


def best_batch() -> float:
    one = seventy().instance
    assert one and count_decode(one, 4) == 1
    return one.decode_within(LOAD.tpot_s).batch


def smallest_comfortable(config: dict[str, object]) -> float:
    sizing, load = sized(config), Workload()
    best = rank(sizing, load, assess_all(sizing, load, None))[0]
    assert best.is_comfortable
    return best.layout.gpus


def parameters(config: dict[str, object]) -> float:
    found = sized(config).weights.parameters
    assert found
    return found


def active(config: dict[str, object]) -> float:
    found = sized(config).weights.active
    assert found
    return found


def kv_per_token(config: dict[str, object], tensor: int = 1) -> float:
    found = ledger(config, Layout(tensor)).kv_per_token
    assert found
    return found


def held_at(tensor: int) -> float:
    sizing = sized(LLAMA_70B)
    found = concurrency(sizing, Layout(tensor), keep(sizing, Layout(tensor)), 8192)
    assert found
    return found


def gib(config: dict[str, object], tensor: int) -> float:
    return ledger(config, Layout(tensor)).weights / GIB


def activations(tensor: int = 1, config: dict[str, object] = LLAMA_70B, **settings: int) -> float:
    found = activation_bytes(sized(config, settings=EngineSettings(**settings)), tensor)  # type: ignore[arg-type]  # ints
    assert found
    return found


def logged_tokens() -> float:
    """vllm-project/vllm#21348: 16.46 GiB of KV cache on each of eight GPUs."""
    found = ledger(QWEN3_235B, Layout(8), kv_cache_bytes=int(16.46 * GIB)).tokens
    assert found
    return found


def fp16_gb(count: int) -> float:
    return sized(LLAMA_8B).weights.bytes_of(Part(plain=count)) / GB


def mha_gb(requests: int, length: int) -> float:
    config = dense("llama", 60, 8000, 50, 50, 32000, 32000, 8192, head_dim=160)
    need = request_bytes(sized(config), Layout(), length)
    assert need
    return requests * need / GB


def layer_ms(gpus: int) -> float:
    return perf.Step(0.010 / gpus, 0.002).total_s * 1e3


def step_share(gpus: int) -> float:
    return perf.Step(0.010 / gpus, 0.002).communication_share


@dataclass(frozen=True)
class Row:
    name: str
    got: Callable[[], float]
    wanted: float
    tolerance: float = 0.01


ROWS = [
    # Worked numbers: 70B rounded, BF16, H100, no overheads.
    Row("70B tp 2: weights", lambda: round_70b(2).weights / GB, 70),
    Row("70B tp 4: weights", lambda: round_70b(4).weights / GB, 35),
    Row("70B tp 8: weights", lambda: round_70b(8).weights / GB, 17.5),
    Row("70B tp 2: room", lambda: round_room(2), 2),
    Row("70B tp 4: room", lambda: round_room(4), 37),
    Row("70B tp 8: room", lambda: round_room(8), 54.5),
    Row("70B tp 2: batch-1 bound ms", lambda: bound_ms(2), 20.9),
    Row("70B tp 4: batch-1 bound ms", lambda: bound_ms(4), 10.4),
    Row("70B tp 8: batch-1 bound ms", lambda: bound_ms(8), 5.2),
    Row("70B FP8 tp 2: weights", lambda: round_70b(2, 70e9).weights / GB, 35),
    Row("70B FP8 tp 2: room", lambda: round_room(2, 70e9), 37),
    Row("tp 8, batch 64: message MiB", lambda: 64 * 8192 * 2 / (1 << 20), 1),
    Row("tp 8, batch 64: MB per GPU", lambda: 160 * perf.all_reduce_bytes(64 * 8192 * 2, 8) / 1e6, 293.6),
    Row("tp 8, batch 64: ms at 450 GB/s", lambda: reduce_s(PLAIN) * 1e3, 0.652),
    Row("tp 8, batch 64: ms at 50 GB/s", lambda: reduce_s(replace(PLAIN, domain=1, gpus_per_node=1)) * 1e3, 5.87),
    Row("70B: KV KiB per token", lambda: kv_per_token(LLAMA_70B) / 1024, 320, 0),
    Row("70B: KV GB of 8192 tokens", lambda: (request_bytes(sized(LLAMA_70B), Layout(), 8192) or 0) / GB, 2.684),
    Row("prefill 8192: linear FLOPs", lambda: perf.prefill_flops(70e9, 8192, 0, 80), 1.147e15),
    Row("prefill 8192: attention FLOPs", lambda: perf.prefill_flops(0, 8192, W70, 80), 0.088e15),
    Row("prefill 8192: s on 8 GPUs at 50 %", lambda: flops(8192) / FLOPS_8, 0.312),
    Row("transfer, 1 NIC: ms", lambda: perf.transfer_s(8192 * KV_TOKEN, 50e9) * 1e3, 53.7),
    Row("transfer, 8 NICs: ms", lambda: perf.transfer_s(8192 * KV_TOKEN, 400e9) * 1e3, 6.71),
    Row("transfer, 1 NIC: of prefill", lambda: perf.transfer_s(8192 * KV_TOKEN, 50e9) / (flops(8192) / FLOPS_8), 0.172),
    Row("transfer, 8 NICs: of prefill", lambda: perf.transfer_s(8192 * KV_TOKEN, 400e9) / 0.312, 0.0215),
    Row("transfer, FP8: ms", lambda: perf.transfer_s(8192 * KV_TOKEN / 2, 50e9) * 1e3, 53.7 / 2),
    Row("load 8192 at 50 GB/s: ms", lambda: perf.transfer_s(8192 * KV_TOKEN, 50e9) * 1e3, 53.7),
    Row("recompute 8192: ms", lambda: flops(8192) / FLOPS_8 * 1e3, 312),
    Row("load 500 at 50 GB/s: ms", lambda: perf.transfer_s(500 * KV_TOKEN, 50e9) * 1e3, 3.28),
    Row("recompute 500: ms", lambda: flops(500) / FLOPS_8 * 1e3, 17.8),
    Row("EP dispatch FP8: B", lambda: perf.dispatch_bytes(8, 7168, 1), 57_344, 0),
    Row("EP combine BF16: B", lambda: perf.dispatch_bytes(8, 7168, 2), 114_688, 0),
    Row("256 experts on 32 ranks", lambda: per_gpu(32, 0), 8, 0),
    Row("256 + 32 experts on EP32/DP32", lambda: per_gpu(32, 32), 9, 0),
    Row("256 + 32 experts on EP144/DP144", lambda: per_gpu(144, 32), 2, 0),
    Row("EP32: nodes", lambda: Layout(data=32, expert=True).gpus / 8, 4, 0),
    Row("EP144: nodes", lambda: Layout(data=144, expert=True).gpus / 8, 18, 0),
    Row("DeepSeek-V3 FP8: GB", lambda: sized(DEEPSEEK_V3).weights.total_bytes / GB, 671, 0.02),
    Row("FP16 10B: GB", lambda: fp16_gb(10**10), 20),
    Row("FP16 100B: GB", lambda: fp16_gb(10**11), 200),
    Row("60 layers MHA, 32 x 2048: GB", lambda: mha_gb(32, 2048), 125.8),
    Row("60 layers MHA, static 32 x 8192: GB", lambda: mha_gb(32, 8192), 503),
    Row("layer 10 + 2 ms: 4 GPUs", lambda: layer_ms(4), 4.5),
    Row("layer 10 + 2 ms: 8 GPUs", lambda: layer_ms(8), 3.25),
    Row("layer 10 + 2 ms: gain", lambda: layer_ms(4) / layer_ms(8), 1.38),
    Row("layer 10 + 2 ms: share on 4", lambda: step_share(4), 0.8),
    Row("layer 10 + 2 ms: share on 8", lambda: step_share(8), 1.6),
    Row(
        "unchunked 131072 prefill, 70B tp 1: A GB",
        lambda: activations(config=LLAMA_70B_128K, max_batched_tokens=131_072) / GB,
        26.8,
    ),
    # Public configs, engine defaults, 79.22 GiB.
    Row("usable GB", lambda: ledger(LLAMA_8B, Layout()).usable / GB, 78.3),
    Row("8B: parameters", lambda: parameters(LLAMA_8B), 8_030_261_248, 0),
    Row("8B: KV B per token", lambda: kv_per_token(LLAMA_8B), 131_072, 0),
    Row("8B: smallest comfortable GPUs", lambda: smallest_comfortable(LLAMA_8B), 1, 0),
    Row("8B: W", lambda: weights(LLAMA_8B, Layout()), 16.1),
    Row("8B: K", lambda: room(LLAMA_8B, Layout()), 58.7),
    Row("8B: tokens", lambda: tokens(LLAMA_8B, Layout()), 447_000),
    Row("70B: parameters", lambda: parameters(LLAMA_70B), 70_553_706_496, 0),
    Row("70B: KV B per token", lambda: kv_per_token(LLAMA_70B), 327_680, 0),
    Row("70B: smallest comfortable GPUs", lambda: smallest_comfortable(LLAMA_70B), 4, 0),
    Row("70B tp 4: W", lambda: weights(LLAMA_70B, Layout(4)), 35.3),
    Row("70B tp 4: K", lambda: room(LLAMA_70B, Layout(4)), 39.2),
    Row("70B tp 4: tokens", lambda: tokens(LLAMA_70B, Layout(4)), 478_000),
    Row("70B tp 2: W", lambda: weights(LLAMA_70B, Layout(2)), 70.6),
    Row("70B tp 2: K", lambda: room(LLAMA_70B, Layout(2)), 3.9),
    Row("70B tp 2: tokens", lambda: tokens(LLAMA_70B, Layout(2)), 23_616, 0),
    Row("70B tp 4: requests of 8192", lambda: held_at(4), 58.3),
    Row("70B tp 8: requests of 8192", lambda: held_at(8), 169.2),
    Row("70B tp 2: requests of 8192", lambda: held_at(2), 2.9),
    Row("Mixtral: parameters", lambda: parameters(MIXTRAL), 46_702_792_704, 0),
    Row("Mixtral: active", lambda: active(MIXTRAL), 12.88e9),
    Row("Mixtral: KV B per token", lambda: kv_per_token(MIXTRAL), 131_072, 0),
    Row("Mixtral: smallest comfortable GPUs", lambda: smallest_comfortable(MIXTRAL), 2, 0),
    Row("Mixtral tp 2: W", lambda: weights(MIXTRAL, Layout(2)), 46.7),
    Row("Mixtral tp 2: K", lambda: room(MIXTRAL, Layout(2)), 29.4),
    Row("Mixtral tp 2: tokens", lambda: tokens(MIXTRAL, Layout(2)), 448_000),
    Row("DeepSeek-V3: parameters", lambda: parameters(DEEPSEEK_V3), 671_026_404_352, 0),
    Row("DeepSeek-V3: active", lambda: active(DEEPSEEK_V3), 37.55e9),
    Row("DeepSeek-V3: KV B per token", lambda: kv_per_token(DEEPSEEK_V3), 70_272, 0),
    Row("DeepSeek-V3: KV B per token at tp 8", lambda: kv_per_token(DEEPSEEK_V3, 8), 70_272, 0),
    Row(
        "DeepSeek-V3: file with MTP GB",
        lambda: sized(DEEPSEEK_V3, settings=EngineSettings(loads_next=True)).weights.total_bytes / GB,
        688.5,
    ),
    Row("DeepSeek-V3: smallest comfortable GPUs", lambda: smallest_comfortable(DEEPSEEK_V3), 16, 0),
    Row("DeepSeek-V3 tp 8: W", lambda: weights(DEEPSEEK_V3, Layout(8)), 85.1),
    Row("DeepSeek-V3 tp 8: feasible", lambda: float(judge(sized(DEEPSEEK_V3), Layout(8)).feasible is True), 0, 0),
    Row("DeepSeek-V3 tp 8 x pp 2: W", lambda: weights(DEEPSEEK_V3, Layout(8, 2)), 43.9),
    Row("DeepSeek-V3 tp 8 x pp 2: K", lambda: room(DEEPSEEK_V3, Layout(8, 2)), 30.5),
    Row("DeepSeek-V3 ep 16: W", lambda: weights(DEEPSEEK_V3, Layout(data=16, expert=True)), 60.0),
    Row("DeepSeek-V3 ep 16: K", lambda: room(DEEPSEEK_V3, Layout(data=16, expert=True)), 14.5),
    Row("DeepSeek-V3 EP32+32: W", lambda: weights(DEEPSEEK_V3, Layout(data=32, expert=True), 32), 42.1),
    Row("DeepSeek-V3 EP144+32: W", lambda: weights(DEEPSEEK_V3, Layout(data=144, expert=True), 32), 24.2),
    # Logs of engines: ours against theirs; weights within 2 %, memory within 10 %.
    Row("log 8B: W GiB (vllm-project/vllm#10511)", lambda: gib(LLAMA_8B, 1), 14.96, 0.02),
    Row("log 8B tp 2: W GiB", lambda: gib(LLAMA_8B, 2), 7.48, 0.02),
    Row(
        "log 8B: A GiB, vLLM 0.6",
        lambda: activations(config=LLAMA_8B, max_seqs=256, max_batched_tokens=8192, logit_bytes=40) / GIB,
        1.26,
        0.10,
    ),
    Row("log Qwen3-30B-A3B tp 4: W GiB (#17469)", lambda: gib(QWEN3_30B, 4), 14.25, 0.02),
    Row("log DeepSeek-R1 tp 8: W GiB (HabanaAI/vllm-fork#809)", lambda: gib(DEEPSEEK_V3, 8), 79.4, 0.02),
    Row("log Qwen3-235B: KV tokens (#21348)", logged_tokens, 367_404, 0.001),
    # Goals: H100 times within 10 %.
    Row("70B tp 8, batch 64: step ms", lambda: decode_ms(Layout(8), 64), 12.6, 0.10),
    Row("70B tp 4, batch 64: step ms", lambda: decode_ms(Layout(4), 64), 18.9, 0.10),
    Row("70B tp 4 -> 8, batch 1: gain", lambda: decode_ms(Layout(4), 1) / decode_ms(Layout(8), 1), 1.54),
    Row("70B tp 4 -> 8, batch 64: gain", lambda: decode_ms(Layout(4), 64) / decode_ms(Layout(8), 64), 1.50),
    Row(
        "70B tp 16 over two nodes is slower", lambda: float(decode_ms(Layout(16), 64) > decode_ms(Layout(8), 64)), 1, 0
    ),
    Row("70B tp 4, prompt 8192: ms", lambda: prefill_ms(Layout(4), 8192), 543, 0.10),
    Row("70B tp 8, prompt 8192: ms", lambda: prefill_ms(Layout(8), 8192), 344, 0.10),
    Row("pools: prefill of 4096 ms", lambda: prefill_ms(Layout(4), 4096), 265),
    Row("pools: P", lambda: pools("prefill"), 2, 0),
    Row("pools: TTFT p95 s", ttft_of_two, 0.94),
    Row("pools: B", best_batch, 98, 0.02),
    Row("pools: D", lambda: pools("decode"), 1, 0),
    Row("pools: unified", lambda: pools("unified"), 3, 0),
    Row("pools: equal GPUs", lambda: pools("prefill") + pools("decode") - pools("unified"), 0, 0),
    Row("cost of 4 rps, 512 out, 12 GPUs at 2.50", lambda: cost_per_million(12, 2.5, 4, 512), 4.07),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_value(row: Row) -> None:
    assert row.got() == pytest.approx(row.wanted, rel=row.tolerance, abs=0)


def test_names_of_rows_are_told_apart() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_two_milliseconds_of_twelve_are_a_warning_of_both_kinds() -> None:
    assert step_share(4) > 0.30 and is_low_gain(layer_ms(4) / layer_ms(8))


def test_pools_that_take_equal_gpus_are_told_to_be_too_early() -> None:
    plan = make_plan(Question(sized(LLAMA_70B), LOAD, is_disaggregated=True))
    assert plan.chosen and any("PDTooEarly" in reason for reason in plan.chosen.reasons)
    assert "PDTooEarly" in [w.code for w in plan.warnings]
    assert [(p.role, p.replicas) for p in plan.pools] == [("Unified", 3)]


def test_files_that_hold_the_prediction_layer_count_without_it() -> None:
    sizing = sized(DEEPSEEK_V3, files=FileFacts(688_586_727_753, WeightSource.INDEX))
    assert sizing.weights.total_bytes / GB == pytest.approx(673.2, rel=0.01)
    assert not any("WeightsMismatch" in note for note in sizing.weights.notes)
    assert weigh(sizing.model, None).source is WeightSource.CONFIG
