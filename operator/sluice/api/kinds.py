"""The kinds that we serve: names, scope, columns of `kubectl get`, and the model that each schema is made from."""

from dataclasses import dataclass
from typing import Final

from sluice.api import names
from sluice.api.base import ApiModel
from sluice.api.v1alpha1 import AcceleratorProfile, InferenceService

SCHEMA_VERSION: Final = 1
"""Raised with each change of a schema and stamped on the CRDs. An operator that finds an older number than its own
touches nothing: fields that it relies on would be pruned on read and look unset (ray-project/kuberay#2084)."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of `kubectl get`; `priority` 1 shows it with `-o wide` only."""

    name: str
    path: str
    description: str
    type: str = "string"
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Kind:
    kind: str
    plural: str
    singular: str
    short_names: tuple[str, ...]
    namespaced: bool
    model: type[ApiModel]
    has_status: bool
    columns: tuple[Column, ...]

    @property
    def crd_name(self) -> str:
        return f"{self.plural}.{names.GROUP}"


_AGE = Column("Age", ".metadata.creationTimestamp", "Time since the object was created.", "date")

KINDS: Final = (
    Kind(
        kind=names.SERVICE_KIND,
        plural=names.SERVICE_PLURAL,
        singular="inferenceservice",
        short_names=("infsvc",),
        namespaced=True,
        model=InferenceService,
        has_status=True,
        columns=(
            Column("Model", ".status.summary.model", "Served model name."),
            Column("Ready", '.status.conditions[?(@.type=="Ready")].status', "All desired instances serve."),
            Column("Serving", ".status.summary.serving", "Serving/desired instances of each pool."),
            Column("URL", ".status.url", "Base address of the OpenAI API."),
            Column("Reason", '.status.conditions[?(@.type=="Ready")].reason', "Why it is or is not ready.", priority=1),
            _AGE,
        ),
    ),
    Kind(
        kind=names.PROFILE_KIND,
        plural=names.PROFILE_PLURAL,
        singular="acceleratorprofile",
        short_names=("accprofile",),
        namespaced=False,
        model=AcceleratorProfile,
        has_status=False,
        columns=(
            Column("Resource", ".spec.resourceName", "Extended resource that a pod asks for."),
            Column("Default", ".spec.default", "Used by services that name no accelerator.", "boolean"),
            _AGE,
        ),
    ),
)
