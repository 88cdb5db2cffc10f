"""`kubectl sluice plan`: options, the object from a file, exit codes. The arithmetic is `sluice.sizing`'s."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TextIO

from sluice.api.v1alpha1 import EngineType, Pool
from sluice.cli.catalogue import all_shipped, find_accelerator, shipped
from sluice.cli.errors import UsageError
from sluice.cli.modelfacts import FactsMissingError, Found, find_model, from_file
from sluice.cli.planfile import Asked, declared_accelerator, read_file
from sluice.cli.planobject import Planned, service_for
from sluice.cli.planview import describe
from sluice.cli.text import clean
from sluice.sizing.fields import FactsError
from sluice.sizing.hardware import Accelerator
from sluice.sizing.ledger import Layout, Sizing
from sluice.sizing.planning import Question, make_plan
from sluice.sizing.report import Plan
from sluice.sizing.settings import EngineKind, EngineSettings, check, read_args
from sluice.sizing.weights import weigh
from sluice.sizing.workload import DEFAULT_INPUT, DEFAULT_OUTPUT, Workload

FITS, INTERNAL, USAGE, DOES_NOT_FIT, GOAL_MISSED, FACTS_MISSING, WARNED = 0, 1, 2, 3, 4, 5, 6
EXIT_CODES: Final = """\
exit codes:
  0    it fits, and meets the goals if there are any
  1    an internal error
  2    wrong usage, or a file that can't be used
  3    it does not fit
  4    the goals can't be reached
  5    facts are missing: the model or the accelerator is not known well enough
  6    it fits, with warnings, and --strict was given
"""
FORMATS: Final = ("table", "json", "yaml")
MAX_TOKENS: Final = 100_000_000


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-f", "--filename", metavar="FILE", help="file with an InferenceService (- is standard input)")
    add("--pool", metavar="NAME", help="with -f: the pool to plan; default: the first")
    add("--model", metavar="URI|DIR", help="hf://OWNER/NAME, or a directory with config.json; wins over the file's")
    add("--config", metavar="FILE", help="a model's config.json; its weights are counted")
    add("--revision", metavar="REVISION", help="of an hf:// model; default: main")
    add("--accelerator", metavar="NAME|FILE|MEMORY", help=f"{', '.join(shipped())}; or a profile's file; or 80Gi")
    add("--engine", choices=[str(e) for e in EngineKind], help="without -f: the engine (default: vLLM)")
    add("--kv-bytes-per-token", type=_whole, metavar="BYTES", help="KV cache of an architecture that is not known")
    add("--max-model-len", type=_whole, metavar="TOKENS", help="longest request; default: the model's full context")
    add("--rps", type=_positive, metavar="RATE", help="requests per second to plan for")
    add("--input", type=_whole, metavar="TOKENS", help=f"mean length of prompts (default: {DEFAULT_INPUT})")
    add("--input-p95", type=_whole, metavar="TOKENS", help="95th percentile of prompts (default: as the mean)")
    add(
        "--output",
        type=_answer,
        dest="output_tokens",
        metavar="TOKENS",
        help=f"mean length of answers (default: {DEFAULT_OUTPUT})",
    )
    add("--prefix-hit", type=_percent, metavar="PERCENT", default=0.0, help="part of prompts found in the prefix cache")
    add("--ttft-ms", type=_positive, metavar="MS", help="goal: time to the first token, 95th percentile")
    add("--tpot-ms", type=_positive, metavar="MS", help="goal: time per output token")
    add("--price-per-hour", type=_positive, metavar="PRICE", help="of one GPU; default: the profile's")
    add("-o", dest="format", choices=FORMATS, default="table", help="format (default: table); yaml: an object to apply")
    add("--strict", action="store_true", help="exit with 6 when there are warnings")


def check_options(options: argparse.Namespace, refuse: Callable[[str], Any]) -> None:
    """Combinations that make no sense."""
    if not (options.filename or options.model or options.config):
        refuse("name what to plan: -f FILE, --model URI|DIR or --config FILE")
    if options.model and options.config:
        refuse("--model and --config both name a model; give one")
    if options.pool and not options.filename:
        refuse("--pool is a pool of the object in -f")
    if options.filename and options.engine:
        refuse("--engine is told by the object in -f; leave it out")
    if options.input_p95 and options.input_p95 < (options.input or DEFAULT_INPUT):
        refuse("--input-p95 is less than the mean; give --input too")


def run(options: argparse.Namespace, out: TextIO, environment: Mapping[str, str]) -> int:
    """The exit code.

    Raises:
        CliError: nothing can be planned.
    """
    asked = read_file(options.filename, options.pool) if options.filename else Asked()
    found = _model(options, asked, environment)
    question = _question(options, asked, found)
    plan = make_plan(question)
    code, message = outcome(plan, strict=options.strict)
    if options.format == "json":
        print(json.dumps(plan.to_dict(), indent=2, ensure_ascii=False), file=out)
    elif options.format == "table":
        print("\n".join(describe(plan)), file=out)
    elif code not in (DOES_NOT_FIT, FACTS_MISSING):
        print(service_for(plan, asked.service, question.pool, _planned(options, asked)), end="", file=out)
    if message:
        print(f"error: {clean(message)}", file=sys.stderr)
    return code


def outcome(plan: Plan, *, strict: bool) -> tuple[int, str]:
    """(exit code, what to say about it)."""
    if plan.chosen is None:
        # what cannot be said, or the layout that was asked for, tells more than the size of the first candidate
        first = next((x for x in plan.layouts if x.feasible == "Unknown"), None)
        told = next((x for x in plan.layouts if "fits with" in x.message or "no layout" in x.message), plan.layouts[0])
        return (FACTS_MISSING, first.message) if first else (DOES_NOT_FIT, told.message)
    if plan.slo and plan.slo.feasible == "False":
        remedies = f"; what helps: {', or '.join(plan.slo.remedies)}" if plan.slo.remedies else ""
        return GOAL_MISSED, f"the goals can't be reached: the limit is {plan.slo.binding}{remedies}"
    if plan.slo and plan.slo.feasible == "Unknown":
        return FACTS_MISSING, f"facts missing: without more figures of {plan.accelerator.name} times can't be estimated"
    warned = [w.code for w in plan.warnings if w.severity == "Warning"]
    return (WARNED, f"warnings: {', '.join(warned)}") if strict and warned else (FITS, "")


def _model(options: argparse.Namespace, asked: Asked, environment: Mapping[str, str]) -> Found:
    if options.config:
        return from_file(Path(options.config))
    uri = options.model or (asked.spec.model.uri if asked.spec else "")
    return find_model(uri, options.revision, environment)


def _planned(options: argparse.Namespace, asked: Asked) -> Planned:
    """What the options say of the object that `-o yaml` writes."""
    kind = asked.spec.engine.type if asked.spec else EngineType(options.engine or EngineKind.VLLM)
    return Planned(
        engine=kind,
        address=str(options.model or options.config or ""),
        revision=options.revision,
        max_model_len=options.max_model_len,
        is_accelerator_told=bool(options.accelerator),
        kv_bytes_per_token=options.kv_bytes_per_token,
    )


def _question(options: argparse.Namespace, asked: Asked, found: Found) -> Question:
    accelerator = _accelerator(options, asked)
    settings = _settings(options, asked)
    try:
        weights = weigh(found.model, found.files, with_next=settings.loads_next)
    except FactsError as error:
        raise FactsMissingError(str(error)) from error
    pool, spec = asked.pool, asked.spec
    load = _workload(options)
    is_told = pool is not None and "parallelism" in pool.model_fields_set
    return Question(
        sizing=Sizing(found.model, weights, accelerator, settings, options.kv_bytes_per_token),
        load=load,
        wanted=_layout(pool) if pool is not None and is_told else None,
        pool=pool.name if pool else "default",
        replicas=pool.replicas if pool and "replicas" in pool.model_fields_set and load.rps else None,
        accelerators=tuple(all_shipped()) if load.ttft_s or load.tpot_s or load.rps else (),
        is_disaggregated=any(str(p.role) in ("Prefill", "Decode") for p in spec.pools) if spec else False,
        has_uncapped_affinity=spec is not None and str(spec.routing.policy) == "Session",
        notes=tuple(_notes(asked)),
    )


def _notes(asked: Asked) -> Iterator[str]:
    if asked.spec is None or asked.pool is None:
        return
    kind = asked.spec.engine.type
    if kind not in (EngineType.VLLM, EngineType.SGLANG):
        yield f"engine {kind}: sized as vLLM would be"
    others = [p.name for p in asked.spec.pools if p.name != asked.pool.name]
    if others:
        yield f"pool {asked.pool.name} only; for the others: --pool {', '.join(others)}"


def _layout(pool: Pool) -> Layout:
    p = pool.parallelism
    return Layout(tensor=p.tensor, pipeline=p.pipeline, data=p.data, expert=p.expert)


def _accelerator(options: argparse.Namespace, asked: Asked) -> Accelerator:
    wanted = options.accelerator or declared_accelerator(asked)
    if wanted is None:
        raise UsageError(
            f"name the accelerator: --accelerator with one of {', '.join(shipped())}, a profile's file, or the memory "
            "such as 80Gi"
        )
    found = find_accelerator(wanted, asked.documents)
    return replace(found, price_per_hour=options.price_per_hour or found.price_per_hour)


def _settings(options: argparse.Namespace, asked: Asked) -> EngineSettings:
    kind = EngineKind(options.engine or EngineKind.VLLM)
    args: list[str] = []
    if asked.spec is not None and asked.pool is not None:
        is_sglang = asked.spec.engine.type is EngineType.SGLANG
        kind = EngineKind.SGLANG if is_sglang else EngineKind.VLLM
        args = [*asked.spec.engine.args, *asked.pool.engine.args]
    try:
        settings = read_args(args, EngineSettings(engine=kind))
        if options.max_model_len:
            settings = check(replace(settings, max_model_len=options.max_model_len, fits_context=False))
    except FactsError as error:
        raise UsageError(f"engine arguments: {error}") from error
    return settings


def _workload(options: argparse.Namespace) -> Workload:
    is_told = options.input is not None or options.output_tokens is not None or options.rps is not None
    return Workload(
        rps=options.rps,
        input_tokens=options.input or DEFAULT_INPUT,
        output_tokens=options.output_tokens or DEFAULT_OUTPUT,
        input_p95=options.input_p95,
        prefix_hit=options.prefix_hit,
        ttft_s=options.ttft_ms / 1e3 if options.ttft_ms else None,
        tpot_s=options.tpot_ms / 1e3 if options.tpot_ms else None,
        is_told=is_told,
    )


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:12]) <= MAX_TOKENS:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to {MAX_TOKENS}")
    return int(text[:12])


def _answer(text: str) -> int:
    if text in FORMATS:
        raise argparse.ArgumentTypeError(f"it is a number of tokens; the format is -o {text}")
    return _whole(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1e-6 <= value <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number over 0 and below 1e9")
    return value


def _percent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 100:
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage from 0 to below 100")
    return value / 100
