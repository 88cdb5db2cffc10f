"""One instance from its facts: phase, reason and routing verdict, rule by rule."""

from typing import Any

import pytest

from sluice.api import names
from sluice.api.agent import AgentState, EnginePhase, SelfTest
from sluice.plan.facts import node_facts, pod_facts
from sluice.plan.health import Instance, assess
from sluice.plan.snapshot import AgentFacts
from sluice.plan.times import format_time
from tests.unit.plan.cluster import START, a_node, running

NOW = START + 100


def a_pod(
    *,
    phase: str = "Running",
    gate: bool = False,
    engine: dict[str, Any] | None = None,
    scheduling: str | None = None,
    **metadata: Any,
) -> dict[str, Any]:
    conditions = [{"type": names.READINESS_GATE, "status": "True" if gate else "False"}]
    if scheduling is not None:
        conditions.append({"type": "PodScheduled", "status": "False", "message": scheduling})
    return {
        "metadata": {"name": "i", "uid": "u", "creationTimestamp": format_time(START), **metadata},
        "spec": {} if scheduling is not None else {"nodeName": "node-1"},
        "status": {
            "phase": phase,
            "podIP": "10.0.0.1",
            "conditions": conditions,
            "initContainerStatuses": [running("agent")],
            "containerStatuses": [engine or running("engine")],
        },
    }


def says(phase: EnginePhase, reason: str = "", *, age_s: float = 0.0, **more: Any) -> AgentFacts:
    fields: dict[str, Any] = {"engine_id": "run-1", "started_at": NOW - 5, "self_test": SelfTest(), **more}
    state = AgentState(seq=1, instance="i", engine="vLLM", phase=phase, reason=reason, phase_since=NOW, **fields)
    return AgentFacts(state, age_s)


def judge(pod: dict[str, Any], agent: AgentFacts | None = None, node: str = "True", timeout_s: float = 60) -> Instance:
    return assess(pod_facts(pod), agent, node_facts(a_node("node-1", node)), NOW, timeout_s)


def crashed(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    last = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
    return {"name": "engine", "state": waiting, "lastState": last, "restartCount": 3}


def waiting(reason: str, message: str) -> dict[str, Any]:
    return {"name": "engine", "state": {"waiting": {"reason": reason, "message": message}}, "restartCount": 0}


READY = says(EnginePhase.READY)
LEFT = {names.ANNOTATION_DRAIN_STARTED_AT: format_time(NOW), names.ANNOTATION_DRAIN_REASON: "ScaleIn"}

TABLE: list[tuple[str, Instance, tuple[str, str, str]]] = [
    ("verified", judge(a_pod(), READY), ("Verifying", "RoutersStarting", "Route")),
    (
        "no engine run named",
        judge(a_pod(), says(EnginePhase.READY, engine_id=None)),
        ("Verifying", "Verifying", "Unroute"),
    ),
    ("loading", judge(a_pod(), says(EnginePhase.LOADING)), ("Loading", "Loading", "Unroute")),
    ("verifying", judge(a_pod(), says(EnginePhase.VERIFYING)), ("Verifying", "Verifying", "Unroute")),
    (
        "key refused before it served (S107)",
        judge(a_pod(), says(EnginePhase.VERIFYING, "SelfTestUnauthorized")),
        ("Verifying", "SelfTestUnauthorized", "Unroute"),
    ),
    (
        "key refused while it serves (D15)",
        judge(a_pod(gate=True), says(EnginePhase.READY, "SelfTestUnauthorized")),
        ("Verifying", "SelfTestUnauthorized", "Route"),
    ),
    ("suspect", judge(a_pod(gate=True), says(EnginePhase.SUSPECT)), ("Suspect", "Suspect", "Unroute")),
    (
        "answers wrongly",
        judge(a_pod(gate=True), says(EnginePhase.SUSPECT, "SelfTestFailed")),
        ("Suspect", "SelfTestFailed", "Unroute"),
    ),
    ("hung", judge(a_pod(gate=True), says(EnginePhase.HUNG)), ("Hung", "Hung", "Unroute")),
    ("preStop came", judge(a_pod(gate=True), says(EnginePhase.DRAINING)), ("Terminating", "ExternalDelete", "Unroute")),
    ("too slow", judge(a_pod(), says(EnginePhase.LOADING, started_at=START)), ("Loading", "StartupTimeout", "Unroute")),
    (
        "silent and routed",
        judge(a_pod(gate=True), says(EnginePhase.READY, age_s=16)),
        ("Serving", "AgentSilent", "Hold"),
    ),
    ("never heard and routed", judge(a_pod(gate=True)), ("Serving", "Serving", "Hold")),
    ("never heard, not routed", judge(a_pod(), timeout_s=600), ("Loading", "AgentSilent", "Hold")),
    ("never heard, too late", judge(a_pod(), timeout_s=60), ("Loading", "StartupTimeout", "Hold")),
    ("containers start", judge(a_pod(phase="Pending")), ("Pending", "Starting", "Hold")),
    ("no room", judge(a_pod(phase="Pending", scheduling="0/3 nodes: no GPU")), ("Pending", "Unschedulable", "Unroute")),
    ("not yet scheduled", judge(a_pod(phase="Pending", scheduling="")), ("Pending", "Starting", "Unroute")),
    (
        "image",
        judge(a_pod(phase="Pending", engine=waiting("ImagePullBackOff", "manifest unknown"))),
        ("Pending", "ImagePull", "Unroute"),
    ),
    (
        "configuration",
        judge(a_pod(phase="Pending", engine=waiting("CreateContainerConfigError", "no such key"))),
        ("Failed", "PodFailed", "Unroute"),
    ),
    ("crash loop", judge(a_pod(engine=crashed(1))), ("Failed", "CrashLoop", "Unroute")),
    ("crash beats an old word", judge(a_pod(gate=True, engine=crashed(1)), READY), ("Failed", "CrashLoop", "Unroute")),
    ("out of memory", judge(a_pod(engine=crashed(137, "OOMKilled"))), ("Failed", "OutOfMemory", "Unroute")),
    (
        "loads again after a crash (S080)",
        judge(a_pod(engine={**crashed(1), "state": {"running": {}}}), says(EnginePhase.LOADING)),
        ("Loading", "CrashLoop", "Unroute"),
    ),
    ("ended", judge(a_pod(phase="Failed", gate=True), READY), ("Failed", "PodFailed", "Unroute")),
    (
        "deleted (S060)",
        judge(a_pod(gate=True, deletionTimestamp=format_time(NOW)), READY),
        ("Terminating", "ExternalDelete", "Unroute"),
    ),
    ("drains", judge(a_pod(gate=True, annotations=LEFT), READY), ("Draining", "ScaleIn", "Unroute")),
    ("node lost", judge(a_pod(gate=True), None, node="Unknown"), ("Failed", "NodeLost", "Unroute")),
    (
        "node sick, engine answers",
        judge(a_pod(gate=True), READY, node="False"),
        ("Verifying", "RoutersStarting", "Route"),
    ),
]


@pytest.mark.parametrize(("instance", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_phase_reason_and_verdict(instance: Instance, expected: tuple[str, str, str]) -> None:
    assert (instance.phase, instance.reason, instance.verdict) == expected
    assert instance.message


def test_an_unreadable_node_proves_nothing() -> None:
    instance = assess(pod_facts(a_pod(gate=True)), None, None, NOW, 60)
    assert not instance.is_lost
    assert instance.is_live


def test_s081_the_root_cause_is_in_the_message() -> None:
    assert "manifest unknown" in judge(a_pod(engine=waiting("ErrImagePull", "manifest unknown"))).message
    crash = judge(a_pod(engine=crashed(1, message="RuntimeError: no kernel image"))).message
    assert "exit code 1" in crash
    assert "no kernel image" in crash
    assert "no GPU" in judge(a_pod(phase="Pending", scheduling="0/3 nodes: no GPU")).message


def test_an_agent_whose_image_is_gone_does_not_stop_a_running_engine() -> None:
    pod = a_pod(gate=True)
    pod["status"]["initContainerStatuses"] = [{"name": "agent", "state": {"waiting": {"reason": "ErrImagePull"}}}]
    assert judge(pod, says(EnginePhase.READY, age_s=60)).verdict == "Hold"


def test_an_unknown_in_flight_is_not_zero() -> None:
    assert judge(a_pod(), says(EnginePhase.READY, in_flight=None)).in_flight is None
    assert judge(a_pod(), says(EnginePhase.READY, in_flight=0, age_s=60)).in_flight is None
