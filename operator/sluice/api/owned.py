"""What the operator sets itself on every engine, so that a user must not set it too.

One list for both places that refuse it: the rules in the CRD (at admission) and the planner (again, on objects that
were stored before a rule existed). Spellings with `_` for `-` count as the same flag, as vLLM's parser takes both.
"""

import re
from typing import Final

FLAGS: Final = (
    # address and identity: the agent, the probes and the router rely on them
    "host",
    "port",
    "uds",
    "root-path",
    "model",
    "served-model-name",
    "api-key",
    "ssl-keyfile",
    "ssl-certfile",
    # layout: follows from spec.pools[].parallelism
    "tensor-parallel-size",
    "pipeline-parallel-size",
    "data-parallel-size",
    "data-parallel-rank",
    "data-parallel-address",
    "nnodes",
    "node-rank",
    "master-addr",
    "master-port",
    "headless",
    "kv-transfer-config",
    # drain and health: in-flight counts and metrics are how the operator sees work
    "shutdown-timeout",
    "enable-server-load-tracking",
    "disable-log-stats",
    # a file of arguments could carry any of the above
    "config",
)
SHORT_FLAGS: Final = ("tp", "pp", "dp", "n", "r")
"""vLLM's short forms of tensor, pipeline, data parallel size, nnodes, node rank (vLLM 0.32, engine/arg_utils.py)."""

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

# A dot stands for `-` and `_`: the cost limit of a rule in a CRD counts each character of its pattern.
FLAG_PATTERN: Final = (
    "^(--(" + "|".join(flag.replace("-", ".") for flag in FLAGS) + ")|-(" + "|".join(SHORT_FLAGS) + "))(=|$)"
)
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
