"""What the agent reads off its engine: nonsense is unknown, never a number and never the agent's end."""

import pytest

from sluice.agent.engine import Answer, _json_object, _read_load, judge_answer
from sluice.agent.facts import TestKind
from sluice.api.agent import MAX_COUNT


@pytest.mark.parametrize(
    "load", ["Infinity", "NaN", "-1", "1e999", "1" + "0" * 400, str(MAX_COUNT + 1), "true", "null", '"3"', "[]"]
)
def test_a_load_that_cannot_be_one_is_unknown(load: str) -> None:
    assert _read_load(Answer(200, f'{{"server_load": {load}}}')) is None


def test_a_load_is_read() -> None:
    assert _read_load(Answer(200, '{"server_load": 3}')) == 3.0
    assert _read_load(Answer(503, '{"server_load": 3}')) is None


LOADS = ["loads.num_running_reqs", "loads.num_waiting_reqs"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}]}', 3.0),
        (
            '{"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}, '
            '{"num_running_reqs": 0, "num_waiting_reqs": 4}]}',
            7.0,
        ),
        ('{"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}', 0.0),
        # a core that says nothing, or none at all: unknown, not zero
        ('{"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}, {"num_running_reqs": 0}]}', None),
        ('{"loads": [{"num_running_reqs": 0, "num_waiting_reqs": -1}]}', None),
        ('{"loads": []}', None),
        ('{"loads": ' + "[" * 900 + "]" * 900 + "}", None),
        ('{"loads": {"num_running_reqs": 1}}', None),
        ("{}", None),
    ],
)
def test_a_load_is_summed_over_fields_and_cores(body: str, expected: float | None) -> None:
    assert _read_load(Answer(200, body), LOADS) == expected
    assert _read_load(Answer(500, body), LOADS) is None


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "", "{", "[1]", "1" * 5000])
def test_a_text_that_is_no_object_is_an_empty_one(text: str) -> None:
    assert _json_object(text) == {}
    assert judge_answer(Answer(200, text))[0] is TestKind.FAILED
