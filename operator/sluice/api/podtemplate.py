"""The bounded override of engine pods: an allow-list, typed, so that a mistake is refused at admission.

Not an inlined PodTemplateSpec: that alone makes a CRD of more than a megabyte, which client-side apply refuses
(S005). What a tenant must never set (host namespaces, hostPath, users, node names) has no field here.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, StringConstraints, ValidationInfo
from pydantic.config import JsonDict
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from pydantic_core.core_schema import with_info_after_validator_function

from sluice.api import owned
from sluice.api.base import ApiModel
from sluice.api.markers import DNS_SUBDOMAIN, FreeObject, LabelValue, Quantity, atomic, cel, rules


def _metadata_rule(field: str) -> JsonDict:
    return rules(
        cel(
            f"self.all(k, !k.matches('{owned.LABEL_PATTERN}'))",
            f"{field} of serving.sluice.dev/, of the app.kubernetes.io/ keys that the operator sets, and of Argo CD, "
            "Flux and Helm are not for engine pods; remove them",
        )
    )


class TemplateMetadata(ApiModel):
    labels: dict[str, LabelValue] = Field({}, max_length=32, json_schema_extra=_metadata_rule("labels"))
    """Further labels of the pods."""
    annotations: dict[str, Annotated[str, StringConstraints(max_length=4096)]] = Field(
        {}, max_length=32, json_schema_extra=_metadata_rule("annotations")
    )
    """Further annotations of the pods."""


class TolerationOperator(StrEnum):
    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(ApiModel):
    """A taint that the pods may be placed on, as in a pod's `spec.tolerations`."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "!has(self.operator) || self.operator != 'Exists' || !has(self.value)",
                "operator Exists takes no value; remove value or use operator Equal",
                ".value",
            ),
        )
    )

    key: str = Field(min_length=1, max_length=317)
    """Key of the taint; required (a toleration without a key would allow every node)."""
    operator: TolerationOperator | None = None
    """`Equal` (default) or `Exists`."""
    value: LabelValue | None = None
    """Value of the taint; with operator Equal only."""
    effect: TaintEffect | None = None
    """Default: all effects."""
    toleration_seconds: int | None = Field(None, ge=0, le=2147483647)
    """Seconds; with effect NoExecute only."""


class Resources(ApiModel):
    """CPU, memory and other resources; accelerators follow from `accelerator` and `parallelism`."""

    requests: dict[str, Quantity] = Field({}, max_length=16)
    """Least amount that the scheduler sets aside, for example `memory: 64Gi`."""
    limits: dict[str, Quantity] = Field({}, max_length=16)
    """Largest amount that the container may use."""


class TemplateSpec(ApiModel):
    node_selector: dict[str, LabelValue] = Field({}, max_length=16)
    """Labels that a node must have."""
    tolerations: list[Toleration] = Field(
        [],
        max_length=16,
        json_schema_extra=atomic()
        | rules(
            cel(
                "self.all(t, !(t.key in ['node-role.kubernetes.io/control-plane', 'node-role.kubernetes.io/master']))",
                "engine pods do not belong on control-plane nodes; remove the toleration of node-role.kubernetes.io/*",
            )
        ),
    )
    """Taints that the pods may be placed on."""
    affinity: FreeObject | None = None
    """As in a pod's `spec.affinity`; its shape is checked when a pod is created."""
    priority_class_name: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        pattern=DNS_SUBDOMAIN,
        json_schema_extra=rules(
            cel("!self.startsWith('system-')", "system-* priority classes are for the cluster's own components")
        ),
    )
    """PriorityClass of the pods; not one of the `system-` classes."""
    scheduler_name: str | None = Field(None, min_length=1, max_length=253, pattern=DNS_SUBDOMAIN)
    """Scheduler of the pods; default: the cluster's."""
    runtime_class_name: str | None = Field(None, min_length=1, max_length=253, pattern=DNS_SUBDOMAIN)
    """RuntimeClass of the pods; default: the cluster's."""
    resources: Resources | None = None
    """Of the engine container."""


class PodTemplate(ApiModel):
    """Bounded override of engine pods: what is not listed here can't be set."""

    metadata: TemplateMetadata | None = None
    """Further labels and annotations."""
    spec: TemplateSpec | None = None
    """Placement and resources."""


@dataclass(frozen=True)
class AsWritten:
    """Annotation of a `dict`: checked and documented by `model`, kept as the user wrote it.

    The value keeps what was written (nothing is normalised, no default filled in) less keys that `model` does not
    list; those are an error unless parsing leniently. So it can be merged into a pod as it is.
    """

    model: type[ApiModel]

    def known(self, raw: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        lenient = bool(info.context and info.context.get("lenient"))
        parsed = self.model.model_validate(raw, extra="ignore" if lenient else "forbid")
        return parsed.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def __get_pydantic_core_schema__(self, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        return with_info_after_validator_function(self.known, handler(source))

    def __get_pydantic_json_schema__(self, _: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(self.model.__pydantic_core_schema__)


PodTemplateObject = Annotated[dict[str, Any], AsWritten(PodTemplate)]
TolerationObject = Annotated[dict[str, Any], AsWritten(Toleration)]
