"""Schema keywords that pydantic has no word for: what a field means to the Kubernetes API server.

Each marker returns a fragment for `json_schema_extra`; `crdgen` checks and keeps the `x-kubernetes-*` keywords.
Merge several with `|`, except two sets of rules: give those to one `rules()`.
"""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints, WithJsonSchema
from pydantic.config import JsonDict

RULES = "x-kubernetes-validations"

DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
QUANTITY = r"^[0-9]+(\.[0-9]{1,9})?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?$"
NO_CONTROL = r"^[^\x00-\x1f\x7f]*$"


def cel(rule: str, message: str, field: str | None = None) -> JsonDict:
    """One validation rule; `field` is the path of the culprit relative to where the rule stands (`.replicas`).

    The message says what is wrong, the limit, and what to write instead: it is all that a user sees.
    """
    made: JsonDict = {"rule": rule, "message": message}
    if field is not None:
        made["fieldPath"] = field
    return made


def rules(*made: JsonDict) -> JsonDict:
    return {RULES: list(made)}


def explained(pattern: str, message: str) -> JsonDict:
    """The field's `pattern` as a rule with a message; the generator then leaves the bare pattern out of the CRD.

    The API server's own words for a failed pattern are the pattern; a user should not have to read it.
    """
    return rules(cel(f"self.matches(r'{pattern}')", message))


def list_map(*keys: str) -> JsonDict:
    """Entries are told apart by `keys`: duplicates are refused and two appliers can own different entries."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


def atomic() -> JsonDict:
    """The order matters: the whole list has one owner."""
    return {"x-kubernetes-list-type": "atomic"}


def _is_quantity(value: int | str) -> int | str:
    # A bare integer is a quantity too; pydantic's own pattern check would make it text, and what the user wrote stays.
    if isinstance(value, str) and not re.fullmatch(QUANTITY, value):
        raise ValueError(f"{value!r} is no quantity; write for example 4, 500m or 64Gi")
    if isinstance(value, int) and value < 0:
        raise ValueError("a quantity of resources can't be negative")
    return value


Quantity = Annotated[
    int | str,
    AfterValidator(_is_quantity),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "pattern": QUANTITY, "maxLength": 32, "minimum": 0}),
]
"""A Kubernetes quantity of zero or more, kept as it was written."""

FreeObject = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})]
"""An object whose shape the API server checks elsewhere (for example when the pod that carries it is created)."""

LabelValue = Annotated[str, StringConstraints(max_length=63, pattern=LABEL_VALUE)]

_EXTENDED = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
_EXTENDED_HELP = "an accelerator is an extended resource of its vendor's domain, for example nvidia.com/gpu"
ResourceName = Annotated[
    str,
    Field(
        min_length=3,
        max_length=253,
        pattern=_EXTENDED,
        json_schema_extra=rules(
            cel(f"self.matches(r'{_EXTENDED}') && !self.contains('kubernetes.io/')", _EXTENDED_HELP)
        ),
    ),
]
