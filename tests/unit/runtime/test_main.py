"""Arguments and helpers of the process."""

import asyncio
from pathlib import Path

import pytest

from sluice import main
from sluice.api import names


def test_defaults_use_the_pod_s_own_identity_and_no_kubeconfig(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/somebody/elses")
    monkeypatch.setenv("POD_NAME", "op-1")
    options = main.parse([])
    assert (options.kubeconfig, options.context, options.port) == (None, None, names.PORT_OPERATOR)
    assert options.identity.startswith("op-1_")


def test_context_without_kubeconfig_is_refused() -> None:
    with pytest.raises(SystemExit):
        main.parse(["--context", "prod"])


@pytest.mark.parametrize(
    ("text", "says"), [("workers: 0", "workers"), ("wrokers: 8", "wrokers"), ("a: [", "not YAML"), (None, "absent")]
)
def test_bad_configuration_is_named_and_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, says: str
) -> None:
    path = tmp_path / ("config.yaml" if text else "absent")
    if text:
        path.write_text(text)
    assert main.main(["--config", str(path)]) == 2
    assert says in capsys.readouterr().err


def test_no_cluster_configuration_is_a_sentence_and_exits_with_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main.main(["--host", "127.0.0.1", "--port", "0"]) == 2
    assert "Service host/port is not set" in capsys.readouterr().err


async def test_work_ends_when_stop_comes_first() -> None:
    stop = asyncio.Event()
    ended = asyncio.Event()

    async def work() -> bool:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return True

    async with asyncio.timeout(2):
        waiting = asyncio.create_task(main.unless(stop, work()))
        await asyncio.sleep(0)
        stop.set()
        assert await waiting is None
    assert ended.is_set()
