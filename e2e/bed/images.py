"""The product's images: built from the project's own Dockerfiles on every run, so that the Dockerfiles are proven too.

A build whose inputs did not change is not run again. Inputs are all files that the Dockerfiles may see (what
``.dockerignore`` lets through) and the base image; the results are kept in the machine's cache, shared by all
checkouts, and copied into the store of the bed that asks.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from e2e.bed import base
from e2e.bed import build as programs
from e2e.bed.buildkit import Build, BuildKit, host_secrets
from e2e.bed.errors import BedError
from e2e.bed.oci import ImageStore, Layer, Reference

REPOSITORY = Path(__file__).resolve().parents[2]
DOCKERFILES: Mapping[str, str] = MappingProxyType(
    {
        "sluice-operator": "Dockerfile",
        "sluice-engine": "engine-image/Dockerfile",
        "sluice-router": "engine-image/router.Dockerfile",
    }
)
"""Image name and the file that makes it, relative to the repository."""

INPUTS = (
    *(".dockerignore", "Dockerfile", "LICENSE", "README.md", "pyproject.toml"),
    *("operator", "engine-image", "requirements"),
)
"""What .dockerignore lets through, and .dockerignore itself: relative to the repository."""

_IGNORED = ("__pycache__", ".egg-info")
# Kept builds per image: the present one and the one before, so that changing branches does not rebuild.
_KEEP = 2

Say = Callable[[str], None]


def version(source: Path = REPOSITORY) -> str:
    """The project's version, which is the tag of its images."""
    text = (source / "pyproject.toml").read_text()
    return str(tomllib.loads(text)["project"]["version"])


def cache() -> ImageStore:
    """This machine's store of base and built images."""
    return ImageStore(programs.cache_root() / "images")


def build_images(
    store: ImageStore, which: Sequence[str] = (), say: Say = print, source: Path = REPOSITORY
) -> dict[str, str]:
    """Make sure that ``store`` has the product's images (default: all), as the files below ``source`` make them.

    They are named ``<name>:<version>``. Returns image name -> complete reference.
    ``BedError`` with the end of the build's output, or if a base image came from elsewhere than the machine's cache.
    """
    unknown = [name for name in which if name not in DOCKERFILES]
    if unknown:
        raise BedError(f"unknown images {', '.join(unknown)}; there are {', '.join(DOCKERFILES)}")
    wanted = [name for name in DOCKERFILES if not which or name in which]
    kept = cache()
    built = _Builder(kept, source, say).build(wanted)
    references = {name: str(Reference.parse(f"{name}:{version(source)}")) for name in wanted}
    for name in wanted:
        store.copy_from(kept, built[name], references[name])
    return references


@dataclass(frozen=True, slots=True)
class _Builder:
    store: ImageStore
    source: Path
    say: Say

    def build(self, names: Sequence[str]) -> dict[str, str]:
        """Image name -> its reference in the cache, which names the inputs that it was made from."""
        layers = base.python_base(self.store, self.say)
        inputs = _inputs_key(self.source, layers)
        references = {name: f"bed.local/built/{name}:{inputs}" for name in names}
        missing = [name for name in names if self.store.resolve(references[name]) is None]
        for name in names:
            if name not in missing:
                self.say(f"image {name}: unchanged")
                self.store.tag(references[name], references[name])  # used last: kept longest
        if missing:
            self._build_missing(missing, references, layers)
        return references

    def _build_missing(self, names: Sequence[str], references: Mapping[str, str], layers: tuple[Layer, ...]) -> None:
        directory = programs.build(["buildkit"], self.say)["buildkit"]
        state = programs.cache_root() / "image-builder"
        with (
            tempfile.TemporaryDirectory(prefix="sluice-images-") as private,
            tempfile.TemporaryDirectory(dir=self.store.root, prefix=".build-") as output,
            BuildKit(directory / "buildkitd", directory / "buildctl", state) as kit,
        ):
            secrets = host_secrets(Path(private))
            for name in names:
                started = time.monotonic()
                archive = Path(output) / f"{name}.tar"
                kit.build(self._plan(name, secrets), archive, self.say)
                self._import(name, archive, references[name], layers)
                archive.unlink()
                size = sum(layer.descriptor.size for layer in self.store.layers(references[name]))
                self.say(f"image {name}: {time.monotonic() - started:.1f} s, {size / 1e6:.0f} MB")

    def _plan(self, name: str, secrets: Mapping[str, Path]) -> Build:
        found = self.store.resolve(base.NAME)
        assert found is not None  # python_base has just named it
        return Build(
            ref=f"{name}:{version(self.source)}",
            context=self.source,
            dockerfile=DOCKERFILES[name],
            bases={base.NAME: (self.store.root, found.digest)},
            args={"VERSION": version(self.source)},
            secrets=secrets,
        )

    def _import(self, name: str, archive: Path, reference: str, layers: tuple[Layer, ...]) -> None:
        """Name the image only when it stands on our base: BuildKit looks for a base that it was not given elsewhere."""
        unchecked = f"bed.local/unchecked/{name}:new"
        self.store.add_archive(archive, unchecked)
        below = self.store.layers(unchecked)[: len(layers)]
        if [layer.diff_id for layer in below] != [layer.diff_id for layer in layers]:
            raise BedError(f"{DOCKERFILES[name]}: its last FROM is not {base.NAME}; the image stands on another base")
        self.store.tag(reference, unchecked)
        self.store.forget(unchecked)
        self.store.keep_newest(reference, _KEEP)
        self.store.prune()


def _inputs_key(source: Path, layers: Sequence[Layer]) -> str:
    """Identity of all that a build may read: the context's files (name, mode, content) and the base's layers."""
    digest = hashlib.sha256("\0".join(layer.diff_id for layer in layers).encode())
    for path in _input_files(source):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(source)}\0{path.stat().st_mode:o}\0{content}\n".encode())
    return digest.hexdigest()[:16]


def _input_files(source: Path) -> Iterator[Path]:
    for name in INPUTS:
        top = source / name
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and not any(part.endswith(_IGNORED) for part in path.parts):
                yield path
