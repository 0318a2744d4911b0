"""What the supervisor decides, for chosen stories and for random ones."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sc.errors import WorkerLost, WorkerStartError
from areal_sc.fleet.supervisor import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Action,
    Event,
    GiveUp,
    Heard,
    Lost,
    Missed,
    Progressed,
    RestartUnit,
    Started,
    StartFailed,
    Supervisor,
    UnitServes,
    UnitState,
)

DEAD = WorkerLost("it died")


def serving(max_deaths: int = 3, *incarnations: str) -> Supervisor:
    """One whose unit `a` does its work."""
    supervisor = Supervisor(["a"], max_deaths)
    serve(supervisor, *(incarnations or ("a0",)))
    return supervisor


def serve(supervisor: Supervisor, *incarnations: str) -> None:
    assert supervisor.on(Started("a", frozenset(incarnations))) is None
    assert supervisor.state("a") is UnitState.starting
    assert supervisor.on(UnitServes("a")) is None


def test_the_first_restart_begins_at_once_and_the_next_ones_after_longer_pauses() -> None:
    supervisor = serving(max_deaths=1000)
    pauses = []
    for life in range(1000):
        action = supervisor.on(Lost(f"a{life}", DEAD))
        assert isinstance(action, RestartUnit)
        pauses.append(action.after_s)
        serve(supervisor, f"a{life + 1}")
    assert pauses[:4] == [0.0, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_S
    assert supervisor.num_restarts == 1000


def test_a_unit_that_only_dies_is_given_up_with_the_last_cause() -> None:
    supervisor = serving(max_deaths=2)
    assert supervisor.on(Lost("a0", DEAD)) == RestartUnit("a", 0.0)
    late = WorkerStartError("it does not come up")
    assert supervisor.on(StartFailed("a", late)) == RestartUnit("a", FIRST_PAUSE_S)
    serve(supervisor, "a1")
    last = WorkerLost("it died again")
    assert supervisor.on(Lost("a1", last)) == GiveUp("a", last, 3)
    assert supervisor.num_restarts == 2


@pytest.mark.parametrize("is_useful", [False, True])
def test_only_what_is_done_by_a_unit_that_serves_is_useful(is_useful: bool) -> None:
    """One that dies at the same step of each replay would be started for ever."""
    supervisor = serving(max_deaths=1)
    assert supervisor.on(Lost("a0", DEAD)) == RestartUnit("a", 0.0)
    supervisor.on(Started("a", frozenset(["a1"])))
    if is_useful:
        supervisor.on(UnitServes("a"))
    supervisor.on(Progressed("a"))
    action = supervisor.on(Lost("a1", DEAD))
    assert action == (RestartUnit("a", 0.0) if is_useful else GiveUp("a", DEAD, 2))


def test_the_first_death_ends_a_run_that_wants_it_so() -> None:
    assert serving(max_deaths=0).on(Lost("a0", DEAD)) is not None
    assert Supervisor(["a"], 0).on(StartFailed("a", DEAD)) == GiveUp("a", DEAD, 1)


def test_what_no_attempt_can_change_is_given_up_at_once() -> None:
    supervisor = serving(max_deaths=100)
    supervisor.on(Lost("a0", DEAD))
    assert supervisor.on(StartFailed("a", DEAD, is_final=True)) == GiveUp("a", DEAD, 2)


def test_ranks_that_die_together_are_one_death() -> None:
    supervisor = serving(5, "a0", "a1")
    assert supervisor.on(Lost("a1", DEAD)) == RestartUnit("a", 0.0)
    assert supervisor.on(Lost("a0", DEAD)) is None
    serve(supervisor, "a2", "a3")
    assert supervisor.on(Lost("a0", DEAD)) is None, "news of an earlier life"
    assert supervisor.state("a") is UnitState.ready


def test_a_silent_unit_is_suspect_until_all_of_it_is_heard() -> None:
    supervisor = serving(5, "a0", "a1")
    supervisor.on(Missed("a0"))
    supervisor.on(Missed("a1"))
    assert supervisor.state("a") is UnitState.suspect
    supervisor.on(Heard("a0"))
    assert supervisor.state("a") is UnitState.suspect
    supervisor.on(Heard("a1"))
    assert supervisor.state("a") is UnitState.ready
    supervisor.on(Missed("a1"))
    assert isinstance(supervisor.on(Lost("a0", DEAD)), RestartUnit)
    supervisor.on(Heard("a1"))
    assert supervisor.state("a") is UnitState.restarting
    serve(supervisor, "a2", "a3")
    assert supervisor.state("a") is UnitState.ready, "silence belongs to a life"


def test_one_that_falls_silent_while_it_starts_is_suspect_when_it_serves() -> None:
    supervisor = Supervisor(["a"], 1)
    supervisor.on(Started("a", frozenset(["a0"])))
    supervisor.on(Missed("a0"))
    assert supervisor.state("a") is UnitState.starting
    supervisor.on(UnitServes("a"))
    assert supervisor.state("a") is UnitState.suspect


UNITS = {"a": 1, "b": 2}
"""Name -> number of members."""
LIVES = [f"{unit}{member}.{life}" for unit, n in UNITS.items() for member in range(n)
         for life in range(4)]  # fmt: skip

units = st.sampled_from(sorted(UNITS))
lives = st.sampled_from(LIVES)
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(UnitServes, units),
    st.builds(Missed, lives),
    st.builds(Heard, lives),
    st.builds(lambda life: Lost(life, WorkerLost(life)), lives),
    st.builds(lambda unit: StartFailed(unit, WorkerStartError(unit)), units),
    st.builds(Progressed, units),
    # as a driver tells it: new lives of all members
    units.flatmap(
        lambda unit: st.builds(
            lambda life: Started(unit, frozenset(f"{unit}{n}.{life}" for n in range(UNITS[unit]))),
            st.integers(0, 3),
        )
    ),
)


@given(st.lists(events, max_size=60), st.integers(0, 4))
def test_whatever_is_told_the_decisions_hold(told: list[Event], max_deaths: int) -> None:
    """Also what no correct driver tells: in any order, twice, of unknown and of earlier lives."""
    supervisor = Supervisor(UNITS, max_deaths)
    current: dict[str, frozenset[str]] = dict.fromkeys(UNITS, frozenset())
    decided: dict[str, list[Action]] = {unit: [] for unit in UNITS}
    for event in told:
        before = supervisor.states
        action = supervisor.on(event)
        after = supervisor.states
        changed = {unit for unit in UNITS if before[unit] != after[unit]}
        assert len(changed) <= 1, "an event is about one unit"
        for unit in UNITS:
            if before[unit] is UnitState.given_up:
                assert after[unit] is UnitState.given_up, "that is final"
        if isinstance(event, Started) and before[event.unit] is not UnitState.given_up:
            current[event.unit] = event.incarnations
        if action is not None:
            unit = action.unit
            decided[unit].append(action)
            assert before[unit] is not UnitState.given_up
            if isinstance(event, Lost):
                assert event.incarnation in current[unit], "an earlier life was taken for this one"
            else:
                assert isinstance(event, StartFailed)
            current[unit] = frozenset()  # no life counts until new ones are told of
            expected = (
                UnitState.restarting if isinstance(action, RestartUnit) else UnitState.given_up
            )
            assert after[unit] is expected
        elif isinstance(event, Lost):
            assert not any(event.incarnation in lives for lives in current.values())
        if isinstance(event, Missed | Heard):
            for unit in changed:
                assert event.incarnation in current[unit]
                assert {before[unit], after[unit]} == {UnitState.ready, UnitState.suspect}
    for unit, actions in decided.items():
        check_row(actions, max_deaths, [e for e in told if isinstance(e, Progressed)], unit)
    restarts = [a for a in itertools.chain(*decided.values()) if isinstance(a, RestartUnit)]
    assert supervisor.num_restarts == len(restarts)


def check_row(
    actions: list[Action], max_deaths: int, progress: list[Progressed], unit: str
) -> None:
    """Pauses are bounded and grow; without progress the unit is given up in time, and once."""
    pauses = [action.after_s for action in actions if isinstance(action, RestartUnit)]
    assert all(0.0 <= pause_s <= LONGEST_PAUSE_S for pause_s in pauses)
    assert not any(isinstance(action, GiveUp) for action in actions[:-1])
    if not any(event.unit == unit for event in progress):
        assert pauses == sorted(pauses)
        assert len(pauses) <= max_deaths
    if actions and isinstance(actions[-1], GiveUp):
        assert actions[-1].num_deaths == max_deaths + 1
