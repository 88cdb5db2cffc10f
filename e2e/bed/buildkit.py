"""Run BuildKit without Docker: the project's Dockerfiles are built by the real builder, and nothing of it remains.

buildkitd runs only inside ``with BuildKit(...)``, in PID and mount namespaces of its own: when it ends, however it
ends, its build containers and mounts end with it. Its cache stays on disk, so an unchanged build takes a second or two;
one process uses it at a time, others wait. Build steps use the machine's network as it is (no bridges, no NAT).

What ``pip`` needs to know of the machine (certificates, which index) reaches build steps as BuildKit secrets: mounted
while a step runs, never part of a layer, of the image's history or of the cache key.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from e2e.bed.errors import BedError
from e2e.bed.process import Daemon, Spawner, descendants, kill_quietly, wait_for

CGROUP = f"sluice-images-{os.getpid()}"
"""Parent of this process's build containers' cgroups: not BuildKit's default, so that others' are never removed."""
_RUN = Path("/run/sluice-buildkit")
_KEEP_MB = 2000  # a dozen builds leave 1.2 GB
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 15.0
_BUILD_TIMEOUT_S = 900.0
_PROGRESS_S = 10.0
_TAIL_LINES = 40
_STEP = re.compile(r"#\d+ (\[.+)")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CA_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
# Only what says how to reach the index. Paths (find-links, cache, client certificates) mean nothing inside a build.
_PIP_KEYS = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "default-timeout", "retries")
# Predefined build arguments: used by steps, kept out of the image's history and the cache key.
_PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Build:
    """One image to build.

    ``dockerfile`` is relative to ``context``. ``bases`` gives images under the names that ``FROM`` uses: a pair of OCI
    layout and manifest digest; a name that is missing there would be looked for on the network.
    """

    ref: str
    context: Path
    dockerfile: str
    bases: Mapping[str, tuple[Path, str]]
    args: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Path] = field(default_factory=dict)


class BuildKit:
    """A running buildkitd with its state in ``state``. Needs root and runc. Enter and leave it in the same thread."""

    def __init__(self, buildkitd: Path, buildctl: Path, state: Path) -> None:
        self._buildkitd = buildkitd
        self._buildctl = buildctl
        self._state = state

    def __enter__(self) -> Self:
        for needed in ("runc", "unshare"):
            if shutil.which(needed) is None:
                raise BedError(f"{needed} is missing: BuildKit can't run build steps (apt-get install runc util-linux)")
        if os.geteuid() != 0:
            raise BedError("BuildKit needs root here: run as root")
        self._state.mkdir(parents=True, exist_ok=True)
        self._lock = (self._state / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # The socket's path must stay below 108 characters, wherever the state is. What a killed owner left is replaced.
        self._run = _RUN / hashlib.sha256(str(self._state.resolve()).encode()).hexdigest()[:12]
        shutil.rmtree(self._run, ignore_errors=True)
        self._run.mkdir(mode=0o700, parents=True)
        self._address = f"unix://{self._run}/socket"
        self._spawner = Spawner()
        log = self._state / "buildkitd.log"
        log.unlink(missing_ok=True)
        self._daemon = Daemon("buildkitd", tuple(self._command()), log, os.environ)
        try:
            self._daemon.start(self._spawner)
            wait_for("buildkitd", self._answers, _START_TIMEOUT_S, [self._daemon])
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def build(self, build: Build, output: Path, say: Say) -> None:
        """Build an image into an OCI tar. A warning of Dockerfile's checks fails it too.

        ``BedError`` with the end of the build's output. What takes long is told to ``say`` every 10 s.
        """
        command = self._build_command(build, output)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            try:
                lines = _follow(process, build.ref, say)
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            tail = "\n".join(lines[-_TAIL_LINES:])
            raise BedError(f"building {build.ref} from {build.context / build.dockerfile} failed:\n{tail}")

    def _command(self) -> list[str]:
        config = self._run / "buildkitd.toml"
        config.write_text(f'[worker.oci]\n  defaultCgroupParent = "{CGROUP}"\n')
        isolated = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]
        options = {
            "config": str(config),
            "root": str(self._state / "root"),
            "addr": self._address,
            "oci-worker": "true",
            "containerd-worker": "false",
            "oci-worker-net": "host",
            "oci-worker-gc-keepstorage": str(_KEEP_MB),
        }
        return [*isolated, str(self._buildkitd), *(f"--{name}={value}" for name, value in options.items())]

    def _build_command(self, build: Build, output: Path) -> list[str]:
        command = [str(self._buildctl), "--addr", self._address, "build", "--progress=plain"]
        command += ["--frontend=dockerfile.v0", f"--opt=filename={build.dockerfile}"]
        command += [f"--local=context={build.context}", f"--local=dockerfile={build.context}"]
        command += ["--opt=build-arg:BUILDKIT_DOCKERFILE_CHECK=error=true"]
        command += [f"--opt=build-arg:{name}={os.environ[name]}" for name in _PROXY_VARIABLES if name in os.environ]
        command += [f"--opt=build-arg:{name}={value}" for name, value in build.args.items()]
        for number, (name, (layout, digest)) in enumerate(build.bases.items()):
            command += [
                f"--oci-layout=base{number}={layout}",
                f"--opt=context:{name}=oci-layout://base{number}@{digest}",
            ]
        command += [f"--secret=id={name},src={path}" for name, path in build.secrets.items()]
        # Uncompressed: the bed's registry and nodes are one machine, and gzip costs more than it saves.
        return [*command, f"--output=type=oci,dest={output},name={build.ref},compression=uncompressed"]

    def _answers(self) -> bool:
        command = [str(self._buildctl), "--addr", self._address, "debug", "workers"]
        return subprocess.run(command, capture_output=True, timeout=_START_TIMEOUT_S).returncode == 0

    def _stop(self) -> None:
        process = self._daemon.process
        if process is not None:
            for pid in descendants(process.pid)[:1]:  # unshare itself does not hand signals on
                kill_quietly(pid, signal.SIGTERM)
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._daemon.kill()
        self._spawner.close()
        remove_cgroups()
        shutil.rmtree(self._run)
        with suppress(OSError):  # another builder's is in it
            _RUN.rmdir()
        self._lock.close()


def host_secrets(directory: Path) -> dict[str, Path]:
    """What build steps need to reach the package index as this machine does: ``ca`` and, if there is any, ``pipconf``.

    ``directory`` must be private and be removed after the build; an address in a pip configuration may hold a password.
    """
    secrets: dict[str, Path] = {}
    candidates = [os.environ.get("PIP_CERT"), os.environ.get("SSL_CERT_FILE"), *_CA_BUNDLES]
    if bundle := next((Path(path) for path in candidates if path and Path(path).is_file()), None):
        secrets["ca"] = bundle
    if settings := _pip_settings():
        target = directory / "pip.conf"
        lines = [f"{key} = {value.replace(chr(10), chr(10) + '    ')}" for key, value in settings.items()]
        target.touch(mode=0o600)
        target.write_text("\n".join(["[global]", *lines, ""]))
        secrets["pipconf"] = target
    return secrets


def _pip_settings() -> dict[str, str]:
    """This machine's pip settings that say how to reach the index; the environment wins over files, as in pip."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    by_source: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        source, _, key = name.rpartition(".")
        if key in _PIP_KEYS and source in by_source:
            by_source[source][key] = str(ast.literal_eval(value))
    return by_source["global"] | by_source["install"] | by_source[":env:"]


def _follow(process: subprocess.Popen[bytes], name: str, say: Say) -> list[str]:
    """Read a build's output until it ends, telling the present step every 10 s. The lines of the output."""
    assert process.stderr is not None
    started = said = time.monotonic()
    step, lines = "", [""]
    while data := _read(process.stderr, _PROGRESS_S):
        lines[-1:] = (lines[-1] + data.decode(errors="replace")).split("\n")
        step = next((found[1] for line in reversed(lines) if (found := _STEP.match(line))), step)
        now = time.monotonic()
        if now - started > _BUILD_TIMEOUT_S:
            raise BedError(f"building {name}: not within {_BUILD_TIMEOUT_S:.0f} s, last step {step}")
        if now - said >= _PROGRESS_S:
            said = now
            say(f"{name}: {now - started:.0f} s, {step[:100]}")
    return lines


def _read(stream: IO[bytes], timeout_s: float) -> bytes:
    """What the stream has; a line end, which changes nothing, when it was silent so long; empty at its end."""
    if not select.select([stream], [], [], timeout_s)[0]:
        return b"\n"
    return os.read(stream.fileno(), 1 << 16)


def remove_cgroups() -> None:
    """Remove the build containers' empty cgroups, ours and those of killed processes.

    In each hierarchy: v1 has one below every controller, v2 has one.
    """
    family = CGROUP.rpartition("-")[0] + "-*"
    for top in (*_CGROUP_ROOT.glob(f"*/{family}"), *_CGROUP_ROOT.glob(family)):
        if top.name != CGROUP and Path("/proc", top.name.rpartition("-")[2]).exists():
            continue
        for path in (*sorted((p for p in top.rglob("*") if p.is_dir()), reverse=True), top):
            with suppress(OSError):  # still in use, or already gone
                path.rmdir()
