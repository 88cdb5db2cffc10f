"""The simulated engine: vLLM's flags, endpoints and metric names, no accelerator and no weights.

It is started through the same adapter path as a real engine, so that every end-to-end test proves that path too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from sluice.api.config import OperatorConfig
from sluice.plan.declared import PoolDeclaration, Refused
from sluice.plan.engines.adapter import Launch, Publishes, check_user_options, merged_env, user_args
from sluice.plan.engines.vllm import PUBLISHES, serving_args

USER: Final = 65532
"""The user of our own images."""


@dataclass(frozen=True, slots=True)
class SimulatedAdapter:
    def default_image(self, config: OperatorConfig) -> str:
        return config.images.engine

    def default_args(self, config: OperatorConfig) -> tuple[str, ...]:
        return config.engine_defaults.simulated_args

    def check(self, declaration: PoolDeclaration) -> Iterator[Refused]:
        yield from check_user_options(declaration)

    def launch(self, declaration: PoolDeclaration, default_args: Sequence[str]) -> Launch:
        return Launch(
            command=("sluice-sim", "serve"),
            args=(
                declaration.model.uri,  # another model gives other answers; no weights are read
                "--flavor=vllm",
                *serving_args(declaration),
                *default_args,
                *user_args(declaration),
            ),
            env=merged_env({}, declaration, ()),
            user=USER,
            read_only_root=True,
            shm_gib=0,
            requests={"cpu": "50m", "memory": "96Mi"},
        )

    def publishes(self, declaration: PoolDeclaration) -> Publishes:
        del declaration
        return PUBLISHES
