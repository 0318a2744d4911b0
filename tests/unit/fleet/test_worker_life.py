"""What is decided about units, for chosen stories and for random ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sc.config.schema import Device
from areal_sc.errors import WorkerLost, WorkerStartError
from areal_sc.fleet.worker_life import (
    Built,
    Closed,
    Died,
    Dismissed,
    EndRun,
    EndStart,
    Heard,
    Joined,
    Kept,
    Launching,
    Life,
    LifeEvent,
    LifeState,
    Lives,
    Missed,
    Output,
    Progressed,
    Retired,
    Serves,
    Started,
    StartFailed,
    StartUnit,
    Stay,
    UnitLeft,
    UnitLost,
    UnitServes,
    UnitSilent,
    Wanted,
)
from areal_sc.nodes.spec import WorkerOrder
from areal_sc.system.deaths import FIRST_PAUSE_S, LONGEST_PAUSE_S

A = "rollout/0"
B = "rollout/1"
DEAD = WorkerLost("it died")


def order(index: int = 0, role: str = "rollout") -> WorkerOrder:
    return WorkerOrder(role, index, "none", {}, Device.cpu, 1)


class Told:
    """One role, whose unit `A` is of interest."""

    def __init__(self, max_deaths: int = 3, unit: str = "") -> None:
        self.lives = Lives(max_deaths, unit)
        self.life = self.lives.of(order())

    def on(self, *events: LifeEvent) -> list[Output]:
        return [output for event in events for output in self.lives.on(event)]

    def begin(self) -> list[Output]:
        return self.lives.begin()

    def decided(self, *events: LifeEvent) -> StartUnit | EndRun | None:
        """The one thing that is to be done about these events, if anything is."""
        done = [it for it in self.on(*events) if isinstance(it, StartUnit | EndRun)]
        assert len(done) <= 1
        return done[0] if done else None

    def serve(self, *incarnations: str, unit: str = A) -> None:
        """New lives come up."""
        assert self.on(Launching(unit), Started(unit, frozenset(incarnations))) == []
        assert self.life.state is LifeState.starting
        assert self.on(Serves(unit)) == [UnitServes(unit)]


def serving(max_deaths: int = 3) -> Told:
    """One whose unit does its work from the start."""
    told = Told(max_deaths)
    assert told.on(Joined(A, "a0")) == []
    assert told.begin() == [UnitServes(A)]
    return told


def test_the_first_restart_begins_at_once_and_the_next_ones_after_longer_pauses() -> None:
    told = serving(max_deaths=1000)
    pauses = []
    for life in range(1000):
        lost, start = told.on(Died(A, f"a{life}", DEAD))
        assert lost == UnitLost(A, DEAD, is_news=True)
        assert isinstance(start, StartUnit)
        pauses.append(start.after_s)
        told.serve(f"a{life + 1}")
    assert pauses[:4] == [0.0, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_S
    assert told.lives.num_restarts == told.life.num_restarts == 1000


def test_a_unit_that_only_dies_is_given_up_with_the_last_cause() -> None:
    told = serving(max_deaths=2)
    assert told.decided(Died(A, "a0", DEAD)) == StartUnit(A, 0.0)
    late = WorkerStartError("it does not come up")
    assert told.on(StartFailed(A, late)) == [StartUnit(A, FIRST_PAUSE_S)], "it was lost already"
    told.serve("a1")
    last = WorkerLost("it died again")
    assert told.on(Died(A, "a1", last)) == [UnitLost(A, last, is_news=False), EndRun(A, last, 3)]
    assert told.lives.num_restarts == 2
    assert told.lives.has_failed


@pytest.mark.parametrize("is_useful", [False, True])
def test_only_what_is_done_by_a_unit_that_serves_is_useful(is_useful: bool) -> None:
    """One that dies at the same step of each replay would be started for ever."""
    told = serving(max_deaths=1)
    assert told.decided(Died(A, "a0", DEAD)) == StartUnit(A, 0.0)
    told.on(Launching(A), Started(A, frozenset(["a1"])), Built(A))
    if is_useful:
        told.on(Serves(A))
    told.on(Progressed(A))
    decided = told.decided(Died(A, "a1", DEAD))
    assert decided == (StartUnit(A, 0.0) if is_useful else EndRun(A, DEAD, 2))


def test_the_first_death_ends_a_run_that_wants_it_so() -> None:
    assert serving(max_deaths=0).decided(Died(A, "a0", DEAD)) == EndRun(A, DEAD, 1)
    told = Told(max_deaths=0)
    assert told.begin() == [StartUnit(A, 0.0)]
    assert told.decided(StartFailed(A, DEAD)) == EndRun(A, DEAD, 1)


def test_what_no_attempt_can_change_is_given_up_at_once() -> None:
    told = serving(max_deaths=100)
    told.on(Died(A, "a0", DEAD))
    assert told.decided(StartFailed(A, DEAD, is_final=True)) == EndRun(A, DEAD, 2)
    stale = serving(max_deaths=100)
    assert stale.decided(Died(A, "of an earlier life", DEAD, is_final=True)) == EndRun(A, DEAD, 1)


def test_nothing_is_restarted_before_the_first_start_is_over() -> None:
    new = Told()
    assert new.decided(Joined(A, "a0"), Died(A, "a0", DEAD)) == EndRun(A, DEAD, 1)
    adopted = Told(max_deaths=1)
    assert adopted.on(Joined(A, "a0", is_adopted=True), Died(A, "a0", DEAD)) == []
    assert adopted.life.deaths.number == 0, "what is started again in the first start is no death"
    assert adopted.begin() == [UnitLost(A, DEAD, is_news=True), StartUnit(A, 0.0)]


def test_one_whose_node_is_on_its_way_is_started_when_the_others_serve() -> None:
    told = Told()
    told.lives.of(order(1))
    told.on(Joined(A, "a0"))
    assert told.begin() == [UnitServes(A), StartUnit(B, 0.0)]
    told.lives.of(order(2))
    assert told.on(Wanted("rollout/2")) == [StartUnit("rollout/2", 0.0)]
    assert told.on(Wanted("rollout/2"), Launching("rollout/2"), Wanted("rollout/2")) == [
        StartUnit("rollout/2", 0.0)
    ]
    assert told.lives.num_restarts == 0, "these are first starts"


def test_ranks_that_die_together_are_one_death() -> None:
    told = Told(5, unit="train")
    assert {told.lives.of(order(index, "train")) for index in range(2)} == {told.life}
    told.on(Joined("train", "a0"), Joined("train", "a1"))
    told.begin()
    assert told.decided(Died("train", "a1", DEAD)) == StartUnit("train", 0.0)
    assert told.on(Died("train", "a0", DEAD)) == []
    told.serve("a2", "a3", unit="train")
    assert told.on(Died("train", "a0", DEAD)) == [], "news of an earlier life"
    assert told.life.is_ready


def test_a_silent_unit_gets_no_work_until_all_of_it_is_heard() -> None:
    told = Told(5, unit=A)
    told.on(Joined(A, "a0"), Joined(A, "a1"))
    told.begin()
    assert told.on(Missed(A, "a0"), Missed(A, "a1")) == [UnitSilent(A)]
    assert told.on(Heard(A, "a0")) == []
    assert told.life.state is LifeState.silent
    assert told.on(Heard(A, "a1")) == [UnitServes(A)]
    told.on(Missed(A, "a1"))
    assert told.decided(Died(A, "a0", DEAD)) == StartUnit(A, 0.0)
    assert told.on(Heard(A, "a1")) == []
    assert told.life.state is LifeState.lost
    told.serve("a2", "a3")
    assert told.life.is_ready, "silence belongs to a life"


def test_one_that_falls_silent_while_it_starts_is_silent_when_it_serves() -> None:
    told = Told()
    told.on(Joined(A, "a0"), Missed(A, "a0"))
    assert told.life.state is LifeState.starting
    told.begin()
    assert told.life.state is LifeState.silent


def test_one_that_drains_is_started_again_until_it_has_left() -> None:
    told = serving()
    told.on(Closed(A))
    assert told.life.stay is Stay.stays, "only what drains can be closed"
    told.on(Retired(A), Closed(A))
    assert told.decided(Died(A, "a0", DEAD)) == StartUnit(A, 0.0)
    assert told.life.is_closed
    told.on(Kept(A), Retired(A))
    assert told.life.stay is Stay.drains
    assert told.on(Dismissed(A)) == [UnitLeft(A), EndStart(A)]
    assert told.on(Died(A, "a0", DEAD), Serves(A)) == []
    assert told.life.state is LifeState.left


def test_a_process_that_is_on_its_way_is_waited_for() -> None:
    told = serving()
    told.on(Died(A, "a0", DEAD), Launching(A))
    assert told.on(Dismissed(A)) == [UnitLeft(A)]
    assert told.on(Started(A, frozenset(["a1"]))) == []
    assert told.life.state is LifeState.left


def test_a_unit_that_was_given_up_ends_all_restarts() -> None:
    told = serving(max_deaths=0)
    other = told.lives.of(order(1))
    told.on(Launching(B), Started(B, frozenset(["b0"])), Serves(B))
    other.deaths.max_in_row = 5
    told.on(Died(A, "a0", DEAD))
    assert told.on(Died(B, "b0", DEAD)) == [UnitLost(B, DEAD, is_news=True)]


UNITS = {A: 1, B: 2}
"""Name -> number of workers."""
LIVES = [f"{unit}/{n}.{life}" for unit, num in UNITS.items() for n in range(num)
         for life in range(4)]  # fmt: skip

NEXT = {
    LifeState.coming: {LifeState.launching, LifeState.starting},
    LifeState.launching: {LifeState.starting},
    LifeState.starting: {
        LifeState.launching,
        LifeState.built,
        LifeState.serving,
        LifeState.silent,
    },
    LifeState.built: {LifeState.serving, LifeState.silent},
    LifeState.serving: {LifeState.silent},
    LifeState.silent: {LifeState.serving},
    LifeState.lost: {LifeState.launching},
    LifeState.given_up: set[LifeState](),
    LifeState.left: set[LifeState](),
}
"""State -> those that may follow, beside `lost`, `given_up` and `left`."""
FINAL = {LifeState.given_up, LifeState.left}

BEGIN = LifeEvent("")
"""Stands for the end of the first start."""

units = st.sampled_from(sorted(UNITS))


def test_a_found_worker_that_dies_before_the_run_begins_is_lost_once_and_then_replaced() -> None:
    role = Lives(2)
    life = role.of(order())
    unit, incarnation = life.unit, f"{life.unit}/0.0"
    role.on(Joined(unit, incarnation, is_adopted=True))
    role.on(Serves(unit))
    role.on(Missed(unit, incarnation))
    cause = WorkerLost("gone")
    assert role.on(Died(unit, incarnation, cause)) == [UnitLost(unit, cause, is_news=True)]
    assert (life.state, life.silent) == (LifeState.lost, frozenset())
    begun = role.begin()
    assert [type(it) for it in begun] == [StartUnit]
    assert begun[0].unit == unit


lives = st.sampled_from(LIVES)
flags = st.booleans()


def unit_of(life: str) -> str:
    return life.rpartition("/")[0]


events: st.SearchStrategy[LifeEvent] = st.one_of(
    *(st.builds(kind, units) for kind in (Wanted, Launching, Built, Serves, Progressed, Retired)),
    *(st.builds(kind, units) for kind in (Kept, Closed)),
    st.just(BEGIN),
    lives.flatmap(lambda life: st.builds(Joined, st.just(unit_of(life)), st.just(life), flags)),
    lives.map(lambda life: Missed(unit_of(life), life)),
    lives.map(lambda life: Heard(unit_of(life), life)),
    lives.map(lambda life: Died(unit_of(life), life, WorkerLost(life))),
    units.map(lambda unit: StartFailed(unit, WorkerStartError(unit))),
    # as a driver tells it: new lives of all workers
    st.builds(
        lambda unit, life: Started(
            unit, frozenset(f"{unit}/{n}.{life}" for n in range(UNITS[unit]))
        ),
        units,
        st.integers(0, 3),
    ),
)
some_end = st.one_of(*[events] * 30, st.builds(Dismissed, units))


@given(st.lists(some_end, max_size=60), st.integers(0, 4))
def test_whatever_is_told_the_decisions_hold(told: list[LifeEvent], max_deaths: int) -> None:
    """Also what no correct driver tells: in any order, twice, of unknown and of earlier lives."""
    role = Lives(max_deaths)
    known = {unit: role.of(order(index)) for index, unit in enumerate(UNITS)}
    outputs: dict[str, list[Output]] = {unit: [] for unit in UNITS}
    for event in told:
        before = {unit: (it.state, it.incarnations) for unit, it in known.items()}
        had_begun, had_failed = role.has_begun, role.has_failed
        out = role.begin() if event is BEGIN else role.on(event)
        for output in out:
            outputs[output.unit].append(output)
        changed = {unit for unit, life in known.items() if before[unit][0] is not life.state}
        if event is not BEGIN:
            assert changed | {it.unit for it in out} <= {event.unit}, "an event is about one unit"
        for unit in changed:
            check_change(before[unit][0], known[unit], [it for it in out if it.unit == unit])
        for life in known.values():
            check_life(life)
        if isinstance(event, Died) and event.incarnation not in before[event.unit][1]:
            assert out == [], "an earlier life was taken for this one"
        if any(isinstance(it, StartUnit) for it in out):
            assert not had_failed or not isinstance(event, Died | StartFailed)
            assert event is BEGIN or isinstance(event, Wanted | StartFailed) or had_begun
    for unit, its in outputs.items():
        is_useful = any(isinstance(e, Progressed) and e.unit == unit for e in told)
        check_row(its, max_deaths, known[unit].num_restarts, is_useful=is_useful)
    assert role.num_restarts == sum(life.num_restarts for life in known.values())


def check_change(before: LifeState, life: Life, out: list[Output]) -> None:
    after = life.state
    assert before not in FINAL, "that is final"
    assert after in NEXT[before] | {LifeState.lost, LifeState.given_up, LifeState.left}
    ends = [it for it in out if isinstance(it, EndRun)]
    assert len(ends) == (after is LifeState.given_up)
    if after is LifeState.serving:
        assert UnitServes(life.unit) in out
    if {before, after} == {LifeState.serving, LifeState.silent}:
        assert len(out) == 1
    if before in (LifeState.serving, LifeState.silent) and after in (
        LifeState.lost,
        LifeState.given_up,
    ):
        assert any(isinstance(it, UnitLost) for it in out), "its controller would wait for it"


def check_life(life: Life) -> None:
    """Which fields may hold what, by the state."""
    has_processes = life.state in (LifeState.starting, LifeState.built)
    has_processes = has_processes or life.state in (LifeState.serving, LifeState.silent)
    assert life.silent <= life.incarnations
    assert has_processes or not life.incarnations or life.state is LifeState.left
    assert life.is_ready == (life.state is LifeState.serving)
    assert life.is_ready <= life.is_up <= life.has_served
    assert life.is_ready <= (not life.is_down)
    assert (life.state is LifeState.silent) <= bool(life.silent)
    assert life.is_closed <= life.is_leaving


def check_row(its: list[Output], max_deaths: int, num_restarts: int, *, is_useful: bool) -> None:
    """Pauses are bounded and grow; without progress the unit is given up in time, and once."""
    pauses = [it.after_s for it in its if isinstance(it, StartUnit)]
    assert all(0.0 <= pause_s <= LONGEST_PAUSE_S for pause_s in pauses)
    assert not any(isinstance(it, EndRun) for it in its[:-1])
    if its and isinstance(its[-1], EndRun):
        assert its[-1].num_deaths <= max_deaths + 1
    if not is_useful:
        assert pauses == sorted(pauses)
        assert num_restarts <= max_deaths
    news = [it.is_news for it in its if isinstance(it, UnitLost)]
    serves = sum(isinstance(it, UnitServes) for it in its)
    assert sum(news) <= serves + 1, "told as news again before it has served"
