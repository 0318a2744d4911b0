"""A generation engine as a process: runs workflows, seals trajectories, follows the weights.

run_group    `group_size` episodes of one prompt, concurrently; each is sealed when it ends (see
             `finished_episodes`), and the reply is the metadata of all. An episode gives one or
             several rows. One whose workflow or reward fails is rejected with its cause; an engine
             that fails is no result of any episode and fails the call.
             Asked for again, the run is joined, or its reply repeated: see `group_runs`.
             `give_up_group` ends the episodes; the reply then says that nothing was sealed
weights      read beside generation (`weights/adopter.py`), then applied between two decode steps
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch

from areal_sc.agents.pool import AgentPool
from areal_sc.agents.server import AgentServer
from areal_sc.config.schema import RolloutConfig
from areal_sc.engines.base import Completion, EndsWithServer, FollowingEngine
from areal_sc.engines.handle_base import GeneratorHandle
from areal_sc.engines.tokenizer import check_ends
from areal_sc.errors import ConfigError, EngineFailed, StoreFull, WorkerLost
from areal_sc.hub import local_model
from areal_sc.metadata import PromptReference
from areal_sc.nodes.spec import WorkerSpec
from areal_sc.records.spans import START_UP
from areal_sc.rejection import Rejection, RejectionKind
from areal_sc.rewards.pool import RewardPool
from areal_sc.rewards.running import CodeRunner
from areal_sc.sizing.pictures import engine_fields, fields_of_rows
from areal_sc.sources.pictures import IMAGES, with_pictures
from areal_sc.sources.prompts import row_of, row_to_wire
from areal_sc.system.fork_server import ForkServer
from areal_sc.system.waiting import all_of
from areal_sc.token_fields import PICTURES, ROUTED_EXPERTS, TensorMetadata
from areal_sc.transport.rpc.method import Served
from areal_sc.transport.shards.memory_folder import OFF
from areal_sc.user_code import CANCEL_GRACE_S, Raised, await_user_code, describe, text_of
from areal_sc.weights.adopter import Adopter
from areal_sc.workers import calls
from areal_sc.workers.base import Worker
from areal_sc.workers.calls import DESCRIBE_ROLLOUT, RolloutDescription
from areal_sc.workers.episodes import Episodes, WorkerEpisodeEngine
from areal_sc.workers.evaluated import (
    EvaluatedEpisode,
    episode_metrics,
    evaluated_text,
    evaluation_reply,
)
from areal_sc.workers.finished_episodes import (
    NUM_QUICK,
    SEAL_AFTER_S,
    EndedEpisode,
    EndingGroup,
    FinishedEpisodes,
)
from areal_sc.workers.group_judging import Episode, judged_group
from areal_sc.workers.group_runs import GroupRuns
from areal_sc.workers.kept_sessions import KeptSessions
from areal_sc.workers.played_groups import played_answer, played_group, row_text
from areal_sc.workers.trajectory_checks import checked_episode
from areal_sc.workflows.base import Workflow
from areal_sc.workflows.text import describe_unknown
from areal_sc.workflows.text_checks import MAX_JUDGED, PromptTexts

logger = logging.getLogger(__name__)

NoteEnd = Callable[[int, Episode | Rejection, int, float], Awaitable[Episode | Rejection]]
"""Is told the number of an episode that has ended, what came of it, how many tokens were sampled,
and how many seconds it took."""


def _pictures_of(row: Mapping[str, Any] | None) -> Sequence[bytes]:
    """Those of a row of the dataset; None: it cannot be had."""
    return () if row is None else row.get(IMAGES, ())


def _context(episode: Episode) -> list[int]:
    """The prompt of its first row."""
    row = episode[0]
    return list(row.input_ids[: int(np.argmax(row.loss_mask))])


class RolloutWorker(Worker):
    """Serves a `FollowingEngine` to workflows."""

    handle: GeneratorHandle

    def __init__(self, spec: WorkerSpec, agent: int) -> None:
        # forked before this process has keys or threads: what it forks runs code of the user's
        self._reward_server = ForkServer("areal_sc.agents.process:run_own_process")
        super().__init__(spec, agent)
        config = self.handle.config
        self._run_code = CodeRunner(config.sandbox)
        apart: dict[str, Any] = {
            "sources": self.sources.folder,
            "isolation": config.sandbox.isolation,
            "hides": (spec.run.run_dir, spec.memory_root),
        }
        self._rewards = RewardPool(
            self._reward_server,
            num_processes=config.num_reward_processes,
            timeout_s=config.reward_timeout_s,
            log_path=spec.log_path.with_name(f"reward-{spec.order.index}.log"),
            run_code=self._run_code,
            **apart,
        )
        self._sessions = KeptSessions(self.memory_folder("sessions"), self.plane.store)
        served = spec.name, spec.order.incarnation, self.keys.sessions
        self._agents = AgentServer(*served, is_kept=self._sessions.is_kept)
        log = spec.log_path.with_name(f"episode-{spec.order.index}.log")
        own = self._reward_server, self._agents, config.agents
        self._agent_pool = AgentPool(*own, log_path=log, **apart)
        self._watches: list[asyncio.Task[None]] = []
        self._engine: FollowingEngine | None = None
        self._own_fields: dict[str, TensorMetadata] = {}
        self._all_episodes = Episodes(self.recorder)
        self._texts: dict[int, PromptTexts] = {}  # of each dataset
        self._judged: set[tuple[int, int]] = set()  # its rows
        self._endless = ""  # why answers do not end where the chat template ends them
        self._runs = GroupRuns(config.group_timeout_s + 2 * CANCEL_GRACE_S)
        self._starting: asyncio.Task[None] | None = None
        self._weights = Adopter(self, lambda: self.engine, self._agents.clock)
        self._num_quick_groups = 0  # in a row
        self._finished = FinishedEpisodes(spec.name, lambda: self.address, self.plane)
        self._group_counters: dict[str, float] = defaultdict(int)

    @property
    def engine(self) -> FollowingEngine:
        assert self._engine, "the controller calls initialize first"
        return self._engine

    def methods(self) -> list[Served]:
        return [
            *super().methods(),
            calls.INITIALIZE_ENGINE.served_by(self.initialize),
            DESCRIBE_ROLLOUT.served_by(self.describe),
            calls.RUN_GROUP.served_by(self.run_group),
            calls.GIVE_UP_GROUP.served_by(self._runs.give_up),
            calls.AGENTS_AT.served_by(lambda _: self._agents.reachable(self._interface)),
            calls.EPISODES.served_by(lambda _: self._all_episodes.report()),
            calls.RUN_EVALUATION.served_by(self.run_evaluation),
            calls.GENERATE.served_by(self.generate),
            *self._weights.served(),
            calls.SLEEP.served_by(self.sleep),
            calls.PAUSE.served_by(self.pause),
            calls.RESUME.served_by(self.resume),
        ]

    async def close(self) -> None:
        for watch in self._watches:
            watch.cancel()
        await self._runs.close()
        await self._agent_pool.close()
        await self._agents.close()
        if self._engine is not None:
            await self._engine.close()
        await self._rewards.close()
        await self._run_code.close()
        await self._reward_server.close()

    async def initialize(self, _: None) -> None:
        self._starting = self._starting or asyncio.create_task(self._start(), name="engine start")
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        self._watches.append(asyncio.create_task(self._end_with_rewards(), name="reward watch"))
        torch.set_num_threads(self.handle.config.num_threads)
        logs, handle = self.spec.log_path, self.handle.in_life(self.spec.term, self.order.life)
        with self.recorder.span(START_UP):
            engine: FollowingEngine = await self.compute(
                lambda: handle.build(log_folder=logs.parent, name=logs.stem)
            )
            await engine.start()
        if isinstance(engine, EndsWithServer):
            self._watches.append(asyncio.create_task(self._end_with(engine), name="engine watch"))
        config = self.handle.config
        folder = local_model(config.path)
        await self.compute(lambda: check_ends(folder, engine.tokenizer, config.generation))
        self._own_fields = await self.compute(lambda: engine_fields(config))
        self._engine = engine

    async def describe(self, groups: tuple[int, ...]) -> RolloutDescription:
        runs, held = self._runs, self.held_shards(groups)
        return RolloutDescription(self._weights.policy, runs.going, runs.ended, held)

    def held_shards(self, groups: Collection[int]) -> tuple[calls.HeldShard, ...]:
        return tuple(map(self._sessions.checked, super().held_shards(groups)))

    async def run_group(self, group: calls.RunGroup) -> calls.GroupReply:
        run = calls.GroupAttempt(group.group_id, group.attempt)
        return await self._runs.join(run, lambda: self._play_group(run, group))

    async def _play_group(self, run: calls.GroupAttempt, group: calls.RunGroup) -> calls.GroupReply:
        """Episodes of one prompt; cancelled, it leaves nothing in the store."""
        began, began_s = time.time(), time.perf_counter()
        if group.attempt and group.group_id >= 0 and self.recorder.is_on:
            # it may be what killed the worker before: then only this tells its prompt
            await self.files.bring_source(group.prompt.dataset)
            begun = played_group(self.spec.name, group, self._text_of(group.prompt), began, {}, {})
            self.recorder.add_group(begun)
            await asyncio.to_thread(self.recorder.flush)
        is_training = group.group_id >= 0
        name = f"{group.group_id}.{group.attempt}.{group.prompt.index}"
        await self.files.bring_source(group.workflow)
        workflow = self.sources.workflow(group.workflow)
        outlives = self.transport_config.shared_memory != OFF
        if workflow.waits_outside and is_training and outlives:
            self._sessions.begin(name, group)
        declared = self._fields_of(workflow)
        ending = EndingGroup(
            self._finished,
            group,
            declared,
            is_quick=self._num_quick_groups >= NUM_QUICK,
            seals_last=workflow.scores_groups,
            note_sealed=lambda number: self._sessions.end(name, number),
        )
        ended, are_taken_over = ending.ended, asyncio.Event()

        async def note_end(
            number: int, outcome: Episode | Rejection, num_tokens: int, took_s: float
        ) -> Episode | Rejection:
            await are_taken_over.wait()  # they say what the group shares
            if problem := ending.problem_of_shared(outcome):
                where = f"{type(workflow).__name__}, group {group.group_id}, episode {number}: "
                rejection = Rejection(RejectionKind.workflow_error, where + problem)
                outcome = self._noted(rejection, group.prompt.index)
            ending.add(number, outcome, took_s)
            if is_training:
                self._group_counters["episodes_played"] += 1
                self._group_counters["episode_tokens"] += num_tokens
                self._group_counters["episode_s"] += took_s
            return outcome

        async def play(numbers: Sequence[int]) -> dict[str, Any] | None:
            row, _ = await self._episodes(
                group.prompt, group.workflow, name, numbers, note_end=note_end
            )
            return row

        async def take_over(numbers: Collection[int]) -> None:
            await self._finished.take_over(group, declared, ended)
            are_taken_over.set()
            if gone := [number for number in numbers if number not in ended]:
                await play(gone)

        is_closed = False
        try:
            kept = {it.episode.number for it in group.kept if not it.episode.session}
            kept.discard(calls.SHARED)
            missing = [number for number in range(group.group_size) if number not in kept]
            row, _ = await all_of([play(missing), take_over(kept)])
            outcomes = {number: it.outcome for number, it in sorted(ended.items())}
            judged = await self._judge_group(group.workflow, group.prompt, row, outcomes)
            complete = {number: replace(ended[number], outcome=it) for number, it in judged.items()}
            reply = self._close_group(run, group, row, complete, began)
            is_closed = True
        except (asyncio.CancelledError, StoreFull):
            self._finished.drop(ended.values())
            ended.clear()
            is_closed = True
            raise
        finally:
            ending.close(is_lost=not is_closed)
            for number in range(group.group_size):
                self._sessions.end(name, number, is_kept=not is_closed)
        first_s, now_s = min(ending.ends_s, default=-math.inf), asyncio.get_running_loop().time()
        is_quick = now_s - first_s < SEAL_AFTER_S
        self._num_quick_groups = self._num_quick_groups + 1 if is_quick else 0
        if is_training:
            self._group_counters["episodes_taken_over"] += group.group_size - len(ending.ends_s)
        if reply.batch is not None and is_training:
            self._group_counters["finished_groups"] += 1
            self._group_counters["group_s"] += time.perf_counter() - began_s
        return reply

    def _close_group(
        self,
        run: calls.GroupAttempt,
        group: calls.RunGroup,
        row: dict[str, Any] | None,
        ended: Mapping[int, EndedEpisode],
        began: float,
    ) -> calls.GroupReply:
        """The reply of a group that is complete: every episode of it is in `ended`, by its number.

        Args:
            row: of the dataset; None: it cannot be had.
            began: Unix time in seconds.
        """
        kept: dict[int, Episode] = {}
        rejected: dict[str, list[Rejection]] = {}
        metrics: dict[str, list[float]] = {}
        for number, episode in sorted(ended.items()):
            if isinstance(episode.outcome, Rejection):
                rejected.setdefault(episode.outcome.cause, []).append(episode.outcome)
                continue
            kept[number] = episode.outcome
            for name, value in episode_metrics(episode.outcome).items():
                metrics.setdefault(name, []).append(value)
        declared = self._fields_of(self.sources.workflow(group.workflow))
        batch = self._finished.batch_of(group, ended, declared)
        if self.recorder.is_open and group.group_id >= 0:
            text = text_of(row, row_text) if row is not None else ""
            it = played_group(self.spec.name, group, text, began, kept, rejected)
            self.recorder.add_group(replace(it, pictures=_pictures_of(row)))
        sums = {name: (sum(values), len(values)) for name, values in metrics.items()}
        causes = tuple(calls.RejectedEpisodes(len(same), same[0]) for same in rejected.values())
        warning = self._warning(group.prompt, kept)
        return calls.GroupReply(run, batch, causes, sums, warning, self.engine.num_waiting)

    async def run_evaluation(self, wanted: calls.RunEvaluation) -> calls.EvaluationReply:
        """One episode, of which nothing is stored."""
        name, seen = f"evaluation.0.{wanted.prompt.index}", EvaluatedEpisode(wanted.temperature)
        began = time.time()
        row, (rows,) = await self._episodes(wanted.prompt, wanted.workflow, name, [0], seen)
        judged = await self._judge_group(
            wanted.workflow, wanted.prompt, row, {0: rows}, is_trained=False
        )
        rows = judged[0]
        if wanted.evaluation and self.recorder.is_on:
            prompt = text_of(row, row_text) if row is not None else ""
            it = played_answer(self.spec.name, wanted, prompt, began, rows)
            self.recorder.add_answer(it._replace(pictures=_pictures_of(row)))
        text = evaluated_text(seen, self.engine.tokenizer) if wanted.keeps_text else None
        return await evaluation_reply(rows, seen, text, self._rewards)

    async def generate(self, wanted: calls.Generate) -> Completion:
        options = wanted.options
        if options.adapter:
            folder = await self.files.bring_adapter(options.adapter)
            options = replace(options, adapter=str(folder))
        completion = await self.engine.generate(wanted.input_ids, wanted.sampling, options)
        return replace(completion, routes=None)

    async def sweep(self, sweep: calls.Sweep) -> int:
        last_sequence = await super().sweep(sweep)
        self._runs.forget(self.plane.store.__contains__)
        self._sessions.forget()
        return last_sequence

    async def sleep(self, _: None) -> None:
        """The engine gives up the memory of its device until it gets weights."""
        if self._starting is not None:
            await asyncio.shield(self._starting)
            await self._weights.sleep()
            self.recorder.add_event("sleep")

    async def pause(self, _: None) -> None:
        await self.engine.pause()
        self.recorder.add_event("pause")

    async def resume(self, _: None) -> None:
        await self.engine.resume()
        self.recorder.add_event("resume")

    def engine_stats(self) -> dict[str, float]:
        if self._engine is None:
            return {}
        late = {"late_rewards": self._rewards.num_late}
        return {
            **self._engine.stats(),
            **self._group_counters,
            **self._weights.held.counters,
            **late,
        }

    async def _end_with_rewards(self) -> None:
        """Without rewards no episode can end, so the worker does: it will be started again."""
        await self._reward_server.wait_until_gone()
        logger.error(
            "pid=%d, the fork server of the reward processes, has ended, and all of them with it: "
            "this worker ends, because it cannot compute rewards any more",
            self._reward_server.pid,
        )
        self._end_at_once()

    async def _end_with(self, engine: EndsWithServer) -> None:
        """Without its server the worker generates nothing: it will be started again with one."""
        logger.error("%s: this worker ends", await engine.wait_until_lost())
        self._end_at_once()

    def _end_at_once(self) -> NoReturn:
        """A clean end would take along the shards that the next life is to adopt."""
        os._exit(WorkerLost.exit_code)

    async def _episodes(
        self,
        reference: PromptReference,
        workflow_number: int,
        name: str,
        numbers: Sequence[int],
        evaluated: EvaluatedEpisode | None = None,
        note_end: NoteEnd | None = None,
    ) -> tuple[dict[str, Any] | None, list[Episode | Rejection]]:
        """The row of the dataset, None where it cannot be had, and what came of each episode."""
        for number in (workflow_number, reference.dataset):
            await self.files.bring_source(number)
        workflow = self.sources.workflow(workflow_number)
        dataset = self.sources.prompts(reference.dataset)
        try:
            prompt = with_pictures(dict(dataset[reference.index]))
        except BaseException as error:  # the user's code may raise anything
            what = f"row {reference.index} of the dataset: {describe(error)}"
            rejection = Rejection.raised(RejectionKind.dataset_error, what, error)
            rejection = self._noted(rejection, reference.index)
            if note_end:
                for number in numbers:
                    await note_end(number, rejection, 0, 0.0)
            return None, [rejection] * len(numbers)
        wire = row_to_wire(prompt, reference.index, type(dataset).__name__)
        where = f"row {reference.index}"
        played = await all_of(
            self._episode(
                workflow, row_of(wire, where), reference, name, number, evaluated, note_end
            )
            for number in numbers
        )
        self._judge_text(reference, prompt, played)
        return prompt, played

    def _fields_of(self, workflow: Workflow) -> dict[str, TensorMetadata]:
        of_rows = workflow.pictures_of_rows
        return fields_of_rows(workflow.fields, self._own_fields, pictures_of_rows=of_rows)

    async def _judge_group(
        self,
        workflow_number: int,
        reference: PromptReference,
        prompt: dict[str, Any] | None,
        played: Mapping[int, Episode | Rejection],
        *,
        is_trained: bool = True,
    ) -> dict[int, Episode | Rejection]:
        """What came of the episodes of a complete group, by their numbers; see `judged_group`."""
        workflow = self.sources.workflow(workflow_number)
        judged = await judged_group(
            workflow,
            prompt,
            list(played.values()),
            self.engine.tokenizer,
            self.handle.config,
            vote=self._rewards.vote,
            is_trained=is_trained,
        )
        found = dict(zip(played, judged, strict=True))
        for number, was in played.items() if workflow.scores_groups else ():
            it = found[number]
            if isinstance(it, Rejection) and not isinstance(was, Rejection):
                found[number] = self._noted(it, reference.index, prompt)
            elif not isinstance(it, Rejection):
                self._all_episodes.note_kept()
        return found

    def _judge_text(
        self, prompt: PromptReference, row: dict[str, Any], played: Sequence[Episode | Rejection]
    ) -> None:
        """Raises: ConfigError: most prompts of the dataset do not reach the model as meant."""
        texts = self._texts.setdefault(prompt.dataset, PromptTexts(self.engine.tokenizer))
        kept = [episode for episode in played if not isinstance(episode, Rejection)]
        name = prompt.dataset, prompt.index
        if not kept or texts.num_judged == MAX_JUDGED or name in self._judged:
            return
        self._judged.add(name)
        texts.judge(row, _context(kept[0]))
        texts.check(num_left=MAX_JUDGED - texts.num_judged)

    async def _episode(
        self,
        workflow: Workflow,
        prompt: dict[str, Any],
        reference: PromptReference,
        group: str,
        number: int,
        evaluated: EvaluatedEpisode | None,
        note_end: NoteEnd | None,
    ) -> Episode | Rejection:
        config: RolloutConfig = self.handle.config
        own = self.engine, self._rewards, group, config.generation, evaluated
        journal = self._sessions.journal(group, number)
        routes = self._own_fields.get(ROUTED_EXPERTS) if evaluated is None else None
        pictures = prompt.get(IMAGES, ()) if PICTURES in self._own_fields else None
        engine = WorkerEpisodeEngine(
            *own,
            self._agents,
            self._agent_pool,
            journal,
            routes,
            pictures,
            pictures_of_rows=workflow.pictures_of_rows,
        )
        limit_s = math.inf if workflow.waits_outside else config.group_timeout_s
        # the call of an evaluation has a limit that knows nothing of this clock
        clock = self._agents.clock if evaluated is None else None

        async def run() -> Episode | Rejection:
            returned = await workflow.run_episode(dict(prompt), engine)
            is_trained = evaluated is None
            name, own = type(workflow).__name__, workflow.fields
            rows = checked_episode(returned, config, own, is_trained=is_trained, workflow=name)
            return engine.with_own_fields(rows)

        episode: Episode | Rejection
        began_s = time.perf_counter()
        try:
            with self._all_episodes.running(engine):
                episode = await await_user_code(run, limit_s, clock)
        except Raised as raised:
            episode = Rejection.of_episode(raised, limit_s)
        self._endless = self._endless or engine.endless
        if isinstance(engine.failure, ConfigError):  # it would be the same in another worker
            raise engine.failure
        if engine.failure:
            raise EngineFailed(f"generation failed: {engine.failure!r}") from engine.failure
        if isinstance(episode, Rejection):
            episode = self._noted(episode, reference.index, prompt)
        if note_end:
            num_tokens = sum(wait.num_tokens for wait in engine.past_waits)
            took_s = time.perf_counter() - began_s
            episode = await note_end(number, episode, num_tokens, took_s)
        if not (isinstance(episode, Rejection) or workflow.scores_groups):
            self._all_episodes.note_kept()
        return episode

    def _warning(self, prompt: PromptReference, kept: Mapping[int, Episode]) -> str:
        """About a prompt that the model cannot read, or answers that do not end."""
        if self._endless or not kept:
            return self._endless
        context = _context(next(iter(kept.values())))
        if not (what := describe_unknown(self.engine.tokenizer, context)):
            return ""
        return (
            f"the model's tokenizer does not know most of prompt {prompt.index}, "
            f"{self._text_of(prompt):.200}: {what}; use a model whose tokenizer knows such text"
        )

    def _text_of(self, prompt: PromptReference) -> str:
        """The row of its dataset."""
        return text_of(prompt.index, lambda it: row_text(self.sources.prompts(prompt.dataset)[it]))

    def _noted(
        self, rejection: Rejection, prompt_index: int, prompt: Mapping[str, Any] | None = None
    ) -> Rejection:
        """The rejection with the prompt that it is of; it is counted, and in the log."""
        rejection = rejection.of_prompt(prompt_index, prompt, str(self.spec.log_path))
        self._all_episodes.note_rejected(rejection)
        logger.info("rejected %s", rejection.describe())  # the controller warns of it
        return rejection
