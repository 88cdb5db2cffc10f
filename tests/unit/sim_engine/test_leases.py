from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_sim.leases import LeaseBook, Notice


def test_lease_ends_after_its_time_and_heartbeats_start_it_again() -> None:
    book = LeaseBook(10)
    book.hold("a", [1, 2], now=0)
    assert book.next_expiry == 10
    assert book.extend("a", now=6)
    assert book.due(now=15.9) == []
    assert book.due(now=16) == ["a"]
    assert book.expire("a") == [1, 2]
    assert not book.extend("a", now=17)
    assert book.next_expiry is None


def test_heartbeat_never_shortens_a_lease() -> None:
    book = LeaseBook(10)
    book.hold("a", [1], now=5)
    book.extend("a", now=1)
    assert book.next_expiry == 15


def test_pull_in_time_late_and_by_a_stranger_are_told_apart() -> None:
    book = LeaseBook(10)
    book.hold("a", [1], now=0)
    book.hold("b", [2], now=0)
    book.expire("b")
    assert book.pulled("a") == (Notice.IN_TIME, [1])
    assert book.pulled("a") == (Notice.UNKNOWN, [])
    assert book.pulled("b") == (Notice.LATE, [])
    assert book.pulled("b") == (Notice.UNKNOWN, [])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["hold", "extend", "pulled", "wait"]), st.integers(0, 5)), max_size=40))
def test_blocks_come_back_exactly_once(acts: list[tuple[str, int]]) -> None:
    book, now, given_out, back = LeaseBook(3), 0.0, 0, 0
    for act, number in acts:
        if act == "hold":
            given_out += 1
            book.hold(f"{number}-{given_out}", [given_out], now)
        elif act == "wait":
            now += number
            back += sum(len(book.expire(request_id)) for request_id in book.due(now))
        else:
            for request_id in [f"{number}-{count}" for count in range(given_out + 1)]:
                if act == "extend":
                    book.extend(request_id, now)
                else:
                    back += len(book.pulled(request_id)[1])
    assert back + book.held == given_out
    assert book.held_blocks == book.held
    assert all(expiry > now for expiry in [book.next_expiry] if expiry is not None)
