"""The model that clients train and sample through the Tinker API, on the controllers of a run.

    forward_backward   rows go to a file of the run folder; the ranks say what the model makes of
                       them, so the client has its log-probabilities
    optim_step         one update on all rows since the step before: their gradients, and the step,
                       are one operation, which the ranks make once whatever dies
    save_weights_...   publishes the weights: the next policy version, which rollout workers adopt
    asample            any rollout worker that has the version

So no gradient waits between two calls, which a death could take along; each row goes forward once
more. Requests of a model are served in the order of their numbers.

consumes     requests, checked
waits for    the ranks and rollout workers; for the request before; to publish, for samples
unblocked by them
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tinker import types
from tinker.proto.tinker_public_pb2 import ForwardBackwardRequest

from areal_sc.algorithms.named_loss import NamedLoss
from areal_sc.config.optimizer_settings import OptimizerConfig
from areal_sc.controller.rollout.rejections import INITIAL_STATE
from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.errors import ArealError, StepsLost
from areal_sc.run.run_folder import RunFolder
from areal_sc.serving.given_rows import GivenRows
from areal_sc.serving.wire import (
    ApiAnswer,
    RequestRefused,
    RowLimits,
    json_of,
    pass_of,
    pass_output,
    sample_output,
    sampling_of,
)
from areal_sc.sources.row_file import GROWING
from areal_sc.workers.calls import Generated

_LOSS: Final = "areal_sc.serving.losses:summed"
_LOOK_S: Final = 0.5
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Sampler:
    """The weights that a client samples from.

    Attributes:
        number: of the model that was trained, from 0; the weights of an earlier one are gone.
        version: of the policy.
    """

    number: int
    version: int


class InOrder:
    """Lets requests begin in the order of their numbers, one after the other."""

    def __init__(self, first: int) -> None:
        self._next = first
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncIterator[None]:
        """Raises: RequestRefused: a request of that number was served."""
        async with self._changed:
            if number < self._next:
                raise RequestRefused(f"seq_id: expected {self._next} or above, got {number}")
            await self._changed.wait_for(lambda: self._next == number)
        try:
            yield
        finally:
            async with self._changed:
                self._next += 1
                self._changed.notify_all()


class TrainedModel:
    """What a model has come to by the requests until now.

    Attributes:
        rows: that its client has given.
        asked: numbers of those that the next step trains on; `loss`: its loss, if there are some.
        order: of the requests.
        version: of the policy.
        saved: names of folders.
    """

    def __init__(self, path: Path) -> None:
        self.rows = GivenRows(path)
        self.asked: list[int] = []
        self.loss: NamedLoss | None = None
        self.order = InOrder(first=1)
        self.version = 0
        self.saved: set[str] = set()


class TinkerModel:
    """One base model, and the model that one client at a time trains from it.

    Attributes:
        name: of the base model.
        model_id: of the trained model; "": there is none.
        limits: of rows and prompts.
    """

    def __init__(
        self,
        actor: TrainController,
        rollout: RolloutController,
        limits: RowLimits,
        folder: RunFolder,
    ) -> None:
        self.name = actor.config.path
        self.model_id = ""
        self.limits = limits
        self._actor = actor
        self._rollout = rollout
        self._models = folder.serving / "models"
        self._sources = folder.sources
        self._number = 0  # of the models that were trained
        self._samplers: dict[str, Sampler] = {}  # by the id of a session, or a path
        self._trained: TrainedModel | None = None
        self._one_trains = asyncio.Lock()
        self._num_samples = 0  # that go on
        self._changed = asyncio.Condition()
        self._is_publishing = False

    @property
    def _file_name(self) -> str:
        return self.model_id.replace(":", "-")

    @property
    def lora_rank(self) -> int:
        return self._actor.config.lora.rank

    def ended_by(self, error: ArealError) -> ArealError | None:
        """Whether the run has ended with this error of a request; None: others can be served."""
        lost = self._actor.worker_lost or self._rollout.worker_lost
        return lost or (error if isinstance(error, StepsLost) else None)

    def check_base(self, name: str | None) -> None:
        """Raises: RequestRefused: another model is wanted than the one that is served."""
        if name not in (self.name, Path(self.name).name):
            raise RequestRefused(
                f"base_model: expected {Path(self.name).name}, got {name!r:.200}", 404
            )

    def check_id(self, model_id: str) -> None:
        """Raises: RequestRefused: it is not the model that is trained."""
        if not self.model_id or model_id != self.model_id:
            raise RequestRefused(f"model_id: there is no model {model_id!r:.200}, or no more", 404)

    async def wait_until_free(self, is_given_up: Callable[[str], bool]) -> None:
        """Waits until no model is trained, or one that is given up.

        Args: is_given_up: whether the model of that id is.
        """
        while self.model_id and not is_given_up(self.model_id):  # noqa: ASYNC110 # as silence is
            await asyncio.sleep(_LOOK_S)

    def check_wanted(self, asked: types.CreateModelRequest) -> None:
        """Raises: RequestRefused: such a model is not trained here."""
        self.check_base(asked.base_model)
        rank = asked.lora_config.rank if asked.lora_config else 0
        if rank != self.lora_rank:
            what = "LoRA of that rank" if self.lora_rank else "all parameters"
            raise RequestRefused(
                f"lora_config.rank: expected {self.lora_rank}, since this server trains {what}, "
                f"got {rank}"
            )
        if not isinstance(asked.optimizer_config, types.AdamOptimizerConfig):
            raise RequestRefused("optimizer_config: expected adamw")

    async def create(self, model_id: str, known: ApiAnswer | None) -> ApiAnswer:
        """A new model begins with the weights of the base model; that before it is no more."""
        self.model_id = model_id
        async with self._one_trains, self._publication():
            if known is None:
                await asyncio.to_thread(self._go_back)
            self._number += 1
            self._trained = TrainedModel(self._sources / f"{GROWING}{self._file_name}.jsonl")
        return json_of(types.CreateModelResponse(model_id=model_id))

    @asynccontextmanager
    async def _turn(self, number: int | None) -> AsyncIterator[TrainedModel]:
        """The turn of a request of the model, which is the present one all the while."""
        model = self._trained
        if model is None:
            raise RequestRefused("model_id: the model is not there yet", 404)
        async with model.order.turn(number or 0), self._one_trains:
            if model is not self._trained:
                raise RequestRefused("model_id: the model is no more")
            yield model

    def _go_back(self) -> None:
        self._actor.load_snapshot(0)
        self._rollout.go_back(INITIAL_STATE)
        self._actor.share_weights(self._rollout)

    async def unload(self, _: ApiAnswer | None) -> ApiAnswer:
        model_id, self.model_id = self.model_id, ""
        return json_of(types.UnloadModelResponse(model_id=model_id, type="unload_model"))

    async def run_pass(self, wanted: ForwardBackwardRequest, known: ApiAnswer | None) -> ApiAnswer:
        """A forward pass; its rows are trained on by the next step, if it is also a backward one.

        Raises: RequestRefused: earlier ones of this step have another loss.
        """
        async with self._turn(wanted.seq_id) as model:
            asked = await asyncio.to_thread(pass_of, wanted, self.limits)
            loss = NamedLoss(_LOSS, {"name": asked.loss, **asked.settings})
            if asked.is_backward and model.loss not in (None, loss):
                raise RequestRefused("loss_fn: one step has one loss, and the same loss_fn_config")
            numbers = await asyncio.to_thread(model.rows.give, asked.rows)
            if known is None:
                logprobs = await asyncio.to_thread(
                    self._actor.score_rows, model.rows, numbers, per_token=True
                )
                known = pass_output(asked, logprobs)
            if asked.is_backward and not known.is_failure:
                model.loss = loss
                model.asked += numbers
            return known

    async def take_step(self, asked: types.OptimStepRequest, known: ApiAnswer | None) -> ApiAnswer:
        """Raises: RequestRefused: there is nothing to learn from, or a setting is wrong."""
        async with self._turn(asked.seq_id) as model:
            optimizer = _optimizer_of(asked.optim_params)
            if model.loss is None:
                raise RequestRefused("optim_step: no forward_backward came before it")
            metrics = dict[str, float]()
            if not self._is_past(model):
                metrics = await asyncio.to_thread(
                    self._actor.update_rows,
                    model.rows,
                    model.asked,
                    model.loss,
                    advances=False,
                    optimizer=optimizer,
                )
            model.asked, model.loss = [], None
            told = {name: it for name, it in metrics.items() if name in ("grad_norm", "lr")}
            return json_of(types.OptimStepResponse(metrics=told))

    async def save_for_sampler(
        self, asked: types.SaveWeightsForSamplerRequest, _: ApiAnswer | None
    ) -> ApiAnswer:
        """Publishes the weights. Samplers of earlier ones end."""
        async with self._turn(asked.seq_id) as model:
            if asked.path is not None:
                _check_name(asked.path)
            if not self._is_past(model):
                async with self._publication():
                    await asyncio.to_thread(self._actor.publish_weights, self._rollout)
            model.version += 1
            sampler = Sampler(self._number, model.version)
            if asked.path is None:
                owner = self.model_id.partition(":")[0]
                session = f"{owner}:sample:{asked.sampling_session_seq_id}"
                self._samplers[session] = sampler
                answer = types.SaveWeightsForSamplerResponseInternal(sampling_session_id=session)
            else:
                path = f"tinker://{self.model_id}/sampler_weights/{asked.path}"
                self._samplers[path] = sampler
                answer = types.SaveWeightsForSamplerResponseInternal(path=path)
            return json_of(answer)

    def _is_past(self, model: TrainedModel) -> bool:
        """Whether the ranks have done what comes next: they outlived the server that asked them.

        Updates behind the newest version are asked for again: the ranks know those they have made.
        """
        return model.version < self._actor.version

    async def save(self, asked: types.SaveWeightsRequest, known: ApiAnswer | None) -> ApiAnswer:
        """Writes a folder that `transformers` loads."""
        async with self._turn(asked.seq_id) as model:
            name = _check_name(asked.path or f"step-{asked.seq_id}")
            folder = self._models / self._file_name / name
            if name in model.saved and not asked.overwrite:
                raise RequestRefused(f"path: {name} was saved already; overwrite=True replaces it")
            model.saved.add(name)
            if known is None:
                await asyncio.to_thread(self._actor.save_hf, folder)
            path = f"tinker://{self.model_id}/weights/{name}"
            return json_of(types.SaveWeightsResponse(path=path, type="save_weights"))

    async def refuse(self, seq_id: int, why: str, _: ApiAnswer | None) -> ApiAnswer:
        """What cannot be read has its turn, too."""
        async with self._turn(seq_id):
            raise RequestRefused(why)

    def open_sampler(self, session: str, asked: types.CreateSamplingSessionRequest) -> None:
        """Raises: RequestRefused: there are no such weights."""
        if asked.model_path is None:
            self.check_base(asked.base_model)
            self._samplers[session] = Sampler(self._number, 0)
        elif (sampler := self._samplers.get(asked.model_path)) is not None:
            self._samplers[session] = sampler
        else:
            raise RequestRefused(f"model_path: there are no weights {asked.model_path!r:.200}", 404)
        self._check_present(self._samplers[session])

    def check_sampler(self, session: str) -> None:
        """Raises: RequestRefused: there is no such session."""
        if session not in self._samplers:
            raise RequestRefused(f"there is no sampling session {session!r:.200}", 404)

    async def sample(self, asked: types.SampleRequest, known: ApiAnswer | None) -> ApiAnswer:
        """Raises: RequestRefused: what it asks for is not served."""
        if known is not None:
            return known
        prompt, sampling = sampling_of(asked, self.limits, self._rollout.engine.config.generation)
        sampler = self._samplers[asked.sampling_session_id or ""]
        async with self._sampling():
            self._check_present(sampler)
            group = f"{asked.sampling_session_id}:{asked.seq_id}"
            futures = [
                self._rollout.begin_generate(prompt, sampling, prefix_group=group)
                for _ in range(asked.num_samples)
            ]
            found: list[Generated] = await asyncio.gather(*map(asyncio.wrap_future, futures))
            return sample_output(found)

    def _check_present(self, sampler: Sampler) -> None:
        if sampler != Sampler(self._number, self._rollout.version):
            raise RequestRefused(
                "these weights are served no more: newer ones were saved for sampling, or another "
                "model was begun; a server has one set of weights for sampling"
            )

    @asynccontextmanager
    async def _sampling(self) -> AsyncIterator[None]:
        """Weights do not change meanwhile."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_publishing)
            self._num_samples += 1
        try:
            yield
        finally:
            async with self._changed:
                self._num_samples -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def _publication(self) -> AsyncIterator[None]:
        """No sample goes on meanwhile."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_publishing)
            self._is_publishing = True
            await self._changed.wait_for(lambda: self._num_samples == 0)
        try:
            yield
        finally:
            async with self._changed:
                self._is_publishing = False
                self._changed.notify_all()


def _check_name(name: str) -> str:
    """Raises: RequestRefused: it is no plain name."""
    if _NAME.fullmatch(name) is None:
        raise RequestRefused(
            f"path: expected a name of letters, digits, '.', '_', '-', got {name!r:.120}"
        )
    return name


def _optimizer_of(asked: Any) -> OptimizerConfig:
    """Raises: RequestRefused: it is no AdamW, or a number is out of its range."""
    if not isinstance(asked, types.AdamParams):
        raise RequestRefused("optim_params: expected adamw")
    its = asked.model_dump()
    low = {"learning_rate": 0, "beta1": 0, "beta2": 0, "weight_decay": 0, "grad_clip_norm": 0}
    for name, value in its.items():
        is_below = value < low[name] if name in low else value <= 0
        if not math.isfinite(value) or is_below or (name in ("beta1", "beta2") and value >= 1):
            raise RequestRefused(f"adam_params.{name}: got {value}")
    return OptimizerConfig(
        lr=asked.learning_rate,
        beta1=asked.beta1,
        beta2=asked.beta2,
        eps=asked.eps,
        weight_decay=asked.weight_decay,
        max_grad_norm=asked.grad_clip_norm,
    )
