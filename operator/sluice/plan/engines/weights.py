"""Where an engine finds its weights: a directory of a PersistentVolumeClaim, mounted read-only."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from sluice.plan.declared import PoolDeclaration, Refused
from sluice.plan.engines.adapter import GPU_IMAGE_USER, Launch, shm_gib

WEIGHTS_PATH: Final = "/weights"
"""Where the claim is mounted in the engine's container."""

_CLAIM_URI: Final = re.compile(r"^pvc://(?P<claim>[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)(?P<path>(/[^/]+)*)/?$")


def check_model(declaration: PoolDeclaration) -> Iterator[Refused]:
    if _parse(declaration.model.uri) is None:
        yield Refused(
            f"spec.model.uri: {declaration.model.uri!r} can't be served by engine type {declaration.engine.type}, "
            "which takes models from a PersistentVolumeClaim only: write pvc://<claim>/<path>, without '..'"
        )


def claimed(declaration: PoolDeclaration) -> tuple[str, str]:
    """(claim, path of the model inside the container); the declaration has passed `check_model`.

    Raises:
        ValueError: the model's URI is not a claim (a bug: it was not checked).
    """
    found = _parse(declaration.model.uri)
    if found is None:
        raise ValueError(f"not checked before: model URI {declaration.model.uri!r}")
    claim, path = found
    return claim, WEIGHTS_PATH + path


def launch_with_weights(
    declaration: PoolDeclaration,
    command: tuple[str, ...],
    args: tuple[str, ...],
    env: tuple[Mapping[str, Any], ...],
) -> Launch:
    """How an engine in a GPU image is started on the claimed weights; the declaration has passed `check_model`."""
    claim, _ = claimed(declaration)
    return Launch(
        command=command,
        args=args,
        env=env,
        user=GPU_IMAGE_USER,
        read_only_root=False,
        shm_gib=shm_gib(declaration),
        requests={},
        claim=claim,
    )


def _parse(uri: str) -> tuple[str, str] | None:
    """(claim, path inside it, "" or with a leading slash) of a pvc:// URI; None if it is none or leaves the claim."""
    match = _CLAIM_URI.match(uri)
    if match is None or any(part in (".", "..") for part in match["path"].split("/")):
        return None
    return match["claim"], match["path"]
