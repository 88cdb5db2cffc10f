"""What one simulated engine is: the outcome of the command line, the same for both flavours."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sluice_sim.scheduler import Limits, TimeModel


class Flavor(StrEnum):
    VLLM = "vllm"
    SGLANG = "sglang"


class Role(StrEnum):
    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks of one instance, over all its nodes."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    """Experts are spread over the ranks; shown only, since the imitated model is dense."""


@dataclass(frozen=True, slots=True)
class Group:
    """This process is one of the `size` nodes that make one instance; rank 0 leads."""

    size: int
    rank: int
    host: str
    """Where the leader listens for the others."""
    port: int
    join_timeout_s: float
    death_exit_s: float
    """From the moment that the death of another rank shows to this one's exit."""


@dataclass(frozen=True, slots=True)
class NixlTransfer:
    """vLLM's NixlConnector: the decode side pulls, the prefill side keeps blocks for the time of a lease."""

    host: str
    """The side port's address, as it is told to the other side."""
    port: int
    lease_s: float
    recomputes: bool
    """A failed pull is made good by computing the prompt here; else the request fails."""
    checks_compatibility: bool
    engine_id: str | None
    """Null: a new one for each process."""


@dataclass(frozen=True, slots=True)
class RoomTransfer:
    """SGLang's bootstrap rooms: both sides have the request at once and meet at the prefill side's bootstrap port."""

    port: int
    bootstrap_timeout_s: float
    """How long the prefill side waits for the decode side."""
    waiting_timeout_s: float
    """How long the decode side waits for the KV."""
    checks_sum: bool
    """Corrupted KV is found and ends the request."""


@dataclass(frozen=True, slots=True)
class Config:
    flavor: Flavor
    role: Role
    version: str
    model: str
    served_names: tuple[str, ...]
    host: str
    port: int
    fault_port: int
    faults_file: Path
    api_keys: tuple[str, ...]
    layout: Layout
    group: Group | None
    """Null: one node is the whole instance."""
    transfer: NixlTransfer | RoomTransfer | None
    """Null: KV neither comes nor goes."""
    limits: Limits
    max_model_len: int
    """Tokens of prompt and answer together."""
    block_size: int
    num_blocks: int
    value_bytes: int
    """Bytes of a weight or KV value."""
    kv_token_bytes: int
    gpu_memory_utilization: float
    max_num_queued_reqs: int | None
    """Running and waiting requests from which on new ones are turned away; null: no limit."""
    time_model: TimeModel
    speed: float
    shutdown_timeout_s: float | None
    """Null: SIGTERM waits for open requests without bound."""
    health_timeout_s: float
    """SGLang's `/health` fails when its own request is not answered in time."""
    has_metrics: bool
    tracks_load: bool
    sends_request_ids: bool
    load_s: float
    seed: int
    metrics_version: str

    @property
    def follows(self) -> bool:
        """A rank above 0: it serves no requests."""
        return self.group is not None and self.group.rank > 0
