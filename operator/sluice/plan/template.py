"""The user's bounded override of an engine pod: checked, then laid over the built pod.

What may stand there at all is typed in `api.podtemplate` and refused at admission; here the rules are checked again
for objects stored before a rule existed, and the pieces are put in place. Nothing of ours can be replaced: labels of
ours win, our tolerations stay, accelerators follow from the spec.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from sluice.api import owned
from sluice.plan.declared import PoolDeclaration, Refused

_PATH: Final = "spec.pools[].podTemplate"
_MERGED_MAPS: Final = ("nodeSelector",)
_SCALARS: Final = ("affinity", "priorityClassName", "schedulerName", "runtimeClassName")
_ALLOWED_SPEC: Final = frozenset({*_MERGED_MAPS, *_SCALARS, "tolerations", "resources"})
_CONTROL_PLANE: Final = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")


def check(declaration: PoolDeclaration) -> Iterator[Refused]:
    """Everything in the template that an engine pod must not carry, each with its path."""
    template = declaration.pod_template or {}
    meta, spec = template.get("metadata") or {}, template.get("spec") or {}
    for key in sorted(set(template) - {"metadata", "spec"}):
        yield Refused(f"{_PATH}.{key}: not allowed; a pod template has metadata and spec only")
    for kind in ("labels", "annotations"):
        for key in meta.get(kind) or {}:
            if owned.is_owned_label(key):
                yield Refused(
                    f"{_PATH}.metadata.{kind}: the key {key!r} is the operator's or a GitOps tool's; remove it"
                )
    for key in sorted(set(spec) - _ALLOWED_SPEC):
        yield Refused(f"{_PATH}.spec.{key}: not allowed; allowed are {', '.join(sorted(_ALLOWED_SPEC))}")
    if str(spec.get("priorityClassName") or "").startswith("system-"):
        yield Refused(f"{_PATH}.spec.priorityClassName: system-* classes are for the cluster's own components")
    for number, toleration in enumerate(spec.get("tolerations") or []):
        if not toleration.get("key") or toleration["key"] in _CONTROL_PLANE:
            yield Refused(
                f"{_PATH}.spec.tolerations[{number}]: engine pods do not belong on control-plane nodes; "
                "name the key of another taint"
            )
    accelerator = declaration.accelerator.resource_name if declaration.accelerator else None
    for part, values in (spec.get("resources") or {}).items():
        if accelerator and accelerator in (values or {}):
            yield Refused(
                f"{_PATH}.spec.resources.{part}: {accelerator} follows from spec.pools[].parallelism; remove it"
            )


def overlay(pod: dict[str, Any], template: Mapping[str, Any] | None) -> dict[str, Any]:
    """The pod with the template's metadata and scheduling fields; resources are `engine_resources`' part."""
    meta, spec = (template or {}).get("metadata") or {}, (template or {}).get("spec") or {}
    built = {**pod["spec"]}
    for key in _MERGED_MAPS:
        merged = {**(spec.get(key) or {}), **built.get(key, {})}
        if merged:
            built[key] = merged
    tolerations = [*built.get("tolerations", []), *(spec.get("tolerations") or [])]
    if tolerations:
        built["tolerations"] = tolerations
    built.update({key: spec[key] for key in _SCALARS if spec.get(key)})
    metadata = {**pod["metadata"], "labels": {**(meta.get("labels") or {}), **pod["metadata"]["labels"]}}
    annotations = {**(meta.get("annotations") or {}), **pod["metadata"].get("annotations", {})}
    if annotations:
        metadata["annotations"] = annotations
    return {**pod, "metadata": metadata, "spec": built}


def engine_resources(declaration: PoolDeclaration, requests: Mapping[str, str]) -> dict[str, Any]:
    """Accelerators of the layout, the adapter's defaults, then what the template says."""
    said = ((declaration.pod_template or {}).get("spec") or {}).get("resources") or {}
    limits = {key: str(value) for key, value in (said.get("limits") or {}).items()}
    wanted = {key: str(value) for key, value in (said.get("requests") or {}).items()}
    # A default request above a limit of the user's would be refused by the API server.
    wanted = {**{key: value for key, value in requests.items() if key not in limits}, **wanted}
    if declaration.accelerator:
        count = str(declaration.parallelism.accelerators)
        limits[declaration.accelerator.resource_name] = count
        wanted[declaration.accelerator.resource_name] = count
    return {key: value for key, value in (("requests", wanted), ("limits", limits)) if value}
