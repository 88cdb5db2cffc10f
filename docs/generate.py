"""Tables of `docs/reference.md`, made from the code: `python -m docs.generate [--check]` from the repository's root.

Meanings stand beside what they explain (attribute docstrings in `sluice.api`, help texts of metrics); this module only
collects them. A reason, label, port or field without a meaning, and a metric that the samples below do not cover, is
an error here, so nothing can be added without a line in the reference. The output depends on nothing but the code.
"""

import argparse
import ast
import asyncio
import inspect
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from annotated_types import Ge, Le
from prometheus_client import disable_created_metrics
from prometheus_client.core import Metric
from pydantic import BaseModel

from sluice.agent.report import StateCollector as AgentCollector
from sluice.api import conditions, names
from sluice.api.agent import AgentState, EnginePhase, SelfTest
from sluice.api.config import OperatorConfig
from sluice.api.router import SidecarConfig, WorkerList, WorkerStatus
from sluice.plan.engines.adapter import ENGINE_PORT
from sluice.router.files import HeldList, RunDir
from sluice.router.server import SidecarCollector
from sluice.router.sidecar import Sidecar
from sluice.router.smg import Smg
from sluice.router.worklist import Reach, SmgView, SmgWorker
from sluice.runtime.events import Object, Recorder
from sluice.runtime.kinds import Kind
from sluice.runtime.metrics import Metrics, StateCollector
from sluice.runtime.queue import Queue
from sluice.runtime.store import Store

TARGET: Final = Path(__file__).with_name("reference.md")
HEAD: Final = """<!-- Made from the code by `python -m docs.generate`; do not edit. -->
# Reference

What every object, page and log of Sluice spells the same way. Fields of the kinds: `kubectl explain infsvc.spec`.
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A documented constant."""

    name: str
    value: str
    meaning: str
    group: str
    """The comment line above it or above one of its elder siblings; "" before the first one."""


def entries(source: str, class_name: str | None = None) -> list[Entry]:
    """The constants of a module's source, or of one of its classes, that have a docstring or stand in the class.

    Raises:
        ValueError: a member of the class has no docstring.
    """
    body: Sequence[ast.stmt] = ast.parse(source).body
    last_line = 1
    if class_name is not None:
        owner = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == class_name)
        body, last_line = owner.body, owner.lineno
    lines = source.splitlines()
    found = []
    group = ""
    for node, following in zip(body, [*body[1:], None], strict=True):
        name = _assigned(node)
        if name is None:
            continue
        comments = [line.strip() for line in lines[last_line - 1 : node.lineno - 1] if line.lstrip().startswith("# ")]
        group, last_line = (comments[-1].removeprefix("# ") if comments else group), node.lineno
        meaning = _docstring(following)
        if meaning is not None:
            found.append(Entry(name, name, meaning, group))
        elif class_name is not None:
            raise ValueError(f"{class_name}.{name} has no meaning: write one as a docstring below it")
    return found


def _assigned(node: ast.stmt) -> str | None:
    target = (
        node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
    )
    return target.id if isinstance(target, ast.Name) else None


def _docstring(node: ast.stmt | None) -> str | None:
    if (
        not isinstance(node, ast.Expr)
        or not isinstance(node.value, ast.Constant)
        or not isinstance(node.value.value, str)
    ):
        return None
    return " ".join(node.value.value.split())


def members(module: ModuleType, class_name: str) -> list[Entry]:
    """Members of an enum with their meanings, in the order of the source."""
    kind: Any = getattr(module, class_name)
    found = entries(inspect.getsource(module), class_name)
    return [Entry(e.name, str(kind[e.name]), e.meaning, e.group) for e in found]


def constants(prefix: str) -> list[Entry]:
    """Constants of `sluice.api.names` that start with the prefix.

    Raises:
        ValueError: one of them has no docstring.
    """
    known = {e.name: e for e in entries(inspect.getsource(names))}
    wanted = [name for name in vars(names) if name.startswith(prefix)]
    missing = [name for name in wanted if name not in known]
    if missing:
        raise ValueError(f"sluice.api.names.{missing[0]} has no meaning: write one as a docstring below it")
    return [Entry(n, str(getattr(names, n)), known[n].meaning, known[n].group) for n in wanted]


def fields(model: BaseModel, path: str = "") -> Iterator[tuple[str, str, str]]:
    """(path, default, meaning) of every field of a configuration, defaults as the instance has them.

    Raises:
        ValueError: a field has no docstring.
    """
    for name, field in type(model).model_fields.items():
        where, value = f"{path}{field.alias}", getattr(model, name)
        if isinstance(value, BaseModel):
            yield from fields(value, f"{where}.")
            continue
        if not field.description:
            raise ValueError(f"{type(model).__name__}.{name} has no meaning: write one as a docstring below it")
        low = [m.ge for m in field.metadata if isinstance(m, Ge)]
        high = [m.le for m in field.metadata if isinstance(m, Le)]
        bounds = f"; {low[0]}–{high[0]}" if low and high else f"; at least {low[0]}" if low else ""
        default = "empty" if value in ((), "") else code(str(value))
        yield where, default, " ".join(field.description.split()).removesuffix(".") + bounds


# ---- metrics: each page is asked once, in a state in which every metric has a sample ------------------------------


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    """As Prometheus shows it."""
    type: str
    labels: tuple[str, ...]
    meaning: str


def series(families: Iterable[Metric]) -> list[Series]:
    """
    Raises:
        ValueError: a metric has no sample, so its labels are unknown.
    """
    found = []
    for family in families:
        if not family.samples:
            raise ValueError(f"metric {family.name} has no sample: give it one in docs/generate.py")
        labels = {label: None for sample in family.samples for label in sample.labels if label != "le"}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found.append(Series(name, family.type, tuple(labels), family.documentation.rstrip(".")))
    return found


class _Nowhere:
    """The Recorder's client; no Event is written here."""

    async def create(self, kind: Kind, body: Mapping[str, Any]) -> Object:
        raise AssertionError(f"{kind.name} {body}")

    async def patch(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> Object:
        raise AssertionError(f"{kind.name} {namespace}/{name} {patch}")


def operator_metrics() -> list[Series]:
    metrics, store = Metrics(), Store()
    metrics.reconciled(names.SERVICE_KIND, "success", 0.1)
    metrics.watched("Pod", "ADDED")
    metrics.requested("get", "pods", 200, 0.1)
    metrics.acted("Create", "Done")
    metrics.polled("agent", ok=True)
    meta = {"namespace": "default", "name": "demo", "uid": "1", "resourceVersion": "1", "generation": 1}
    status = {
        "observedGeneration": 1,
        "conditions": [{"type": "Ready", "status": "True"}],
        "pools": [{"desired": 1, "serving": 1}],
    }
    store.apply(None, {"kind": names.SERVICE_KIND, "metadata": meta, "spec": {}, "status": status})
    recorder = Recorder(_Nowhere(), reporter="docs")
    metrics.show(StateCollector(Queue(), store, recorder, lambda: {"Pod": 1.0}))
    return series(metrics.registry.collect())


def agent_metrics() -> list[Series]:
    state = AgentState(
        seq=1,
        instance="demo",
        engine="vLLM",
        phase=EnginePhase.READY,
        phase_since=0,
        started_at=0,
        self_test=SelfTest(passed=True, latency_ms=1),
        in_flight=0,
        running=0,
        waiting=0,
        kv_utilization=0,
    )
    return series(AgentCollector(lambda: state).collect())


async def sidecar_metrics() -> list[Series]:
    with tempfile.TemporaryDirectory() as directory:
        smg = Smg("http://127.0.0.1:1", "http://127.0.0.1:1", "")
        sidecar = Sidecar(
            SidecarConfig(service="default/demo", operator_subject=""), RunDir(Path(directory)), smg, own_ip=None
        )
        sidecar.held = HeldList(wanted=WorkerList(generation="1"), received_at=0)
        sidecar.view = SmgView(Reach.ANSWERED, (SmgWorker("demo", "http://127.0.0.1:1", WorkerStatus.READY),))
        found = series(SidecarCollector(sidecar, Counter({200: 1})).collect())
        await sidecar.close()
        await smg.close()
    return found


# ---- the page ----------------------------------------------------------------------------------------------------


def code(text: str) -> str:
    return f"`{text}`"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _conditions() -> str:
    text = "## Conditions\n\nOf an InferenceService, in `status.conditions`. How to read them: "
    text += "[operations](operations.md#reading-status).\n\n"
    types = members(conditions, "ConditionType")
    return text + table(("type", "meaning"), [(code(e.value), e.meaning) for e in types])


def _reasons() -> str:
    text = (
        "## Reasons\n\nOne word per cause, the same in conditions, `status.problems`, Events, logs and the annotation "
    )
    text += f"`{names.ANNOTATION_DRAIN_REASON}`. A finished rollout is an Event of reason `RolloutComplete`.\n"
    for group, some in groupby(members(conditions, "Reason"), key=lambda e: e.group):
        text += f"\n### {group}\n\n" + table(("reason", "meaning"), [(code(e.value), e.meaning) for e in some])
    return text


def _names() -> str:
    pod = "Labels of engine pods; router pods and all other objects of a service have the first five.\n\n"
    labels = table(("label", "value"), [(code(e.value), e.meaning) for e in constants("LABEL_")])
    marks = [*constants("ANNOTATION_"), *constants("READINESS_GATE")]
    marks_table = table(("annotation or readiness gate", "meaning"), [(code(e.value), e.meaning) for e in marks])
    engine = (
        code(str(ENGINE_PORT)),
        "Engine in an engine pod: OpenAI API, for the service's routers and the agent only.",
    )
    ports = [engine, *((code(e.value), e.meaning) for e in constants("PORT_"))]
    return (
        f"## Labels\n\n{pod}{labels}\n## Annotations\n\n{marks_table}\n"
        f"## Ports\n\n{table(('port', 'who answers, and what'), ports)}"
    )


def _configuration() -> str:
    text = (
        "## Operator configuration\n\nOne YAML file, read at start (`sluice-operator --config`). Unknown fields are an "
        "error. The chart writes it from its values `config.*` and `namespaces`; `leaseNamespace`, `routerTokenFile` "
        "and `operatorSubject` follow from where it is installed. Images and default arguments count for new revisions "
        "only.\n\n"
    )
    return text + table(("field", "default", "meaning"), [(code(w), d, m) for w, d, m in fields(OperatorConfig())])


def _metrics(title: str, where: str, found: Iterable[Series]) -> str:
    rows = [(code(s.name), s.type, ", ".join(map(code, s.labels)), s.meaning) for s in found]
    return f"### {title}\n\n{where}\n\n" + table(("metric", "type", "labels", "meaning"), rows)


def reference() -> str:
    """The whole page."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # as the operator does; prometheus_client leaves it untyped
    operator = _metrics(
        "Operator",
        f"Port {names.PORT_OPERATOR}. A standby has the process's own metrics only. Series of a service end with it.",
        operator_metrics(),
    )
    agent = _metrics(
        "Agent", f"Port {names.PORT_AGENT} of engine pods. A number that is unknown has no sample.", agent_metrics()
    )
    sidecar = _metrics(
        "Router sidecar",
        f"Port {names.PORT_SIDECAR} of router pods. smg's own metrics are on port "
        f"{names.PORT_ROUTER_METRICS}; the engine's are on port {ENGINE_PORT} of engine pods, which the NetworkPolicy "
        "opens to routers only.",
        asyncio.run(sidecar_metrics()),
    )
    parts = [HEAD, _conditions(), _reasons(), _names(), _configuration(), f"## Metrics\n\n{operator}", agent, sidecar]
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file differs")
    options = parser.parse_args()
    made = reference()
    if not options.check:
        TARGET.write_text(made)
    elif not TARGET.exists() or TARGET.read_text() != made:
        print(f"{TARGET}: differs from the code; run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
