"""Which workers smg's manifest lists and what is said about them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.api.agent import AgentState, EnginePhase
from sluice.api.router import Worker, WorkerList, WorkerStatus
from sluice.router.worklist import (
    DataPath,
    Entry,
    Reach,
    SmgView,
    SmgWorker,
    parse,
    plan_manifest,
    refuse_list,
    render,
    report_workers,
    speaks_against,
)

EMPTY = SmgView(Reach.ANSWERED)


def a_worker(name: str = "a", *, ip: str = "10.0.0.1", engine_id: str = "run-1") -> Worker:
    return Worker(id=name, url=f"http://{ip}:8000", agent_url=f"http://{ip}:9900", engine_id=engine_id, model="m")


def a_list(*workers: Worker) -> WorkerList:
    return WorkerList(generation="g", workers=list(workers))


def an_agent(name: str = "a", *, phase: EnginePhase = EnginePhase.READY, engine_id: str | None = "run-1") -> AgentState:
    return AgentState(
        seq=1, instance=name, engine="vLLM", engine_id=engine_id, phase=phase, phase_since=0.0, started_at=0.0
    )


def in_smg(worker: Worker, status: WorkerStatus = WorkerStatus.READY, *, name: str | None = None) -> SmgView:
    return SmgView(Reach.ANSWERED, (SmgWorker(name or worker.id, worker.url, status),))


def listed(*workers: Worker) -> tuple[Entry, ...]:
    return tuple(Entry(w.id, w.url, w.model) for w in workers)


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        (None, None),
        (an_agent(), None),
        (an_agent(phase=EnginePhase.SUSPECT), "Suspect"),
        (an_agent(phase=EnginePhase.HUNG), "Hung"),
        (an_agent(phase=EnginePhase.DRAINING), "Draining"),
        (an_agent(engine_id="run-2"), "AnotherEngineRun"),
        (an_agent(engine_id=None, phase=EnginePhase.LOADING), "AnotherEngineRun"),
        (an_agent("b"), "AnotherInstance"),
    ],
)
def test_s060_only_an_agent_that_speaks_against_its_worker_takes_it_away(
    agent: AgentState | None, reason: str | None
) -> None:
    worker = a_worker()
    found = speaks_against(worker, agent)
    assert (found or "").startswith(reason or "")
    assert (found is None) == (reason is None)
    agents = {worker.agent_url: agent} if agent else {}
    manifest = plan_manifest(a_list(worker), agents, in_smg(worker), listed(worker))
    assert manifest.entries == (() if reason else listed(worker))
    assert manifest.withheld == (frozenset({"a"}) if reason else frozenset())


def test_s064_wanted_workers_are_listed_when_smg_is_down_because_it_will_read_the_file() -> None:
    worker = a_worker()
    assert plan_manifest(a_list(worker), {}, SmgView(Reach.DOWN), ()).entries == listed(worker)


def test_nothing_is_added_while_smg_does_not_say_what_it_has_but_what_stands_stays() -> None:
    old, new = a_worker("a"), a_worker("b", ip="10.0.0.2")
    manifest = plan_manifest(a_list(old, new), {}, SmgView(Reach.UNKNOWN), listed(old))
    assert manifest.entries == listed(old)
    assert "SmgUnknown" in manifest.left_out["b"]


def test_removed_worker_comes_back_only_when_smg_has_dropped_it() -> None:
    worker = a_worker()
    leaving = plan_manifest(a_list(worker), {}, in_smg(worker, WorkerStatus.DRAINING), ())
    assert leaving.entries == ()
    assert "AddressInUse" in leaving.left_out["a"]
    assert plan_manifest(a_list(worker), {}, EMPTY, ()).entries == listed(worker)


def test_reused_address_waits_until_the_old_instance_is_gone() -> None:
    old, new = a_worker("a"), a_worker("b", engine_id="run-9")
    first = plan_manifest(a_list(new), {}, in_smg(old), listed(old))
    assert first.entries == ()
    told = report_workers(a_list(new), first, in_smg(old, WorkerStatus.DRAINING))
    assert [(w.id, w.status, w.engine_id) for w in told] == [
        ("b", WorkerStatus.ABSENT, "run-9"),
        ("a", WorkerStatus.DRAINING, None),
    ]
    assert plan_manifest(a_list(new), {}, EMPTY, ()).entries == listed(new)


def test_verified_new_run_of_the_same_instance_needs_no_gap() -> None:
    again = a_worker(engine_id="run-2")
    agents = {again.agent_url: an_agent(engine_id="run-2")}
    assert plan_manifest(a_list(again), agents, in_smg(again), listed(a_worker())).entries == listed(again)


def test_report_says_what_smg_says_not_what_was_asked_for() -> None:
    worker = a_worker()
    against = plan_manifest(
        a_list(worker), {worker.agent_url: an_agent(phase=EnginePhase.HUNG)}, in_smg(worker), listed(worker)
    )
    still = report_workers(a_list(worker), against, in_smg(worker))
    assert [(w.status, w.reason) for w in still] == [(WorkerStatus.READY, "Hung")]
    gone = report_workers(a_list(worker), against, EMPTY)
    assert [(w.status, w.reason) for w in gone] == [(WorkerStatus.WITHHELD, "Hung")]


def test_s059_ghost_is_reported_without_engine_id_and_is_in_no_manifest() -> None:
    ghost = a_worker("gone", ip="10.0.0.9")
    manifest = plan_manifest(a_list(), {}, in_smg(ghost), listed(ghost))
    assert manifest.entries == ()
    told = report_workers(a_list(), manifest, in_smg(ghost))
    assert [(w.id, w.engine_id, w.status) for w in told] == [("gone", None, WorkerStatus.READY)]


def test_unreachable_smg_says_nothing_about_workers() -> None:
    worker = a_worker()
    manifest = plan_manifest(a_list(worker), {}, SmgView(Reach.UNKNOWN), listed(worker))
    assert report_workers(a_list(worker), manifest, SmgView(Reach.UNKNOWN)) == []


@pytest.mark.parametrize(
    ("workers", "says"),
    [
        ([a_worker("a"), a_worker("a", ip="10.0.0.2")], "id 'a'"),
        ([a_worker("a"), a_worker("b")], "url 'http://10.0.0.1:8000'"),
        ([a_worker().model_copy(update={"url": "https://10.0.0.1:8000"})], "must be http://"),
        ([a_worker().model_copy(update={"url": "http://10.0.0.1:8000/v1"})], "must be http://"),
        ([a_worker().model_copy(update={"agent_url": "file:///etc/passwd"})], "agentUrl"),
    ],
)
def test_list_that_contradicts_itself_is_refused(workers: list[Worker], says: str) -> None:
    assert says in (refuse_list(a_list(*workers)) or "")


def test_manifest_survives_writing_and_reading() -> None:
    entries = listed(a_worker("a"), a_worker("b", ip="10.0.0.2"))
    assert parse(render(entries)) == entries
    with pytest.raises(ValueError, match="not a manifest"):
        parse('{"workers": [{"id": 1}]}')


_NAMES = st.sampled_from("abcd")
_WORKERS = st.lists(_NAMES, unique=True).flatmap(
    lambda names: st.lists(st.integers(1, 6), min_size=len(names), max_size=len(names), unique=True).map(
        lambda ips: [a_worker(n, ip=f"10.0.0.{i}") for n, i in zip(names, ips, strict=True)]
    )
)
_PHASES = st.dictionaries(st.integers(1, 6), st.sampled_from(list(EnginePhase)))


ANSWERS, CONNECTS, UNREACHABLE = DataPath.ANSWERS, DataPath.CONNECTS, DataPath.UNREACHABLE


@pytest.mark.parametrize(
    ("paths", "left_out"),
    [
        ((ANSWERS, UNREACHABLE), {"b"}),
        ((CONNECTS, UNREACHABLE), {"b"}),
        ((ANSWERS, CONNECTS), set()),  # its agent crashed, or its engine is frozen: the kernel takes connections
        ((ANSWERS, None), set()),  # not tried yet
        ((UNREACHABLE, UNREACHABLE), set()),  # this router itself is cut off
        ((UNREACHABLE, None), set()),
        ((ANSWERS, ANSWERS), set()),
    ],
)
def test_s094_only_a_worker_that_cannot_be_reached_while_another_can_is_left_out(
    paths: tuple[DataPath | None, DataPath | None], left_out: set[str]
) -> None:
    a, b = a_worker("a"), a_worker("b", ip="10.0.0.2")
    known = {w.agent_url: path for w, path in zip((a, b), paths, strict=True) if path}
    manifest = plan_manifest(a_list(a, b), {}, in_smg(a), listed(a, b), known)
    assert {worker.id for worker in (a, b)} - {entry.id for entry in manifest.entries} == left_out
    assert manifest.withheld == left_out
    assert all(reason.startswith("Unreachable") for reason in manifest.left_out.values())


def test_a_worker_that_can_be_reached_again_is_listed_again() -> None:
    a, b = a_worker("a"), a_worker("b", ip="10.0.0.2")
    back = {a.agent_url: ANSWERS, b.agent_url: CONNECTS}
    assert plan_manifest(a_list(a, b), {}, in_smg(a), listed(a), back).entries == listed(a, b)


@given(wanted=_WORKERS, paths=st.lists(st.none() | st.sampled_from(list(DataPath)), min_size=4, max_size=4))
def test_silence_never_empties_a_manifest(wanted: list[Worker], paths: list[DataPath | None]) -> None:
    known = {w.agent_url: path for w, path in zip(wanted, paths, strict=False) if path}
    manifest = plan_manifest(a_list(*wanted), {}, SmgView(Reach.DOWN), (), known)
    assert bool(manifest.entries) == bool(wanted)
    reached = {w.id for w in wanted if known.get(w.agent_url) in (ANSWERS, CONNECTS)}
    assert reached <= {entry.id for entry in manifest.entries}


OLD, NEW = a_worker("a"), a_worker("b", ip="10.0.0.2")
SPEAKS, WELL = {OLD.agent_url: ANSWERS}, {OLD.agent_url: an_agent()}


SMG_UNKNOWN = SmgView(Reach.UNKNOWN)


def smg_has(**status: WorkerStatus) -> SmgView:
    """smg's workers OLD (a) and NEW (b) with these states."""
    urls = {"a": OLD.url, "b": NEW.url}
    return SmgView(Reach.ANSWERED, tuple(SmgWorker(name, urls[name], said) for name, said in status.items()))


@pytest.mark.parametrize(
    "new",
    [{}, {"b": WorkerStatus.PENDING}, {"b": WorkerStatus.NOT_READY}, {"b": WorkerStatus.DRAINING}],
    ids=["unknown to smg", "pending", "not ready", "draining"],
)
def test_the_last_ready_worker_stays_until_a_wanted_one_is_ready(new: dict[str, WorkerStatus]) -> None:
    smg = smg_has(a=WorkerStatus.READY, **new)
    manifest = plan_manifest(a_list(NEW), WELL, smg, listed(OLD, NEW), SPEAKS, [OLD])
    assert manifest.entries == listed(NEW, OLD)
    told = {worker.id: worker for worker in report_workers(a_list(NEW), manifest, smg)}
    assert told["a"].reason.startswith("LastReady"), "the operator sees that it may still get requests"
    assert told["a"].status is WorkerStatus.READY
    assert plan_manifest(a_list(NEW), WELL, SMG_UNKNOWN, listed(OLD, NEW), SPEAKS, [OLD]).entries == listed(NEW, OLD)
    assert plan_manifest(a_list(NEW), WELL, SMG_UNKNOWN, listed(OLD), SPEAKS, [OLD]).entries == listed(OLD)
    suspect = {**WELL, NEW.agent_url: an_agent("b", phase=EnginePhase.SUSPECT)}
    assert plan_manifest(a_list(NEW), suspect, smg, listed(OLD, NEW), SPEAKS, [OLD]).entries == listed(OLD)
    now_ready = smg_has(a=WorkerStatus.READY, b=WorkerStatus.READY)
    assert plan_manifest(a_list(NEW), WELL, now_ready, listed(NEW, OLD), SPEAKS, [OLD]).entries == listed(NEW)


@pytest.mark.parametrize(
    ("wanted", "agents", "paths", "smg"),
    [
        ((), WELL, SPEAKS, smg_has(a=WorkerStatus.READY)),
        ((NEW,), {OLD.agent_url: an_agent(phase=EnginePhase.DRAINING)}, SPEAKS, smg_has(a=WorkerStatus.READY)),
        ((NEW,), {OLD.agent_url: an_agent(engine_id="run-2")}, SPEAKS, smg_has(a=WorkerStatus.READY)),
        ((NEW,), {}, {}, smg_has(a=WorkerStatus.READY)),
        ((NEW,), WELL, {OLD.agent_url: CONNECTS}, smg_has(a=WorkerStatus.READY)),
        ((NEW,), WELL, SPEAKS, smg_has(a=WorkerStatus.NOT_READY)),
        ((NEW,), WELL, SPEAKS, SmgView(Reach.DOWN)),
        ((a_worker("b"),), WELL, SPEAKS, smg_has(a=WorkerStatus.READY)),
    ],
    ids=["explicit zero", "draining", "restarted", "never heard", "silent", "not ready", "smg down", "address reused"],
)
def test_nothing_else_keeps_a_worker_that_the_operator_took_away(
    wanted: tuple[Worker, ...], agents: dict[str, AgentState], paths: dict[str, DataPath], smg: SmgView
) -> None:
    assert "a" not in {e.id for e in plan_manifest(a_list(*wanted), agents, smg, listed(OLD), paths, [OLD]).entries}


@given(wanted=_WORKERS, before=_WORKERS, smg=_WORKERS, phases=_PHASES, reach=st.sampled_from(list(Reach)))
def test_never_adds_and_never_lists_an_address_twice(
    wanted: list[Worker], before: list[Worker], smg: list[Worker], phases: dict[int, EnginePhase], reach: Reach
) -> None:
    agents = {
        w.agent_url: an_agent(w.id, phase=phases[ip])
        for w in wanted
        if (ip := int(w.url.rsplit(".", 1)[1].split(":")[0])) in phases
    }
    view = SmgView(reach, tuple(SmgWorker(w.id, w.url, WorkerStatus.READY) for w in smg))
    manifest = plan_manifest(a_list(*wanted), agents, view, listed(*before))
    assert set(manifest.entries) <= set(listed(*wanted))
    assert {e.id for e in manifest.entries} | set(manifest.left_out) == {w.id for w in wanted}
    for entry in manifest.entries:
        new = entry not in listed(*before)
        assert not (new and entry.url in {w.url for w in smg}), "an address in use is not taken over"
    assert not any(
        agents[w.agent_url].phase in ("Hung", "Suspect", "Draining")
        for w in wanted
        if w.agent_url in agents and w.id in {e.id for e in manifest.entries}
    )
