"""What a spec means once read, and what is said about one that can't be read."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from sluice.api import owned
from sluice.api.base import ApiModel
from sluice.api.v1alpha1 import (
    AcceleratorProfileSpec,
    EngineType,
    InferenceServiceSpec,
    SpecError,
    parse_lenient,
    parse_profile_lenient,
)
from tests.unit.api.schemas import ROOT

EXAMPLES = sorted((ROOT / "manifests" / "examples").glob("*.yaml"))
MINIMAL: dict[str, Any] = {"model": {"uri": "pvc://models/qwen"}}
FULL: dict[str, Any] = {
    "model": {"uri": "pvc://models/qwen", "name": "qwen3-8b"},
    "engine": {
        "type": "Simulated",
        "image": "vllm/vllm-openai:v0.32.0",
        "args": ["--max-model-len=32768"],
        "env": [{"name": "VLLM_LOGGING_LEVEL", "value": "INFO"}],
        "custom": {
            "command": ["serve", "$(SLUICE_MODEL_PATH)"],
            "port": 9000,
            "metricsPath": "/prometheus",
            "metrics": {
                "running": "busy",
                "waiting": "queue",
                "kvUtilization": "kv",
                "generationTokens": "generated_total",
                "promptTokens": "prompted_total",
                "iterations": "steps_total",
            },
        },
    },
    "accelerator": {"profileRef": {"name": "h100-80g"}},
    "pools": [
        {
            "name": "main",
            "role": "Unified",
            "replicas": 2,
            "parallelism": {"tensor": 2, "pipeline": 2, "data": 3, "expert": True},
            "accelerator": {"resourceName": "nvidia.com/gpu"},
            "engine": {"args": ["--max-num-seqs=64"], "env": [{"name": "A", "value": "1"}]},
            "podTemplate": {
                "metadata": {"labels": {"team": "search"}, "annotations": {"note": "x"}},
                "spec": {
                    "nodeSelector": {"zone": "a"},
                    "tolerations": [
                        {"key": "gpu", "operator": "Equal", "value": "x", "effect": "NoExecute", "tolerationSeconds": 3}
                    ],
                    "affinity": {"nodeAffinity": {}},
                    "priorityClassName": "high",
                    "schedulerName": "other",
                    "runtimeClassName": "nvidia",
                    "resources": {"requests": {"cpu": 8, "memory": "64Gi"}, "limits": {"memory": "64Gi"}},
                },
            },
        }
    ],
    "routing": {"policy": "LeastRequests", "replicas": 3},
    "health": {
        "selfTestPeriodSeconds": 5,
        "selfTestTimeoutSeconds": 2,
        "hangTimeoutSeconds": 30,
        "startupTimeoutSeconds": 600,
        "maxRestarts": 2,
        "restartWindowSeconds": 900,
    },
    "drain": {"timeoutSeconds": 30},
    "rollout": {
        "maxSurge": 2,
        "maxUnavailable": 1,
        "progressDeadlineSeconds": 1800,
        "onFailure": "Hold",
        "upgradePolicy": "Manual",
        "paused": True,
    },
    "suspend": True,
}
REQUIRED = {
    *(("model",), ("model", "uri"), ("accelerator", "profileRef", "name"), ("engine", "env", 0, "name")),
    ("engine", "custom", "command"),
} | {("pools", 0, *rest) for rest in (("engine", "env", 0, "name"), ("podTemplate", "spec", "tolerations", 0, "key"))}


def _paths(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        if not isinstance(key, int):
            yield (*at, key)
        yield from _paths(child, (*at, key))


OPTIONAL = [path for path in _paths(FULL) if path not in REQUIRED]


def _holder(spec: dict[str, Any], path: tuple[str | int, ...]) -> Any:
    found: Any = spec
    for key in path[:-1]:
        found = found[key]
    return found


def test_full_object_is_read_field_by_field() -> None:
    assert InferenceServiceSpec.model_validate(FULL).model_dump(mode="json", by_alias=True, exclude_none=True) == FULL


def test_smallest_object_serves_one_instance_of_one_pool() -> None:
    spec = parse_lenient(MINIMAL)
    assert [(pool.name, pool.replicas, pool.parallelism.tensor) for pool in spec.pools] == [("default", 1, 1)]
    assert (spec.engine.type, spec.routing.replicas, spec.drain.timeout_seconds) == (EngineType.VLLM, 2, 600)


@pytest.mark.parametrize("path", OPTIONAL, ids=lambda path: ".".join(map(str, path)))
def test_s006_optional_field_may_be_absent_and_is_not_ignored_when_present(path: tuple[str | int, ...]) -> None:
    spec = copy.deepcopy(FULL)
    del _holder(spec, path)[path[-1]]
    only_one_value = path[-1] == "role"
    assert (parse_lenient(spec) == parse_lenient(FULL)) is only_one_value


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in OPTIONAL
        if isinstance(_holder(FULL, path)[path[-1]], dict) and path[-1] not in ("profileRef", "custom")
    ],
    ids=lambda path: ".".join(map(str, path)),
)
def test_s006_optional_object_may_be_empty(path: tuple[str | int, ...]) -> None:
    spec = copy.deepcopy(FULL)
    _holder(spec, path)[path[-1]] = {}
    parse_lenient(spec)


def test_fields_of_a_newer_version_are_ignored_at_every_depth() -> None:
    newer = copy.deepcopy(FULL)
    newer["autoscaling"] = {"maxReplicas": 8}
    newer["pools"][0]["kvTiers"] = {}
    newer["pools"][0]["podTemplate"]["spec"]["hostNetwork"] = True
    assert parse_lenient(newer) == parse_lenient(FULL)
    with pytest.raises(ValidationError):
        InferenceServiceSpec.model_validate(newer)


def test_pod_template_is_kept_as_it_was_written() -> None:
    template = FULL["pools"][0]["podTemplate"]
    assert parse_lenient(FULL).pools[0].pod_template == template


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {}}, "spec.model.uri: Field required"),
        ({"model": {"uri": "pvc://a\nb"}}, "spec.model.uri: String should match pattern"),
        ({"model": {"uri": "pvc://a\\b"}}, "spec.model.uri: String should match pattern"),
        ({"model": {"uri": "pvc://a", "name": "-x"}}, "spec.model.name: String should match pattern"),
        (
            {"pools": [{"replicas": -1}]},
            "spec.pools[0].replicas: Input should be greater than or equal to 0 (found '-1')",
        ),
        ({"pools": [{"name": "a" * 21}]}, "spec.pools[0].name: String should have at most 20 characters"),
        ({"pools": [{"role": "Prefill"}]}, "spec.pools[0].role: Input should be 'Unified' (found 'Prefill')"),
        ({"pools": []}, "spec.pools: List should have at least 1 item"),
        (
            {"pools": [{"podTemplate": {"spec": {"resources": {"limits": {"cpu": "-1"}}}}}]},
            "spec.pools[0].podTemplate.spec.resources.limits.cpu",
        ),
        ({"engine": {"env": [{"name": "1A"}]}}, "spec.engine.env[0].name: String should match pattern"),
        ({"engine": {"args": ["a\x00"]}}, "spec.engine.args[0]: String should match pattern"),
        ({"accelerator": {"resourceName": "gpu"}}, "spec.accelerator.resourceName: String should match pattern"),
        ({"suspend": "maybe"}, "spec.suspend: Input should be a valid boolean"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusal_names_the_field_by_its_path(change: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_lenient(MINIMAL | change)
    assert said in str(refused.value)


def test_refusal_of_many_fields_stays_short() -> None:
    with pytest.raises(SpecError) as refused:
        parse_lenient(MINIMAL | {"pools": [{"replicas": "x" * 5000}] * 8})
    assert str(refused.value).endswith("; and 3 more")
    assert len(str(refused.value)) < 1024


def test_profile_keeps_its_tolerations_as_written() -> None:
    raw = {"resourceName": "nvidia.com/gpu", "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}], "new": 1}
    assert parse_profile_lenient(raw).tolerations == raw["tolerations"]
    with pytest.raises(SpecError, match=r"spec\.resourceName"):
        parse_profile_lenient({"resourceName": "gpu"})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_is_strictly_valid_and_says_only_what_it_means(path: Path) -> None:
    models: dict[str, type[ApiModel]] = {
        "InferenceService": InferenceServiceSpec,
        "AcceleratorProfile": AcceleratorProfileSpec,
    }
    for document in yaml.safe_load_all(path.read_text()):
        parsed = models[document["kind"]].model_validate(document["spec"])
        assert parsed.model_dump(mode="json", by_alias=True, exclude_unset=True) == document["spec"]
        assert "namespace" not in document["metadata"]


def test_an_instance_takes_one_accelerator_per_rank() -> None:
    parallelism = parse_lenient(FULL).pools[0].parallelism
    assert parallelism.accelerators == 12
    assert parse_lenient(MINIMAL).pools[0].parallelism.accelerators == 1


@pytest.mark.parametrize("flag", owned.SHORT_FLAGS)
def test_every_short_form_of_an_owned_flag_is_recognised(flag: str) -> None:
    assert owned.is_owned_flag(f"-{flag}")
    assert owned.is_owned_flag(f"-{flag}=1")
    assert not owned.is_owned_flag(f"-{flag}x=1")


@pytest.mark.parametrize("flag", owned.FLAGS)
def test_every_spelling_of_an_owned_flag_is_recognised(flag: str) -> None:
    assert owned.is_owned_flag(f"--{flag}")
    assert owned.is_owned_flag(f"--{flag}=1")
    assert owned.is_owned_flag(f"--{flag.replace('-', '_')}=1")


@pytest.mark.parametrize(
    "argument",
    [
        "--max-model-len=5",
        "--model-impl=auto",
        "--port-range=1",
        "--hostile",
        "host",
        "8000",
        "-O3",
        "--tokenizer=--port",
    ],
)
def test_other_arguments_are_the_users(argument: str) -> None:
    assert not owned.is_owned_flag(argument)


def test_owned_variables_and_labels_are_recognised() -> None:
    assert owned.is_owned_env("VLLM_PORT") and owned.is_owned_env("SLUICE_AGENT_CONFIG")
    assert not owned.is_owned_env("VLLM_PORTS") and not owned.is_owned_env("VLLM_LOGGING_LEVEL")
    assert owned.is_owned_label("serving.sluice.dev/pool") and owned.is_owned_label("argocd.argoproj.io/instance")
    assert not owned.is_owned_label("team") and not owned.is_owned_label("example.com/serving.sluice.dev/pool")
