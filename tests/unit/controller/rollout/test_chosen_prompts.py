"""Prompts are passed over by what they have given; the simulation checks the account."""

from __future__ import annotations

from collections import Counter

import pytest
from simulation.settings import Settings
from simulation.training_run import play

from areal_sc.controller.rollout import training_groups
from areal_sc.sources.prompt_choice import PromptPast

NUM_PROMPTS = 12


def never_again(past: PromptPast) -> float:
    return 0.0


def admitted(choose_prompts: str) -> Counter[int]:
    """How often each prompt was admitted in a run of eight epochs, if all are taken."""
    settings = Settings(num_steps=24, num_prompts=NUM_PROMPTS, choose_prompts=choose_prompts)
    run = play(settings)
    assert not run.rejected
    return Counter(prompt.index for prompt, _ in run.admitted)


def test_those_without_signal_come_less_often() -> None:
    evenly, chosen = admitted("all"), admitted("with_signal")
    assert evenly.total() == chosen.total()
    assert set(evenly.values()) == {8}
    assert set(chosen) == set(range(NUM_PROMPTS)), "each prompt was taken in the first epoch"
    assert max(chosen.values()) > 8 > min(chosen.values())


def test_where_all_are_passed_over_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_groups, "MAX_PASSED", NUM_PROMPTS)
    assert admitted(f"{__name__}:never_again").total() == 24 * 4
