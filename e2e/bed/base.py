"""A stand-in for ``python:3.11-slim``, made from Debian packages, because no registry can be assumed.

Our Dockerfiles say ``FROM python:3.11-slim``; BuildKit is given this image under that name. So every step of the
Dockerfiles really runs; what is *not* proven is the real base. The two agree in what the Dockerfiles may use: Debian,
``python`` and ``pip`` in ``/usr/local/bin``, coreutils and a shell, CA certificates, no compiler. Test images of the
bed are built on it too.

Packages come through the machine's own apt with its signature checks, into a directory of ours: nothing is installed,
and apt's state on the machine is not touched.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from e2e.bed.errors import BedError
from e2e.bed.oci import ImageStore, Layer, files_below

NAME = "python:3.11-slim"
"""The short form: BuildKit's named contexts match only this, also when a Dockerfile writes the long one."""

# What the real image has and a build step or a debugging user may call. apt adds the libraries.
_SEEDS = (
    *("python3.11", "python3.11-venv", "base-files", "dash", "bash", "coreutils", "grep", "sed", "findutils", "tar"),
    *("gzip", "ca-certificates", "openssl", "tzdata", "netbase", "media-types"),
)
# Pulled in by maintainer scripts and by Debian's default python3, which we do not run and do not use.
_UNUSED = frozenset(
    {"dpkg", "debconf", "mawk", "python3", "python3-minimal"}
    | {"libpython3-stdlib", "python3-distutils", "python3-lib2to3"}
)
_PRUNED = ("usr/share/doc", "usr/share/man", "usr/share/info", "usr/share/locale", "usr/share/lintian")
_MERGED = ("bin", "sbin", "lib", "lib64")
_PIP = "#!/usr/local/bin/python\nimport sys\nfrom pip._internal.cli.main import main\n\nsys.exit(main())\n"
_PASSWD = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
_GROUP = "root:x:0:\nnogroup:x:65534:\n"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Part of the cache key: raise it with every change of what this module makes of the packages.
_RECIPE = "1"
_TIMEOUT_S = 300
_KEEP = 2

Say = Callable[[str], None]


def python_base(store: ImageStore, say: Say = print) -> tuple[Layer, ...]:
    """Layers of the stand-in; made at the first call and whenever Debian's packages changed, else from the store.

    The name ``python:3.11-slim`` in the store points at it. ``BedError`` if apt can't provide the packages.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=store.root, prefix=".base-") as temporary:
        apt = _Apt(Path(temporary) / "apt", store.root / "apt-lists")
        ref = f"bed.local/base:{apt.key()}"
        if store.resolve(ref) is None:
            say("base image: fetching Debian packages")
            root = Path(temporary) / "root"
            root.mkdir()
            _fill(root, apt.download())
            layer = store.layer(files_below(root))
            store.image(ref, [layer], cmd=["python3"], env={"PATH": _PATH, "LANG": "C.UTF-8"})
            say(f"base image: {time.monotonic() - started:.1f} s, {layer.descriptor.size / 1e6:.0f} MB")
    store.tag(ref, ref)  # used last: kept longest
    store.keep_newest(ref, _KEEP)
    store.tag(NAME, ref)
    return store.layers(ref)


class _Apt:
    """Resolves and downloads the packages as for an empty machine.

    ``archives`` must be empty: apt leaves out of its plan what is already there. Package lists are the machine's; when
    they lack a package, or name a version that the mirror has replaced, fresh ones in ``own_lists``.
    """

    def __init__(self, archives: Path, own_lists: Path) -> None:
        self._archives = archives
        self._own_lists = own_lists
        self._options = [
            f"Dir::State::status={os.devnull}",  # nothing is installed yet: apt then names all that is needed
            f"Dir::Cache::archives={archives}",
            "APT::Sandbox::User=root",  # the directory is not readable for _apt
            "Debug::NoLocking=true",
        ]
        (archives / "partial").mkdir(parents=True)

    def key(self) -> str:
        """Identity of the packages that would be used now, without downloading them."""
        plan = self._install("--print-uris")
        names = sorted(line.split()[1] for line in plan.splitlines() if line.startswith("'"))
        return hashlib.sha256("\0".join([_RECIPE, platform.machine(), *names]).encode()).hexdigest()[:16]

    def download(self) -> list[Path]:
        """The package files that the image uses."""
        self._install("--download-only")
        found = sorted(self._archives.glob("*.deb"))
        return [path for path in found if path.name.partition("_")[0] not in _UNUSED]

    def _install(self, mode: str) -> str:
        arguments = ["install", mode, "--yes", "--no-install-recommends", "-qq", *_SEEDS]
        own_lists = f"Dir::State::lists={self._own_lists}"
        done = self._run(*arguments)
        if done.returncode != 0 and self._own_lists.is_dir() and own_lists not in self._options:
            self._options.append(own_lists)
            done = self._run(*arguments)
        if done.returncode != 0:
            self._own_lists.joinpath("partial").mkdir(parents=True, exist_ok=True)
            self._options.append(own_lists)
            self._run("update", "-qq")
            done = self._run(*arguments)
        if done.returncode != 0:
            why = done.stderr.strip()[-800:]
            raise BedError(f"apt can't provide the packages of the base image (Debian 12 has them all):\n{why}")
        return done.stdout

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        if shutil.which("apt-get") is None:
            raise BedError("apt-get is missing: the base image is made from Debian packages")
        command = ["apt-get", *(part for option in self._options for part in ("-o", option)), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)


def _fill(root: Path, packages: Sequence[Path]) -> None:
    """Unpack the packages and do what their maintainer scripts would."""
    for package in packages:
        subprocess.run(["dpkg-deb", "--extract", str(package), str(root)], check=True)
    for name in _MERGED:
        _merge_into_usr(root, name)
    for name in _PRUNED:
        shutil.rmtree(root / name, ignore_errors=True)
    local = root / "usr/local"
    (local / "bin").mkdir(parents=True, exist_ok=True)
    for link in ("python", "python3", "python3.11"):
        (local / "bin" / link).symlink_to("/usr/bin/python3.11")
    packages_dir = local / "lib/python3.11/dist-packages"
    packages_dir.mkdir(parents=True, exist_ok=True)
    (wheel,) = (root / "usr/share/python-wheels").glob("pip-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages_dir)
    (local / "bin/pip").write_text(_PIP)
    (local / "bin/pip").chmod(0o755)
    # With the marker pip refuses to install; the real image has none.
    (root / "usr/lib/python3.11/EXTERNALLY-MANAGED").unlink(missing_ok=True)
    (root / "etc/passwd").write_text(_PASSWD)
    (root / "etc/group").write_text(_GROUP)
    bundle = root / "etc/ssl/certs/ca-certificates.crt"
    certificates = sorted((root / "usr/share/ca-certificates/mozilla").glob("*.crt"))
    bundle.write_text("".join(path.read_text() for path in certificates))
    (root / "tmp").chmod(0o1777)
    _compile_library(root)


def _compile_library(root: Path) -> None:
    """Byte code for the library, as the real image has it: on a read-only root each start would compile it again.

    The image's own interpreter does it. Unchecked, because layers set every file's time to 0.
    """
    options = ["-q", "--invalidation-mode", "unchecked-hash", "-x", "/(test|lib2to3|pydoc_data)/"]
    places = ["/usr/lib/python3.11", "/usr/local/lib/python3.11/dist-packages"]
    command = ["chroot", str(root), "/usr/bin/python3.11", "-m", "compileall", *options, *places]
    # A fixed seed makes the order of constants, so the digest, the same each time.
    env = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=_TIMEOUT_S)
    if done.returncode != 0:
        raise BedError(f"the base image's interpreter does not run (this needs root):\n{done.stderr.strip()[-800:]}")


def _merge_into_usr(root: Path, name: str) -> None:
    """``/bin`` becomes a link to ``/usr/bin`` and so on, as on every installed Debian."""
    source, target = root / name, root / "usr" / name
    target.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(source)
    source.symlink_to(f"usr/{name}")
