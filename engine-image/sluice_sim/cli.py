"""The command line: the imitated engine's own flags, as far as they mean something here, and the simulator's.

Which flags there are follows from `--flavor`; each that is accepted is described in `--help`, any other is an error
that names it.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from sluice_sim import flags_sglang, flags_vllm
from sluice_sim.config import Config, Flavor, Role
from sluice_sim.flags import LimitFlags, port_number, seconds, speed_factor
from sluice_sim.hardware import VALUE_BYTES, blocks_that_fit, build_time_model, kv_token_bytes
from sluice_sim.scheduler import Limits


def build_parser(flavor: Flavor) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sluice-sim", allow_abbrev=False, description="A simulated LLM engine.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", allow_abbrev=False, help="serve the OpenAI API, as the real engine does")
    serve.add_argument("model", nargs="?", help="any name or path: no weights are read; other models answer otherwise")
    flags = flags_sglang if flavor is Flavor.SGLANG else flags_vllm
    flags.add_flags(serve)
    own = serve.add_argument_group("flags of the simulator")
    own.add_argument("--flavor", choices=list(Flavor), default=Flavor.VLLM, help="engine to imitate, with its flags")
    own.add_argument("--role", type=Role, choices=list(Role), help="side of prefill/decode; also by the engine's flags")
    own.add_argument("--engine-version", help="what the engine says its version is")
    own.add_argument("--speed", type=speed_factor, default=1.0, help="steps take 1/speed of the modelled time")
    own.add_argument("--load-seconds", type=seconds, default=0.0, help="loading takes so long (not scaled)")
    own.add_argument(
        "--death-exit-seconds",
        type=seconds,
        default=flags.DEATH_EXIT_S,
        help="from the moment that another rank's death shows to the exit of this one",
    )
    own.add_argument(
        "--fault-port", type=port_number, default=9876, help="/sim/state, /sim/faults, /sim/ledger; 0: a free one"
    )
    own.add_argument("--faults-file", type=Path, default=Path("/etc/sim/faults.json"), help="re-read each second")
    if flavor is Flavor.VLLM:
        own.add_argument("--metrics-version", choices=["new", "old"], default="new", help="old: before the renames")
    return parser


def flavor_of(argv: Sequence[str]) -> Flavor:
    """The engine to imitate; a wrong value is left for the whole command line to be refused."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--flavor", default=Flavor.VLLM)
    try:
        found, _ = finder.parse_known_args(argv)
        return Flavor(found.flavor)
    except (argparse.ArgumentError, ValueError):
        return Flavor.VLLM


def parse(argv: Sequence[str], env: Mapping[str, str] | None = None) -> Config:
    """The configuration.

    Raises:
        SystemExit: code 2, with the reason on stderr: unknown flag, value out of range, or no room for KV.
    """
    env = os.environ if env is None else env
    flavor = flavor_of(argv)
    parser = build_parser(flavor)
    args = parser.parse_args(argv)
    try:
        return _read(args, flavor, env)
    except ValueError as error:
        parser.error(str(error))


def _read(args: argparse.Namespace, flavor: Flavor, env: Mapping[str, str]) -> Config:
    is_sglang = flavor is Flavor.SGLANG
    flags = flags_sglang if is_sglang else flags_vllm
    model = _model(args)
    layout, group = flags.layout(args), flags.group(args)
    role, transfer = flags.transfer(args, args.role, env)
    value_bytes = VALUE_BYTES[args.dtype]
    fixed = args.max_total_tokens // args.block_size if is_sglang and args.max_total_tokens else None
    if not is_sglang:
        fixed = args.num_gpu_blocks_override
    num_blocks = (
        blocks_that_fit(layout, value_bytes, args.gpu_memory_utilization, args.block_size) if fixed is None else fixed
    )
    _check_room(args, flags.LIMIT_FLAGS, num_blocks, is_fixed=fixed is not None)
    keys = args.api_key or ([env["VLLM_API_KEY"]] if env.get("VLLM_API_KEY") and not is_sglang else [])
    return Config(
        flavor=flavor,
        role=role,
        version=args.engine_version or flags.VERSION,
        model=model,
        served_names=tuple(args.served_model_name or [model]),
        host=args.host,
        port=args.port,
        fault_port=args.fault_port,
        faults_file=args.faults_file,
        api_keys=tuple(keys),
        layout=layout,
        group=group,
        transfer=transfer,
        limits=Limits(args.max_num_seqs, args.max_num_batched_tokens),
        max_model_len=args.max_model_len,
        block_size=args.block_size,
        num_blocks=num_blocks,
        value_bytes=value_bytes,
        kv_token_bytes=kv_token_bytes(value_bytes),
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_num_queued_reqs=None if is_sglang and role is not Role.UNIFIED else args.max_num_queued_reqs,
        time_model=build_time_model(layout.tensor, value_bytes, args.speed),
        speed=args.speed,
        shutdown_timeout_s=None if is_sglang else args.shutdown_timeout,
        health_timeout_s=flags_sglang.timeout(env, "SGLANG_HEALTH_CHECK_TIMEOUT", "20"),
        has_metrics=args.enable_metrics if is_sglang else True,
        tracks_load=not is_sglang and args.enable_server_load_tracking,
        sends_request_ids=not is_sglang and args.enable_request_id_headers,
        load_s=args.load_seconds,
        seed=args.seed,
        metrics_version="new" if is_sglang else args.metrics_version,
    )


def _model(args: argparse.Namespace) -> str:
    by_flag = getattr(args, "model_path", None)
    if (args.model is None) == (by_flag is None):
        raise ValueError("name the model once: `serve MODEL`, with --flavor sglang also --model-path MODEL")
    return str(by_flag if args.model is None else args.model)


def _check_room(args: argparse.Namespace, names: LimitFlags, num_blocks: int, *, is_fixed: bool) -> None:
    """What is wrong between flags, each of them right by itself; a given number of blocks is taken as it is.

    Raises:
        ValueError: says it.
    """
    seqs, batched, room = args.max_num_seqs, args.max_num_batched_tokens, num_blocks * args.block_size
    if batched < seqs:
        raise ValueError(f"{names.batched_tokens} {batched} is less than {names.seqs} {seqs}")
    if num_blocks < 1:
        raise ValueError(f"no room for KV beside the weights: raise {names.memory} or {names.tensor}")
    if not is_fixed and room < args.max_model_len:
        raise ValueError(
            f"{names.context} {args.max_model_len} does not fit into the KV cache of {room} tokens: "
            f"lower it, or raise {names.memory} or {names.tensor}"
        )
