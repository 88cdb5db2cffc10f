"""Where the facts of a model come from: a directory, the local Hugging Face cache, or the hub's metadata.

Never the weights: of a file of weights only the header is read. Everything works offline but `hf://` URIs that are not
in the cache; those need the extra `sluice[hub]` and a network.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sluice.cli.errors import CliError
from sluice.cli.files import is_directory, is_file
from sluice.sizing.fields import FactsError
from sluice.sizing.model import ModelFacts, from_config
from sluice.sizing.weights import FileFacts, read_headers, read_index

CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
MAX_JSON: Final = 100_000_000
"""Bytes; the safetensors library refuses larger headers too. Real configs have kilobytes, indexes megabytes."""
_HF: Final = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")


class FactsMissingError(CliError):
    """Nothing or too little is known of the model or the accelerator."""

    exit_code = 5


@dataclass(frozen=True, slots=True)
class Found:
    """Facts of a model as they were found."""

    model: ModelFacts
    files: FileFacts | None
    config: Mapping[str, Any]


def find_model(uri: str, revision: str | None, environment: Mapping[str, str]) -> Found:
    """Facts of a directory, `file://` or `hf://` URI.

    Raises:
        FactsMissingError: they can't be had from here; the text says what to pass instead.
    """
    if uri.startswith("hf://"):
        return _from_hub(uri, revision, environment)
    if "://" in uri and not uri.startswith("file://"):
        raise FactsMissingError(
            f"facts missing: {uri} can't be read from here; pass --model DIR with the model's files, or --config FILE "
            f"with its {CONFIG}"
        )
    try:
        path = Path(uri.removeprefix("file://")).expanduser()
    except RuntimeError as error:  # ~nobody
        raise FactsMissingError(f"facts missing: {uri}: {error}; write the whole path") from error
    if not is_directory(path):
        raise FactsMissingError(f"facts missing: {path} is no directory; write hf://OWNER/NAME for a model of the hub")
    return from_directory(path)


def from_file(path: Path) -> Found:
    """From a config alone; weights are counted.

    Raises:
        FactsMissingError: no readable JSON object, or a field that is needed is not usable.
    """
    config = _read_json(path)
    return Found(_model(config, path), None, config)


def from_directory(path: Path) -> Found:
    """Raises: FactsMissingError: no config, or one that can't be used."""
    if not is_file(path / CONFIG):
        raise FactsMissingError(f"facts missing: {CONFIG} not found at {path}")
    config = _read_json(path / CONFIG)
    model = _model(config, path / CONFIG)
    try:
        return Found(model, _files(path, model), config)
    except FactsError as error:
        raise FactsMissingError(f"{path}: {error}") from error


def _model(config: Mapping[str, Any], path: Path) -> ModelFacts:
    try:
        return from_config(config)
    except FactsError as error:
        raise FactsMissingError(f"facts missing: {path}: {error}") from error


def _files(path: Path, model: ModelFacts) -> FileFacts | None:
    """Headers of the files that the index names, if all are here; else the index; else a single file's header.

    Second copies (`original/`, `consolidated*`, `.bin`, GGUF) are named by no index, so they don't count.
    """
    index = _read_json(path / INDEX) if is_file(path / INDEX) else {}
    mapped = index.get("weight_map")
    names = sorted({n for n in mapped.values() if isinstance(n, str)}) if isinstance(mapped, Mapping) else []
    if not names and is_file(path / SINGLE):
        names = [SINGLE]
    # names come from a file that somebody else wrote: only plain ones in this directory are opened
    plain = [path / n for n in names if "/" not in n and "\\" not in n and is_file(path / n)]
    if plain and len(plain) == len(names):
        layers = model.shape.layers if model.shape else None
        return read_headers(_headers(plain), layers)
    return read_index(index)


def _headers(paths: list[Path]) -> Iterator[Mapping[str, Any]]:
    for path in paths:
        yield read_header(path)


def read_header(path: Path) -> Mapping[str, Any]:
    """The JSON header of a safetensors file: eight bytes of length, then so much JSON.

    Raises:
        FactsMissingError: no such header.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            raw = file.read(size) if 0 < size <= MAX_JSON else b""
        return _object(json.loads(raw), path)
    except (OSError, ValueError, RecursionError) as error:
        raise FactsMissingError(f"facts missing: {path} has no safetensors header ({error})") from error


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > MAX_JSON:
            raise FactsMissingError(f"facts missing: {path} is larger than {MAX_JSON} bytes; is it the right file?")
        return _object(json.loads(path.read_bytes()), path)
    except (OSError, ValueError, RecursionError) as error:
        raise FactsMissingError(f"facts missing: {path} can't be read as JSON ({error})") from error


def _object(value: object, path: Path) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise FactsMissingError(f"facts missing: {path} holds no JSON object")
    return value


# The hub.


def _from_hub(uri: str, revision: str | None, environment: Mapping[str, str]) -> Found:
    found = _HF.fullmatch(uri)
    if found is None:
        raise FactsMissingError(
            f"facts missing: {uri} is no model of the hub; write hf://OWNER/NAME or …/NAME@REVISION"
        )
    repository, wanted = found[1], revision or found[2] or "main"
    cached = _cached(repository, wanted, environment)
    if cached is not None:
        return from_directory(cached)
    return from_directory(_downloaded(repository, wanted))


def _cached(repository: str, revision: str, environment: Mapping[str, str]) -> Path | None:
    """The snapshot's directory in the local cache of huggingface_hub; None: no config of that revision is there."""
    home = Path(environment.get("HF_HOME") or Path(environment.get("HOME", "/")) / ".cache" / "huggingface")
    hub = Path(environment.get("HF_HUB_CACHE") or home / "hub")
    folder = hub / f"models--{repository.replace('/', '--')}"
    if revision.startswith("/") or ".." in revision.split("/"):
        return None
    reference = folder / "refs" / revision
    commit = reference.read_text(errors="replace").strip() if is_file(reference) else revision
    snapshot = folder / "snapshots" / commit
    return snapshot if "/" not in commit and is_file(snapshot / CONFIG) else None


def _downloaded(repository: str, revision: str) -> Path:
    """Config and index by huggingface_hub into its cache; no weights.

    Raises:
        FactsMissingError: the library is not installed, or the hub does not give them.
    """
    where = f"hf://{repository}@{revision}"
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
    except ImportError as error:
        raise FactsMissingError(
            f"facts missing: {CONFIG} not found at {where} in the local cache; pass --config FILE or --model DIR, or "
            "install sluice[hub] to read it from the hub"
        ) from error
    try:
        path = Path(hf_hub_download(repository, CONFIG, revision=revision))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise FactsMissingError(
            f"facts missing: {CONFIG} not found at {where} ({reason}); pass --config FILE or --model DIR"
        ) from error
    try:
        hf_hub_download(repository, INDEX, revision=revision)
    except (EntryNotFoundError, HfHubHTTPError, OSError, ValueError):
        return path.parent  # one file of weights, or none in this format: counted from the config, and said so
    return path.parent
