"""A simulation per test, closed at its end."""

from collections.abc import Iterator

import pytest

from tests.sim.simulation import Simulation


@pytest.fixture
def sim() -> Iterator[Simulation]:
    made = Simulation(load_s=5.0)
    yield made
    made.close()


@pytest.fixture
def serving(sim: Simulation) -> Simulation:
    """An operator and the service `demo` with three serving instances."""
    sim.start_operator()
    sim.create_service(replicas=3)
    sim.settle()
    assert sim.condition("Ready")["status"] == "True"
    return sim
