"""The flags of vLLM 0.32, as far as they mean something here, and what they say about ranks and KV transfer.

Flags that only spread the work of a real model over its ranks (experts, their balance, their network) are read and
change nothing, because the imitated model is dense.
"""

import argparse
import json
from collections.abc import Mapping
from typing import Any, Final

from sluice_sim.config import Group, Layout, NixlTransfer, Role
from sluice_sim.flags import LimitFlags, port_number, positive_int, rank_number, seconds, share
from sluice_sim.hardware import VALUE_BYTES

VERSION: Final = "0.32.0+sim"
LIMIT_FLAGS: Final = LimitFlags(
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--max-model-len",
    "--gpu-memory-utilization",
    "--tensor-parallel-size",
)

_DEFAULT_LEASE_S: Final = 30
_DEFAULT_SIDE_PORT: Final = 5600
DEATH_EXIT_S: Final = 5.0
"""From the request that shows the loss of a follower to the leader's exit (measured)."""

_JOIN_TIMEOUT_S: Final = 600.0
_ROLE_OF: Final = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE, "kv_both": Role.UNIFIED}
_TRANSFER_FIELDS: Final = (
    *("kv_connector", "kv_role", "kv_load_failure_policy", "kv_connector_extra_config", "engine_id"),
    "kv_buffer_device",
)
_EXTRA_FIELDS: Final = ("kv_lease_duration", "enforce_handshake_compat")


def add_flags(parser: argparse.ArgumentParser) -> None:
    vllm = parser.add_argument_group("flags of vLLM 0.32")
    vllm.add_argument("--served-model-name", nargs="+", metavar="NAME", help="default: the model")
    vllm.add_argument("--host", default="0.0.0.0")
    vllm.add_argument("--port", type=port_number, default=8000, help="0: a free one, named in the log")
    vllm.add_argument("--api-key", nargs="+", default=[], help="guards /v1; also VLLM_API_KEY")
    vllm.add_argument("--dtype", choices=sorted(VALUE_BYTES), default="auto", help="bytes per weight and KV value")
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
    vllm.add_argument("--kv-transfer-config", metavar="JSON", help="NixlConnector; gives the role too")
    _add_rank_flags(parser.add_argument_group("flags of vLLM 0.32 for several ranks"))


def _add_rank_flags(ranks: argparse._ArgumentGroup) -> None:
    ranks.add_argument("--tensor-parallel-size", "-tp", type=positive_int, default=1, help="faster steps, more KV")
    ranks.add_argument("--pipeline-parallel-size", "-pp", type=positive_int, default=1, help="more KV blocks")
    ranks.add_argument("--data-parallel-size", "-dp", type=positive_int, default=1, help="more KV blocks")
    ranks.add_argument("--nnodes", "-n", type=positive_int, default=1, help="nodes of this instance")
    ranks.add_argument("--node-rank", "-r", type=rank_number, default=0, help="this node; 0 leads")
    ranks.add_argument("--master-addr", default="127.0.0.1", help="where rank 0 listens for the others")
    ranks.add_argument("--master-port", type=port_number, default=29501)
    ranks.add_argument("--headless", action="store_true", help="needed on ranks above 0: no HTTP")
    ranks.add_argument("--distributed-timeout-seconds", type=seconds, default=_JOIN_TIMEOUT_S)
    ranks.add_argument("--data-parallel-size-local", "-dpl", type=positive_int, help="data-parallel ranks on this node")
    ranks.add_argument("--data-parallel-start-rank", "-dpr", type=rank_number, help="first data-parallel rank here")
    ranks.add_argument("--data-parallel-address", "-dpa", default="127.0.0.1", help="as --master-addr")
    ranks.add_argument("--data-parallel-rpc-port", "-dpp", type=port_number, default=29550)
    ranks.add_argument("--api-server-count", "-asc", type=int, choices=[1], default=1, help="there is just the one")
    ranks.add_argument("--enable-expert-parallel", "-ep", action="store_true", help="shown only")
    ranks.add_argument("--all2all-backend", help="changes nothing here")
    ranks.add_argument("--enable-eplb", action="store_true", help="changes nothing here")
    ranks.add_argument("--eplb-config", type=json.loads, metavar="JSON", help="changes nothing here")
    ranks.add_argument("--enable-dbo", action="store_true", help="changes nothing here")


def layout(args: argparse.Namespace) -> Layout:
    return Layout(
        args.tensor_parallel_size, args.pipeline_parallel_size, args.data_parallel_size, args.enable_expert_parallel
    )


def group(args: argparse.Namespace) -> Group | None:
    """The node's place, by `--nnodes` or by data-parallel ranks; null: one node is everything.

    Raises:
        ValueError: the flags contradict each other.
    """
    local = args.data_parallel_size_local or args.data_parallel_size
    size, rank, host, port = args.nnodes, args.node_rank, args.master_addr, args.master_port
    if local != args.data_parallel_size:
        if size != 1:
            raise ValueError("--data-parallel-size-local: not together with --nnodes in the simulated engine")
        start = args.data_parallel_start_rank or 0
        if args.data_parallel_size % local or start % local:
            raise ValueError(
                f"--data-parallel-size {args.data_parallel_size} and --data-parallel-start-rank {start} must be "
                f"multiples of --data-parallel-size-local {local}"
            )
        size, rank = args.data_parallel_size // local, start // local
        host, port = args.data_parallel_address, args.data_parallel_rpc_port
    elif args.data_parallel_start_rank:
        raise ValueError("--data-parallel-start-rank needs --data-parallel-size-local")
    if rank >= size:
        raise ValueError(f"rank {rank} is not within the {size} nodes of --nnodes or --data-parallel-size")
    world = args.tensor_parallel_size * args.pipeline_parallel_size
    if world % args.nnodes:
        raise ValueError(f"{world} tensor and pipeline ranks can't be spread evenly over --nnodes {args.nnodes}")
    if args.headless != (rank > 0):
        raise ValueError(f"--headless is for ranks above 0, and they need it; this is rank {rank}")
    return (
        None if size == 1 else Group(size, rank, host, port, args.distributed_timeout_seconds, args.death_exit_seconds)
    )


def transfer(args: argparse.Namespace, role: Role | None, env: Mapping[str, str]) -> tuple[Role, NixlTransfer | None]:
    """Role and KV transfer; `--role` alone stands for a NixlConnector with its defaults.

    Raises:
        ValueError: the JSON is wrong, or says another role than `--role`.
    """
    if args.kv_transfer_config is None:
        if role in (None, Role.UNIFIED):
            return Role.UNIFIED, None
        assert role is not None
        return role, _nixl({}, {}, env)
    given = _object(args.kv_transfer_config, _TRANSFER_FIELDS, "--kv-transfer-config")
    if given.get("kv_connector") != "NixlConnector":
        raise ValueError(
            f"--kv-transfer-config: kv_connector {given.get('kv_connector')!r} is not simulated; known: NixlConnector"
        )
    found = _ROLE_OF.get(str(given.get("kv_role")))
    if found is None:
        raise ValueError(
            f"--kv-transfer-config: kv_role {given.get('kv_role')!r} is unknown; known: {', '.join(_ROLE_OF)}"
        )
    if role not in (None, found):
        raise ValueError(f"--role {role} contradicts kv_role {given['kv_role']} of --kv-transfer-config")
    extra = given.get("kv_connector_extra_config", {})
    return found, _nixl(given, _object(extra, _EXTRA_FIELDS, "--kv-transfer-config: kv_connector_extra_config"), env)


def _nixl(given: Mapping[str, Any], extra: Mapping[str, Any], env: Mapping[str, str]) -> NixlTransfer:
    policy = given.get("kv_load_failure_policy", "fail")
    if policy not in ("fail", "recompute"):
        raise ValueError(f"--kv-transfer-config: kv_load_failure_policy {policy!r} is unknown; known: fail, recompute")
    lease = extra.get("kv_lease_duration", _DEFAULT_LEASE_S)
    if isinstance(lease, bool) or not isinstance(lease, int | float) or not 0 < lease <= 86400:
        raise ValueError(f"--kv-transfer-config: kv_lease_duration {lease!r} is not a number of seconds up to 86400")
    port = env.get("VLLM_NIXL_SIDE_CHANNEL_PORT", str(_DEFAULT_SIDE_PORT))
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"VLLM_NIXL_SIDE_CHANNEL_PORT: {port!r} is no port")
    return NixlTransfer(
        host=env.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "localhost"),
        port=int(port),
        lease_s=float(lease),
        recomputes=policy == "recompute",
        checks_compatibility=bool(extra.get("enforce_handshake_compat", True)),
        engine_id=given.get("engine_id"),
    )


def _object(text: object, known: tuple[str, ...], where: str) -> dict[str, Any]:
    try:
        data = json.loads(text) if isinstance(text, str) else text
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object")
    for name in data:
        if name not in known:
            raise ValueError(f"{where}: field {name!r} is unknown; known: {', '.join(known)}")
    return data
