"""What one episode sees of its worker, and what the worker tells of all its episodes."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from hashlib import blake2b
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from msgspec import Struct

from areal_sc.agents.agent import as_json
from areal_sc.agents.journal import SessionJournal
from areal_sc.agents.pool import AgentPool
from areal_sc.agents.server import AgentServer
from areal_sc.agents.session import SessionSettings
from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion, GenerationEngine, OnTokens, RequestOptions
from areal_sc.errors import ConfigError, NeverWorks, PromptTooLong, WorkerError, WorkflowError
from areal_sc.records.recorder import Recorder
from areal_sc.records.spans import NO_VERSION, RecordedSpan
from areal_sc.rejection import Rejection, RejectionKind
from areal_sc.rewards.base import IS_SHAPING, Reward, RewardFunction, Score, name_of
from areal_sc.rewards.pool import RewardPool
from areal_sc.rewards.weighted import weighted_functions
from areal_sc.sizing.pictures import MAX_ROW_BYTES
from areal_sc.sources.pictures import IMAGES, data_url, packed
from areal_sc.system.sandbox.program import Ended, Limits, Program
from areal_sc.system.waiting import all_of
from areal_sc.token_fields import PICTURES, TensorMetadata
from areal_sc.workers.calls import AGENT_OUTSIDE, EpisodesReport, Waiting
from areal_sc.workers.episode_routes import EpisodeRoutes
from areal_sc.workers.evaluated import EvaluatedEpisode
from areal_sc.workflows.base import AgentReturn, AgentSession, Trajectory
from areal_sc.workflows.chat import ChatTurn, Conversation, OnText
from areal_sc.workflows.pictures import encode_chat_with, encode_text_with
from areal_sc.workflows.text_checks import why_endless

if TYPE_CHECKING:
    from areal_sc.engines.picture_processor import PictureProcessor

OWN_CODE: Final = "the workflow's own code, or a tool"


class EpisodeWait(Struct, eq=False, gc=False):
    """What an episode waits for, or has waited for.

    Attributes:
        began: Unix time in seconds.
        since_s: the same by the monotonic clock.
        versions: of the first and the last sampled token; -1: none was sampled.
    """

    what: str
    began: float
    since_s: float
    took_s: float = 0.0
    versions: tuple[int, int] = (NO_VERSION, NO_VERSION)
    num_tokens: int = 0

    def note(self, answer: Completion) -> None:
        """It has brought this."""
        self.num_tokens = len(answer.token_ids)
        if answer.versions:
            self.versions = answer.versions[0], answer.versions[-1]


class WorkerEpisodeEngine:
    """What one episode sees of its worker.

    Args:
        evaluated: notes what the episode asks for; None: it is trained.
        agents: serves its sessions; None: it can have none.
        agent_pool: runs its agents; not there without `agents`.
        journal: of its session; None: that does not outlive the worker.
        routes: the field of its rows' routes; None: they have none.
        pictures: of its row; None: rows have no field of that name.
        pictures_of_rows: see `Workflow`.

    Attributes:
        failure: the engine's own failure during the episode, whatever the user's code made of it.
        endless: why one of its answers ends elsewhere than the chat template ends it.
        group: of the episode; its requests share what their prompts have in common.
        open_waits, past_waits: what it waits for, and has waited for, by the ends.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        rewards: RewardPool,
        group: str,
        sampling: GenerationConfig,
        evaluated: EvaluatedEpisode | None = None,
        agents: AgentServer | None = None,
        agent_pool: AgentPool | None = None,
        journal: SessionJournal | None = None,
        routes: TensorMetadata | None = None,
        pictures: Sequence[bytes] | None = None,
        *,
        pictures_of_rows: bool = False,
    ) -> None:
        self.tokenizer = engine.tokenizer
        self.max_context_tokens = engine.max_context_tokens
        self.end_token_ids = engine.end_token_ids
        self.failure: BaseException | None = None
        self.endless = ""
        self._engine = engine
        self._rewards = rewards
        self._sampling = sampling
        self.is_evaluation = evaluated is not None
        self._evaluated = evaluated
        self._agents = agents
        self._agent_pool = agent_pool
        self._journal = journal
        self.routes = EpisodeRoutes(routes)
        self._pictures = pictures
        self._pictures_of_rows = pictures_of_rows
        self.open_waits: list[EpisodeWait] = []
        self.past_waits: list[EpisodeWait] = []
        self.group = group
        self._own_code_since_s = time.monotonic()
        self._has_answered = False

    @property
    def processor(self) -> PictureProcessor | None:
        """Of a model that reads pictures; None: it reads none."""
        return self._engine.processor

    @property
    def waits(self) -> list[tuple[str, float]]:
        """What the episode waits for now, each with the time since when (monotonic, s)."""
        now = [(wait.what, wait.since_s) for wait in self.open_waits]
        return now or [(OWN_CODE, self._own_code_since_s)]

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: GenerationConfig | None = None,
        *,
        on_tokens: OnTokens | None = None,
        pictures: Sequence[bytes] | None = None,
    ) -> Completion:
        if pictures and not self._pictures_of_rows:
            raise NeverWorks(
                "messages of an agent have pictures, and rows of the workflow have those of the "
                "data: set pictures_of_rows = True in its class"
            )
        sampling = sampling or self._sampling
        if not isinstance(sampling, GenerationConfig):
            found = type(sampling).__name__
            raise WorkflowError(f"expected a GenerationConfig or None to sample by, got {found}")
        evaluated = self._evaluated
        if evaluated is not None and evaluated.temperature is not None:
            sampling = replace(sampling, temperature=evaluated.temperature)
        if not (self.endless or sampling.stop or sampling.max_new_tokens == 1):
            ends = *self.end_token_ids, *sampling.stop_token_ids
            self.endless = why_endless(self.tokenizer, input_ids, ends)
        place = 0 if evaluated is None else evaluated.begin(input_ids)
        in_callback = False

        def tell(token_ids: Sequence[int]) -> None:
            nonlocal in_callback
            assert on_tokens is not None
            in_callback = True
            on_tokens(token_ids)
            in_callback = False

        group, its = self.group, self._pictures if pictures is None else pictures
        if its and self.processor and self.processor.token_id not in input_ids:
            its = ()  # it is a request of text alone
        if pictures:  # requests whose tokens are equal may have others
            group += blake2b(packed(pictures).tobytes(), digest_size=16).hexdigest()
        options = RequestOptions(prefix_group=group, pictures=tuple(its or ()))
        try:
            with self._waiting("generation") as wait:
                answer = await self._engine.generate(
                    input_ids,
                    sampling,
                    options,
                    on_tokens=None if on_tokens is None else tell,
                )
                wait.note(answer)
            answer = self.routes.take(input_ids, answer)
            if evaluated is not None:
                evaluated.completions[place] = answer
            self._has_answered = True
            return answer
        except PromptTooLong as error:
            if self._has_answered:  # not the prompt is too long: its episode has grown
                raise WorkflowError(str(error)) from error
            raise
        except (WorkflowError, ConfigError):  # by what the user's code asked for
            raise
        except Exception as error:  # the user's code may catch it; it is no result of the episode
            if not in_callback:  # else it is of the user's own callback
                self.failure = error
            raise

    def encode_pictures(
        self,
        pictures: Sequence[bytes],
        prompt: Any,
        *,
        use_chat_template: bool = True,
        chat_template_arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        processor = self.processor
        if processor is None:
            raise NeverWorks("the row has pictures, and the model reads none")
        own = pictures, processor, self.tokenizer
        if use_chat_template:
            return encode_chat_with(*own, prompt, chat_template_arguments)
        return encode_text_with(*own, prompt)

    def with_own_fields(self, rows: list[Trajectory] | Rejection) -> list[Trajectory] | Rejection:
        """The rows with the fields that the engine adds: routes, and pictures.

        Raises: WorkflowError: a row has too few tokens for its pictures.
        """
        rows = self.routes.with_routes(rows)
        if self._pictures is None or isinstance(rows, Rejection):
            return rows
        found, num_bytes = list[Trajectory](), 0
        for row in rows:
            its = self._pictures
            if self._pictures_of_rows and row.pictures is not None:
                its = row.pictures
            if its and self.processor:
                num_tokens = int(np.count_nonzero(np.equal(row.input_ids, self.processor.token_id)))
                self.processor.count_places(num_tokens, its)
            fields = {**row.fields, PICTURES: packed(its)}
            num_bytes += fields[PICTURES].nbytes
            found.append(replace(row, fields=fields))
        if self._pictures_of_rows and num_bytes > MAX_ROW_BYTES:
            return Rejection(
                RejectionKind.too_long,
                f"the pictures of the episode's {len(rows)} rows have {num_bytes} bytes, expected "
                f"at most {MAX_ROW_BYTES}: make them smaller, or train fewer branches",
            )
        return found

    async def chat(
        self,
        conversation: Conversation,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        stop: str | Sequence[str] | None = None,
        sampling: GenerationConfig | None = None,
        on_text: OnText | None = None,
    ) -> ChatTurn:
        sampling = sampling or self._sampling
        if stop is not None:
            sampling = replace(sampling, stop=[stop] if isinstance(stop, str) else list(stop))
        return await conversation.answer(self, tools, sampling, on_text)

    def open_session(
        self,
        *,
        rows: str = "merge",
        history: str = "template",
        max_turns: int = 0,
        chat_template_arguments: Mapping[str, Any] | None = None,
    ) -> AbstractAsyncContextManager[AgentSession]:
        if self._agents is None:
            raise NeverWorks(
                "open_session: an agent cannot be played again from kept answers: evaluate anew"
            )
        if self._agent_pool is not None:
            max_turns = max_turns or self._agent_pool.config.max_turns
        settings = SessionSettings(rows, history, max_turns, chat_template_arguments)
        return self._session(self._agents, settings)

    @asynccontextmanager
    async def _session(
        self, agents: AgentServer, settings: SessionSettings
    ) -> AsyncIterator[AgentSession]:
        try:
            journal, self._journal = self._journal, None  # of the episode's first session
            async with agents.open(self, self._sampling, settings, journal) as session:
                yield session
        except WorkerError as error:
            self.failure = error
            raise

    async def run_agent(
        self, agent: Any, row: Mapping[str, Any], session: AgentSession, *, is_alone: bool = False
    ) -> AgentReturn:
        assert self._agent_pool is not None
        row = _with_urls(row)
        try:
            with self._waiting(f"the agent {name_of(agent)}"):
                return await self._agent_pool.run(agent, row, session, is_alone=is_alone)
        except (WorkerError, ConfigError) as error:
            self.failure = error
            raise

    async def await_agent(
        self, row: Mapping[str, Any], session: AgentSession
    ) -> float | Mapping[str, float]:
        if self._evaluated is not None:
            raise NeverWorks(
                "an evaluation cannot wait for agents outside: give it a workflow of its own"
            )
        assert self._agents is not None
        assert self._agent_pool is not None
        told = json.loads(as_json(_with_urls(row), AGENT_OUTSIDE))
        with self._waiting(AGENT_OUTSIDE):
            return await self._agents.wait_outside(session.api_key, told, self._agent_pool.config)

    async def score(self, reward: Reward, prompt: Mapping[str, Any], completion: str) -> Score:
        functions = weighted_functions(reward)
        if self._evaluated is not None:
            self._evaluated.scored = reward, completion
        if not isinstance(reward, Mapping):
            return await self._score_one(reward, name_of(reward), prompt, completion)
        numbers = await all_of(
            self._score_one(function, name_of(function, name), prompt, completion)
            for name, (function, _) in functions.items()
        )
        scores = dict(zip(functions, numbers, strict=True))
        parts = {
            f"{name}_{part}": value
            for name, score in scores.items()
            for part, value in score.parts.items()
        }
        parts |= {name: float(score) for name, score in scores.items()}
        earned, shaping = 0.0, 0.0
        for name, (function, weight) in functions.items():
            earned += weight * parts[name]
            shaping += weight * parts[name] if getattr(function, IS_SHAPING, False) else 0.0
        weights = {name: weight for name, (_, weight) in functions.items()}
        return Score(earned, parts, shaping, weights)

    async def vote(self, reward: RewardFunction, completion: str) -> str | None:
        """What an answer says, see `RewardPool.vote`; for who judges the episode."""
        return await self._rewards.vote(reward, completion)

    async def run_code(
        self, code: str | Program, stdin: str = "", limits: Limits | None = None
    ) -> Ended:
        with self._waiting("the sandbox"):
            return await self._rewards.run_code(code, stdin, limits)

    async def _score_one(
        self, reward: RewardFunction, name: str, prompt: Mapping[str, Any], completion: str
    ) -> Score:
        try:
            with self._waiting(f"the reward {name}"):
                return await self._rewards.score(reward, dict(prompt), completion, name=name)
        except WorkerError as error:
            self.failure = error
            raise

    @contextmanager
    def _waiting(self, what: str) -> Iterator[EpisodeWait]:
        wait = EpisodeWait(what, time.time(), time.monotonic())
        self.open_waits.append(wait)
        try:
            yield wait
        finally:
            self.open_waits.remove(wait)
            self._own_code_since_s = time.monotonic()
            wait.took_s = self._own_code_since_s - wait.since_s
            self.past_waits.append(wait)


def _with_urls(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row as an agent gets it: pictures are as it sends them to the model."""
    pictures = row.get(IMAGES)
    return {**row, IMAGES: [data_url(it) for it in pictures]} if pictures else row


class _Running(NamedTuple):
    """An episode that runs, in its lane."""

    lane: int
    whole: EpisodeWait


class Episodes:
    """The episodes of a worker: those that run, and how the others ended.

    Each is recorded in a lane of its own, the lowest free one, with what it has waited for.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._running: dict[WorkerEpisodeEngine, _Running] = {}
        self._free_lanes: list[int] = []
        self._num_kept = 0
        self._num_rejected = 0
        self._causes: set[str] = set()
        self._untold: list[Rejection] = []

    @contextmanager
    def running(self, episode: WorkerEpisodeEngine) -> Iterator[None]:
        lane = heappop(self._free_lanes) if self._free_lanes else len(self._running)
        whole = EpisodeWait("episode", time.time(), time.monotonic())
        self._running[episode] = _Running(lane, whole)
        try:
            yield
        finally:
            del self._running[episode]
            heappush(self._free_lanes, lane)
            whole.took_s = time.monotonic() - whole.since_s
            self._recorder.add_spans(
                [self._span(wait, lane, episode) for wait in (whole, *episode.past_waits)]
            )

    def _span(self, wait: EpisodeWait, lane: int, episode: WorkerEpisodeEngine) -> RecordedSpan:
        first, last = wait.versions
        return RecordedSpan(
            process=self._recorder.process,
            kind=wait.what,
            began=wait.began,
            took_s=wait.took_s,
            lane=lane,
            about=episode.group,
            first_version=first,
            last_version=last,
            num_tokens=wait.num_tokens,
        )

    def note_kept(self) -> None:
        self._num_kept += 1

    def note_rejected(self, rejection: Rejection) -> None:
        self._num_rejected += 1
        if rejection.cause not in self._causes:
            self._causes.add(rejection.cause)
            self._untold.append(rejection)

    def report(self) -> EpisodesReport:
        """What became of them, and what they wait for. Each new cause is told once."""
        now_s = time.monotonic()
        waited: dict[str, list[float]] = {}
        for what, since_s in (wait for episode in self._running for wait in episode.waits):
            waited.setdefault(what, []).append(now_s - since_s)
        untold, self._untold = self._untold, []
        return EpisodesReport(
            tuple(Waiting(what, len(times), max(times)) for what, times in waited.items()),
            self._num_kept,
            self._num_rejected,
            tuple(untold),
        )
