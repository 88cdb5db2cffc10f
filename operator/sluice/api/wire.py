"""Base of the wire formats between our processes: JSON with camelCase keys, unknown keys ignored.

Unknown keys are ignored because the two ends of a wire are upgraded at different times.
"""

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Wire(BaseModel):
    """A frozen message; `model_dump_json(by_alias=True)` is what goes over the wire."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="ignore",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
