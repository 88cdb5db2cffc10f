"""How many instances a load needs, how much load an instance takes, and what stands in the way of a goal.

Prefill waits in a queue with one server per data-parallel rank and pipeline stage; decode is a batch that grows until a
step is as long as the goal allows or the KV cache is full. In a unified instance, prefills take their share of the time
from decode steps. Every predicate here is monotone in the number of instances and in the load, so searches bisect.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sluice.sizing import perf
from sluice.sizing.ledger import Layout, Ledger, Sizing, request_bytes

KV_FILL: Final = 0.9
"""Part of the KV room that is planned for; above it engines start to preempt."""
BUSY: Final = 0.9
"""Utilisation of prefill that is planned for when there is no goal for the first token."""
MAX_INSTANCES: Final = 1_000_000
MAX_RPS: Final = 1_000_000.0
PRECISION: Final = 16
"""Halvings of the range in which goodput lies: 0.002 % of its upper end."""
DEFAULT_INPUT: Final = 1024
DEFAULT_OUTPUT: Final = 256
"""Tokens of the request that times are quoted for when the user names none."""


class Binding(StrEnum):
    """What keeps a goal from being reached."""

    TTFT_COMPUTE = "TTFTCompute"
    TPOT_BANDWIDTH = "TPOTBandwidth"
    KV = "KV"
    QUEUE = "Queue"


@dataclass(frozen=True, slots=True)
class Workload:
    """A load and its goals; tokens per request, seconds. None: not told, so no goal and no count of instances."""

    rps: float | None = None
    input_tokens: int = DEFAULT_INPUT
    output_tokens: int = DEFAULT_OUTPUT
    input_p95: int | None = None
    prefix_hit: float = 0.0
    """Fraction of the input that is found in the prefix cache."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    quantile: float = 0.95
    is_told: bool = False
    """The user gave the lengths; else they are defaults."""

    @property
    def mean_context(self) -> int:
        """Tokens that a running request holds on average."""
        return self.input_tokens + self.output_tokens // 2

    @property
    def computed_input(self) -> int:
        return max(1, round(self.input_tokens * (1 - self.prefix_hit)))

    @property
    def variation(self) -> float:
        """Standard deviation over mean of the input; 1 when p95 is three times the mean, as for an exponential."""
        if self.input_p95 is None:
            return 0.0
        return min(5.0, max(0.0, (self.input_p95 / self.input_tokens - 1) / 2))


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt on one instance."""

    seconds: float
    servers: int
    """Prompts that an instance works on at the same time."""


@dataclass(frozen=True, slots=True)
class Decode:
    """The largest batch within the goals, per instance."""

    batch: int
    step_s: float


@dataclass(frozen=True, slots=True)
class Pools:
    """Instances for the load: unified, or prefill and decode."""

    unified: int | None
    prefill: int | None
    decode: int | None
    transfer_s: float | None
    """KV from prefill to decode."""


def wait_s(rho: float, service_s: float, variation: float, quantile: float) -> float:
    """Waiting time in the queue at a quantile; infinite when it never ends. Mean as in M/G/1, tail exponential."""
    if rho >= 1:
        return math.inf
    if rho <= 1 - quantile:
        return 0.0
    mean = rho * service_s * (1 + variation**2) / (2 * (1 - rho))
    return max(0.0, mean / rho * math.log(rho / (1 - quantile)))


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance of a layout under a load: what is asked again and again, made once."""

    layout: Layout
    load: Workload
    prompt: Prefill
    decode: perf.DecodeModel
    most: int
    """Largest batch that memory and the engine allow; 0: not one request."""

    def decode_within(self, budget_s: float | None) -> Decode:
        """The largest batch whose step takes at most `budget_s`; batch 0: not even one request."""

        def is_in_time(batch: int) -> bool:
            step = self.decode.step(batch)
            return step is not None and (budget_s is None or step.total_s <= budget_s)

        batch = largest(is_in_time, self.most)
        step = self.decode.step(max(1, batch))
        return Decode(batch, step.total_s if step else math.inf)

    def busy(self, instances: int, rps: float) -> float:
        """Part of the time that prefills take; over 1: they never end."""
        return rps * self.prompt.seconds / (instances * self.prompt.servers)

    def is_prompt_in_time(self, instances: int, rps: float, transfer_s: float = 0.0) -> bool:
        rho, load, seconds = self.busy(instances, rps), self.load, self.prompt.seconds
        if load.ttft_s is None:
            return rho <= BUSY
        waiting = wait_s(rho, seconds, load.variation, load.quantile)
        return rho < 1 and seconds + transfer_s + waiting <= load.ttft_s

    def is_unified_enough(self, instances: int, rps: float) -> bool:
        """Prefills take phi of an instance's time; what is left must carry the decode steps of all requests."""
        phi = self.busy(instances, rps)
        if phi >= 1 or not self.is_prompt_in_time(instances, rps):
            return False
        budget = None if self.load.tpot_s is None else self.load.tpot_s * (1 - phi)
        decode = self.decode_within(budget)
        rate = instances * decode.batch / (decode.step_s / (1 - phi))
        return decode.batch > 0 and rate >= rps * self.load.output_tokens


def instance_of(sizing: Sizing, layout: Layout, ledger: Ledger, load: Workload) -> Instance | None:
    """None: times or memory are not known."""
    need = request_bytes(sizing, layout, load.mean_context)
    prompt = perf.prefill(sizing, layout, load.computed_input)
    decode = perf.decode_model(sizing, layout, load.mean_context)
    if not need or ledger.room is None or prompt is None or decode is None or decode.step(1) is None:
        return None
    most = min(int(KV_FILL * max(0, ledger.room) / need), sizing.seqs) * layout.data
    return Instance(layout, load, Prefill(prompt.total_s, layout.data * layout.pipeline), decode, most)


def count_prefill(one: Instance, rps: float, transfer_s: float) -> int | None:
    return smallest(lambda n: one.is_prompt_in_time(n, rps, transfer_s))


def count_decode(one: Instance, rps: float) -> int | None:
    decode = one.decode_within(one.load.tpot_s)
    if decode.batch == 0:
        return None
    return max(1, math.ceil(rps * one.load.output_tokens * decode.step_s / decode.batch))


def count_pools(one: Instance, rps: float, transfer_s: float | None) -> Pools:
    """Instances for the load; a count of None: its goals can't be met so."""
    unified = smallest(lambda n: one.is_unified_enough(n, rps))
    prefill = None if transfer_s is None else count_prefill(one, rps, transfer_s)
    return Pools(unified, prefill, count_decode(one, rps), transfer_s)


def transfer_of(sizing: Sizing, layout: Layout, tokens: int) -> float | None:
    """Seconds to send one request's KV to another instance over the network cards of its GPUs, as a whole."""
    nic = sizing.accelerator.nic
    return None if nic is None else perf.move_s(sizing, layout, tokens, nic)


def goodput(one: Instance) -> float:
    """Requests per second that one unified instance takes within the goals; 0: none."""
    low, high = 0.0, min(MAX_RPS, one.prompt.servers / max(one.prompt.seconds, 1e-9))
    for _ in range(PRECISION):
        middle = (low + high) / 2
        low, high = (middle, high) if one.is_unified_enough(1, middle) else (low, middle)
    return low


def binding_of(one: Instance, replicas: int | None, pools: Pools | None) -> Binding | None:
    """What keeps the goals from being met, the hardest limit first; None: nothing."""
    load, first = one.load, one.decode.step(1)
    if load.ttft_s is not None and one.prompt.seconds > load.ttft_s:
        return Binding.TTFT_COMPUTE
    if load.tpot_s is not None and first is not None and first.total_s > load.tpot_s:
        return Binding.TPOT_BANDWIDTH
    if one.most == 0:
        return Binding.KV
    if pools is not None and (pools.unified is None or (replicas is not None and pools.unified > replicas)):
        return Binding.QUEUE
    return None


def cost_per_million(gpus: int, price_per_hour: float, rps: float, output_tokens: int) -> float:
    """Price of a million output tokens at a load that the GPUs just take."""
    return gpus * price_per_hour / 3600 / (rps * output_tokens) * 1e6


def largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` that holds, of a predicate that once false stays false; 0: none."""
    low, high = 0, max(0, most)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def smallest(holds: Callable[[int], bool]) -> int | None:
    """The smallest number from 1 that holds, of a predicate that once true stays true; None: no believable one."""
    high = 1
    while not holds(high):
        if high >= MAX_INSTANCES:
            return None
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
