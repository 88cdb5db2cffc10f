"""Facts at the door: anything missing is unknown, never an exception and never a meaningful zero."""

import copy
from typing import Any

import pytest

from sluice.api import names
from sluice.plan.facts import node_facts, pod_facts
from sluice.plan.snapshot import ContainerPhase

POD: dict[str, Any] = {
    "metadata": {
        "name": "p",
        "uid": "u",
        "labels": {names.LABEL_INDEX: "3", names.LABEL_EPOCH: "12", names.LABEL_POOL: "decode"},
        "annotations": {names.ANNOTATION_DRAIN_STARTED_AT: "2026-01-01T00:00:00.500000Z"},
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "deletionTimestamp": "2026-01-01T00:01:00Z",
        "ownerReferences": [{"uid": "a"}, {"uid": "b", "controller": True}],
    },
    "spec": {"nodeName": "n"},
    "status": {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "conditions": [
            {"type": names.READINESS_GATE, "status": "True"},
            {"type": "Ready", "status": "False"},
            {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"},
        ],
        "initContainerStatuses": [{"name": "agent", "state": {"running": {}}, "restartCount": 2}],
        "containerStatuses": [
            {
                "name": "engine",
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
                "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled", "message": "a\x00b"}},
            }
        ],
    },
}

ODD: list[Any] = [None, 1, True, "x", [], [1], [{}], {}, {"a": 1}]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, item in items for deeper in _paths(item, (*path, key)))]


@pytest.mark.parametrize("path", [p for p in _paths(POD) if p], ids=lambda p: ".".join(map(str, p)))
def test_an_odd_value_anywhere_still_gives_facts(path: tuple[Any, ...]) -> None:
    for odd in ODD:
        pod = copy.deepcopy(POD)
        parent: Any = pod
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = odd
        pod_facts(pod)
        node_facts(pod)


def test_an_empty_pod_is_unknown_in_every_way() -> None:
    facts = pod_facts({})
    assert (facts.index, facts.epoch) == (-1, -1)
    assert facts.deletion_at is None
    assert facts.drain_started_at is None
    assert not facts.scheduled
    assert not facts.gate
    assert facts.containers == ()


def test_a_pod_of_ours() -> None:
    facts = pod_facts(POD)
    assert (facts.index, facts.epoch, facts.pool, facts.owner_uid) == (3, 12, "decode", "b")
    assert facts.gate
    assert not facts.ready
    assert facts.scheduled
    assert facts.disruption_target == "EvictionByEvictionAPI"
    assert facts.deletion_at == facts.created_at + 60
    assert facts.drain_started_at == facts.created_at + 0.5
    engine = facts.container("engine")
    assert engine is not None
    assert engine.phase is ContainerPhase.WAITING
    assert (engine.reason, engine.exit_code, engine.last_reason, engine.last_message) == (
        "CrashLoopBackOff",
        137,
        "OOMKilled",
        "a b",
    )
    agent = facts.container("agent")
    assert agent is not None
    assert (agent.phase, agent.restarts, agent.exit_code) == (ContainerPhase.RUNNING, 2, None)


@pytest.mark.parametrize(("status", "ready"), [("True", True), ("False", False), ("Unknown", None)])
def test_a_silent_kubelet_makes_a_node_neither_ready_nor_not_ready(status: str, ready: bool | None) -> None:
    node = {"metadata": {"name": "n"}, "status": {"conditions": [{"type": "Ready", "status": status}]}}
    assert node_facts(node).ready is ready
    assert node_facts({}).ready is None
