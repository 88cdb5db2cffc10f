"""Reading an API server's audit log of writes."""

import json
from pathlib import Path

from e2e.bed.audit import Audit, Write


def an_event(name: str, **others: object) -> str:
    event = {
        "verb": "patch",
        "user": {"username": "operator"},
        "userAgent": "test/1",
        "objectRef": {"resource": "pods", "namespace": "a", "name": name, "subresource": "status"},
        "responseStatus": {"code": 200},
        "requestURI": f"/api/v1/namespaces/a/pods/{name}/status",
        "requestReceivedTimestamp": "2026-01-01T00:00:00.000000Z",
        **others,
    }
    return json.dumps(event) + "\n"


def test_no_log_is_no_writes(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    assert audit.mark() == 0
    assert audit.since() == []


def test_writes_after_the_mark_with_who_what_and_outcome(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    audit.path.write_text(an_event("before"))
    mark = audit.mark()
    with audit.path.open("a") as file:
        file.write(an_event("after", responseStatus={"code": 409}))
    assert audit.since(mark) == [
        Write(
            "operator", "test/1", "patch", "", "pods", "status", "a", "after", 409, "2026-01-01T00:00:00.000000Z", False
        )
    ]


def test_line_that_is_still_being_written_is_left_for_the_next_look(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    audit.path.write_text(an_event("whole") + an_event("half")[:20])
    assert [write.name for write in audit.since()] == ["whole"]


def test_dry_run_is_told_apart(tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    audit.path.write_text(an_event("a", requestURI="/api/v1/namespaces/a/pods/a?dryRun=All&fieldManager=x"))
    assert [write.dry_run for write in audit.since()] == [True]
