"""The generator refuses what a CRD can't say, instead of dropping it."""

from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import Field

from sluice.api.base import ApiModel
from sluice.api.crdgen import CrdError, structural
from sluice.api.markers import FreeObject, Quantity, atomic, cel, explained, rules


def _schema(model: type[ApiModel]) -> dict[str, Any]:
    raw = model.model_json_schema()
    return structural(raw, raw.pop("$defs", {}), "X")


class Leaf(ApiModel):
    """A leaf."""

    size: int = Field(3, ge=0, le=9)
    """Size."""
    note: str | None = Field(None, max_length=4)
    """Note."""


class Ruled(ApiModel):
    """A leaf with a rule."""

    model_config = {"json_schema_extra": rules(cel("self.size > 1", "size must be more than 1", ".size"))}

    size: int = Field(3, ge=0, le=9)
    """Size."""


def test_optional_field_loses_null_and_its_default() -> None:
    assert _schema(Leaf)["properties"]["note"] == {"description": "Note.", "type": "string", "maxLength": 4}


def test_integer_gets_the_format_that_its_bound_allows() -> None:
    class Numbers(ApiModel):
        small: int = Field(ge=0, le=9)
        """Small."""
        large: int = Field(ge=0)
        """Large."""

    made = _schema(Numbers)["properties"]
    assert (made["small"]["format"], made["large"]["format"]) == ("int32", "int64")


def test_nested_default_is_left_to_the_nested_schema() -> None:
    class Tree(ApiModel):
        leaf: Leaf = Leaf()
        """Leaf."""

    assert _schema(Tree)["properties"]["leaf"]["default"] == {}


def test_default_of_an_object_with_rules_is_complete() -> None:
    """The API server checks rules on a default before it fills in nested ones."""

    class Tree(ApiModel):
        leaf: Ruled = Ruled()
        """Leaf."""

    assert _schema(Tree)["properties"]["leaf"]["default"] == {"size": 3}


def test_rules_of_a_model_and_of_the_field_that_holds_it_are_joined() -> None:
    class Tree(ApiModel):
        leaf: Ruled = Field(json_schema_extra=rules(cel("self.size < 5", "size must be less than 5")))
        """The description of the field wins."""

    made = _schema(Tree)["properties"]["leaf"]
    assert [rule["rule"] for rule in made["x-kubernetes-validations"]] == ["self.size > 1", "self.size < 5"]
    assert made["description"] == "The description of the field wins."


def test_explained_pattern_is_said_once_with_its_message() -> None:
    class Name(ApiModel):
        name: str = Field(max_length=9, pattern="^a+$", json_schema_extra=explained("^a+$", "only a, please"))
        """Name."""

    made = _schema(Name)["properties"]["name"]
    assert "pattern" not in made
    assert made["x-kubernetes-validations"] == [{"rule": "self.matches(r'^a+$')", "message": "only a, please"}]


def test_quantity_may_be_a_number_or_text() -> None:
    class Sized(ApiModel):
        size: Quantity
        """Size."""

    made = _schema(Sized)["properties"]["size"]
    assert made["x-kubernetes-int-or-string"] is True
    assert "type" not in made


def test_free_object_keeps_what_it_holds() -> None:
    class Holder(ApiModel):
        free: FreeObject
        """Free."""

    assert _schema(Holder)["properties"]["free"]["x-kubernetes-preserve-unknown-fields"] is True


class Recursive(ApiModel):
    """Contains itself."""

    next: Optional["Recursive"] = None
    """Next."""


class UnboundedText(ApiModel):
    """Unbounded."""

    text: str
    """Text."""


class UnboundedList(ApiModel):
    """Unbounded."""

    items: list[int] = Field(json_schema_extra=atomic())
    """Items."""


class UnboundedMap(ApiModel):
    """Unbounded."""

    entries: dict[str, int]
    """Map."""


class Union(ApiModel):
    """A union."""

    both: int | str
    """Both."""


class Fraction(ApiModel):
    """A float."""

    share: float
    """Share."""


class Fixed(ApiModel):
    """A constant, which the API server would drop in silence."""

    fixed: Literal["x"]
    """Fixed."""


class Unique(ApiModel):
    """A set, which the API server forbids."""

    some: set[int] = Field(max_length=3)
    """Some."""


class KeyPattern(ApiModel):
    """A map with constrained keys, which the API server refuses."""

    entries: dict[Annotated[str, Field(pattern="^a$")], int] = Field(max_length=3)
    """Entries."""


class Exclusive(ApiModel):
    """An exclusive bound, which the API server wants to be a boolean."""

    size: int = Field(gt=0)
    """Size."""


class Open(ApiModel):
    """Any object."""

    any: dict[str, Any] = Field(max_length=3)
    """Any."""


class Undocumented(ApiModel):
    """No description."""

    size: int = Field(ge=0)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Recursive, "X.next: Recursive contains itself"),
        (UnboundedText, "X.text: no maxLength"),
        (UnboundedList, "X.items: no maxItems"),
        (UnboundedMap, "X.entries: no maxProperties"),
        (Union, "X.both: a union"),
        (Fraction, "X.share: type 'number' is not used"),
        (Fixed, "X.fixed: no rule for ['const']"),
        (Unique, "X.some: no rule for ['uniqueItems']"),
        (KeyPattern, "X.entries: no rule for ['patternProperties']"),
        (Exclusive, "X.size: no rule for ['exclusiveMinimum']"),
        (Open, "X.any: an object of unknown shape"),
        (Undocumented, "X.size: no description"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_generator_refuses_and_names_the_path(model: type[ApiModel], said: str) -> None:
    with pytest.raises(CrdError) as refused:
        _schema(model)
    assert str(refused.value).startswith(said)
