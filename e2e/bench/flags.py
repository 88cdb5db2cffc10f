"""`layouts.flags_refused`: the arguments of all goldens, given to the real engines' own parsers: `make bench-flags`.

The engine is installed elsewhere; `SLUICE_VLLM_PYTHON` and `SLUICE_SGLANG_PYTHON` name an interpreter that has it. An
engine that is asked for and not there is an error, never a pass.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from e2e.bench.figures import ROOT, Recorder

GOLDENS: Final = (ROOT / "tests" / "unit" / "engines" / "golden", ROOT / "tests" / "unit" / "plan" / "golden")
COMMANDS: Final = {"vllm": ["vllm", "serve"], "sglang": ["python3", "-m", "sglang.launch_server"]}
CONTROL: Final = "--a-flag-that-no-engine-has"
"""Given along with each engine's first list: a parser that takes it checks nothing."""
TIMEOUT_S: Final = 300
"""Importing vLLM takes 10-60 s."""


class UnavailableError(Exception):
    """The engine that was asked for can't be asked; the text says what to do."""


def argument_lists(engine: str) -> dict[str, list[str]]:
    """The arguments of every container in the goldens that starts the engine, by golden (and place, if several)."""
    found = {}
    for path in sorted(file for directory in GOLDENS for file in directory.glob("*.yaml")):
        containers = [*_containers(list(yaml.safe_load_all(path.read_text())), COMMANDS[engine])]
        for number, container in enumerate(containers):
            name = path.stem if len(containers) == 1 else f"{path.stem}[{number}]"
            found[name] = [str(argument) for argument in container["args"]]
    return found


def _containers(node: Any, command: Sequence[str]) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict) and node.get("command") == command:
        yield node
        return
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _containers(child, command)


def refused(engine: str, lists: dict[str, list[str]]) -> dict[str, str]:
    """The lists that the engine's parser refuses, with its words.

    Raises:
        UnavailableError: no interpreter with the engine, or its parser could not be built, or it takes anything.
    """
    variable = f"SLUICE_{engine.upper()}_PYTHON"
    python = os.environ.get(variable)
    if not python:
        raise UnavailableError(f"set {variable} to a Python that has {engine} installed")
    with tempfile.TemporaryDirectory(prefix="sluice-flags-") as directory:
        answer = Path(directory) / "answer.json"
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        script = str(Path(__file__).with_name("flag_parsers.py"))
        try:
            done = subprocess.run(
                # -P: the script's directory has modules with names of the standard library's
                [python, "-P", script, engine, str(answer)],
                input=json.dumps({**lists, CONTROL: [*next(iter(lists.values()), []), CONTROL]}),
                env=env,
                cwd=directory,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UnavailableError(f"{variable}={python}: {error}") from error
        if done.returncode != 0:
            raise UnavailableError(
                f"{variable}={python}: the parser of {engine} can't be built:\n{done.stderr[-2000:]}"
            )
        said: dict[str, str] = json.loads(answer.read_text())
    if not said.pop(CONTROL):
        raise UnavailableError(f"{variable}={python}: the parser took {CONTROL}, so it proves nothing")
    return {name: words for name, words in said.items() if words}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m e2e.bench.flags", description=__doc__)
    parser.add_argument("engines", nargs="*", metavar="engine", help=f"{', '.join(COMMANDS)}; default: vllm")
    engines = parser.parse_args().engines or ["vllm"]
    unknown = sorted(set(engines) - set(COMMANDS))
    if unknown:
        parser.error(f"no such engine: {', '.join(unknown)}; there are {', '.join(COMMANDS)}")
    total = 0
    for engine in engines:
        lists = argument_lists(engine)
        if not lists:
            sys.exit(f"no golden starts {engine}: nothing was checked")
        try:
            against = refused(engine, lists)
        except UnavailableError as error:
            sys.exit(f"{engine}: {error}")
        print(f"==> {engine}: {len(lists)} argument lists, {len(against)} refused", flush=True)
        for name, words in against.items():
            print(f"  {name}: {words}", flush=True)
        total += len(against)
    figures = Recorder("flags")
    figures.record("layouts.flags_refused", total)
    figures.write()
    sys.exit(1 if total else 0)


if __name__ == "__main__":
    main()
