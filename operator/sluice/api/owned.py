"""What the operator sets itself on every engine, so that a user must not set it too.

One list for both places that refuse it: the rules in the CRD (at admission) and the planner (again, on objects that
were stored before a rule existed). Spellings with `_` for `-` count as the same flag, as vLLM's parser takes both.
"""

import re
from collections.abc import Iterable
from typing import Final

FLAGS: Final = (
    # address and identity: the agent, the probes and the router rely on them
    "host",
    "port",
    "uds",
    "root-path",
    "fastapi-root-path",
    "model",
    "model-path",
    "served-model-name",
    "api-key",
    "admin-api-key",
    "ssl-keyfile",
    "ssl-certfile",
    "grpc",
    "grpc-mode",
    # layout: follows from spec.pools[].parallelism
    "tensor-parallel-size",
    "tp-size",
    "tp",
    "pipeline-parallel-size",
    "pp-size",
    "pp",
    "data-parallel-size",
    "data-parallel-size-local",
    "data-parallel-rank",
    "data-parallel-start-rank",
    "data-parallel-address",
    "data-parallel-rpc-port",
    "data-parallel-hybrid-lb",
    "data-parallel-external-lb",
    "data-parallel-multi-port-external-lb",
    "api-server-count",
    "dp-size",
    "dp",
    "attn-dp-size",
    "attention-data-parallel-size",
    "enable-dp-attention",
    "enable-expert-parallel",
    "expert-parallel-size",
    "ep-size",
    "ep",
    "prefill-context-parallel-size",
    "nnodes",
    "node-rank",
    "master-addr",
    "master-port",
    "headless",
    "dist-init-addr",
    "nccl-init-addr",
    "kv-transfer-config",
    "disaggregation-mode",
    # drain and health: in-flight counts and metrics are how the operator sees work
    "shutdown-timeout",
    "enable-server-load-tracking",
    "disable-log-stats",
    "enable-metrics",
    "enable-metrics-for-all-schedulers",
    # a file of arguments could carry any of the above
    "config",
)
"""Spellings of vLLM 0.32 and SGLang 0.5.23. `--tp` and its like are abbreviations that SGLang's parser completes."""
SHORT_FLAGS: Final = (
    *("tp", "pp", "dp", "ep", "n", "r", "asc", "pcp"),
    *("dpn", "dpr", "dpl", "dpa", "dpp", "dph", "dpe", "dpm"),
)
"""vLLM's short forms of the above (vLLM 0.32, engine/arg_utils.py); SGLang has none."""

ENV: Final = ("VLLM_API_KEY", "VLLM_HOST_IP", "VLLM_PORT", "VLLM_SERVER_DEV_MODE")
"""Address and key are ours; the developer mode opens endpoints that stop or rewrite an engine."""
ENV_PREFIX: Final = "SLUICE_"

LABEL_PREFIXES: Final = (
    "serving.sluice.dev/",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/name",
    "app.kubernetes.io/component",
    "argocd.argoproj.io/",
    "kustomize.toolkit.fluxcd.io/",
    "helm.toolkit.fluxcd.io/",
    "meta.helm.sh/",
)
"""Label and annotation keys that are ours, or that make a GitOps tool think it owns the pod (argoproj/argo-cd#8683)."""


def _any_of(words: Iterable[str]) -> str:
    """A pattern of exactly these words with common beginnings written once; a dot stands for `-` and `_`.

    The cost limit of a rule in a CRD counts each character of its pattern: written in a row the flags would exceed it.
    """
    endings: dict[str, list[str]] = {}
    for word in words:
        endings.setdefault(word[:1], []).append(word[1:])
    may_end = endings.pop("", None) is not None
    branches = [first.replace("-", ".") + _any_of(rest) for first, rest in sorted(endings.items())]
    if not branches:
        return ""
    pattern = branches[0] if len(branches) == 1 and not may_end else f"({'|'.join(branches)})"
    return pattern + ("?" if may_end else "")


FLAG_PATTERN: Final = f"^(--{_any_of(FLAGS)}|-{_any_of(SHORT_FLAGS)})(=|$)"
ENV_PATTERN: Final = "^(" + "|".join([*(f"{name}$" for name in ENV), ENV_PREFIX]) + ")"
LABEL_PATTERN: Final = "^(" + "|".join(prefix.replace(".", "[.]") for prefix in LABEL_PREFIXES) + ")"


def is_owned_flag(argument: str) -> bool:
    """True for `--port`, `--port=1`, `--served_model_name=x`; False for values and for flags that are the user's."""
    return re.search(FLAG_PATTERN, argument) is not None


def is_owned_env(name: str) -> bool:
    return re.search(ENV_PATTERN, name) is not None


def is_owned_label(key: str) -> bool:
    """True for keys of labels and annotations that a pod template must not carry."""
    return re.search(LABEL_PATTERN, key) is not None
