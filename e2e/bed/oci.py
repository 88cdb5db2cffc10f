"""Content-addressed images on disk: what the bed's registry serves and BuildKit reads and writes.

A store's directory *is* an OCI image layout (image-spec v1.1: ``oci-layout``, ``index.json``, ``blobs/sha256``), so
that BuildKit takes it as ``--oci-layout`` without an export.

Invariants: the same content always gives the same digest (uid 0, mtime 0, sorted names, no compression, because zlib's
output changes between versions); a blob appears under its digest only when it is complete; a name points only at blobs
that are there. Several processes may use one store: names change under a file lock. Nothing here starts a program or
opens a connection.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import platform
import re
import shutil
import stat
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from e2e.bed.errors import BedError

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
REF_NAME = "org.opencontainers.image.ref.name"
CONTAINERD_NAME = "io.containerd.image.name"

ARCH = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
_CHUNK = 1 << 20
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class ImageError(BedError):
    """An image, layer or archive that can't be used; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A complete image name: ``domain/repository`` and a tag or a digest (``sha256:...``)."""

    domain: str
    repository: str
    version: str

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Complete a name as containerd does: Docker Hub, ``library/`` and ``:latest`` are what is left out."""
        rest, _, digest = text.partition("@")
        head, slash, tail = rest.rpartition("/")
        name, _, tag = tail.partition(":")
        path = head + slash + name
        first, slash, others = path.partition("/")
        if slash and (first == "localhost" or "." in first or ":" in first):
            domain, repository = first, others
        else:
            domain, repository = "docker.io", path if slash else "library/" + path
        if not name or not repository or (digest and not _DIGEST.fullmatch(digest)):
            raise ImageError(f"image name {text!r} is not [HOST/]REPOSITORY[:TAG][@sha256:DIGEST]")
        return cls(domain, repository, digest or tag or "latest")

    def __str__(self) -> str:
        return f"{self.domain}/{self.repository}{'@' if ':' in self.version else ':'}{self.version}"


@dataclass(frozen=True, slots=True)
class File:
    """A regular file: its content, or the path to copy it from when it is large."""

    data: bytes | Path
    mode: int = 0o644
    uid: int = 0


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link to ``target``."""

    target: str


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory whose mode or owner differs from the 0755, root that missing parents get."""

    mode: int = 0o755
    uid: int = 0


Files = Mapping[str, File | Link | Directory]


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What OCI calls a descriptor; ``size`` in bytes."""

    digest: str
    size: int
    media_type: str

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Descriptor:
        return cls(raw["digest"], raw["size"], raw["mediaType"])

    def json(self) -> dict[str, Any]:
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer in the store; ``diff_id`` is the digest of its uncompressed tar."""

    descriptor: Descriptor
    diff_id: str


def files_below(path: Path, prefix: str = "") -> dict[str, File | Link | Directory]:
    """Everything below a directory, as layer content below ``prefix``; sockets and devices are left out."""
    found: dict[str, File | Link | Directory] = {}
    for here in sorted(path.rglob("*")):
        name = str(PurePosixPath(prefix, here.relative_to(path).as_posix()))
        mode = here.lstat().st_mode
        if stat.S_ISLNK(mode):
            found[name] = Link(str(here.readlink()))
        elif stat.S_ISDIR(mode):
            found[name] = Directory(stat.S_IMODE(mode))
        elif stat.S_ISREG(mode):
            found[name] = File(here, stat.S_IMODE(mode))
    return found


class ImageStore:
    """Images below ``root``, which is made when it is missing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.blobs = root / "blobs" / "sha256"
        self.blobs.mkdir(parents=True, exist_ok=True)
        marker = root / "oci-layout"
        if not marker.exists():
            _write_atomically(marker, b'{"imageLayoutVersion":"1.0.0"}')

    # -- reading -------------------------------------------------------------------------------------------------

    def blob(self, digest: str) -> Path:
        """Path of a blob. ``ImageError`` if the text is no digest: it may come from a client of the registry."""
        if not _DIGEST.fullmatch(digest):
            raise ImageError(f"{digest!r} is not a sha256 digest")
        return self.blobs / digest.removeprefix("sha256:")

    def refs(self) -> dict[str, Descriptor]:
        """All complete names and what they point at; the one set last is last."""
        return {entry["annotations"][CONTAINERD_NAME]: Descriptor.of(entry) for entry in self._index()}

    def resolve(self, ref: str) -> Descriptor | None:
        """What a name or ``name@digest`` stands for (a manifest, or an index of them); ``None`` if it is not here.

        By digest it is found under the repository of any of its names.
        """
        wanted = Reference.parse(ref)
        refs = self.refs()
        if ":" not in wanted.version:
            return refs.get(str(wanted))
        return next((d for d in refs.values() if d.digest == wanted.version), None)

    def manifest(self, ref: str) -> dict[str, Any]:
        """The manifest of the image for this machine's processor. ``ImageError`` when there is none."""
        found = self.resolve(ref)
        if found is None:
            raise ImageError(f"image {ref!r} is not in the store {self.root}; it has {sorted(self.refs()) or 'none'}")
        document = self._document(found.digest)
        for entry in document.get("manifests", ()):
            if entry.get("platform", {}) == {"os": "linux", "architecture": ARCH}:
                return self._document(entry["digest"])
        if "layers" not in document:
            raise ImageError(f"image {ref!r} has no manifest for linux/{ARCH}")
        return document

    def config(self, ref: str) -> dict[str, Any]:
        """The image's configuration document: ``config.User``, ``rootfs.diff_ids`` and so on."""
        return self._document(self.manifest(ref)["config"]["digest"])

    def layers(self, ref: str) -> tuple[Layer, ...]:
        """The image's layers, lowest first: to build another image on top."""
        pairs = zip(self.manifest(ref)["layers"], self.config(ref)["rootfs"]["diff_ids"], strict=True)
        return tuple(Layer(Descriptor.of(raw), diff_id) for raw, diff_id in pairs)

    # -- writing -------------------------------------------------------------------------------------------------

    def layer(self, files: Files) -> Layer:
        """Store a layer; names are relative to ``/``, missing parent directories are added."""
        with tempfile.NamedTemporaryFile(dir=self.root, prefix=".layer-", delete=False) as out:
            with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
                for name, node in sorted(_with_parents(files).items()):
                    _add(tar, name, node)
            size = out.tell()
        digest = self._adopt(Path(out.name))
        return Layer(Descriptor(digest, size, LAYER), digest)

    def image(
        self,
        ref: str,
        layers: Sequence[Layer],
        *,
        entrypoint: Sequence[str] = (),
        cmd: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        user: str = "0",
        workdir: str = "/",
        labels: Mapping[str, str] | None = None,
    ) -> str:
        """Store an image for this machine's processor under a name (moving the name if it exists); its digest."""
        config = {
            "architecture": ARCH,
            "os": "linux",
            "config": {
                "User": user,
                "WorkingDir": workdir,
                "Entrypoint": list(entrypoint),
                "Cmd": list(cmd),
                "Env": [f"{key}={value}" for key, value in sorted((env or {}).items())],
                "Labels": dict(sorted((labels or {}).items())),
            },
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self._put_json(config, CONFIG).json(),
            "layers": [layer.descriptor.json() for layer in layers],
        }
        stored = self._put_json(manifest, MANIFEST)
        self._point(ref, stored)
        return stored.digest

    def tag(self, ref: str, source: str) -> None:
        """Give an image one more name."""
        found = self.resolve(source)
        if found is None:
            raise ImageError(f"image {source!r} is not in the store {self.root}")
        self._point(ref, found)

    def forget(self, ref: str) -> None:
        """Take a name away; its blobs stay until ``prune``."""
        name = str(Reference.parse(ref))
        with self._locked():
            self._write_index([e for e in self._index() if e["annotations"][CONTAINERD_NAME] != name])

    def keep_newest(self, ref: str, count: int) -> None:
        """Of all names with the repository of ``ref``, keep those set last; their blobs stay until ``prune``."""
        wanted = Reference.parse(ref)
        names = [name for name in map(Reference.parse, self.refs()) if name.repository == wanted.repository]
        for old in [name for name in names if name.domain == wanted.domain][:-count]:
            self.forget(str(old))

    def copy_from(self, other: ImageStore, source: str, ref: str) -> str:
        """Take over an image of another store under a name; its digest. Blobs are shared by hard link if possible."""
        found = other.resolve(source)
        if found is None:
            raise ImageError(f"image {source!r} is not in the store {other.root}")
        for digest in other.reachable(found.digest):
            if not self.blob(digest).exists():
                _link_or_copy(other.blob(digest), self.blob(digest))
        self._point(ref, found)
        return found.digest

    def add_archive(self, path: Path, ref: str | None = None) -> str:
        """Import the one image of an OCI tar (BuildKit's ``type=oci``), every blob checked against its digest.

        Without ``ref`` the image keeps the name it has in the archive. Returns its digest.
        """
        index: list[dict[str, Any]] = []
        with tarfile.open(path) as tar:
            for member in tar:
                name = member.name.removeprefix("./")
                content = tar.extractfile(member)
                if content is None:
                    continue
                if name == "index.json":
                    index = json.load(content)["manifests"]
                elif name.startswith("blobs/sha256/"):
                    self._import_blob(content, "sha256:" + name.rpartition("/")[2], path)
        if len(index) != 1:
            raise ImageError(f"{path} holds {len(index)} images, expected one")
        name = ref or index[0].get("annotations", {}).get(CONTAINERD_NAME)
        if not name:
            raise ImageError(f"the image in {path} has no name; give one")
        stored = Descriptor.of(index[0])
        self._point(name, stored)
        return stored.digest

    def export(self, ref: str, path: Path) -> None:
        """Write one image as an OCI tar: for ``ctr images import`` and ``kind load image-archive``."""
        found = self.resolve(ref)
        if found is None:
            raise ImageError(f"image {ref!r} is not in the store {self.root}")
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [_named(ref, found)]}
        files: dict[str, File | Link | Directory] = {
            "oci-layout": File(b'{"imageLayoutVersion":"1.0.0"}'),
            "index.json": File(_canonical(index)),
        }
        files |= {f"blobs/sha256/{d.removeprefix('sha256:')}": File(self.blob(d)) for d in self.reachable(found.digest)}
        with tarfile.open(path, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name, node in sorted(_with_parents(files).items()):
                _add(tar, name, node)

    def unpack(self, ref: str, into: Path) -> None:
        """Lay the image's layers over each other in a directory, whiteouts applied (image-spec ``layer.md``)."""
        into.mkdir(parents=True, exist_ok=True)
        for layer in self.layers(ref):
            with tarfile.open(self.blob(layer.descriptor.digest)) as tar:
                for member in tar:
                    _extract(tar, member, into)

    def prune(self, *, older_than_s: float = 600) -> int:
        """Delete blobs that no name leads to; the freed bytes. Younger ones may belong to an image in the making."""
        with self._locked():
            kept = {digest for found in self.refs().values() for digest in self.reachable(found.digest)}
            freed = 0
            for path in (*self.blobs.iterdir(), *self.root.glob(".layer-*")):
                about = path.stat()
                if f"sha256:{path.name}" not in kept and about.st_mtime < time.time() - older_than_s:
                    path.unlink()
                    freed += about.st_size
        return freed

    def reachable(self, digest: str) -> set[str]:
        """The digest itself and all blobs that it needs."""
        document = self._document(digest)
        found = {digest}
        for entry in document.get("manifests", ()):
            found |= self.reachable(entry["digest"])
        if "config" in document:
            found |= {document["config"]["digest"], *(layer["digest"] for layer in document["layers"])}
        return found

    # -- inside --------------------------------------------------------------------------------------------------

    def _document(self, digest: str) -> dict[str, Any]:
        try:
            document: dict[str, Any] = json.loads(self.blob(digest).read_bytes())
        except FileNotFoundError:
            raise ImageError(f"blob {digest} is missing in the store {self.root}; delete the store") from None
        return document

    def _index(self) -> list[dict[str, Any]]:
        try:
            manifests: list[dict[str, Any]] = json.loads((self.root / "index.json").read_bytes())["manifests"]
        except FileNotFoundError:
            return []
        return manifests

    def _point(self, ref: str, found: Descriptor) -> None:
        entry = _named(ref, found)
        name = entry["annotations"][CONTAINERD_NAME]
        with self._locked():
            self._write_index([e for e in self._index() if e["annotations"][CONTAINERD_NAME] != name] + [entry])

    def _write_index(self, entries: list[dict[str, Any]]) -> None:
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}
        _write_atomically(self.root / "index.json", _canonical(index))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.root / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _put_json(self, document: Mapping[str, Any], media_type: str) -> Descriptor:
        data = _canonical(document)
        with tempfile.NamedTemporaryFile(dir=self.root, prefix=".layer-", delete=False) as out:
            out.write(data)
        return Descriptor(self._adopt(Path(out.name)), len(data), media_type)

    def _import_blob(self, content: IO[bytes], digest: str, source: Path) -> None:
        target = self.blob(digest)
        if target.exists():
            os.utime(target)
            return
        with tempfile.NamedTemporaryFile(dir=self.root, prefix=".layer-", delete=False) as out:
            shutil.copyfileobj(content, out, _CHUNK)
        found = self._adopt(Path(out.name))
        if found != digest:
            raise ImageError(f"{source}: blob {digest} has content {found}")

    def _adopt(self, temporary: Path) -> str:
        """Move a complete file to the place of its digest; a blob met again is young again, so ``prune`` spares it."""
        with temporary.open("rb") as content:
            digest = "sha256:" + hashlib.file_digest(content, "sha256").hexdigest()
        temporary.chmod(0o644)
        temporary.replace(self.blob(digest))
        return digest


def _named(ref: str, found: Descriptor) -> dict[str, Any]:
    name = Reference.parse(ref)
    return {**found.json(), "annotations": {CONTAINERD_NAME: str(name), REF_NAME: name.version}}


def _canonical(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _write_atomically(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".layer-", delete=False) as out:
        out.write(data)
    Path(out.name).chmod(0o644)
    Path(out.name).replace(path)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except FileExistsError:  # another process had it first
        return
    except OSError:  # another file system, or one without links
        temporary = target.with_name(f".layer-{os.getpid()}-{target.name}")
        shutil.copyfile(source, temporary)
        temporary.replace(target)


def _with_parents(files: Files) -> dict[str, File | Link | Directory]:
    complete: dict[str, File | Link | Directory] = {}
    for raw, node in files.items():
        name = PurePosixPath(raw.lstrip("/"))
        if ".." in name.parts or not name.parts:
            raise ImageError(f"{raw!r} is no name of a file in a layer")
        for parent in name.parents[:-1]:
            complete.setdefault(str(parent), Directory())
        complete[str(name)] = node
    return complete


def _add(tar: tarfile.TarFile, name: str, node: File | Link | Directory) -> None:
    info = tarfile.TarInfo(name)  # uid, gid and mtime of a fresh TarInfo are 0
    if isinstance(node, Link):
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, node.target, 0o777
        tar.addfile(info)
        return
    info.mode, info.uid, info.gid = node.mode, node.uid, node.uid
    if isinstance(node, Directory):
        info.type = tarfile.DIRTYPE
        tar.addfile(info)
    elif isinstance(node.data, bytes):
        info.size = len(node.data)
        tar.addfile(info, io.BytesIO(node.data))
    else:
        with node.data.open("rb") as content:
            info.size = os.fstat(content.fileno()).st_size
            tar.addfile(info, content)


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, into: Path) -> None:
    target = into / member.name.lstrip("/")
    if target.name == ".wh..wh..opq":
        for old in target.parent.iterdir():
            _remove(old)
        return
    if target.name.startswith(".wh."):
        _remove(target.with_name(target.name.removeprefix(".wh.")))
        return
    if not member.isdir():
        _remove(target)
    tar.extract(member, into, filter="fully_trusted", numeric_owner=True)  # the others clear the sticky bit of /tmp


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
