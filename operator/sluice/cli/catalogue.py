"""Accelerators that can be named: profiles in the user's own file, those that ship with Sluice, or a size of memory."""

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

import yaml

from sluice.api import names
from sluice.cli.errors import UsageError
from sluice.sizing.fields import FactsError
from sluice.sizing.hardware import Accelerator, from_memory, from_profile

Object = Mapping[str, Any]

_PROFILES: Final = resources.files("sluice.sizing") / "profiles"
_MEMORY: Final = re.compile(r"[0-9]+(\.[0-9]+)?(Gi|Ti|G|T)")


def shipped() -> list[str]:
    """Names of the profiles in the catalogue, in alphabetical order."""
    return sorted(path.name.removesuffix(".yaml") for path in _PROFILES.iterdir() if path.name.endswith(".yaml"))


def read_shipped(name: str) -> Object | None:
    """The AcceleratorProfile of that name; None: there is none."""
    if name not in shipped():
        return None
    found: Object = yaml.safe_load((_PROFILES / f"{name}.yaml").read_text())
    return found


def all_shipped() -> Iterator[Accelerator]:
    for name in shipped():
        profile = read_shipped(name)
        if profile is not None:
            yield from_profile(profile)


def find_accelerator(wanted: str, documents: Sequence[Object]) -> Accelerator:
    """By the name of a profile in `documents` or in the catalogue, by a file with a profile, or by memory (`80Gi`).

    Raises:
        UsageError: there is none of that name, or it says too little.
    """
    own = [d for d in documents if d.get("kind") == names.PROFILE_KIND and _name(d) == wanted]
    try:
        profile = own[0] if own else read_shipped(wanted)
        if profile is not None:
            return from_profile(profile)
        if _MEMORY.fullmatch(wanted):
            return from_memory(wanted)
        path = Path(wanted)
        if path.suffix in (".yaml", ".yml") and path.is_file():
            return from_profile(_profile_in(path))
    except FactsError as error:
        raise UsageError(str(error)) from error
    raise UsageError(
        f"accelerator {wanted!r}: no such profile; known are {', '.join(shipped())}; or name a file with an "
        "AcceleratorProfile, or the memory, for example 80Gi"
    )


def _name(document: Object) -> str:
    metadata = document.get("metadata")
    return str(metadata.get("name")) if isinstance(metadata, Mapping) else ""


def _profile_in(path: Path) -> Object:
    try:
        found = [d for d in yaml.safe_load_all(path.read_text()) if isinstance(d, dict)]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise FactsError(f"{path}: can't be read as YAML ({error})") from error
    profile = next((d for d in found if d.get("kind") == names.PROFILE_KIND), None)
    if profile is None:
        raise FactsError(f"{path}: holds no AcceleratorProfile")
    return profile
