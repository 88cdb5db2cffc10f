"""Where the command line finds its cluster, and how the cluster's refusals read."""

from pathlib import Path

import pytest
import yaml

from sluice.cli.access import MissingError, RefusedError, UnreachableError, explain_error, find_place
from sluice.runtime.errors import Forbidden, KubeError, NotFound, Throttled, Unauthorized, Unavailable

HOST = "https://k8s.example"


def a_kubeconfig(path: Path, *, namespace: str = "chat") -> Path:
    context = {"cluster": "c", "user": "u"} | ({"namespace": namespace} if namespace else {})
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "one",
        "clusters": [{"name": "c", "cluster": {"server": HOST}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [
            {"name": "one", "context": context},
            {"name": "two", "context": {"cluster": "c", "user": "u", "namespace": "other"}},
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config))
    return path


def test_flag_wins_over_variable_and_variable_over_home(tmp_path: Path) -> None:
    home = a_kubeconfig(tmp_path / ".kube" / "config", namespace="home")
    variable = a_kubeconfig(tmp_path / "variable", namespace="variable")
    flag = a_kubeconfig(tmp_path / "flag", namespace="flag")
    environment = {"HOME": str(tmp_path)}
    assert find_place(None, None, None, environment).kubeconfig == home
    environment["KUBECONFIG"] = str(variable)
    assert find_place(None, None, None, environment).namespace == "variable"
    assert find_place(str(flag), None, None, environment).namespace == "flag"


def test_namespace_is_the_contexts_unless_given(tmp_path: Path) -> None:
    file = str(a_kubeconfig(tmp_path / "k"))
    assert find_place(file, None, None, {}).namespace == "chat"
    assert find_place(file, "two", None, {}).namespace == "other"
    assert find_place(file, None, "mine", {}).namespace == "mine"
    assert find_place(str(a_kubeconfig(tmp_path / "bare", namespace="")), None, None, {}).namespace == "default"


def test_several_files_in_the_variable_are_merged(tmp_path: Path) -> None:
    file = a_kubeconfig(tmp_path / "k")
    place = find_place(None, "two", None, {"KUBECONFIG": f"{tmp_path / 'absent'}:{file}"})
    assert place.namespace == "other"


def test_without_any_kubeconfig_a_pod_uses_its_service_account(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    place = find_place(None, None, "chat", environment)
    assert (place.kubeconfig, place.namespace) == (None, "chat")


@pytest.mark.parametrize("content", ["", "[]", "{", "a: b", "contexts: 5\ncurrent-context: x"])
def test_unusable_kubeconfig_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "broken"
    file.write_text(content)
    with pytest.raises(UnreachableError, match="broken"):
        find_place(str(file), None, None, {})


def test_unknown_context_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="no context 'three'; it has: one, two"):
        find_place(str(a_kubeconfig(tmp_path / "k")), "three", None, {})


def test_missing_kubeconfig_says_how_to_name_one(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="--kubeconfig"):
        find_place(None, None, None, {"HOME": str(tmp_path)})


@pytest.mark.parametrize(
    ("kind", "status", "expected", "says"),
    [
        (Unauthorized, 401, UnreachableError, "log in again"),
        (Unavailable, 0, UnreachableError, f"can't reach {HOST}"),
        (Unavailable, 503, UnreachableError, "failed on patch pods chat/p"),
        (Forbidden, 403, RefusedError, "you may not patch pods chat/p"),
        (Throttled, 429, RefusedError, "try again"),
        (NotFound, 404, MissingError, "pods chat/p is gone"),
    ],
)
def test_refusals_name_verb_object_and_what_to_do(
    kind: type[KubeError], status: int, expected: type[Exception], says: str
) -> None:
    error = explain_error(kind("patch", "pods", "chat/p", status, "Because", "the server's words"), HOST)
    assert type(error) is expected
    assert says in str(error)
