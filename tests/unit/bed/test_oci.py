"""The image store: digests that depend on content alone, names, archives, and what a damaged archive does."""

import hashlib
import io
import json
import os
import stat
import tarfile
from pathlib import Path

import pytest

from e2e.bed.oci import (
    ARCH,
    INDEX,
    MANIFEST,
    Directory,
    File,
    ImageError,
    ImageStore,
    Link,
    Reference,
    files_below,
)

DIGEST = "sha256:" + "a" * 64
CONTENT: dict[str, File | Link | Directory] = {
    "bin/tool": File(b"#!/bin/sh\n", 0o755),
    "etc/name": File(b"sluice\n"),
    "bin/alias": Link("tool"),
}


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store")


def an_image(store: ImageStore, ref: str = "app:1", **config: object) -> str:
    return store.image(ref, [store.layer(CONTENT)], entrypoint=["/bin/tool"], user="65532:65532", **config)  # type: ignore[arg-type]  # test builder


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("python", "docker.io/library/python:latest"),
        ("python:3.11-slim", "docker.io/library/python:3.11-slim"),
        ("vllm/vllm-openai:v1", "docker.io/vllm/vllm-openai:v1"),
        ("localhost/app", "localhost/app:latest"),
        ("10.90.0.1:5000/a/b:c", "10.90.0.1:5000/a/b:c"),
        (f"registry.example/app:1@{DIGEST}", f"registry.example/app@{DIGEST}"),
    ],
)
def test_names_are_completed_as_containerd_does(text: str, complete: str) -> None:
    assert str(Reference.parse(text)) == complete


@pytest.mark.parametrize("text", ["", ":1", "localhost/", "app@sha256:12"])
def test_a_malformed_name_is_refused(text: str) -> None:
    with pytest.raises(ImageError, match="is not"):
        Reference.parse(text)


def test_the_same_content_has_the_same_digest_whenever_and_in_whatever_order_it_is_written(
    store: ImageStore, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    (tree / "bin").mkdir(parents=True)
    (tree / "etc").mkdir()
    (tree / "etc/name").write_bytes(b"sluice\n")
    (tree / "bin/tool").write_bytes(b"#!/bin/sh\n")
    (tree / "bin/tool").chmod(0o755)
    (tree / "bin/alias").symlink_to("tool")
    os.utime(tree / "etc/name", (1, 1))

    assert store.layer(files_below(tree)) == store.layer(dict(reversed(CONTENT.items())))
    assert an_image(store) == an_image(ImageStore(tmp_path / "other"))


def test_a_layer_holds_content_modes_links_and_owners(store: ImageStore, tmp_path: Path) -> None:
    layer = store.layer(CONTENT | {"tmp": Directory(0o1777), "home/me": File(b"", uid=65532)})
    with tarfile.open(store.blob(layer.descriptor.digest)) as tar:
        members = {member.name: member for member in tar}
    assert [name for name, member in members.items() if member.isdir()] == ["bin", "etc", "home", "tmp"]
    assert members["bin/alias"].linkname == "tool"
    assert {member.mtime for member in members.values()} == {0}
    assert {name for name, member in members.items() if member.uid} == {"home/me"}

    store.image("app:1", [layer])
    store.unpack("app:1", tmp_path / "root")
    assert (tmp_path / "root/etc/name").read_bytes() == b"sluice\n"
    assert stat.S_IMODE((tmp_path / "root/tmp").stat().st_mode) == 0o1777


def test_a_layer_takes_files_of_lower_layers_away(store: ImageStore, tmp_path: Path) -> None:
    lower = store.layer({"a/old": File(b""), "a/kept": File(b""), "b/x": File(b""), "c": Link("a")})
    upper = store.layer({"a/.wh.old": File(b""), "b/.wh..wh..opq": File(b""), "b/y": File(b""), "c": File(b"file now")})
    store.image("app:1", [lower, upper])
    store.unpack("app:1", tmp_path / "root")
    found = sorted(p.relative_to(tmp_path / "root").as_posix() for p in (tmp_path / "root").rglob("*"))
    assert found == ["a", "a/kept", "b", "b/y", "c"]
    assert (tmp_path / "root/c").read_bytes() == b"file now"


@pytest.mark.parametrize("name", ["../escape", "/", ""])
def test_a_file_outside_the_image_is_refused(store: ImageStore, name: str) -> None:
    with pytest.raises(ImageError, match="no name of a file"):
        store.layer({name: File(b"")})


def test_an_image_is_found_by_name_and_by_digest(store: ImageStore) -> None:
    digest = an_image(store, labels={"k": "v"}, env={"B": "2", "A": "1"})
    for ref in ("app:1", "docker.io/library/app:1", f"app@{digest}"):
        found = store.resolve(ref)
        assert found is not None
        assert found.digest == digest
    assert store.config("app:1")["config"] == {
        "User": "65532:65532",
        "WorkingDir": "/",
        "Entrypoint": ["/bin/tool"],
        "Cmd": [],
        "Env": ["A=1", "B=2"],
        "Labels": {"k": "v"},
    }
    assert store.resolve("app:2") is None
    with pytest.raises(ImageError, match=r"'app:2' is not in the store .*app:1"):
        store.manifest("app:2")


def test_a_name_moves_to_the_newer_image_and_can_be_taken_away(store: ImageStore) -> None:
    old = an_image(store)
    new = an_image(store, cmd=["serve"])
    store.tag("app:old", f"app@{new}")
    assert old != new
    assert {str(ref): found.digest for ref, found in store.refs().items()} == {
        "docker.io/library/app:1": new,
        "docker.io/library/app:old": new,
    }
    store.forget("app:old")
    assert store.resolve("app:old") is None


def test_only_the_names_set_last_are_kept(store: ImageStore) -> None:
    for ref in ("app:1", "app:2", "other:1", "app:3", "app:1"):
        an_image(store, ref)
    store.keep_newest("app:any", 2)
    assert list(store.refs()) == [f"docker.io/library/{name}" for name in ("other:1", "app:3", "app:1")]


def test_an_exported_image_comes_back_with_the_same_digest(store: ImageStore, tmp_path: Path) -> None:
    digest = an_image(store)
    store.export("app:1", tmp_path / "app.tar")
    other = ImageStore(tmp_path / "other")
    assert other.add_archive(tmp_path / "app.tar") == digest
    assert other.add_archive(tmp_path / "app.tar", "renamed:2") == digest
    assert list(other.refs()) == ["docker.io/library/app:1", "docker.io/library/renamed:2"]
    assert other.layers("renamed:2") == store.layers("app:1")


def test_a_damaged_archive_is_refused_and_names_no_image(store: ImageStore, tmp_path: Path) -> None:
    an_image(store)
    store.export("app:1", tmp_path / "app.tar")
    damaged = (tmp_path / "app.tar").read_bytes().replace(b"sluice\n", b"sluicy\n")
    (tmp_path / "app.tar").write_bytes(damaged)
    other = ImageStore(tmp_path / "other")
    with pytest.raises(ImageError, match=r"app\.tar: blob sha256:\w+ has content sha256:"):
        other.add_archive(tmp_path / "app.tar")
    assert other.refs() == {}


def test_an_archive_without_image_is_refused(store: ImageStore, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "empty.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("oci-layout"), io.BytesIO())
    with pytest.raises(ImageError, match="holds 0 images"):
        store.add_archive(tmp_path / "empty.tar")


def test_of_an_index_the_image_for_this_processor_is_used(store: ImageStore, tmp_path: Path) -> None:
    an_image(store, "native:1")
    native = store.resolve("native:1")
    assert native is not None
    attestation = {"mediaType": MANIFEST, "digest": DIGEST, "size": 1, "platform": {"os": "unknown"}}
    mine = native.json() | {"platform": {"os": "linux", "architecture": ARCH}}
    data = json.dumps({"mediaType": INDEX, "manifests": [attestation, mine]}).encode()
    digest = hashlib.sha256(data).hexdigest()
    top = {"manifests": [{"mediaType": INDEX, "digest": f"sha256:{digest}", "size": len(data)}]}
    archive = tmp_path / "index.tar"
    with tarfile.open(archive, "w") as tar:
        for name, blob in ((f"blobs/sha256/{digest}", data), ("index.json", json.dumps(top).encode())):
            info = tarfile.TarInfo(name)
            info.size = len(blob)
            tar.addfile(info, io.BytesIO(blob))
    assert store.add_archive(archive, "multi:1") == f"sha256:{digest}"
    assert store.manifest("multi:1") == store.manifest("native:1")


def test_prune_deletes_what_no_name_leads_to_but_not_what_is_being_written(store: ImageStore) -> None:
    an_image(store)
    old = store.layer({"old": File(b"old")})
    young = store.layer({"young": File(b"young")})
    for path in store.blobs.iterdir():
        if path != store.blob(young.descriptor.digest):
            os.utime(path, (1, 1))
    assert store.prune() == old.descriptor.size
    assert not store.blob(old.descriptor.digest).exists()
    assert store.blob(young.descriptor.digest).exists()
    assert store.layers("app:1") == (store.layer(CONTENT),)


def test_an_image_is_copied_to_another_store_with_all_it_needs(store: ImageStore, tmp_path: Path) -> None:
    digest = an_image(store)
    other = ImageStore(tmp_path / "other")
    assert other.copy_from(store, "app:1", "copy:1") == digest
    assert other.reachable(digest) == {f"sha256:{path.name}" for path in other.blobs.iterdir()}
    other.unpack("copy:1", tmp_path / "root")
    assert (tmp_path / "root/etc/name").read_bytes() == b"sluice\n"


def test_text_that_is_no_digest_is_no_path(store: ImageStore) -> None:
    with pytest.raises(ImageError, match="is not a sha256 digest"):
        store.blob("sha256:../../oci-layout")
