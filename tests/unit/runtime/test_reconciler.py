"""One pass: status after failures too, bugs as conditions, no hot loops."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from sluice.api import names
from sluice.api.config import OperatorConfig
from sluice.plan.actions import Action, Create, Outcome, Result
from sluice.plan.planner import Plan
from sluice.plan.snapshot import Event, ServiceSnapshot
from sluice.runtime import reconciler
from sluice.runtime.errors import Forbidden, QuotaExceeded, Unavailable
from sluice.runtime.events import Recorder
from sluice.runtime.executor import CreationLog, Executor
from sluice.runtime.keys import SigningKeys
from sluice.runtime.metrics import Metrics, StateCollector
from sluice.runtime.observer import Agents, Follower
from sluice.runtime.podhttp import PodHttp
from sluice.runtime.queue import Queue
from sluice.runtime.reconciler import MAX_ROUNDS, Ended, Reconciler
from sluice.runtime.routers import Routers, Token
from sluice.runtime.store import Store
from tests.unit.runtime.builders import KEY, NAMESPACE, SERVICE_UID, FakeClock, Object, a_service, until
from tests.unit.runtime.memory_api import MemoryApi, failing
from tests.unit.runtime.test_executor import Leadership, Sidecars, create_pod


@dataclass
class Planner:
    """What the test wants planned and said; sees each snapshot."""

    actions: Sequence[Action] = ()
    events: Sequence[Event] = ()
    requeue_after_s: float | None = None
    bug: Exception | None = None
    status_bug: Exception | None = None
    snapshots: list[ServiceSnapshot] = field(default_factory=list)

    def plan(self, snapshot: ServiceSnapshot, _: float) -> Plan:
        self.snapshots.append(snapshot)
        if self.bug:
            raise self.bug
        return Plan(tuple(self.actions), tuple(self.events), self.requeue_after_s)

    def status(self, snapshot: ServiceSnapshot, _: Plan, results: Sequence[Result], __: float) -> Object:
        if self.status_bug:
            raise self.status_bug
        refused = [r.reason for r in results if r.outcome is Outcome.REFUSED]
        return {"observedGeneration": 1, "pods": len(snapshot.pods), "refused": refused}


class World:
    def __init__(self, limit: int = 100) -> None:
        self.api, self.store, self.clock, self.planner = MemoryApi(), Store(), FakeClock(), Planner()
        self.queue = Queue(clock=self.clock, rng=random.Random(1))
        self.http = PodHttp()
        self.recorder = Recorder(self.api, reporter="op", clock=self.clock)
        self.metrics = Metrics()
        creations = CreationLog(self.clock)
        self.reconciler = Reconciler(
            store=self.store,
            queue=self.queue,
            executor=Executor(
                self.api, self.store, Sidecars(), Leadership(), creations=creations, creation_limit=limit
            ),
            client=self.api,
            agents=Follower(Agents(self.http), self.queue.add),
            routers=Follower(Routers(self.http, Token(Any)), self.queue.add),  # type: ignore[arg-type]  # never read
            recorder=self.recorder,
            metrics=self.metrics,
            creations=creations,
            keys=SigningKeys("{}"),
            config=OperatorConfig(),
            plan=self.planner.plan,
            compute_status=self.planner.status,
            wall_clock=self.clock,
        )
        self.store.apply("ADDED", self.api.put(a_service()))

    def live(self) -> Object:
        return self.api.objects[names.SERVICE_KIND, NAMESPACE, "svc"]

    async def run(self) -> Ended:
        async with asyncio.timeout(5):
            return await self.reconciler.run(KEY)

    async def settle(self) -> int:
        """Run passes as the queue asks for them; how many there were."""
        passes = 0
        while (key := self.queue.take()) is not None:
            passes += 1
            assert passes < 20, "hot loop"
            self.queue.done(key, await self.run() is Ended.SUCCESS)
        return passes

    async def close(self) -> None:
        await self.http.close()


@pytest.fixture
async def world() -> Any:
    made = World()
    yield made
    await made.close()


async def test_second_pass_writes_nothing(world: World) -> None:
    world.planner.actions = [create_pod("p")]
    world.queue.add(KEY)
    await world.settle()
    writes = len(world.api.writes())
    world.planner.actions = []
    world.queue.add(KEY)
    assert await world.settle() == 1
    assert len(world.api.writes()) == writes


async def test_pass_that_did_something_looks_again_at_once_and_sees_it(world: World) -> None:
    world.planner.actions = [create_pod("p")]
    world.queue.add(KEY)
    assert await world.settle() == 1
    assert [len(snapshot.pods) for snapshot in world.planner.snapshots] == [0, 1]
    assert world.live()["status"]["pods"] == 1
    assert [verb for verb, *_ in world.api.writes()].count("apply_status") == 1, "one status, of what is there now"


async def test_a_service_that_never_comes_to_rest_gives_way_and_has_its_status(world: World) -> None:
    made: list[Action] = []

    def restless(snapshot: ServiceSnapshot, _: float) -> Plan:
        made.append(create_pod(f"p{len(made)}"))
        world.planner.snapshots.append(snapshot)
        return Plan((made[-1],))

    object.__setattr__(world.reconciler, "plan", restless)
    assert await world.run() is Ended.SUCCESS
    assert len(made) == MAX_ROUNDS
    assert world.live()["status"]["observedGeneration"] == 1
    assert world.queue.depth() == 1


async def test_rounds_that_take_long_leave_time_for_the_status(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler, "PASS_TIMEOUT_S", 0.6)
    run = world.reconciler.executor.run
    planned = 0

    async def slow(*args: Any, **more: Any) -> Any:
        await asyncio.sleep(0.25)
        return await run(*args, **more)

    def restless(_: ServiceSnapshot, __: float) -> Plan:
        nonlocal planned
        planned += 1
        return Plan((create_pod(f"p{planned}"),))

    monkeypatch.setattr(world.reconciler.executor, "run", slow)
    object.__setattr__(world.reconciler, "plan", restless)
    world.queue.add(KEY)
    working = asyncio.create_task(world.reconciler.work())
    await until(lambda: "status" in world.live())
    world.queue.close()
    await working


async def test_status_is_written_though_an_action_was_refused_and_the_key_backs_off(world: World) -> None:
    world.planner.actions = [create_pod("p")]
    world.api.fail = failing(QuotaExceeded, "create", "p", message="exceeded quota: gpus")
    assert await world.run() is Ended.REFUSED
    assert world.live()["status"]["refused"] == ["QuotaExceeded"]


async def test_refused_action_is_told_as_a_warning_about_its_instance(world: World) -> None:
    world.planner.actions = [create_pod("p")]
    world.api.fail = failing(QuotaExceeded, "create", "p", message="exceeded quota: gpus")
    await world.run()
    await world.recorder.write_next()
    [event] = [obj for (kind, _, _), obj in world.api.objects.items() if kind == "Event"]
    assert (event["reason"], event["type"], event["note"]) == ("QuotaExceeded", "Warning", "exceeded quota: gpus")
    assert event["related"]["name"] == "p"


async def test_status_is_written_though_the_pass_failed(world: World) -> None:
    world.planner.actions = [create_pod("p")]
    world.api.fail = failing(Unavailable, "create")
    assert await world.run() is Ended.RETRY
    assert world.live()["status"]["observedGeneration"] == 1


@pytest.mark.parametrize("error", [Unavailable, Forbidden])
async def test_status_that_could_not_be_written_is_tried_again(world: World, error: Any) -> None:
    world.api.fail = failing(error, "apply_status")
    assert await world.run() is Ended.RETRY


async def test_object_that_changed_under_the_pass_is_read_and_planned_again(world: World) -> None:
    world.api.put({**world.live(), "spec": {"new": True}})  # the watch has not told yet
    world.queue.add(KEY)
    assert await world.settle() == 2
    assert world.planner.snapshots[-1].service["spec"] == {"new": True}
    assert world.live()["status"]["observedGeneration"] == 1


async def test_object_that_a_404_denies_stays_until_the_watch_says_that_it_is_gone(world: World) -> None:
    """An API server that does not know the CRD yet answers 404 for what exists."""
    live = world.live()
    world.api.objects.clear()
    assert await world.run() is Ended.RETRY
    assert world.store.view(KEY) is not None
    world.api.objects[names.SERVICE_KIND, NAMESPACE, "svc"] = live
    assert await world.run() is Ended.SUCCESS
    assert world.live()["status"]["observedGeneration"] == 1
    world.store.apply("DELETED", {**live, "metadata": {**live["metadata"], "resourceVersion": "999"}})
    assert await world.run() is Ended.SUCCESS
    assert world.store.view(KEY) is None


async def test_name_that_is_taken_is_looked_at_again_within_half_a_minute_for_ever(world: World) -> None:
    pod = dict(create_pod("p").body)
    world.api.put({**pod, "metadata": {**pod["metadata"], "ownerReferences": []}})
    world.planner.actions = [create_pod("p")]
    world.queue.add(KEY)
    for _ in range(20):
        assert world.queue.take() == KEY
        world.queue.done(KEY, await world.run() is Ended.SUCCESS)
        assert world.live()["status"]["refused"] == ["NameConflict"]
        due = world.queue.next_due()
        assert due is not None
        assert due - world.clock.now <= 30
        world.clock.advance(30)


@pytest.mark.parametrize("where", ["bug", "status_bug"])
async def test_bug_is_a_condition_and_keeps_the_rest_of_the_status(world: World, where: str) -> None:
    world.store.apply("MODIFIED", world.api.put({**world.live(), "status": {"pools": [{"name": "x"}]}}))
    setattr(world.planner, where, ZeroDivisionError("oops"))
    assert await world.run() is Ended.ERROR
    status = world.live()["status"]
    assert status["pools"] == [{"name": "x"}]
    [condition] = status["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("Reconciling", "True", "InternalError")
    assert "ZeroDivisionError: oops" in condition["message"]
    writes = len(world.api.writes())
    assert await world.run() is Ended.ERROR
    assert len(world.api.writes()) == writes


async def test_deadline_of_the_plan_is_kept(world: World) -> None:
    world.planner.requeue_after_s = 30
    await world.run()
    due = world.queue.next_due()
    assert due is not None and 27 <= due - world.clock.now <= 33


async def test_creation_limit_pauses_and_does_not_count_as_failure() -> None:
    world = World(limit=1)
    world.planner.actions = [create_pod("p1"), create_pod("p2")]
    assert await world.run() is Ended.SUCCESS
    due = world.queue.next_due()
    assert due is not None and due - world.clock.now < 60
    assert world.live()["status"]["refused"] == ["CreationLimit"]
    await world.close()


async def test_recent_creations_survive_a_restart_by_the_pods_own_age(world: World) -> None:
    pod = dict(create_pod("p").body)
    pod["metadata"] = {**pod["metadata"], "creationTimestamp": "1970-01-01T00:16:30Z"}
    world.store.apply("ADDED", world.api.put(pod))
    await world.run()
    assert world.planner.snapshots[-1].recent_creations == 1
    world.clock.advance(120)
    await world.run()
    assert world.planner.snapshots[-1].recent_creations == 0


async def test_worker_survives_a_pass_that_blows_up_and_serves_the_next_key() -> None:
    world = World()
    world.planner.actions = [Create({"kind": "Unheard", "metadata": {"name": "x"}}, "x")]
    world.queue.add(KEY)
    async with asyncio.timeout(5):
        worker = asyncio.create_task(world.reconciler.work())
        await until(lambda: world.queue.retries)
        world.planner.actions = []
        world.clock.advance(2)
        world.queue.add(KEY)
        await until(lambda: "status" in world.live())
        world.queue.close()
        await worker
    await world.close()


async def test_metrics_show_conditions_and_counts_and_drop_them_with_the_object(world: World) -> None:
    status = {
        "observedGeneration": 3,
        "conditions": [{"type": "Ready", "status": "True"}],
        "pools": [{"desired": 2, "serving": 1}, {"desired": 3, "serving": 3}],
    }
    world.store.apply("MODIFIED", world.api.put({**world.live(), "status": status}))
    world.metrics.show(StateCollector(world.queue, world.store, world.recorder, dict))
    text = world.metrics.text().decode()
    labels = f'name="svc",namespace="{NAMESPACE}"'
    assert f"sluice_inferenceservice_desired_replicas{{{labels}}} 5.0" in text
    assert f"sluice_inferenceservice_serving_replicas{{{labels}}} 4.0" in text
    assert f'sluice_inferenceservice_status_condition{{{labels},status="True",type="Ready"}} 1.0' in text
    world.store.apply("DELETED", a_service(version=999))
    assert "inferenceservice_desired_replicas{" not in world.metrics.text().decode()
    assert SERVICE_UID not in text
