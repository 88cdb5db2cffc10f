"""The bed's control groups on a made-up v1 tree: every hierarchy gets every path."""

from pathlib import Path

import pytest

from e2e.bed.cgroups import Cgroups, hierarchies, is_v2
from e2e.bed.errors import BedError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two v1 hierarchies, one of them ``cpuset``. Files appear in new groups only where a kernel would put them."""
    for name in ("cpuset", "memory"):
        (tmp_path / name).mkdir()
    (tmp_path / "cpu,cpuacct").symlink_to("memory")
    return tmp_path


def test_v1_has_one_hierarchy_per_mount_and_no_links(tree: Path) -> None:
    assert not is_v2(tree)
    assert hierarchies(tree) == [tree / "cpuset", tree / "memory"]


def test_group_exists_in_every_hierarchy_and_goes_from_every_one(tree: Path) -> None:
    groups = Cgroups("x", tree)
    joins = groups.create("n1")
    wanted = [tree / name / "sluice-bed-x" / "n1" / "cgroup.procs" for name in ("cpuset", "memory")]
    assert list(joins) == wanted
    assert groups.path("n1") == "/sluice-bed-x/n1"
    groups.remove()
    assert [path.name for path in tree.rglob("sluice*")] == []


def test_removing_one_group_leaves_the_others(tree: Path) -> None:
    groups = Cgroups("x", tree)
    groups.create("n1")
    groups.create("n2")
    groups.remove("n1")
    assert sorted(path.name for path in (tree / "memory/sluice-bed-x").iterdir()) == ["n2"]


def test_machine_without_control_groups_is_an_error_with_a_cure(tmp_path: Path) -> None:
    with pytest.raises(BedError, match="mount cgroup2"):
        Cgroups("x", tmp_path).create("n1")
