"""The product's images as built from the Dockerfiles, run by runc as a strict cluster would; and the builder itself.

No cluster is needed: an image's layers are laid out in a directory, and a program runs in it as the image's user on a
read-only root, without network and capabilities. Needs root and runc, as the bed does.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.bed import base, build
from e2e.bed.buildkit import CGROUP, Build, BuildKit, remove_cgroups
from e2e.bed.errors import BedError
from e2e.bed.images import DOCKERFILES, INPUTS, REPOSITORY, build_images, cache, version
from e2e.bed.oci import ImageStore

RUN_TIMEOUT_S = 120
PYTHON = "/opt/sluice/bin/python"
# Console scripts that must be in each image; others, of libraries, may be.
PROGRAMS = {
    "sluice-operator": {"sluice-operator"},
    "sluice-engine": {"sluice-agent", "sluice-router-sidecar", "sluice-sim"},
    "sluice-router": {"smg"},
}
# MB of our own layers, uncompressed. The base (here 92, the real one about 125) is shared by all three. smg's extension
# module alone has 107 (its wheel is not stripped), the Kubernetes client's sources 63.
OWN_SIZE_LIMIT_MB = {"sluice-operator": 130, "sluice-engine": 60, "sluice-router": 150}
EACH = pytest.mark.parametrize("name", DOCKERFILES)

LOAD_ALL_SCRIPTS = """
import importlib.metadata, pathlib, sys
for script in importlib.metadata.entry_points(group="console_scripts"):
    if pathlib.Path(sys.prefix, "bin", script.name).exists():
        script.load()
        print(script.name)
"""


@dataclass(frozen=True)
class Images:
    store: ImageStore
    references: dict[str, str]
    roots: Path

    def config(self, name: str) -> dict[str, object]:
        found: dict[str, object] = self.store.config(self.references[name])["config"]
        return found

    def own_layers(self, name: str) -> list[Path]:
        """The blobs above the base's."""
        below = len(cache().layers(base.NAME))
        layers = self.store.layers(self.references[name])[below:]
        return [self.store.blob(layer.descriptor.digest) for layer in layers]

    def own_files(self, name: str) -> set[str]:
        files: set[str] = set()
        for blob in self.own_layers(name):
            with tarfile.open(blob) as tar:
                files |= {member.name for member in tar if not member.isdir()}
        return files

    def run(self, name: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program in the image; stdout and stderr are text."""
        root = self.roots / name
        if not root.exists():
            self.store.unpack(self.references[name], root)
        container = f"sluice-{uuid.uuid4().hex[:12]}"
        bundle = self.roots / container
        bundle.mkdir()
        (bundle / "config.json").write_text(json.dumps(self._runtime_config(name, root, command, container)))
        try:
            return subprocess.run(
                ["runc", "--root", str(self.roots / "runc"), "run", "--bundle", str(bundle), container],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=RUN_TIMEOUT_S,
            )
        finally:
            remove_cgroups()

    def _runtime_config(self, name: str, root: Path, command: tuple[str, ...], container: str) -> dict[str, object]:
        config = self.config(name)
        user, _, group = str(config["User"]).partition(":")
        process = {
            "user": {"uid": int(user), "gid": int(group)},
            "args": list(command),
            "env": config["Env"],
            "cwd": config["WorkingDir"],
            "noNewPrivileges": True,
            "capabilities": {},
        }
        namespaces = [{"type": kind} for kind in ("pid", "mount", "network", "ipc", "uts")]
        return {
            "ociVersion": "1.0.2",
            "process": process,
            "root": {"path": str(root), "readonly": True},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755", "nosuid"]},
            ],
            "linux": {"namespaces": namespaces, "cgroupsPath": f"/{CGROUP}/{container}"},
        }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout as it is now: whoever edits it during the test does not change what is tested."""
    directory = tmp_path_factory.mktemp("source")
    for name in INPUTS:
        if (REPOSITORY / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(REPOSITORY / name, directory / name, ignore=ignored)
        else:
            shutil.copy2(REPOSITORY / name, directory / name)
    return directory


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Iterator[Images]:
    directory = tmp_path_factory.mktemp("images")
    store = ImageStore(directory / "store")
    yield Images(store, build_images(store, source=source), directory / "roots")
    shutil.rmtree(directory)


@EACH
def test_it_stands_on_the_base_that_it_was_given(images: Images, name: str) -> None:
    expected = cache().layers(base.NAME)
    assert images.store.layers(images.references[name])[: len(expected)] == expected


@EACH
def test_user_entry_point_and_labels_are_set(images: Images, name: str) -> None:
    config = images.config(name)
    assert config["User"] == "65532:65532"
    entrypoint = config["Entrypoint"]
    assert isinstance(entrypoint, list)
    assert Path(entrypoint[0]).is_relative_to("/opt/sluice/bin")
    labels = config["Labels"]
    assert isinstance(labels, dict)
    assert labels["org.opencontainers.image.title"] == name
    assert labels["org.opencontainers.image.version"] == version()
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"


@EACH
def test_all_its_programs_load_on_a_read_only_root_without_network(images: Images, name: str) -> None:
    done = images.run(name, PYTHON, "-c", LOAD_ALL_SCRIPTS)
    assert done.returncode == 0, done.stderr
    assert PROGRAMS[name] <= set(done.stdout.split())
    ours = {program for programs in PROGRAMS.values() for program in programs}
    assert set(done.stdout.split()) & ours == PROGRAMS[name], "a program without its libraries"


def test_the_router_s_entry_point_starts(images: Images) -> None:
    entrypoint = images.config("sluice-router")["Entrypoint"]
    assert isinstance(entrypoint, list)
    helped = images.run("sluice-router", *entrypoint, "--help")
    assert helped.returncode == 0, helped.stderr
    assert "smg" in helped.stdout
    version_of_smg = images.run("sluice-router", PYTHON, "-m", "smg", "--version")
    assert version_of_smg.returncode == 0, version_of_smg.stderr


@EACH
def test_it_runs_as_a_named_user_that_is_not_root_and_can_not_write(images: Images, name: str) -> None:
    tell = "import os, getpass, sys; print(os.getuid(), os.getgid(), getpass.getuser(), sys.version_info[:2])"
    done = images.run(name, PYTHON, "-c", tell)
    assert done.stdout == "65532 65532 sluice (3, 11)\n", done.stderr
    written = images.run(name, PYTHON, "-c", "open('/opt/sluice/x', 'w')")
    assert "Read-only file system" in written.stderr


@EACH
def test_installed_packages_fit_together(images: Images, name: str) -> None:
    done = images.run(name, "/usr/local/bin/pip", "--python", PYTHON, "check")
    assert done.returncode == 0, done.stdout + done.stderr


@EACH
def test_no_layer_holds_build_tools_sources_caches_or_settings_of_pip(images: Images, name: str) -> None:
    unwanted = re.compile(
        r"(^|/)bin/(gcc|cc|c\+\+|g\+\+|clang|ld|as|make|cmake|go|rustc|cargo)(-[\d.]+)?$"
        r"|(^|/)(pip\.conf|pip\.ini|\.netrc|\.pypirc|\.git-credentials)$|^(src|build|run/secrets)/|(^|/)\.cache/"
        r"|site-packages/(setuptools|pip)/|^etc/ssl/"
    )
    assert not [file for file in images.own_files(name) if unwanted.search(file)]


@EACH
def test_the_image_s_history_names_no_address_and_no_setting_of_this_machine(images: Images, name: str) -> None:
    history = json.dumps(images.store.config(images.references[name]).get("history", []))
    assert "://" not in history
    assert not re.search("pip|proxy|secret", history, re.IGNORECASE)


@EACH
def test_own_layers_stay_small(images: Images, name: str) -> None:
    size_mb = sum(blob.stat().st_size for blob in images.own_layers(name)) / 1e6
    assert size_mb <= OWN_SIZE_LIMIT_MB[name]


def test_an_unchanged_image_is_not_built_again(images: Images, source: Path) -> None:
    said: list[str] = []
    assert build_images(images.store, say=said.append, source=source) == images.references
    assert said == [f"image {name}: unchanged" for name in DOCKERFILES]


def test_a_change_of_source_changes_one_small_layer(images: Images, source: Path, tmp_path: Path) -> None:
    changed = tmp_path / "source"
    shutil.copytree(source, changed)
    with (changed / "engine-image/sluice_sim/__init__.py").open("a") as module:
        module.write(f"# {uuid.uuid4()}\n")
    store = ImageStore(tmp_path / "store")
    ref = build_images(store, ["sluice-engine"], source=changed)["sluice-engine"]

    before = images.store.layers(images.references["sluice-engine"])
    new = [layer for layer in store.layers(ref) if layer not in before]
    assert len(new) == 1
    assert new[0].descriptor.size < 5_000_000


# -- the builder -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """A directory to build small images in."""

    directory: Path
    buildkitd: Path
    buildctl: Path

    @property
    def state(self) -> Path:
        return self.directory / "state"

    def kit(self) -> BuildKit:
        return BuildKit(self.buildkitd, self.buildctl, self.state)

    def plan(self, dockerfile: str, **secrets: Path) -> Build:
        context = self.directory / "context"
        context.mkdir(exist_ok=True)
        (context / "Dockerfile").write_text(dockerfile)
        kept = cache()
        found = kept.resolve(base.NAME)
        assert found is not None
        return Build("trial:1", context, "Dockerfile", {base.NAME: (kept.root, found.digest)}, secrets=secrets)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    programs = build.build(["buildkit"])["buildkit"]
    base.python_base(cache())
    yield Bench(tmp_path, programs / "buildkitd", programs / "buildctl")
    shutil.rmtree(tmp_path / "state", ignore_errors=True)


def processes_with(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if text in command:
            found.append(command)
    return found


def test_a_secret_reaches_a_step_but_no_layer_and_nothing_of_the_builder_remains(bench: Bench) -> None:
    secret = bench.directory / "secret"
    secret.write_text("canary-5e1f")
    dockerfile = (
        f"FROM {base.NAME}\nRUN --mount=type=secret,id=pipconf,target=/etc/pip.conf wc -c < /etc/pip.conf > /size\n"
    )
    with bench.kit() as kit:
        kit.build(bench.plan(dockerfile, pipconf=secret), bench.directory / "out.tar", print)
    store = ImageStore(bench.directory / "store")
    store.add_archive(bench.directory / "out.tar")
    store.unpack("trial:1", bench.directory / "root")

    assert (bench.directory / "root/size").read_text().strip() == "11"
    assert b"canary-5e1f" not in (bench.directory / "out.tar").read_bytes()
    assert str(bench.state) not in Path("/proc/self/mountinfo").read_text()
    assert processes_with(str(bench.state)) == []
    assert not list(Path("/sys/fs/cgroup").glob(f"**/{CGROUP}"))
    shutil.rmtree(bench.directory / "root")


def test_a_failed_step_is_told_with_its_output(bench: Bench) -> None:
    plan = bench.plan(f"FROM {base.NAME}\nRUN echo the-reason-is-here >&2 && exit 3\n")
    with (
        bench.kit() as kit,
        pytest.raises(BedError, match=r"(?s)trial:1 from .*/Dockerfile failed.*the-reason-is-here"),
    ):
        kit.build(plan, bench.directory / "out.tar", print)


def test_a_warning_about_the_dockerfile_fails_the_build(bench: Bench) -> None:
    plan = bench.plan(f"FROM {base.NAME}\nENTRYPOINT sh\n")
    with bench.kit() as kit, pytest.raises(BedError, match="JSONArgsRecommended"):
        kit.build(plan, bench.directory / "out.tar", print)


def test_the_builder_ends_with_the_process_that_started_it(bench: Bench) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom e2e.bed.buildkit import BuildKit\n"
        "with BuildKit(*map(Path, sys.argv[1:])):\n    print('up', flush=True)\n    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, str(bench.buildkitd), str(bench.buildctl), str(bench.state)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        assert processes_with(f"--root={bench.state}")
        owner.kill()
    deadline = time.monotonic() + 10
    while processes_with(f"--root={bench.state}"):
        assert time.monotonic() < deadline, "buildkitd outlives its owner"
    with bench.kit() as kit:  # and its state can be used again
        kit.build(bench.plan(f"FROM {base.NAME}\n"), bench.directory / "out.tar", print)
