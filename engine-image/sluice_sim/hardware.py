"""The machine and the model that are imitated: how long a step takes and how much KV fits.

An 8-billion-parameter model (Llama 3.1 8B: 32 layers, 8 KV heads of 128) on 80 GB H100s. Figures from the H100 data
sheet; efficiencies and overheads fitted to 30 kernel-based estimates for this model (error < 9 %).
"""

from typing import Final

from sluice_sim.config import Layout
from sluice_sim.scheduler import TimeModel

VALUE_BYTES: Final = {"auto": 2, "half": 2, "float16": 2, "bfloat16": 2, "float": 4, "float32": 4}
TRANSFER_BYTES_S: Final = 40e9
"""KV from one machine to another: a 400 Gb/s adapter at 80 %."""

_GPU_BYTES: Final = 80e9
_PARAMETERS: Final = 8.03e9
_KV_VALUES_PER_TOKEN: Final = 2 * 32 * 8 * 128
_MEMORY_BYTES_S: Final = 3.35e12
_WEIGHT_READ_EFFICIENCY: Final = 0.75
_KV_READ_EFFICIENCY: Final = 0.80
_FLOPS: Final = 989e12
_PREFILL_EFFICIENCY: Final = 0.70
_STEP_OVERHEAD_S: Final = 0.0003
_SEQUENCE_OVERHEAD_S: Final = 5e-6


def build_time_model(tensor_parallel: int, value_bytes: int, speed: float) -> TimeModel:
    """Roofline of one step: weights and KV are read from memory, prompts are bound by arithmetic.

    Tensor parallelism divides all three; its communication is left out. Pipeline stages work one after the other, so
    they make no step shorter.
    """
    memory_bytes_s = _MEMORY_BYTES_S * tensor_parallel * speed
    return TimeModel(
        base_s=_STEP_OVERHEAD_S / speed + _PARAMETERS * value_bytes / (memory_bytes_s * _WEIGHT_READ_EFFICIENCY),
        prefill_token_s=2 * _PARAMETERS / (_FLOPS * tensor_parallel * speed * _PREFILL_EFFICIENCY),
        sequence_s=_SEQUENCE_OVERHEAD_S / speed,
        kv_token_s=_KV_VALUES_PER_TOKEN * value_bytes / (memory_bytes_s * _KV_READ_EFFICIENCY),
    )


def kv_token_bytes(value_bytes: int) -> int:
    """KV of one token, over all layers and ranks."""
    return _KV_VALUES_PER_TOKEN * value_bytes


def blocks_that_fit(layout: Layout, value_bytes: int, memory_share: float, block_size: int) -> int:
    """KV blocks of the instance; each data-parallel rank has weights of its own. Less than 1: the weights are too big.

    `memory_share`: 0..1 of each accelerator's memory, for weights and KV together.
    """
    room = _GPU_BYTES * layout.tensor * layout.pipeline * memory_share - _PARAMETERS * value_bytes
    return layout.data * int(room // (kv_token_bytes(value_bytes) * block_size))
