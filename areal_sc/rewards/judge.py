"""Rewards that ask a model behind an OpenAI-compatible endpoint. No torch.

    question ──► POST /chat/completions ──► text of the verdict ──► the number that stands in it

A judge that fails is no judgement: when all tries have failed, the call raises, and the episode is
rejected with the cause. It never becomes 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from random import Random
from statistics import fmean
from string import Formatter
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack

from areal_sc.errors import RewardError, WorkflowError
from areal_sc.rewards.answer_text import given_answer, without_reasoning
from areal_sc.rewards.asked_model import AskedModel, Asking, NoAnswer
from areal_sc.sources.reference import Referable
from areal_sc.sources.values import is_missing
from areal_sc.system.waiting import all_of

if TYPE_CHECKING:
    from areal_sc.workflows.trajectory import Trajectory

Verdict = TypeVar("Verdict")

_NUMBERS = re.compile(r"\[[\d\s,]*\]")
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w.]*\w)")

QUESTION: Final = """\
Grade an answer to a question.

Question:
{prompt}

Reference answer:
{answer}

Answer to grade:
{completion}

Reply with one number alone: 1 if the answer agrees with the reference, 0 if it does not."""


RANKING_QUESTION: Final = """\
Compare answers to a question.

Question:
{prompt}

{answers}

Reply with the numbers of all answers, the best one first, as a list: [2, 1, 3]"""


class JudgeAsking(Asking, total=False):
    """How a judge is asked; see `JudgeReward`."""

    max_tokens: int


class _Judge(Referable):
    """A model behind an OpenAI-compatible endpoint, which is asked until it gives a verdict.

    Args:
        question: into which columns of the row are filled, and what is to be judged.
        judged: the name of the latter in the question.
        others: see `JudgeReward`.
    Raises: ValueError: one is out of bounds, or the question does not hold what is to be judged.
    """

    def __init__(
        self,
        url: str,
        model: str,
        question: str,
        judged: str,
        *,
        max_tokens: int = 512,
        **asking: Unpack[Asking],
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens}: expected it above 0")
        self._columns = {name for _, name, _, _ in Formatter().parse(question) if name is not None}
        if judged not in self._columns:
            raise ValueError(f"question: expected {{{judged}}} in it")
        self._question = question
        self._judged = judged
        self._address = f"{url.rstrip('/')}/chat/completions"
        self._model = model
        self._max_tokens = max_tokens
        self._asked = AskedModel(f"judge {model} at {self._address}", RewardError, **asking)

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raises: WorkflowError: it has nothing in a column that the question names."""
        for name in sorted(self._columns - {self._judged}):
            if is_missing(row.get(name)):
                raise WorkflowError(
                    f"question of the judge: the row has nothing in its column {name!r}, only in "
                    f"{', '.join(sorted(row))}"
                )

    async def _ask(
        self, row: Mapping[str, Any], judged: str, read: Callable[[str], Verdict]
    ) -> Verdict:
        """The verdict that `read` finds in the reply.

        Args:
            judged: what is to be judged.
            read: raises `NoAnswer` where there is none.
        Raises: RewardError, NeverWorks: as `JudgeReward` says.
        """
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": self._filled(row, judged)}],
            "max_tokens": self._max_tokens,
            "temperature": 0,
        }

        def verdict(reply: Any) -> Verdict:
            content = reply["choices"][0]["message"]["content"]
            return read(content if isinstance(content, str) else "")

        return await self._asked.ask(self._address, body, verdict)

    def _filled(self, row: Mapping[str, Any], judged: str) -> str:
        """The question. Raises: RewardError: the row lacks a column."""
        columns = {name: row[name] for name in self._columns if name in row}
        asked = columns.get("prompt")
        if isinstance(asked, list) and asked and isinstance(asked[-1], Mapping):
            columns["prompt"] = asked[-1].get("content")
        try:
            return self._question.format(**{**columns, self._judged: judged})
        except (KeyError, IndexError) as error:
            raise RewardError(f"question of the judge: the row has no column {error}") from error


class JudgeReward(_Judge):
    """The number that a judge model gives a completion; an async reward.

    `rollout.reward_timeout_s` limits a whole call, all its tries and pauses; it has to be longer
    than `timeout_s`. The verdict is the last number of the judge's reply, or of what stands in
    `tag` there.

    Args:
        url: of the API, up to `/v1`.
        model: its name there.
        question: what the judge is asked; `{completion}` and the columns of the row are filled in,
            `{prompt}` by the text of the row's last message where that is a list of messages.
        lowest, highest: bounds of a verdict; a number outside is none.
        tag: the verdict stands in the last `<tag>...</tag>`; "": anywhere.
        api_key_variable: environment variable of the worker that holds the key; "": no key.
        max_tokens: of the reply.
        timeout_s: of one try.
        tries: of one verdict, > 0; the pauses between them grow.
        at_once: requests of one worker at a time, > 0.
    Raises: ValueError: an argument is out of bounds, or the question does not hold `{completion}`.
        In a call: RewardError: no try gave a verdict. NeverWorks: the key's variable is not set, or
        the address has never served this key or model.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        question: str = QUESTION,
        lowest: float = 0.0,
        highest: float = 1.0,
        tag: str = "",
        **asking: Unpack[JudgeAsking],
    ) -> None:
        if lowest >= highest:
            raise ValueError(f"lowest={lowest}, highest={highest}: expected lowest < highest")
        super().__init__(url, model, question, "completion", **asking)
        self._bounds = (lowest, highest)
        self._tag = tag

    async def __call__(self, prompt: Mapping[str, Any], completion: str) -> float:
        return await self._ask(prompt, completion, self._verdict)

    def _verdict(self, reply: str) -> float:
        numbers = [float(it) for it in _NUMBER.findall(given_answer(reply, self._tag) or "")]
        lowest, highest = self._bounds
        if not numbers or not lowest <= numbers[-1] <= highest:
            raise NoAnswer(f"expected a number of {lowest:g} to {highest:g}, got {reply!r:.200}")
        return numbers[-1]


class RankingJudge(_Judge):
    """A judge model puts the answers of a group in order; a `group_reward`.

    The best answer gets 1.0, the worst 0.0, the others lie evenly between. Answers of the same text
    share a place; where all are the same, each gets 0.5. The order in which the judge sees them
    follows from their texts. An answer that is alone keeps the reward of its own.

    Args:
        question: what the judge is asked; `{answers}` and the columns of the row are filled in. The
            verdict is the last list of numbers in the reply.
        num_orders: the group is put to the judge so often, in other orders; the mean counts.
        others: see `JudgeReward`.
    Raises: ValueError: an argument is out of bounds, or the question does not hold `{answers}`. In
        a call: as `JudgeReward`.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        question: str = RANKING_QUESTION,
        num_orders: int = 1,
        **asking: Unpack[JudgeAsking],
    ) -> None:
        if num_orders < 1:
            raise ValueError(f"num_orders={num_orders}: expected at least 1")
        super().__init__(url, model, question, "answers", **asking)
        self._num_orders = num_orders

    async def __call__(
        self, prompt: Mapping[str, Any], trajectories: Sequence[Trajectory]
    ) -> list[float]:
        if len(trajectories) == 1:
            return [trajectories[0].reward]
        answers = sorted({it.answer for it in trajectories})
        if len(answers) == 1:
            return [0.5] * len(trajectories)
        orders = (
            Random(f"{number} {answers}").sample(answers, len(answers))
            for number in range(self._num_orders)
        )
        ranked = await all_of(self._ranked(prompt, order) for order in orders)
        places = {it: fmean(one.index(it) for one in ranked) for it in answers}
        return [1.0 - places[it.answer] / (len(answers) - 1) for it in trajectories]

    async def _ranked(self, prompt: Mapping[str, Any], answers: list[str]) -> list[str]:
        """The answers, the best one first."""
        shown = "\n\n".join(f"Answer {n}:\n{it}" for n, it in enumerate(answers, start=1))

        def read(reply: str) -> list[str]:
            lists = _NUMBERS.findall(without_reasoning(reply))
            numbers = [int(it) for it in re.findall(r"\d+", lists[-1])] if lists else []
            if sorted(numbers) != list(range(1, len(answers) + 1)):
                raise NoAnswer(
                    f"expected a list of the numbers 1 to {len(answers)}, each once, got "
                    f"{reply!r:.200}"
                )
            return [answers[it - 1] for it in numbers]

        return await self._ask(prompt, shown, read)
