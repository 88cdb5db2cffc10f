"""The generated reference: current, complete, and refused when a meaning is missing."""

import pytest
from prometheus_client.core import GaugeMetricFamily
from pydantic import BaseModel

from docs import generate
from sluice.api.conditions import ConditionType, Reason


def test_checked_in_reference_is_what_the_code_says() -> None:
    assert generate.reference() == generate.TARGET.read_text(), "run `make docs` and read the diff"


def test_every_reason_and_condition_has_its_line() -> None:
    page = generate.TARGET.read_text()
    missing = [word for word in (*Reason, *ConditionType) if f"\n| `{word}` | " not in page]
    assert not missing


def test_enum_member_without_a_meaning_is_named() -> None:
    source = 'class Reason:\n    A = "a"\n    """Means a."""\n    B = "b"\n'
    with pytest.raises(ValueError, match=r"Reason\.B has no meaning"):
        generate.entries(source, "Reason")


def test_meanings_are_grouped_by_the_comment_above_them() -> None:
    source = 'class R:\n    # One\n    A = "a"\n    """Means\n    a."""\n    # Two\n    B = "b"\n    """Means b."""\n'
    found = generate.entries(source, "R")
    assert [(e.name, e.meaning, e.group) for e in found] == [("A", "Means a.", "One"), ("B", "Means b.", "Two")]


def test_configuration_field_without_a_meaning_is_named() -> None:
    class Configuration(BaseModel):
        depth: int = 1

    with pytest.raises(ValueError, match=r"Configuration\.depth has no meaning"):
        list(generate.fields(Configuration()))


def test_metric_without_a_sample_is_named() -> None:
    with pytest.raises(ValueError, match="metric sluice_new has no sample"):
        generate.series([GaugeMetricFamily("sluice_new", "New.", labels=("kind",))])


def test_bars_in_cells_do_not_break_the_table() -> None:
    assert generate.table(("a", "b"), [("x|y", "z")]).splitlines()[-1] == r"| x\|y | z |"
