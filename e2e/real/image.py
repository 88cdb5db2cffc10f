"""An image with the real engine: the installed environment as one layer on the base stand-in, with no build step.

The environment is 3 GB; written straight into the image store it is read and hashed once. Through BuildKit it would be
packed, unpacked and packed again, and proves nothing more: there is no Dockerfile of vLLM's to prove.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import time
from pathlib import Path
from typing import Final

from e2e.bed import base, images
from e2e.bed.errors import BedError
from e2e.bed.oci import Directory, File, ImageStore, Layer, Link, files_below
from e2e.real import install

NAME: Final = "real-vllm:0.32.0"
PLACE: Final = "/opt/vllm"
USER: Final = "2000"
"""As vLLM's official images have it; the adapter runs them as this user."""
_LEFT_OUT: Final = ("bin", "include", "lib64", "pyvenv.cfg")
"""Of the environment: what names its place on this machine, or only a compiler reads."""
_LIBRARIES: Final = {"libstdc++.so.6": "libstdc++6", "libnuma.so.1": "libnuma1", "libsmartcols.so.1": "libsmartcols1"}
"""Shared library -> the Debian package that has it."""

Say = install.Say


def put_image(store: ImageStore, say: Say = print) -> str:
    """Make sure that `store` has the image; its name. Installs the engine first if need be.

    Raises:
        BedError: the engine can't be installed, or the machine's apt can't provide the base.
    """
    environment = install.install(say)
    kept = images.cache()
    layers = base.python_base(kept, say)
    reference = f"bed.local/built/real-vllm:{_key(environment, layers)}"
    if kept.resolve(reference) is None:
        started = time.monotonic()
        layer = kept.layer(_content(environment))
        kept.image(
            reference,
            [*layers, layer],
            cmd=["vllm", "serve"],
            env={
                "PATH": f"{PLACE}/bin:/usr/local/bin:/usr/bin:/bin",
                "LANG": "C.UTF-8",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            user=USER,
        )
        kept.keep_newest(reference, 1)
        kept.prune()
        say(f"image {NAME}: {time.monotonic() - started:.1f} s, {layer.descriptor.size / 1e9:.2f} GB")
    store.copy_from(kept, reference, NAME)
    return NAME


def _key(environment: Path, layers: tuple[Layer, ...]) -> str:
    own = (Path(__file__), Path(install.__file__))
    parts = (environment.name, *(path.read_text() for path in own), *(layer.diff_id for layer in layers))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _content(environment: Path) -> dict[str, File | Link | Directory]:
    """The environment at its place in the image, on the image's own Python."""
    inside = PLACE.lstrip("/")
    files = {
        name: node
        for name, node in files_below(environment, inside).items()
        if Path(name).relative_to(inside).parts[0] not in _LEFT_OUT
    }
    files[f"{inside}/pyvenv.cfg"] = File(b"home = /usr/bin\ninclude-system-site-packages = false\nversion = 3.11\n")
    for name in ("python", "python3"):
        files[f"{inside}/bin/{name}"] = Link("/usr/bin/python3.11")
    files[f"{inside}/bin/vllm"] = File(install.program_text(f"{PLACE}/bin/python").encode(), 0o755)
    files.update(_libraries())
    return files


def _libraries() -> dict[str, File | Link | Directory]:
    """What Python's slim image has or vLLM's own has, and the stand-in has not. Taken from this machine, whose apt gave
    the stand-in: the same Debian release."""
    found: dict[str, File | Link | Directory] = {}
    for name, package in _LIBRARIES.items():
        said = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
        path = Path(said.strip())
        if not path.is_absolute():
            raise BedError(f"{name} is missing on this machine, and vLLM needs it: install {package}")
        found[f"usr/lib/x86_64-linux-gnu/{name}"] = File(path.resolve(), 0o644)
    program = shutil.which("lscpu")
    if program is None:
        raise BedError("lscpu is missing on this machine, and vLLM on CPU asks it for the cores: install util-linux")
    found["usr/bin/lscpu"] = File(Path(program), 0o755)
    return found
