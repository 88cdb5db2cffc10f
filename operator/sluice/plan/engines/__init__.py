"""One adapter per engine type: what it is started with, what it publishes, what a user must not set.

An adapter is pure and knows nothing of pods; `plan.pods` puts its answer into one.
"""

from typing import Final

from sluice.api.v1alpha1 import EngineType
from sluice.plan.engines.adapter import EngineAdapter
from sluice.plan.engines.custom import CustomAdapter
from sluice.plan.engines.sglang import SglangAdapter
from sluice.plan.engines.simulated import SimulatedAdapter
from sluice.plan.engines.vllm import VllmAdapter

ADAPTERS: Final[dict[EngineType, EngineAdapter]] = {
    EngineType.VLLM: VllmAdapter(),
    EngineType.SGLANG: SglangAdapter(),
    EngineType.SIMULATED: SimulatedAdapter(),
    EngineType.CUSTOM: CustomAdapter(),
}
