"""One life of the operator in the simulation: the real store, queue, executor, reconciler and plan; no HTTP, no tasks.

Watches, polls and passes happen when the simulation orders them, one at a time. A crash throws the object away; the
next life starts from LISTs, as the real process does.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Generic, TypeVar

from sluice.api.agent import AgentState
from sluice.api.config import OperatorConfig
from sluice.api.router import RouterState
from sluice.plan.planner import plan
from sluice.plan.snapshot import PodFacts
from sluice.plan.status import compute_status
from sluice.runtime import kinds
from sluice.runtime.events import Recorder
from sluice.runtime.executor import CreationLog, Executor
from sluice.runtime.keys import SigningKeys
from sluice.runtime.kinds import Kind
from sluice.runtime.metrics import Metrics
from sluice.runtime.observer import SILENT_S, Agents, Follower, Source, Target
from sluice.runtime.queue import BACKOFF_CAP_S, Key, Lane, Queue
from sluice.runtime.reconciler import TRANSIENT_CAP_S, Ended, Reconciler
from sluice.runtime.routers import Routers
from sluice.runtime.store import Store
from tests.fakeapi.cluster import FakeCluster
from tests.fakeapi.resources import Resource
from tests.fakeapi.storage import Watch, WatchEvent
from tests.played.world import PlayedEngine, PlayedRouter, World
from tests.sim.client import Hook, SimClient, SimSender

T = TypeVar("T")


class AgentWords(Agents):
    """What matters in an agent's word, without a connection."""

    def __init__(self) -> None:
        pass


class RouterWords(Routers):
    """What matters in a router's word, without a connection."""

    def __init__(self) -> None:
        pass


@dataclass(slots=True)
class _Heard(Generic[T]):
    target: Target
    state: T | None = None
    at: float = 0.0
    digest: Hashable = None
    told_silent: bool = False
    since: float = 0.0


class SimFollower(Follower[T]):
    """Follows without tasks: `poll` asks one pod when the simulation says so."""

    def __init__(
        self,
        source: Source[T],
        on_change: Callable[[Key], None],
        ask: Callable[[str], T | None],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(source, on_change, clock=clock)
        self._ask = ask
        self._words = source
        self._tell = on_change
        self._now = clock
        self._heard: dict[str, _Heard[T]] = {}

    def watch(self, key: Key, pods: Iterable[PodFacts]) -> None:
        wanted = {
            pod.uid: Target(key, pod.uid, pod.name, pod.instance, pod.ip, _leaves(pod))
            for pod in pods
            if pod.ip and pod.phase not in ("Succeeded", "Failed") and self._words.wants(pod)
        }
        for uid in [uid for uid, heard in self._heard.items() if heard.target.key == key and uid not in wanted]:
            del self._heard[uid]
        for uid, target in wanted.items():
            self._heard.setdefault(uid, _Heard(target, since=self._now())).target = target

    def asked_s(self, uid: str) -> float | None:
        heard = self._heard.get(uid)
        return None if heard is None else self._now() - heard.since

    def last(self, uid: str) -> tuple[T, float] | None:
        heard = self._heard.get(uid)
        return None if heard is None or heard.state is None else (heard.state, self._now() - heard.at)

    def heard(self, uid: str, state: T) -> None:
        followed = self._heard.get(uid)
        if followed is None:
            return
        digest = self._words.digest(followed.target, state)
        was_silent = followed.told_silent or self._now() - followed.at > SILENT_S
        news = followed.state is None or was_silent or digest != followed.digest
        followed.state, followed.digest, followed.at, followed.told_silent = state, digest, self._now(), False
        if news:
            self._tell(followed.target.key)

    def nudge(self, uid: str) -> None:
        del uid  # the simulation polls when it likes

    def followed(self) -> list[str]:
        return sorted(self._heard)

    def poll(self, uid: str) -> None:
        """Ask one pod; without an answer its last word gets old, and is reported as silence once."""
        followed = self._heard.get(uid)
        if followed is None:
            return
        state = self._ask(uid)
        if state is not None:
            self.heard(uid, state)
        elif followed.state is not None and not followed.told_silent and self._now() - followed.at > SILENT_S:
            followed.told_silent = True
            self._tell(followed.target.key)


class AlwaysLeader:
    def held(self) -> bool:
        return True


class SimOperator:
    """The running operator. Raises `Crash` out of `run_one` when the simulation kills it."""

    def __init__(
        self,
        cluster: FakeCluster,
        world: World,
        loop: asyncio.AbstractEventLoop,
        *,
        clock: Callable[[], float],
        before: Hook,
        after: Hook,
        config: OperatorConfig,
    ) -> None:
        self._cluster, self._world, self._loop, self._clock = cluster, world, loop, clock
        self.store = Store()
        self.queue = Queue(clock=clock, rng=random.Random(0))  # its jitter must repeat with the seed
        self.agents: SimFollower[AgentState] = SimFollower(AgentWords(), self.queue.add, self._ask_agent, clock)
        self.routers: SimFollower[RouterState] = SimFollower(RouterWords(), self.queue.add, self._ask_router, clock)
        self.client = client = SimClient(cluster, before, after)
        creations = CreationLog(clock)
        executor = Executor(
            client,
            self.store,
            SimSender(world, before, after, self.routers.heard),
            AlwaysLeader(),
            creations=creations,
            creation_limit=config.limits.creations_per_service_and_minute,
            wall_clock=clock,
        )
        self.recorder = Recorder(
            client, reporter="sim", clock=clock, utc_now=lambda: datetime.fromtimestamp(clock(), UTC)
        )
        self.reconciler = Reconciler(
            store=self.store,
            queue=self.queue,
            executor=executor,
            client=client,
            agents=self.agents,
            routers=self.routers,
            recorder=self.recorder,
            metrics=Metrics(),
            creations=creations,
            keys=SigningKeys('{"keys": []}'),
            config=config,
            plan=plan,
            compute_status=compute_status,
            wall_clock=clock,
        )
        self._watches: dict[str, Watch] = {}
        self.pending: dict[str, deque[WatchEvent]] = {kind.name: deque() for kind in kinds.WATCHED}
        self.seen: list[WatchEvent] = []
        """The last events delivered, for late repeats."""
        for kind in kinds.WATCHED:
            version = self.relist(kind)
            self._watches[kind.name] = cluster.watch(self._resource(kind), labels=kind.selector, from_rv=version)
        self._enqueue(set(self.store.services()))

    def close(self) -> None:
        for watch in self._watches.values():
            self._cluster.storage.close(watch)

    # What the simulation orders

    def relist(self, kind: Kind) -> int:
        """A healing LIST of one kind; its resourceVersion."""
        page = self._cluster.list_page(self._resource(kind), labels=kind.selector)
        listed: set[str] = set()
        keys = self.store.merge(kind, page.items, listed)
        self._enqueue(keys | self.store.prune(kind, listed, str(page.rv)))
        return page.rv

    def relist_all(self) -> None:
        for kind in kinds.WATCHED:
            self._take(kind)
            self.pending[kind.name].clear()
            self.relist(kind)

    def undelivered(self) -> list[Kind]:
        """Kinds with watch events that the operator hasn't seen."""
        for kind in kinds.WATCHED:
            self._take(kind)
        return [kind for kind in kinds.WATCHED if self.pending[kind.name]]

    def deliver(self, kind: Kind) -> WatchEvent:
        """Hand the oldest undelivered event of a kind to the store."""
        event = self.pending[kind.name].popleft()
        self.hand_over(event)
        self.seen = [*self.seen[-20:], event]
        return event

    def lose(self, kind: Kind) -> WatchEvent:
        return self.pending[kind.name].popleft()

    def hand_over(self, event: WatchEvent) -> None:
        self._enqueue(self.store.apply(event.type, event.object))

    def run_one(self) -> Key | None:
        """One pass of the next dirty key, if there is one now. Raises: Crash."""
        key = self.queue.take()
        if key is None:
            return None
        ended = self._loop.run_until_complete(self.reconciler.run(key))
        cap_s = TRANSIENT_CAP_S if ended is Ended.RETRY else BACKOFF_CAP_S
        self.queue.done(key, ended is Ended.SUCCESS, backoff_cap_s=cap_s)
        return key

    def poll_all(self) -> None:
        for follower in (self.agents, self.routers):
            for uid in follower.followed():
                follower.poll(uid)

    # Inside

    def _take(self, kind: Kind) -> None:
        self.pending[kind.name].extend(self._watches[kind.name].take())

    def _enqueue(self, keys: set[Key]) -> None:
        for key in sorted(keys):
            self.queue.add(key, Lane.EVENT)

    def _ask_agent(self, uid: str) -> AgentState | None:
        engine = self._world.engines.get(uid)
        return engine.state(self._clock()) if isinstance(engine, PlayedEngine) and not engine.silent else None

    def _ask_router(self, uid: str) -> RouterState | None:
        router = self._world.routers.get(uid)
        if not isinstance(router, PlayedRouter) or router.silent:
            return None
        return self._world.router_state(router, self._clock())

    def _resource(self, kind: Kind) -> Resource:
        return self._cluster.resource(kind.group, kind.plural)


def _leaves(pod: PodFacts) -> bool:
    return pod.drain_started_at is not None or pod.deletion_at is not None
