"""Accelerators that can be named: profiles in the user's own file, those that ship with Sluice, or a size of memory."""

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

import yaml

from sluice.api import names
from sluice.api.markers import DNS_SUBDOMAIN
from sluice.cli.errors import UsageError
from sluice.cli.files import is_file, of_kind, read_documents
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
    own = [d for d in of_kind(documents, names.PROFILE_KIND) if _name(d) == wanted]
    try:
        profile = own[0] if own else read_shipped(wanted)
        if profile is not None:
            return from_profile(_named(profile))
        if _MEMORY.fullmatch(wanted):
            return from_memory(wanted)
        path = Path(wanted)
        if path.suffix in (".yaml", ".yml") and is_file(path):
            return from_profile(_named(_profile_in(path)))
    except FactsError as error:
        raise UsageError(str(error)) from error
    raise UsageError(
        f"accelerator {wanted!r}: no such profile; known are {', '.join(shipped())}; or name a file with an "
        "AcceleratorProfile, or the memory, for example 80Gi"
    )


def _name(document: Object) -> str:
    metadata = document.get("metadata")
    return str(metadata.get("name")) if isinstance(metadata, Mapping) else ""


def is_profile(name: str) -> bool:
    """Whether an accelerator has the name of an object; a size of memory has capital letters, which no name has."""
    return re.fullmatch(DNS_SUBDOMAIN, name) is not None


def _profile_in(path: Path) -> Object:
    profile = next(iter(of_kind(read_documents(str(path)), names.PROFILE_KIND)), None)
    if profile is None:
        raise FactsError(f"{path}: holds no {names.PROFILE_KIND} of {names.API_VERSION}")
    return profile


def _named(profile: Object) -> Object:
    """The profile itself, if a service can refer to it.

    Raises:
        FactsError: its name is none that the API takes.
    """
    if not is_profile(_name(profile)):
        raise FactsError(
            f"{names.PROFILE_KIND}: metadata.name: {_name(profile)[:80]!r} is no name of an object; write lower-case "
            "letters, digits, '-' and '.'"
        )
    return profile
