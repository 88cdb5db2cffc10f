"""The command line: vLLM's own flags, as far as they mean something here, and the simulator's.

Invariant: every flag accepted has an effect; any other is an error that names it. The engine that is imitated is an
8-billion-parameter model (Llama 3.1 8B: 32 layers, 8 KV heads of 128) on `--tensor-parallel-size` 80 GB H100s.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sluice_sim.scheduler import Limits, TimeModel

VERSION: Final = "0.32.0+sim"
"""What `/version` says: the vLLM version that is imitated."""

_GPU_BYTES: Final = 80e9
_PARAMETERS: Final = 8.03e9
_KV_VALUES_PER_TOKEN: Final = 2 * 32 * 8 * 128
_BYTES_PER_VALUE: Final = {"auto": 2, "half": 2, "float16": 2, "bfloat16": 2, "float": 4, "float32": 4}
_MEMORY_BYTES_S: Final = 3.35e12
_WEIGHT_READ_EFFICIENCY: Final = 0.75
_KV_READ_EFFICIENCY: Final = 0.80
_FLOPS: Final = 989e12
_PREFILL_EFFICIENCY: Final = 0.70
_STEP_OVERHEAD_S: Final = 0.0003
_SEQUENCE_OVERHEAD_S: Final = 5e-6
"""H100 data sheet; efficiencies and overheads fitted to 30 kernel-based estimates for this model (error < 9 %)."""


@dataclass(frozen=True, slots=True)
class Config:
    model: str
    served_names: tuple[str, ...]
    host: str
    port: int
    fault_port: int
    faults_file: Path
    api_keys: tuple[str, ...]
    limits: Limits
    max_model_len: int
    """Tokens of prompt and answer together."""
    block_size: int
    num_blocks: int
    gpu_memory_utilization: float
    max_num_queued_reqs: int | None
    """Running and waiting requests from which on new ones are turned away; null: no limit."""
    time_model: TimeModel
    shutdown_timeout_s: float
    tracks_load: bool
    sends_request_ids: bool
    load_s: float
    seed: int
    metrics_version: str


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sluice-sim", allow_abbrev=False, description="A simulated LLM engine.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", allow_abbrev=False, help="serve the OpenAI API, as `vllm serve` does")
    serve.add_argument("model", help="any name or path: no weights are read; other models give other answers")
    vllm = serve.add_argument_group("flags of vLLM 0.32")
    vllm.add_argument("--served-model-name", nargs="+", metavar="NAME", help="default: the model")
    vllm.add_argument("--host", default="0.0.0.0")
    vllm.add_argument("--port", type=port_number, default=8000, help="0: a free one, named in the log")
    vllm.add_argument("--api-key", nargs="+", default=[], help="guards /v1; also VLLM_API_KEY")
    vllm.add_argument(
        "--tensor-parallel-size", "-tp", type=positive_int, default=1, help="faster steps, more KV blocks"
    )
    vllm.add_argument("--dtype", choices=sorted(_BYTES_PER_VALUE), default="auto", help="bytes per weight and KV value")
    vllm.add_argument("--max-model-len", type=positive_int, default=32768)
    vllm.add_argument("--max-num-seqs", type=positive_int, default=256)
    vllm.add_argument("--max-num-batched-tokens", type=positive_int, default=8192)
    vllm.add_argument("--max-num-queued-reqs", type=positive_int, help="503 (streams: an SSE error) from so many on")
    vllm.add_argument("--block-size", type=positive_int, default=16)
    vllm.add_argument("--num-gpu-blocks-override", type=positive_int, help="KV blocks; default: from the memory")
    vllm.add_argument("--gpu-memory-utilization", type=share, default=0.9)
    vllm.add_argument("--shutdown-timeout", type=seconds, default=0.0, help="seconds that SIGTERM leaves to requests")
    vllm.add_argument("--enable-server-load-tracking", action="store_true", help="without it /load says 0")
    vllm.add_argument("--enable-request-id-headers", action="store_true", help="answer with X-Request-Id")
    vllm.add_argument("--seed", type=int, default=0, help="of everything random: probabilities, how streams break")
    own = serve.add_argument_group("flags of the simulator")
    own.add_argument("--flavor", choices=["vllm"], default="vllm", help="engine to imitate")
    own.add_argument("--speed", type=speed_factor, default=1.0, help="steps take 1/speed of the modelled time")
    own.add_argument("--load-seconds", type=seconds, default=0.0, help="port stays closed so long (not scaled)")
    own.add_argument(
        "--fault-port", type=port_number, default=9876, help="/sim/state, /sim/faults, /sim/ledger; 0: a free one"
    )
    own.add_argument("--faults-file", type=Path, default=Path("/etc/sim/faults.json"), help="re-read each second")
    own.add_argument("--metrics-version", choices=["new", "old"], default="new", help="old: names before the renames")
    return parser


def parse(argv: Sequence[str], env: Mapping[str, str] | None = None) -> Config:
    """The configuration.

    Raises:
        SystemExit: code 2, with the reason on stderr: unknown flag, value out of range, or no room for KV.
    """
    env = os.environ if env is None else env
    parser = build_parser()
    args = parser.parse_args(argv)
    value_bytes = _BYTES_PER_VALUE[args.dtype]
    num_blocks = args.num_gpu_blocks_override or _blocks_that_fit(args, value_bytes)
    problem = _contradiction(args, num_blocks)
    if problem is not None:
        parser.error(problem)
    keys = args.api_key or ([env["VLLM_API_KEY"]] if env.get("VLLM_API_KEY") else [])
    return Config(
        model=args.model,
        served_names=tuple(args.served_model_name or [args.model]),
        host=args.host,
        port=args.port,
        fault_port=args.fault_port,
        faults_file=args.faults_file,
        api_keys=tuple(keys),
        limits=Limits(args.max_num_seqs, args.max_num_batched_tokens),
        max_model_len=args.max_model_len,
        block_size=args.block_size,
        num_blocks=num_blocks,
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_num_queued_reqs=args.max_num_queued_reqs,
        time_model=build_time_model(args.tensor_parallel_size, value_bytes, args.speed),
        shutdown_timeout_s=args.shutdown_timeout,
        tracks_load=args.enable_server_load_tracking,
        sends_request_ids=args.enable_request_id_headers,
        load_s=args.load_seconds,
        seed=args.seed,
        metrics_version=args.metrics_version,
    )


def _contradiction(args: argparse.Namespace, num_blocks: int) -> str | None:
    """What is wrong between the flags, each of them right by itself; a given number of blocks is taken as it is."""
    seqs, batched, room = args.max_num_seqs, args.max_num_batched_tokens, num_blocks * args.block_size
    if batched < seqs:
        return f"--max-num-batched-tokens {batched} is less than --max-num-seqs {seqs}"
    if num_blocks < 1:
        return "no room for KV beside the weights: raise --gpu-memory-utilization or --tensor-parallel-size"
    if args.num_gpu_blocks_override is None and room < args.max_model_len:
        return (
            f"--max-model-len {args.max_model_len} does not fit into the KV cache of {room} tokens: "
            "lower it, or raise --gpu-memory-utilization or --tensor-parallel-size"
        )
    return None


def build_time_model(tensor_parallel: int, value_bytes: int, speed: float) -> TimeModel:
    """Roofline of one step: weights and KV are read from memory, prompts are bound by arithmetic.

    Tensor parallelism divides all three; its communication is left out.
    """
    memory_bytes_s = _MEMORY_BYTES_S * tensor_parallel * speed
    return TimeModel(
        base_s=_STEP_OVERHEAD_S / speed + _PARAMETERS * value_bytes / (memory_bytes_s * _WEIGHT_READ_EFFICIENCY),
        prefill_token_s=2 * _PARAMETERS / (_FLOPS * tensor_parallel * speed * _PREFILL_EFFICIENCY),
        sequence_s=_SEQUENCE_OVERHEAD_S / speed,
        kv_token_s=_KV_VALUES_PER_TOKEN * value_bytes / (memory_bytes_s * _KV_READ_EFFICIENCY),
    )


def _blocks_that_fit(args: argparse.Namespace, value_bytes: int) -> int:
    room = _GPU_BYTES * args.tensor_parallel_size * args.gpu_memory_utilization - _PARAMETERS * value_bytes
    return int(room // (_KV_VALUES_PER_TOKEN * value_bytes * args.block_size))


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def port_number(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not within 0..65535")
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text} is not within 0..86400 seconds")
    return value


def speed_factor(text: str) -> float:
    value = float(text)
    if not 0.001 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not within 0.001..1000000")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value
