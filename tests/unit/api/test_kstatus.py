"""Our test oracle agrees with the rules that Flux, Helm and cli-utils apply."""

from typing import Any

import pytest

from e2e.kstatus import kstatus


def _object(status: dict[str, Any] | None, **metadata: Any) -> dict[str, Any]:
    return {"metadata": {"generation": 2, **metadata}, **({} if status is None else {"status": status})}


def _seen(generation: int = 2, **conditions: str) -> dict[str, Any]:
    found = [{"type": kind, "status": status} for kind, status in conditions.items()]
    return {"observedGeneration": generation, "conditions": found}


@pytest.mark.parametrize(
    ("obj", "verdict"),
    [
        (_object(_seen(Ready="True"), deletionTimestamp="2026-01-01T00:00:00Z"), "Terminating"),
        (_object({"observedGeneration": -1}), "InProgress"),
        (_object(_seen(1, Ready="True")), "InProgress"),
        (_object(_seen(Ready="True", Reconciling="True")), "InProgress"),
        (_object(_seen(Reconciling="True", Stalled="True")), "InProgress"),
        (_object(_seen(Ready="False", Stalled="True")), "Failed"),
        (_object(_seen(Ready="False")), "InProgress"),
        (_object(_seen(Ready="Unknown")), "InProgress"),
        (_object(_seen(Ready="True", Reconciling="False", Stalled="False")), "Current"),
        (_object(_seen()), "Current"),
        (_object(None), "Current"),
    ],
)
def test_verdict(obj: dict[str, Any], verdict: str) -> None:
    assert kstatus(obj) == verdict
