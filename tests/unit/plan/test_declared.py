"""What a pool declares, and what makes a new revision."""

import dataclasses
from typing import Any

import pytest

from sluice.plan.declared import Desired, PoolDeclaration, Refused, declare, digest
from tests.unit.plan.cluster import Cluster, a_service, pools

BASE: dict[str, Any] = {
    "model": {"uri": "pvc://claim/x", "name": "x"},
    "engine": {"type": "Simulated", "image": "i:1", "args": ["--seed=1"], "env": [{"name": "A", "value": "1"}]},
    "accelerator": {"resourceName": "example.com/gpu"},
    "pools": [
        {
            "name": "default",
            "role": "Unified",
            "replicas": 1,
            "parallelism": {"tensor": 1},
            "accelerator": {"resourceName": "example.com/gpu"},
            "engine": {"args": ["--max-num-seqs=4"], "env": [{"name": "B", "value": "2"}]},
            "podTemplate": {"metadata": {"labels": {"a": "b"}}, "spec": {"nodeSelector": {"a": "b"}}},
        }
    ],
    "routing": {"policy": "CacheAware", "replicas": 2},
    "health": {
        "selfTestPeriodSeconds": 10,
        "selfTestTimeoutSeconds": 3,
        "hangTimeoutSeconds": 60,
        "startupTimeoutSeconds": 3600,
    },
    "drain": {"timeoutSeconds": 600},
    "rollout": {"maxSurge": 1, "maxUnavailable": 0, "paused": False},
    "suspend": False,
}
REQUIRED = {("model",), ("model", "uri"), ("engine", "env", 0, "name"), ("pools", 0, "engine", "env", 0, "name")}


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, item in items for deeper in _paths(item, (*path, key)))]


OPTIONAL = [p for p in _paths(BASE) if p and p not in REQUIRED and isinstance(p[-1], str)]


def _changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """BASE with the field at `path` replaced, or left out if the value is `...`."""
    changed: dict[str, Any] = _copy(BASE, path, value)
    return changed


def _copy(node: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(node, list):
        return [_copy(item, rest, value) if n == key else item for n, item in enumerate(node)]
    if not rest and value is ...:
        return {k: v for k, v in node.items() if k != key}
    return {**node, key: _copy(node[key], rest, value)}


def desired(spec: dict[str, Any], **cluster: Any) -> Desired:
    made = Cluster(a_service())
    made.service["spec"] = spec
    for key, value in cluster.items():
        setattr(made, key, value)
    answer = declare(made.snapshot())
    assert isinstance(answer, Desired), answer
    return answer


def revision(spec: dict[str, Any], **cluster: Any) -> str:
    declaration = desired(spec, **cluster).pools[0].declaration
    assert declaration is not None
    return digest(declaration)


@pytest.mark.parametrize("path", OPTIONAL, ids=lambda p: ".".join(map(str, p)))
def test_s006_each_optional_field_may_be_absent_and_the_second_pass_writes_nothing(path: tuple[Any, ...]) -> None:
    cluster = Cluster(a_service())
    cluster.service["spec"] = _changed(path, ...)
    cluster.run()
    assert cluster.condition("Accepted")["status"] == "True"
    status = dict(cluster.service["status"])
    assert cluster.pass_().actions == ()
    assert cluster.service["status"] == status


EMPTY_OBJECTS = [
    ("engine", "args"),
    ("routing",),
    ("health",),
    ("drain",),
    ("rollout",),
    ("pools", 0, "parallelism"),
    ("pools", 0, "engine"),
    ("pools", 0, "podTemplate"),
]


@pytest.mark.parametrize("path", EMPTY_OBJECTS, ids=lambda p: ".".join(map(str, p)))
def test_s006_each_optional_object_may_be_empty(path: tuple[Any, ...]) -> None:
    cluster = Cluster(a_service())
    cluster.service["spec"] = _changed(path, [] if path[-1] == "args" else {})
    cluster.run()
    assert cluster.condition("Accepted")["status"] == "True"
    assert cluster.pass_().actions == ()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("pools", 0, "replicas"), 5),
        (("routing",), {"policy": "RoundRobin", "replicas": 3}),
        (("rollout",), {"maxSurge": 2, "paused": True}),
        (("suspend",), True),
        (("drain", "timeoutSeconds"), ...),
        (("pools", 0, "parallelism"), ...),
        (("pools", 0, "parallelism"), {"tensor": 1, "pipeline": 1, "data": 1, "expert": False}),
    ],
)
def test_what_changes_no_pod_makes_no_revision(path: tuple[Any, ...], value: Any) -> None:
    assert revision(_changed(path, value)) == revision(BASE)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("model", "uri"), "pvc://claim/y"),
        (("model", "name"), "y"),
        (("engine", "image"), "i:2"),
        (("engine", "args"), ["--seed=2"]),
        (("engine", "env"), []),
        (("pools", 0, "engine", "args"), []),
        (("pools", 0, "parallelism", "tensor"), 2),
        (("pools", 0, "parallelism"), {"pipeline": 2}),
        (("pools", 0, "parallelism"), {"data": 2, "expert": True}),
        (("engine", "type"), "SGLang"),
        (("pools", 0, "podTemplate"), {}),
        (("pools", 0, "accelerator"), {"resourceName": "example.com/tpu"}),
        (("health", "hangTimeoutSeconds"), 90),
        (("drain", "timeoutSeconds"), 60),
    ],
)
def test_what_is_in_the_pod_makes_a_revision(path: tuple[Any, ...], value: Any) -> None:
    assert revision(_changed(path, value)) != revision(BASE)


def test_fields_of_a_later_version_are_passed_over() -> None:
    assert revision({**BASE, "aNewField": {"x": 1}, "rollout": {"anotherOne": 2}}) == revision(BASE)


def test_the_content_of_the_profile_counts_and_its_name_does_not() -> None:
    spec = {**BASE, "pools": [{"name": "default"}]}

    def with_profile(name: str, **content: Any) -> str:
        profiles = {name: {"spec": {"resourceName": "nvidia.com/gpu", **content}}}
        return revision({**spec, "accelerator": {"profileRef": {"name": name}}}, profiles=profiles)

    assert with_profile("a") == with_profile("b")
    assert with_profile("a") != with_profile("a", nodeSelector={"x": "y"})


def test_the_default_profile_is_for_real_engines_only() -> None:
    profiles = {"h100": {"spec": {"resourceName": "nvidia.com/gpu", "default": True}}}
    vllm = {"engine": {"type": "vLLM"}, "model": {"uri": "pvc://c/m"}}
    with_gpu = desired(vllm, profiles=profiles).pools[0].declaration
    simulated = desired({"engine": {"type": "Simulated"}, "model": {"uri": "sim://x"}}, profiles=profiles)
    assert with_gpu is not None
    assert with_gpu.accelerator is not None
    assert with_gpu.accelerator.resource_name == "nvidia.com/gpu"
    assert simulated.pools[0].declaration is not None
    assert simulated.pools[0].declaration.accelerator is None
    assert desired(vllm).pools[0].declaration is not None


def test_unreadable_profiles_prove_nothing() -> None:
    cluster = Cluster(a_service({"engine": {"type": "vLLM"}, "model": {"uri": "pvc://c/m"}}))
    answer = declare(dataclasses.replace(cluster.snapshot(), profiles_known=False))
    assert isinstance(answer, Desired)
    assert answer.pools[0].declaration is None
    assert answer.refusals[0].reason == "ProfileNotFound"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({}, "spec.model"),
        ({"model": {"uri": 3}}, "spec.model.uri"),
        ({"model": {"uri": "sim://x"}, "pools": [{"replicas": "x"}]}, "spec.pools[0].replicas"),
        ({"model": {"uri": "sim://x"}, "pools": [{"name": "a", "replicas": 901}]}, "901 instances"),
        ({"model": {"uri": "sim://x"}, "pools": [{"name": "a"}, {"name": "a"}]}, "'a'"),
    ],
)
def test_an_unreadable_spec_is_refused_with_the_path(spec: dict[str, Any], said: str) -> None:
    cluster = Cluster(a_service())
    cluster.service["spec"] = spec
    answer = declare(cluster.snapshot())
    assert isinstance(answer, Refused)
    assert said in answer.message


def test_a_second_default_profile_rolls_nothing_and_is_named() -> None:
    def profile(name: str, resource: str) -> dict[str, Any]:
        return {"metadata": {"name": name}, "spec": {"resourceName": resource, "default": True}}

    cluster = Cluster(a_service({"pools": pools(2), "model": {"uri": "pvc://m/x"}, "engine": {"type": "vLLM"}}))
    cluster.profiles["h100"] = profile("h100", "nvidia.com/gpu")
    cluster.run()
    before = set(cluster.engine_pods())
    cluster.profiles["a-second"] = profile("a-second", "amd.com/gpu")
    cluster.run()
    assert set(cluster.engine_pods()) == before == cluster.listed()
    accepted = cluster.condition("Accepted")
    assert accepted["status"] == "False"
    assert "a-second, h100" in accepted["message"]


def _sized(gpus: int | None, **layout: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    hardware = {} if gpus is None else {"hardware": {"memory": "80Gi", "gpusPerNode": gpus}}
    profiles = {"h100": {"spec": {"resourceName": "nvidia.com/gpu", **hardware}}}
    spec = {
        "model": {"uri": "pvc://c/m"},
        "accelerator": {"profileRef": {"name": "h100"}},
        "pools": [{"name": "small"}, {"name": "large", "parallelism": layout}],
    }
    return spec, profiles


@pytest.mark.parametrize("layout", [{"tensor": 8}, {"tensor": 4, "pipeline": 2}, {"data": 8, "expert": True}])
def test_an_instance_may_fill_a_node(layout: dict[str, Any]) -> None:
    spec, profiles = _sized(8, **layout)
    assert desired(spec, profiles=profiles).refusals == ()


@pytest.mark.parametrize(
    ("layout", "product"),
    [
        ({"tensor": 16}, "tensor 16 x pipeline 1 x data 1 = 16"),
        ({"tensor": 8, "pipeline": 2}, "tensor 8 x pipeline 2 x data 1 = 16"),
        ({"tensor": 3, "data": 3, "expert": True}, "tensor 3 x pipeline 1 x data 3 = 9"),
    ],
)
def test_a_layout_larger_than_a_node_is_refused_with_the_numbers_and_stops_its_pool_only(
    layout: dict[str, Any], product: str
) -> None:
    spec, profiles = _sized(8, **layout)
    answer = desired(spec, profiles=profiles)
    [refused] = answer.refusals
    assert refused.message.startswith(f"spec.pools[1].parallelism: {product} accelerators in one pod")
    assert "has 8 (hardware.gpusPerNode)" in refused.message
    assert [pool.declaration is None for pool in answer.pools] == [False, True]


def test_a_profile_without_figures_says_nothing_about_nodes() -> None:
    spec, profiles = _sized(None, tensor=64)
    assert desired(spec, profiles=profiles).refusals == ()


def test_figures_of_the_hardware_change_no_revision() -> None:
    (spec, without), (_, with_figures) = _sized(None), _sized(8)
    assert revision(spec, profiles=without) == revision(spec, profiles=with_figures)


def test_a_layout_that_became_too_large_keeps_what_runs() -> None:
    fields = {"pools": pools(2, parallelism={"tensor": 8}), "model": {"uri": "pvc://m/x"}, "engine": {"type": "vLLM"}}
    cluster = Cluster(a_service(fields | {"accelerator": {"profileRef": {"name": "h100"}}}))
    cluster.profiles["h100"] = {"metadata": {"name": "h100"}, "spec": {"resourceName": "nvidia.com/gpu"}}
    cluster.run()
    before = set(cluster.engine_pods())
    cluster.profiles["h100"]["spec"]["hardware"] = {"memory": "80Gi", "gpusPerNode": 4}
    cluster.run()
    assert set(cluster.engine_pods()) == before == cluster.listed()
    accepted = cluster.condition("Accepted")
    assert accepted["status"] == "False"
    assert "= 8 accelerators in one pod, and a node of the profile has 4" in accepted["message"]


def test_an_argument_of_a_pool_that_is_older_than_its_limit_is_still_read() -> None:
    """Stored when a pool's argument could have 1024 characters: what runs has to be known and repaired."""
    long = "--compilation-config=" + "x" * 700
    cluster = Cluster(a_service({"pools": pools(1, engine={"args": [long]})}))
    cluster.run()
    assert cluster.condition("Ready")["status"] == "True"
    stored = {"model": {"uri": "pvc://a/b", "name": "m"}, "poolEngine": {"args": [long]}}
    assert PoolDeclaration.model_validate(stored, extra="ignore").pool_engine.args == [long]
