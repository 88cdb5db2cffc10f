"""When a live child is as wanted: nothing is applied then, and every difference that matters is seen."""

from typing import Any

import pytest

from sluice.plan.children import is_covered
from sluice.plan.metadata import stamped

WANTED = {"spec": {"a": 1, "list": [1, 2], "named": [{"name": "x", "v": 1}]}}


@pytest.mark.parametrize(
    ("spec", "same"),
    [
        pytest.param({}, True, id="equal"),
        pytest.param({"default": 3}, True, id="a default"),
        pytest.param({"named": [{"name": "x", "v": 1, "d": 2}, {"name": "injected"}]}, True, id="an injected entry"),
        pytest.param({"a": 2}, False, id="changed by others"),
        pytest.param({"a": None}, False, id="field emptied"),
        pytest.param({"list": [1]}, False, id="list entry lost"),
        pytest.param({"list": [1, 2, 3]}, False, id="list entry added"),
        pytest.param({"named": []}, False, id="named entry lost"),
    ],
)
def test_covered_means_that_all_that_is_wanted_is_there(spec: dict[str, Any], same: bool) -> None:
    live = {"spec": {**WANTED["spec"], **spec}, "status": {}}
    assert is_covered(WANTED, live) is same


def test_a_field_that_is_no_longer_wanted_shows_in_the_digest() -> None:
    before = stamped({"kind": "X", "metadata": {"name": "x"}, "spec": {"a": 1, "b": 2}})
    fewer = stamped({"kind": "X", "metadata": {"name": "x"}, "spec": {"a": 1}})
    assert not is_covered(fewer, before)
