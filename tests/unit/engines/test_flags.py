"""The check of our arguments against the engines' own parsers: what it finds, and that it never passes unasked.

The engines are played by packages of the same shape; the real ones are asked by `make bench-flags`.
"""

import sys
from pathlib import Path

import pytest

from e2e.bench import flags
from tests.unit.engines.test_goldens import CASES

VLLM = {
    "vllm/__init__.py": "",
    "vllm/utils/__init__.py": "",
    "vllm/utils/argparse_utils.py": "from argparse import ArgumentParser as FlexibleArgumentParser",
    "vllm/entrypoints/__init__.py": "",
    "vllm/entrypoints/cli/__init__.py": "",
    "vllm/entrypoints/cli/serve.py": """
import sys
print("a log line on stdout")
class Serve:
    name = "serve"
    def subparser_init(self, subparsers):
        parser = subparsers.add_parser("serve")
        parser.add_argument("model")
        parser.add_argument("--port", type=int)
        parser.add_argument("--data-parallel-size", type=int, default=1)
        return parser
    def validate(self, args):
        if args.data_parallel_size > 4:
            raise ValueError("too many")
def cmd_init():
    return [Serve()]
""",
}


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in VLLM.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("SLUICE_VLLM_PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_every_golden_of_an_engine_is_asked() -> None:
    for engine in ("vllm", "sglang"):
        lists = flags.argument_lists(engine)
        assert {name for name in CASES if name.startswith(engine)} <= set(lists)
        assert all(any("8000" in argument for argument in arguments) for arguments in lists.values())


def test_refusals_are_told_by_name_in_the_parsers_words(played: Path) -> None:
    del played
    lists = {"good": ["/m", "--port=1"], "bad": ["/m", "--no-such"], "value": ["/m", "--port=x"]}
    against = flags.refused("vllm", lists | {"together": ["/m", "--data-parallel-size=8"]})
    assert set(against) == {"bad", "value", "together"}
    assert "--no-such" in against["bad"]
    assert "too many" in against["together"]


def test_an_engine_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLUICE_VLLM_PYTHON", raising=False)
    with pytest.raises(flags.UnavailableError, match="set SLUICE_VLLM_PYTHON"):
        flags.refused("vllm", {})
    monkeypatch.setenv("SLUICE_VLLM_PYTHON", sys.executable)
    with pytest.raises(flags.UnavailableError, match="No module named 'vllm'"):
        flags.refused("vllm", {})
    monkeypatch.setenv("SLUICE_VLLM_PYTHON", "/no/python")
    with pytest.raises(flags.UnavailableError, match="/no/python"):
        flags.refused("vllm", {})


def test_a_parser_that_takes_anything_proves_nothing(played: Path) -> None:
    (played / "vllm" / "utils" / "argparse_utils.py").write_text("""
from argparse import ArgumentParser
class FlexibleArgumentParser(ArgumentParser):
    def parse_args(self, arguments):
        return self.parse_known_args(arguments)[0]
""")
    with pytest.raises(flags.UnavailableError, match="proves nothing"):
        flags.refused("vllm", {"good": ["/m", "--port=1"]})
