"""What build steps learn of this machine: enough to reach the package index, and nothing else."""

import stat
from pathlib import Path

import pytest

from e2e.bed.buildkit import host_secrets


@pytest.fixture
def pip_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("PIP_INDEX_URL", "PIP_TIMEOUT", "PIP_DEFAULT_TIMEOUT", "PIP_PROXY", "PIP_EXTRA_INDEX_URL", "PIP_CERT"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "host-pip.conf"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(path))
    return path


def test_the_environment_wins_over_files_and_local_paths_are_left_out(
    pip_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_file.write_text(
        "[global]\nindex-url = http://file.example/simple\nfind-links = /opt/wheels\ncache-dir = /var/pip\n"
        "[install]\nextra-index-url =\n  http://one.example\n  http://two.example\n"
    )
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@env.example/simple")
    private = tmp_path / "private"
    private.mkdir()

    written = host_secrets(private)["pipconf"]

    assert written.read_text() == (
        "[global]\n"
        "index-url = http://user:secret@env.example/simple\n"
        "extra-index-url = \n    http://one.example\n    http://two.example\n"
    )
    assert stat.S_IMODE(written.stat().st_mode) == 0o600


def test_without_settings_there_is_no_pip_configuration(pip_file: Path, tmp_path: Path) -> None:
    pip_file.write_text("[global]\ncert = /etc/ssl/cert.pem\n")
    assert "pipconf" not in host_secrets(tmp_path)


def test_the_certificates_that_pip_uses_here_are_handed_on(
    pip_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.touch()
    pip_file.touch()
    monkeypatch.setenv("PIP_CERT", str(bundle))
    assert host_secrets(tmp_path) == {"ca": bundle}
