"""`kubectl sluice plan` as a whole command: files in, text and exit code out. No cluster, no network."""

import itertools
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from sluice.api.v1alpha1 import AcceleratorProfileSpec, InferenceServiceSpec, Parallelism, Pool
from sluice.cli.catalogue import all_shipped, read_shipped, shipped
from sluice.cli.main import main
from sluice.cli.planfile import broken_rules
from sluice.cli.planobject import MAX_REPLICAS
from sluice.sizing.report import json_schema
from tests.unit.sizing.configs import DEEPSEEK_V3, LLAMA_8B, LLAMA_70B, LLAMA_70B_128K, Config, sized

Run = Callable[..., tuple[int, str, str]]
OURS = "apiVersion: serving.sluice.dev/v1alpha1\nkind: InferenceService"


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the command; (exit code, stdout, stderr)."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HF_HOME", "HF_HUB_CACHE", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main(["plan", *arguments])
        except SystemExit as end:  # argparse
            code = int(str(end.code))
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def a_directory(path: Path, config: Config, files: dict[str, bytes] | None = None, **extra: Any) -> Path:
    """A model's directory; `files`: names of weights to contents."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    for name, content in (files or {}).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    for name, content in extra.items():
        (path / f"{name}.safetensors.index.json").write_text(json.dumps(content))
    return path


def safetensors(**sizes: int) -> bytes:
    """The header of a file of weights, and not one weight."""
    header = {n.replace("__", "."): {"dtype": "BF16", "shape": [1], "data_offsets": [0, s]} for n, s in sizes.items()}
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw


def a_service(tmp_path: Path, *, pool: Config | None = None, more: list[Config] | None = None, **spec: Any) -> str:
    body = {
        "apiVersion": "serving.sluice.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "llama", "namespace": "chat"},
        "spec": {
            "model": {"uri": "pvc://models/llama"},
            "accelerator": {"profileRef": {"name": "h100-80g"}},
            "pools": [{"name": "main", **(pool or {})}],
            **spec,
        },
    }
    path = tmp_path / "svc.yaml"
    path.write_text(yaml.safe_dump_all([body, *(more or [])]))
    return str(path)


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return str(a_directory(tmp_path / "llama-70b", LLAMA_70B))


def test_table_has_ledger_layouts_and_reasons(plan: Run, llama: str) -> None:
    code, out, err = plan("--model", llama, "--accelerator", "h100-80g")
    assert (code, err) == (0, "")
    assert "room for KV     39.1   477,840 tokens" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["LAYOUT", "GPUS", "W/GPU", "KV/GPU", "CONC@8192", "TPOT@64", "TTFT@8192", "NOTE"] in lines
    assert any(line[:6] == ["*", "tensor=4", "4", "35.3", "39.1", "58.3"] for line in lines)
    assert any(line[:2] == ["tensor=2", "2"] and line[-1] == "LowKVRoom" for line in lines)
    assert "no safetensors headers or index: counted from config" in out


def test_json_is_the_document_and_the_same_each_time(plan: Run, llama: str) -> None:
    first, second = (plan("--model", llama, "--accelerator", "h100-80g", "-o", "json") for _ in range(2))
    assert first == second
    document = json.loads(first[1])
    jsonschema.validate(document, json_schema())
    assert document["chosen"]["parallelism"] == {"tensor": 4, "pipeline": 1, "data": 1, "expert": False}
    assert document["layouts"][0]["weightsPerGPU"] == document["layouts"][0]["ledger"]["weights"]


def test_yaml_is_an_object_that_the_api_takes(plan: Run, llama: str) -> None:
    code, out, _ = plan(
        "--model",
        llama,
        "--accelerator",
        "h100-80g",
        "-o",
        "yaml",
        "--rps",
        "4",
        "--input",
        "4096",
        "--output",
        "512",
        "--ttft-ms",
        "1500",
        "--tpot-ms",
        "40",
    )
    made = yaml.safe_load(out)
    spec = InferenceServiceSpec.model_validate(made["spec"])
    assert (code, made["metadata"]["name"]) == (0, "llama-70b")
    assert (spec.pools[0].parallelism.tensor, spec.pools[0].replicas) == (4, 3)
    assert spec.model.uri.startswith("pvc://") and out.startswith("# Planned for h100-80g")


def test_yaml_keeps_the_users_object_and_fills_the_pool(plan: Run, llama: str, tmp_path: Path) -> None:
    service = a_service(tmp_path, engine={"args": ["--max-num-seqs=64"]}, suspend=True)
    code, out, _ = plan("-f", service, "--model", llama, "-o", "yaml")
    made, before = yaml.safe_load(out), yaml.safe_load(Path(service).read_text())
    before["spec"]["pools"][0]["parallelism"] = {"tensor": 4}
    assert (code, made) == (0, before)
    InferenceServiceSpec.model_validate(made["spec"])


def test_yaml_is_not_made_when_only_several_nodes_fit(plan: Run, tmp_path: Path) -> None:
    model = str(a_directory(tmp_path / "v3", DEEPSEEK_V3))
    code, out, err = plan("--model", model, "--accelerator", "h100-80g", "-o", "yaml")
    assert (code, out) == (3, "")
    assert "takes 2 nodes per instance" in err


def test_the_layout_of_the_object_is_judged(plan: Run, tmp_path: Path) -> None:
    model = str(a_directory(tmp_path / "llama-70b", LLAMA_70B_128K))
    service = a_service(tmp_path, pool={"parallelism": {"tensor": 2}})
    code, out, err = plan("-f", service, "--model", model)
    assert code == 3
    assert err == (
        "error: does not fit: one request of 131072 tokens needs 21.5 GB KV per GPU, room is 3.9 GB (usable 78.3 = "
        "weights 70.6 + activations 2.6 + runtime 0.5 + graphs 0.7 + room); fits with tensor 4, or max-model-len "
        "23616\n"
    )
    assert "tensor=4" in out
    assert plan("-f", service, "--model", model, "--max-model-len", "8192")[0] == 0
    assert plan("-f", service, "--model", model, "--max-model-len", "8192", "--strict")[0] == 6


def test_arguments_of_the_object_count(plan: Run, llama: str, tmp_path: Path) -> None:
    own = a_service(tmp_path, pool={"engine": {"args": ["--max-model-len", "4096"]}})
    assert json.loads(plan("-f", own, "--model", llama, "-o", "json")[1])["context"] == 4096
    wrong = a_service(tmp_path, engine={"args": ["--gpu-memory-utilization=7"]})
    code, _, err = plan("-f", wrong, "--model", llama)
    assert code == 2 and "engine arguments: --gpu-memory-utilization: '7' is no fraction" in err


def test_a_profile_of_the_file_wins_over_the_catalogue(plan: Run, llama: str, tmp_path: Path) -> None:
    profile = {**(read_shipped("h100-80g") or {})}
    profile["spec"] = {**profile["spec"], "hardware": {"memory": "40Gi"}}
    service = a_service(tmp_path, more=[profile])
    document = json.loads(plan("-f", service, "--model", llama, "-o", "json")[1])
    assert document["accelerator"]["memoryBytes"] == 40 << 30
    other = tmp_path / "own.yaml"
    other.write_text(yaml.safe_dump({**profile, "metadata": {"name": "own"}}))
    assert (
        json.loads(plan("--model", llama, "--accelerator", str(other), "-o", "json")[1])["accelerator"]["name"] == "own"
    )


def test_the_default_profile_of_the_file_is_used(plan: Run, llama: str, tmp_path: Path) -> None:
    profile = {**(read_shipped("l40s") or {})}
    profile["spec"] = {**profile["spec"], "default": True}
    service = a_service(tmp_path, more=[profile], accelerator=None)
    assert json.loads(plan("-f", service, "--model", llama, "-o", "json")[1])["accelerator"]["name"] == "l40s"


# Facts of a model.


def document_of(plan: Run, model: str, *more: str) -> Config:
    code, out, err = plan("--model", model, "--accelerator", "h100-80g", "-o", "json", *more)
    assert code == 0, err
    found: Config = json.loads(out)
    return found


def test_headers_of_the_files_that_the_index_names_are_what_counts(plan: Run, tmp_path: Path) -> None:
    files = {
        "a.safetensors": safetensors(model__layers__0__x=16_000_000_000),
        "b.safetensors": safetensors(lm_head=100_000_000, model__layers__32__mtp=5_000_000_000),
        "consolidated.safetensors": safetensors(x=16_100_000_000),
        "original/c.safetensors": safetensors(x=16_100_000_000),
        "pytorch_model.bin": b"x",
    }
    index = {"metadata": {"total_size": 1}, "weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    model = document_of(plan, str(a_directory(tmp_path / "m", LLAMA_8B, files, model=index)))["model"]
    assert (model["weightBytes"], model["weightSource"]) == (16_100_000_000, "safetensors headers")


def test_an_index_without_its_files_gives_the_size(plan: Run, tmp_path: Path) -> None:
    index = {
        "metadata": {"total_size": 16_060_522_496},
        "weight_map": {"x": "gone.safetensors", "y": "../../etc/passwd"},
    }
    model = document_of(plan, str(a_directory(tmp_path / "m", LLAMA_8B, model=index)))["model"]
    assert (model["weightBytes"], model["weightSource"]) == (16_060_522_496, "safetensors index")


def test_one_file_needs_no_index(plan: Run, tmp_path: Path) -> None:
    files = {"model.safetensors": safetensors(a=16_060_522_496)}
    model = document_of(plan, str(a_directory(tmp_path / "m", LLAMA_8B, files)))["model"]
    assert model["weightSource"] == "safetensors headers"


@pytest.mark.parametrize("content", [b"", b"\xff" * 20, struct.pack("<Q", 5) + b"[1,2]", struct.pack("<Q", 1 << 60)])
def test_a_broken_file_of_weights_is_named(plan: Run, tmp_path: Path, content: bytes) -> None:
    model = a_directory(tmp_path / "m", LLAMA_8B, {"model.safetensors": content})
    code, _, err = plan("--model", str(model), "--accelerator", "h100-80g")
    assert code == 5 and "model.safetensors" in err


def test_a_model_of_the_hub_is_found_in_the_local_cache(
    plan: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hf" / "hub" / "models--org--llama"
    a_directory(folder / "snapshots" / "abc123", LLAMA_70B)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc123")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for uri in ("hf://org/llama", "hf://org/llama@abc123"):
        assert document_of(plan, uri)["model"]["parameters"] == sized(LLAMA_70B).weights.parameters
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    assert document_of(plan, "hf://org/llama", "--revision", "abc123")["layouts"]


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("pvc://models/llama", "pass --model DIR with the model's files, or --config FILE"),
        ("s3://bucket/llama", "can't be read from here"),
        ("hf://llama", "write hf://OWNER/NAME"),
        ("nowhere/at/all", "is no directory"),
        (".", "config.json not found at ."),
    ],
)
def test_facts_that_are_missing_say_what_to_pass(
    plan: Run, uri: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = plan("--model", uri, "--accelerator", "h100-80g")
    assert (code, out) == (5, "")
    assert err.startswith("error: facts missing: ") and says in err


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model_type": "llama"}', "[" * 100_000, '{"a": ' * 50_000])
def test_a_config_that_can_not_be_used_is_named(plan: Run, tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    code, _, err = plan("--config", str(path), "--accelerator", "h100-80g")
    assert code == 5 and str(path) in err


def test_an_unknown_architecture_has_weights_and_asks_for_the_cache(plan: Run, tmp_path: Path) -> None:
    config = {**LLAMA_70B, "model_type": "new", "architectures": ["NewThing"]}
    index = {"metadata": {"total_size": 141_000_000_000}}
    model = str(a_directory(tmp_path / "m", config, model=index))
    code, out, err = plan("--model", model, "--accelerator", "h100-80g")
    assert code == 5 and 'unknown architecture "NewThing"' in err and "--kv-bytes-per-token" in err
    assert "70.5" in out  # weights on each of two GPUs
    assert plan("--model", model, "--accelerator", "h100-80g", "--kv-bytes-per-token", "327680")[0] == 0


# Accelerators and goals.


def test_every_profile_of_the_catalogue_is_strictly_valid() -> None:
    assert len(shipped()) == len(list(all_shipped())) == 14
    for name in shipped():
        profile = read_shipped(name)
        assert profile is not None and profile["metadata"]["name"] == name
        assert AcceleratorProfileSpec.model_validate(profile["spec"]).hardware


def test_memory_alone_gives_a_ledger_without_times(plan: Run, llama: str) -> None:
    code, out, _ = plan("--model", llama, "--accelerator", "80Gi", "-o", "json")
    best = json.loads(out)["layouts"][0]
    assert code == 0 and best["ledger"]["kv"] > 0 and best["decodeStepMs"] is None and best["ttftMs"] is None
    code, _, err = plan("--model", llama, "--accelerator", "80Gi", "--ttft-ms", "100")
    assert code == 5 and "times can't be estimated" in err


def test_a_goal_out_of_reach_has_its_own_code(plan: Run, llama: str) -> None:
    code, out, err = plan("--model", llama, "--accelerator", "h100-80g", "--tpot-ms", "2")
    assert code == 4 and "TPOTBandwidth" in err
    assert "not reached: TPOTBandwidth" in out and "helps: " in out


def test_it_does_not_fit_anywhere(plan: Run, tmp_path: Path) -> None:
    model = str(a_directory(tmp_path / "m", {**DEEPSEEK_V3, "num_hidden_layers": 900}))
    code, _, err = plan("--model", model, "--accelerator", "rtx4090")
    assert code == 3 and "no layout of up to" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name what to plan"),
        (["--model", "x", "--config", "y"], "give one"),
        (["--model", "x", "--pool", "p"], "--pool is a pool of the object in -f"),
        (["--model", "x", "--rps", "-1"], "is no number over 0"),
        (["--model", "x", "--output", "json"], "the format is -o json"),
        (["--model", "x", "--input", "0"], "is no whole number from 1"),
        (["--model", "x", "--prefix-hit", "100"], "is no percentage"),
        (["--model", "x", "--input", "100", "--input-p95", "50"], "less than the mean"),
    ],
)
def test_wrong_usage(plan: Run, arguments: list[str], says: str) -> None:
    code, _, err = plan(*arguments)
    assert code == 2 and says in err


def test_an_accelerator_has_to_be_named(plan: Run, llama: str) -> None:
    code, _, err = plan("--model", llama)
    assert code == 2 and "name the accelerator" in err and "h100-80g" in err
    code, _, err = plan("--model", llama, "--accelerator", "h9000")
    assert code == 2 and "'h9000': no such profile; known are a10" in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kind: Pod", "holds no InferenceService"),
        ("kind: InferenceService", "of serving.sluice.dev/v1alpha1; the one there has no apiVersion"),
        (f"{OURS}\nspec: {{pools: []}}", "spec.model"),
        (f"{OURS}\nspec: 7", "spec.model"),
        ("{", "can't be read as YAML"),
        ("a: 2024-13-45", "month must be in 1..12"),
        ("a: " + "1" * 5000, "can't be read as YAML"),
        ("a: !!int foo", "can't be read as YAML"),
        ("a: !!bool foo", "can't be read as YAML"),
        ("a: !!timestamp x", "can't be read as YAML"),
        ("[" * 20_000, "nested too deeply"),
        (f"{OURS}\nspec: {{model: {{uri: 'pvc://a/b'}}, pools: [{{replicas: 0x{'f' * 9000}}}]}}", "error: "),
    ],
)
def test_a_file_that_can_not_be_used(plan: Run, tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "svc.yaml"
    path.write_text(text)
    code, _, err = plan("-f", str(path))
    assert code == 2 and says in err
    assert plan("--model", "x", "--accelerator", str(path))[0] in (2, 5)


@pytest.mark.parametrize("name", ["none.yaml", ".", "a" * 5000, "a\0b"])
def test_a_name_of_no_file_is_wrong_usage(plan: Run, llama: str, name: str) -> None:
    assert plan("-f", name)[0] == 2
    assert plan("--model", llama, "--accelerator", name + ".yaml")[0] == 2


@pytest.mark.parametrize("name", ["~nobody-here/x", "a" * 5000, "a\0b", "file://", "file://~nobody-here"])
def test_a_name_of_no_model_is_a_missing_fact(plan: Run, name: str) -> None:
    for option in ("--model", "--config"):
        code, out, err = plan(option, name, "--accelerator", "80Gi")
        assert (code, out) == (5, "") and err.startswith("error: facts missing: ")


def test_odd_names_of_files_in_an_index_are_not_opened(plan: Run, tmp_path: Path) -> None:
    names = {"a": "x" * 5000, "b": "a\0b", "c": "\ud800", "d": "..", "e": 7}
    index = {"metadata": {"total_size": 16_060_522_496}, "weight_map": names}
    model = document_of(plan, str(a_directory(tmp_path / "m", LLAMA_8B, model=index)))["model"]
    assert model["weightSource"] == "safetensors index"


def test_sizes_of_files_beyond_all_measure_are_not_believed(plan: Run, tmp_path: Path) -> None:
    index = {"metadata": {"total_size": 10**4000}}
    assert document_of(plan, str(a_directory(tmp_path / "m", LLAMA_8B, model=index)))["model"]["weightBytes"] < 10**12
    model = a_directory(tmp_path / "n", LLAMA_8B, {"model.safetensors": safetensors(a=10**4000)})
    code, _, err = plan("--model", str(model), "--accelerator", "80Gi")
    assert code == 5 and "data_offsets" in err


@pytest.mark.parametrize("evil", ["\x1b]0;pwned\x07", "\x9b2J", "\u202egnp", "a\nb", "\ud800"])
@pytest.mark.parametrize("form", ["table", "json", "yaml"])
def test_names_in_a_config_do_not_drive_the_terminal(plan: Run, tmp_path: Path, evil: str, form: str) -> None:
    config = {"model_type": "new", "architectures": [evil], "hidden_size": 64, "quantization_config": {"bits": 4}}
    config["quantization_config"]["quant_method"] = evil
    index = {"metadata": {"total_size": 10**9}}
    models = [
        a_directory(tmp_path / "a", config, model=index),
        a_directory(tmp_path / "b", config),
        a_directory(tmp_path / "c", {**LLAMA_8B, **config, "model_type": "llama", "layer_types": [evil]}, model=index),
    ]
    for model in models:
        for more in ((), ("--kv-bytes-per-token", "10")):
            _, out, err = plan("--model", str(model), "--accelerator", "80Gi", "-o", form, *more)
            assert all(c.isprintable() or c == "\n" for c in out + err)
            assert "a\nb" not in out + err


# The object among others, and the rules of the API.


def test_kinds_of_other_projects_are_passed_over(plan: Run, llama: str, tmp_path: Path) -> None:
    kserve = {"apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService", "spec": {"predictor": {}}}
    path = Path(a_service(tmp_path))
    path.write_text(f"{yaml.safe_dump(kserve)}---\n{path.read_text()}")
    assert plan("-f", str(path), "--model", llama)[0] == 0
    path.write_text(yaml.safe_dump(kserve))
    code, _, err = plan("-f", str(path), "--model", llama)
    assert code == 2 and "the one there has apiVersion serving.kserve.io/v1beta1" in err


def test_objects_in_a_list_count(plan: Run, llama: str, tmp_path: Path) -> None:
    """`kubectl get infsvc,acceleratorprofiles -o yaml` writes one."""
    profile = {**(read_shipped("l40s") or {}), "metadata": {"name": "own"}}
    path = Path(a_service(tmp_path, accelerator={"profileRef": {"name": "own"}}, more=[profile]))
    items = list(yaml.safe_load_all(path.read_text()))
    path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [7, *items]}))
    code, out, _ = plan("-f", str(path), "--model", llama, "-o", "json")
    assert code == 0 and json.loads(out)["accelerator"]["name"] == "own"


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ({"data": 2, "tensor": 4}, "spec.pools[1].parallelism.data: 2 without expert"),
        ({"pipeline": 8, "expert": True}, "spec.pools[1].parallelism.expert: true spreads the experts over tensor x"),
        (
            {"tensor": 8, "pipeline": 16},
            "spec.pools[1].parallelism: tensor 8 x pipeline 16 x data 1 are 128 accelerators, and an instance is one "
            "pod with at most 64; lower one of them, or raise replicas",
        ),
    ],
)
def test_a_layout_that_the_api_refuses_is_wrong_usage(
    plan: Run, llama: str, tmp_path: Path, layout: Config, says: str
) -> None:
    service = a_service(tmp_path, pools=[{"name": "a"}, {"name": "b", "parallelism": layout}])
    for form in ("table", "yaml"):
        code, out, err = plan("-f", service, "--model", llama, "-o", form)
        assert (code, out) == (2, "") and says in err


def test_rules_of_layouts_are_those_of_the_crd() -> None:
    extra = Parallelism.model_config["json_schema_extra"]
    assert isinstance(extra, dict)
    found: Any = extra["x-kubernetes-validations"]
    rules = [(r["rule"], r.get("fieldPath", "")) for r in found]
    for sizes in itertools.product((1, 2, 8, 64), (1, 2, 64), (1, 2, 8), (False, True)):
        layout = Parallelism(**dict(zip(("tensor", "pipeline", "data", "expert"), sizes, strict=True)))
        broken = {field for rule, field in rules if not evaluate(rule, layout)}
        assert {field for field, _ in broken_rules(layout)} == broken


def evaluate(rule: str, layout: Parallelism) -> bool:
    """These rules of CEL are Python but for the names of its operators."""
    return bool(eval(rule.replace("||", " or ").replace("!", " not "), {}, {"self": layout}))


# The object to apply.


def test_made_object_has_the_engine_that_was_planned_for(plan: Run, llama: str) -> None:
    told = ("--model", llama, "--accelerator", "h100-80g", "--max-model-len", "4096", "-o", "yaml")
    for engine, flag in (("vLLM", "--max-model-len=4096"), ("SGLang", "--context-length=4096")):
        code, out, _ = plan(*told, "--engine", engine)
        assert code == 0 and yaml.safe_load(out)["spec"]["engine"] == {"type": engine, "args": [flag]}


@pytest.mark.parametrize(
    ("engine", "own", "made"),
    [
        ("vLLM", ["--max_model_len", "9", "--max-num-seqs=64"], ["--max-num-seqs=64", "--max-model-len=4096"]),
        ("SGLang", ["--context-length=9"], ["--context-length=4096"]),
        ("Simulated", [], ["--max-model-len=4096"]),
    ],
)
def test_users_object_gets_the_context_that_was_planned(
    plan: Run, llama: str, tmp_path: Path, engine: str, own: list[str], made: list[str]
) -> None:
    service = a_service(tmp_path, pool={"engine": {"args": own, "env": []}}, engine={"type": engine})
    code, out, err = plan("-f", service, "--model", llama, "--max-model-len", "4096", "-o", "yaml")
    assert code == 0, err
    assert yaml.safe_load(out)["spec"]["pools"][0]["engine"] == {"args": made, "env": []}


def test_what_the_object_can_not_say_stands_in_a_comment(plan: Run, llama: str, tmp_path: Path) -> None:
    engine = {"type": "Custom", "image": "x", "custom": {"command": ["x"]}}
    told = ("--model", llama, "--accelerator", "80Gi", "--max-model-len", "4096", "--kv-bytes-per-token", "9")
    code, out, err = plan("-f", a_service(tmp_path, engine=engine), *told, "-o", "yaml")
    made = yaml.safe_load(out)["spec"]
    assert code == 0, err
    assert made["accelerator"] == {"profileRef": {"name": "h100-80g"}} and made["engine"] == engine
    comments = [line for line in out.splitlines() if line.startswith("# ")]
    for words in ("with 80Gi of memory", "4096 tokens (--max-model-len)", "9 bytes per token", f"those of {llama}"):
        assert any(words in line for line in comments), words


def test_users_object_gets_the_accelerator_that_was_planned(plan: Run, llama: str, tmp_path: Path) -> None:
    b200, h100 = ({"profileRef": {"name": name}} for name in ("b200", "h100-80g"))
    told = ("--model", llama, "--accelerator", "b200", "-o", "yaml")
    one = yaml.safe_load(plan("-f", a_service(tmp_path), *told)[1])["spec"]
    assert one["accelerator"] == b200 and "accelerator" not in one["pools"][0]
    own = yaml.safe_load(plan("-f", a_service(tmp_path, pool={"accelerator": h100}), *told)[1])["spec"]
    assert (own["accelerator"], own["pools"][0]["accelerator"]) == (h100, b200)
    two = yaml.safe_load(plan("-f", a_service(tmp_path, pools=[{"name": "a"}, {"name": "b"}]), *told)[1])["spec"]
    assert (two["accelerator"], two["pools"][0]["accelerator"], two["pools"][1]) == (h100, b200, {"name": "b"})
    resource = a_service(tmp_path, accelerator={"resourceName": "nvidia.com/gpu"})
    assert yaml.safe_load(plan("-f", resource, *told)[1])["spec"]["accelerator"] == b200


def test_made_object_without_a_profile_says_so(plan: Run, llama: str) -> None:
    _, out, _ = plan("--model", llama, "--accelerator", "80Gi", "-o", "yaml")
    assert "accelerator" not in yaml.safe_load(out)["spec"]
    assert "# Set spec.accelerator.profileRef to a profile of accelerators with 80Gi of memory" in out


def test_names_of_profiles_may_start_with_a_digit_but_not_be_anything(plan: Run, llama: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    profile = read_shipped("h100-80g") or {}
    path.write_text(yaml.safe_dump({**profile, "metadata": {"name": "8xh100"}}))
    _, out, _ = plan("--model", llama, "--accelerator", str(path), "-o", "yaml")
    assert yaml.safe_load(out)["spec"]["accelerator"] == {"profileRef": {"name": "8xh100"}}
    path.write_text(yaml.safe_dump({**profile, "metadata": {"name": "\x1b[2J"}}))
    code, _, err = plan("--model", llama, "--accelerator", str(path))
    assert code == 2 and "metadata.name: '\\x1b[2j' is no name".lower() in err.lower()


def test_object_from_a_cluster_can_be_applied(plan: Run, llama: str, tmp_path: Path) -> None:
    path = Path(a_service(tmp_path))
    body = yaml.safe_load(path.read_text())
    own = {**body["metadata"], "labels": {"team": "a"}}
    server = {"managedFields": [{}], "resourceVersion": "1", "uid": "u", "generation": 3, "creationTimestamp": "x"}
    applied = {"kubectl.kubernetes.io/last-applied-configuration": "{}"}
    path.write_text(yaml.safe_dump({**body, "metadata": {**own, **server, "annotations": applied}, "status": {}}))
    code, out, err = plan("-f", str(path), "--model", llama, "-o", "yaml")
    assert code == 0, err
    made = yaml.safe_load(out)
    assert made["metadata"] == own and set(made) == {"apiVersion", "kind", "metadata", "spec"}


def test_more_replicas_than_the_api_takes_are_refused(plan: Run, llama: str) -> None:
    code, out, err = plan("--model", llama, "--accelerator", "h100-80g", "--rps", "1e6", "-o", "yaml")
    assert (code, out) == (3, "")
    assert "pool default: replicas: the load needs" in err and "a pool has at most 1000" in err
    Pool(replicas=MAX_REPLICAS)
    with pytest.raises(ValueError, match="less than or equal"):
        Pool(replicas=MAX_REPLICAS + 1)


def test_what_is_taken_for_granted_is_told(plan: Run, llama: str, tmp_path: Path) -> None:
    service = a_service(tmp_path, pools=[{"name": "a"}, {"name": "b"}], engine={"type": "Simulated"})
    said = json.loads(plan("-f", service, "--model", llama, "-o", "json")[1])["assumptions"]
    assert said[:2] == ["engine Simulated: sized as vLLM would be", "pool a only; for the others: --pool b"]


def test_no_client_of_the_cluster_is_loaded(llama: str) -> None:
    script = (
        "import sys; from sluice.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(code or any(name in sys.modules for name in ('kubernetes', 'aiohttp', 'torch', 'transformers')))"
    )
    command = [sys.executable, "-c", script, "plan", "--model", llama, "--accelerator", "h100-80g"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_pool_is_chosen_by_name(plan: Run, llama: str, tmp_path: Path) -> None:
    service = a_service(tmp_path, pools=[{"name": "a"}, {"name": "b", "parallelism": {"tensor": 8}}])
    assert json.loads(plan("-f", service, "--model", llama, "--pool", "b", "-o", "json")[1])["chosen"]["isWanted"]
    code, _, err = plan("-f", service, "--model", llama, "--pool", "c")
    assert code == 2 and "no pool 'c'; there are a, b" in err
