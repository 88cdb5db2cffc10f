"""One accelerator and its node, as figures to compute with. From an AcceleratorProfile, or just a size of memory."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from sluice.api.v1alpha1 import AcceleratorCalibration, AcceleratorHardware, SpecError, parse_profile_lenient
from sluice.sizing.fields import FactsError

GB: Final = 1_000_000_000
GIB: Final = 1 << 30
MIB: Final = 1 << 20
_UNITS: Final[Mapping[str, int]] = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate(("k", "M", "G", "T", "P"), 1)},
    **{f"{unit}i": 1024**power for power, unit in enumerate(("K", "M", "G", "T", "P"), 1)},
}


@dataclass(frozen=True, slots=True)
class Calibration:
    """How real runs differ from data sheets; efficiencies are fractions, latencies seconds.

    Source of the defaults: fitted to 18 decode and 12 prefill points of Llama-3.1 8B (tp 1) and 70B (tp 4, 8) on H100,
    kernel-based estimates for vLLM 0.24; decode within 5.3 %, prefill within 8.1 %.
    """

    decode_eff: float
    kv_eff: float
    prefill_eff: float
    decode_link_eff: float
    prefill_link_eff: float
    decode_hop_s: float
    prefill_hop_s: float
    net_hop_s: float
    floor_s: float
    step_s: float
    sequence_s: float
    prefill_s: float
    expert_skew: float
    is_default: bool = True
    """Taken over from another accelerator."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Rates in bytes or operations per second, of one GPU; None: not known, and then no time that needs it is given."""

    name: str
    memory_bytes: int
    hbm: float | None
    flops: float | None
    """Dense, 16 bit."""
    flops8: float | None
    """Dense, FP8; None: the accelerator has none."""
    link: float | None
    """To the other GPUs of the domain; with a domain of 1: over PCIe to those of the node."""
    domain: int
    gpus_per_node: int
    nic: float | None
    host_link: float | None
    disk: float | None
    price_per_hour: float | None
    calibration: Calibration

    @property
    def reach(self) -> int:
        """GPUs that talk without the network: those of the link domain, at least those of the node."""
        return max(self.domain, self.gpus_per_node)


def calibration_of(found: AcceleratorCalibration | None) -> Calibration:
    """None: the fitted values of the H100, marked as taken over."""
    c = found or AcceleratorCalibration()
    return Calibration(
        decode_eff=c.decode_efficiency_percent / 100,
        kv_eff=c.kv_efficiency_percent / 100,
        prefill_eff=c.prefill_efficiency_percent / 100,
        decode_link_eff=c.decode_collective_percent / 100,
        prefill_link_eff=c.prefill_collective_percent / 100,
        decode_hop_s=c.decode_hop_nanoseconds / 1e9,
        prefill_hop_s=c.prefill_hop_nanoseconds / 1e9,
        net_hop_s=c.net_hop_nanoseconds / 1e9,
        floor_s=c.collective_floor_nanoseconds / 1e9,
        step_s=c.step_microseconds / 1e6,
        sequence_s=c.sequence_nanoseconds / 1e9,
        prefill_s=c.prefill_microseconds / 1e6,
        expert_skew=c.expert_skew_percent / 100,
        is_default=found is None,
    )


def accelerator_of(name: str, hardware: AcceleratorHardware) -> Accelerator:
    """Raises: FactsError: the memory is no quantity of at least 1 GiB."""
    return Accelerator(
        name=name,
        memory_bytes=memory_bytes(hardware.memory, f"AcceleratorProfile {name}: spec.hardware.memory"),
        hbm=_scaled(hardware.memory_bandwidth_gbs, 1e9),
        flops=_scaled(hardware.bf16_tflops, 1e12),
        flops8=_scaled(hardware.fp8_tflops, 1e12),
        link=_scaled(hardware.link_gbs, 1e9),
        domain=hardware.link_domain,
        gpus_per_node=hardware.gpus_per_node,
        nic=_scaled(hardware.nic_gbs, 1e9),
        host_link=_scaled(hardware.host_link_gbs, 1e9),
        disk=_scaled(hardware.disk_gbs, 1e9),
        price_per_hour=_scaled(hardware.price_per_hour_cents, 0.01),
        calibration=calibration_of(hardware.calibration),
    )


def from_profile(document: Mapping[str, Any]) -> Accelerator:
    """From an AcceleratorProfile object.

    Raises:
        FactsError: it is no usable profile, or it says nothing about the hardware.
    """
    metadata, spec = document.get("metadata"), document.get("spec")
    name = str(metadata.get("name")) if isinstance(metadata, Mapping) else "unnamed"
    try:
        parsed = parse_profile_lenient(spec if isinstance(spec, Mapping) else {})
    except SpecError as error:
        raise FactsError(f"AcceleratorProfile {name}: {error}") from error
    if parsed.hardware is None:
        raise FactsError(
            f"AcceleratorProfile {name}: spec.hardware is missing; add at least spec.hardware.memory, for example 80Gi"
        )
    return accelerator_of(name, parsed.hardware)


def from_memory(text: str) -> Accelerator:
    """A GPU of which only the memory is known: a ledger, no times.

    Raises:
        FactsError: no quantity of at least 1 GiB.
    """
    memory_bytes(text, "accelerator")
    return accelerator_of(text, AcceleratorHardware(memory=text))


def memory_bytes(quantity: int | str, where: str) -> int:
    """Bytes of a Kubernetes quantity.

    Raises:
        FactsError: no quantity, or less than 1 GiB or more than 1 PiB.
    """
    found = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,9})?)([kMGTP]?|[KMGTP]i)", str(quantity))
    size = int(Fraction(found[1]) * _UNITS[found[2]]) if found else 0
    if not GIB <= size <= 1 << 50:
        raise FactsError(f"{where}: expected a quantity from 1Gi to 1Pi such as 80Gi, found {str(quantity)[:40]!r}")
    return size


def _scaled(value: int | None, unit: float) -> float | None:
    return None if value is None else value * unit
