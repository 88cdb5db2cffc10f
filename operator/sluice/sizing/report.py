"""The document `sluice.plan/v1`: what `kubectl sluice plan -o json` prints. Its JSON schema is made from these models.

Keys are added, never removed or renamed. null is unknown. Sizes are bytes, times milliseconds unless the name says
otherwise. `status.layout[]` of a service has the same names.
"""

from typing import Any, Final, Literal

from pydantic import Field
from pydantic.json_schema import models_json_schema

from sluice.api.base import ApiModel

VERSION: Final = "sluice.plan/v1"
Truth = Literal["True", "False", "Unknown"]


class ModelReport(ApiModel):
    architecture: str
    """As the config names it."""
    parameters: int | None
    active_parameters: int | None
    """That one token passes through."""
    weight_bytes: int
    """That the engine loads."""
    weight_source: str
    """`safetensors headers`, `safetensors index` or `config`."""
    kv_bytes_per_token: int | None
    """Of the whole model, window layers counted in full."""


class AcceleratorReport(ApiModel):
    name: str
    memory_bytes: int
    calibration: Literal["fitted", "default"]
    """`default`: efficiencies taken over from the H100."""


class ParallelismReport(ApiModel):
    tensor: int
    pipeline: int
    data: int
    expert: bool


class LedgerReport(ApiModel):
    """Bytes on the fullest GPU; usable = weights + activations + runtime + graphs + kv.

    SGLang reserves one sum outside `usable` for activations, runtime and graphs, which are 0 then.
    """

    usable: int
    weights: int
    activations: int | None
    runtime: int
    graphs: int
    kv: int | None
    """Room for the KV cache; negative: so much is missing."""


class WarningReport(ApiModel):
    code: str
    message: str
    severity: Literal["Hint", "Warning"]


class LayoutReport(ApiModel):
    parallelism: ParallelismReport
    gpus_per_instance: int
    pods_per_instance: int
    """One per node."""
    ledger: LedgerReport | None
    weights_per_gpu: int | None = Field(alias="weightsPerGPU")
    kv_per_gpu: int | None = Field(alias="kvPerGPU")
    kv_tokens: int | None
    """That the KV cache of one data-parallel rank holds."""
    concurrency_tokens: int | None
    """Length of the requests that `maxConcurrency` counts."""
    max_concurrency: float | None
    max_context: int | None
    """Longest single request, tokens."""
    decode_step_ms: float | None
    """Of a batch of 64; null also when so many requests don't fit."""
    ttft_ms: float | None
    """Prefill of a prompt of `concurrencyTokens`, without waiting."""
    communication_share: float | None
    """Of the decode step: collectives relative to the rest."""
    feasible: Truth
    reason: str
    message: str
    is_comfortable: bool
    """Room for KV is at least a tenth of the usable memory, eight mean requests and the longest one."""
    warnings: list[WarningReport]


class ReuseReport(ApiModel):
    """A cached prefix that lies elsewhere: is loading it faster than computing it anew?"""

    tier: str
    """`HostMemory`, `Disk` or `Network`."""
    prefix_tokens: int
    load_ms: float
    compute_ms: float
    break_even_tokens: int | None
    """From this length on loading is faster; null: never."""


class ChosenReport(ApiModel):
    parallelism: ParallelismReport
    is_wanted: bool
    """It is what the object asks for, not what we would choose."""
    instances: int | None
    """Unified ones for the load; null without a load, or when no number meets its goals."""
    reasons: list[str]
    pd_transfer_ms: float | None
    """Sending a prompt's KV from prefill to decode, as a whole."""
    reuse: list[ReuseReport]


class PoolReport(ApiModel):
    name: str
    role: Literal["Unified", "Prefill", "Decode"]
    replicas: int | None
    """Instances for the load; null without a load."""
    prefill_tokens_per_second: float | None
    max_batch: int | None
    kv_tokens: int | None
    load_seconds: float | None
    """Reading the weights of one node from its disk."""


class SloReport(ApiModel):
    feasible: Truth
    binding: str | None
    """`TTFTCompute`, `TPOTBandwidth`, `KV` or `Queue`."""
    remedies: list[str]


class CostReport(ApiModel):
    gpus: int
    requests_per_second: float
    """That they take within the goals."""
    per_million_output_tokens: float
    """In the currency of the profile's price."""


class Plan(ApiModel):
    """A plan: how a model fits an accelerator, and how fast it will be."""

    version: Literal["sluice.plan/v1"] = VERSION
    model: ModelReport
    accelerator: AcceleratorReport
    context: int | None
    """Longest request that the engine must hold to start, tokens."""
    layouts: list[LayoutReport]
    """Best first."""
    chosen: ChosenReport | None
    """null: no layout fits."""
    pools: list[PoolReport]
    slo: SloReport | None
    """null: no goals were given."""
    cost: CostReport | None
    warnings: list[WarningReport]
    """Of the whole service and of the chosen layout."""
    assumptions: list[str]

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)

    @property
    def chosen_layout(self) -> LayoutReport | None:
        chosen = self.chosen
        return next((x for x in self.layouts if chosen and x.parallelism == chosen.parallelism), None)


def json_schema() -> dict[str, Any]:
    """The JSON schema of the document."""
    _, schema = models_json_schema([(Plan, "serialization")], ref_template="#/$defs/{model}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": VERSION,
        "$ref": "#/$defs/Plan",
        **schema,
    }
