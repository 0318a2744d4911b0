"""The calls of one episode's agent, and the rows to train on that come from them. No torch.

consumes     calls, in any order and beside each other, of clients that may go away and come back
waits for    the engine's answers
unblocked by the engine; or by `end`, which cancels what still runs

    call --> begin --> SessionCall.answer --> delivered --> trained
                              ^ a retry joins            \\-- not: not trained, and counted
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from areal_sc.agents.calls import (
    CallRefused,
    ContextOverflow,
    ModelAnswer,
    ModelCall,
    SampledToken,
    anew,
)
from areal_sc.agents.history import CallHistory, CallPlace
from areal_sc.agents.journal import Record, SessionJournal, WrittenAnswer, WrittenPicture
from areal_sc.agents.pictures import PictureEngine, SessionPictures
from areal_sc.agents.rows import AgentRows, Rewards, returns_of, rows_of
from areal_sc.agents.session_call import SessionCall
from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion
from areal_sc.engines.stop_strings import STOP_STRINGS, are_stop_strings, special_token_in
from areal_sc.errors import AgentError, NeverWorks, WorkflowError
from areal_sc.rejection import RejectionKind
from areal_sc.workflows.chat import checked_message
from areal_sc.workflows.chat_format import Message
from areal_sc.workflows.chat_turn import (
    OTHER_TOOLS,
    NextTurn,
    PastTurns,
    TurnNode,
    check_tools,
)
from areal_sc.workflows.trajectory import Trajectory

logger = logging.getLogger(__name__)

MAX_RUNNING_CALLS: Final = 256
"""Calls of a session that may run beside each other; more are told to come again."""
_COME_AGAIN_S: Final = 1.0

_BY_OTHERS: Final = ("agent_rejected", "agent_idle", "agent_timeout")
"""How an agent outside ends an episode: a client that calls wrongly must not end the run."""

SESSION_ENDED: Final = CallRefused(409, "session_ended", "the episode of this key has ended")
SESSION_RETURNS: Final = CallRefused(
    503, "session_returns", "it goes on when its worker is back", retry_after_s=_COME_AGAIN_S
)

COUNTED: Final = (
    "retries",
    "refused",
    "other_sampling",  # calls that asked for another temperature or the like
    "rewritten_history",  # rows that begin, or go on elsewhere, by what the agent made of the past
    "other_tools",  # rows that begin
    "template_rewrites",
)
"""What a session notices of its calls, as metrics `agent/NAME` of an episode's rows."""


@dataclass(frozen=True)
class SessionSettings:
    """How a session treats its calls.

    Attributes:
        rows: see `AgentRows`.
        history: see `PastTurns`.
        max_turns: most calls; 0: any number.
        chat_template_arguments: see `Conversation`.
    Raises: WorkflowError: one of them is none of those that there are.
    """

    rows: AgentRows | str = AgentRows.merge
    history: PastTurns | str = PastTurns.template
    max_turns: int = 0
    chat_template_arguments: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, kinds in (("rows", AgentRows), ("history", PastTurns)):
            if (given := getattr(self, name)) not in list(kinds):
                raise WorkflowError(f"{name}: expected {' or '.join(kinds)}, got {given!r}")
        if self.max_turns < 0:
            raise WorkflowError(f"max_turns: expected 0 or more, got {self.max_turns}")


class Session:
    """What an agent asks of the model in one episode. Belongs to one event loop.

    Args:
        sampling: of the run; an agent may shorten its answers and end them by strings of its own.
        journal: where its calls are written down; None: they go with the worker.

    Attributes:
        base_url: where an agent reaches it: of OpenAI's clients, with `/v1`.
        api_key: of this session alone.
        counts: how often each of `COUNTED` was noticed.
        failure: of the engine or of this package, in a call; what the agent made of it says
            nothing about the agent.
    """

    def __init__(
        self,
        engine: PictureEngine,
        sampling: GenerationConfig,
        settings: SessionSettings | None = None,
        journal: SessionJournal | None = None,
    ) -> None:
        self.base_url = self.api_key = ""  # until a server has opened it
        self.counts = Counter[str]()
        self.failure: Exception | None = None
        self.journal = journal or SessionJournal()
        self._engine = engine
        self._run_sampling = sampling
        self._settings = settings or SessionSettings()
        self._history = CallHistory()
        self._pictures = SessionPictures(engine, self.journal)
        self._calls = list[SessionCall]()  # in the order in which they began
        self._same = dict[str, list[SessionCall]]()  # by their key, or by their digest
        self._sent_away = Counter[tuple[str, int]]()  # by digest and attempt
        self._tasks = set[asyncio.Task[None]]()
        self._num_begun = self._num_tool_calls = 0
        self._last_activity_s = time.monotonic()
        self._ended: CallRefused | None = None
        self._refused_for_all: CallRefused | None = None  # and no call was answered since

    def begin(
        self, call: ModelCall, *, digest: str = "", key: str = "", attempt: int = 0
    ) -> SessionCall:
        """Begins a call, or finds the one that this is a retry of; see `_retried`.

        Args:
            digest: of what the client sent; "": nothing is a retry of it.
            key: the client's, of this call alone; "": it gives none.
            attempt: how often the client has tried it before, as it says.
        Raises: CallRefused: the session has ended, or takes no more calls now, or at all; or the
            key is of a call with another digest.
        """
        self.check_open()
        self.note_activity()
        name = f"key {key}" if key else digest
        same = self._same.get(name, []) if name else []
        if same and same[0].digest != digest:
            self.counts["refused"] += 1
            raise CallRefused(
                400,
                "idempotency_key_reused",
                "Idempotency-Key: it came with another body before: expected one for each call",
            )
        if earlier := self._retried(same, key, digest, attempt):
            self.counts["retries"] += 1
            earlier.attempt = attempt
            return earlier
        most = self._settings.max_turns
        if most and len(self._calls) >= most:
            self.counts["refused"] += 1
            raise CallRefused(400, "max_turns", f"the episode has had its max_turns={most} calls")
        if len(self._tasks) >= MAX_RUNNING_CALLS:
            self._sent_away[digest, attempt] += 1
            raise CallRefused(
                429,
                "too_many_calls",
                f"{MAX_RUNNING_CALLS} calls of the episode run: expected no more beside each other",
                retry_after_s=_COME_AGAIN_S,
            )
        begun = SessionCall(call, digest, attempt)
        begun.number, begun.same = self._num_begun, name
        self._num_begun += 1
        self._calls.append(begun)
        self._same.setdefault(name, []).append(begun)
        task = asyncio.create_task(self._run(call, begun), name=f"call {begun.answer_id}")
        self._tasks.add(task)
        task.add_done_callback(self._note_done)
        return begun

    async def restore(self, written: Sequence[Record]) -> None:
        """Plays the calls of an earlier life of the worker again, with their answers.

        Between two of them others have their turn.

        Raises: WorkflowError, CallRefused: a call cannot be what it was.
        """
        played = dict[str, tuple[ModelCall, SessionCall]]()
        for it in written:
            if isinstance(it, WrittenPicture):
                self._pictures.restore(it)
            if not isinstance(it, WrittenAnswer):
                continue
            call, after = replace(it.call, messages=tuple(json.loads(it.messages))), None
            if it.after:
                past, after = played[it.after]
                if it.goes_on_row:
                    messages = *past.messages, after.message, *call.messages
                    call = replace(call, messages=messages, tools=past.tools)
            begun = SessionCall(call, it.digest, 0)
            played[it.answer_id] = call, begun
            begun.number, begun.same = it.number, it.same
            begun.answer_id, begun.created_s = it.answer_id, it.created_s
            begun.finish(await self._answer(call, begun, it.completion, after))
            begun.note_unsure()
            self._calls.append(begun)
            self._same.setdefault(it.same, []).append(begun)
            self._num_begun = max(self._num_begun, it.number + 1)
            await asyncio.sleep(0)
        self._calls.sort(key=lambda it: it.number)

    def as_sampled(self, call: ModelCall) -> ModelCall:
        """The call with the sampling that its answer has, as clients are told it."""
        run = self._run_sampling
        sampling = {"temperature": run.temperature, "top_p": run.top_p}
        return replace(call, max_tokens=self._max_tokens(call), sampling=sampling)

    def _retried(
        self, same: Sequence[SessionCall], key: str, digest: str, attempt: int
    ) -> SessionCall | None:
        """The call whose answer a client may have that asks the same; None: it wants another one.

        Agents may ask the same several times, and want as many samples. So no two of them get one
        answer: that is given again where nobody has it, or waits for it; where the key says that
        it is this call's; or where a client counts its attempts, and there is one call alone whose
        next one this can be. The next one of a call that was sent away has no answer yet.
        """
        if left := next((it for it in same if it.is_left), None):
            return left
        if key or not attempt:
            return same[-1] if key and same else None
        before = attempt - 1
        if self._sent_away[digest, before]:
            self._sent_away[digest, before] -= 1
            return None
        tried = [it for it in same if it.attempt == before]
        return tried[0] if len(tried) == 1 else None

    def check_open(self) -> None:
        """Raises: CallRefused: the session has ended."""
        if self._ended:
            raise anew(self._ended)

    @property
    def quiet_s(self) -> float:
        """For how long nobody has called; 0 while a call runs."""
        return 0.0 if self._tasks else time.monotonic() - self._last_activity_s

    def note_activity(self) -> None:
        """Somebody is there."""
        self._last_activity_s = time.monotonic()

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Around the use of the session; raises its `failure`, though the agent may have caught it.

        A cancellation goes before. Raises: NeverWorks: an agent has failed whose last calls were
            refused for all.
        """
        try:
            yield
        except Exception as error:
            if failure := self.failure or self._never_works(error):
                raise failure from error
            raise
        if self.failure is not None:
            raise self.failure

    def end(self, why: CallRefused | None = None) -> None:
        """Takes no more calls, and cancels those that run.

        Args:
            why: what clients are told from now on.
        """
        if self._ended is None:
            self._ended = why or SESSION_ENDED
            for task in self._tasks:
                task.cancel()
            for call in self._calls:
                call.finish(anew(self._ended))

    def trajectories(
        self,
        reward: Rewards,
        *,
        discount: float = 1.0,
        metrics: Mapping[str, float] | None = None,
    ) -> list[Trajectory]:
        """The rows of all calls whose answers were delivered; may be called on any thread.

        Args:
            reward: see `returns_of`.
            discount: of the reward, for each call before the last one.
            metrics: of the episode, beside what the session has counted.
        Raises: WorkflowError: a reward is of no call.
        """
        calls = list(self._calls)
        trained = _trained(calls)
        nodes = [call.answered for call in trained]
        returns = returns_of(trained, reward, discount)
        num_lost = sum(call.node is not None and not call.is_delivered for call in calls)
        counted = {"calls": len(nodes), "undelivered": num_lost}
        counted |= {name: self.counts[name] for name in COUNTED}
        told = {f"agent/{name}": float(number) for name, number in counted.items()}
        return rows_of(nodes, returns, AgentRows(self._settings.rows), {**told, **(metrics or {})})

    def note_undelivered(self, delivery: str) -> None:
        """An answer could not be passed on; see `SessionCall.note_undelivered`."""
        for call in self._calls:
            call.note_undelivered(delivery)

    def note_unsure(self) -> None:
        """The process has died that passed answers on."""
        for call in self._calls:
            if call.is_delivered:
                call.note_unsure()

    def check_reward(self, reward: Rewards) -> None:
        """Raises: WorkflowError: no answer was delivered, or a reward is of no call."""
        if not (trained := _trained(self._calls)):
            raise WorkflowError("the episode has no answer of the model yet: call it, or reject it")
        returns_of(trained, reward, 1.0)

    def note_refused(self, why: CallRefused) -> None:
        """A call gets an error."""
        self.counts["refused"] += 1
        if why.is_for_all:
            self._refused_for_all = why

    def _never_works(self, error: Exception) -> NeverWorks | None:
        why = self._refused_for_all
        if why is None or (isinstance(error, AgentError) and error.kind in _BY_OTHERS):
            return None
        return NeverWorks(f"calls of the agent are refused in every episode: {why.message}")

    def _note_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.note_activity()

    async def _run(self, call: ModelCall, begun: SessionCall) -> None:
        """Ends with an answer, or with why there is none."""
        try:
            begun.finish(await self._answer(call, begun))
            self._refused_for_all = None
        except CallRefused as refused:
            self._forget(begun, refused)
        except (WorkflowError, UnicodeError, RecursionError) as error:
            is_for_all = isinstance(error, NeverWorks)
            self._forget(begun, CallRefused(400, "invalid_call", str(error), is_for_all=is_for_all))
        except Exception as error:  # no fault of the agent
            logger.exception("a call of an agent failed")
            self.failure = error
            told = f"the engine failed, so this episode is not trained: {error!r:.300}"
            why = CallRefused(503, "engine_failed", told)
            self._forget(begun, anew(SESSION_RETURNS) if self.journal.path else why)

    def _forget(self, begun: SessionCall, why: CallRefused) -> None:
        """A call without an answer can be tried again."""
        self.note_refused(why)
        self._calls.remove(begun)
        self._same[begun.same].remove(begun)
        begun.finish(why)

    async def _answer(
        self,
        call: ModelCall,
        begun: SessionCall,
        completion: Completion | None = None,
        after: SessionCall | None = None,
    ) -> ModelAnswer:
        """Args: completion, after: what it was, and where it stood, in an earlier life."""
        check_tools(call.tools)
        earlier = self._earlier(call.after) if call.after else None
        if earlier:
            earlier.note_delivered()  # how else would the client know its id
        past, first = earlier.conversation if earlier else [], call.num_instructions
        whole = *call.messages[:first], *past, *call.messages[first:]
        messages = [
            self._pictures.named(checked_message(it, number)) for number, it in enumerate(whole)
        ]
        if not messages or messages[-1]["role"] == "assistant":
            raise WorkflowError(
                "messages: expected a last one that the assistant answers to, got "
                f"{'its own' if messages else 'none'}"
            )
        sampling = self._sampling(call)
        place = self._history.place(messages, earlier)
        if completion:  # answers that came while it ran are known by now
            place = replace(place, after=after)
        turn = NextTurn(
            self._engine,
            self._last_node(begun, place),
            messages,
            call.tools,
            sampling,
            history=PastTurns(self._settings.history),
            arguments=self._settings.chat_template_arguments or {},
            model=call.model,
            reader=self._pictures,
        )
        self._pictures.check_row(turn.prompt, turn.pictures)
        if turn.new_row:
            self.counts["other_tools" if turn.new_row == OTHER_TOOLS else "template_rewrites"] += 1
        most, num_prompt_tokens = self._engine.max_context_tokens, len(turn.prompt)
        if num_prompt_tokens >= most:
            raise ContextOverflow(num_prompt_tokens, most)
        on_tokens = turn.text_stream(begun.add_text) if call.is_streamed else None
        with_pictures: dict[str, Any] = {"pictures": turn.pictures} if turn.pictures else {}
        is_new = completion is None
        if completion is None:
            completion = await self._engine.generate(
                turn.prompt, sampling, on_tokens=on_tokens, **with_pictures
            )
        node = turn.node(completion, self._num_tool_calls)
        self._num_tool_calls += len(node.turn.tool_calls)
        begun.node = node
        if call.is_kept:
            after = begun.after
            if after and not (after.kept and after.num_instructions == first):
                after = None  # the whole conversation is kept anew
            begun.kept_after = after
            begun.kept = [*messages[after.num_messages if after else first :], node.turn.message]
        self._history.add(place, begun)
        if is_new and self.journal.path:
            self.journal.add(_written(call, messages, begun, node))
        tokens = tuple[SampledToken, ...]()
        if call.wants_logprobs:
            texts = self._engine.tokenizer.batch_decode([[it] for it in completion.token_ids])
            tokens = tuple(map(SampledToken, texts, completion.logprobs))
        return ModelAnswer(
            begun.answer_id,
            begun.created_s,
            node.turn,
            num_prompt_tokens,
            tokens,
            stop=_stop_of(node, call.stop),
        )

    def _earlier(self, answer_id: str) -> SessionCall:
        """Raises: CallRefused: the session has no such answer that was kept."""
        for call in self._calls:
            if call.answer_id == answer_id and call.kept:
                return call
        raise CallRefused(
            400,
            "previous_response_not_found",
            f"previous_response_id: the session has no answer {answer_id[:40]!r} that has ended, "
            "and whose call did not say store=false",
        )

    def _last_node(self, begun: SessionCall, place: CallPlace) -> TurnNode | None:
        """The node that a call goes on from."""
        self.counts["rewritten_history"] += place.is_rewritten
        if (after := place.after) is None:
            return None
        after.note_delivered()  # how else would the client know it
        begun.after = after
        return after.node

    def _sampling(self, call: ModelCall) -> GenerationConfig:
        """The run's, with what an agent may say.

        Raises: NeverWorks: no engine ends an answer by its strings.
        """
        run = self._run_sampling
        stop = [*run.stop, *call.stop]
        if call.stop:
            if not are_stop_strings(stop):
                beside = f", with those of generation.stop, {run.stop}" if run.stop else ""
                raise NeverWorks(f"stop: expected {STOP_STRINGS}{beside}, got {call.stop!r:.200}")
            if problem := special_token_in(self._engine.tokenizer, call.stop):
                raise NeverWorks(f"stop: {problem}")
        for name, value in call.sampling.items():
            own = getattr(run, name, 0.0)
            if value != own:
                self.counts["other_sampling"] += 1
                _tell_of_sampling(name, own)
        return replace(run, max_new_tokens=self._max_tokens(call), stop=stop)

    def _max_tokens(self, call: ModelCall) -> int:
        most = self._run_sampling.max_new_tokens
        return min(most, call.max_tokens or most)


def _trained(calls: Sequence[SessionCall]) -> list[SessionCall]:
    """The calls whose answers were delivered."""
    return [it for it in calls if it.is_delivered and it.node]


def _written(
    call: ModelCall, messages: list[Message], begun: SessionCall, node: TurnNode
) -> WrittenAnswer:
    """Args: messages: all of them."""
    call, after = replace(call, messages=(), after="", metadata={}), begun.after
    if after and node.row:
        messages, call = messages[after.num_messages :], replace(call, tools=())
    return WrittenAnswer(
        begun.number,
        begun.same,
        begun.digest,
        begun.answer_id,
        begun.created_s,
        after.answer_id if after else "",
        node.row is not None,
        json.dumps(messages, ensure_ascii=False),
        call,
        node.completion,
    )


def _stop_of(node: TurnNode, stop: Sequence[str]) -> str:
    """The string that ended an answer; "": none of these."""
    if not stop:
        return ""
    tokens, cut = node.completion.token_ids, len(node.turn.text)
    text: Any = node.chat.tokenizer.decode(
        tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return next((it for it in stop if text.startswith(it, cut)), "")


def given_up(error: BaseException, journal: SessionJournal) -> CallRefused:
    """What clients are told of an episode that ended by this.

    409: they rejected it. 503: the next life of the worker may go on with it. Else 410.
    """
    if isinstance(error, AgentError) and error.kind == RejectionKind.agent_rejected:
        return SESSION_ENDED
    if journal.path and not isinstance(error, AgentError):
        return SESSION_RETURNS
    return CallRefused(410, "session_lost", f"the episode was given up: {error!r:.200}")


@cache  # once for each
def _tell_of_sampling(name: str, own: float) -> None:
    logger.warning(
        "an agent asks for a %s of its own, and gets %s, as the run's generation section says: "
        "what is sampled otherwise cannot be trained",
        name,
        own,
    )
