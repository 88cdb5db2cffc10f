import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_sim.fault_catalog import SPECS, FaultError, Scope, parse_faults
from sluice_sim.faults import FaultBook, Source

METRICS = frozenset({"vllm:kv_cache_usage_perc", "vllm:generation_tokens_total"})
EXAMPLES: dict[str, dict[str, Any]] = {
    "exit": {"code": 3},
    "slowLoad": {"seconds": 1},
    "portChange": {"port": 8001},
    "slowDrain": {"seconds": 1},
    "stall": {"seconds": 1},
    "slowFirstToken": {"factor": 2},
    "slowTokens": {"factor": 2},
    "status": {"code": 429},
    "metricsDrop": {"metric": "*"},
    "metricsRename": {"metric": "vllm:kv_cache_usage_perc", "to": "x"},
    "metricsNaN": {"metric": "vllm:kv_cache_usage_perc"},
    "metricsReset": {"metric": "vllm:generation_tokens_total"},
    "metricsSlow": {"seconds": 1},
    "clockJump": {"seconds": -1},
    "memoryGrow": {"mbPerSecond": 1},
    "kvSlow": {"seconds": 1},
}


def book(*faults: dict[str, Any], now: float = 0.0, seed: int = 1) -> FaultBook:
    made = FaultBook(random.Random(seed))
    made.replace(Source.PUT, parse_faults(json.dumps(faults), METRICS), now)
    return made


@pytest.mark.parametrize("name", SPECS)
def test_every_fault_can_be_set_with_its_required_arguments_alone(name: str) -> None:
    [fault] = parse_faults(json.dumps([{"name": name, "args": EXAMPLES.get(name, {})}]), METRICS)
    assert (fault.name, fault.when, fault.count, fault.probability) == (name, "now", None, 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ('"hang"', "expected a list"),
        ("[5]", "faults[0]: expected an object"),
        ('[{"name": "hung"}]', "unknown fault 'hung'; known: hang, frozen"),
        ('[{"name": "hang", "arg": {}}]', "field 'arg' is unknown; known: name, args"),
        ('[{"name": "hang", "args": {"second": 1}}]', "argument 'second' is unknown; known: seconds"),
        ('[{"name": "oom", "args": {"x": 1}}]', "argument 'x' is unknown; known: none"),
        ('[{"name": "exit"}]', "(exit).args.code: is required"),
        ('[{"name": "exit", "args": {"code": 256}}]', "not within 0 .. 255"),
        ('[{"name": "exit", "args": {"code": 1.5}}]', "expected an integer"),
        ('[{"name": "exit", "args": {"code": true}}]', "expected an integer"),
        ('[{"name": "slowTokens", "args": {"factor": 0.5}}]', "not within 1 .."),
        ('[{"name": "slowTokens", "args": {"factor": NaN}}]', "not within 1 .."),
        ('[{"name": "metricsNaN", "args": {"metric": "vllm:kv"}}]', "unknown metric 'vllm:kv'; known: *, vllm:gen"),
        ('[{"name": "metricsRename", "args": {"metric": "*", "to": "x"}}]', "unknown metric '*'"),
        ('[{"name": "hang", "when": "later"}]', "'later' is none of"),
        ('[{"name": "hang", "when": {"afterRequests": 0}}]', "not within 1 .."),
        ('[{"name": "hang", "when": {"afterMinutes": 1}}]', "is none of"),
        ('[{"name": "slowLoad", "args": {"seconds": 1}, "when": "onSigterm"}]', 'can only be "now"'),
        ('[{"name": "hang", "count": 2}]', "not for a fault of the whole engine"),
        ('[{"name": "halfStream", "count": 0}]', "not within 1 .."),
        ('[{"name": "halfStream", "probability": 2}]', "not within 0 .. 1"),
        ('[{"name": "kvSlow"}]', "(kvSlow).args.seconds: is required"),
        ('[{"name": "kvCorrupt", "args": {"blocks": 1}}]', "argument 'blocks' is unknown; known: none"),
        ('[{"name": "kvStale", "args": {"seconds": -1}}]', "not within 0 .."),
        ('[{"name": "followerDeath", "args": {"rank": 0}}]', "not within 1 .."),
        ('[{"name": "leaderDeath", "count": 1}]', "not for a fault of the whole engine"),
    ],
)
def test_wrong_fault_is_refused_with_what_is_known(text: str, message: str) -> None:
    with pytest.raises(FaultError) as error:
        parse_faults(text, METRICS)
    assert message in str(error.value)


def test_empty_text_and_wrapped_list_are_sets_too() -> None:
    assert parse_faults(" \n", METRICS) == []
    assert parse_faults('{"faults": [{"name": "hang"}]}', METRICS) == parse_faults('[{"name": "hang"}]', METRICS)


def test_request_fault_hits_at_most_count_requests() -> None:
    faults = book({"name": "halfStream", "count": 2})
    assert [faults.take("halfStream", 0) is not None for _ in range(4)] == [True, True, False, False]


def test_request_fault_with_a_probability_follows_the_seed() -> None:
    def hits(seed: int) -> list[bool]:
        faults = book({"name": "halfStream", "probability": 0.5}, seed=seed)
        return [faults.take("halfStream", 0) is not None for _ in range(200)]

    assert hits(1) == hits(1) != hits(2)
    assert 60 < sum(hits(1)) < 140


def test_after_requests_spares_the_first_ones() -> None:
    faults = book({"name": "halfStream", "when": {"afterRequests": 2}})
    hit = []
    for _ in range(4):
        faults.request_arrived(0)
        hit.append(faults.take("halfStream", 0) is not None)
    assert hit == [False, False, True, True]


def test_requests_and_seconds_count_from_when_the_fault_was_set() -> None:
    faults = FaultBook(random.Random(1))
    for _ in range(5):
        faults.request_arrived(100)
    faults.replace(
        Source.PUT,
        parse_faults(
            '[{"name": "hang", "when": {"afterSeconds": 5}}, {"name": "oom", "when": {"afterRequests": 1}}]', METRICS
        ),
        100,
    )
    assert faults.next_change(100) == 105
    assert faults.state("hang", 104.9) is None
    assert faults.state("hang", 105) is not None
    assert faults.due_events(105) == []
    faults.request_arrived(105)
    assert [fault.name for fault in faults.due_events(105)] == ["oom"]


def test_event_happens_once() -> None:
    faults = book({"name": "clockJump", "args": {"seconds": 5}})
    assert [len(faults.due_events(now)) for now in (0, 1, 2)] == [1, 0, 0]


def test_state_with_a_duration_ends_by_itself() -> None:
    faults = book({"name": "hang", "args": {"seconds": 3}})
    assert faults.next_change(1) == 3
    assert [faults.state("hang", now) is not None for now in (0, 2.9, 3, 50)] == [True, True, False, False]
    assert faults.next_change(3) is None


def test_on_sigterm_waits_for_the_signal() -> None:
    faults = book({"name": "ignoreSigterm", "when": "onSigterm"})
    assert faults.state("ignoreSigterm", 0) is None
    faults.sigterm_arrived(1)
    assert faults.state("ignoreSigterm", 1) is not None


def test_status_is_for_its_path_or_else_for_inference() -> None:
    faults = book(
        {"name": "status", "args": {"code": 401, "path": "/v1/models"}}, {"name": "status", "args": {"code": 429}}
    )
    assert (faults.take("status", 0, "/v1/models") or {})["code"] == 401
    assert (faults.take("status", 0, "/v1/completions") or {})["code"] == 429
    assert faults.take("status", 0, "/health") is None


def test_setting_the_same_again_keeps_its_state_and_sources_are_apart() -> None:
    faults = book({"name": "clockJump", "args": {"seconds": 5}}, {"name": "halfStream", "count": 1})
    assert len(faults.due_events(0)) == 1
    assert faults.take("halfStream", 0) is not None
    again = parse_faults('[{"name": "clockJump", "args": {"seconds": 5}}, {"name": "halfStream", "count": 1}]', METRICS)
    faults.replace(Source.PUT, again, 1)
    assert faults.due_events(1) == []
    assert faults.take("halfStream", 1) is None
    faults.replace(Source.FILE, parse_faults('[{"name": "hang"}]', METRICS), 1)
    faults.replace(Source.PUT, [], 1)
    assert [(entry["name"], entry["source"]) for entry in faults.to_json(1)] == [("hang", "file")]


def test_remove_takes_one_name_or_all() -> None:
    faults = book({"name": "hang"}, {"name": "frozen"}, {"name": "halfStream"})
    assert faults.remove("hang") == 1
    assert faults.state("hang", 0) is None
    assert faults.remove() == 2


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(SPECS)), max_size=6),
    st.sampled_from(["now", "onSigterm", {"afterSeconds": 2}, {"afterRequests": 2}]),
    st.floats(0, 1),
)
def test_what_is_set_reads_back_as_a_valid_set(names: list[str], when: Any, probability: float) -> None:
    entries = []
    for name in names:
        entry = {"name": name, "args": EXAMPLES.get(name, {}), "probability": probability}
        entries.append(entry if SPECS[name].only_at_start else {**entry, "when": when})
    faults = book(*entries)
    shown = faults.to_json(0)
    fields = ("name", "args", "when", "count", "probability")
    again = parse_faults(json.dumps([{key: entry[key] for key in fields} for entry in shown]), METRICS)
    assert again == parse_faults(json.dumps(entries), METRICS)
    assert all((entry["active"] is None) == (SPECS[entry["name"]].scope is not Scope.STATE) for entry in shown)
