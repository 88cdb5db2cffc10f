"""Base of the wire formats between our processes: JSON with camelCase keys, unknown keys ignored.

Unknown keys are ignored because the two ends of a wire are upgraded at different times.
"""

from collections.abc import Mapping
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError
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

    @classmethod
    def from_environment(cls, variable: str, environ: Mapping[str, str]) -> Self:
        """The message that an environment variable carries as JSON: how a pod tells its containers what they are.

        Raises:
            ValueError: the variable is missing or not such a message; the text names the variable and the field.
        """
        text = environ.get(variable)
        if not text:
            raise ValueError(f"environment variable {variable} is not set; it carries {cls.__name__} as JSON")
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ValueError(f"environment variable {variable}: {error}") from error
