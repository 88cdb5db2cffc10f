"""Store and executor on an API server, fake and real: healing by LIST, own writes, repeated actions."""

from collections.abc import Sequence

import pytest

from sluice.api import names
from sluice.api.conditions import Reason
from sluice.api.router import WorkerList
from sluice.plan.actions import Action, Annotate, Apply, Create, Delete, ObjectRef, Outcome, Result, SetGate
from sluice.plan.snapshot import PodFacts
from sluice.runtime import kinds
from sluice.runtime.executor import CreationLog, Executor
from sluice.runtime.store import Store, View
from tests.fakeapi.contract import Contract, Object, a_config_map, a_pod, a_service, owner_of

pytestmark = pytest.mark.asyncio


class Leader:
    def held(self) -> bool:
        return True


class NoRouters:
    async def put(self, router: ObjectRef, ip: str, workers: WorkerList) -> None:
        raise AssertionError(f"no router is asked in these tests: {router} {ip} {workers}")


async def load(contract: Contract, store: Store) -> None:
    """What the healing refresh does, for the kinds used here."""
    for kind in (kinds.INFERENCE_SERVICE, kinds.POD, kinds.CONFIG_MAP):
        listed: set[str] = set()
        found = await contract.client.list(kind, contract.namespace)
        store.merge(kind, found.items, listed)
        store.prune(kind, listed, found.resource_version, contract.namespace)


def view(store: Store, contract: Contract) -> View:
    seen = store.view((names.SERVICE_KIND, contract.namespace, "s"))
    assert seen is not None
    return seen


def pods_of(store: Store, contract: Contract) -> dict[str, PodFacts]:
    return {pod.name: pod for pod in view(store, contract).pods}


async def an_owner(contract: Contract) -> Object:
    return await contract.client.create(kinds.INFERENCE_SERVICE, a_service("s", contract.namespace))


def an_engine_pod(name: str, owner: Object) -> Object:
    labels = {names.LABEL_SERVICE_UID: owner["metadata"]["uid"], names.LABEL_COMPONENT: names.COMPONENT_ENGINE}
    return a_pod(name, owner["metadata"]["namespace"], labels=labels, ownerReferences=[owner_of(owner)])


def a_child(name: str, owner: Object, value: str = "1") -> Object:
    return a_config_map(
        name,
        owner["metadata"]["namespace"],
        data={"key": value},
        labels={names.LABEL_MANAGED_BY: names.MANAGED_BY, names.LABEL_SERVICE_UID: "u"},
        ownerReferences=[owner_of(owner)],
    )


async def run(contract: Contract, store: Store, owner: Object, actions: Sequence[Action]) -> tuple[Result, ...]:
    executor = Executor(contract.client, store, NoRouters(), Leader(), creations=CreationLog(), creation_limit=100)
    return await executor.run(owner["metadata"]["uid"], actions)


# Store


async def test_list_tells_what_was_created_and_what_was_deleted_unseen(contract: Contract) -> None:
    owner = await an_owner(contract)
    made = await contract.client.create(kinds.POD, an_engine_pod("p0", owner))
    await contract.client.create(kinds.POD, an_engine_pod("p1", owner))
    store = Store()
    await load(contract, store)
    assert set(pods_of(store, contract)) == {"p0", "p1"}
    await contract.client.delete(kinds.POD, contract.namespace, "p0", uid=made["metadata"]["uid"], grace_s=0)
    await contract.client.create(kinds.POD, an_engine_pod("p2", owner))
    await load(contract, store)
    assert set(pods_of(store, contract)) == {"p1", "p2"}


async def test_own_write_is_seen_before_any_watch_and_survives_an_older_list(contract: Contract) -> None:
    owner = await an_owner(contract)
    store = Store()
    old = await contract.client.list(kinds.POD, contract.namespace)
    await load(contract, store)
    store.apply("MODIFIED", await contract.client.create(kinds.POD, an_engine_pod("p0", owner)))
    assert set(pods_of(store, contract)) == {"p0"}
    store.prune(kinds.POD, set(), old.resource_version, contract.namespace)
    assert set(pods_of(store, contract)) == {"p0"}, "a LIST from before the write takes nothing away"


async def test_older_version_never_replaces_a_newer_one(contract: Contract) -> None:
    owner = await an_owner(contract)
    made = await contract.client.create(kinds.POD, an_engine_pod("p0", owner))
    note = {"metadata": {"annotations": {names.ANNOTATION_DRAIN_REASON: "ScaleIn"}}}
    newer = await contract.client.patch(kinds.POD, contract.namespace, "p0", note)
    store = Store()
    await load(contract, store)
    assert not store.apply("MODIFIED", made)
    kept = pods_of(store, contract)["p0"]
    assert int(kept.resource_version) >= int(newer["metadata"]["resourceVersion"])
    assert kept.drain_reason == "ScaleIn"


async def test_pod_of_another_owner_is_nobodys_child(contract: Contract) -> None:
    owner = await an_owner(contract)
    stranger = an_engine_pod("p0", owner)
    stranger["metadata"]["ownerReferences"] = []
    await contract.client.create(kinds.POD, stranger)
    store = Store()
    await load(contract, store)
    assert not pods_of(store, contract)


# Executor


async def test_actions_carried_out_twice_change_nothing_the_second_time(contract: Contract) -> None:
    owner = await an_owner(contract)
    store = Store()
    await load(contract, store)
    actions: list[Action] = [Apply(a_child("c", owner), scope="c"), Create(an_engine_pod("p", owner), scope="p")]
    first = await run(contract, store, owner, actions)
    assert [r.outcome for r in first] == [Outcome.DONE, Outcome.DONE]
    versions = await live_versions(contract)
    second = await run(contract, store, owner, actions)
    assert second[0].outcome is Outcome.UNCHANGED
    assert second[1].outcome in (Outcome.DONE, Outcome.UNCHANGED)
    assert await live_versions(contract) == versions


async def test_actions_repeated_by_a_process_that_knows_nothing_change_nothing(contract: Contract) -> None:
    owner = await an_owner(contract)
    actions: list[Action] = [Apply(a_child("c", owner), scope="c"), Create(an_engine_pod("p", owner), scope="p")]
    await run(contract, Store(), owner, actions)
    versions = await live_versions(contract)
    again = await run(contract, Store(), owner, actions)
    assert all(r.outcome in (Outcome.DONE, Outcome.UNCHANGED) for r in again), again
    assert await live_versions(contract) == versions


async def live_versions(contract: Contract) -> dict[str, str]:
    found = [
        *(await contract.client.list(kinds.POD, contract.namespace)).items,
        *(await contract.client.list(kinds.CONFIG_MAP, contract.namespace)).items,
    ]
    # A real scheduler may report on the pod meanwhile: identity counts for pods, the version for the rest.
    return {
        obj["metadata"]["name"]: obj["metadata"]["uid" if obj["kind"] == "Pod" else "resourceVersion"] for obj in found
    }


async def test_changed_child_is_applied_and_foreign_edit_is_taken_back(contract: Contract) -> None:
    owner = await an_owner(contract)
    store = Store()
    await load(contract, store)
    await run(contract, store, owner, [Apply(a_child("c", owner), scope="c")])
    (result,) = await run(contract, store, owner, [Apply(a_child("c", owner, "2"), scope="c")])
    assert result.outcome is Outcome.DONE
    edited = await contract.client.patch(kinds.CONFIG_MAP, contract.namespace, "c", {"data": {"key": "theirs"}})
    store.apply("MODIFIED", edited)
    await run(contract, store, owner, [Apply(a_child("c", owner, "2"), scope="c")])
    assert (await contract.client.get(kinds.CONFIG_MAP, contract.namespace, "c"))["data"]["key"] == "2"


async def test_s002_foreign_object_is_a_conflict_and_stays_as_it_is(contract: Contract) -> None:
    owner = await an_owner(contract)
    foreign = await contract.client.create(kinds.CONFIG_MAP, a_config_map("c", contract.namespace))
    await contract.client.create(kinds.POD, a_pod("p", contract.namespace))
    actions: list[Action] = [Apply(a_child("c", owner), scope="c"), Create(an_engine_pod("p", owner), scope="p")]
    results = await run(contract, Store(), owner, actions)
    assert [(r.outcome, r.reason) for r in results] == [(Outcome.REFUSED, Reason.NAME_CONFLICT)] * 2
    live = await contract.client.get(kinds.CONFIG_MAP, contract.namespace, "c")
    assert live["metadata"]["resourceVersion"] == foreign["metadata"]["resourceVersion"]


async def test_s010_refused_child_does_not_stop_the_others(contract: Contract) -> None:
    owner = await an_owner(contract)
    bad = an_engine_pod("bad", owner)
    bad["metadata"]["labels"]["too-long"] = "x" * 64
    actions = [Create(bad, scope="bad", instance="bad"), Create(an_engine_pod("p", owner), scope="p", instance="p")]
    results = await run(contract, Store(), owner, actions)
    assert [r.outcome for r in results] == [Outcome.REFUSED, Outcome.DONE]
    assert "metadata.labels" in results[0].message


async def test_gate_annotation_and_delete_of_a_replaced_pod_touch_nothing(contract: Contract) -> None:
    owner = await an_owner(contract)
    first = await contract.client.create(kinds.POD, an_engine_pod("p", owner))
    await contract.client.delete(kinds.POD, contract.namespace, "p", uid=first["metadata"]["uid"], grace_s=0)
    second = await contract.client.create(kinds.POD, an_engine_pod("p", owner))
    old = ObjectRef("Pod", contract.namespace, "p", first["metadata"]["uid"])
    actions: list[Action] = [
        SetGate(old, True, "Serving", "", scope="a"),
        Annotate(old, {names.ANNOTATION_DRAIN_REASON: "ScaleIn"}, scope="b"),
        Delete(old, "ScaleIn", scope="c"),
    ]
    results = await run(contract, Store(), owner, actions)
    assert all(r.outcome in (Outcome.DONE, Outcome.UNCHANGED) for r in results), results
    live = await contract.client.get(kinds.POD, contract.namespace, "p")
    assert live["metadata"]["uid"] == second["metadata"]["uid"]
    assert names.ANNOTATION_DRAIN_REASON not in live["metadata"].get("annotations", {})
    assert not any(c["type"] == names.READINESS_GATE for c in live["status"].get("conditions") or [])
