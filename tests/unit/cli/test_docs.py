"""docs/cli.md says what --help says: the same commands, options and exit codes."""

import argparse
import re
from pathlib import Path

import pytest

from sluice.cli.main import EXIT_CODES, build_parser

PAGE = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
COMMON = {"-h", "--help", "-n", "--namespace", "--context", "--kubeconfig"}


def parsers() -> dict[str, argparse.ArgumentParser]:
    (commands,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(commands.choices)


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def options_in_table(text: str) -> set[str]:
    rows = [line.split("|")[1] for line in text.splitlines() if re.match(r"^\| `-", line)]
    return {option for row in rows for option in re.findall(r"`(--?[a-zA-Z0-9-]+)`", row)}


@pytest.mark.parametrize("command", parsers())
def test_every_option_stands_in_the_page_and_no_other(command: str) -> None:
    real = {option for action in parsers()[command]._actions for option in action.option_strings}
    assert options_in_table(sections()[command]) == real - COMMON


def test_common_options_and_every_command_are_there() -> None:
    head = PAGE.split("## ", 1)[0]
    assert all(f"`{option}`" in head for option in COMMON)
    assert set(parsers()) == set(sections()) - {"Exit codes", "Rights"}


def test_exit_codes_are_those_of_the_help() -> None:
    said = dict(re.findall(r"^  (\d+) +(.+)$", EXIT_CODES, flags=re.MULTILINE))
    written = dict(re.findall(r"^\| (\d+) \| (.+) \|$", sections()["Exit codes"], flags=re.MULTILINE))
    assert {code: text.replace("`", "") for code, text in written.items() if code in said} == said
    assert set(written) - set(said) == {"130"}


@pytest.mark.parametrize("command", parsers())
def test_help_gives_examples_that_the_parser_accepts(command: str) -> None:
    examples = re.findall(r"^  kubectl sluice (.+)$", str(parsers()[command].epilog), flags=re.MULTILINE)
    assert examples
    for example in examples:
        assert build_parser().parse_args(example.split()).command == command
        assert all(action.help for action in parsers()[command]._actions)
