"""``python -m e2e.bed``: build the cluster programs, and run local beds from a shell.

build [FAMILY...]   compile the cluster programs into the cache (default: all, and install Debian packages)
up, down            start a bed that outlives the command; end it and remove every trace
shell [COMMAND...]  a shell (or a command) in its network, with KUBECONFIG set
env                 `export KUBECONFIG=...` for eval
image [NAME...]     build the product's images into the cache
sweep               remove what killed beds left
doctor [--install]  try every need and name the cure
"""

from __future__ import annotations

import argparse
import functools
import os
import shlex
import sys
import time

from e2e.bed import build, images, owner, packages, state
from e2e.bed.api_only import sweep_api_beds
from e2e.bed.errors import BedError

_say = functools.partial(print, flush=True)


def _build(arguments: argparse.Namespace) -> int:
    if not arguments.family and os.geteuid() == 0:
        packages.ensure(_say)
    build.build(arguments.family, _say)
    return 0


def _up(arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    running = owner.up(arguments.name, arguments.nodes, _say)
    _say(f"bed {running.name}: {len(running.nodes)} nodes Ready, {running.version}, {time.monotonic() - started:.1f} s")
    _say(f"export KUBECONFIG={shlex.quote(str(running.kubeconfig))}")
    return 0


def _down(arguments: argparse.Namespace) -> int:
    there_was = owner.down(arguments.name, _say)
    _say(f"bed {arguments.name}: {'gone' if there_was else 'there was none'}")
    return 0


def _running(name: str) -> owner.Running:
    running = owner.find(name)
    if running is None:
        raise BedError(f"no bed {name!r} is up: run `python -m e2e.bed up --name {name}`")
    return running


def _shell(arguments: argparse.Namespace) -> int:
    owner.enter(_running(arguments.name), arguments.command)
    return 0


def _env(arguments: argparse.Namespace) -> int:
    _say(f"export KUBECONFIG={shlex.quote(str(_running(arguments.name).kubeconfig))}")
    return 0


def _own(arguments: argparse.Namespace) -> int:
    owner.own(arguments.name, arguments.nodes)
    return 0


def _image(arguments: argparse.Namespace) -> int:
    for name, reference in images.build_images(images.cache(), arguments.image, _say).items():
        _say(f"{name}: {reference}")
    return 0


def _sweep(_: argparse.Namespace) -> int:
    for directory in sweep_api_beds():
        _say(f"removed {directory}")
    failed = 0
    for name in state.names() if os.geteuid() == 0 else ():
        try:
            state.sweep(name)
        except state.BusyError as busy:
            _say(f"kept: {busy}")
        except BedError as error:
            _say(f"bed {name}: {error}")
            failed = 1
        else:
            _say(f"bed {name}: swept")
    return failed


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.install:
        packages.ensure(_say)
    unmet = 0
    for finding in packages.findings():
        unmet += not finding.is_met
        cure = "" if finding.is_met else f"  ->  {finding.cure}"
        _say(f"{'ok  ' if finding.is_met else 'MISS'}  {finding.what}: {finding.seen}{cure}")
    return 1 if unmet else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m e2e.bed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument(
        "--name", default=os.environ.get("SLUICE_BED_NAME", "default"), help="which bed (SLUICE_BED_NAME)"
    )
    sized = argparse.ArgumentParser(add_help=False)
    sized.add_argument("--nodes", type=int, default=2, help="number of nodes (2)")
    for name, do, parents in (
        ("up", _up, [named, sized]),
        ("down", _down, [named]),
        ("env", _env, [named]),
        ("own", _own, [named, sized]),
        ("sweep", _sweep, []),
    ):
        commands.add_parser(name, parents=parents).set_defaults(do=do)
    builder = commands.add_parser("build")
    builder.add_argument("family", nargs="*", help=", ".join(build.FAMILIES))
    builder.set_defaults(do=_build)
    imager = commands.add_parser("image")
    imager.add_argument("image", nargs="*", help=", ".join(images.DOCKERFILES))
    imager.set_defaults(do=_image)
    sheller = commands.add_parser("shell", parents=[named])
    sheller.add_argument("command", nargs=argparse.REMAINDER, help="default: your shell")
    sheller.set_defaults(do=_shell)
    doctor = commands.add_parser("doctor")
    doctor.add_argument("--install", action="store_true", help="install missing Debian packages (root)")
    doctor.set_defaults(do=_doctor)
    return parser


def main() -> int:
    """Run one command; errors that name their cure go to stderr without a traceback."""
    arguments = _parser().parse_args()
    try:
        result: int = arguments.do(arguments)
    except BedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return result


if __name__ == "__main__":
    sys.exit(main())
