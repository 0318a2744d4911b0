"""What a reward is: a function, or several, and what is known of one without a call. No torch."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, Self, TypeAlias, TypeVar

from areal_sc.system.sandbox.program import Ended, Limits, Program

RewardFunction = Callable[..., float | Awaitable[float]]
"""reward(prompt: dict, completion: str) -> float; sync (run in a killable process) or async.

An async one with a parameter `run_code` gets a `RunCode`, and may return a `Score` with parts.
"""

_Reward = TypeVar("_Reward", bound=RewardFunction)

Reward: TypeAlias = RewardFunction | Mapping[str, RewardFunction | tuple[RewardFunction, float]]
"""One function; or several by name, each alone (weight 1) or with its weight.

    {"right": right, "length": (length, -0.01)}
"""

PART_PREFIX = "reward/"
"""Before the name of one of several reward functions, among the metrics of a workflow."""

RUN_CODE: Final = "run_code"
"""Name of the parameter by which an async reward asks for the worker's sandbox."""

VOTE: Final = "vote"
"""Method or attribute of a reward function that tells what a completion answers."""

IS_SHAPING: Final = "is_shaping"
"""Attribute of a reward function: true where it says nothing of how good an answer is, as a penalty
for its length: rewards that differ in it alone have no signal."""

DECLARATION = "areal_sc_declaration"
"""Attribute of a reward function that holds its `RewardDeclaration`."""


class RunCode(Protocol):
    """Runs code in the sandbox of the worker."""

    async def __call__(
        self, code: str | Program, stdin: str = "", limits: Limits | None = None
    ) -> Ended:
        """Runs Python text, or a program of any language, to its end.

        Time limits of rewards do not count while it runs, or waits for a free place.

        Args:
            stdin: of Python text; a program has its own.
            limits: None: those of `Limits`.
        Raises: SandboxError: it could not be run, again and again; says nothing about the code.
        """


class Narrowing(NamedTuple):
    """What a reward process gives up for its rewards, as `RewardDeclaration` says."""

    network: bool = True
    read: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class RewardDeclaration:
    """What a sync reward says about itself; a decorator, by the name of `declare_reward`.

    Without `late_after_s`, passing `rollout.reward_timeout_s` rejects the episode.

    Attributes:
        late_reward: what it means by taking long: no failure, but this number.
        late_after_s: CPU seconds of one call after which it is given. The process is killed.
        prepare: called once in each reward process, before its calls; its time is not limited by
            `rollout.reward_timeout_s`. For slow imports.
        network: False: its process can open no connection.
        read: files and folders that its process can read, beside Python, its modules and the
            system's; then it can write nowhere. None: it reads and writes what the worker may, but
            for the run's own.
    Raises: ValueError: one of `late_reward` and `late_after_s` is given alone.
    """

    late_reward: float | None = None
    late_after_s: float | None = None
    prepare: Callable[[], None] | None = None
    network: bool = True
    read: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if (self.late_reward is None) != (self.late_after_s is None):
            raise ValueError(
                f"late_reward={self.late_reward}, late_after_s={self.late_after_s}: expected both "
                "or neither"
            )

    @property
    def narrowing(self) -> Narrowing:
        """What its process gives up."""
        return Narrowing(self.network, None if self.read is None else tuple(self.read))

    def __call__(self, reward: _Reward) -> _Reward:
        setattr(reward, DECLARATION, self)
        return reward


declare_reward = RewardDeclaration


def voter_of(reward: Reward) -> RewardFunction | None:
    """The function that tells what a completion answers, in words that equal answers share.

    A reward tells it by a method, or an attribute, `vote(completion) -> str | None`; of several
    functions the first one that has it does. None: none has it.
    """
    functions = reward.values() if isinstance(reward, Mapping) else [reward]
    for given in functions:
        function = given[0] if isinstance(given, tuple) else given
        if getattr(function, VOTE, None) is not None:
            return function
    return None


class Score(float):
    """A reward that knows what it is made of; a float like any other.

    What is added to it, or taken from it, leaves its shaping; the sum has no parts any more.

    Attributes:
        parts: by name, what each of several functions gave, before its weight, or what one has
            measured; empty for one that gave a number alone.
        shaping: how much of it comes from functions that are marked by `IS_SHAPING`.
        weights: by name, of the parts whose weighted sum it is; others were measured alone.
    """

    parts: Mapping[str, float]
    shaping: float
    weights: Mapping[str, float]

    def __new__(
        cls,
        reward: float,
        parts: Mapping[str, float] | None = None,
        shaping: float = 0.0,
        weights: Mapping[str, float] | None = None,
    ) -> Self:
        score = super().__new__(cls, reward)
        score.parts = dict(parts or {})
        score.shaping = shaping
        score.weights = dict(weights or {})
        return score

    def __add__(self, other: float) -> Score:
        added: Any = super().__add__(other)
        if added is NotImplemented:
            return NotImplemented
        return Score(added, shaping=self.shaping + getattr(other, "shaping", 0.0))

    __radd__ = __add__

    def __sub__(self, other: float) -> Score:
        left: Any = super().__sub__(other)
        if left is NotImplemented:
            return NotImplemented
        return Score(left, shaping=self.shaping - getattr(other, "shaping", 0.0))

    @property
    def metrics(self) -> dict[str, float]:
        """The parts under the names that they have among a run's metrics: `reward/NAME`."""
        return {f"{PART_PREFIX}{name}": value for name, value in self.parts.items()}


def is_async(reward: Any) -> bool:
    """Whether it runs on the event loop."""
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(
        getattr(type(reward), "__call__", None)  # noqa: B004  # the method, not callable()
    )


def runs_code(reward: Any) -> bool:
    """Whether it has a parameter for the worker's sandbox."""
    try:
        return RUN_CODE in inspect.signature(reward).parameters
    except (TypeError, ValueError):  # of a builtin, which does not tell
        return False


def may_run_code(value: Any) -> bool:
    """Whether a value is a reward that asks for the sandbox, or has such a one among several."""
    if isinstance(value, Mapping):
        return any(map(may_run_code, value.values()))
    function = value[0] if isinstance(value, tuple) and value else value
    return callable(function) and runs_code(function)


def name_of(reward: Any, part: str = "") -> str:
    """The name by which messages call a reward. Args: part: its name among several."""
    name = str(getattr(reward, "__qualname__", type(reward).__qualname__))
    return name if part in ("", name) else f"{part} ({name})"


def place_of_definition(reward: Any) -> str:
    """Where a reward is defined, "" if Python does not know."""
    function = reward if inspect.isroutine(reward) else type(reward).__call__
    with suppress(ValueError):  # it wraps itself
        function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else ""
