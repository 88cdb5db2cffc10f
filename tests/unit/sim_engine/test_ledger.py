from sluice_sim.ledger import Ending, Ledger, Record


def opened(ledger: Ledger, name: str) -> Record:
    return ledger.open(request_id=name, path="/v1/completions", user_agent="test", now=1.0)


def test_first_ending_wins() -> None:
    ledger = Ledger()
    record = opened(ledger, "a")
    assert ledger.totals["open"] == 1
    assert ledger.close(record, Ending.CUT, now=2.0, detail="why")
    assert not ledger.close(record, Ending.COMPLETE, now=3.0)
    assert (record.ended, record.ended_at, record.detail) == (Ending.CUT, 2.0, "why")
    assert (ledger.totals["cut"], ledger.totals["complete"], ledger.totals["open"]) == (1, 0, 0)


def test_totals_outlive_dropped_records_and_open_ones_can_still_be_closed() -> None:
    ledger = Ledger(max_records=2)
    records = [opened(ledger, str(i)) for i in range(5)]
    for record in records:
        ledger.close(record, Ending.COMPLETE, now=2.0)
    page = ledger.to_json()
    assert (page["dropped"], page["lastSeq"]) == (3, 5)
    assert page["totals"]["complete"] == 5
    assert [record["id"] for record in page["records"]] == ["3", "4"]


def test_pages_by_sequence_number() -> None:
    ledger = Ledger()
    for i in range(5):
        opened(ledger, str(i))
    assert [record["id"] for record in ledger.to_json(after=1, limit=2)["records"]] == ["1", "2"]
