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
import math
import os
import re
import secrets
import shutil
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace
from tinker import types
from tinker.proto.tinker_public_pb2 import ForwardBackwardRequest

from areal_sc.config.optimizer_settings import OptimizerConfig
from areal_sc.controller.rollout.rollout_controller import RolloutController
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.engines.base import Completion
from areal_sc.errors import ArealError, StepsLost
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_status import TenantStatus
from areal_sc.serving.given_rows import GivenRows
from areal_sc.serving.hosts import Adapters, WholeModel
from areal_sc.serving.journal import Failed, Known, Record, ServeJournal, Source, Turn
from areal_sc.serving.rank_turns import (
    RESTING,
    Host,
    LoadWanted,
    RankTurns,
    SaveWanted,
    ScoreWanted,
    StepWanted,
)
from areal_sc.serving.trained_model import TrainedModel, file_name_of
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
from areal_sc.sizing.adapter_folder import stored_rank
from areal_sc.sources.row_file import GROWING
from areal_sc.system.durable import partial_of

_LOOK_S: Final = 0.5
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_PATH: Final = re.compile(
    r"tinker://([0-9a-f]{16}-[0-9a-f]{16}:train:\d+)/(weights|sampler_weights)/([^/]+)"
)
_TOLD: Final = ("grad_norm", "lr", "skipped")
_KEPT_SAMPLERS: Final = 2
"""Of a model, sets of weights for sampling that have no name; earlier ones end."""
_STATE: Final = "state-"
_SAMPLER: Final = "sampler-"
_LOADED: Final = "loaded"
"""Begin the names of folders of states and of weights for sampling, whose names are their
clients'."""
MAX_MODELS: Final = 1024
"""That go on, of all keys."""


@dataclass(frozen=True)
class Sampler:
    """The weights that a client samples from.

    Attributes:
        adapter: its folder; "": the base model, or the whole model that is trained.
        number: of the models that were begun, where all parameters are trained.
        version: of the policy, there.
    """

    adapter: str = ""
    number: int = 0
    version: int = 0


class TinkerModels:
    """One base model, and the models that clients train from it.

    Attributes:
        name: of the base model.
        limits: of rows and prompts.
        turns: of the ranks.
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
        self.name = actor.config.path
        self.limits = limits
        self._actor = actor
        self._rollout = rollout
        self._journal = journal
        self._folder = folder.serving / "models"
        self._sources = folder.sources
        known = next((it for it in found if isinstance(it, Known)), None)
        name = f"{GROWING}served.jsonl" if known is None else known.rows
        self._host: Host
        if self.lora_rank:
            self._host = Adapters(actor, GivenRows(self._sources / name), self._folder)
        else:
            rows = GivenRows(self._sources / name)
            self._host = WholeModel(actor, rollout, rows, self._folder)
        past = [it for it in found if isinstance(it, Turn | Failed)]
        self.turns = RankTurns(self._host, journal, past, self._model)
        self._models: dict[str, TrainedModel] = {}  # by id, also those that are no more
        self._samplers: dict[str, Sampler] = {}  # by the id of a session, or a path
        self._num_begun = 0  # models, where all parameters are trained
        self._num_samples = 0  # that go on
        self._one_writes = asyncio.Lock()  # rows to the file
        self._changed = asyncio.Condition()
        self._is_publishing = False
        self._in_turn = set[str]()  # models, a request of which is at its turn
        self._is_open = asyncio.Event()  # for further ones
        self._is_open.set()
        if known is not None:
            self._restore(known, found)

    @property
    def lora_rank(self) -> int:
        return self._actor.config.lora.rank

    def _model(self, model_id: str) -> TrainedModel:
        """Raises: RequestRefused: there is no such model, or no more."""
        model = self._models.get(model_id)
        if model is None:
            raise RequestRefused(f"model_id: there is no model {model_id!r:.200}", 404)
        return model

    def ended_by(self, error: ArealError) -> ArealError | None:
        """Whether the run has ended with this error of a request; None: others can be served."""
        lost = self._actor.worker_lost or self._rollout.worker_lost
        return lost or (error if isinstance(error, StepsLost) else None)

    # The journal, written anew

    def _restore(self, known: Known, found: Sequence[Record]) -> None:
        self._models = {it.model_id: TrainedModel.of(it) for it in known.models}
        self._samplers = {name: Sampler(adapter) for name, adapter in known.samplers.items()}
        placed = [(self._models[it.model_id], it) for it in known.models]
        places = [(model, it.place) for model, it in placed if it.place is not None]
        if behind := self.turns.take_places(places, known.version):
            self._journal.begin_anew(_moved(record, behind) for record in found)

    async def write_anew(self, kept: Callable[[], Iterable[Record]]) -> None:
        """What models have come to takes the place of what made them so, between two requests.

        Args: kept: of the journal, what counts beside that; is called at that moment.
        """
        if self._host.publishes or not self._is_open.is_set():
            return
        self._is_open.clear()
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._in_turn)
            if not self._host.has_snapshot:
                return  # what a death would lose is in the journal alone: another time
            await self.turns.rest_in_place()
            before = self._host.rows
            name = f"{GROWING}served-{secrets.token_hex(4)}.jsonl"
            self._host.rows = rows = GivenRows(self._sources / name)
            for model in list(self._models.values()):
                asked = [before.given(number) for number in model.asked]
                await asyncio.to_thread(rows.give, model.asked, asked)
            samplers = {name: it.adapter for name, it in self._samplers.items()}
            # with those that have begun meanwhile
            live = [model for model in self._models.values() if not model.is_ended]
            models = [model.known() for model in live]
            known = Known(self._host.version, name, models, samplers)
            # not beside requests that come: their records would go to the file before
            self._journal.begin_anew([known, *kept()])
            before.delete()
            await asyncio.to_thread(self._delete_old_sources, live)
        finally:
            self._is_open.set()

    def _delete_old_sources(self, live: Sequence[TrainedModel]) -> None:
        needed = {self._folder / model.source.folder for model in live}
        for model in live:
            for kind in (RESTING, _LOADED):
                for folder in (self._folder / model.file_name).glob(f"{kind}-*"):
                    if folder not in needed:
                        shutil.rmtree(folder, ignore_errors=True)

    # Which models there are

    def check_base(self, name: str | None) -> None:
        """Raises: RequestRefused: another model is wanted than the one that is served."""
        if name not in (self.name, Path(self.name).name):
            raise RequestRefused(
                f"base_model: expected {Path(self.name).name}, got {name!r:.200}", 404
            )

    def check_id(self, model_id: str) -> None:
        """Raises: RequestRefused: there is no such model, or no more."""
        if self._model(model_id).is_ended:
            raise RequestRefused(f"model_id: there is no model {model_id!r:.200} any more", 404)

    def expect(self, model_id: str, number: int) -> None:
        """Raises: RequestRefused: the number of a request is far beyond all others' of a model."""
        self._model(model_id).order.expect(number)

    @property
    def ids(self) -> list[str]:
        """Of the models that are there."""
        return [model_id for model_id, model in self._models.items() if not model.is_ended]

    def tenant_of(self, model_id: str) -> str:
        """Whose it is."""
        return self._model(model_id).tenant

    def tenant_status(self, tenant: str, num_answered: int) -> TenantStatus:
        """How it is. Args: num_answered: requests of its, since the start."""
        its = [it for it in self._models.values() if it.tenant == tenant and not it.is_ended]
        num_resting = sum(model.place is None for model in its)
        num_waiting, busy_s = self.turns.num_waiting[tenant], self.turns.busy_s[tenant]
        return TenantStatus(tenant, len(its), num_resting, num_waiting, num_answered, busy_s)

    def rank_of(self, model_id: str) -> int:
        """Of its adapter; 0: all parameters are trained."""
        return self._model(model_id).source.rank

    def source_wanted(self, asked: types.CreateModelRequest, model_id: str) -> Source:
        """What a new model begins with.

        Raises: RequestRefused: such a model is not trained here.
        """
        self.check_base(asked.base_model)
        lora = asked.lora_config or types.LoraConfig(rank=0)
        if not (1 <= lora.rank <= self.lora_rank or lora.rank == self.lora_rank == 0):
            expected = f"1 to {self.lora_rank}" if self.lora_rank else "0, all parameters"
            raise RequestRefused(f"lora_config.rank: expected {expected}, got {lora.rank}")
        if self.lora_rank and not (lora.train_mlp and lora.train_attn):
            raise RequestRefused(
                "lora_config: which layers are trained is a setting of this server, "
                "actor.lora.targets; expected train_mlp and train_attn to be true"
            )
        if not isinstance(asked.optimizer_config, types.AdamOptimizerConfig):
            raise RequestRefused("optimizer_config: expected adamw")
        seed = zlib.crc32(model_id.encode()) if lora.seed is None else lora.seed
        return Source(seed=seed, rank=lora.rank)

    def stored_source(self, path: str, *, has_optimizer: bool) -> Source:
        """What a model that begins with saved weights does.

        Args: path: of the Tinker API; the caller has checked whose it is.
        Raises: RequestRefused: there are no such weights here.
        """
        folder = self._stored(path)
        if not self.lora_rank:
            raise RequestRefused("load_weights: a server of whole models loads none")
        if has_optimizer and not path.partition("/weights/")[1]:
            raise RequestRefused(f"optimizer: {path:.200} has no state of an optimizer")
        return Source(folder, has_optimizer, rank=stored_rank(self._folder / folder))

    def _stored(self, path: str) -> str:
        """The folder, below that of all models. Raises: RequestRefused: there is none."""
        parts = _PATH.fullmatch(path)
        if parts is not None:
            prefix = _STATE if parts[2] == "weights" else _SAMPLER
            folder = f"{parts[1].replace(':', '-')}/{prefix}{_check_name(parts[3])}"
            if (self._folder / folder).is_dir():
                return folder
        raise RequestRefused(f"path: there are no weights {path!r:.200}", 404)

    def begin(self, model_id: str, tenant: str, source: Source) -> None:
        """A model is there, whose requests can come; a repeat changes nothing.

        Raises: RequestRefused: there are too many.
        """
        if model_id in self._models:
            return
        if sum(not model.is_ended for model in self._models.values()) >= MAX_MODELS:
            raise RequestRefused(f"this server has {MAX_MODELS} models: unload some", 429)
        self._models[model_id] = TrainedModel(model_id, tenant, source)

    def loaded_source(
        self, model_id: str, number: int, path: str, *, has_optimizer: bool
    ) -> Source:
        """Saved weights as they are when a model asks for them: a later server repeats that.

        Args: number: of the model's request.
        Raises: RequestRefused: see `stored_source`.
        """
        kept = f"{file_name_of(model_id)}/{_LOADED}-{number}"
        whole = self._folder / kept
        if not whole.is_dir():
            stored = self._folder / self.stored_source(path, has_optimizer=has_optimizer).folder
            part = partial_of(whole)
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(stored, part, copy_function=os.link)
            part.rename(whole)
        return Source(kept, has_optimizer, rank=stored_rank(whole))

    async def create(
        self, model_id: str, is_silent: Callable[[str], bool], begin_anew: Callable[[], None]
    ) -> ApiAnswer:
        """A new model begins with the base model; where all parameters are trained, once the model
        before it is given up, which is no more then.

        Args:
            is_silent: whether the client of the model of that id has not been heard for long.
            begin_anew: the journal, without that model; it has the answer already, if there is one.
        """
        if self._host.publishes:
            await self._begin_whole(self._model(model_id), is_silent, begin_anew)
        return json_of(types.CreateModelResponse(model_id=model_id))

    async def _begin_whole(
        self,
        model: TrainedModel,
        is_silent: Callable[[str], bool],
        begin_anew: Callable[[], None],
    ) -> None:
        # a server that was killed begins all requests at once: some of these came later
        earlier = takewhile(lambda it: it is not model, self._models.values())
        before = [it for it in earlier if not it.is_ended]

        def is_in_use(other: TrainedModel) -> bool:
            is_given_up = other.session == model.session or is_silent(other.model_id)
            return not (other.is_ended or is_given_up)

        while any(map(is_in_use, before)):
            await asyncio.sleep(_LOOK_S)
            if is_silent(model.model_id):
                await self._end(model)
                raise RequestRefused("the client has gone before it could get the model")
        for other in before:
            await self._end(other)
        if before:
            begin_anew()
        async with self._publication():
            await self.turns.ask(model, f"{model.model_id}:0", LoadWanted(model.source))
        self._num_begun += 1
        self._samplers.clear()

    async def unload(self, model_id: str, _: ApiAnswer | None) -> ApiAnswer:
        await self._end(self._model(model_id))
        return json_of(types.UnloadModelResponse(model_id=model_id, type="unload_model"))

    async def _end(self, model: TrainedModel) -> None:
        """What it has saved by a name stays."""
        await self.turns.forget(model)
        folder = self._folder / model.file_name
        for path in folder.glob("*") if folder.is_dir() else ():
            if not path.name.startswith((_STATE, _SAMPLER)):
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        with suppress(OSError):  # there is none, or something is in it
            folder.rmdir()

    # What clients ask of a model

    @asynccontextmanager
    async def _turn(self, model_id: str, number: int | None) -> AsyncIterator[TrainedModel]:
        """The turn of a request among those of its model."""
        model = self._model(model_id)
        async with model.order.turn(number or 0), self._while_open(model_id):
            if model.is_ended:
                raise RequestRefused("model_id: the model is no more")
            yield model

    @asynccontextmanager
    async def _while_open(self, model_id: str) -> AsyncIterator[None]:
        while not self._is_open.is_set():
            await self._is_open.wait()
        self._in_turn.add(model_id)
        try:
            yield
        finally:
            self._in_turn.remove(model_id)
            async with self._changed:
                self._changed.notify_all()

    async def run_pass(self, wanted: ForwardBackwardRequest, known: ApiAnswer | None) -> ApiAnswer:
        """A forward pass; the next step trains on its rows, if it is also a backward one."""
        async with self._turn(wanted.model_id, wanted.seq_id) as model:
            asked = await asyncio.to_thread(pass_of, wanted, self.limits)
            numbers = model.take_numbers(len(asked.rows))
            async with self._one_writes:
                await asyncio.to_thread(self._host.rows.give, numbers, asked.rows)
            if known is None:
                name = f"{wanted.model_id}:{wanted.seq_id}"
                score = ScoreWanted(numbers)
                logprobs = await self.turns.ask(model, name, score, asked.num_tokens)
                known = pass_output(asked, logprobs)
            if asked.is_backward and not known.is_failure:
                model.asked += numbers
                model.num_asked_tokens += asked.num_tokens
            return known

    async def take_step(self, asked: types.OptimStepRequest, known: ApiAnswer | None) -> ApiAnswer:
        """Raises: RequestRefused: there is nothing to learn from, or a setting is wrong."""
        async with self._turn(asked.model_id, asked.seq_id) as model:
            optimizer = _optimizer_of(asked.optim_params)
            if not model.asked:
                raise RequestRefused("optim_step: no forward_backward came before it")
            rows, num_tokens = model.asked, model.num_asked_tokens
            model.asked, model.num_asked_tokens = [], 0
            if known is not None and known.is_failure:
                return known
            name = f"{asked.model_id}:{asked.seq_id}"
            metrics = await self.turns.ask(model, name, StepWanted(rows, optimizer), num_tokens)
            told = {name: it for name, it in metrics.items() if name in _TOLD}
            return json_of(types.OptimStepResponse(metrics=told))

    async def load(self, asked: types.LoadWeightsRequest, known: ApiAnswer | None) -> ApiAnswer:
        """Other weights in place of those of a model. Rows without a step wait for the next one."""
        model_id = asked.model_id or ""
        async with self._turn(model_id, asked.seq_id) as model:
            if known is not None and known.is_failure:
                return known
            number, path = asked.seq_id or 0, asked.path
            source = self.loaded_source(model_id, number, path, has_optimizer=asked.optimizer)
            await self.turns.ask(model, f"{model_id}:{asked.seq_id}", LoadWanted(source))
            return json_of(types.LoadWeightsResponse(path=asked.path, model_id=model_id))

    async def save(self, asked: types.SaveWeightsRequest, known: ApiAnswer | None) -> ApiAnswer:
        """Writes a folder: an adapter in peft's format, or a model that `transformers` loads."""
        async with self._turn(asked.model_id, asked.seq_id) as model:
            name = _check_name(asked.path or f"step-{asked.seq_id}")
            if name in model.saved and not asked.overwrite:
                raise RequestRefused(f"path: {name} was saved already; overwrite=True replaces it")
            model.saved.add(name)
            if known is None:
                wanted = SaveWanted(f"{_STATE}{name}", has_optimizer=True)
                await self.turns.ask(model, f"{asked.model_id}:{asked.seq_id}", wanted)
            path = f"tinker://{asked.model_id}/weights/{name}"
            return json_of(types.SaveWeightsResponse(path=path, type="save_weights"))

    async def save_for_sampler(
        self, asked: types.SaveWeightsForSamplerRequest, known: ApiAnswer | None
    ) -> ApiAnswer:
        """Weights that can be sampled from; see above."""
        async with self._turn(asked.model_id, asked.seq_id) as model:
            if asked.path is not None:
                _check_name(asked.path)
            if known is not None and known.is_failure:
                return known
            request_id = f"{asked.model_id}:{asked.seq_id}"
            name = f"{_SAMPLER}{asked.path}" if asked.path else f"unnamed-{asked.seq_id}"
            wanted = SaveWanted(name, is_shown=True)
            if self._host.publishes:
                async with self._publication():
                    await self.turns.ask(model, request_id, wanted)
                sampler = Sampler("", self._num_begun, self._rollout.version)
            else:
                if known is None:
                    await self.turns.ask(model, request_id, wanted)
                sampler = Sampler(f"{model.file_name}/{name}")
            if asked.path is None:
                session = f"{model.session}:sample:{asked.sampling_session_seq_id}"
                self._samplers[session] = sampler
                await self._drop_old_sampler(model, name)
                answer = types.SaveWeightsForSamplerResponseInternal(sampling_session_id=session)
            else:
                path = f"tinker://{asked.model_id}/sampler_weights/{asked.path}"
                self._samplers[path] = sampler
                answer = types.SaveWeightsForSamplerResponseInternal(path=path)
            return json_of(answer)

    async def _drop_old_sampler(self, model: TrainedModel, name: str) -> None:
        model.samplers.append(name)
        while len(model.samplers) > _KEPT_SAMPLERS:
            folder = self._folder / model.file_name / model.samplers.pop(0)
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def refuse(self, model_id: str, seq_id: int, why: str, _: ApiAnswer | None) -> ApiAnswer:
        """What cannot be read has its turn, too."""
        async with self._turn(model_id, seq_id):
            raise RequestRefused(why)

    # What clients sample

    def open_sampler(self, session: str, asked: types.CreateSamplingSessionRequest) -> None:
        """Raises: RequestRefused: there are no such weights."""
        path = asked.model_path
        if path is None:
            self.check_base(asked.base_model)
            sampler = Sampler("", self._num_begun, 0)
        elif self._host.publishes and path in self._samplers:
            sampler = self._samplers[path]
        elif not self._host.publishes:
            sampler = Sampler(self._stored(path))
        else:
            raise RequestRefused(f"model_path: there are no weights {path!r:.200}", 404)
        self._check_present(sampler)
        self._samplers[session] = sampler

    def check_sampler(self, session: str) -> None:
        """Raises: RequestRefused: there is no such session."""
        if session not in self._samplers:
            raise RequestRefused(f"there is no sampling session {session!r:.200}", 404)

    async def sample(self, asked: types.SampleRequest, known: ApiAnswer | None) -> ApiAnswer:
        """Raises: RequestRefused: what it asks for is not served."""
        if known is not None:
            return known
        wanted = sampling_of(asked, self.limits, self._rollout.engine.config.generation)
        sampler = self._samplers[asked.sampling_session_id or ""]
        async with self._sampling():
            self._check_present(sampler)
            group = f"{asked.sampling_session_id}:{asked.seq_id}"
            folder = str(self._folder / sampler.adapter) if sampler.adapter else ""
            futures = [
                self._rollout.begin_generate(
                    wanted.prompt,
                    wanted.sampling,
                    prefix_group=group,
                    adapter=folder,
                    prompt_logprobs=wanted.prompt_logprobs and not number,
                    top_k_logprobs=max(wanted.top_k, wanted.prompt_top_k),
                )
                for number in range(asked.num_samples)
            ]
            found: list[Completion] = await asyncio.gather(*map(asyncio.wrap_future, futures))
            return sample_output(wanted, found)

    def _check_present(self, sampler: Sampler) -> None:
        gone = "these weights are served no more: "
        if self._host.publishes:
            if sampler != Sampler("", self._num_begun, self._rollout.version):
                raise RequestRefused(
                    f"{gone}newer ones were saved for sampling, or another model was begun; a "
                    "server of whole models has one set of weights for sampling"
                )
        elif sampler.adapter and not (self._folder / sampler.adapter).is_dir():
            raise RequestRefused(
                f"{gone}a model has its {_KEPT_SAMPLERS} newest sets without a name; "
                "save_weights_for_sampler(name) keeps others"
            )

    @asynccontextmanager
    async def _sampling(self) -> AsyncIterator[None]:
        """A whole model's weights do not change meanwhile."""
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


def _moved(record: Record, behind: int) -> Record:
    """A record of turns by versions that are so many lower."""
    if isinstance(record, Turn | Known):
        return replace(record, version=record.version - behind)
    return record


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
