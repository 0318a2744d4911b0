from __future__ import annotations

import pytest

from areal_sc.errors import ConfigError, WorkflowError
from areal_sc.sources.prompt_choice import SHARE_WITHOUT_SIGNAL, PromptChoice, PromptPast

NEVER_SOLVED = PromptPast(num_groups=3, success=0.0, has_signal=False)
SOMETIMES = PromptPast(num_groups=3, success=0.5, has_signal=True)


def hard_ones(past: PromptPast) -> float:
    return 1 - past.success


def raises(past: PromptPast) -> float:
    raise KeyError("of the user's code")


def no_share(past: PromptPast) -> float:
    return 2.0


def two_arguments(past: PromptPast, more: int) -> float:
    return 1.0


def share_taken(choice: PromptChoice, past: PromptPast | None, num: int = 4000) -> float:
    return sum(choice.takes(position, past) for position in range(num)) / num


@pytest.mark.parametrize(
    ("name", "past", "share"),
    [
        ("all", None, 1.0),
        ("with_signal", None, 1.0),
        ("with_signal", SOMETIMES, 1.0),
        ("with_signal", NEVER_SOLVED, SHARE_WITHOUT_SIGNAL),
        (f"{__name__}:hard_ones", NEVER_SOLVED, 1.0),
        (f"{__name__}:hard_ones", SOMETIMES, 0.5),
    ],
)
def test_prompts_are_taken_by_what_they_have_given(
    name: str, past: PromptPast | None, share: float
) -> None:
    assert share_taken(PromptChoice(name, seed=3), past) == pytest.approx(share, abs=0.03)


def test_a_later_start_draws_the_same() -> None:
    draws = [
        [PromptChoice("with_signal", seed).takes(place, NEVER_SOLVED) for place in range(64)]
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        (f"{__name__}:no_such_function", "has no attribute 'no_such_function'"),
        (f"{__name__}:two_arguments", "missing a required argument: 'more'"),
        (f"{__name__}:NEVER_SOLVED", "is not a callable object"),
    ],
)
def test_a_function_that_cannot_be_called_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.choose_prompts '{name}': .*{message}"):
        PromptChoice(name, seed=0)


@pytest.mark.parametrize(
    ("name", "message"),
    [("raises", 'KeyError: "of the user\'s code"'), ("no_share", "a share from 0 to 1 .* got 2.0")],
)
def test_what_a_function_does_wrong_names_it(name: str, message: str) -> None:
    with pytest.raises(WorkflowError, match=message):
        PromptChoice(f"{__name__}:{name}", seed=0).takes(0, SOMETIMES)
