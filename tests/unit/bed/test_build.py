"""Where built programs are looked for, and what the messages say when they aren't there."""

from pathlib import Path

import pytest

from e2e.bed import build
from e2e.bed.errors import BedError


def test_cache_is_outside_the_repository_and_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLUICE_BED_CACHE", str(tmp_path / "explicit"))
    assert build.cache_root() == tmp_path / "explicit"
    monkeypatch.delenv("SLUICE_BED_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_root() == tmp_path / "sluice-bed"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.cache_root() == Path.home() / ".cache" / "sluice-bed"


def test_every_family_has_a_module_and_kubernetes_says_its_version() -> None:
    for family in build.FAMILIES.values():
        assert (build.TOOLS / family.name / "go.mod").exists()
    module = (build.TOOLS / "k8s" / "go.mod").read_text()
    assert f"k8s.io/kubernetes {build.KUBERNETES_VERSION}" in module
    assert f"gitVersion={build.KUBERNETES_VERSION}" in build.FAMILIES["k8s"].ldflags


def test_unknown_family_lists_the_known() -> None:
    with pytest.raises(BedError, match=r"unknown families docker; there are etcd, k8s"):
        build.build(["docker"])


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("go version go1.26.8 linux/amd64", (1, 26, 8)),
        ("go version go1.26 linux/amd64", (1, 26)),
        ("gcc (Debian) 12.2", None),
    ],
)
def test_go_version_is_read_from_what_go_says(text: str, version: tuple[int, ...] | None) -> None:
    assert build.parse_go_version(text) == version
