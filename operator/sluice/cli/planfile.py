"""The user's own object as `kubectl sluice plan -f` reads it: the service, the pool to plan, what it declares. Pure but
for reading the file.

The rules of layouts that the API server would apply are applied here too: a plan for an object that can't be created
helps nobody.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.api import names
from sluice.api.v1alpha1 import (
    MAX_ACCELERATORS,
    Accelerator,
    InferenceServiceSpec,
    Parallelism,
    Pool,
    parse_lenient,
)
from sluice.cli.errors import UsageError
from sluice.cli.files import of_kind, read_documents

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """The user's file, or none."""

    documents: Sequence[Object] = ()
    service: Object | None = None
    spec: InferenceServiceSpec | None = None
    pool: Pool | None = None


def read_file(name: str, pool: str | None) -> Asked:
    """The first InferenceService of a file, and all its documents.

    Raises:
        UsageError: no such file, service or pool, or a spec that can't be used.
    """
    documents = read_documents(name)
    service = next(iter(of_kind(documents, names.SERVICE_KIND)), None)
    if service is None:
        raise UsageError(f"{name}: holds no {names.SERVICE_KIND} of {names.API_VERSION}{_others(documents)}")
    raw = service.get("spec")
    try:
        spec = parse_lenient(raw if isinstance(raw, dict) else {})
    except ValueError as error:  # SpecError, or an int that is too long for Python to show
        raise UsageError(f"{name}: {error}") from error
    for number, one in enumerate(spec.pools):
        for field, what in broken_rules(one.parallelism):
            raise UsageError(f"{name}: spec.pools[{number}].parallelism{field}: {what}")
    chosen = next((p for p in spec.pools if pool in (None, p.name)), None)
    if chosen is None:
        raise UsageError(f"{name}: no pool {pool!r}; there are {', '.join(p.name for p in spec.pools)}")
    return Asked(documents, service, spec, chosen)


def _others(documents: Sequence[Object]) -> str:
    """Objects of that kind that are not ours, or don't say whose they are."""
    named = [d.get("apiVersion") for d in documents if d.get("kind") == names.SERVICE_KIND]
    found = sorted({f"apiVersion {str(n)[:80]}" if n else "no apiVersion" for n in named})
    return f"; the one there has {', '.join(found)}" if found else ""


def broken_rules(layout: Parallelism) -> Iterator[tuple[str, str]]:
    """(field below `parallelism`, what is wrong and what to do) for each rule of the CRD that the layout breaks."""
    tensor, pipeline, data = layout.tensor, layout.pipeline, layout.data
    if layout.accelerators > MAX_ACCELERATORS:
        yield (
            "",
            f"tensor {tensor} x pipeline {pipeline} x data {data} are {layout.accelerators} accelerators, and an "
            f"instance is one pod with at most {MAX_ACCELERATORS}; lower one of them, or raise replicas",
        )
    if data > 1 and not layout.expert:
        yield (
            ".data",
            f"{data} without expert: copies of a dense model are instances; write replicas: {data} instead, or "
            "expert: true for a mixture-of-experts model",
        )
    if layout.expert and tensor * data == 1:
        yield (
            ".expert",
            "true spreads the experts over tensor x data accelerators, which is 1 here; raise data or tensor, or "
            "leave expert out",
        )


def declared_accelerator(asked: Asked) -> str | None:
    """The profile that the object names, or the default one of its file; None: none."""
    if asked.spec is None or asked.pool is None:
        return None
    declared: Accelerator | None = asked.pool.accelerator or asked.spec.accelerator
    if declared is not None:
        return declared.profile_ref.name if declared.profile_ref else None
    for document in of_kind(asked.documents, names.PROFILE_KIND):
        spec, metadata = document.get("spec"), document.get("metadata")
        if isinstance(spec, dict) and isinstance(metadata, dict) and spec.get("default") is True:
            return str(metadata.get("name"))
    return None
