"""Gives argument lists to an engine's own parser; run by an interpreter that has the engine, and none of ours.

`flag_parsers.py vllm|sglang ANSWER`: reads `{name: [argument, …]}` from stdin and writes `{name: refusal}` to the
file ANSWER, because engines log to stdout; "" is no refusal. Nothing is loaded and no device is touched.
"""

import argparse
import contextlib
import importlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Parse = Callable[[list[str]], object]


def _vllm() -> Parse:
    """`vllm serve` as its command line builds it, with the checks between flags (vLLM 0.32, entrypoints/cli)."""
    commands = importlib.import_module("vllm.entrypoints.cli.serve").cmd_init()
    parser: Any = _parser_class()(prog="vllm")
    subparsers = parser.add_subparsers(required=True, dest="subparser")
    for command in commands:
        command.subparser_init(subparsers)
    [serve] = [command for command in commands if command.name == "serve"]

    def parse(arguments: list[str]) -> object:
        return serve.validate(parser.parse_args(["serve", *arguments]))

    return parse


def _parser_class() -> Any:
    """vLLM's own subclass of argparse's parser; it moved within `vllm.utils` (0.11 to 0.12)."""
    try:
        return importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    except ModuleNotFoundError as error:
        if error.name != "vllm.utils.argparse_utils":
            raise
        return importlib.import_module("vllm.utils").FlexibleArgumentParser


def _sglang() -> Parse:
    """`python -m sglang.launch_server`, its flags only: what they mean together is known on a GPU only."""
    parser = argparse.ArgumentParser(prog="sglang.launch_server")
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    return parser.parse_args


ENGINES: dict[str, Callable[[], Parse]] = {"vllm": _vllm, "sglang": _sglang}


def refusal(parse: Parse, arguments: list[str]) -> str:
    """What the parser says against the arguments, "" if it takes them."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            parse(arguments)
        except SystemExit as end:
            if end.code:
                return said.getvalue().strip()[-500:] or f"exit {end.code}"
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    engine, answer = sys.argv[1:]
    lists: dict[str, list[str]] = json.load(sys.stdin)
    parse = ENGINES[engine]()
    Path(answer).write_text(json.dumps({name: refusal(parse, arguments) for name, arguments in lists.items()}))


if __name__ == "__main__":
    main()
