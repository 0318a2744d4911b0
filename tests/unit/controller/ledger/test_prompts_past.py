"""What prompts have given goes through journal and snapshots, with those that were passed over."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from simulation.disk import SimulatedDisk
from simulation.virtual_loop import run_virtual

from areal_sc.controller.ledger.group import past_of
from areal_sc.controller.ledger.journal import Journal
from areal_sc.controller.ledger.ledger import Ledger
from areal_sc.controller.ledger.ledger_account import read_account
from areal_sc.controller.ledger.ledger_records import LedgerState
from areal_sc.errors import LedgerError
from areal_sc.metadata import BatchMetadata, PromptReference, RowMetadata
from areal_sc.sources.prompt_choice import PromptPast

FOLDER = Path("/run/ledger")
METRICS = {"accuracy": (1.0, 2)}


def prompt(index: int, dataset: int = 0) -> PromptReference:
    return PromptReference(dataset, index, 7)


def play(
    ledger: Ledger,
    given: PromptReference,
    rewards: tuple[float, ...],
    metrics: dict[str, tuple[float, int]] | None = None,
    num_passed: int = 0,
) -> int:
    """Admits a group of episodes with these rewards, a row each, and finishes it."""
    group_id = ledger.admit(given, 0, num_passed).group_id
    ledger.start(group_id, "rollout/0")
    rows = tuple(
        RowMetadata(group_id, 0, 9, reward, 0, ((0, 5),), episode)
        for episode, reward in enumerate(rewards)
    )
    assert ledger.finish(group_id, 0, BatchMetadata(f"g{group_id}", 0, (), rows), metrics)
    return group_id


def test_the_newest_group_of_a_prompt_tells() -> None:
    ledger = Ledger(remembers_prompts=True)
    assert ledger.past(prompt(5)) is None
    play(ledger, prompt(5), (1.0, -1.0, 0.5, 0.5))
    assert ledger.past(prompt(5)) == PromptPast(1, 0.25, has_signal=True)
    play(ledger, prompt(5), (0.2, 0.2), METRICS)
    assert ledger.past(prompt(5)) == PromptPast(2, 0.5, has_signal=False)
    assert ledger.past(prompt(5, dataset=1)) is None


def test_returns_of_equal_means_are_signal() -> None:
    group = BatchMetadata(
        "b",
        0,
        (),
        tuple(
            RowMetadata(0, 0, 9, 0.5, 0, ((0, 2),), episode, returns=((its[0], 1), (its[1], 1)))
            for episode, its in enumerate(((0.0, 1.0), (1.0, 0.0)))
        ),
    )
    assert past_of(group, {}, None) == PromptPast(1, 0.5, has_signal=True)


def test_a_group_that_is_thrown_away_tells_as_well() -> None:
    ledger = Ledger(remembers_prompts=True)
    ledger.reject(play(ledger, prompt(5), (0.0, 0.0)), "equal_rewards")
    assert ledger.past(prompt(5)) == PromptPast(1, 0.0, has_signal=False)


def test_a_ledger_that_nobody_asks_remembers_nothing() -> None:
    ledger = Ledger()
    play(ledger, prompt(5), (1.0, 0.0))
    assert ledger.past(prompt(5)) is None
    assert ledger.snapshot().past == {}


def test_a_returned_prompt_passes_over_none() -> None:
    ledger = Ledger(remembers_prompts=True)
    ledger.reject(play(ledger, prompt(5), (1.0, 0.0)), "stale", returns_prompt=True)
    with pytest.raises(LedgerError, match="expected the returned prompt"):
        ledger.admit(prompt(5), 0, num_passed=1)
    ledger.admit(prompt(5), 0)
    assert ledger.num_prompts_taken == 1


def test_a_later_start_knows_the_same() -> None:
    """From the records of the journal, then from the state that its next segment begins with."""
    disk = SimulatedDisk()

    async def start(indices: tuple[int, ...]) -> LedgerState:
        journal = Journal(FOLDER, disk)
        ledger = journal.take_up(Ledger(remembers_prompts=True))
        for index in indices:
            play(ledger, prompt(index), (1.0, float(index % 2)), METRICS, num_passed=index)
        await journal.close()
        return ledger.snapshot()

    first, second, third = (run_virtual(start(it)) for it in ((1, 2), (), (2,)))
    assert second == first
    assert first.num_prompts_taken == 1 + 1 + 2 + 1
    assert first.past == {0: {1: PromptPast(1, 0.5, False), 2: PromptPast(1, 0.5, True)}}
    assert third.past[0][2].num_groups == 2
    assert read_account(FOLDER, lambda group: None, disk).totals["finished"] == 3
    packed = msgspec.msgpack.encode(third)
    restored = Ledger.restore(msgspec.msgpack.decode(packed, type=LedgerState))
    assert restored.snapshot() == third


def test_a_run_that_goes_back_knows_what_it_knew_then() -> None:
    ledger = Ledger(remembers_prompts=True)
    play(ledger, prompt(1), (1.0, 0.0))
    then = ledger.snapshot()
    play(ledger, prompt(1), (1.0, 1.0))
    play(ledger, prompt(2), (1.0, 1.0))
    ledger.go_back(1, then)
    assert ledger.past(prompt(1)) == PromptPast(1, 0.5, has_signal=True)
    assert ledger.past(prompt(2)) is None
