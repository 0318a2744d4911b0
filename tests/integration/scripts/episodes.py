"""Workflows, rewards and datasets that a user might write, most of them wrong."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from areal_sc import Prompts, SingleTurnWorkflow, TensorMetadata, Trajectory, Workflow
from areal_sc.workflows.base import EpisodeEngine, declare_reward


class Shares(SingleTurnWorkflow):
    """All rows of a group have its page, which only one shard has."""

    fields = MappingProxyType(
        {"page": TensorMetadata((None,), "uint8", per_group=True, max_bytes=100_000)}
    )

    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> Trajectory:
        row = await super().run_episode(prompt, engine)
        row.fields = {"page": [len(prompt["prompt"])] * 100_000}
        return row


def right(prompt: dict[str, Any], completion: str) -> float:
    return 1.0


def by_letters(prompt: dict[str, Any], completion: str) -> float:
    """Answers differ in it, whatever the model."""
    return float(sum(map(ord, completion[:3])))


def raises(prompt: dict[str, Any], completion: str) -> float:
    return float(prompt["solution"] == completion)


def not_a_number(prompt: dict[str, Any], completion: str) -> float:
    return float("nan")


def copies_its_memory(prompt: dict[str, Any], completion: str) -> float:
    """All that this process can write, which is wherever Python has its objects, to a file."""
    with (
        open("/proc/self/maps") as maps,
        open("/proc/self/mem", "rb", 0) as memory,
        open(prompt["copy"], "ab") as copy,
    ):
        for line in maps:
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            if line.split()[1].startswith("rw") and "[v" not in line:
                memory.seek(first)
                copy.write(memory.read(last - first))
    return 1.0


def _prepare() -> None:
    raise OperationalError


class OperationalError(Exception):
    """What a library raises that finds no database."""


@declare_reward(prepare=_prepare)
def cannot_be_prepared(prompt: dict[str, Any], completion: str) -> float:
    return 1.0


async def in_their_order(prompt: dict[str, Any], trajectories: Sequence[Trajectory]) -> list[float]:
    """1, 2, and so on; fails for one prompt."""
    if prompt["number"] == 7:
        raise KeyError(prompt["prompt"])
    assert all(it.reward == 0.0 for it in trajectories)
    return [place + 1.0 for place in range(len(trajectories))]


def raises_for_some(prompt: dict[str, Any], completion: str) -> float:
    """For one prompt in ten."""
    return float(prompt["solution"] == completion) if prompt["number"] % 10 == 0 else 1.0


def kills_its_process(prompt: dict[str, Any], completion: str) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def hangs(prompt: dict[str, Any], completion: str) -> float:
    """In C code, with the interpreter's lock held."""
    ctypes.PyDLL(None).sleep(600)
    return 0.0


def hangs_for_some(prompt: dict[str, Any], completion: str) -> float:
    return hangs(prompt, completion) if prompt.get("hang") else 1.0


class ReturnsNothing(Workflow):
    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> Trajectory | None:
        return None


class UnequalLengths(Workflow):
    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> Trajectory | None:
        return Trajectory([3, 4, 5], [True] * 3, [-1.0] * 2, [0] * 3, [1.0] * 3, 1.0)


class Tokens(Workflow):
    """Rows of that many tokens, given by nobody; every `every_longer`-th episode has one more."""

    def __init__(self, num_tokens: int, every_longer: int = 0, num_rows: int = 1) -> None:
        self.num_tokens = num_tokens
        self.every_longer = every_longer
        self.num_rows = num_rows
        self._num_begun = 0

    async def run_episode(
        self, prompt: dict[str, Any], engine: EpisodeEngine
    ) -> Trajectory | Sequence[Trajectory]:
        self._num_begun += 1
        is_longer = self.every_longer and self._num_begun % self.every_longer == 0
        lengths = [self.num_tokens] * (self.num_rows - 1) + [self.num_tokens + bool(is_longer)]
        rows = [
            Trajectory([3] * n, [True] * n, [-1.0] * n, [0] * n, [1.0] * n, 1.0) for n in lengths
        ]
        return rows if len(rows) > 1 else rows[0]


class Calls(Workflow):
    """Episodes of three rows, given by nobody; the first one of each prompt may have a bad row."""

    def __init__(self, is_first_bad: bool) -> None:
        self.is_first_bad = is_first_bad
        self._begun: set[str] = set()

    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> list[Trajectory]:
        is_bad = self.is_first_bad and prompt["prompt"] not in self._begun
        self._begun.add(prompt["prompt"])
        rewards = (1.0, float("nan") if is_bad else 0.0, 0.5)
        metrics = ({"right": 1.0}, {"right": 0.0, "tools": 4.0}, {})
        n = 8
        return [
            Trajectory([3] * n, [True] * n, [-1.0] * n, [0] * n, [1.0] * n, reward, dict(named))
            for reward, named in zip(rewards, metrics, strict=True)
        ]


class Raises(Workflow):
    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> Trajectory | None:
        raise ZeroDivisionError("of the episode")


class SlowForSome(SingleTurnWorkflow):
    """Every `every`-th answer of a worker is late; an episode gives one or several as its rows."""

    def __init__(self, every: int, delay_s: float, num_rows: int) -> None:
        super().__init__(right)
        self.every = every
        self.delay_s = delay_s
        self.num_rows = num_rows
        self._num_begun = 0

    async def run_episode(  # type: ignore[override]
        self, prompt: dict[str, Any], engine: EpisodeEngine
    ) -> Trajectory | Sequence[Trajectory] | None:
        rows = await asyncio.gather(*(self._answer(prompt, engine) for _ in range(self.num_rows)))
        return rows if self.num_rows > 1 else rows[0]

    async def _answer(self, prompt: dict[str, Any], engine: EpisodeEngine) -> Trajectory:
        self._num_begun += 1
        is_slow = self._num_begun % self.every == 0
        trajectory = await super().run_episode(prompt, engine)
        assert trajectory is not None
        if is_slow:
            await asyncio.sleep(self.delay_s)
        return trajectory


class Waits(Workflow):
    """Notes each episode's begin and end in a folder; none ends by itself."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> Trajectory | None:
        name = prompt["prompt"]
        (Path(self.folder) / f"{name}.begun").touch()
        try:
            await asyncio.sleep(3600)
        finally:
            (Path(self.folder) / f"{name}.ended").touch()
        return None


class UnreadableRows(Prompts):
    """A dataset whose every row fails."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise OSError(f"row {index} is on a broken disk")


class NotesRows(Workflow):
    """Plays as another workflow does, and writes each row with its tokens to a file."""

    def __init__(self, played: Workflow, path: str) -> None:
        self.played = played
        self.fields = played.fields
        self.path = path

    async def run_episode(
        self, prompt: dict[str, Any], engine: EpisodeEngine
    ) -> Trajectory | Sequence[Trajectory] | None:
        played = await self.played.run_episode(prompt, engine)
        rows = [played] if isinstance(played, Trajectory) else played or ()
        self._write(prompt, rows)
        return played

    def _write(self, prompt: dict[str, Any], rows: Sequence[Trajectory]) -> None:
        """A line of JSON a row."""
        names = ("input_ids", "loss_mask", "behavior_logprobs")
        with open(self.path, "a") as file:
            for row in rows:
                tokens = {name: list(getattr(row, name)) for name in names}
                noted = {"prompt": prompt, "reward": row.reward, **tokens}
                file.write(json.dumps(noted) + "\n")


class TwoTurns(Workflow):
    """Two answers, each of which is a row."""

    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> list[Trajectory]:
        rows, context = list[Trajectory](), engine.tokenizer.encode(prompt["prompt"])
        for _ in range(2):
            answer = await engine.generate(context)
            num_read, num_written = len(context), len(answer.token_ids)
            context = [*context, *answer.token_ids]
            rows.append(
                Trajectory(
                    input_ids=context,
                    loss_mask=[False] * num_read + [True] * num_written,
                    behavior_logprobs=[0.0] * num_read + answer.logprobs,
                    versions=[-1] * num_read + answer.versions,
                    temperatures=[1.0] * num_read + [answer.temperature] * num_written,
                    reward=float(sum(answer.token_ids)),
                    metrics={"turn": float(len(rows))},
                )
            )
        return rows


class EndsSome(NotesRows):
    """Of each prompt a worker ends the first `num_free` episodes; others wait for its file."""

    def __init__(self, played: Workflow, path: str) -> None:
        super().__init__(played, path)
        self._num_begun: dict[str, int] = {}

    async def run_episode(
        self, prompt: dict[str, Any], engine: EpisodeEngine
    ) -> Trajectory | Sequence[Trajectory] | None:
        name = prompt["prompt"]
        number = self._num_begun[name] = self._num_begun.get(name, 0) + 1
        gate = f"{self.path}.{name}"
        # the file is of another process: there is no event to wait for
        while number > prompt["num_free"] and not os.path.exists(gate):  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.02)
        return await super().run_episode(prompt, engine)
