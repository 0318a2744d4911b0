"""`--dry-run`, the half that needs the script: its task is tried as workers would, on one row.

    start            each controller says what it can of itself: the loss is called once
    register         prompts, workflow and tokenizer: lengths, template, end, one answer's reward
    any call that would wait for workers    ends the process, with exit code 0

Nothing is started but the processes of rewards and agents, and nothing is written but in the run
folder, which `preflight.dry_run` has put where it goes with this process.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from areal_sc.agents.pool import AgentPool
from areal_sc.agents.server import AgentServer
from areal_sc.algorithms.named_loss import NamedLoss, is_tried
from areal_sc.config.schema import GenerationConfig, RolloutConfig
from areal_sc.controller.ledger.group import UNUSABLE, MakeReadable, RolloutSource
from areal_sc.engines.handle_base import TrainHandle
from areal_sc.errors import ConfigError, NeverWorks, PromptTooLong, WorkflowError
from areal_sc.hub import cached_model
from areal_sc.rejection import Rejection
from areal_sc.rewards.pool import RewardPool
from areal_sc.rewards.running import CodeRunner
from areal_sc.sources.pictures import IMAGES, decoded, with_pictures
from areal_sc.sources.prompts import Prompts
from areal_sc.system.fork_server import ForkServer
from areal_sc.system.process import importing_as_worker
from areal_sc.system.sandbox.opening import describe_sandbox
from areal_sc.user_code import Raised
from areal_sc.workers.calls import KeptCompletion
from areal_sc.workers.episodes import WorkerEpisodeEngine
from areal_sc.workers.stand_in import StandIn, played_episode
from areal_sc.workflows.base import Trajectory, Workflow
from areal_sc.workflows.registry import SourceReader
from areal_sc.workflows.text import describe_lost, encode_text
from areal_sc.workflows.text_checks import MAX_JUDGED, PromptTexts, lost_from, texts_in

MAX_ROWS: Final = 1000
"""Rows whose prompts are looked at; of a larger dataset they are spread over it."""
MAX_STREAMED: Final = 32
LOOK_S: Final = 60.0
"""After so long no more rows are looked at: agents take seconds each."""
EPISODE_LIMIT_S: Final = 60.0
MAX_ANSWERED: Final = 8
"""Rows whose right answers are compared, in pairs: by chance all of four are not the wrong way
round."""
_SHOWN_CHARS: Final = 600

OwnPools = tuple[RewardPool, AgentServer, AgentPool]


def tell(text: str) -> None:
    """Shows a line of what was found."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def end() -> SystemExit:
    """To be raised where the script would wait for workers."""
    tell("dry run: all of this would be done; nothing was started")
    return SystemExit(0)


def look_at_model(handle: TrainHandle, loss: NamedLoss) -> None:
    """Tries the loss, if the model has one.

    Raises: ConfigError: the loss cannot be used. ModelError: the model's folder is there, and
        cannot be read, or has no layers of the names that an adapter is to go beside.
    """
    if is_tried(handle.config):
        from areal_sc.algorithms.loss_trial import try_loss

        try_loss(loss, handle.config.head)
        tell(f"loss {loss.name}: tried on two rows")
    folder = cached_model(handle.config.path)
    if folder and handle.config.has_adapter:
        from areal_sc.engines.training.adapters.lora import describe_adapter

        tell(describe_adapter(replace(handle.config, path=str(folder))))


class _Model(StandIn):
    """Gives everybody the same answer.

    Attributes:
        tokens: of the answer; None: there is none.
        asked: the tokens of the first prompt, once the episode has asked for an answer.
        was_cut: there was no room for the whole answer.
    """

    was_cut = False

    def __init__(
        self,
        tokenizer: Any,
        ends: tuple[int, ...],
        config: RolloutConfig,
        tokens: list[int] | None,
        processor: Any,
    ) -> None:
        super().__init__(tokenizer, ends, config.max_context_tokens, processor)
        self.tokens = tokens
        self.asked: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()

    async def answer(self, input_ids: Sequence[int], sampling: GenerationConfig) -> KeptCompletion:
        if not self.asked.done():
            self.asked.set_result(list(input_ids))
        if self.tokens is None:
            await asyncio.get_running_loop().create_future()  # until the episode is cancelled
        whole = self.tokens or []
        room = self.max_context_tokens - len(input_ids)
        tokens = whole[: min(room, sampling.max_new_tokens)]
        self.was_cut |= tokens != whole
        reason = "stop" if tokens == whole else "length"
        return KeptCompletion(tokens, reason, sampling.temperature, tuple(sampling.stop))


@dataclass(frozen=True)
class _Answered:
    """A row and its right answer."""

    index: int
    row: dict[str, Any]
    text: str


@dataclass
class _Found:
    """What the rows came to: lengths of prompts, why others are of no use, and what is lost.

    Attributes:
        changed: how a text was changed of which nothing is lost.
        answered: rows whose right answers differ.
    """

    texts: PromptTexts
    lengths: list[int] = field(default_factory=list)
    too_long: list[Rejection] = field(default_factory=list)
    unusable: list[Rejection] = field(default_factory=list)
    changed: str = ""
    answered: list[_Answered] = field(default_factory=list)

    def tell(self, num_rows: int | None, max_unusable: float) -> None:
        """Args: num_rows: of the dataset. max_unusable: share of those that were looked at.

        Raises: WorkflowError: more of them are of no use, or none is left. ConfigError: the text of
            most is lost.
        """
        num = len(self.lengths) + len(self.too_long) + len(self.unusable)
        if len(self.unusable) > max_unusable * num:
            raise WorkflowError(
                f"{len(self.unusable)} of {num} prompts cannot be given to the model; for example: "
                f"{self.unusable[0].describe()}"
            )
        if not self.lengths:
            raise WorkflowError(
                f"all {num} prompts that were looked at are too long; for example: "
                f"{self.too_long[0].describe()}"
            )
        of = "a stream" if num_rows is None else f"{num_rows} rows"
        sizes = f"{min(self.lengths)} to {max(self.lengths)} tokens"
        tell(f"prompts: {of}; {num} looked at, of {sizes}")
        for what, same in (("left out", self.too_long), ("rejected", self.unusable)):
            if same:
                tell(f"  {what}: {len(same)} of them; for example: {same[0].describe()}")
        self.texts.check()
        if self.texts.lost:
            tell(f"  WARNING: {self.texts.describe()}")
        elif self.changed:
            tell(f"  WARNING: the model's tokenizer changes the text of prompts: {self.changed}")


class TaskLook:
    """Looks at prompts and workflows.

    Args:
        run_dir: where the controller has written what workers read.
    """

    def __init__(self, config: RolloutConfig, run_dir: Path) -> None:
        self._config = config
        self._run_dir = run_dir
        self._tokenizer: Any = None
        self._processor: Any = None
        self._ends: tuple[int, ...] = ()

    def look(self, source: RolloutSource, make_readable: MakeReadable) -> None:
        """Shows what the rows and the workflow come to.

        Raises: ArealError: they cannot be used: as the run would tell it, or its workers.
        """
        folder = cached_model(self._config.path)
        if folder is None:
            tell(f"model {self._config.path}: not there yet, so no prompt is looked at")
            return
        # before the tokenizer is read: that loads torch, which begins threads
        rewards = ForkServer("areal_sc.agents.process:run_own_process")
        look = self._look(source, make_readable, rewards, folder)
        with ThreadPoolExecutor(1) as thread:  # a notebook's has a loop that runs
            thread.submit(asyncio.run, look).result()

    def _read_tokenizer(self, folder: Path) -> None:
        from areal_sc.engines.picture_processor import picture_processor
        from areal_sc.engines.tokenizer import check_ends, load_tokenizer

        self._tokenizer = load_tokenizer(folder)
        self._processor = picture_processor(folder, self._tokenizer)
        self._ends = check_ends(folder, self._tokenizer, self._config.generation)
        tokens = self._tokenizer.convert_ids_to_tokens(list(self._ends))
        shown = " or ".join(map(repr, [*tokens, *self._config.generation.stop]))
        tell(f"an answer ends with {shown or 'its only token'}")

    async def _look(
        self, source: RolloutSource, make_readable: MakeReadable, rewards: ForkServer, model: Path
    ) -> None:
        reader, limit_s = SourceReader(self._run_dir), self._config.reward_timeout_s
        run_code = CodeRunner(self._config.sandbox)
        apart: dict[str, Any] = {
            "sources": reader.folder,
            "isolation": self._config.sandbox.isolation,
            "hides": (self._run_dir,),
        }
        pool = RewardPool(
            rewards,
            num_processes=1,
            timeout_s=limit_s,
            log_path=self._run_dir / "reward.log",
            run_code=run_code,
            **apart,
        )
        log_path = self._run_dir / "episode.log"
        server, end_s = AgentServer("dry run"), time.monotonic() + LOOK_S
        agents = AgentPool(rewards, server, self._config.agents, log_path=log_path, **apart)
        own = pool, server, agents
        is_first = self._tokenizer is None
        try:
            if is_first:
                self._read_tokenizer(model)
            with importing_as_worker():
                workflow, prompts = reader.workflow(source.workflow), reader.prompts(source.dataset)
            if workflow.waits_outside:
                return tell("episodes wait for agents outside, so no prompt is looked at")
            found = _Found(PromptTexts(self._tokenizer))
            indices = range(source.num_prompts or MAX_STREAMED)
            for index in indices[:: -(-len(indices) // MAX_ROWS)]:
                if found.lengths and time.monotonic() > end_s:
                    break
                try:
                    await make_readable(source.dataset, index)
                except WorkflowError:
                    if source.num_prompts is None and found.lengths:
                        break  # a short stream: the run says so when it needs more of it
                    raise
                await self._look_at_row(workflow, prompts, index, own, found)
            found.tell(source.num_prompts, self._config.max_rejection_rate)
            if is_first:  # others are those of evaluations
                self._tell_shared(fmean(found.lengths))
            await self._compare_answers(workflow, found.answered, own)
        finally:
            await agents.close()
            await server.close()
            await pool.close()
            await rewards.close()
            await run_code.close()
        if pool.isolation is not None:
            tell(f"rewards of your own are kept apart by {pool.isolation or 'nothing'}")
        tell(f"code of a model is kept apart by {await describe_sandbox(self._config.sandbox)}")

    def _tell_shared(self, prompt_tokens: float) -> None:
        """Says which share of a batch's tokens a model need not compute for each row of a group.

        Args: prompt_tokens: of a row, in the mean.
        """
        num_rows, room = self._config.group_size, self._config.max_context_tokens - prompt_tokens
        answer = min(self._config.generation.max_new_tokens, room)
        saved = (1 - 1 / num_rows) * prompt_tokens / (prompt_tokens + answer)
        if num_rows > 1:
            tell(
                f"a group's {num_rows} rows begin alike: {saved:.0%} of a batch's tokens need no "
                f"computing where prompts are computed once, if answers have {answer:.0f}"
            )

    async def _look_at_row(
        self, workflow: Workflow, prompts: Prompts, index: int, own: OwnPools, found: _Found
    ) -> None:
        row: dict[str, Any] | None = None
        try:
            row = with_pictures(dict(prompts[index]))
            tokens = await self._first_prompt(workflow, row, own)
        except BaseException as raised:  # the user's code may raise anything
            if isinstance(raised, ConfigError):
                raise
            error = raised.error if isinstance(raised, Raised) else raised
            if isinstance(raised, Raised) and raised.is_late:
                raise WorkflowError(
                    f"row {index}: the episode asked the model nothing in {EPISODE_LIMIT_S:g} s"
                ) from None
            if isinstance(error, NeverWorks):
                raise error from None
            why = Rejection.of(error).of_prompt(index, row, "")
            (found.too_long if isinstance(error, PromptTooLong) else found.unusable).append(why)
            if len(found.unusable) == UNUSABLE and not found.lengths:
                found.tell(UNUSABLE, 0.0)
            return
        if found.texts.num_judged < MAX_JUDGED:
            found.texts.judge(row, tokens)
            found.changed = found.changed or describe_lost(self._tokenizer, texts_in(row), tokens)
        one = _Answered(index, row, _right_answer(row))
        if not found.lengths:
            self._show(index, tokens, row.get(IMAGES, ()))
            await self._play(workflow, one, own)
        others = [it.text.strip() for it in found.answered]
        if one.text.strip() not in ("", *others) and len(others) < MAX_ANSWERED:
            found.answered.append(one)
        found.lengths.append(len(tokens))

    async def _first_prompt(
        self, workflow: Workflow, row: dict[str, Any], own: OwnPools
    ) -> list[int]:
        """What an episode asks the model first; it ends there."""
        model = self._model(None)
        playing = self._episode(workflow, row, own, model)
        episode: asyncio.Task[Any] = asyncio.create_task(playing)
        await asyncio.wait([episode, model.asked], return_when=asyncio.FIRST_COMPLETED)
        if not model.asked.done():
            await episode
            raise WorkflowError("the episode has ended, and asked the model nothing")
        episode.cancel()
        await asyncio.gather(episode, return_exceptions=True)
        return model.asked.result()

    async def _play(self, workflow: Workflow, one: _Answered, own: OwnPools) -> None:
        """A whole episode, whose answers are the row's own.

        Raises: WorkflowError: it would be rejected.
        """
        try:
            rows = await self._episode(workflow, one.row, own, self._writes(one.text))
        except Raised as raised:
            rows = Rejection.of(raised.error)
        if isinstance(rows, Rejection):
            why = rows.of_prompt(one.index, one.row, "").describe()
            raise WorkflowError(f"tried on one row, the episode was rejected: {why}")
        shown = ", ".join(f"{float(it.reward):g}" for it in rows)
        tell(f"reward of the answer {one.text[:_SHOWN_CHARS]!r} to it: {shown}")
        if lost := lost_from(self._tokenizer, one.text):
            tell(f"  WARNING: the model cannot write this answer by its tokens: {lost}")

    async def _compare_answers(
        self, workflow: Workflow, answered: list[_Answered], own: OwnPools
    ) -> None:
        """Gives rows the right answers of others, in pairs, the shortest with the longest.

        What is right of the one is wrong of the other, so nothing but a reward that is the wrong
        way round gives both wrong ones more in each pair. One that is the right way round, but
        gives a wrong answer that is no shorter more than the right one, counts something else for
        more. What differs from one try to the next says nothing.

        It ends with the pair that it is at after a minute.

        Raises: ConfigError: a right answer gets less than a wrong one.
        """
        answered = sorted(answered, key=lambda one: len(one.text))
        faults, end_s = list[str](), time.monotonic() + LOOK_S
        for one, other in zip(answered[: len(answered) // 2], answered[::-1], strict=False):
            if time.monotonic() > end_s:
                break
            rewards = await self._rewards(workflow, one, other, own)
            fault = _fault_in(rewards, one, other)
            if not fault:
                return
            for _ in range(2):
                if await self._rewards(workflow, one, other, own) != rewards:
                    return
            faults.append(fault)
            if fault.startswith(_OUTWEIGHED):
                break
        if faults:
            raise ConfigError(
                f"a right answer gets less reward than a wrong one: {faults[0]}; mend the reward, "
                "or if the rows' `answer` is no right answer, give it another name"
            )

    async def _rewards(
        self, workflow: Workflow, one: _Answered, other: _Answered, own: OwnPools
    ) -> list[float]:
        """Of both answers to the one row, then of both to the other; empty if one has none."""
        rewards = list[float]()
        for row, answer in product((one, other), repeat=2):
            model = self._writes(answer.text)
            try:
                rows = await self._episode(workflow, row.row, own, model)
            except Raised:
                return []
            if isinstance(rows, Rejection) or len(rows) != 1 or model.was_cut:
                return []
            rewards.append(float(rows[0].reward) or 0.0)  # not -0
        return rewards

    async def _episode(
        self, workflow: Workflow, row: dict[str, Any], own: OwnPools, model: _Model
    ) -> list[Trajectory] | Rejection:
        """Raises: Raised: what the user's code has raised. ConfigError: the engine refuses."""
        pool, server, agents = own
        config = self._config
        seen = WorkerEpisodeEngine(model, pool, "dry run", config.generation, None, server, agents)
        try:
            return await played_episode(
                workflow, row, seen, config, EPISODE_LIMIT_S, is_trained=True
            )
        finally:
            if isinstance(seen.failure, ConfigError):
                raise seen.failure
            if seen.endless:
                raise ConfigError(seen.endless)

    def _writes(self, text: str) -> _Model:
        """A model that answers with this text, and ends."""
        stop = "" if self._ends else "".join(self._config.generation.stop[:1])
        return self._model([*encode_text(self._tokenizer, text + stop), *self._ends[:1]] or [0])

    def _model(self, tokens: list[int] | None) -> _Model:
        return _Model(self._tokenizer, self._ends, self._config, tokens, self._processor)

    def _show(self, index: int, tokens: list[int], pictures: Sequence[bytes]) -> None:
        tell(f"row {index} as the model gets it, {len(tokens)} tokens:")
        for number, picture in enumerate(pictures):
            width, height = decoded(picture).size
            size = f"{width} x {height} pixels, {len(picture)} bytes"
            its = self._processor.processed(picture).num_tokens
            tell(f"  picture {number}: {size}, {its} tokens")
        place = self._processor.token_id if pictures else None
        before = [None, *tokens]
        shown = [it for it, last in zip(tokens, before, strict=False) if (it, last) != (place,) * 2]
        text = self._tokenizer.decode(shown)[:_SHOWN_CHARS]
        for line in text.splitlines() or [""]:
            tell(f"  | {line}")


_ROUNDING: Final = 1e-9
_OUTWEIGHED: Final = "something else counts more than being right: "


def _right_answer(row: dict[str, Any]) -> str:
    """The text of a row's right answer, "" where it has none that is a text or a number."""
    given = row.get("answer", "")
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    return str(given) if isinstance(given, str) or is_number else ""


def _fault_in(rewards: list[float], one: _Answered, other: _Answered) -> str:
    """What is wrong with rewards of both answers to the one row, then of both to the other."""
    if not rewards:
        return ""
    own, others, ones, its = rewards
    is_less, other_is_less = own < others, its < ones
    is_outweighed = (is_less and len(one.text) <= len(other.text)) or (
        other_is_less and len(other.text) <= len(one.text)
    )
    if is_less and other_is_less:
        what = "it is the wrong way round: "
    elif is_outweighed and own + its - others - ones > _ROUNDING * max(map(abs, rewards)):
        what = _OUTWEIGHED
    else:
        return ""
    texts = f"{one.text!r:.80}", f"{other.text!r:.80}"
    return (
        f"{what}to row {one.index}, {texts[0]} gets {own:g} and {texts[1]} {others:g}; to row "
        f"{other.index}, {texts[1]} gets {its:g} and {texts[0]} {ones:g}"
    )
