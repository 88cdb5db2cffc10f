"""Scenarios of the behaviour catalogue on a real API server, with the operator as a real process and played pods."""

import time
from datetime import UTC, datetime
from typing import Any

import pytest

from sluice.api import names
from sluice.api.router import Worker, WorkerList
from sluice.runtime import kinds
from tests.api.support import Stage

Object = dict[str, Any]

IDLE_S = 30.0
EVENTS = "/apis/events.k8s.io/v1/namespaces/{}/events"


def test_s001_longest_name_serves_and_a_longer_one_is_refused_with_the_limit(stage: Stage) -> None:
    longest = "a" * 63
    stage.serve(longest)
    for kind in (kinds.POD, kinds.SERVICE, kinds.DEPLOYMENT, kinds.CONFIG_MAP, kinds.CONTROLLER_REVISION):
        for child in stage.objects(kind):
            labels = child["metadata"]["labels"]
            assert all(len(value) <= 63 for value in labels.values()), labels
    too_long = {**stage.service(longest), "metadata": {"name": "a" * 64, "namespace": stage.namespace}}
    status, answer = stage.api.request("POST", stage.path(kinds.INFERENCE_SERVICE), too_long)
    assert status == 422
    assert "63" in answer["message"]


def test_s002_neighbours_by_name_share_nothing_and_foreign_objects_are_left_alone(stage: Stage) -> None:
    foreign = {"metadata": {"name": "taken"}, "spec": {"ports": [{"port": 81}]}}
    before = stage.api.create(stage.path(kinds.SERVICE), foreign)
    stage.create_service("taken")
    stage.serve("a", replicas=2)
    stage.serve("a-1", replicas=1)
    owners = [pod["metadata"]["labels"][names.LABEL_SERVICE_UID] for pod in stage.pods()]
    a, a1 = (stage.service(name)["metadata"]["uid"] for name in ("a", "a-1"))
    assert (owners.count(a), owners.count(a1)) == (2, 1)
    stage.until("the conflict is a condition", lambda: stage.condition("Ready", "taken")["reason"] == "NameConflict")
    assert "taken" in stage.condition("Ready", "taken")["message"]
    after = stage.api.get(stage.path(kinds.SERVICE, "taken"))
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    stage.delete_service("taken")
    stage.until("the service is gone", lambda: _is_absent(stage, kinds.INFERENCE_SERVICE, "taken"))
    assert not _is_absent(stage, kinds.SERVICE, "taken"), "a foreign object is never deleted"


def test_s007_no_pod_gets_service_variables(stage: Stage) -> None:
    stage.serve()
    for pod in [*stage.pods(), *stage.pods(names.COMPONENT_ROUTER)]:
        assert pod["spec"]["enableServiceLinks"] is False, pod["metadata"]["name"]


def test_s009_steady_state_writes_nothing(stage: Stage) -> None:
    """Short form: 30 s; the long one is `make bench`. An Event that was recorded before and arrives late (its first
    request was lost) is nothing that the steady state wrote."""
    stage.serve(replicas=2)
    _wait_quiet(stage, 10.0)
    mark, began = stage.cluster.bed.audit.mark(), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S")
    end = time.monotonic() + IDLE_S
    stage.until("30 quiet seconds", lambda: time.monotonic() > end, IDLE_S + 10)
    events = stage.api.get(f"/apis/events.k8s.io/v1/namespaces/{stage.namespace}/events")["items"]
    told = {e["metadata"]["name"]: e for e in events if e["reportingController"] == names.GROUP}
    late = {name for name, event in told.items() if event["eventTime"] < began}
    written = [w for w in stage.operator_writes(mark) if not (w.resource == "events" and w.name in late)]
    assert not written, [[w, told.get(w.name)] for w in written]


def test_s010_child_that_differs_in_an_immutable_field_stops_nothing_else(stage: Stage) -> None:
    """The router's Deployment has a selector that can't be changed; scaling the pool goes on."""
    service = stage.serve()
    (deployment,) = stage.objects(kinds.DEPLOYMENT)
    stage.cluster.operator.kill()
    stage.api.delete(stage.path(kinds.DEPLOYMENT, deployment["metadata"]["name"]))
    wanted = {k: deployment["metadata"][k] for k in ("name", "labels", "ownerReferences")}
    other = {"matchLabels": {**deployment["spec"]["selector"]["matchLabels"], "other": "x"}}
    template = deployment["spec"]["template"]
    template["metadata"]["labels"]["other"] = "x"
    body = {"metadata": wanted, "spec": {"replicas": 1, "selector": other, "template": template}}
    made = stage.api.create(stage.path(kinds.DEPLOYMENT), body)
    stage.cluster.operator.start()
    stage.edit_service({"pools": [{"name": "default", "replicas": 2}]})
    stage.until("the pool grows", lambda: len(stage.pods()) == 2)
    assert stage.service()["metadata"]["uid"] == service["metadata"]["uid"]
    stage.until("the refusal names the field", lambda: "spec.selector" in _all_messages(stage))
    live = stage.api.get(stage.path(kinds.DEPLOYMENT, made["metadata"]["name"]))
    assert live["spec"]["selector"] == other


def test_s010_refused_pod_is_reported_and_the_others_serve(stage: Stage) -> None:
    """Room for the router and two engines of three. The router is there first: its pod is the controller-manager's."""
    stage.serve(replicas=1)
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "3"}}}
    stage.api.create(f"/api/v1/namespaces/{stage.namespace}/resourcequotas", quota)
    stage.until("the quota is in force", lambda: _quota_is_counted(stage))
    stage.edit_service({"pools": [{"name": "default", "replicas": 3}]})
    stage.until("two instances serve", lambda: stage.routed() != [] and all(len(r) == 2 for r in stage.routed()))
    stage.until("the refusal is a condition", lambda: "quota" in _all_messages(stage))
    stage.api.delete(f"/api/v1/namespaces/{stage.namespace}/resourcequotas/q")
    stage.until("all three serve once there is room", stage.is_ready, 120)
    assert len(stage.pods()) == 3


def test_s027_rollout_is_never_complete_early(stage: Stage) -> None:
    stage.serve(replicas=2)
    old = {pod["metadata"]["labels"][names.LABEL_REVISION] for pod in stage.pods()}
    stage.cluster.world.load_s = 1.0
    generation = stage.edit_service({"engine": {"args": ["--seed=1"]}})["metadata"]["generation"]
    seen: list[str] = []

    def is_complete() -> bool:
        service = stage.service()
        done = next(c for c in service["status"]["conditions"] if c["type"] == "RolloutComplete")
        if done["observedGeneration"] != generation:
            return False
        seen.append(done["status"])
        return bool(done["status"] == "True")

    stage.until("the rollout is complete", is_complete)
    pods = stage.pods()
    assert not {pod["metadata"]["labels"][names.LABEL_REVISION] for pod in pods} & old
    assert len(pods) == 2
    assert seen[0] == "False", "the condition changes before the first action"


def test_s028_replaced_object_and_wiped_status_restart_nothing(stage: Stage) -> None:
    stage.create_service(replicas=2)
    stage.api.patch(stage.path(kinds.INFERENCE_SERVICE, "s"), {"metadata": {"annotations": {"a": "b"}}})
    stage.until("s serves", stage.is_ready)
    before = stage.pod_uids()
    live = stage.service()
    bare = {key: live[key] for key in ("apiVersion", "kind", "spec")}
    bare["metadata"] = {k: live["metadata"][k] for k in ("name", "namespace", "resourceVersion")}
    status, _ = stage.api.request("PUT", stage.path(kinds.INFERENCE_SERVICE, "s"), bare)
    assert status == 200
    status, _ = stage.api.request(
        "PATCH",
        stage.path(kinds.INFERENCE_SERVICE, "s", "status"),
        {"status": None},
        content_type="application/merge-patch+json",
    )
    assert status == 200
    stage.cluster.restart_operator()
    stage.until("the status is back", stage.is_ready)
    assert stage.pod_uids() == before
    assert len(stage.objects(kinds.CONTROLLER_REVISION)) == 1


def test_s059_ghost_worker_does_not_survive(stage: Stage) -> None:
    """A router that lists somebody whom nobody knows gets the right list again."""
    stage.serve()
    (router,) = stage.routers()
    assert router.wanted is not None
    real = router.wanted.workers[0]
    ghost = Worker(id="ghost", url="http://127.9.9.9:8000", agent_url="http://127.9.9.9:9900", engine_id="x", model="s")
    router.wanted = WorkerList(generation="other", workers=[real, ghost])
    stage.until("the ghost is gone", lambda: _listed(stage) == [{real.id}], 30)


def test_s059_pod_that_vanishes_while_the_operator_is_away_leaves_the_routers(stage: Stage) -> None:
    stage.serve(replicas=2)
    stage.cluster.operator.kill()
    victim = stage.pods()[0]["metadata"]["name"]
    stage.api.request("DELETE", stage.path(kinds.POD, victim), {"gracePeriodSeconds": 0})
    stage.cluster.operator.start()
    stage.until(
        "routers list the two that live",
        lambda: _listed(stage) == [{pod["metadata"]["name"] for pod in stage.pods()}] and len(stage.pods()) == 2,
    )
    assert victim not in _listed(stage)[0]


def test_s081_unschedulable_pod_says_so_on_the_service_and_in_an_event(stage: Stage) -> None:
    nowhere = {"spec": {"nodeSelector": {"example.com/disk": "none"}}}
    pools = [{"name": "default", "replicas": 1, "podTemplate": nowhere}]
    stage.create_service(pools=pools)
    stage.until("the cause is on the service", lambda: "didn't match" in _all_messages(stage), 30)
    events = stage.api.get(EVENTS.format(stage.namespace))["items"]
    mine = [e for e in events if e["regarding"].get("kind") == names.SERVICE_KIND]
    stage.until("the cause is in an Event", lambda: _has_event(stage, "didn't match"), 30)
    assert stage.condition("Ready")["status"] != "True"
    assert len(mine) < 20


def test_s083_service_goes_although_its_profile_went_first(stage: Stage) -> None:
    profile = f"p-{stage.namespace}"
    body = {
        "apiVersion": names.API_VERSION,
        "kind": names.PROFILE_KIND,
        "metadata": {"name": profile},
        "spec": {"resourceName": "example.com/gpu"},
    }
    stage.api.create(kinds.ACCELERATOR_PROFILE.path(), body)
    stage.create_service(accelerator={"profileRef": {"name": profile}})
    stage.until("its pod exists", lambda: len(stage.pods()) == 1)
    stage.api.delete(kinds.ACCELERATOR_PROFILE.path("", profile))
    stage.delete_service()
    stage.until("everything is gone", lambda: _is_empty(stage), 120)


@pytest.mark.parametrize("phase", ["starting", "serving", "rolling", "draining", "terminating"])
def test_s087_operator_restarted_in_any_phase_and_every_service_can_be_deleted(stage: Stage, phase: str) -> None:
    stage.create_service(replicas=2)
    if phase == "starting":
        stage.cluster.world.load_s = 600.0
    else:
        stage.until("s serves", stage.is_ready)
    metadata = _user_metadata(stage)
    match phase:
        case "starting":
            stage.until("pods exist", lambda: len(stage.pods()) == 2)
        case "rolling":
            stage.cluster.world.load_s = 600.0
            stage.edit_service({"engine": {"args": ["--seed=1"]}})
            stage.until("a new pod exists", lambda: len(stage.pods()) == 3)
        case "draining":
            for pod in stage.pods():
                stage.engine(pod).in_flight = 1
            stage.edit_service({"pools": [{"name": "default", "replicas": 1}]})
            stage.until("one drains", lambda: any(_drains(pod) for pod in stage.pods()))
        case "terminating":
            for pod in stage.pods():
                stage.engine(pod).in_flight = 1
            victim = stage.pods()[0]["metadata"]["name"]
            stage.api.delete(stage.path(kinds.POD, victim))
    mark = stage.cluster.bed.audit.mark()
    stage.cluster.restart_operator()
    _wait_quiet(stage, 2.0, at_least_s=4.0)
    assert _user_metadata(stage) == metadata, "nothing is written to the user's metadata"
    touched = {(w.resource, w.subresource) for w in stage.operator_writes(mark)}
    assert ("inferenceservices", "") not in touched
    for pod in stage.pods():
        if pod["metadata"]["uid"] in stage.cluster.world.engines:
            stage.engine(pod).in_flight = 0
    stage.delete_service()
    stage.until("everything is gone", lambda: _is_empty(stage), 120)


def test_s096_new_defaults_roll_no_pod(stage: Stage) -> None:
    for name in ("a", "b", "c"):
        stage.create_service(name, replicas=2)
    for name in ("a", "b", "c"):
        stage.until(f"{name} serves", lambda name=name: stage.is_ready(name))  # type: ignore[misc]  # mypy cannot infer a lambda's default
    before = stage.pod_uids()
    mark = stage.cluster.bed.audit.mark()
    defaults = {
        "images": {"vllm": "vllm/vllm-openai:v9.9.9", "engine": "sluice-engine:9.9.9"},
        "engineDefaults": {"simulatedArgs": ["--new-default"], "vllmArgs": ["--new-default"]},
    }
    stage.cluster.restart_operator(defaults)
    try:
        _wait_quiet(stage, 3.0, at_least_s=6.0)
        assert stage.pod_uids() == before
        engines = {pod["metadata"]["name"] for pod in stage.pods()}
        rolled = [
            w
            for w in stage.operator_writes(mark)
            if w.resource == "pods" and w.verb in ("create", "delete") and w.name in engines | {""}
        ]
        assert not rolled, rolled
        assert all(stage.is_ready(name) for name in ("a", "b", "c"))
    finally:
        stage.cluster.restart_operator()


# Questions


def _is_absent(stage: Stage, kind: kinds.Kind, name: str) -> bool:
    status, _ = stage.api.request("GET", stage.path(kind, name))
    return bool(status == 404)


def _is_empty(stage: Stage) -> bool:
    watched = [k for k in kinds.WATCHED if k.namespaced]
    return not any(stage.objects(kind, kind.selector) for kind in watched)


def _listed(stage: Stage) -> list[set[str]]:
    return [{w.id for w in router.wanted.workers} if router.wanted else set() for router in stage.routers()]


def _all_messages(stage: Stage) -> str:
    status = stage.service().get("status", {})
    conditions = [c["message"] for c in status.get("conditions") or []]
    return "\n".join([*conditions, *(p.get("message", "") for p in status.get("problems") or [])])


def _has_event(stage: Stage, text: str) -> bool:
    events = stage.api.get(EVENTS.format(stage.namespace))["items"]
    ours = [e for e in events if e["regarding"].get("kind") == names.SERVICE_KIND]
    return any(text in (event.get("note") or "") for event in ours)


def _quota_is_counted(stage: Stage) -> bool:
    quota = stage.api.get(f"/api/v1/namespaces/{stage.namespace}/resourcequotas/q")
    return "used" in (quota.get("status") or {})


def _user_metadata(stage: Stage) -> Object:
    metadata = stage.service()["metadata"]
    return {key: metadata.get(key) for key in ("labels", "annotations", "finalizers", "ownerReferences")}


def _drains(pod: Object) -> bool:
    return names.ANNOTATION_DRAIN_STARTED_AT in (pod["metadata"].get("annotations") or {})


def _wait_quiet(stage: Stage, quiet_s: float, *, at_least_s: float = 0.0) -> None:
    """Until the operator has written nothing for a while."""
    audit = stage.cluster.bed.audit
    started = time.monotonic()
    mark, since = audit.mark(), time.monotonic()

    def is_quiet() -> bool:
        nonlocal mark, since
        if stage.operator_writes(mark):
            mark, since = audit.mark(), time.monotonic()
        now = time.monotonic()
        return now - since > quiet_s and now - started > at_least_s

    stage.until("the operator is quiet", is_quiet, 60)


def test_s095_evictions_of_a_cordoned_node_wait_for_the_replacement_and_then_end(stage: Stage) -> None:
    """`kubectl drain` on the real Eviction API: cordon, then evict until nothing is left on the node."""
    stage.serve(replicas=1)
    [pod] = stage.pods()
    node, uid = f"/api/v1/nodes/{pod['spec']['nodeName']}", pod["metadata"]["uid"]
    stage.until("the disruption controller has judged the budget", lambda: _is_guarded(stage))
    assert _evict(stage, pod) == 429, "one instance, and it serves"
    stage.cluster.world.load_s = 3.0
    stage.api.patch(node, {"spec": {"unschedulable": True}})

    def has_left() -> bool:
        left = [p for p in stage.pods() if p["metadata"]["uid"] == uid]
        if left and not _drains(left[0]) and stage.routed() == [{_name(pod)}] * 2:
            is_refused = _evict(stage, pod) == 429
            assert is_refused or all(listed - {_name(pod)} for listed in stage.routed()), "its replacement serves first"
        return not left

    try:
        stage.until("its replacement serves and it is gone", has_left)
        stage.until("the service is done", stage.is_ready)
    finally:
        stage.api.patch(node, {"spec": {"unschedulable": False}})
    [fresh] = stage.pods()
    assert fresh["spec"]["nodeName"] != pod["spec"]["nodeName"]


def _is_guarded(stage: Stage) -> bool:
    budgets = stage.objects(kinds.POD_DISRUPTION_BUDGET, f"{names.LABEL_COMPONENT}={names.COMPONENT_ENGINE}")
    status = budgets[0].get("status", {}) if budgets else {}
    return bool(status.get("currentHealthy") == 1 and status.get("disruptionsAllowed") == 0)


def _evict(stage: Stage, pod: Object) -> int:
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": _name(pod)}}
    status, _ = stage.api.request("POST", stage.path(kinds.POD, _name(pod), "eviction"), body)
    return int(status)


def _name(pod: Object) -> str:
    return str(pod["metadata"]["name"])
