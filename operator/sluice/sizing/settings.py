"""What an engine will do with its memory, from the arguments it is started with. Defaults of vLLM 0.32, SGLang 0.5.23.

Only arguments that change the ledger or the times are read; all others are the engine's business. An argument of an
unusable value is an error here, because the engine would not start with it either.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from sluice.sizing.fields import FactsError
from sluice.sizing.hardware import GIB, Accelerator


class EngineKind(StrEnum):
    VLLM = "vLLM"
    SGLANG = "SGLang"


KV_BYTES: Final[Mapping[str, float]] = {
    **dict.fromkeys(("auto", "bfloat16", "float16", "bf16", "fp16"), 2.0),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla"), 1.0),
    "nvfp4": 0.5625,
    "nvfp4_ds_mla": 0.5625,
}
"""Bytes of one number in the KV cache; the `*_ds_mla` layouts have their own size per token (`ledger.LATENT_BYTES`)."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """None: the engine's own default, which may depend on the accelerator."""

    engine: EngineKind = EngineKind.VLLM
    utilization: float = 0.92
    """Fraction of the GPU's memory that vLLM takes (SGLang: unless None its static fraction)."""
    static_fraction: float | None = None
    """SGLang's `--mem-fraction-static`; None: by its own rule."""
    kv_cache_bytes: int | None = None
    """vLLM's `--kv-cache-memory-bytes`: the KV room itself, instead of a fraction."""
    max_batched_tokens: int | None = None
    max_seqs: int | None = None
    max_model_len: int | None = None
    """Tokens; None: the model's full context."""
    fits_context: bool = False
    """`--max-model-len -1`: the engine lowers the context until one request fits."""
    kv_dtype: str = "auto"
    block: int = 16
    """Tokens per KV block; a backend may choose 64 to 256."""
    has_graphs: bool = True
    is_hybrid: bool = True
    """Window layers hold only their window. False: they hold the full length."""
    is_chunked: bool = True
    loads_next: bool = False
    """Speculative decoding with the model's own prediction layers."""
    redundant_experts: int = 0
    context_parallel: int = 1
    """Decode context parallelism: the KV of one request is spread over so many ranks of the tensor group."""
    is_async: bool = True
    dual_batch: bool = False
    """Dual-batch overlap: expert traffic hides behind arithmetic."""
    logit_bytes: int = 18
    """Per logit of a sampled token (vLLM 0.32 with Triton or FlashInfer sampling); 40 in vLLM 0.6 to 0.11."""

    def batched_tokens(self, accelerator: Accelerator) -> int:
        """Tokens of one forward pass at most."""
        if self.max_batched_tokens is not None:
            return self.max_batched_tokens
        if self.engine is EngineKind.SGLANG:
            return 16_384 if accelerator.memory_bytes >= 160 * GIB else 8192
        if accelerator.memory_bytes >= 160 * GIB:
            return 16_384
        return 8192 if _is_large(accelerator) else 2048

    def seqs(self, accelerator: Accelerator) -> int:
        """Sequences of one batch at most, per data-parallel rank."""
        if self.max_seqs is not None:
            return self.max_seqs
        if self.engine is EngineKind.SGLANG:
            return 256
        return 1024 if accelerator.memory_bytes >= 160 * GIB or _is_large(accelerator) else 256


def _is_large(accelerator: Accelerator) -> bool:
    return accelerator.memory_bytes >= 70 * GIB and "a100" not in accelerator.name.lower()


def read_args(args: Sequence[str], settings: EngineSettings) -> EngineSettings:
    """The settings with what the arguments say; later arguments win, as in the engine.

    Raises:
        FactsError: an argument that matters here has no usable value.
    """
    readers = _SGLANG if settings.engine is EngineKind.SGLANG else _VLLM
    for flag, value in _pairs(args):
        if flag in readers:
            settings = replace(settings, **readers[flag](flag, value))
    return check(settings)


def check(settings: EngineSettings) -> EngineSettings:
    """The settings themselves.

    Raises:
        FactsError: a value that no engine takes.
    """
    if not 0 < settings.utilization <= 1:
        raise FactsError(f"memory utilization {settings.utilization:g}: must be over 0 and at most 1, for example 0.92")
    for name, value, least, most in (
        ("max-num-batched-tokens", settings.max_batched_tokens, 1, 10_000_000),
        ("max-num-seqs", settings.max_seqs, 1, 1_000_000),
        ("max-model-len", settings.max_model_len, 1, 100_000_000),
        ("block-size", settings.block, 1, 65_536),
        ("kv-cache-memory-bytes", settings.kv_cache_bytes, 1, 1 << 50),
        ("num-redundant-experts", settings.redundant_experts, 0, 65_536),
        ("decode-context-parallel-size", settings.context_parallel, 1, 1024),
    ):
        if value is not None and not least <= value <= most:
            raise FactsError(f"--{name} {value}: must be from {least} to {most}")
    if settings.kv_dtype not in KV_BYTES:
        raise FactsError(f"--kv-cache-dtype {settings.kv_dtype}: known are {', '.join(KV_BYTES)}")
    return settings


def _pairs(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(flag with dashes, value or "") of `--flag value`, `--flag=value` and `--flag`."""
    for number, arg in enumerate(args):
        if not arg.startswith("--"):
            continue
        flag, equals, value = arg.partition("=")
        following = args[number + 1] if number + 1 < len(args) else ""
        # "--max-model-len -1": a negative number is a value, not a flag
        is_value = not following.startswith("-") or re.fullmatch(r"-\d+", following) is not None
        yield flag.replace("_", "-"), value if equals else (following if is_value else "")


def whole_number(text: str, what: str) -> int:
    """`8192`, `8k` (8,000), `8K` (8,192), `25.6k`, as vLLM reads them.

    Raises:
        FactsError: anything else.
    """
    found = re.fullmatch(r"(-?\d{1,15}(?:\.\d{1,6})?)([kKmMgG]?)", text.strip())
    if found is None or ("." in found[1] and not found[2]):
        raise FactsError(f"{what}: {text[:40]!r} is no whole number")
    unit = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3, "": 1}[found[2]]
    return round(float(found[1]) * unit) if "." in found[1] else int(found[1]) * unit


Reader = Callable[[str, str], dict[str, Any]]


def _whole(field: str) -> Reader:
    return lambda flag, value: {field: whole_number(value, flag)}


def _fraction(field: str) -> Reader:
    def read(flag: str, value: str) -> dict[str, Any]:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0 < number <= 1:
            raise FactsError(f"{flag}: {value[:40]!r} is no fraction over 0 and at most 1; write for example 0.92")
        return {field: number}

    return read


def _fixed(field: str, value: object) -> Reader:
    return lambda _flag, _value: {field: value}


def _context(flag: str, value: str) -> dict[str, Any]:
    if value.strip() in ("-1", "auto"):
        return {"max_model_len": None, "fits_context": True}
    return {"max_model_len": whole_number(value, flag), "fits_context": False}


def _speculative(_flag: str, value: str) -> dict[str, Any]:
    """Only the model's own prediction layers lie in its files; another drafter is a line of its own."""
    try:
        method = json.loads(value).get("method", "")
    except (ValueError, AttributeError):
        method = ""
    return {"loads_next": isinstance(method, str) and (method == "mtp" or method.endswith("_mtp"))}


def _text(field: str) -> Reader:
    return lambda _flag, value: {field: value.strip().lower()}


_VLLM: Final[Mapping[str, Reader]] = {
    "--gpu-memory-utilization": _fraction("utilization"),
    "--kv-cache-memory-bytes": _whole("kv_cache_bytes"),
    "--kv-cache-memory": _whole("kv_cache_bytes"),
    "--max-num-batched-tokens": _whole("max_batched_tokens"),
    "--max-num-seqs": _whole("max_seqs"),
    "--max-model-len": _context,
    "--kv-cache-dtype": _text("kv_dtype"),
    "--block-size": _whole("block"),
    "--enforce-eager": _fixed("has_graphs", False),
    "--disable-hybrid-kv-cache-manager": _fixed("is_hybrid", False),
    "--no-enable-chunked-prefill": _fixed("is_chunked", False),
    "--no-async-scheduling": _fixed("is_async", False),
    "--speculative-config": _speculative,
    "--decode-context-parallel-size": _whole("context_parallel"),
    "--enable-dbo": _fixed("dual_batch", True),
    "--num-redundant-experts": _whole("redundant_experts"),
}
_SGLANG: Final[Mapping[str, Reader]] = {
    "--mem-fraction-static": _fraction("static_fraction"),
    "--chunked-prefill-size": _whole("max_batched_tokens"),
    "--max-running-requests": _whole("max_seqs"),
    "--context-length": _context,
    "--kv-cache-dtype": _text("kv_dtype"),
    "--page-size": _whole("block"),
    "--disable-cuda-graph": _fixed("has_graphs", False),
    "--ep-num-redundant-experts": _whole("redundant_experts"),
    "--enable-two-batch-overlap": _fixed("dual_batch", True),
}
