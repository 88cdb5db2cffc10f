"""Watches pods by asking them: one task per followed pod keeps its last word and how old it is.

`Follower` is the loop, the same for agents and routers; `Agents` knows the agent's protocol. A change that a plan could
act on (phase, verdict, in-flight to or from zero, engine run) reports the owner's key, plain gauges do not. A pod that
falls silent for `SILENT_S` is reported once; its last word stays, with its age, and the plan calls it Unknown.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import Final, Generic, Protocol, TypeVar

from pydantic import ValidationError

from sluice.api import names
from sluice.api.agent import MAX_STATE_BYTES, AgentState
from sluice.plan.snapshot import AgentFacts, PodFacts
from sluice.runtime.podhttp import PodHttp, PodUnreachable, pod_url
from sluice.runtime.queue import Key

log = logging.getLogger(__name__)

SILENT_S: Final = 15.0
"""A last word older than this counts as none."""
PERIOD_S: Final = 5.0
MAX_PERIOD_S: Final = 12.0
POLLS_PER_S: Final = 200
"""Above 1,000 pods the period grows, to at most 12 s, so that polling stays below a fifth of a core."""
RETRY_S: Final = (0.5, 1.0, 2.0, 4.0, 5.0)
QUICK_S: Final = (0.1, 0.2, 0.4, 0.8, 1.5)
"""Pauses after `nudge`: something was just sent and its effect is awaited."""

HOLD_S: Final = 5.0
"""How long an agent may hold `GET /state?after=`."""
GRACE_S: Final = 2.0
PAUSE_S: Final = 0.25
"""Between two held requests: requests that come and go would else answer each one at once."""
LEAVING_PAUSE_S: Final = 0.5
"""Between two words of an instance that leaves: it is asked without holding, because a plan waits for a fresh zero."""
NOT_HELD_S: Final = 0.5
MAX_HELD: Final = 512
"""Held requests at once; agents beyond are asked without holding. One held connection costs about 30 KiB."""
AT_ONCE: Final = 64
"""Requests at once that are not held."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Target:
    """A pod to ask."""

    key: Key
    uid: str
    name: str
    instance: str
    ip: str
    leaving: bool
    """It is drained or deleted, so its last request matters."""


class Source(Protocol[T]):
    """What to ask a pod, and what in the answer matters."""

    def wants(self, pod: PodFacts) -> bool: ...
    async def fetch(self, target: Target, last: T | None, crowd: int) -> tuple[T, float]:
        """The pod's word and the pause in seconds before the next question; raises PodUnreachable."""
        ...

    def digest(self, target: Target, state: T) -> Hashable:
        """Equal digests: nothing changed that a plan would act on."""
        ...


@dataclass(slots=True)
class _Followed(Generic[T]):
    target: Target
    task: asyncio.Task[None]
    since: float = 0.0
    state: T | None = None
    heard_at: float = 0.0
    digest: Hashable = None
    told_silent: bool = False
    failures: int = 0
    quick: list[float] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class Follower(Generic[T]):
    """Follows the pods of all services; `watch` replaces the set of one service."""

    def __init__(
        self,
        source: Source[T],
        on_change: Callable[[Key], None],
        *,
        clock: Callable[[], float] = monotonic,
        on_poll: Callable[[bool], None] | None = None,
    ) -> None:
        self._source = source
        self._on_change = on_change
        self._clock = clock
        self._on_poll = on_poll
        self._followed: dict[str, _Followed[T]] = {}
        self._by_key: dict[Key, set[str]] = {}
        self._closed = False

    def watch(self, key: Key, pods: Iterable[PodFacts]) -> None:
        """Follow these pods of the service, as far as they can answer, and no others of it."""
        wanted = {
            pod.uid: Target(key, pod.uid, f"{pod.namespace}/{pod.name}", pod.instance, pod.ip, _is_leaving(pod))
            for pod in pods
            if pod.ip and pod.phase not in ("Succeeded", "Failed") and self._source.wants(pod)
        }
        for uid in self._by_key.get(key, set()) - wanted.keys():
            self._drop(uid)
        if self._closed:
            return
        for uid, target in wanted.items():
            present = self._followed.get(uid)
            if present is None or present.target.ip != target.ip:
                self._drop(uid)
                self._follow(target)
            elif present.target != target:
                self._retarget(present, target)
        if wanted:
            self._by_key[key] = set(wanted)
        else:
            self._by_key.pop(key, None)

    def forget(self, key: Key) -> None:
        """The service is gone."""
        self.watch(key, ())

    def last(self, uid: str) -> tuple[T, float] | None:
        """The pod's last word and its age in seconds; None if it was never heard."""
        followed = self._followed.get(uid)
        if followed is None or followed.state is None:
            return None
        return followed.state, self._clock() - followed.heard_at

    def asked_s(self, uid: str) -> float | None:
        """Seconds since this pod is followed; None if it is not."""
        followed = self._followed.get(uid)
        return None if followed is None else self._clock() - followed.since

    def heard(self, uid: str, state: T) -> None:
        """Take in a word that came another way (the answer to a PUT)."""
        followed = self._followed.get(uid)
        if followed is not None:
            self._take(followed, state)

    def nudge(self, uid: str) -> None:
        """Ask again soon and often for a while."""
        followed = self._followed.get(uid)
        if followed is not None:
            followed.quick = list(QUICK_S)
            followed.wake.set()

    def count(self) -> int:
        return len(self._followed)

    async def close(self) -> None:
        """Stop all tasks and wait for them."""
        self._closed = True
        tasks = [followed.task for followed in self._followed.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._followed.clear()
        self._by_key.clear()

    def _follow(self, target: Target) -> None:
        task = asyncio.create_task(self._run(target.uid), name=f"follow {target.name}")
        self._followed[target.uid] = _Followed(target, task, self._clock())

    def _retarget(self, followed: _Followed[T], target: Target) -> None:
        """Its last word stays; a request that is held now must not delay the first word of a drain."""
        followed.task.cancel()
        followed.target = target
        followed.task = asyncio.create_task(self._run(target.uid), name=f"follow {target.name}")

    def _drop(self, uid: str) -> None:
        followed = self._followed.pop(uid, None)
        if followed is not None:
            followed.task.cancel()

    async def _run(self, uid: str) -> None:
        followed = self._followed[uid]
        while True:
            try:
                state, pause_s = await self._source.fetch(followed.target, followed.state, len(self._followed))
            except PodUnreachable as error:
                pause_s = self._failed(followed, error)
            else:
                followed.failures = 0
                self._take(followed, state)
            if self._on_poll is not None:
                self._on_poll(followed.failures == 0)
            if followed.quick:
                pause_s = min(pause_s, followed.quick.pop(0))
            followed.wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await followed.wake.wait()

    def _failed(self, followed: _Followed[T], error: PodUnreachable) -> float:
        if followed.failures == 0:
            log.debug("%s: %s", followed.target.name, error)
        pause_s = RETRY_S[min(followed.failures, len(RETRY_S) - 1)]
        followed.failures += 1
        silent = followed.state is not None and self._clock() - followed.heard_at > SILENT_S
        if silent and not followed.told_silent:
            followed.told_silent = True
            self._on_change(followed.target.key)
        return pause_s

    def _take(self, followed: _Followed[T], state: T) -> None:
        digest = self._source.digest(followed.target, state)
        # Long silent counts too where nobody was told of it yet: a pass in between took the old word for none.
        was_silent = followed.told_silent or self._clock() - followed.heard_at > SILENT_S
        news = followed.state is None or was_silent or digest != followed.digest
        followed.state, followed.digest = state, digest
        followed.heard_at, followed.told_silent = self._clock(), False
        if news:
            self._on_change(followed.target.key)


class Agents:
    """The agents' protocol: `GET /state?after=<seq>`, held up to five seconds until something changes."""

    def __init__(self, http: PodHttp) -> None:
        self._http = http
        self._held = 0
        self._slots = asyncio.Semaphore(AT_ONCE)

    def wants(self, pod: PodFacts) -> bool:
        return pod.component == names.COMPONENT_ENGINE

    async def fetch(self, target: Target, last: AgentState | None, crowd: int) -> tuple[AgentState, float]:
        if last is None or target.leaving or self._held >= MAX_HELD:
            async with self._slots:
                state = await self._get(target, "/state", GRACE_S)
            if target.leaving:
                return state, LEAVING_PAUSE_S
            return state, 0.0 if self._held < MAX_HELD else period_s(crowd)
        self._held += 1
        started = monotonic()
        try:
            state = await self._get(target, f"/state?after={last.seq}", HOLD_S + GRACE_S)
        finally:
            self._held -= 1
        if state.seq == last.seq and monotonic() - started < NOT_HELD_S:
            return state, 1.0  # it does not hold: never ask in a hot loop
        return state, PAUSE_S

    async def _get(self, target: Target, path: str, timeout_s: float) -> AgentState:
        url = pod_url(target.ip, names.PORT_AGENT, path)
        data = await self._http.call("GET", url, timeout_s=timeout_s, max_bytes=MAX_STATE_BYTES)
        try:
            state = AgentState.model_validate_json(data)
        except ValidationError as error:
            raise PodUnreachable(f"{url}: not an agent's state: {error.errors()[0]['msg']}") from error
        if state.instance != target.instance:
            raise PodUnreachable(f"{url}: answers for instance {state.instance!r}, not {target.instance!r}")
        return state

    def digest(self, target: Target, state: AgentState) -> Hashable:
        """In-flight counts only for an instance that leaves: a plan waits for its zero, and for no other's."""
        busy = None if state.in_flight is None or not target.leaving else state.in_flight > 0
        return state.engine_id, state.phase, state.reason, state.self_test.passed, busy, tuple(state.missing)


def _is_leaving(pod: PodFacts) -> bool:
    return pod.drain_started_at is not None or pod.deletion_at is not None


def period_s(crowd: int) -> float:
    """Seconds between two questions to one pod when `crowd` pods are followed; 5-12, below `SILENT_S`."""
    return min(max(PERIOD_S, crowd / POLLS_PER_S), MAX_PERIOD_S)


def agent_facts(agents: Follower[AgentState], pods: Iterable[PodFacts]) -> dict[str, AgentFacts]:
    """Pod UID to its agent's last word."""
    heard = ((pod.uid, agents.last(pod.uid)) for pod in pods)
    return {uid: AgentFacts(*word) for uid, word in heard if word is not None}


def asked_for(agents: Follower[AgentState], pods: Iterable[PodFacts]) -> dict[str, float]:
    """Pod UID to the seconds since its agent is asked."""
    asked = ((pod.uid, agents.asked_s(pod.uid)) for pod in pods)
    return {uid: seconds for uid, seconds in asked if seconds is not None}
