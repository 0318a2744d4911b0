"""The life of a training step: chosen stories, and random ones against a book of ranks and rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from areal_sc.controller.step_life import LEGAL, StepLife, StepState
from areal_sc.errors import BatchLost, StepsLost
from areal_sc.metadata import BatchMetadata, RowMetadata
from areal_sc.workers.calls import GroupAttempt

NUM_GROUPS = 3


def batch_of(*runs: GroupAttempt, version: int = 0) -> BatchMetadata:
    rows = [
        RowMetadata(run.group_id, run.attempt, 8, 1.0, version, ((version, 4),), episode)
        for run in runs
        for episode in range(2)
    ]
    return BatchMetadata(f"batch-{version}", version, (), tuple(rows))


BATCH = batch_of(*(GroupAttempt(i, 0) for i in range(NUM_GROUPS)))


def trained_step() -> StepLife:
    life = StepLife()
    life.form(BATCH)
    life.begin_update(0, BATCH.rows)
    life.num_updates = 1
    return life


def test_a_step_without_faults() -> None:
    life = StepLife()
    states = [life.state]
    life.form(BATCH)
    states.append(life.state)
    life.begin_update(0, BATCH.rows)
    life.begin_update(0, BATCH.rows)  # a repeat
    states.append(life.state)
    assert life.trained_rows == list(BATCH.rows)
    life.record()
    states.append(life.state)
    life.publish(1)
    states.append(life.state)
    assert states == ["forming", "formed", "training", "publishing", "forming"]
    assert (life.version, life.batch, life.trained_rows, life.num_updates) == (1, None, [], 0)


def test_a_batch_is_formed_anew_without_the_groups_whose_rows_are_gone() -> None:
    life = StepLife()
    life.form(BATCH)
    others = [GroupAttempt(1, 1), GroupAttempt(7, 0)]
    assert life.lose_rows([GroupAttempt(1, 0), *others]) == others
    assert (life.gone, life.batch) == ({1}, BATCH), "it may have been read"
    assert life.take_back() == {1}
    assert (life.state, life.gone, life.batch) == (StepState.forming, set(), None)


def recorded(life: StepLife) -> None:
    life.record()


def begun_before(life: StepLife) -> None:
    life.begin_anew("")
    life.begin_before()


@pytest.mark.parametrize("spoil", [recorded, begun_before])
def test_rows_that_nobody_can_give_back_lose_the_step(spoil: Callable[[StepLife], None]) -> None:
    life = trained_step()
    spoil(life)
    life.lose_rows([GroupAttempt(0, 0)])
    with pytest.raises(StepsLost, match="rows of step 1 are gone"):
        life.take_back()
    assert life.batch is BATCH, "whoever is told may still publish, or go back"


def test_the_second_update_of_a_step_whose_first_was_undone_is_refused() -> None:
    """Else the version would be published with half of its updates."""
    life = trained_step()
    life.undo()
    assert life.state is StepState.undone
    with pytest.raises(BatchLost, match=r"policy version 0 are gone.*prepare_batch again"):
        life.begin_update(1, BATCH.rows)
    assert (life.state, life.num_updates) == (StepState.formed, 0)
    life.begin_update(0, BATCH.rows)
    assert life.state is StepState.training


def test_an_undone_step_makes_no_version() -> None:
    """The ranks may die after the last update, while a disk or a journal is waited for."""
    life = trained_step()
    life.undo()
    with pytest.raises(AssertionError, match="undone"):
        life.record()
    with pytest.raises(BatchLost, match="policy version 0 are gone"):
        life.publish(1)
    assert (life.version, life.state) == (0, StepState.formed)


def test_the_ranks_of_a_model_and_those_who_generate_with_it_have_one_step() -> None:
    own, life = StepLife(), StepLife()
    own.form(BATCH)
    own.lose_rows([GroupAttempt(2, 0)])
    life.begin_update(0, BATCH.rows)
    life.take_in(own)
    assert (life.batch, life.gone, life.state) == (BATCH, {2}, StepState.training)
    other = StepLife()
    other.go_back(5)
    other.take_in(own)
    assert other.batch is None, "the batch is of another version"


def test_lost_steps_stay_lost_until_the_ranks_go_back() -> None:
    life = trained_step()
    life.lose("no snapshot")
    life.lose("another reason")
    for change in (life.take_back, lambda: life.publish(1), life.undo):
        change()
        with pytest.raises(StepsLost, match="no snapshot"):
            life.check()
    life.go_back(0)
    life.check()
    assert life.state is StepState.forming


def test_each_state_can_be_left() -> None:
    assert LEGAL.keys() == {*StepState}
    for state, followers in LEGAL.items():
        reached = {state}
        while more := {after for it in reached for after in LEGAL[it]} - reached:
            reached |= more
        assert StepState.forming in followers | reached


class Steps(RuleBasedStateMachine):
    """A script, its ranks and its rows, each with a book of what really is."""

    def __init__(self) -> None:
        super().__init__()
        self.life = StepLife()
        self.attempts = [0] * NUM_GROUPS
        self.in_ranks: list[RowMetadata] = []  # that the ranks have trained in this step
        self.is_recorded = False
        self.is_lost = False
        self.version = 0

    def end_step(self) -> None:
        self.in_ranks, self.is_recorded = [], False
        self.attempts = [0] * NUM_GROUPS

    @precondition(lambda self: not self.is_lost)
    @rule()
    def ask_for_batch(self) -> None:
        """As `next_batch`."""
        if self.life.gone:
            gone, had_rows = set(self.life.gone), bool(self.in_ranks)
            try:
                assert self.life.take_back() == gone
            except StepsLost:
                assert self.is_recorded
                return
            assert not self.is_recorded, "what counts as trained is trained again"
            assert bool(self.in_ranks) == had_rows
            for group in gone:
                self.attempts[group] += 1
        if self.life.batch is None:
            runs = [GroupAttempt(i, attempt) for i, attempt in enumerate(self.attempts)]
            self.life.form(batch_of(*runs, version=self.version))

    @precondition(lambda self: self.life.batch is not None)
    @rule(group=st.integers(0, NUM_GROUPS - 1), attempt=st.integers(0, 2))
    def lose_rows(self, group: int, attempt: int) -> None:
        run = GroupAttempt(group, attempt)
        is_current = self.attempts[group] == attempt
        assert self.life.lose_rows([run]) == ([] if is_current else [run])
        assert (group in self.life.gone) or not is_current

    @precondition(lambda self: self.life.batch is not None and not self.is_lost)
    @rule()
    def update(self) -> None:
        assert self.life.batch is not None
        rows, number = self.life.batch.rows, self.life.num_updates
        if self.life.state is StepState.undone and number:
            with pytest.raises(BatchLost):
                self.life.begin_update(number, rows)
            return
        self.life.begin_update(number, rows)
        self.in_ranks += rows
        self.life.num_updates = number + 1

    @precondition(lambda self: not self.is_lost)
    @rule()
    def ranks_cannot_repeat_the_step(self) -> None:
        self.life.undo()
        self.in_ranks = []

    @precondition(lambda self: not self.is_lost)
    @rule(records=st.booleans(), announces=st.booleans())
    def publish(self, records: bool, announces: bool) -> None:
        """As `publish_weights`, which a death may end between its parts."""
        if self.life.state is StepState.undone:
            assert isinstance(self.life.begin_anew("rows are gone"), BatchLost)
            assert not self.in_ranks
            return
        assert self.life.trained_rows == self.in_ranks, "a version of other rows than the journal's"
        if records or self.is_recorded:
            self.life.record()
            self.is_recorded = True
            if announces:
                self.version += 1
                self.life.publish(self.version)
                self.end_step()

    @rule()
    def lose_steps(self) -> None:
        self.life.lose("no snapshot is left")
        self.is_lost = True

    @precondition(lambda self: self.is_lost)
    @rule(steps=st.integers(0, 2))
    def go_back(self, steps: int) -> None:
        self.version = max(0, self.version - steps)
        self.life.go_back(self.version)
        self.is_lost = False
        self.end_step()

    @invariant()
    def books_agree(self) -> None:
        life = self.life
        assert life.version == self.version
        assert (life.state is StepState.lost) == self.is_lost
        if life.batch is None:
            assert not life.gone
        else:
            assert life.gone <= set(range(NUM_GROUPS))
        if life.state in (StepState.forming, StepState.formed):
            assert not self.in_ranks, "updates of which nobody knows"
            assert (life.state is StepState.formed) == (life.batch is not None)
        if life.state is StepState.undone:
            assert not self.in_ranks
        if life.state is StepState.publishing:
            assert self.is_recorded


TestSteps = Steps.TestCase
