"""What all parts of the running process share."""

import asyncio
import random
from dataclasses import dataclass, field, replace
from enum import StrEnum

from sluice_sim.clock import Clock
from sluice_sim.config import Config, Flavor, NixlTransfer, Role
from sluice_sim.engine import Engine
from sluice_sim.faults import FaultBook
from sluice_sim.ledger import Ledger
from sluice_sim.metrics import Gauges, Metrics
from sluice_sim.nixl_transfer import Nixl
from sluice_sim.protocol import RequestLimits
from sluice_sim.room_decode import RoomDecode
from sluice_sim.room_prefill import RoomPrefill
from sluice_sim.sglang_metrics import SglangMetrics
from sluice_sim.transfer import Transfer
from sluice_sim.vllm_metrics import VllmMetrics


class Phase(StrEnum):
    LOADING = "loading"
    """Nothing can be served yet."""
    SERVING = "serving"
    FOLLOWING = "following"
    """A rank above 0, loaded: its leader serves."""
    DRAINING = "draining"
    """SIGTERM came: open requests go on; what becomes of new ones depends on the flavour."""
    DEAD = "dead"
    """The model crashed; the process ends soon."""
    STOPPED = "stopped"
    """The port is closed for good."""


@dataclass(slots=True)
class Sim:
    config: Config
    clock: Clock
    rng: random.Random
    ledger: Ledger
    metrics: Metrics
    faults: FaultBook
    engine: Engine
    transfer: Transfer | None
    request_limits: RequestLimits
    started_at: float
    """Wall clock, seconds since the epoch."""
    phase: Phase = Phase.LOADING
    port: int | None = None
    """The engine's real port, once open."""
    faults_file_error: str = ""
    """Why the faults file, as it is now, is not in force."""
    memory_mb: float = 0.0
    """Held by `memoryGrow`."""
    joined: list[int] = field(default_factory=list)
    """Ranks above 0 that are alive, as the leader sees it."""
    is_broken: bool = False
    """A rank of the group is gone, and the next request will show it: the engine dies of it."""
    is_stalled: bool = False
    """A rank of the group is alive and does not answer: no step ends."""
    is_unhealthy: bool = False
    """SGLang: its own health request failed and none succeeded since."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """No inference request is inside its HTTP handler."""
    _handled: int = 0

    @classmethod
    def build(cls, config: Config, clock: Clock) -> "Sim":
        rng = random.Random(config.seed)
        metrics: Metrics = SglangMetrics(config) if config.flavor is Flavor.SGLANG else VllmMetrics(config)
        engine = Engine(config, clock, metrics)
        faults = FaultBook(rng)
        kv_tokens = engine.kv.num_blocks * engine.kv.block_size
        sim = cls(
            config=config,
            clock=clock,
            rng=rng,
            ledger=Ledger(),
            metrics=metrics,
            faults=faults,
            engine=engine,
            transfer=_build_transfer(config, engine, metrics, faults, clock),
            request_limits=RequestLimits(config.served_names, config.max_model_len, kv_tokens),
            started_at=clock.wall(),
        )
        sim.idle.set()
        return sim

    @property
    def gauges(self) -> Gauges:
        before, after = (0, 0) if self.transfer is None else self.transfer.queues()
        return replace(self.engine.gauges, bootstrapping=before, sending=after)

    @property
    def handled(self) -> int:
        """Inference requests inside their HTTP handlers: what `/load` counts."""
        return self._handled

    def request_entered(self) -> None:
        self._handled += 1
        self.idle.clear()

    def request_left(self) -> None:
        self._handled -= 1
        if self._handled == 0:
            self.idle.set()


def _build_transfer(
    config: Config, engine: Engine, metrics: Metrics, faults: FaultBook, clock: Clock
) -> Transfer | None:
    settings = config.transfer
    if settings is None or config.follows:
        return None
    if isinstance(settings, NixlTransfer):
        return Nixl(config, settings, engine, metrics, faults, clock)
    if config.role is Role.PREFILL:
        return RoomPrefill(config, settings, engine, metrics, faults, clock)
    return RoomDecode(config, settings, metrics, faults, clock)
