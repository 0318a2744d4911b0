"""Teachers behind URLs: what they say of the tokens that the policy has sampled. No torch.

    a workflow's rows ──► POST of their tokens ──► a teacher's log-probabilities at trained tokens
                                                   └► fields of the rows, which a loss reads

A row whose teacher fails is rejected with the cause. It is never trained without a teacher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from areal_sc.config.schema import RolloutConfig
from areal_sc.errors import NeverWorks, WorkflowError
from areal_sc.rewards.asked_model import AskedModel, Asking, NoAnswer
from areal_sc.rewards.base import RewardFunction
from areal_sc.sources.pictures import IMAGES
from areal_sc.sources.reference import Referable
from areal_sc.system.waiting import all_of
from areal_sc.token_fields import TEACHER_LOGPROBS, TOP_LOGPROBS, TOP_TOKENS, TensorMetadata
from areal_sc.workflows.base import EpisodeEngine, Trajectory, Workflow
from areal_sc.workflows.task_mix import TASK_KEY

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NUM_PROBED: Final = 32
"""Tokens whose texts are compared, evenly from the vocabulary; and at most as many added ones."""
_MOST: Final = 1.01
"""Most that the probabilities of a place may add up to, with the rounding of a server."""
_NOT_FINITE: Final = -9999.0
"""What vLLM says in place of a log-probability that is not finite."""


class ToldPlace(NamedTuple):
    """What a teacher says of the place of one token.

    Attributes:
        logprob: of the token that stands there, nats.
        text: of that token; None: the server does not tell.
        top: the most probable tokens, each with its log-probability, in any order.
    """

    logprob: float
    text: str | None
    top: list[tuple[int, float]]


class Teacher(Referable):
    """A model behind an inference server, which is asked for log-probabilities of given tokens.

    Before the first row of a worker the texts of some tokens are compared with those of the
    policy's tokenizer. Answers are at temperature 1.

    Args:
        url: of the server, without a path.
        server: `sglang`: it is asked at `/generate`; `vllm`: at `/v1/completions`, and the server
            needs `--max-logprobs` of at least the number of most probable tokens.
        model: its name there, for a `vllm` that serves several; "": the one that it has.
        asking: `api_key_variable`, `timeout_s`, `tries`, `at_once`: see `AskedModel`. Twelve tries
            take two minutes where nobody answers, so that a teacher may be started again meanwhile.
    Raises: ValueError: an argument is out of bounds.
    """

    def __init__(
        self, url: str, *, server: str = "sglang", model: str = "", **asking: Unpack[Asking]
    ) -> None:
        if server not in ("sglang", "vllm"):
            raise ValueError(f"server: expected sglang or vllm, got {server!r}")
        self._is_sglang = server == "sglang"
        self._model = model
        path = "generate" if self._is_sglang else "v1/completions"
        self._address = f"{url.rstrip('/')}/{path}"
        own: Asking = {"tries": 12, **asking}
        self._asked = AskedModel(f"teacher at {self._address}", WorkflowError, **own)
        self._probe: asyncio.Future[None] | None = None

    async def check_vocabulary(self, tokenizer: PreTrainedTokenizerBase, top_k: int) -> None:
        """Returns when the teacher is known to have the policy's tokens; later at once.

        Raises: NeverWorks: it has others, does not tell, or refuses. WorkflowError: it gives no
            answer; the next call asks again.
        """
        probe = self._probe
        if probe is None or (probe.done() and (probe.cancelled() or probe.exception())):
            probe = self._probe = asyncio.ensure_future(self._compare_texts(tokenizer, top_k))
        await asyncio.shield(probe)

    async def _compare_texts(self, tokenizer: PreTrainedTokenizerBase, top_k: int) -> None:
        size = tokenizer.vocab_size
        added = [token for token, it in tokenizer.added_tokens_decoder.items() if not it.special]
        probed = [*range(0, size, max(1, size // _NUM_PROBED)), *added[-_NUM_PROBED:]]
        places = await self.tell(probed, 1, top_k, is_probe=True)
        for token, place in zip(probed[1:], places, strict=True):
            text = str(tokenizer.decode([token]))
            if place.text is None:
                raise NeverWorks(
                    f"teacher at {self._address}: it does not tell the texts of tokens, so nobody "
                    "knows whether it has the policy's: start the server with its tokenizer"
                )
            is_whole = "\ufffd" not in text + place.text
            if is_whole and text.strip() != place.text.replace("\u2581", " ").strip():
                raise NeverWorks(
                    f"teacher at {self._address}: token {token} is {place.text!r:.40} there, and "
                    f"{text!r:.40} of the policy: a teacher needs the policy's vocabulary"
                )

    async def tell(
        self, input_ids: Sequence[int], first: int, top_k: int, *, is_probe: bool = False
    ) -> list[ToldPlace]:
        """What the teacher says of the tokens from `first` on, which is at least 1.

        Raises: WorkflowError: no try gave an answer, or the server refuses. NeverWorks: see
            `AskedModel.ask`; with `is_probe`: the server refuses.
        """
        body: dict[str, Any]
        if self._is_sglang:
            body = {
                "input_ids": [*input_ids],
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": first - 1,
                "top_logprobs_num": top_k,
                "return_text_in_logprobs": is_probe,
            }
        else:
            body = {"prompt": [*input_ids], "max_tokens": 1, "prompt_logprobs": top_k}
            body |= {"model": self._model} if self._model else {}

        def read(answer: Any) -> list[ToldPlace]:
            read_answer = _read_sglang if self._is_sglang else _read_vllm
            places = read_answer(answer, input_ids[first:])
            for place in places:
                if len(place.top) < top_k:
                    raise NoAnswer(f"expected {top_k} tokens at a place, got {len(place.top)}")
                logprobs = [logprob for _, logprob in place.top] or [place.logprob]
                if not (min(logprobs) > _NOT_FINITE and np.exp(logprobs).sum() <= _MOST):
                    raise NoAnswer(f"expected log-probabilities, got {logprobs!r:.100}")
            return places

        return await self._asked.ask(self._address, body, read, is_probe=is_probe)


def _read_sglang(answer: Any, asked: Sequence[int]) -> list[ToldPlace]:
    """Of an answer of `/generate`, whose lists end with the last token."""
    meta = answer["meta_info"]
    own = meta["input_token_logprobs"]
    tops = meta.get("input_top_logprobs") or [[]] * len(own)
    told = list(zip(own, tops, strict=True))[-len(asked) :]
    if [token for (_, token, _), _ in told] != [*asked]:
        raise NoAnswer("expected log-probabilities of the tokens that were asked about")
    return [
        ToldPlace(logprob, text, [(token, value) for value, token, _ in top])
        for (logprob, _, text), top in told
    ]


def _read_vllm(answer: Any, asked: Sequence[int]) -> list[ToldPlace]:
    """Of an answer of `/v1/completions`: a table a token, whose own entry may be a further one."""
    tables = answer["choices"][0]["prompt_logprobs"][-len(asked) :]
    return [
        ToldPlace(
            own["logprob"],
            own.get("decoded_token"),
            [(int(it), each["logprob"]) for it, each in table.items()],
        )
        for token, table in zip(asked, tables, strict=True)
        for own in (table[str(token)],)
    ]


class TaughtWorkflow(Workflow):
    """A workflow whose rows have what a teacher says of each trained token.

    Rows of evaluations have zeros: nobody is asked.

    Args:
        workflow: plays the episodes.
        teacher: of all rows; or teachers by the row's `task`, as `TaskMix` names it.
        top_k: the fields are `teacher_top_tokens`, [T, top_k] int32, and `teacher_top_logprobs`,
            [T, top_k] float32, nats, falling: the loss `top_k_kl` reads so many. 0: the field is
            `teacher_logprobs`, [T] float32, of the sampled token, for `reverse_kl`.
    Raises: ValueError: `top_k` is below 0. WorkflowError: the workflow has such fields already.
        In an episode: NeverWorks: the teacher has another vocabulary, or tokens were sampled at
        another temperature than 1.
    """

    def __init__(
        self, workflow: Workflow, teacher: Teacher | Mapping[str, Teacher], top_k: int = 16
    ) -> None:
        if top_k < 0:
            raise ValueError(f"top_k: expected at least 0, got {top_k}")
        own = {TEACHER_LOGPROBS: TensorMetadata(())}
        if top_k:
            own = {
                TOP_LOGPROBS: TensorMetadata((top_k,)),
                TOP_TOKENS: TensorMetadata((top_k,), "int32"),
            }
        if twice := own.keys() & workflow.fields.keys():
            raise WorkflowError(f"{type(workflow).__name__} has the fields {sorted(twice)} already")
        self.fields = {**workflow.fields, **own}
        self.waits_outside = workflow.waits_outside
        self._workflow = workflow
        self._teacher = teacher
        self._top_k = top_k

    async def run_episode(
        self, prompt: dict[str, Any], engine: EpisodeEngine
    ) -> list[Trajectory] | None:
        teacher = self._teacher_of(prompt)
        if not engine.is_evaluation:
            await teacher.check_vocabulary(engine.tokenizer, self._top_k)
        played = await self._workflow.run_episode(prompt, engine)
        if played is None:
            return None
        rows = [played] if isinstance(played, Trajectory) else played
        return await all_of(
            self._taught(row, None if engine.is_evaluation else teacher) for row in rows
        )

    async def _taught(self, row: Trajectory, teacher: Teacher | None) -> Trajectory:
        """The row with its fields; they are 0 where it is not trained."""
        num_tokens = len(row.input_ids)
        logprobs = np.zeros(num_tokens, np.float32)
        top_logprobs = np.zeros((num_tokens, self._top_k), np.float32)
        top_tokens = np.zeros((num_tokens, self._top_k), np.int32)
        trained = np.flatnonzero(np.asarray(row.loss_mask))
        if teacher is not None and len(trained):
            self._check_row_sampled(row, trained)
            first, end = int(trained[0]), int(trained[-1]) + 1
            told = await teacher.tell([int(it) for it in row.input_ids[:end]], first, self._top_k)
            for place in trained:
                its = told[place - first]
                top = sorted(its.top, key=lambda it: -it[1])[: self._top_k]
                logprobs[place] = its.logprob
                if top:
                    top_tokens[place], top_logprobs[place] = zip(*top, strict=True)
        own: dict[str, npt.NDArray[Any]] = {TEACHER_LOGPROBS: logprobs}
        if self._top_k:
            own = {TOP_LOGPROBS: top_logprobs, TOP_TOKENS: top_tokens}
        row.fields = {**row.fields, **own}
        return row

    def _check_row_sampled(self, row: Trajectory, trained: npt.NDArray[np.int64]) -> None:
        if trained[0] == 0:
            raise WorkflowError(
                "a teacher says nothing of the first token of a row: it has no prompt"
            )
        others = {float(row.temperatures[it]) for it in trained} - {1.0}
        if others:
            raise NeverWorks(
                f"a teacher behind a URL is asked at temperature 1, and tokens were sampled at "
                f"{sorted(others)}: set generation.temperature=1, or name a teacher beside the "
                "policy (teacher.path)"
            )

    def _teacher_of(self, row: Mapping[str, Any]) -> Teacher:
        if isinstance(self._teacher, Teacher):
            return self._teacher
        name = str(row.get(TASK_KEY))
        if name not in self._teacher:
            raise WorkflowError(
                f"{TASK_KEY!r} of the row: expected one of {', '.join(self._teacher)}, which have "
                f"teachers, got {name!r}"
            )
        return self._teacher[name]

    async def score_group(
        self, prompt: dict[str, Any], trajectories: Sequence[Trajectory]
    ) -> Sequence[float] | None:
        return await self._workflow.score_group(prompt, trajectories)

    def group_voter(self, prompt: Mapping[str, Any]) -> RewardFunction | None:
        return self._workflow.group_voter(prompt)

    @property
    def scores_groups(self) -> bool:
        return self._workflow.scores_groups

    def runs_code(self) -> bool:
        return self._workflow.runs_code()

    def check(self) -> None:
        self._workflow.check()

    def check_group_reward(self) -> None:
        self._workflow.check_group_reward()

    def check_settings(self, config: RolloutConfig) -> None:
        self._workflow.check_settings(config)

    def check_row(self, row: Mapping[str, Any]) -> None:
        self._teacher_of(row)
        if row.get(IMAGES):
            raise WorkflowError(
                "a teacher behind a URL gets tokens alone, and the row has pictures"
            )
        self._workflow.check_row(row)
