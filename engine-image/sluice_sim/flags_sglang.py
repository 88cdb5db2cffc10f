"""The flags of SGLang 0.5.23, as far as they mean something here. Read in its source, never compared with a run.

Flags that only spread the work of a real model over its ranks or choose its network are read and change nothing.
"""

import argparse
from collections.abc import Mapping
from typing import Final

from sluice_sim.config import Group, Layout, Role, RoomTransfer
from sluice_sim.flags import LimitFlags, port_number, positive_int, rank_number, seconds, share
from sluice_sim.hardware import VALUE_BYTES

VERSION: Final = "0.5.23+sim"
LIMIT_FLAGS: Final = LimitFlags(
    "--max-running-requests", "--chunked-prefill-size", "--context-length", "--mem-fraction-static", "--tp"
)

_ROLE_OF: Final = {"null": Role.UNIFIED, "prefill": Role.PREFILL, "decode": Role.DECODE}
_DEFAULT_TIMEOUT_S: Final = "300"
DEATH_EXIT_S: Final = 2.0
"""From the loss of any rank to the exit of the others (estimated)."""

_JOIN_TIMEOUT_S: Final = 600.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    sglang = parser.add_argument_group("flags of SGLang 0.5.23")
    sglang.add_argument("--model-path", help="the model, instead of the positional argument")
    sglang.add_argument("--served-model-name", nargs=1, metavar="NAME", help="default: the model")
    sglang.add_argument("--host", default="127.0.0.1")
    sglang.add_argument("--port", type=port_number, default=30000, help="0: a free one, named in the log")
    sglang.add_argument("--api-key", nargs=1, default=[], help="guards everything but health and metrics")
    sglang.add_argument("--dtype", choices=sorted(VALUE_BYTES), default="auto", help="bytes per weight and KV value")
    sglang.add_argument("--context-length", dest="max_model_len", type=positive_int, default=32768)
    sglang.add_argument("--max-running-requests", dest="max_num_seqs", type=positive_int, default=256)
    sglang.add_argument("--chunked-prefill-size", dest="max_num_batched_tokens", type=positive_int, default=8192)
    sglang.add_argument("--max-queued-requests", dest="max_num_queued_reqs", type=positive_int, help="not in PD")
    sglang.add_argument("--page-size", dest="block_size", type=positive_int, default=16, help="SGLang's default is 1")
    sglang.add_argument("--max-total-tokens", type=positive_int, help="KV tokens; default: from the memory")
    sglang.add_argument("--mem-fraction-static", dest="gpu_memory_utilization", type=share, default=0.9)
    sglang.add_argument("--enable-metrics", action="store_true", help="without it there is no /metrics")
    sglang.add_argument("--enable-metrics-for-all-schedulers", action="store_true", help="changes nothing here")
    sglang.add_argument("--random-seed", dest="seed", type=int, default=0, help="of everything random")
    _add_rank_flags(parser.add_argument_group("flags of SGLang 0.5.23 for several ranks"))
    _add_transfer_flags(parser.add_argument_group("flags of SGLang 0.5.23 for prefill and decode"))


def _add_rank_flags(ranks: argparse._ArgumentGroup) -> None:
    ranks.add_argument("--tp", "--tp-size", "--tensor-parallel-size", dest="tp", type=positive_int, default=1)
    ranks.add_argument("--pp-size", "--pipeline-parallel-size", dest="pp", type=positive_int, default=1)
    ranks.add_argument("--dp-size", "--dp", dest="dp", type=positive_int, default=1)
    ranks.add_argument("--ep", "--ep-size", dest="ep", type=positive_int, default=1, help="shown only")
    ranks.add_argument("--attn-dp-size", type=positive_int, default=1, help="changes nothing here")
    ranks.add_argument("--enable-dp-attention", action="store_true", help="--dp-size does not add replicas")
    ranks.add_argument("--nnodes", type=positive_int, default=1, help="nodes of this instance")
    ranks.add_argument("--node-rank", type=rank_number, default=0, help="this node; 0 leads")
    ranks.add_argument("--dist-init-addr", metavar="HOST:PORT", help="where rank 0 listens for the others")
    ranks.add_argument("--dist-timeout", type=seconds, default=_JOIN_TIMEOUT_S)
    ranks.add_argument("--moe-a2a-backend", help="changes nothing here")
    ranks.add_argument("--deepep-mode", choices=["normal", "low_latency", "auto"], help="changes nothing here")
    ranks.add_argument("--enable-eplb", action="store_true", help="changes nothing here")
    ranks.add_argument("--ep-num-redundant-experts", type=rank_number, help="changes nothing here")
    ranks.add_argument("--enable-two-batch-overlap", action="store_true", help="changes nothing here")


def _add_transfer_flags(pairs: argparse._ArgumentGroup) -> None:
    pairs.add_argument("--disaggregation-mode", choices=sorted(_ROLE_OF))
    pairs.add_argument("--disaggregation-transfer-backend", choices=["mooncake", "nixl"], help="changes nothing here")
    pairs.add_argument("--disaggregation-bootstrap-port", type=port_number, default=8998)
    pairs.add_argument("--disaggregation-ib-device", help="changes nothing here")
    pairs.add_argument("--disaggregation-enable-kv-checksum", action="store_true", help="corrupted KV is found")


def layout(args: argparse.Namespace) -> Layout:
    replicas = 1 if args.enable_dp_attention else args.dp
    return Layout(args.tp, args.pp, replicas, args.ep > 1)


def group(args: argparse.Namespace) -> Group | None:
    """The node's place; null: one node is everything.

    Raises:
        ValueError: the flags contradict each other.
    """
    if args.node_rank >= args.nnodes:
        raise ValueError(f"--node-rank {args.node_rank} is not within --nnodes {args.nnodes}")
    if args.nnodes == 1:
        return None
    if args.tp * args.pp % args.nnodes:
        raise ValueError(f"{args.tp * args.pp} ranks of --tp and --pp-size can't be spread over --nnodes {args.nnodes}")
    host, _, port = (args.dist_init_addr or "").rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("--nnodes above 1 needs --dist-init-addr HOST:PORT, the address of rank 0")
    return Group(args.nnodes, args.node_rank, host.strip("[]"), int(port), args.dist_timeout, args.death_exit_seconds)


def transfer(args: argparse.Namespace, role: Role | None, env: Mapping[str, str]) -> tuple[Role, RoomTransfer | None]:
    """Role and KV transfer.

    Raises:
        ValueError: `--role` contradicts `--disaggregation-mode`, or a time-out of the environment is no number.
    """
    mode = args.disaggregation_mode
    if mode is not None and role not in (None, _ROLE_OF[mode]):
        raise ValueError(f"--role {role} contradicts --disaggregation-mode {mode}")
    found = role or _ROLE_OF[mode or "null"]
    if found is Role.UNIFIED:
        return found, None
    return found, RoomTransfer(
        port=args.disaggregation_bootstrap_port,
        bootstrap_timeout_s=timeout(env, "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", _DEFAULT_TIMEOUT_S),
        waiting_timeout_s=timeout(env, "SGLANG_DISAGGREGATION_WAITING_TIMEOUT", _DEFAULT_TIMEOUT_S),
        checks_sum=args.disaggregation_enable_kv_checksum,
    )


def timeout(env: Mapping[str, str], name: str, default: str) -> float:
    """Seconds from the environment.

    Raises:
        ValueError: no number of seconds.
    """
    try:
        return seconds(env.get(name, default))
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise ValueError(f"{name}: {error}") from error
