"""The next step of a pool: budgets hold whatever is observed, and every rollout ends."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.api.conditions import Reason
from sluice.plan.rollout import Budget, held_step, next_step, removed_step
from sluice.plan.scale import Member, victims

budgets = st.builds(
    Budget,
    desired=st.integers(0, 6),
    max_surge=st.integers(0, 3),
    max_unavailable=st.integers(0, 3),
)


@st.composite
def member_lists(draw: st.DrawFn) -> list[Member]:
    size = draw(st.integers(0, 8))
    members = []
    for number in range(size):
        serving = draw(st.booleans())
        members.append(
            Member(
                name=f"i-{number}",
                index=number,
                is_new=draw(st.booleans()),
                is_serving=serving,
                may_serve=serving or draw(st.booleans()),
                in_flight=draw(st.none() | st.integers(0, 9)),
                prompt_tokens=draw(st.none() | st.floats(0, 1e9)),
            )
        )
    return members


def old(number: int, *, serving: bool = True) -> Member:
    return Member(f"old-{number}", number, is_new=False, is_serving=serving, may_serve=serving, in_flight=0)


def new(number: int, *, serving: bool = True, in_flight: int | None = 0) -> Member:
    return Member(f"new-{number}", 10 + number, is_new=True, is_serving=serving, may_serve=serving, in_flight=in_flight)


def _started(member: Member, serves: bool) -> Member:
    return replace(member, is_serving=serves, may_serve=serves)


@settings(deadline=None)
@given(member_lists(), st.integers(0, 3), budgets)
def test_s025_available_instances_never_fall_below_the_floor_by_our_own_action(
    members: list[Member], leaving: int, budget: Budget
) -> None:
    step = next_step(members, leaving, budget)
    gone = {leave.name for leave in step.leave}
    before = sum(m.is_serving for m in members)
    after = sum(m.is_serving and m.name not in gone for m in members)
    floor = max(0, budget.desired - budget.max_unavailable)
    scaled_in = sum(m.is_serving and m.is_new for m in members) > budget.desired
    assert after >= min(before, floor) or (scaled_in and after >= min(before, budget.desired))


@settings(deadline=None)
@given(member_lists(), st.integers(0, 3), budgets)
def test_creations_stay_inside_the_surge(members: list[Member], leaving: int, budget: Budget) -> None:
    step = next_step(members, leaving, budget)
    superseded = sum(leave.reason is Reason.SUPERSEDED for leave in step.leave)
    kept = len(members) - len(step.leave)
    assert step.create >= 0
    if step.create:
        assert kept + leaving + superseded + step.create <= budget.desired + budget.max_surge
    gone = {leave.name for leave in step.leave}
    assert sum(m.is_new and m.name not in gone for m in members) + step.create <= max(
        budget.desired, sum(m.is_new for m in members) - (len(step.leave) - superseded)
    )


@settings(deadline=None)
@given(member_lists(), st.integers(0, 3), budgets)
def test_the_step_depends_on_what_is_seen_and_not_on_its_order(
    members: list[Member], leaving: int, budget: Budget
) -> None:
    one, two = next_step(members, leaving, budget), next_step(members[::-1], leaving, budget)
    assert one.create == two.create
    assert set(one.leave) == set(two.leave)


@settings(deadline=None)
@given(
    st.integers(0, 5),
    budgets.filter(lambda b: b.max_surge + b.max_unavailable > 0),
    st.lists(st.integers(0, 2), min_size=60, max_size=60),
)
def test_every_rollout_ends_with_exactly_the_desired_instances(start: int, budget: Budget, luck: list[int]) -> None:
    """Instances start after 0-2 steps, in any order; drains take a step."""
    members = [old(number) for number in range(start)]
    leaving, made = 0, 0
    for chance in luck:
        step = next_step(members, leaving, budget)
        gone = {leave.name for leave in step.leave}
        leaving = sum(leave.reason is Reason.SUPERSEDED for leave in step.leave)
        members = [m if m.is_serving else _started(m, chance > 0) for m in members if m.name not in gone]
        members += [new(made + n, serving=False) for n in range(step.create)]
        made += step.create
        assert len(members) <= max(start, budget.desired + budget.max_surge)
    members = [_started(m, True) for m in members]
    for _ in range(20):
        step = next_step(members, 0, budget)
        gone = {leave.name for leave in step.leave}
        members = [m for m in members if m.name not in gone] + [new(900 + made + n) for n in range(step.create)]
        made += step.create
    assert all(m.is_new for m in members)
    assert len(members) == budget.desired


def test_s024_the_newest_of_three_edits_wins_and_the_budget_covers_all_revisions() -> None:
    # Three old ones serve; two edits later two superseded ones still start.
    members = [old(0), old(1), old(2), old(3, serving=False), old(4, serving=False)]
    step = next_step(members, 0, Budget(3, max_surge=1, max_unavailable=0))
    assert {leave.name for leave in step.leave} == {"old-3", "old-4"}  # cost nothing, go first
    after = [old(0), old(1), old(2)]
    assert next_step(after, 0, Budget(3, 1, 0)).create == 1


def test_s025_a_broken_old_instance_goes_before_one_that_serves() -> None:
    step = next_step([old(0), old(1, serving=False), new(0)], 0, Budget(2, max_surge=1, max_unavailable=0))
    assert [leave.name for leave in step.leave] == ["old-1"]


def test_a_router_that_restarts_makes_no_healthy_instance_expendable() -> None:
    unsure = [replace(old(number), is_serving=False) for number in range(3)]
    assert next_step([*unsure, new(0)], 0, Budget(3, max_surge=1, max_unavailable=0)).leave == ()


def test_a_surge_instance_that_does_not_serve_yet_lets_nobody_go() -> None:
    step = next_step([old(0), new(0, serving=False)], 0, Budget(1, max_surge=1, max_unavailable=0))
    assert step.leave == ()
    assert step.create == 0


def test_instances_that_finish_their_requests_count_against_the_surge() -> None:
    waiting = next_step([old(0), old(1), new(0)], 1, Budget(3, max_surge=1, max_unavailable=0))
    assert waiting.create == 0
    gone = next_step([old(0), old(1), new(0)], 0, Budget(3, max_surge=1, max_unavailable=0))
    assert gone.create == 1


def test_without_surge_an_instance_is_drained_first_and_replaced_when_it_is_gone() -> None:
    budget = Budget(2, max_surge=0, max_unavailable=1)
    first = next_step([old(0), old(1)], 0, budget)
    assert (len(first.leave), first.create) == (1, 0)
    assert next_step([old(0)], 1, budget).create == 0
    assert next_step([old(0)], 0, budget).create == 1


def test_s023_starting_instances_are_cancelled_before_a_serving_one_is_drained() -> None:
    members = [new(0), new(1), new(2, serving=False), new(3, serving=False)]
    step = next_step(members, 0, Budget(2, max_surge=1, max_unavailable=0))
    assert {leave.name for leave in step.leave} == {"new-2", "new-3"}
    assert all(leave.reason is Reason.SCALE_IN for leave in step.leave)


def test_of_the_serving_ones_the_least_busy_leaves_and_an_unknown_load_counts_as_busy() -> None:
    members = [new(0, in_flight=None), new(1, in_flight=3), new(2, in_flight=1)]
    assert [m.name for m in victims(members, 2)] == ["new-2", "new-1"]
    assert victims(members, -1) == ()


def test_of_equally_busy_ones_the_least_cached_leaves_and_an_unknown_cache_counts_as_full() -> None:
    members = [
        replace(new(0), prompt_tokens=None),
        replace(new(1), prompt_tokens=10.0),
        replace(new(2), prompt_tokens=5e6),
        replace(new(3, in_flight=1), prompt_tokens=0.0),
    ]
    assert [m.name for m in victims(members, 4)] == ["new-1", "new-2", "new-0", "new-3"]


def test_while_held_missing_instances_come_back_and_a_surge_under_way_stays() -> None:
    budget = Budget(2, max_surge=1, max_unavailable=0)
    assert held_step([old(0)], budget).create == 1
    assert held_step([old(0), old(1), new(0)], budget).leave == ()
    assert len(held_step([old(0), old(1), old(2)], budget).leave) == 1


def test_while_held_whoever_cannot_serve_leaves_before_an_old_one_that_does() -> None:
    members = [old(0), old(1), new(0, serving=False), new(1, serving=False)]
    step = held_step(members, Budget(1, max_surge=1, max_unavailable=0))
    assert {leave.name for leave in step.leave} == {"new-0", "new-1"}


def test_a_removed_pool_serves_on_until_the_other_pools_do() -> None:
    members = [old(0), old(1, serving=False)]
    assert [leave.name for leave in removed_step(members, others_serve=False).leave] == ["old-1"]
    assert len(removed_step(members, others_serve=True).leave) == 2
