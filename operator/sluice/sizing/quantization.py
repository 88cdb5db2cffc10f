"""Bytes of quantised weights, by the method that a config names (formats of the checkpoints as engines read them)."""

from collections.abc import Mapping
from dataclasses import dataclass

from sluice.sizing.fields import Config, Fields, printable


@dataclass(frozen=True, slots=True)
class Quantization:
    """How quantised weights are stored. Embeddings, head, norms and router always stay 16 bit."""

    method: str
    """"": none."""
    bits: float
    """Bits per quantised parameter, scales included; 16 when not quantised or not known."""
    is_known: bool
    only_experts: bool = False
    is_w8a8: bool = False
    """Arithmetic runs in FP8 too (where the accelerator has it)."""
    block: int = 1
    """Slices of a matrix must be multiples of this: the scales cover whole blocks."""


def read_quantization(fields: Fields) -> Quantization:
    """Bits per quantised parameter by method, scales included (formats of the checkpoints as engines read them)."""
    raw = fields.mapping("quantization_config") or fields.mapping("quantization")
    if not raw:
        return Quantization("", 16.0, True)
    inner = Fields(raw, "quantization_config.")
    method = printable(str(raw.get("quant_method") or raw.get("quant_algo") or "unknown").lower()[:64])
    algorithm = str(raw.get("quant_algo") or method).lower()
    bits = min(inner.maybe("bits", "w_bit", "weight_bits") or 4, 16)
    group = inner.maybe("group_size", "q_group_size") or 128
    if method == "fp8":
        block = inner.numbers("weight_block_size")
        side = block[0] if len(block) == 2 and min(block) > 0 else 1
        scales = 32 / (block[0] * block[1]) if side > 1 else 0.0
        return Quantization(method, 8 + scales, True, is_w8a8=True, block=side)
    if method == "fbgemm_fp8" or (method in ("modelopt", "fp8_e4m3") and "fp8" in algorithm):
        return Quantization(method, 8.0, True, is_w8a8=True)
    if method in ("gptq", "awq", "gptq_marlin", "awq_marlin"):
        return Quantization(method, bits + 16 / group + bits / group, True, block=group)
    if method == "mxfp4":
        return Quantization(method, 4.25, True, only_experts=True)
    if "nvfp4" in algorithm or "nvfp4" in method:
        return Quantization(method, 4.5, True, block=16)
    if method in ("compressed-tensors", "compressed_tensors"):
        return _compressed(raw, method)
    return Quantization(method, 16.0, False)


def _compressed(raw: Config, method: str) -> Quantization:
    groups = raw.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping) or isinstance(weights.get("num_bits"), bool):
        return Quantization(method, 16.0, False)
    bits, group = weights.get("num_bits"), weights.get("group_size")
    if not isinstance(bits, int) or not 1 <= bits <= 16:
        return Quantization(method, 16.0, False)
    size = group if isinstance(group, int) and group > 0 else 0
    is_float = weights.get("type") == "float" and isinstance(first, Mapping) and bool(first.get("input_activations"))
    return Quantization(
        method, bits + (16 / size if size else 0.0), True, is_w8a8=bits == 8 and is_float, block=size or 1
    )
