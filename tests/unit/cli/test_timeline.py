"""The start-up of an instance, from pods in every stage."""

from typing import Any

import pytest

from sluice.api.agent import AgentState, EnginePhase
from sluice.cli.timeline import Stage, startup, total_seconds
from tests.unit.cli.objects import NOW, a_pod

AGE_S = 600.0


def an_agent(*, loaded_s: float | None, verified_s: float | None = None) -> AgentState:
    """Marks in seconds after the pod's creation."""
    born = NOW - AGE_S
    return AgentState(
        seq=1,
        instance="i",
        engine="vLLM",
        phase=EnginePhase.READY if verified_s else EnginePhase.VERIFYING if loaded_s else EnginePhase.LOADING,
        phase_since=NOW,
        started_at=born + 12,
        loaded_at=born + loaded_s if loaded_s else None,
        verified_at=born + verified_s if verified_s else None,
    )


def seconds(pod: dict[str, Any], agent: AgentState | None = None) -> dict[str, float | None]:
    return {str(span.stage): span.seconds(NOW) for span in startup(pod, agent)}


def under_way(pod: dict[str, Any], agent: AgentState | None = None) -> list[Stage]:
    return [span.stage for span in startup(pod, agent) if span.is_under_way]


def test_serving_instance_shows_every_stage_and_the_total() -> None:
    pod = a_pod()
    agent = an_agent(loaded_s=37.5, verified_s=38.5)
    assert seconds(pod, agent) == {
        "scheduled": 2.0,
        "image": 10.0,
        "load": 25.5,
        "firstInference": 1.0,
        "routed": 3.5,
    }
    assert total_seconds(pod, startup(pod, agent)) == 42.0


def test_without_the_agent_load_and_first_inference_are_one_span() -> None:
    found = seconds(a_pod())
    assert (found["load"], found["firstInference"], found["routed"]) == (None, 28.0, 2.0)


@pytest.mark.parametrize(
    ("pod", "stage", "waited_s"),
    [
        (a_pod(scheduled_s=None, running_s=None, ready_s=None, routed_s=None, age_s=50), Stage.SCHEDULED, 50),
        (a_pod(running_s=None, ready_s=None, routed_s=None, age_s=50), Stage.IMAGE, 48),
        (a_pod(ready_s=None, routed_s=None, started=False, age_s=50), Stage.LOAD, 38),
        (a_pod(ready_s=None, routed_s=None, age_s=50), Stage.FIRST_INFERENCE, 38),
        (a_pod(routed_s=None, age_s=50), Stage.ROUTED, 10),
    ],
)
def test_stage_under_way_counts_and_later_ones_are_unknown(pod: dict[str, Any], stage: Stage, waited_s: float) -> None:
    spans = startup(pod)
    assert under_way(pod) == [stage]
    assert next(s for s in spans if s.stage is stage).seconds(NOW) == waited_s
    later = list(Stage)[list(Stage).index(stage) + 1 :]
    assert all(s.seconds(NOW) is None for s in spans if s.stage in later)
    assert total_seconds(pod, spans) is None


def test_instance_that_left_routing_and_came_back_invents_no_times() -> None:
    """The engine's Ready condition changed long after the first routing: only the later of the two is known."""
    found = seconds(a_pod(ready_s=500, routed_s=42))
    assert found["firstInference"] is None
    assert found["image"] == 10.0


def test_restarted_engine_shows_the_present_run_only() -> None:
    pod = a_pod(running_s=300, ready_s=330, routed_s=331, restarts=2)
    found = seconds(pod)
    assert found["image"] is None
    assert (found["firstInference"], found["routed"]) == (30.0, 1.0)
    assert total_seconds(pod, startup(pod)) is None


def test_cut_seconds_of_the_api_do_not_contradict_the_agent() -> None:
    """Verified 41.9 s after creation, gate opened in the same second: the API says 41."""
    found = seconds(a_pod(ready_s=41, routed_s=41), an_agent(loaded_s=41.2, verified_s=41.9))
    assert found["routed"] == 0.0
    assert found["load"] == pytest.approx(29.2)


def test_leaving_instance_is_in_no_stage() -> None:
    pod = a_pod(routed_s=None, deletionTimestamp="2027-01-15T08:00:00Z")
    assert under_way(pod) == []


@pytest.mark.parametrize("pod", [{}, {"metadata": None, "status": []}, {"status": {"conditions": [None, "x"]}}])
def test_pod_of_any_shape_is_read(pod: dict[str, Any]) -> None:
    assert all(span.ended is None for span in startup(pod))
