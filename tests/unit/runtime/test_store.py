"""The store: newest wins, what is gone stays gone, a LIST heals both ways."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.api import names
from sluice.runtime import kinds
from sluice.runtime.store import Store, slim
from tests.unit.runtime.builders import (
    KEY,
    Object,
    a_config_map,
    a_node,
    a_pod,
    a_service,
    an_object,
    owned,
)


def a_store(*objects: Object) -> Store:
    store = Store()
    store.apply("ADDED", a_service())
    for obj in objects:
        store.apply("ADDED", obj)
    return store


def pods_of(store: Store) -> dict[str, str]:
    """Name to resourceVersion of the service's pods."""
    view = store.view(KEY)
    assert view is not None
    return {pod.name: pod.resource_version for pod in view.pods}


def test_view_has_the_service_its_pods_children_and_their_nodes() -> None:
    store = a_store(a_pod("p", node="n1"), a_config_map("c", a="b"), a_node("n1"), a_node("n2"))
    view = store.view(KEY)
    assert view is not None
    assert view.service["metadata"]["name"] == "svc"
    assert [pod.name for pod in view.pods] == ["p"]
    assert list(view.children) == [("ConfigMap", "c")]
    assert list(view.nodes) == ["n1"]


def test_view_of_an_unknown_key_is_none() -> None:
    assert Store().view(KEY) is None


def test_child_that_comes_before_its_service_is_in_the_view_later() -> None:
    store = Store()
    assert store.apply("ADDED", a_pod("p")) == set()
    assert store.apply("ADDED", a_service()) == {KEY}
    assert pods_of(store) == {"p": "1"}


@pytest.mark.parametrize(
    ("event", "version", "kept", "news"),
    [
        pytest.param("MODIFIED", 9, "10", False, id="older is dropped"),
        pytest.param("MODIFIED", 10, "10", False, id="our own write, told by the watch, is no news"),
        pytest.param("MODIFIED", 11, "11", True, id="newer replaces"),
        pytest.param(None, 9, "10", False, id="older from kopf's relist is dropped"),
        pytest.param("DELETED", 9, "10", False, id="older deletion is dropped"),
        pytest.param("DELETED", 11, None, True, id="deletion removes"),
    ],
)
def test_newest_version_wins(event: str | None, version: int, kept: str | None, news: bool) -> None:
    store = a_store(a_pod("p", version=10))
    assert store.apply(event, a_pod("p", version=version)) == ({KEY} if news else set())
    assert pods_of(store).get("p") == kept


def test_late_event_does_not_revive_a_deleted_object() -> None:
    store = a_store(a_pod("p", version=10))
    store.apply("DELETED", a_pod("p", version=12))
    assert store.apply("MODIFIED", a_pod("p", version=11)) == set()
    assert pods_of(store) == {}


def test_object_that_the_api_server_says_is_gone_never_returns() -> None:
    store = a_store(a_pod("p", version=10))
    assert store.forget(kinds.POD, "uid-p") == {KEY}
    assert store.apply("MODIFIED", a_pod("p", version=99)) == set()
    assert store.apply("ADDED", a_pod("p", uid="another", version=100)) == {KEY}


def test_object_that_lost_our_label_and_got_it_back_returns() -> None:
    store = a_store(a_pod("p", version=10))
    store.apply("DELETED", a_pod("p", version=12))
    assert store.apply("ADDED", a_pod("p", version=13)) == {KEY}


@pytest.mark.parametrize(
    ("stored", "listed", "list_version", "kept", "healed"),
    [
        pytest.param(10, 10, 50, "10", 0, id="same"),
        pytest.param(10, 12, 50, "12", 1, id="a change that the watch missed"),
        pytest.param(10, 8, 9, "10", 0, id="the LIST is older than the watch"),
        pytest.param(10, None, 50, None, 1, id="a deletion that the watch missed"),
        pytest.param(60, None, 50, "60", 0, id="created after the LIST was made"),
        pytest.param(None, 12, 50, "12", 1, id="a creation that the watch missed"),
    ],
)
def test_list_heals(stored: int | None, listed: int | None, list_version: int, kept: str | None, healed: int) -> None:
    store = a_store(*([] if stored is None else [a_pod("p", version=stored)]))
    items = [] if listed is None else [a_pod("p", version=listed)]
    changed = store.replace(kinds.POD, items, str(list_version))
    assert pods_of(store).get("p") == kept
    assert store.healed["Pod"] == healed
    assert changed == ({KEY} if healed else set())


def test_list_from_before_a_deletion_does_not_revive() -> None:
    store = a_store(a_pod("p", version=10))
    store.apply("DELETED", a_pod("p", version=20))
    store.replace(kinds.POD, [a_pod("p", version=10)], "15")
    assert pods_of(store) == {}


def test_list_of_one_namespace_takes_nothing_from_another() -> None:
    store = a_store(a_pod("p", version=10))
    store.replace(kinds.POD, [], "50", namespace="elsewhere")
    assert pods_of(store) == {"p": "10"}


def test_s002_labels_alone_make_no_child() -> None:
    """A pod or object that only carries our labels, or is owned by another service, is nobody's of ours."""
    stray = a_pod("stray")
    stray["metadata"]["ownerReferences"] = []
    other = a_config_map("other", owner_uid="uid-of-another")
    bare = an_object("Service", "svc", labels={names.LABEL_MANAGED_BY: names.MANAGED_BY})
    store = a_store(stray, other, bare)
    view = store.view(KEY)
    assert view is not None
    assert (view.pods, dict(view.children)) == ((), {})


def test_router_pod_belongs_to_the_service_of_its_label() -> None:
    """Its owner is the Deployment's ReplicaSet."""
    router = a_pod("r")
    router["metadata"]["labels"][names.LABEL_COMPONENT] = names.COMPONENT_ROUTER
    router["metadata"]["ownerReferences"] = [{"kind": "ReplicaSet", "name": "x", "uid": "rs", "controller": True}]
    assert pods_of(a_store(router)) == {"r": "1"}


def test_heartbeat_of_a_node_makes_nothing_dirty_but_its_readiness_does() -> None:
    store = a_store(a_pod("p", node="n1"), a_node("n1"))
    assert store.apply("MODIFIED", a_node("n1", version=2)) == set()
    assert store.apply("MODIFIED", a_node("n1", version=3, ready="Unknown")) == {KEY}


def test_status_of_a_child_makes_nothing_dirty_but_its_spec_and_its_deletion_do() -> None:
    def budget(version: int, minimum: int, healthy: int) -> Object:
        status = {"currentHealthy": healthy}
        spec = {"minAvailable": minimum}
        return owned(an_object("PodDisruptionBudget", "b", version=version, spec=spec, status=status))

    store = a_store(budget(1, 1, 0))
    assert store.apply("MODIFIED", budget(2, 1, 1)) == set()
    assert store.apply("MODIFIED", budget(3, 2, 1)) == {KEY}
    leaving = budget(4, 2, 1)
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert store.apply("MODIFIED", leaving) == {KEY}


def test_profile_makes_every_service_dirty_and_is_in_every_view() -> None:
    store = a_store()
    profile = an_object(names.PROFILE_KIND, "h100")
    assert store.apply("ADDED", profile) == {KEY}
    view = store.view(KEY)
    assert view is not None and list(view.profiles) == ["h100"]
    store.apply("DELETED", an_object(names.PROFILE_KIND, "h100", version=2))
    view = store.view(KEY)
    assert view is not None and not view.profiles


def test_unreadable_profiles_are_unknown_not_absent() -> None:
    store = a_store()
    assert store.mark_absent(kinds.ACCELERATOR_PROFILE) == {KEY}
    view = store.view(KEY)
    assert view is not None and not view.profiles_known
    assert store.replace(kinds.ACCELERATOR_PROFILE, [], "5") == {KEY}
    view = store.view(KEY)
    assert view is not None and view.profiles_known


def test_recreated_service_of_the_same_name_does_not_inherit_children() -> None:
    store = a_store(a_pod("p"))
    store.apply("ADDED", a_service(uid="uid-new", version=20))
    store.apply("DELETED", a_service(version=21))
    view = store.view(KEY)
    assert view is not None
    assert (view.service["metadata"]["uid"], view.pods) == ("uid-new", ())


def test_versions_that_are_no_numbers_are_all_taken() -> None:
    store = a_store()
    for data in ("1", "2"):
        child = a_config_map("c", a=data)
        child["metadata"]["resourceVersion"] = "opaque"
        store.apply("MODIFIED", child)
    view = store.view(KEY)
    assert view is not None and view.children["ConfigMap", "c"]["data"] == {"a": "2"}


def test_stored_objects_have_no_managed_fields_and_the_event_keeps_its_own() -> None:
    obj = owned(an_object("ConfigMap", "c"))
    obj["metadata"]["managedFields"] = [{"manager": "x"}]
    assert "managedFields" not in slim(obj)["metadata"]
    assert "managedFields" in obj["metadata"]


History = list[tuple[str, Object]]


def a_history(seed: int, length: int) -> tuple[History, dict[str, str]]:
    """Watch events of four pods in true order, and name -> version of those that live at the end."""
    rng = random.Random(seed)
    alive: dict[str, int] = {}
    births: dict[str, int] = {}
    history: History = []
    for version in range(1, length + 1):
        name = f"p{rng.randrange(4)}"
        if name not in alive:
            births[name] = births.get(name, 0) + 1
            event = "ADDED"
        else:
            event = rng.choice(["MODIFIED", "MODIFIED", "DELETED"])
        history.append((event, a_pod(name, uid=f"{name}-{births[name]}", version=version + 10)))
        if event == "DELETED":
            del alive[name]
        else:
            alive[name] = version + 10
    return history, {name: str(version) for name, version in alive.items()}


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.data())
def test_lost_and_repeated_events_heal_with_one_list(seed: int, length: int, data: st.DataObject) -> None:
    """Whatever the watch lost or repeated (in order per stream), the LIST of the end restores the truth."""
    history, truth = a_history(seed, length)
    store = a_store()
    for event, obj in history:
        for _ in range(data.draw(st.integers(0, 2))):
            store.apply(event, obj)
    last = {obj["metadata"]["name"]: obj for event, obj in history if event != "DELETED"}
    items = [last[name] for name in truth]
    store.replace(kinds.POD, items, str(length + 10))
    assert pods_of(store) == truth
    assert store.replace(kinds.POD, items, str(length + 10)) == set()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 40))
def test_old_list_in_the_middle_changes_nothing(seed: int, length: int, at: int) -> None:
    """A LIST as old as any earlier moment never takes away or revives what the watch told since."""
    history, truth = a_history(seed, length)
    past: dict[str, Object] = {}
    for event, obj in history[: min(at, length)]:
        if event == "DELETED":
            past.pop(obj["metadata"]["name"], None)
        else:
            past[obj["metadata"]["name"]] = obj
    store = a_store()
    for event, obj in history:
        store.apply(event, obj)
    store.replace(kinds.POD, past.values(), str(min(at, length) + 10))
    assert pods_of(store) == truth


def test_absence_of_a_node_proves_something_only_when_nodes_were_listed() -> None:
    view = a_store(a_pod("p", node="gone")).view(KEY)
    assert view is not None and not view.nodes_known
    view = a_store(a_pod("p", node="gone"), a_node("n1")).view(KEY)
    assert view is not None and view.nodes_known and not view.nodes


def elsewhere(obj: Object) -> Object:
    return {**obj, "metadata": {**obj["metadata"], "namespace": "evil"}}


def test_object_of_another_namespace_is_no_child_whatever_labels_and_owner_it_claims() -> None:
    router = a_pod("router", ip="10.6.6.6")
    del router["metadata"]["ownerReferences"]
    router["metadata"]["labels"][names.LABEL_COMPONENT] = names.COMPONENT_ROUTER
    mine, forged = a_config_map("keys", a="mine"), a_config_map("keys", uid="uid-forged", a="forged")
    view = a_store(mine, elsewhere(forged), elsewhere(router), elsewhere(a_pod("p", ip="10.6.6.7"))).view(KEY)
    assert view is not None
    assert view.pods == ()
    assert view.children["ConfigMap", "keys"]["data"] == {"a": "mine"}


@pytest.mark.parametrize(
    ("ready", "lost", "proves"), [(2, 1, True), (2, 2, True), (2, 3, False), (4, 4, True), (0, 1, False), (0, 9, False)]
)
def test_so_many_nodes_not_ready_that_the_control_plane_must_be_cut_off_prove_nothing(
    ready: int, lost: int, proves: bool
) -> None:
    nodes = [a_node(f"ready-{n}") for n in range(ready)] + [a_node(f"lost-{n}", ready="Unknown") for n in range(lost)]
    store = a_store(a_pod("p", node="lost-0"), *nodes)
    view = store.view(KEY)
    assert view is not None
    assert (list(view.nodes) == ["lost-0"]) is proves
    for n in range(lost):
        store.apply("MODIFIED", a_node(f"lost-{n}", version=2))
    view = store.view(KEY)
    assert view is not None
    assert list(view.nodes) == ["lost-0"]


def test_services_with_a_rollout_under_way_are_counted_without_the_one_that_asks() -> None:
    store = Store()

    def say(name: str, reason: str, version: int, event: str = "MODIFIED") -> None:
        service = a_service(name=name, uid=f"uid-{name}", version=version)
        service["status"] = {"conditions": [{"type": "RolloutComplete", "status": "False", "reason": reason}]}
        store.apply(event, service)

    say("a", "RollingOut", 1)
    say("b", "RollingOut", 1)
    say("c", "RolledBack", 1)
    assert store.rolling(without="uid-c") == 2
    assert store.rolling(without="uid-a") == 1
    say("a", "RolloutComplete", 2)
    say("b", "RollingOut", 2, "DELETED")
    assert store.rolling(without="") == 0
