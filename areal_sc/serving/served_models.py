"""The models that clients train and sample through the Tinker API, on the controllers of a run.

    forward_backward   rows go to a file of the run folder; the ranks say what the model makes of
                       them, so the client has its log-probabilities
    optim_step         one update on all rows since the step before: their gradients, and the step,
                       are one operation, which the ranks make once whatever dies
    save_weights_...   adapters: to a folder, which rollout workers load when they are asked to
                       sample from it; a whole model: the next policy version, which they adopt

So no gradient waits between two calls, which a death could take along; each row goes forward once
more. Requests of a model are served in the order of their numbers.

consumes     requests, checked
waits for    the ranks, by `rank_turns`, and rollout workers; for the request before
unblocked by them
"""

from __future__ import annotations

import asyncio
import shutil
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from tinker import types
from tinker.proto.tinker_public_pb2 import ForwardBackwardRequest

from areal_sc.config.fields import check_ranges
from areal_sc.config.optimizer_settings import OptimizerConfig
from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.errors import ArealError, ConfigError, StepsLost
from areal_sc.hub import is_hub_name
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_status import TenantStatus
from areal_sc.serving.given_rows import GivenRows
from areal_sc.serving.hosts import (
    Adapters,
    Host,
    LoadWanted,
    SaveWanted,
    ScoreWanted,
    StepWanted,
    WholeModel,
)
from areal_sc.serving.journal import (
    ApiAnswer,
    Failed,
    KeptRequest,
    Known,
    Record,
    ServeJournal,
    Source,
    Turn,
)
from areal_sc.serving.journal_anew import moved, write_anew
from areal_sc.serving.rank_turns import RankTurns
from areal_sc.serving.samplers import KEPT_SAMPLERS, Samplers
from areal_sc.serving.saved_weights import SAMPLER, STATE, SavedFolders, check_name
from areal_sc.serving.trained_model import ManyOrOne, TrainedModel
from areal_sc.serving.wire import RequestRefused, RowLimits, json_of, pass_output, rows_of
from areal_sc.sources.row_file import GROWING

_LOOK_S: Final = 0.5
_TOLD: Final = ("grad_norm", "lr", "skipped")
_ADAMS: Final = {"lr": "learning_rate", "max_grad_norm": "grad_clip_norm"}
"""What the API calls settings of an optimizer."""
MAX_MODELS: Final = 1024
"""That go on, of all keys."""


class TinkerModels:
    """One base model, and the models that clients train from it.

    Attributes:
        path: of the base model: a folder, or its name on the hub.
        name: the last part of that.
        limits: of rows and prompts.
        turns: of the ranks.
        saved: folders that clients have saved.
        samplers: what clients sample from.
    """

    def __init__(
        self,
        actor: TrainController,
        rollout: RolloutController,
        limits: RowLimits,
        folder: RunFolder,
        journal: ServeJournal,
        found: Sequence[Record],
    ) -> None:
        path = actor.config.path
        self.path = path.partition("@")[0] if is_hub_name(path) else path
        self.name = Path(self.path).name
        self.limits = limits
        self._actor = actor
        self._rollout = rollout
        self._journal = journal
        self._lora_rank = actor.config.lora.rank
        self.saved = SavedFolders(folder.serving / "models", self._lora_rank)
        known = next((it for it in found if isinstance(it, Known)), None)
        name = f"{GROWING}served.jsonl" if known is None else known.rows
        rows = GivenRows(folder.sources / name)
        self._host: Host
        if self._lora_rank:
            self._host = Adapters(actor, rows, self.saved.folder)
        else:
            self._host = WholeModel(actor, rollout, rows, self.saved.folder)
        self.samplers = Samplers(rollout, self.saved, limits, publishes=self._host.publishes)
        self._models: dict[str, TrainedModel] = {}  # by id, also those that are no more
        past = [it for it in found if isinstance(it, Turn | Failed)]
        self.turns = RankTurns(self._host, journal, past, self._models)
        self._one_writes = asyncio.Lock()  # rows to the file
        self._requests = ManyOrOne()  # at their turn
        if known is not None:
            self._restore(known, found)

    def _restore(self, known: Known, found: Sequence[Record]) -> None:
        self._models |= {it.model_id: TrainedModel.of(it) for it in known.models}
        self.samplers.by_name |= known.samplers
        placed = [(self._models[it.model_id], it) for it in known.models]
        places = [(model, it.place) for model, it in placed if it.place is not None]
        if behind := self.turns.take_places(places, known.version):
            self._journal.begin_anew(moved(record, behind) for record in found)

    async def write_anew(self, kept: Callable[[], Iterable[Record]]) -> None:
        """The journal, between two requests; of a whole model that is done where one begins."""
        if not self._host.publishes:
            async with self._requests.alone():
                await write_anew(
                    self._journal, self._host, self.turns, self._models, self.samplers, kept
                )

    def ended_by(self, error: ArealError) -> ArealError | None:
        """Whether the run has ended with this error of a request; None: others can be served."""
        lost = self._actor.worker_lost or self._rollout.worker_lost
        return lost or (error if isinstance(error, StepsLost) else None)

    # Which models there are

    def check_base(self, name: str | None) -> None:
        """Raises: RequestRefused: another model is wanted than the one that is served."""
        if name != self.path and Path(name or "").name != self.name:
            raise RequestRefused(f"base_model: expected {self.name}, got {name!r:.200}", 404)

    def live(self, model_id: str | None) -> TrainedModel:
        """Raises: RequestRefused: there is no such model, or no more."""
        model = self._models.get(model_id or "")
        if model is None or model.is_ended:
            raise RequestRefused(
                f"model_id: there is no model {model_id!r:.200}, or not any more", 404
            )
        return model

    @property
    def all_live(self) -> list[TrainedModel]:
        return [model for model in self._models.values() if not model.is_ended]

    def tenant_status(self, tenant: str, num_answered: int) -> TenantStatus:
        """How it is. Args: num_answered: requests of its, since the start."""
        its = [model for model in self.all_live if model.tenant == tenant]
        num_resting = sum(model.place is None for model in its)
        num_waiting, busy_s = self.turns.num_waiting[tenant], self.turns.busy_s[tenant]
        return TenantStatus(tenant, len(its), num_resting, num_waiting, num_answered, busy_s)

    def source_wanted(self, asked: types.CreateModelRequest, model_id: str) -> Source:
        """What a new model begins with.

        Raises: RequestRefused: such a model is not trained here.
        """
        self.check_base(asked.base_model)
        lora, most = asked.lora_config or types.LoraConfig(rank=0), self._lora_rank
        if not (1 <= lora.rank <= most or lora.rank == most == 0):
            expected = f"1 to {most}" if most else "0, all parameters"
            raise RequestRefused(f"lora_config.rank: expected {expected}, got {lora.rank}")
        if most and not (lora.train_mlp and lora.train_attn):
            raise RequestRefused(
                "lora_config: which layers are trained is a setting of this server, "
                "actor.lora.targets; expected train_mlp and train_attn to be true"
            )
        if not isinstance(asked.optimizer_config, types.AdamOptimizerConfig):
            raise RequestRefused("optimizer_config: expected adamw")
        seed = zlib.crc32(model_id.encode()) if lora.seed is None else lora.seed
        return Source(seed=seed, rank=lora.rank)

    def begin(self, model_id: str, tenant: str, source: Source) -> None:
        """A model is there, whose requests can come; a repeat changes nothing.

        Raises: RequestRefused: there are too many.
        """
        if model_id in self._models:
            return
        if len(self.all_live) >= MAX_MODELS:
            raise RequestRefused(f"this server has {MAX_MODELS} models: unload some", 429)
        self._models[model_id] = TrainedModel(model_id, tenant, source)

    async def create(
        self,
        model_id: str,
        is_silent: Callable[[TrainedModel], bool],
        kept: KeptRequest,
        known: ApiAnswer | None,
    ) -> ApiAnswer:
        """A new model begins with the base model; where all parameters are trained, once the model
        before it is given up, which is no more then: the journal has nothing of it any more.

        Args:
            is_silent: whether the client of a model has not been heard for long.
            kept: this request.
        """
        model = self._models[model_id]
        if known is not None and known.is_failure:
            await self._end(model)
            return known
        if self._host.publishes:
            before = await self._wait_for_place(model, is_silent)
            for other in before:
                await self._end(other)
            if before and known is None:
                self._journal.begin_anew([kept])
            async with self.samplers.users.alone():
                await self.turns.ask(model, 0, LoadWanted(model.source))
            self.samplers.begin_model()
        return json_of(types.CreateModelResponse(model_id=model_id))

    async def _wait_for_place(
        self, model: TrainedModel, is_silent: Callable[[TrainedModel], bool]
    ) -> list[TrainedModel]:
        """Models that came before a whole one, and are given up."""
        # a server that was killed begins all requests at once: some of these came later
        earlier = takewhile(lambda it: it is not model, self._models.values())
        before = [it for it in earlier if not it.is_ended]

        def is_in_use(other: TrainedModel) -> bool:
            is_given_up = other.session == model.session or is_silent(other)
            return not (other.is_ended or is_given_up)

        while any(map(is_in_use, before)):
            await asyncio.sleep(_LOOK_S)
            if is_silent(model):
                await self._end(model)
                raise RequestRefused("the client has gone before it could get the model")
        return before

    async def unload(self, model_id: str, _: ApiAnswer | None) -> ApiAnswer:
        await self._end(self._models[model_id])
        return json_of(types.UnloadModelResponse(model_id=model_id, type="unload_model"))

    async def _end(self, model: TrainedModel) -> None:
        """What it has saved by a name stays."""
        await self.turns.forget(model)
        folder = self.saved.folder / model.file_name
        for path in folder.glob("*") if folder.is_dir() else ():
            if not path.name.startswith((STATE, SAMPLER)):
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        with suppress(OSError):  # there is none, or something is in it
            folder.rmdir()

    # What clients ask of a model

    @asynccontextmanager
    async def _turn(self, model_id: str | None, number: int | None) -> AsyncIterator[TrainedModel]:
        """The turn of a request among those of its model."""
        model = self._models[model_id or ""]
        async with model.order.turn(number or 0), self._requests.among_many():
            if model.is_ended:
                raise RequestRefused("model_id: the model is no more")
            yield model

    async def run_pass(self, asked: ForwardBackwardRequest, known: ApiAnswer | None) -> ApiAnswer:
        """A forward pass; the next step trains on its rows, if it is also a backward one."""
        async with self._turn(asked.model_id, asked.seq_id) as model:
            rows = await asyncio.to_thread(rows_of, asked, self.limits)
            num_tokens = sum(len(row["input_ids"]) for row in rows)
            numbers = model.take_numbers(len(rows))
            async with self._one_writes:
                await asyncio.to_thread(self._host.rows.give, numbers, rows)
            if known is None:
                score = ScoreWanted(numbers)
                logprobs = await self.turns.ask(model, asked.seq_id, score, num_tokens)
                known = pass_output(rows, logprobs)
            if not asked.forward_only and not known.is_failure:
                model.asked += numbers
                model.num_asked_tokens += num_tokens
            return known

    async def take_step(self, asked: types.OptimStepRequest, known: ApiAnswer | None) -> ApiAnswer:
        """Raises: RequestRefused: there is nothing to learn from, or a setting is wrong."""
        async with self._turn(asked.model_id, asked.seq_id) as model:
            optimizer = _optimizer_of(asked.optim_params)
            if not model.asked:
                raise RequestRefused("optim_step: no forward_backward came before it")
            wanted, num_tokens = StepWanted(model.asked, optimizer), model.num_asked_tokens
            model.asked, model.num_asked_tokens = [], 0
            if known is not None and known.is_failure:
                return known
            metrics = await self.turns.ask(model, asked.seq_id or 0, wanted, num_tokens)
            told = {name: it for name, it in metrics.items() if name in _TOLD}
            return json_of(types.OptimStepResponse(metrics=told))

    async def load(self, asked: types.LoadWeightsRequest, known: ApiAnswer | None) -> ApiAnswer:
        """Other weights in place of those of a model. Rows without a step wait for the next one."""
        number = asked.seq_id or 0
        async with self._turn(asked.model_id, number) as model:
            if known is not None and known.is_failure:
                return known
            source = self.saved.kept_source(
                model.model_id, number, asked.path, has_optimizer=asked.optimizer
            )
            await self.turns.ask(model, number, LoadWanted(source))
            return json_of(types.LoadWeightsResponse(path=asked.path, model_id=model.model_id))

    async def save(self, asked: types.SaveWeightsRequest, known: ApiAnswer | None) -> ApiAnswer:
        """Writes a folder: an adapter in peft's format, or a model that `transformers` loads."""
        async with self._turn(asked.model_id, asked.seq_id) as model:
            name = check_name(asked.path or f"step-{asked.seq_id}")
            if name in model.saved and not asked.overwrite:
                raise RequestRefused(f"path: {name} was saved already; overwrite=True replaces it")
            model.saved.add(name)
            if known is None:
                wanted = SaveWanted(f"{STATE}{name}", has_optimizer=True)
                await self.turns.ask(model, asked.seq_id or 0, wanted)
            path = f"tinker://{asked.model_id}/weights/{name}"
            return json_of(types.SaveWeightsResponse(path=path, type="save_weights"))

    async def save_for_sampler(
        self, asked: types.SaveWeightsForSamplerRequest, known: ApiAnswer | None
    ) -> ApiAnswer:
        """Weights that can be sampled from; see above."""
        async with self._turn(asked.model_id, asked.seq_id) as model:
            if asked.path is not None:
                check_name(asked.path)
            if known is not None and known.is_failure:
                return known
            number = asked.seq_id or 0
            name = f"{SAMPLER}{asked.path}" if asked.path else f"unnamed-{number}"
            wanted = SaveWanted(name, is_shown=True)
            if self._host.publishes:
                async with self.samplers.users.alone():
                    await self.turns.ask(model, number, wanted)
            elif known is None:
                await self.turns.ask(model, number, wanted)
            folder = f"{model.file_name}/{name}"
            if asked.path is None:
                session = f"{model.session}:sample:{asked.sampling_session_seq_id}"
                self.samplers.add(session, folder)
                await self._drop_old_sampler(model, name)
                answer = types.SaveWeightsForSamplerResponseInternal(sampling_session_id=session)
            else:
                path = f"tinker://{asked.model_id}/sampler_weights/{asked.path}"
                self.samplers.add(path, folder)
                answer = types.SaveWeightsForSamplerResponseInternal(path=path)
            return json_of(answer)

    async def _drop_old_sampler(self, model: TrainedModel, name: str) -> None:
        model.samplers.append(name)
        while len(model.samplers) > KEPT_SAMPLERS:
            folder = self.saved.folder / model.file_name / model.samplers.pop(0)
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def refuse(self, why: RequestRefused, asked: Any, _: ApiAnswer | None) -> ApiAnswer:
        """What cannot be read has its turn, too."""
        async with self._turn(asked.model_id, asked.seq_id):
            raise why


def _optimizer_of(asked: Any) -> OptimizerConfig:
    """Raises: RequestRefused: it is no AdamW, or a number is out of its range."""
    if not isinstance(asked, types.AdamParams):
        raise RequestRefused("optim_params: expected adamw")
    optimizer = OptimizerConfig(
        lr=asked.learning_rate,
        beta1=asked.beta1,
        beta2=asked.beta2,
        eps=asked.eps,
        weight_decay=asked.weight_decay,
        max_grad_norm=asked.grad_clip_norm,
        total_steps=1,  # of a schedule, which there is none of
    )
    try:
        check_ranges(optimizer)
    except ConfigError as error:
        name, _, wrong = str(error).partition(":")
        raise RequestRefused(f"adam_params.{_ADAMS.get(name, name)}:{wrong}") from error
    return optimizer
