"""The executor: order, idempotence, and how far a failure reaches."""

import asyncio
from typing import Any

import pytest

from sluice.api import names
from sluice.api.conditions import Reason
from sluice.api.router import WorkerList
from sluice.plan.actions import Action, Annotate, Apply, Create, Delete, ObjectRef, Outcome, PutWorkers, Result, SetGate
from sluice.runtime.errors import Forbidden, Invalid, NotFound, QuotaExceeded, Unavailable
from sluice.runtime.executor import CreationLog, Executor, RouterUnreachable
from sluice.runtime.store import Store
from tests.unit.runtime.builders import KEY, NAMESPACE, SERVICE_UID, FakeClock, Object, a_config_map, a_pod, a_service
from tests.unit.runtime.memory_api import MemoryApi, failing


class Sidecars:
    """Routers' sidecars; those in `dead` do not answer."""

    def __init__(self) -> None:
        self.lists: list[tuple[str, str]] = []
        self.dead: set[str] = set()

    async def put(self, router: ObjectRef, ip: str, workers: WorkerList) -> None:
        if router.name in self.dead:
            raise RouterUnreachable(f"router {router.name}: no answer")
        self.lists.append((ip, workers.generation))


class Leadership:
    def __init__(self) -> None:
        self.is_held = True

    def held(self) -> bool:
        return self.is_held


class Bench:
    """An executor with everything around it."""

    def __init__(self, limit: int = 100) -> None:
        self.api, self.store, self.sidecars, self.lease = MemoryApi(), Store(), Sidecars(), Leadership()
        self.store.apply("ADDED", a_service())
        self.clock = FakeClock()
        self.creations = CreationLog(self.clock)
        self.executor = Executor(
            self.api,
            self.store,
            self.sidecars,
            self.lease,
            creations=self.creations,
            creation_limit=limit,
            wall_clock=self.clock,
        )

    def exists(self, obj: Object) -> Object:
        """Put the object on the API server and into the store."""
        live = self.api.put(obj)
        self.store.apply("ADDED", live)
        return live

    async def run(self, *actions: Action, recent_creations: int = 0) -> list[Result]:
        async with asyncio.timeout(5):
            return list(await self.executor.run(SERVICE_UID, actions, recent_creations=recent_creations))

    async def outcomes(self, *actions: Action) -> list[str]:
        return [str(result.outcome) for result in await self.run(*actions)]


def new(body: Object) -> Object:
    """A body as the planner makes it: without what the API server adds."""
    meta = {k: v for k, v in body["metadata"].items() if k not in ("uid", "resourceVersion")}
    return {**body, "metadata": meta}


def create_pod(name: str, scope: str = "") -> Create:
    return Create(new(a_pod(name)), scope or name, instance=name)


def apply_map(name: str, scope: str = "", **data: str) -> Apply:
    body = {**a_config_map(name), "data": data}
    return Apply(new(body), scope or name)


def ref(obj: Object) -> ObjectRef:
    meta = obj["metadata"]
    return ObjectRef(obj["kind"], meta["namespace"], meta["name"], meta["uid"])


def delete(obj: Object, scope: str = "", **more: Any) -> Delete:
    return Delete(ref(obj), Reason.SCALE_IN, scope or obj["metadata"]["name"], **more)


def put_workers(router: str, scope: str) -> PutWorkers:
    return PutWorkers(ObjectRef("Pod", NAMESPACE, router, "u"), "10.0.0.9", WorkerList(generation="g1"), scope)


# Idempotence


async def test_second_run_of_the_same_actions_writes_nothing_new() -> None:
    bench = Bench()
    actions: list[Action] = [apply_map("c", a="1"), create_pod("p")]
    assert await bench.outcomes(*actions) == ["Done", "Done"]
    before = dict(bench.api.objects)
    assert await bench.outcomes(*actions) == ["Unchanged", "Unchanged"]
    assert bench.api.objects == before


async def test_own_write_is_in_the_store_before_the_watch_tells() -> None:
    bench = Bench()
    await bench.run(create_pod("p"), apply_map("c"))
    view = bench.store.view(KEY)
    assert view is not None
    assert ([pod.name for pod in view.pods], list(view.children)) == (["p"], [("ConfigMap", "c")])


async def test_create_of_what_an_earlier_run_created_is_taken_over() -> None:
    """The process died between the POST and its answer: the store does not know the pod."""
    bench = Bench()
    bench.api.put(new(a_pod("p")))
    assert [r.outcome for r in await bench.run(create_pod("p"))] == [Outcome.DONE]
    view = bench.store.view(KEY)
    assert view is not None and [pod.name for pod in view.pods] == ["p"]


async def test_apply_of_what_an_earlier_run_applied_goes_on_from_there() -> None:
    bench = Bench()
    bench.api.put(new(a_config_map("c", a="old")))
    assert await bench.outcomes(apply_map("c", a="new")) == ["Done"]
    assert bench.api.objects["ConfigMap", NAMESPACE, "c"]["data"] == {"a": "new"}


async def test_apply_of_what_somebody_deleted_creates_it_again() -> None:
    bench = Bench()
    bench.exists(a_config_map("c", a="1"))
    bench.api.objects.clear()
    assert await bench.outcomes(apply_map("c", a="2")) == ["Done"]
    assert bench.api.objects["ConfigMap", NAMESPACE, "c"]["data"] == {"a": "2"}


async def test_write_that_never_takes_effect_is_no_reason_to_run_again() -> None:
    """An API server that normalises a field would else make a hot loop."""
    bench = Bench()
    live = bench.exists(a_config_map("c", a="1"))

    async def ignore(*_: Any, **__: Any) -> Object:
        return live

    bench.api.apply = ignore  # type: ignore[method-assign]  # an API server that keeps its own form
    assert await bench.outcomes(apply_map("c", a="01")) == ["Unchanged"]


async def test_delete_names_the_uid_and_of_something_gone_is_no_failure() -> None:
    bench = Bench()
    pod = bench.exists(a_pod("p"))
    assert await bench.outcomes(delete(pod, grace_s=0)) == ["Done"]
    assert await bench.outcomes(delete(pod)) == ["Unchanged"]
    again = bench.exists(a_pod("p", uid="another"))
    assert await bench.outcomes(delete(pod)) == ["Unchanged"]
    assert bench.api.objects["Pod", NAMESPACE, "p"]["metadata"]["uid"] == again["metadata"]["uid"]


async def test_gate_is_a_strategic_patch_of_the_status_with_a_transition_time() -> None:
    bench = Bench()
    pod = bench.exists(a_pod("p"))
    assert await bench.outcomes(SetGate(ref(pod), True, "Routed", "all routers have it", "p")) == ["Done"]
    assert bench.api.writes() == [("patch status strategic", "Pod", "p")]
    condition = bench.api.objects["Pod", NAMESPACE, "p"]["status"]["conditions"][0]
    assert condition == {
        "type": names.READINESS_GATE,
        "status": "True",
        "reason": "Routed",
        "message": "all routers have it",
        "lastTransitionTime": "1970-01-01T00:16:40Z",
    }


async def test_annotation_is_merged_and_null_removes() -> None:
    bench = Bench()
    pod = bench.exists(a_pod("p"))
    await bench.run(Annotate(ref(pod), {"a": "1", "b": "2"}, "p"))
    await bench.run(Annotate(ref(pod), {"a": None}, "p"))
    assert bench.api.objects["Pod", NAMESPACE, "p"]["metadata"]["annotations"] == {"b": "2"}


@pytest.mark.parametrize("replaced", [False, True])
async def test_patch_of_a_pod_that_is_gone_or_replaced_is_done_and_the_store_learns_it(replaced: bool) -> None:
    bench = Bench()
    pod = bench.exists(a_pod("p"))
    bench.api.objects.clear()
    if replaced:
        bench.api.put(a_pod("p", uid="another"))
    assert await bench.outcomes(Annotate(ref(pod), {"a": "1"}, "p"), create_pod("q")) == ["Done", "Done"]
    view = bench.store.view(KEY)
    assert view is not None and [p.name for p in view.pods] == ["q"]


# Name conflicts


@pytest.mark.parametrize("action", [apply_map("taken", a="ours"), create_pod("taken")], ids=["apply", "create"])
@pytest.mark.parametrize("owner", ["uid-of-another", ""], ids=["another service's", "nobody's"])
async def test_s002_foreign_object_at_a_wanted_name_is_a_conflict_and_stays_as_it_is(
    action: Apply | Create, owner: str
) -> None:
    bench = Bench()
    kind = action.body["kind"]
    foreign = (
        a_config_map("taken", owner_uid=owner, a="theirs") if kind == "ConfigMap" else a_pod("taken", owner_uid=owner)
    )
    if not owner:
        del foreign["metadata"]["ownerReferences"]
    live = bench.api.put(foreign)
    [result] = await bench.run(action)
    assert (result.outcome, result.reason) == (Outcome.REFUSED, Reason.NAME_CONFLICT)
    assert f"{kind} {NAMESPACE}/taken exists already and is not ours" in result.message
    assert bench.api.objects[kind, NAMESPACE, "taken"] == live


# How far a failure reaches


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Forbidden, Reason.FORBIDDEN),
        (QuotaExceeded, Reason.QUOTA_EXCEEDED),
        (Invalid, Reason.REJECTED),
        (NotFound, Reason.REJECTED),
    ],
)
async def test_s010_refused_action_stops_its_scope_and_nothing_else(error: Any, reason: Reason) -> None:
    bench = Bench()
    bench.api.fail = failing(error, "create", "p1")
    results = await bench.run(
        create_pod("p1", "one"), create_pod("p1-more", "one"), create_pod("p2", "two"), apply_map("c", "one")
    )
    assert [r.outcome for r in results] == [Outcome.REFUSED, Outcome.SKIPPED, Outcome.DONE, Outcome.SKIPPED]
    assert results[0].reason == reason


async def test_missing_right_is_named_with_verb_and_resource() -> None:
    bench = Bench()
    bench.api.fail = failing(Forbidden, "create")
    [result] = await bench.run(create_pod("p"))
    assert "not allowed to create pods" in result.message


async def test_transient_failure_ends_the_pass() -> None:
    bench = Bench()
    pod = bench.exists(a_pod("old"))
    bench.api.fail = failing(Unavailable, "apply")
    results = await bench.run(apply_map("c"), create_pod("p"), delete(pod))
    assert [r.outcome for r in results] == [Outcome.FAILED, Outcome.SKIPPED, Outcome.SKIPPED]
    assert results[0].reason == Reason.API_UNAVAILABLE
    assert ("Pod", NAMESPACE, "old") in bench.api.objects


async def test_dead_router_stops_only_its_scope() -> None:
    """Nothing is deleted after a failed unroute of the same scope; other instances go on."""
    bench = Bench()
    kept, gone = bench.exists(a_pod("kept")), bench.exists(a_pod("gone"))
    bench.sidecars.dead = {"r1"}
    results = await bench.run(
        put_workers("r1", "kept"), put_workers("r2", "gone"), create_pod("p"), delete(kept), delete(gone)
    )
    assert [r.outcome for r in results] == [
        Outcome.FAILED,
        Outcome.DONE,
        Outcome.DONE,
        Outcome.SKIPPED,
        Outcome.DONE,
    ]
    assert results[0].reason == Reason.ROUTER_UNREACHABLE
    assert bench.sidecars.lists == [("10.0.0.9", "g1")]


async def test_without_the_lease_nothing_is_written() -> None:
    bench = Bench()
    bench.lease.is_held = False
    assert await bench.outcomes(apply_map("c"), create_pod("p")) == ["Skipped", "Skipped"]
    assert bench.api.calls == []


async def test_lease_lost_in_the_middle_stops_the_next_write() -> None:
    bench = Bench()

    def lose(*_: str) -> None:
        bench.lease.is_held = False

    bench.api.fail = lose
    assert await bench.outcomes(apply_map("a", "s"), apply_map("b", "s"), create_pod("p")) == [
        "Done",
        "Skipped",
        "Skipped",
    ]


# Order and parallelism


async def test_groups_run_in_the_plan_s_order() -> None:
    bench = Bench()
    pod = bench.exists(a_pod("old"))
    await bench.run(apply_map("c1"), apply_map("c2"), create_pod("p1"), create_pod("p2"), delete(pod))
    kinds_in_order = [verb for verb, _, _ in bench.api.writes()]
    assert kinds_in_order == ["apply", "apply", "create", "create", "delete"]


async def test_at_most_eight_creates_at_once_and_deletes_one_by_one() -> None:
    bench = Bench()
    pods = [bench.exists(a_pod(f"old{i}")) for i in range(5)]
    now: dict[str, int] = {"create": 0, "delete": 0}
    most = dict(now)

    def slow(verb: str, call: Any) -> Any:
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            now[verb] += 1
            most[verb] = max(most[verb], now[verb])
            for _ in range(5):
                await asyncio.sleep(0)
            now[verb] -= 1
            return await call(*args, **kwargs)

        return wrapped

    bench.api.create = slow("create", bench.api.create)  # type: ignore[method-assign]  # counts calls in flight
    bench.api.delete = slow("delete", bench.api.delete)  # type: ignore[method-assign]  # counts calls in flight
    await bench.run(*(create_pod(f"p{i}") for i in range(20)), *(delete(pod) for pod in pods))
    assert most == {"create": 8, "delete": 1}


# The creation limit


async def test_creation_limit_refuses_pods_beyond_it_and_nothing_else() -> None:
    bench = Bench(limit=5)
    results = await bench.run(*(create_pod(f"p{i}") for i in range(4)), apply_map("c"), recent_creations=3)
    assert [r.outcome for r in results].count(Outcome.DONE) == 3
    assert {r.reason for r in results if r.outcome is Outcome.REFUSED} == {Reason.CREATION_LIMIT}
    assert results[-1].outcome is Outcome.DONE
    assert len([key for key in bench.api.objects if key[0] == "Pod"]) == 2


async def test_creations_are_counted_for_a_minute() -> None:
    bench = Bench()
    await bench.run(create_pod("p1"), create_pod("p2"))
    assert bench.creations.recent(SERVICE_UID) == 2
    bench.clock.advance(60)
    assert bench.creations.recent(SERVICE_UID) == 0


# Crashes


async def test_killed_between_any_two_writes_the_next_run_completes_without_duplicates() -> None:
    actions: list[Action] = [apply_map("c", a="1"), *(create_pod(f"p{i}") for i in range(4))]
    for survive in range(len(actions)):
        bench = Bench()
        left = survive

        def die(*_: str) -> None:
            nonlocal left
            if left == 0:
                raise ZeroDivisionError  # any exception that is no API answer: the process is gone
            left -= 1

        bench.api.fail = die
        with pytest.raises(ExceptionGroup):
            await bench.run(*actions)
        after = Bench()
        after.api.objects = bench.api.objects
        outcomes = await after.outcomes(*actions)
        assert set(outcomes) <= {"Done", "Unchanged"}
        assert len(after.api.objects) == len(actions)
