"""Command line of `kubectl sluice`: parser, dispatch, exit codes.

kubectl runs the program `kubectl-sluice` from PATH and hands it the arguments as they are, so the program stands alone.
"""

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from sluice import __version__
from sluice.cli import plan
from sluice.cli.errors import INTERRUPTED, OK, CliError
from sluice.cli.text import clean

if TYPE_CHECKING:
    from sluice.cli.drain import Target

PROG: Final = "kubectl sluice"
WATCH_S: Final = 2.0

EXIT_CODES: Final = """\
exit codes:
  0    all is well: every service shown is Ready, the drain was asked for or is done
  1    not Ready, not found, refused, or not done within --timeout
  2    wrong usage
  3    the cluster can't be reached or does not know you
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the exit code."""
    options = build_parser().parse_args(arguments)
    check(options)
    try:
        if options.command == "plan":
            return plan.run(options, sys.stdout, os.environ)
        from sluice.cli.cluster import run  # only now: it loads the API's client

        return asyncio.run(run(options, sys.stdout, os.environ))
    except CliError as error:
        print(f"error: {clean(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(getattr(options, "interrupted", ""), file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `| head` has enough
        sys.stdout = None  # so that the interpreter does not flush into the closed pipe
        return OK


# The parser.


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="See what InferenceServices do, why, and drain their instances without losing a request.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kubectl-sluice {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_status(commands)
    _add_explain(commands)
    _add_drain(commands, "drain", cancel=False)
    _add_drain(commands, "undrain", cancel=True)
    _add_plan(commands)
    return parser


def _add_status(commands: Any) -> None:
    parser = _command(
        commands,
        "status",
        "show services, or one service with its instances, drains and problems",
        "Without SERVICE: one line per service. With SERVICE: rollout, pools, instances with their start-up times, "
        "drains in progress, problems with the next step, and how engines ended last.",
        "kubectl sluice status\n  kubectl sluice status qwen -n chat\n  kubectl sluice status -A -o json",
    )
    parser.add_argument("service", metavar="SERVICE", nargs="?", type=_service, help="name of an InferenceService")
    parser.add_argument(
        "-A", "--all-namespaces", action="store_true", help="services of all namespaces (not with SERVICE)"
    )
    parser.add_argument(
        "-o", "--output", choices=("table", "json", "yaml"), default="table", help="format (default: table)"
    )
    parser.add_argument("-w", "--watch", action="store_true", help=f"show it again every {WATCH_S:g} s until Ctrl-C")
    parser.set_defaults(watch_s=WATCH_S)
    parser.add_argument(
        "--no-live",
        dest="live",
        action="store_false",
        help="do not ask the instances' agents for requests in flight (asking needs `get pods/proxy`)",
    )


def _add_explain(commands: Any) -> None:
    parser = _command(
        commands,
        "explain",
        "say in sentences why a service is or is not Ready",
        "Says in plain sentences why a service is or is not Ready and what to do next, from its conditions, problems, "
        "drains and events.",
        "kubectl sluice explain qwen -n chat",
    )
    parser.add_argument("service", metavar="SERVICE", type=_service, help="name of an InferenceService")


def _add_drain(commands: Any, name: str, *, cancel: bool) -> None:
    if cancel:
        parser = _command(
            commands,
            name,
            "take a drain back (the same as drain --cancel)",
            "Takes back a drain that was asked for, as long as the pod is not being deleted: the instance serves on, "
            "or again. A node stays cordoned, and cordoned nodes are emptied: uncordon it with kubectl.",
            "kubectl sluice undrain qwen-default-0-1-3f2a9c01\n  kubectl sluice undrain node/gpu-7 --wait",
        )
    else:
        parser = _command(
            commands,
            name,
            "drain an instance, or all instances on a node, without losing a request",
            "Asks the operator to drain: a replacement comes up first where the service needs one, the routers let go, "
            "requests in flight finish (at most spec.drain.timeoutSeconds), then the pod is deleted. node/NAME means "
            "all engine pods on that node, in all namespaces unless -n is given; only a cordon keeps new pods away "
            "(and empties the node by itself: the operator moves instances off a cordoned node).",
            "kubectl sluice drain qwen-default-0-1-3f2a9c01 --wait\n"
            "  kubectl sluice drain node/gpu-7 --cordon --wait --timeout 20m",
        )
        parser.add_argument("--cancel", action="store_true", help="take the request back instead (undrain)")
        parser.add_argument("--cordon", action="store_true", help="with node/NAME: mark the node unschedulable first")
    parser.add_argument("target", metavar="TARGET", type=_target, help="NAME or pod/NAME of an instance, or node/NAME")
    until = "the instances serve again" if cancel else "the pods are gone (with --cancel: serve again)"
    parser.add_argument("--wait", action="store_true", help=f"show progress until {until}")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=0.0,
        metavar="DURATION",
        help="with --wait: give up waiting after so long, as 90s, 20m or 2h (default 0: never); the drain goes on",
    )
    parser.set_defaults(interrupted="Not waiting any more; what was asked for goes on.")
    if cancel:
        parser.set_defaults(cancel=True, cordon=False)


def _add_plan(commands: Any) -> None:
    parser = _parser(
        commands,
        "plan",
        "how a model fits an accelerator, and how fast it will be; needs no cluster",
        "Shows what fills a GPU's memory, which layouts fit and how fast they are, the instances that a load needs, "
        "and what to be warned of. Reads an object from a file, or takes a model and an accelerator; asks no cluster.",
        "kubectl sluice plan -f service.yaml --model ./llama-70b\n"
        "  kubectl sluice plan --model hf://Qwen/Qwen3-8B --accelerator h100-80g\n"
        "  kubectl sluice plan --config config.json --accelerator 80Gi -o json",
        plan.EXIT_CODES,
    )
    plan.add_options(parser)


def _command(commands: Any, name: str, summary: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A command that asks the cluster."""
    parser = _parser(commands, name, summary, description, examples, EXIT_CODES)
    parser.add_argument("-n", "--namespace", metavar="NAMESPACE", help="default: the context's namespace")
    parser.add_argument("--context", metavar="NAME", help="context in the kubeconfig; default: its current one")
    parser.add_argument("--kubeconfig", metavar="FILE", help="default: $KUBECONFIG, else ~/.kube/config")
    return parser


def _parser(
    commands: Any, name: str, summary: str, description: str, examples: str, exit_codes: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"examples:\n  {examples}\n\n{exit_codes}",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(check=parser.error)
    return parser


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps the description, keeps the lines of the epilog."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)


def check(options: argparse.Namespace) -> None:
    """Combinations that make no sense end with usage and exit code 2."""
    refuse: Callable[[str], Any] = options.check
    if options.command == "plan":
        plan.check_options(options, refuse)
    if options.command == "status" and options.service and options.all_namespaces:
        refuse("-A shows all services; leave SERVICE out, or name its namespace with -n")
    if options.command in ("drain", "undrain"):
        if options.cordon and not options.target.is_node:
            refuse("--cordon needs a node as target: node/NAME")
        if options.cordon and options.cancel:
            refuse("--cordon and --cancel contradict each other; undo a cordon with: kubectl uncordon NODE")
        if options.timeout and not options.wait:
            refuse("--timeout limits --wait; add --wait")


def _service(text: str) -> str:
    """`qwen` or `infsvc/qwen`."""
    prefix, slash, name = text.rpartition("/")
    if not name or (slash and prefix not in ("infsvc", "inferenceservice", "inferenceservices")):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of an InferenceService")
    return name


def _target(text: str) -> "Target":
    from sluice.cli.drain import Target

    try:
        return Target.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _seconds(text: str) -> float:
    """`90`, `90s`, `20m`, `2h`, `1h30m` as seconds."""
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text)
    if not text or found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration; write 90s, 20m, 2h or 1h30m")
    hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(hours * 3600 + minutes * 60 + seconds)


if __name__ == "__main__":
    sys.exit(main())
