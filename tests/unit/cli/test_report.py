"""What is said of a service: status texts, explanations, tolerance for other versions' status."""

import json
from itertools import pairwise
from typing import Any

import pytest

from sluice.api import names
from sluice.api.agent import AgentState, EnginePhase
from sluice.api.conditions import Reason
from sluice.cli import advice
from sluice.cli.explain import explain
from sluice.cli.overview import describe, list_services
from sluice.cli.report import ServiceReport, report
from sluice.plan.problems import _BAD_REASONS
from sluice.plan.times import format_moment
from tests.unit.cli.objects import NOW, a_pod, a_pool, a_service, condition, moment, owner

Object = dict[str, Any]

PULL = {
    "name": "qwen-default-1-2",
    "phase": "Pending",
    "reason": "ImagePull",
    "message": "container engine: ImagePullBackOff: no such tag",
    "node": "n2",
    "since": moment(90),
}


def a_report(
    service: Object | None = None, *pods: Object, agents: dict[str, AgentState] | None = None
) -> ServiceReport:
    return report(service or a_service(), pods, agents or {}, NOW)


def text(found: ServiceReport, note: str = "") -> str:
    return "\n".join(describe(found, note))


def an_agent(**more: Any) -> AgentState:
    base: dict[str, Any] = {"seq": 1, "instance": "i", "engine": "vLLM", "phase": EnginePhase.READY, "engine_id": "e"}
    return AgentState(**{**base, "phase_since": NOW, "started_at": NOW, "in_flight": 3, **more})


def not_ready(**status: Any) -> Object:
    said = "pool default: 1 of 2 instances serve, 1 have problems"
    return a_service(
        condition("Ready", "False", "ImagePull", said),
        condition("Reconciling", "True", "RollingOut", "pool default: 1 of 2 instances serve on the present revision"),
        condition("RolloutComplete", "False", "RollingOut", "pool default: 1 older are left"),
        problems=[PULL],
        **{"summary": {"model": "qwen", "serving": "1/2"}, "pools": [a_pool(serving=1, unhealthy=1)], **status},
    )


def test_status_shows_phase_node_revision_age_requests_and_restarts() -> None:
    found = a_report(None, a_pod(restarts=2), agents={"uid-qwen-default-0-1": an_agent()})
    lines = [line.split() for line in text(found).splitlines()]
    head, row = next((a, b) for a, b in pairwise(lines) if a[:1] == ["INSTANCE"])
    assert head == ["INSTANCE", "POOL", "PHASE", "NODE", "REVISION", "AGE", "IN-FLIGHT", "RESTARTS"]
    assert row == ["qwen-default-0-1", "default", "Serving", "n1", "7c9d", "10m", "3", "2"]


def test_requests_in_flight_that_nobody_counted_are_unknown_and_say_why() -> None:
    shown = text(a_report(None, a_pod()), "you lack the right `get pods/proxy`")
    assert "IN-FLIGHT -: you lack the right `get pods/proxy`." in shown
    assert a_report(None, a_pod()).to_dict()["instances"][0]["inFlight"] is None


def test_problem_stands_with_its_next_step() -> None:
    shown = text(a_report(not_ready(), a_pod()))
    assert (
        "qwen-default-1-2 on n2 (Pending, ImagePull, for 90s): container engine: ImagePullBackOff: no such tag."
        in shown
    )
    assert "next: check the image's name and tag" in shown


def test_operators_word_on_a_phase_wins_over_the_pods() -> None:
    problem = {**PULL, "name": "qwen-default-0-1", "phase": "Suspect", "reason": "Suspect"}
    (instance,) = a_report(a_service(problems=[problem]), a_pod()).instances
    assert instance.phase == "Suspect"


@pytest.mark.parametrize(
    ("pod", "phase"),
    [
        (a_pod(), "Serving"),
        (a_pod(routed_s=None), "Verifying"),
        (a_pod(routed_s=None, ready_s=None, started=False), "Loading"),
        (a_pod(running_s=None, ready_s=None, routed_s=None), "Pending"),
        (a_pod(deletionTimestamp=moment(-30)), "Terminating"),
        (a_pod(annotations={names.ANNOTATION_DRAIN_STARTED_AT: format_moment(NOW - 5)}), "Draining"),
    ],
)
def test_phase_without_the_agents_comes_from_the_pod(pod: Object, phase: str) -> None:
    (instance,) = a_report(None, pod).instances
    assert instance.phase == phase


def test_drain_shows_requests_left_and_time_of_its_limit() -> None:
    marks = {names.ANNOTATION_DRAIN_STARTED_AT: format_moment(NOW - 41), names.ANNOTATION_DRAIN_REASON: "NodeDrain"}
    entry = {"instance": "qwen-default-0-1", "reason": "NodeDrain", "inFlight": 3, "of": 12}
    entry |= {"elapsedSeconds": 40, "timeoutSeconds": 600}
    shown = text(a_report(a_service(drains=[entry]), a_pod(annotations=marks)))
    assert "qwen-default-0-1: draining (NodeDrain), 3 of 12 requests in flight, 40s of 10m" in shown


def test_drain_that_was_asked_for_and_has_not_begun_says_so() -> None:
    shown = text(a_report(None, a_pod(annotations={names.ANNOTATION_DRAIN_REQUESTED: "x"})))
    assert "Serving (drain asked for)" in shown
    assert "serves on until its replacement serves" in shown


def test_failures_back_off_and_avoided_nodes_are_told() -> None:
    backoff = {"index": 1, "failures": 3, "reason": "CrashLoop", "retryAt": moment(-40)}
    service = a_service(
        lastFailures=[
            {
                "instance": "qwen-default-0-0",
                "node": "n3",
                "reason": "CrashLoop",
                "exitCode": 139,
                "message": "Traceback\x1b[31m boom",
                "at": moment(300),
            }
        ],
        avoidedNodes=[
            {"node": "n3", "until": moment(-240), "reason": "2 instances failed"},
            {"node": "n9", "until": moment(10), "reason": "over"},
        ],
        pools=[a_pool(backoff=[backoff, {**backoff, "index": 7, "retryAt": moment(1)}])],
    )
    shown = text(a_report(service))
    assert "qwen-default-0-0: exit code 139, CrashLoop, on n3, 5m ago: Traceback [31m boom" in shown
    assert "\x1b" not in shown
    assert "n3 for 4m more: 2 instances failed." in shown
    assert "n9" not in shown, "its time is over"
    assert "index 7" not in shown, "its time is over"
    assert "pool default, index 1: failed 3 times in a row (CrashLoop); the next one may be created in 40s" in shown


def test_older_observed_generation_is_never_taken_for_ready() -> None:
    found = a_report(a_service(generation=4))
    assert not found.is_ready
    assert "generation 3 of 4" in text(found)
    assert "NotSeenYet" in "\n".join(list_services([found], with_namespace=True))


def test_pods_of_other_owners_are_no_instances() -> None:
    foreign = a_pod("foreign", ownerReferences=[owner("other-uid", "other")])
    unowned = a_pod("unowned", ownerReferences=[])
    assert a_report(None, foreign, unowned).instances == ()


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"conditions": None, "pools": "x", "problems": [1, None], "drains": {}},
        {"drains": [{"instance": 5}], "lastFailures": [{}], "avoidedNodes": [{"until": "soon"}]},
        {"pools": [{"backoff": [{}], "serving": "many"}], "problems": [{}], "summary": 7, "revision": []},
    ],
)
def test_status_of_any_shape_is_shown(status: Object) -> None:
    service = {**a_service(), "status": status}
    found = a_report(service, a_pod())
    assert "qwen" in text(found)
    assert "qwen" in "\n".join(explain(found, []))
    assert "qwen" in "\n".join(list_services([found], with_namespace=False))
    json.dumps(found.to_dict())


def test_explanation_of_a_ready_service_is_short() -> None:
    lines = explain(a_report(None, a_pod()), [])
    assert lines == [
        "chat/qwen is Ready for 3m (Serving): pool default: 2 of 2 instances serve.",
        "",
        "2 instances answered a real inference and every router lists them; no rollout is open.",
    ]


def test_explanation_names_cause_instance_and_next_step() -> None:
    said = "\n".join(explain(a_report(not_ready(), a_pod()), []))
    assert said.startswith("chat/qwen is not Ready for 3m (ImagePull): pool default: 1 of 2 instances serve")
    assert "Under way (RollingOut): pool default: 1 of 2 instances serve on the present revision." in said
    assert "qwen-default-1-2 on n2" in said
    assert "next: check the image's name" in said


def test_explanation_before_the_operator_looked_points_at_the_operator() -> None:
    said = "\n".join(explain(a_report({**a_service(), "status": {"observedGeneration": -1}}), []))
    assert "the operator has not looked at it yet" in said
    assert "kubectl get pods -n sluice-system" in said


def test_explanation_lists_events_newest_first_and_says_when_they_are_hidden() -> None:
    def event(reason: str, ago_s: float, **more: Any) -> Object:
        return {"reason": reason, "message": f"{reason} happened", "eventTime": moment(ago_s), **more}

    old, new = event("Created", 300), event("CrashLoop", 5, type="Warning", series={"count": 4})
    lines = explain(a_report(), [old, new])
    assert lines[-2:] == ["  ! 5s ago CrashLoop (4 times): CrashLoop happened.", "  5m ago Created: Created happened."]
    assert "you may not list events" in explain(a_report(), None)[-1]


def test_explanation_of_a_rollback_says_how_to_try_again() -> None:
    service = a_service(
        condition("Ready", "True", "Serving", "pool default: 2 of 2 instances serve"),
        condition("Stalled", "True", "RolledBack", "revision 9 failed"),
    )
    lines = explain(a_report(service), [])
    assert "It will stay so until somebody changes something (RolledBack): revision 9 failed." in lines
    assert any("serving.sluice.dev/retry-at" in line for line in lines)


def test_overview_has_one_line_per_service() -> None:
    head, row = list_services([a_report(not_ready())], with_namespace=True)
    assert head.split() == ["NAMESPACE", "NAME", "READY", "SERVING", "ROLLOUT", "PROBLEMS", "DRAINING", "REASON", "AGE"]
    assert row.split() == ["chat", "qwen", "False", "1/2", "RollingOut", "1", "0", "ImagePull", "60m"]


def test_every_reason_of_a_problem_has_a_next_step() -> None:
    needed = {*_BAD_REASONS, Reason.SUSPECT, Reason.HUNG, Reason.AGENT_SILENT, Reason.POD_FAILED, Reason.NODE_LOST}
    assert not [reason for reason in needed if not advice.next_step(reason, "chat", "i")]
    for reason in advice.NEXT_STEPS:
        assert "{" not in advice.next_step(reason, "chat", "i")
