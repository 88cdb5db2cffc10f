"""Readable logs of named scenarios: every write of the operator, in order.

They change only with GOLDEN_UPDATE=1 (`make golden`), and the diff is read.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakeapi.cluster import Options
from tests.sim.simulation import NAMESPACE, Simulation

GOLDEN = Path(__file__).parent / "golden"


def apply_to_serving(sim: Simulation) -> None:
    sim.start_operator()
    sim.create_service(replicas=2)
    sim.settle()


def spec_change_rolls_one_by_one(sim: Simulation) -> None:
    apply_to_serving(sim)
    sim.edit_service({"engine": {"args": ["--seed=1"]}})
    sim.settle()


def scale_in_drains_first(sim: Simulation) -> None:
    apply_to_serving(sim)
    busy = next(iter(sim.world.engines.values()))
    busy.in_flight = 1
    sim.scale(0)
    sim.settle(until=lambda: len(sim.engine_pods()) == 1)
    sim.advance(10)
    busy.in_flight = 0
    sim.say("the last request is answered")
    sim.settle()


def deletion_leaves_nothing(sim: Simulation) -> None:
    apply_to_serving(sim)
    sim.delete_service()
    sim.settle()
    sim.say(f"left: {[o['metadata']['name'] for _, o in sim.cluster.storage.everything() if _is_inside(o)]}")


def name_conflict_is_a_condition(sim: Simulation) -> None:
    """S002: a foreign Service stands at the user-facing name."""
    foreign = {"metadata": {"name": "demo"}, "spec": {"ports": [{"port": 80}]}}
    sim.cluster.create(sim.cluster.resource("", "services"), NAMESPACE, foreign, Options("somebody"))
    apply_to_serving(sim)
    for kind in ("Ready", "Routed", "Stalled"):
        c = sim.condition(kind)
        sim.say(f"{kind}={c['status']} {c['reason']}: {c['message']}")


def _is_inside(obj: dict[str, dict[str, str]]) -> bool:
    return obj["metadata"].get("namespace") == NAMESPACE


SCENARIOS: tuple[Callable[[Simulation], None], ...] = (
    apply_to_serving,
    spec_change_rolls_one_by_one,
    scale_in_drains_first,
    deletion_leaves_nothing,
    name_conflict_is_a_condition,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_log_is_the_golden_one(sim: Simulation, scenario: Callable[[Simulation], None]) -> None:
    scenario(sim)
    path = GOLDEN / f"{scenario.__name__}.golden"
    text = "\n".join(_readable(line) for line in sim.log) + "\n"
    if os.environ.get("GOLDEN_UPDATE"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"{path} is missing: run with GOLDEN_UPDATE=1 and read it"
    assert text == path.read_text(), "the log changed: if that is right, run with GOLDEN_UPDATE=1 and read the diff"


def _readable(line: str) -> str:
    """Without the digests of pod templates and revisions, which change with every builder."""
    return " ".join(_without_digest(word) for word in line.split(" ")).rstrip()


def _without_digest(word: str) -> str:
    parts = word.split("-")
    return "-".join("#" if len(part) == 10 and set(part) <= set("0123456789abcdef") else part for part in parts)


def test_every_golden_has_its_scenario() -> None:
    assert {p.stem for p in GOLDEN.glob("*.golden")} == {s.__name__ for s in SCENARIOS}
