"""The API as our client meets it: verbs, error classes, ownership, deletion. Runs on the fake and on a real server."""

import asyncio
import json

import pytest

from sluice.api import names
from sluice.runtime import kinds, kube
from sluice.runtime.errors import (
    AlreadyExists,
    DisruptionRefused,
    Invalid,
    NotFound,
    Stale,
)
from tests.fakeapi.contract import Contract, Object, a_config_map, a_pod, a_service, owner_of

pytestmark = pytest.mark.asyncio
ANNOTATED = "example.com/note"


async def test_create_answers_with_identity_and_get_agrees(contract: Contract) -> None:
    made = await contract.client.create(kinds.CONFIG_MAP, a_config_map("a", contract.namespace))
    assert made["metadata"]["uid"] and made["metadata"]["creationTimestamp"]
    assert made["metadata"]["resourceVersion"].isdigit()
    assert await contract.client.get(kinds.CONFIG_MAP, contract.namespace, "a") == made


async def test_second_create_says_already_exists(contract: Contract) -> None:
    await contract.client.create(kinds.CONFIG_MAP, a_config_map("a", contract.namespace))
    with pytest.raises(AlreadyExists):
        await contract.client.create(kinds.CONFIG_MAP, a_config_map("a", contract.namespace))


async def test_create_in_a_missing_namespace_is_not_found(contract: Contract) -> None:
    with pytest.raises(NotFound):
        await contract.client.create(kinds.CONFIG_MAP, a_config_map("a", "no-such-namespace"))


async def test_get_of_nothing_is_not_found(contract: Contract) -> None:
    with pytest.raises(NotFound):
        await contract.client.get(kinds.POD, contract.namespace, "absent")


async def test_too_long_label_is_invalid_and_names_the_field(contract: Contract) -> None:
    body = a_pod("a", contract.namespace, labels={"app": "x" * 64})
    with pytest.raises(Invalid) as refused:
        await contract.client.create(kinds.POD, body)
    assert any(path.startswith("metadata.labels") for path, _ in refused.value.causes)


async def test_service_name_over_63_characters_is_invalid(contract: Contract) -> None:
    body = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "s" * 64, "namespace": contract.namespace},
        "spec": {"ports": [{"port": 80}]},
    }
    with pytest.raises(Invalid):
        await contract.client.create(kinds.SERVICE, body)


async def test_list_has_only_our_objects_with_their_type_and_a_version(contract: Contract) -> None:
    mine = await contract.client.create(kinds.POD, a_pod("mine", contract.namespace))
    foreign = a_pod("foreign", contract.namespace)
    foreign["metadata"]["labels"] = {"app": "foreign"}
    await contract.client.create(kinds.POD, foreign)
    found = await contract.client.list(kinds.POD, contract.namespace)
    assert [(o["kind"], o["apiVersion"], o["metadata"]["uid"]) for o in found.items] == [
        ("Pod", "v1", mine["metadata"]["uid"])
    ]
    assert int(found.resource_version) >= int(mine["metadata"]["resourceVersion"])


async def test_list_follows_pages(contract: Contract, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "PAGE", 2)
    for i in range(5):
        await contract.client.create(kinds.CONFIG_MAP, a_config_map(f"c{i}", contract.namespace))
    found = await contract.client.list(kinds.CONFIG_MAP, contract.namespace, selector="")
    assert {o["metadata"]["name"] for o in found.items} >= {f"c{i}" for i in range(5)}


# Server-side apply


async def test_apply_without_uid_creates_and_never_changes_what_is_there(contract: Contract) -> None:
    body = a_config_map("a", contract.namespace)
    made = await contract.client.apply(kinds.CONFIG_MAP, body)
    assert made["data"] == {"key": "value"}
    with pytest.raises(AlreadyExists):
        await contract.client.apply(kinds.CONFIG_MAP, {**body, "data": {"key": "other"}})
    assert (await contract.client.get(kinds.CONFIG_MAP, contract.namespace, "a"))["data"] == {"key": "value"}


async def test_apply_with_uid_changes_only_that_object(contract: Contract) -> None:
    made = await contract.client.apply(kinds.CONFIG_MAP, a_config_map("a", contract.namespace))
    changed = a_config_map("a", contract.namespace, data={"key": "new"})
    with pytest.raises(Stale):
        await contract.client.apply(kinds.CONFIG_MAP, changed, uid="00000000-0000-0000-0000-000000000000")
    live = await contract.client.apply(kinds.CONFIG_MAP, changed, uid=made["metadata"]["uid"])
    assert live["data"] == {"key": "new"}


async def test_apply_with_uid_does_not_create_again_what_is_gone(contract: Contract) -> None:
    body = a_config_map("a", contract.namespace)
    made = await contract.client.apply(kinds.CONFIG_MAP, body)
    await contract.client.delete(kinds.CONFIG_MAP, contract.namespace, "a", uid=made["metadata"]["uid"])
    with pytest.raises(Stale):
        await contract.client.apply(kinds.CONFIG_MAP, body, uid=made["metadata"]["uid"])
    with pytest.raises(NotFound):
        await contract.client.get(kinds.CONFIG_MAP, contract.namespace, "a")


async def test_same_apply_again_is_no_write(contract: Contract) -> None:
    body = a_config_map("a", contract.namespace)
    made = await contract.client.apply(kinds.CONFIG_MAP, body)
    again = await contract.client.apply(kinds.CONFIG_MAP, body, uid=made["metadata"]["uid"])
    assert again["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


async def test_field_left_out_of_the_next_apply_is_removed(contract: Contract) -> None:
    both = a_config_map("a", contract.namespace, data={"keep": "1", "drop": "2"}, annotations={ANNOTATED: "x"})
    made = await contract.client.apply(kinds.CONFIG_MAP, both)
    fewer = a_config_map("a", contract.namespace, data={"keep": "1"})
    live = await contract.client.apply(kinds.CONFIG_MAP, fewer, uid=made["metadata"]["uid"])
    assert live["data"] == {"keep": "1"}
    assert ANNOTATED not in live["metadata"].get("annotations", {})


async def test_apply_keeps_what_others_added_and_takes_back_what_they_changed(contract: Contract) -> None:
    body = a_config_map("a", contract.namespace)
    made = await contract.client.apply(kinds.CONFIG_MAP, body)
    edit = {"data": {"key": "theirs", "extra": "theirs"}}
    path = kinds.CONFIG_MAP.path(contract.namespace, "a")
    code, _ = await contract.raw("PATCH", path, edit, content_type=kube.MERGE_PATCH, query=(("fieldManager", "human"),))
    assert code == 200
    live = await contract.client.apply(kinds.CONFIG_MAP, body, uid=made["metadata"]["uid"])
    assert live["data"] == {"key": "value", "extra": "theirs"}


async def test_list_items_with_keys_have_owners_of_their_own(contract: Contract) -> None:
    template = {
        "metadata": {"labels": {"app": "d"}},
        "spec": {"containers": [{"name": "a", "image": "a:1", "env": [{"name": "X", "value": "1"}]}]},
    }
    body: Object = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "d", "namespace": contract.namespace},
        "spec": {"replicas": 0, "selector": {"matchLabels": {"app": "d"}}, "template": template},
    }
    made = await contract.client.apply(kinds.DEPLOYMENT, body)
    injected = {"spec": {"template": {"spec": {"containers": [{"name": "mesh", "image": "mesh:1"}]}}}}
    code, _ = await contract.raw(
        "PATCH",
        kinds.DEPLOYMENT.path(contract.namespace, "d"),
        injected,
        content_type=kube.STRATEGIC_PATCH,
        query=(("fieldManager", "mesh"),),
    )
    assert code == 200
    body["spec"]["template"]["spec"]["containers"][0]["env"] = [{"name": "Y", "value": "2"}]
    live = await contract.client.apply(kinds.DEPLOYMENT, body, uid=made["metadata"]["uid"])
    containers = {c["name"]: c for c in live["spec"]["template"]["spec"]["containers"]}
    assert set(containers) == {"a", "mesh"}
    assert containers["a"]["env"] == [{"name": "Y", "value": "2"}]


async def test_dry_run_apply_leaves_nothing(contract: Contract) -> None:
    await contract.client.apply(kinds.CONFIG_MAP, a_config_map("a", contract.namespace), dry_run=True)
    with pytest.raises(NotFound):
        await contract.client.get(kinds.CONFIG_MAP, contract.namespace, "a")


async def test_immutable_field_is_invalid(contract: Contract) -> None:
    body: Object = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "d", "namespace": contract.namespace},
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": {"app": "d"}},
            "template": {
                "metadata": {"labels": {"app": "d", "other": "x"}},
                "spec": {"containers": [{"name": "a", "image": "a:1"}]},
            },
        },
    }
    made = await contract.client.apply(kinds.DEPLOYMENT, body)
    body["spec"]["selector"] = {"matchLabels": {"app": "d", "other": "x"}}
    with pytest.raises(Invalid):
        await contract.client.apply(kinds.DEPLOYMENT, body, uid=made["metadata"]["uid"])


# InferenceService: defaults, validation, status


async def test_new_service_has_defaults_and_an_unobserved_status(contract: Contract) -> None:
    minimal = a_service("s", contract.namespace)
    minimal["spec"] = {"model": {"uri": "hf://example/model"}, "engine": {"type": "Simulated"}}
    made = await contract.client.create(kinds.INFERENCE_SERVICE, minimal)
    assert made["metadata"]["generation"] == 1
    assert made["status"]["observedGeneration"] == -1
    assert made["spec"]["drain"]["timeoutSeconds"] == 600
    assert made["spec"]["pools"][0]["replicas"] == 1


async def test_unknown_field_is_invalid_in_create_and_in_apply(contract: Contract) -> None:
    body = a_service("s", contract.namespace, spec={"colour": "blue"})
    with pytest.raises(Invalid):
        await contract.client.create(kinds.INFERENCE_SERVICE, body)
    with pytest.raises(Invalid):
        await contract.client.apply(kinds.INFERENCE_SERVICE, body)


async def test_value_out_of_range_names_field(contract: Contract) -> None:
    body = a_service("s", contract.namespace, replicas=-1)
    with pytest.raises(Invalid) as refused:
        await contract.client.create(kinds.INFERENCE_SERVICE, body)
    assert any(path == "spec.pools[0].replicas" for path, _ in refused.value.causes)


async def test_generation_counts_changes_of_spec_only(contract: Contract) -> None:
    made = await contract.client.create(kinds.INFERENCE_SERVICE, a_service("s", contract.namespace))
    uid = made["metadata"]["uid"]

    async def patch(body: Object) -> Object:
        return await contract.client.patch(kinds.INFERENCE_SERVICE, contract.namespace, "s", body, uid=uid)

    assert (await patch({"metadata": {"labels": {"a": "b"}}}))["metadata"]["generation"] == 1
    assert (await patch({"spec": {"suspend": True}}))["metadata"]["generation"] == 2
    assert (await patch({"spec": {"suspend": True}}))["metadata"]["generation"] == 2


def a_status(made: Object, **fields: object) -> Object:
    meta = {k: made["metadata"][k] for k in ("name", "namespace", "resourceVersion")}
    condition = {
        "type": "Ready",
        "status": "False",
        "reason": "Starting",
        "message": "m",
        "observedGeneration": 1,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    status = {"observedGeneration": 1, "conditions": [condition], **fields}
    return {"apiVersion": names.API_VERSION, "kind": names.SERVICE_KIND, "metadata": meta, "status": status}


async def test_status_apply_touches_status_alone_and_is_quiet_when_repeated(contract: Contract) -> None:
    made = await contract.client.create(kinds.INFERENCE_SERVICE, a_service("s", contract.namespace))
    first = await contract.client.apply_status(kinds.INFERENCE_SERVICE, a_status(made))
    assert (first["spec"], first["metadata"]["generation"]) == (made["spec"], 1)
    assert first["status"]["observedGeneration"] == 1
    again = await contract.client.apply_status(kinds.INFERENCE_SERVICE, a_status(first))
    assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


async def test_status_apply_on_an_old_version_is_stale(contract: Contract) -> None:
    made = await contract.client.create(kinds.INFERENCE_SERVICE, a_service("s", contract.namespace))
    await contract.client.apply_status(kinds.INFERENCE_SERVICE, a_status(made))
    with pytest.raises(Stale):
        await contract.client.apply_status(kinds.INFERENCE_SERVICE, a_status(made, observedGeneration=2))


async def test_status_field_left_out_is_removed_and_defaulted_again(contract: Contract) -> None:
    made = await contract.client.create(kinds.INFERENCE_SERVICE, a_service("s", contract.namespace))
    full = await contract.client.apply_status(kinds.INFERENCE_SERVICE, a_status(made, url="http://s"))
    assert full["status"]["url"] == "http://s"
    bare = a_status(full)
    del bare["status"]["observedGeneration"]
    live = await contract.client.apply_status(kinds.INFERENCE_SERVICE, bare)
    assert "url" not in live["status"]
    assert live["status"]["observedGeneration"] == -1


async def test_wiped_status_comes_back_with_its_default(contract: Contract) -> None:
    made = await contract.client.create(kinds.INFERENCE_SERVICE, a_service("s", contract.namespace))
    await contract.client.apply_status(kinds.INFERENCE_SERVICE, a_status(made))
    path = kinds.INFERENCE_SERVICE.path(contract.namespace, "s", "status")
    code, live = await contract.raw("PATCH", path, {"status": None}, content_type=kube.MERGE_PATCH)
    assert code == 200
    assert live["status"] == {"observedGeneration": -1}


# Patches


async def test_merge_patch_is_guarded_by_uid(contract: Contract) -> None:
    made = await contract.client.create(kinds.POD, a_pod("p", contract.namespace))
    note = {"metadata": {"annotations": {ANNOTATED: "x"}}}
    with pytest.raises(Stale):
        await contract.client.patch(
            kinds.POD, contract.namespace, "p", note, uid="00000000-0000-0000-0000-000000000000"
        )
    live = await contract.client.patch(kinds.POD, contract.namespace, "p", note, uid=made["metadata"]["uid"])
    assert live["metadata"]["annotations"][ANNOTATED] == "x"
    gone = {"metadata": {"annotations": {ANNOTATED: None}}}
    live = await contract.client.patch(kinds.POD, contract.namespace, "p", gone, uid=made["metadata"]["uid"])
    assert ANNOTATED not in live["metadata"].get("annotations", {})


async def test_readiness_gate_keeps_the_kubelets_conditions(contract: Contract) -> None:
    made = await contract.client.create(kinds.POD, a_pod("p", contract.namespace))
    uid = made["metadata"]["uid"]
    kubelets = {"status": {"conditions": [{"type": "ContainersReady", "status": "True"}]}}
    ours = {"status": {"conditions": [{"type": names.READINESS_GATE, "status": "True", "reason": "Serving"}]}}
    for patch in (kubelets, ours, ours):
        live = await contract.client.patch(
            kinds.POD, contract.namespace, "p", patch, uid=uid, subresource="status", strategic=True
        )
    found = {c["type"]: c["status"] for c in live["status"]["conditions"]}
    assert found["ContainersReady"] == "True" and found[names.READINESS_GATE] == "True"


async def test_gate_on_a_pod_of_another_uid_is_stale(contract: Contract) -> None:
    await contract.client.create(kinds.POD, a_pod("p", contract.namespace))
    ours = {"status": {"conditions": [{"type": names.READINESS_GATE, "status": "True"}]}}
    with pytest.raises(Stale):
        await contract.client.patch(
            kinds.POD,
            contract.namespace,
            "p",
            ours,
            uid="00000000-0000-0000-0000-000000000000",
            subresource="status",
            strategic=True,
        )


async def test_strategic_merge_is_not_for_custom_kinds(contract: Contract) -> None:
    await contract.client.create(kinds.INFERENCE_SERVICE, a_service("s", contract.namespace))
    with pytest.raises(Invalid):
        await contract.client.patch(
            kinds.INFERENCE_SERVICE, contract.namespace, "s", {"spec": {"suspend": True}}, strategic=True
        )


# Deletion


async def test_delete_of_another_uid_leaves_the_object(contract: Contract) -> None:
    made = await contract.client.create(kinds.CONFIG_MAP, a_config_map("a", contract.namespace))
    wrong = "00000000-0000-0000-0000-000000000000"
    assert await contract.client.delete(kinds.CONFIG_MAP, contract.namespace, "a", uid=wrong) is None
    live = await contract.client.get(kinds.CONFIG_MAP, contract.namespace, "a")
    assert live["metadata"]["uid"] == made["metadata"]["uid"]


async def test_deleted_config_map_is_gone_and_deleting_again_is_fine(contract: Contract) -> None:
    made = await contract.client.create(kinds.CONFIG_MAP, a_config_map("a", contract.namespace))
    for _ in range(2):
        assert (
            await contract.client.delete(kinds.CONFIG_MAP, contract.namespace, "a", uid=made["metadata"]["uid"]) is None
        )
    with pytest.raises(NotFound):
        await contract.client.get(kinds.CONFIG_MAP, contract.namespace, "a")


async def test_running_pod_lives_on_for_its_grace(contract: Contract) -> None:
    made = await contract.client.create(kinds.POD, a_pod("p", contract.namespace, node="some-node"))
    uid = made["metadata"]["uid"]
    last = await contract.client.delete(kinds.POD, contract.namespace, "p", uid=uid, grace_s=20)
    assert last is not None
    assert last["metadata"]["deletionGracePeriodSeconds"] == 20
    live = await contract.client.get(kinds.POD, contract.namespace, "p")
    assert live["metadata"]["deletionTimestamp"]
    await contract.client.delete(kinds.POD, contract.namespace, "p", uid=uid, grace_s=0)
    with pytest.raises(NotFound):
        await contract.client.get(kinds.POD, contract.namespace, "p")


async def test_deleted_service_answers_with_a_status(contract: Contract) -> None:
    made = await contract.client.create(kinds.INFERENCE_SERVICE, a_service("s", contract.namespace))
    assert (
        await contract.client.delete(kinds.INFERENCE_SERVICE, contract.namespace, "s", uid=made["metadata"]["uid"])
        is None
    )


async def test_finalizer_of_others_keeps_a_deleted_service(contract: Contract) -> None:
    body = a_service("s", contract.namespace, finalizers=["example.com/hold"])
    made = await contract.client.create(kinds.INFERENCE_SERVICE, body)
    uid = made["metadata"]["uid"]
    last = await contract.client.delete(kinds.INFERENCE_SERVICE, contract.namespace, "s", uid=uid)
    assert last is not None and last["metadata"]["deletionTimestamp"]
    release = {"metadata": {"finalizers": None}}
    await contract.client.patch(kinds.INFERENCE_SERVICE, contract.namespace, "s", release, uid=uid)
    with pytest.raises(NotFound):
        await contract.client.get(kinds.INFERENCE_SERVICE, contract.namespace, "s")


async def test_children_of_a_deleted_service_are_collected(contract: Contract) -> None:
    made = await contract.client.create(kinds.INFERENCE_SERVICE, a_service("s", contract.namespace))
    child = a_config_map("child", contract.namespace, ownerReferences=[owner_of(made)])
    await contract.client.create(kinds.CONFIG_MAP, child)
    await contract.client.create(kinds.CONFIG_MAP, a_config_map("free", contract.namespace))
    await contract.client.delete(kinds.INFERENCE_SERVICE, contract.namespace, "s", uid=made["metadata"]["uid"])
    await contract.until("the child is gone", lambda: is_gone(contract, "child"))
    assert not await is_gone(contract, "free")


async def test_foreground_deletion_waits_for_the_children(contract: Contract) -> None:
    made = await contract.client.create(kinds.INFERENCE_SERVICE, a_service("s", contract.namespace))
    uid = made["metadata"]["uid"]
    held = a_config_map("child", contract.namespace, ownerReferences=[owner_of(made)], finalizers=["example.com/hold"])
    child = await contract.client.create(kinds.CONFIG_MAP, held)
    await contract.client.delete(kinds.INFERENCE_SERVICE, contract.namespace, "s", uid=uid, foreground=True)

    async def child_is_terminating() -> bool:
        live = await contract.client.get(kinds.CONFIG_MAP, contract.namespace, "child")
        return "deletionTimestamp" in live["metadata"]

    await contract.until("the child is being deleted", child_is_terminating)
    assert (await contract.client.get(kinds.INFERENCE_SERVICE, contract.namespace, "s"))["metadata"]["uid"] == uid
    await contract.client.patch(
        kinds.CONFIG_MAP,
        contract.namespace,
        "child",
        {"metadata": {"finalizers": None}},
        uid=child["metadata"]["uid"],
    )

    async def owner_is_gone() -> bool:
        try:
            await contract.client.get(kinds.INFERENCE_SERVICE, contract.namespace, "s")
        except NotFound:
            return True
        return False

    await contract.until("the service is gone", owner_is_gone)


async def is_gone(contract: Contract, config_map: str) -> bool:
    try:
        await contract.client.get(kinds.CONFIG_MAP, contract.namespace, config_map)
    except NotFound:
        return True
    return False


# Eviction, Lease, Events, discovery


async def test_eviction_obeys_the_budget(contract: Contract) -> None:
    running = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True"}, {"type": "ContainersReady", "status": "True"}],
    }
    uids = {}
    for name in ("p0", "p1"):
        body = a_pod(name, contract.namespace, node="some-node", labels={"budget": "b"})
        uids[name] = (await contract.client.create(kinds.POD, body))["metadata"]["uid"]
        await contract.client.patch(
            kinds.POD, contract.namespace, name, {"status": running}, subresource="status", strategic=True
        )
    budget: Object = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "b", "namespace": contract.namespace},
        "spec": {"minAvailable": 2, "selector": {"matchLabels": {"budget": "b"}}},
    }
    made = await contract.client.apply(kinds.POD_DISRUPTION_BUDGET, budget)
    with pytest.raises(DisruptionRefused):
        await contract.client.evict(kinds.POD, contract.namespace, "p0", uid=uids["p0"])
    budget["spec"]["minAvailable"] = 1
    await contract.client.apply(kinds.POD_DISRUPTION_BUDGET, budget, uid=made["metadata"]["uid"])

    async def is_evicted() -> bool:
        try:
            await contract.client.evict(kinds.POD, contract.namespace, "p0", uid=uids["p0"])
        except DisruptionRefused:
            return False
        return True

    await contract.until("the eviction is allowed", is_evicted)
    live = await contract.client.get(kinds.POD, contract.namespace, "p0")
    assert "deletionTimestamp" in live["metadata"]
    assert any(c["type"] == "DisruptionTarget" and c["status"] == "True" for c in live["status"]["conditions"])


async def test_only_one_holder_takes_the_lease(contract: Contract) -> None:
    body = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "l", "namespace": contract.namespace},
        "spec": {"holderIdentity": "a", "leaseDurationSeconds": 15, "renewTime": "2026-01-01T00:00:00.000000Z"},
    }
    made = await contract.client.create(kinds.LEASE, body)
    first = {**made, "spec": {**made["spec"], "holderIdentity": "b"}}
    second = {**made, "spec": {**made["spec"], "holderIdentity": "c"}}
    assert (await contract.client.replace(kinds.LEASE, first))["spec"]["holderIdentity"] == "b"
    with pytest.raises(Stale):
        await contract.client.replace(kinds.LEASE, second)


async def test_note_of_an_event_cannot_change(contract: Contract) -> None:
    event = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": "e", "namespace": contract.namespace},
        "eventTime": "2026-01-01T00:00:00.000000Z",
        "reportingController": "sluice",
        "reportingInstance": "sluice-0",
        "action": "Reconcile",
        "reason": "Created",
        "note": "one",
        "type": "Normal",
        "regarding": {"kind": "Namespace", "name": contract.namespace, "namespace": contract.namespace},
    }
    await contract.client.create(kinds.EVENT, event)
    with pytest.raises(Invalid):
        await contract.client.patch(kinds.EVENT, contract.namespace, "e", {"note": "two"})
    series = {"series": {"count": 2, "lastObservedTime": "2026-01-01T00:01:00.000000Z"}}
    live = await contract.client.patch(kinds.EVENT, contract.namespace, "e", series)
    assert live["series"]["count"] == 2


async def test_discovery_names_our_kinds_and_nothing_for_an_absent_group(contract: Contract) -> None:
    served = await contract.client.api_resources(names.GROUP, names.VERSION)
    assert {"inferenceservices", "inferenceservices/status", "acceleratorprofiles"} <= served
    assert await contract.client.api_resources("absent.example.com", "v1") == set()


async def test_kind_that_is_not_served_is_not_found(contract: Contract) -> None:
    absent = kinds.Kind("Thing", "absent.example.com", "v1", "things")
    with pytest.raises(NotFound):
        await contract.client.list(absent)


async def test_access_review_and_signing_keys(contract: Contract) -> None:
    assert await contract.client.is_allowed("create", kinds.POD, contract.namespace)
    keys = json.loads(await contract.client.signing_keys())["keys"]
    assert keys and all("kty" in key for key in keys)


async def test_many_creates_at_once_make_one_object(contract: Contract) -> None:
    body = a_pod("p", contract.namespace)
    tries = [contract.client.create(kinds.POD, body) for _ in range(8)]
    done = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(answer, dict) for answer in done) == 1
    assert sum(isinstance(answer, AlreadyExists) for answer in done) == 7
