"""What all parts of the running process share."""

import asyncio
import random
from dataclasses import dataclass, field
from enum import StrEnum

from sluice_sim.cli import Config
from sluice_sim.clock import Clock
from sluice_sim.engine import Engine
from sluice_sim.faults import FaultBook
from sluice_sim.ledger import Ledger
from sluice_sim.metrics import Metrics
from sluice_sim.protocol import RequestLimits


class Phase(StrEnum):
    LOADING = "loading"
    """The engine's port is closed."""
    SERVING = "serving"
    DRAINING = "draining"
    """SIGTERM came: open requests go on, new ones get 500."""
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
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """No inference request is inside its HTTP handler."""
    _handled: int = 0

    @classmethod
    def build(cls, config: Config, clock: Clock) -> "Sim":
        rng = random.Random(config.seed)
        metrics = Metrics(config)
        engine = Engine(config, clock, metrics)
        kv_tokens = engine.kv.num_blocks * engine.kv.block_size
        sim = cls(
            config=config,
            clock=clock,
            rng=rng,
            ledger=Ledger(),
            metrics=metrics,
            faults=FaultBook(rng),
            engine=engine,
            request_limits=RequestLimits(config.served_names, config.max_model_len, kv_tokens),
            started_at=clock.wall(),
        )
        sim.idle.set()
        return sim

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
