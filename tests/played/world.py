"""What played agents, engines and routers are and say: behaviour without I/O, driven by a clock that is passed in.

A *played* pod is an API object without a kubelet; this is the program inside. Every engine pod has a `PlayedEngine`,
every router pod a `PlayedRouter`; tests change their attributes (hang, silence, in-flight) and the next question sees
it. The HTTP server (`server`) and the simulation ask the same objects.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from sluice.api.agent import AgentState, EnginePhase, SelfTest
from sluice.api.router import RoutedWorker, RouterState, Worker, WorkerList, WorkerStatus


class Mood(StrEnum):
    """How an engine behaves once it has loaded."""

    WELL = "Well"
    SUSPECT = "Suspect"
    HUNG = "Hung"
    SELF_TEST_FAILS = "SelfTestFails"
    """Stays Verifying: lists the model, answers no inference."""
    UNAUTHORIZED = "Unauthorized"
    """The self-test is answered 401."""


_PHASES = {
    Mood.WELL: EnginePhase.READY,
    Mood.SUSPECT: EnginePhase.SUSPECT,
    Mood.HUNG: EnginePhase.HUNG,
    Mood.SELF_TEST_FAILS: EnginePhase.VERIFYING,
    Mood.UNAUTHORIZED: EnginePhase.VERIFYING,
}


@dataclass(eq=False, slots=True)
class PlayedEngine:
    """Engine and agent of one pod. Times are seconds since the epoch."""

    instance: str
    uid: str
    ip: str
    started_at: float
    load_s: float = 0.0
    verify_s: float = 0.0
    mood: Mood = Mood.WELL
    in_flight: int = 0
    silent: bool = False
    """The agent does not answer."""
    draining: bool = False
    run: int = 0
    """Counts the engine processes of this pod: a restarted container is another run."""
    seq: int = 1
    _last: tuple[object, ...] = ()
    _phase_since: float = 0.0
    _answered_run: int = -1
    """The last run that answered a self-test: that run is never Verifying again."""

    @property
    def engine_id(self) -> str:
        return f"{self.uid}/{self.run}"

    def restart(self, now: float) -> None:
        """The engine's container starts anew: it loads again and is another run."""
        self.run += 1
        self.started_at = now
        self.in_flight = 0
        self.draining = False

    def phase(self, now: float) -> EnginePhase:
        if now < self.started_at + self.load_s:
            return EnginePhase.LOADING
        if self.draining:
            return EnginePhase.DRAINING
        if now < self.started_at + self.load_s + self.verify_s:
            return EnginePhase.VERIFYING
        if self._answered_run == self.run and self.mood in (Mood.SELF_TEST_FAILS, Mood.UNAUTHORIZED):
            return EnginePhase.SUSPECT if self.mood is Mood.SELF_TEST_FAILS else EnginePhase.READY
        return _PHASES[self.mood]

    def next_change(self, now: float) -> float | None:
        """When the phase changes by itself next."""
        loaded = self.started_at + self.load_s
        return next((t for t in (loaded, loaded + self.verify_s) if t > now), None)

    def state(self, now: float) -> AgentState:
        phase = self.phase(now)
        if phase is EnginePhase.READY:
            self._answered_run = self.run
        observed = (phase, self.mood, bool(self.in_flight), self.run)
        if observed != self._last:
            self.seq += bool(self._last)
            self._last = observed
            self._phase_since = now
        passed = {EnginePhase.READY: True, EnginePhase.DRAINING: True, EnginePhase.LOADING: None}.get(phase, False)
        reason = "SelfTestUnauthorized" if self.mood is Mood.UNAUTHORIZED else "SelfTestFailed"
        answered = now if phase in (EnginePhase.READY, EnginePhase.DRAINING) else None
        return AgentState(
            said_at=now,
            seq=self.seq,
            instance=self.instance,
            engine="Simulated",
            version="played",
            engine_id=None if phase is EnginePhase.LOADING else self.engine_id,
            phase=phase,
            reason="" if passed is not False else reason,
            message="" if passed is not False else "played",
            phase_since=self._phase_since,
            started_at=self.started_at,
            self_test=SelfTest(
                passed=passed, answered_at=answered, latency_ms=5.0, reason="" if passed is not False else reason
            ),
            progress_at=now,
            in_flight=None if phase is EnginePhase.LOADING else self.in_flight,
            running=self.in_flight,
            waiting=0,
            kv_utilization=0.0,
        )


@dataclass(eq=False, slots=True)
class PlayedRouter:
    """Router and sidecar of one pod."""

    name: str
    uid: str
    ip: str
    wanted: WorkerList | None = None
    silent: bool = False
    puts: int = 0
    tokens: list[str] = field(default_factory=list)
    """Authorization headers of the PUTs."""

    wanted_at: float | None = None

    def put(self, wanted: WorkerList, now: float) -> None:
        self.wanted, self.wanted_at = wanted, now
        self.puts += 1


@dataclass(eq=False)
class World:
    """All played pods, by UID and by IP."""

    clock: Callable[[], float] = time.time
    load_s: float = 0.0
    """Loading time of engines that start from now on."""
    verify_s: float = 0.0
    lock: threading.RLock = field(default_factory=threading.RLock)
    engines: dict[str, PlayedEngine] = field(default_factory=dict)
    routers: dict[str, PlayedRouter] = field(default_factory=dict)
    on_change: list[Callable[[], None]] = field(default_factory=list)
    """Called after a pod was added or `changed()`; wakes held requests."""

    def __post_init__(self) -> None:
        self._by_ip: dict[str, PlayedEngine | PlayedRouter] = {}
        self._ips = _addresses()

    def changed(self) -> None:
        """Tell waiting requests to look again; call after changing an engine's attributes."""
        for call in list(self.on_change):
            call()

    def new_ip(self) -> str:
        return next(self._ips)

    def start_engine(self, instance: str, uid: str, ip: str) -> PlayedEngine:
        with self.lock:
            engine = PlayedEngine(instance, uid, ip, self.clock(), self.load_s, self.verify_s)
            self.engines[uid] = engine
            self._by_ip[ip] = engine
        self.changed()
        return engine

    def start_router(self, name: str, uid: str, ip: str) -> PlayedRouter:
        with self.lock:
            router = PlayedRouter(name, uid, ip)
            self.routers[uid] = router
            self._by_ip[ip] = router
        self.changed()
        return router

    def stop(self, uid: str) -> None:
        """The pod is gone: nobody answers at its address any more."""
        with self.lock:
            gone = self.engines.pop(uid, None) or self.routers.pop(uid, None)
            if gone is not None:
                self._by_ip.pop(gone.ip, None)
        self.changed()

    def at(self, ip: str) -> PlayedEngine | PlayedRouter | None:
        with self.lock:
            return self._by_ip.get(ip)

    def engine_of(self, instance: str) -> PlayedEngine:
        """Raises: KeyError, no such instance is played now."""
        with self.lock:
            for engine in self.engines.values():
                if engine.instance == instance:
                    return engine
        raise KeyError(f"no played engine {instance}; there are {[e.instance for e in self.engines.values()]}")

    def router_state(self, router: PlayedRouter, now: float) -> RouterState:
        """What the sidecar answers: wanted workers are routed unless their engine says otherwise to the sidecar."""
        wanted = router.wanted
        return RouterState(
            generation=wanted.generation if wanted else None,
            open=wanted is None or wanted.open,
            smg_reachable=True,
            workers=[self._routed(worker, now) for worker in wanted.workers] if wanted else [],
            wanted=wanted,
            wanted_at=router.wanted_at,
        )

    def is_open(self, router: PlayedRouter, now: float) -> bool:
        """The router's readiness probe: it may get requests, and has a worker to send them to."""
        return router.wanted is not None and router.wanted.open and bool(self.routed_urls(router, now))

    def routed_urls(self, router: PlayedRouter, now: float) -> set[str]:
        """Base addresses that the router would send a request to."""
        workers = self.router_state(router, now).workers
        return {worker.url for worker in workers if worker.status is WorkerStatus.READY}

    def _routed(self, worker: Worker, now: float) -> RoutedWorker:
        ip = worker.agent_url.removeprefix("http://").partition(":")[0]
        engine = self.at(ip)
        status, reason = WorkerStatus.READY, ""
        if not isinstance(engine, PlayedEngine):
            status, reason = WorkerStatus.NOT_READY, "nobody answers"
        elif engine.silent:
            pass  # the sidecar keeps a worker whose agent it can't ask
        elif engine.engine_id != worker.engine_id or engine.phase(now) is not EnginePhase.READY:
            status, reason = WorkerStatus.WITHHELD, f"engine is {engine.phase(now)}"
        return RoutedWorker(id=worker.id, url=worker.url, engine_id=worker.engine_id, status=status, reason=reason)


def _addresses() -> Iterator[str]:
    """127.1.0.1, 127.1.0.2, ...: every address of 127.0.0.0/8 answers on this machine without configuration."""
    for number in itertools.count(1):
        if number % 256 not in (0, 255):
            yield f"127.{1 + (number >> 16)}.{(number >> 8) % 256}.{number % 256}"
