"""Following pods: what is news, what is silence, whom we ask at all."""

import asyncio
from collections.abc import Hashable
from dataclasses import replace

import pytest

from sluice.api.agent import AgentState, EnginePhase, SelfTest
from sluice.plan.facts import pod_facts
from sluice.plan.snapshot import PodFacts
from sluice.runtime.observer import (
    MAX_PERIOD_S,
    PERIOD_S,
    SILENT_S,
    Agents,
    Follower,
    Target,
    agent_facts,
    period_s,
)
from sluice.runtime.podhttp import PodHttp, PodUnreachable
from sluice.runtime.queue import Key
from tests.unit.runtime.builders import KEY, FakeClock, a_pod, until


def engine(name: str = "p", ip: str = "127.0.0.9", **changes: object) -> PodFacts:
    return replace(pod_facts(a_pod(name, ip=ip)), **changes)  # type: ignore[arg-type]  # any field of the facts


class Script:
    """A source that answers what the test says, as fast as the follower asks."""

    def __init__(self) -> None:
        self.answer: str | None = "a"
        self.asked: list[Target] = []

    def wants(self, pod: PodFacts) -> bool:
        return pod.component == "engine"

    async def fetch(self, target: Target, *_: object) -> tuple[str, float]:
        self.asked.append(target)
        if self.answer is None:
            raise PodUnreachable("no answer")
        return self.answer, 0.001

    def digest(self, _: Target, state: str) -> Hashable:
        return state


class Watchpost:
    def __init__(self) -> None:
        self.source, self.clock = Script(), FakeClock()
        self.changes: list[Key] = []
        self.follower: Follower[str] = Follower(self.source, self.changes.append, clock=self.clock)

    async def asked_again(self, times: int = 2) -> None:
        before = len(self.source.asked)
        await until(lambda: len(self.source.asked) >= before + times)


@pytest.fixture
async def post() -> Watchpost:
    return Watchpost()


async def test_first_word_and_each_change_report_the_owner_repeats_do_not(post: Watchpost) -> None:
    post.follower.watch(KEY, [engine()])
    await until(lambda: len(post.changes) == 1)
    await post.asked_again(3)
    assert post.changes == [KEY]
    post.source.answer = "b"
    await until(lambda: len(post.changes) == 2)
    await post.follower.close()


async def test_silent_pod_keeps_its_last_word_with_its_age_and_is_reported_once(
    post: Watchpost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.runtime.observer.RETRY_S", (0.001,))
    post.follower.watch(KEY, [engine()])
    await until(lambda: len(post.changes) == 1)
    post.source.answer = None
    await post.asked_again()
    post.clock.advance(SILENT_S + 1)
    await until(lambda: len(post.changes) == 2)
    await post.asked_again(3)
    assert len(post.changes) == 2
    assert post.follower.last("uid-p") == ("a", SILENT_S + 1)
    post.source.answer = "a"
    await until(lambda: len(post.changes) == 3)  # it speaks again: news, though the words are the same
    await post.follower.close()


async def test_equal_word_after_a_long_silence_is_news_though_nobody_was_told_of_the_silence(post: Watchpost) -> None:
    """A pass in between took the old word for none; without news it would never be taken for one again."""
    post.follower.watch(KEY, [engine()])
    await until(lambda: len(post.changes) == 1)
    await post.follower.close()  # the request that is held meanwhile
    post.follower = Follower(post.source, post.changes.append, clock=post.clock)
    post.source.answer = None
    post.follower.watch(KEY, [engine()])
    post.follower.heard("uid-p", "a")
    post.clock.advance(SILENT_S - 1)
    post.follower.heard("uid-p", "a")
    assert len(post.changes) == 2
    post.clock.advance(SILENT_S + 1)
    post.follower.heard("uid-p", "a")
    assert len(post.changes) == 3
    await post.follower.close()


async def test_pod_never_heard_has_no_word(post: Watchpost) -> None:
    post.source.answer = None
    post.follower.watch(KEY, [engine()])
    await until(lambda: bool(post.source.asked))
    assert post.follower.last("uid-p") is None
    await post.follower.close()


@pytest.mark.parametrize(
    "pod", [engine(ip=""), engine(phase="Failed"), engine(phase="Succeeded"), engine(component="router")]
)
async def test_pod_that_cannot_answer_or_is_of_another_kind_is_not_asked(post: Watchpost, pod: PodFacts) -> None:
    post.follower.watch(KEY, [pod])
    assert post.follower.count() == 0


async def test_pod_that_left_the_service_is_no_longer_asked(post: Watchpost) -> None:
    post.follower.watch(KEY, [engine("p"), engine("q")])
    await until(lambda: len(post.source.asked) >= 2)
    post.follower.watch(KEY, [engine("q")])
    await asyncio.sleep(0)
    post.source.asked.clear()
    await post.asked_again(3)
    assert {target.uid for target in post.source.asked} == {"uid-q"}
    post.follower.forget(KEY)
    assert post.follower.count() == 0


async def test_nudge_asks_again_before_the_pause_is_over(post: Watchpost) -> None:
    async def slowly(target: Target, *_: object) -> tuple[str, float]:
        post.source.asked.append(target)
        return "a", 60.0

    post.source.fetch = slowly  # type: ignore[method-assign]  # a source that is asked once a minute
    post.follower.watch(KEY, [engine()])
    await until(lambda: len(post.source.asked) == 1)
    post.follower.nudge("uid-p")
    await until(lambda: len(post.source.asked) >= 3)
    await post.follower.close()


def test_period_grows_with_the_crowd_but_stays_below_silence() -> None:
    assert period_s(1) == PERIOD_S
    assert PERIOD_S < period_s(1500) < MAX_PERIOD_S < SILENT_S
    assert period_s(100_000) == MAX_PERIOD_S


# The agent's protocol


def a_state(**changes: object) -> AgentState:
    values: dict[str, object] = {
        "seq": 1,
        "instance": "p",
        "engine": "Simulated",
        "phase": EnginePhase.READY,
        "phase_since": 0.0,
        "started_at": 0.0,
        "engine_id": "e1",
        "in_flight": 0,
    }
    return AgentState.model_validate(values | changes)


TARGET = Target(KEY, "uid-p", "t/p", "p", "127.0.0.9", leaving=False)


@pytest.mark.parametrize(
    ("change", "leaving", "news"),
    [
        pytest.param({"phase": EnginePhase.SUSPECT}, False, True, id="phase"),
        pytest.param({"engine_id": "e2"}, False, True, id="another engine run"),
        pytest.param({"self_test": SelfTest(passed=False)}, False, True, id="verdict"),
        pytest.param({"kv_utilization": 0.9, "generation_tokens": 5.0, "seq": 7}, False, False, id="plain gauges"),
        pytest.param({"in_flight": 3}, False, False, id="requests of an instance that stays"),
        pytest.param({"in_flight": 3}, True, True, id="requests of an instance that leaves"),
        pytest.param({"in_flight": None}, True, True, id="unknown is not zero"),
    ],
)
async def test_what_is_news(change: dict[str, object], leaving: bool, news: bool) -> None:
    http = PodHttp()
    agents = Agents(http)
    target = replace(TARGET, leaving=leaving)
    before, after = agents.digest(target, a_state()), agents.digest(target, a_state(**change))
    assert (before != after) is news
    await http.close()


class FakeHttp(PodHttp):
    """Answers from memory and keeps the URLs."""

    def __init__(self, *answers: AgentState | str) -> None:
        self.answers = list(answers)
        self.urls: list[str] = []

    async def call(self, method: str, url: str, **_: object) -> bytes:
        assert method == "GET"
        self.urls.append(url)
        answer = self.answers.pop(0)
        return (answer if isinstance(answer, str) else answer.model_dump_json(by_alias=True)).encode()


async def test_agent_is_asked_for_news_since_its_last_word() -> None:
    http = FakeHttp(a_state(seq=4), a_state(seq=5))
    agents = Agents(http)
    first, _ = await agents.fetch(TARGET, None, 1)
    second, _ = await agents.fetch(TARGET, first, 1)
    assert http.urls == ["http://127.0.0.9:9900/state", "http://127.0.0.9:9900/state?after=4"]
    assert second.seq == 5


async def test_agent_that_does_not_hold_is_not_asked_in_a_hot_loop() -> None:
    state = a_state()
    _, pause_s = await Agents(FakeHttp(state)).fetch(TARGET, state, 1)
    assert pause_s >= 1


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param("{}", id="not a state"),
        pytest.param("<html>", id="not JSON"),
        pytest.param(a_state(instance="another"), id="another pod at the address"),
        pytest.param(a_state().model_dump_json(by_alias=True).replace('"inFlight":0', '"inFlight":NaN'), id="NaN"),
    ],
)
async def test_answer_that_is_not_this_agent_s_state_counts_as_none(answer: AgentState | str) -> None:
    with pytest.raises(PodUnreachable):
        await Agents(FakeHttp(answer)).fetch(TARGET, None, 1)


async def test_facts_are_there_for_heard_pods_only() -> None:
    follower = Follower(Agents(FakeHttp(a_state())), lambda _: None)
    follower.watch(KEY, [engine("p")])
    await until(lambda: follower.last("uid-p"))
    facts = agent_facts(follower, [engine("p"), engine("q")])
    assert list(facts) == ["uid-p"]
    assert facts["uid-p"].state == a_state()
    await follower.close()
