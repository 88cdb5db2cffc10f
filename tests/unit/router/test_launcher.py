"""The launcher stands alone and waits for the sidecar's key."""

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sluice.api.v1alpha1 import RoutingPolicy
from sluice.router import launcher

PATH = Path(launcher.__file__)


def test_imports_only_the_standard_library() -> None:
    for node in ast.walk(ast.parse(PATH.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert all(name.split(".")[0] in sys.stdlib_module_names for name in modules)


def test_every_routing_policy_of_the_api_has_a_name_in_smg() -> None:
    assert set(launcher.POLICIES) == {str(policy) for policy in RoutingPolicy}


def test_key_is_handed_over_and_not_told_in_the_options(tmp_path: Path) -> None:
    options = launcher.parse(["--policy", "PowerOfTwo", "--drain-seconds", "600", "--run-dir", str(tmp_path)])
    command = launcher.build_command(options, "KEY")
    assert command[1:4] == ["-m", "smg", "launch"]
    settings = dict(zip(command[4::2], command[5::2], strict=True))
    assert settings["--policy"] == "power_of_two"
    assert settings["--shutdown-grace-period-secs"] == "600"
    assert settings["--discovery-file"] == str(tmp_path / "workers.json")
    assert settings["--control-plane-api-keys"] == "sidecar:sidecar:admin:KEY"


def test_unknown_policy_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launcher.parse(["--policy", "Random", "--drain-seconds", "1"])
    assert "CacheAware" in capsys.readouterr().err


def test_waits_without_key_and_ends_on_sigterm(tmp_path: Path) -> None:
    arguments = ["--policy", "RoundRobin", "--drain-seconds", "1", "--run-dir", str(tmp_path)]
    process = subprocess.Popen([sys.executable, "-I", str(PATH), *arguments])
    try:
        deadline = time.monotonic() + 10
        while not _catches_sigterm(process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(5) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()


def _catches_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)
