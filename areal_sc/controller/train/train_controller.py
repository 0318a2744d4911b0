"""TrainController: steers the ranks that train one model; sees rows only as metadata.

    consumes       batches (metadata) from a RolloutController, or any other source of rows
    per step       advantages (scalars of the rows' metadata, computed here)
                   -> proximal log-probabilities (recomputed by the ranks, sealed as new shards)
                   -> PPO minibatches, each split over the model groups by tokens
    publishes      policy version i+1, by pull, broadcast or disk; see `TrainStep.publish`

Minibatches are cut from the whole batch before the split over ranks, so what one optimizer update
trains on does not depend on the number of ranks.

Ranks that die are started again, and brought back to where they were: see `ranks`. A call that
needs them takes longer then.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from areal_sc.algorithms.named_loss import CROSS_ENTROPY, NamedLoss, is_tried, loss_of
from areal_sc.algorithms.token_function import TokenFunction
from areal_sc.config.optimizer_settings import OptimizerConfig
from areal_sc.config.schema import ActorConfig
from areal_sc.controller.base import Controller, blocking
from areal_sc.controller.ledger.journal import ledger_on_disk
from areal_sc.controller.shared_card import Side, common_of
from areal_sc.controller.train.model_place import PlaceFile
from areal_sc.controller.train.rank_layout import FoundRanks, find_ranks
from areal_sc.controller.train.rank_state import StartingPoint
from areal_sc.controller.train.ranks import Ranks
from areal_sc.controller.train.train_step import (
    POLICY_ADVANCES,
    PPO_FIELDS,
    TrainStep,
    trained_content,
)
from areal_sc.engines.base import AdapterBeginning, column_of
from areal_sc.engines.handle_base import TrainHandle
from areal_sc.errors import ROWS_GONE, ConfigError
from areal_sc.fleet.runtime import Runtime
from areal_sc.fleet.worker_life import FleetEvent, RunFailed, UnitLost
from areal_sc.metadata import BatchMetadata
from areal_sc.nodes.spec import ROLLOUT_ROLE, TRAIN_ROLE
from areal_sc.run.run_folder import RunFolder
from areal_sc.schedulers.base import Scheduler
from areal_sc.sizing.model_folder import check_replaceable
from areal_sc.sources.row_file import PromptSource
from areal_sc.weights.channel import CHANNELS, WeightsReader
from areal_sc.workers.rank_methods import SnapshotPlace


class TrainController(Controller):
    """Trains one model on any number of ranks.

    Methods block; each has an awaitable twin, named `..._async`, for scripts that are asyncio
    themselves, and await `start_async` and `close_async` in place of a `start` block.

    Args:
        role: names its workers, logs and snapshots; another one for each controller of a script.

    Attributes:
        version: policy version = number of published training steps.
        ranks: see there.
        place: where the model is, and where an earlier start has left it.
        found: the ranks of an earlier start, if they go on; None: they were started.
    Raises: ConfigError: the role is `rollout`, or no lower-case word.
    """

    engine: TrainHandle

    def __init__(
        self,
        engine: TrainHandle,
        scheduler: Scheduler,
        *,
        role: str = TRAIN_ROLE,
        runtime: Runtime | None = None,
    ) -> None:
        _check_role(role)
        super().__init__(engine, scheduler, role, runtime, unit=role)
        self.config: ActorConfig = engine.config
        self._folder = RunFolder(scheduler.config.run_dir)
        self._common = common_of(scheduler)
        path = self._folder.histories / f"{role}.json"
        self.place = PlaceFile(path, self._runtime.disk)
        channel = CHANNELS[self.config.weight_update.method]
        self.ranks = Ranks(
            self.config,
            self._recovery,
            channel(self.config, self.fleet, self._runtime.new_id),
            self._common.needs,
            self._common.card,
        )
        self._tell_more = self.ranks.tell
        self.found: FoundRanks | None = None
        self._exports = self._folder.exports / role  # where ranks gather a model
        self._loss = loss_of(self.config.ppo)
        self._step = TrainStep(
            self.ranks,
            self.config.ppo,
            self._loss,
            self._sources,
            self.place,
            replays_routes=self.config.routing_replay,
        )

    @property
    def version(self) -> int:
        """Number of published training steps."""
        return self.ranks.state.version

    def look(self) -> None:
        from areal_sc.controller.dry_run import look_at_model

        look_at_model(self.engine, self._loss)

    async def start_async(self) -> None:
        """Starts the ranks and builds the engine in each.

        Raises: WorkerStartError, ModelError: with the worker's own words. ConfigError: there is no
            module of the loss.
        """
        async with self._common.card.held(Side.training):
            await self._start()

    async def _start(self) -> None:
        ranks = range(self.config.parallel.num_ranks)
        await self._launch([self._order(rank, self.config) for rank in ranks])
        left, ledger = self.place.read(), ledger_on_disk(self._folder.ledger, self._runtime.disk)
        version = left.newest_version(ledger) if left else None
        loss = self._step.begin_losses(self._loss) if is_tried(self.config) else None
        self.found = None
        if left is not None and version is not None:
            self.found = await find_ranks(self.fleet, left.lineage, version)
        if self.found is not None:
            self.ranks.take_over(self.found)
        else:
            shutil.rmtree(self._exports, ignore_errors=True)  # of an earlier start
            lineage = self._common.enter_lineage(self.role, self._folder)
            await self.place.begin(lineage, 0)
            await self.ranks.start(lineage, loss)

    async def close_async(self) -> None:
        """Ends the workers."""
        await self._common.card.close()
        await super().close_async()
        with suppress(OSError):  # it is not there, or an export is still being copied from it
            self._exports.rmdir()
            self._exports.parent.rmdir()

    async def compute_async(
        self, batch: BatchMetadata, output: str | TokenFunction, *, field: str
    ) -> BatchMetadata:
        """The batch with a field that the ranks compute: [T] float32.

        Tokens that are not trained hold 0. A loss of your own reads the field by its name, and
        samples leave it out. It lives as long as the rows, and is to be computed again where
        `prepare_batch` has formed a batch anew.

        Args:
            output: `logprobs` or `entropy`, in nats, `values`, `scores` or `base_logprobs`; of the
                current weights, see `TrainEngine.forward`. Or `package.module:function`, a token
                function, or a `TokenFunction` with settings: it makes the field from the other
                ones.
            field: its name. With `advantages` those of rows go.
        Raises: ValueError: there is no such output. MetadataError: the batch has the field.
            ConfigError: there is no such function. WorkflowError: the function has failed.
            BatchLost: as `ppo_update`.
        """
        if isinstance(output, str) and ":" in output:
            output = TokenFunction(output)
        if isinstance(output, str):
            column_of(output, self.config)
        return await self._step.compute(batch, output, field)

    async def compute_logprobs_async(
        self, batch: BatchMetadata, *, field: str = "logprobs"
    ) -> BatchMetadata:
        """The batch with the log-probabilities of its trained tokens, as `compute`.

        `ref.compute_logprobs(batch, field="reference_logprobs")`, where `ref` is another
        `TrainController`, gives those of another model.
        """
        return await self.compute_async(batch, "logprobs", field=field)

    async def compute_top_logprobs_async(self, batch: BatchMetadata, top_k: int) -> BatchMetadata:
        """The batch with the `top_k` tokens that the model finds most probable, as `compute`.

        `teacher_top_logprobs`, [T, top_k] float32, nats, falling, and `teacher_top_tokens`,
        [T, top_k] int32. A loss reads both, and `LossTokens.top_logprobs`.

        Raises: ValueError: the vocabulary is smaller.
        """
        column_of("logprobs", self.config)
        return await self._step.compute_top(batch, top_k)

    async def compute_proximal_logprobs_async(
        self, batch: BatchMetadata, *, whole: bool = False
    ) -> BatchMetadata:
        """The batch with field `proximal_logprobs`: [T] float32, nats, of the current weights.

        Tokens that are not trained hold 0. So do those of advantage 0, where advantages came first
        and nothing else adds to the loss: they are left out of the update, too. The first
        minibatch holds NaN: its own forward, in the next `ppo_update`, is that of the proximal
        policy.

        The batch is returned as it is when nobody needs the field: with `ppo.clip_center:
        behavior`, and with one minibatch. A further `ppo_update` of the same policy version needs
        the field in any case.

        Args:
            whole: also the first minibatch; for a batch that several updates train on.
        Raises: BatchLost: as `ppo_update`.
        """
        return await self._step.compute_proximal(batch, whole=whole)

    def compute_advantages(self, batch: BatchMetadata) -> BatchMetadata:
        """The batch with one advantage per row, from the rows' rewards, groups and episodes.

        A row whose answers have returns of their own gets one for each of them.
        Advantages of tokens are a field `advantages` instead: [T] float32, united with the batch.
        """
        return self._step.with_advantages(batch)

    async def ppo_update_async(self, batch: BatchMetadata) -> dict[str, float]:
        """One optimizer update per PPO minibatch, by the loss of `actor.ppo`, as `update`.

        Once a call has returned, another one trains further, also before the weights are
        published: `publish_weights` makes the next version.
        """
        proximal = ["proximal_logprobs"] if self._step.needs_proximal_logprobs else []
        batch.select([*PPO_FIELDS, *proximal])  # which must be there; a loss may read any other
        num_minibatches = self.config.ppo.num_minibatches
        return await self.update_async(
            batch, self._loss, num_minibatches=num_minibatches, advances=False
        )

    async def update_async(
        self,
        batch: BatchMetadata,
        loss: NamedLoss | str,
        *,
        num_minibatches: int = 1,
        advances: bool = True,
    ) -> dict[str, float]:
        """One optimizer update a minibatch, by any loss.

        A call that was given up goes on in the workers; the next one, with the same batch, joins
        it.

        Args:
            loss: its name, `cross_entropy` or `package.module:function`, or a `NamedLoss` with
                settings.
            num_minibatches: of whole episodes; at most as many as there are.
            advances: the version goes up by one at once; False: `publish_weights` does that.
        Returns: metrics of the step, over all ranks (loss, entropy, grad_norm, ...).
        Raises: ConfigError: the model is frozen, there is no such loss, or it compares rows.
            MetadataError: the batch lacks what the loss is known to read. StaleCall: a call was
            given up, and this one has another batch or loss. BatchLost: rows are gone; the weights
            are those before the step, whose batch can be formed anew.
        """
        self._check_trains()
        loss = loss if isinstance(loss, NamedLoss) else NamedLoss(loss)
        self._step.check_fields(batch, loss, num_minibatches)
        self._step.check_first(batch, num_minibatches)
        shares, split = await self._step.shares(batch, loss, num_minibatches)
        content = trained_content(batch)
        try:
            return await self._step.update(
                shares, loss, content, batch.rows, split, advances=advances
            )
        except ROWS_GONE as error:
            raise self._step.lose_rows(batch, error) from error

    async def sft_update_async(
        self, prompts: PromptSource, indices: Sequence[int], *, advances: bool = True
    ) -> dict[str, float]:
        """One optimizer update on rows of a dataset with items `{"input_ids", "loss_mask"}`.

        The workers read the rows; only their numbers travel.

        Args:
            advances: the version goes up by one at once; False, as for a policy: the update is a
                part of the step that goes on, as `ppo_update` is.
        Raises: ConfigError: the model is frozen; or it is the policy of a rollout controller, and
            would advance.
        """
        return await self.update_rows_async(prompts, indices, CROSS_ENTROPY, advances=advances)

    async def update_rows_async(
        self,
        rows: PromptSource,
        indices: Sequence[int],
        loss: NamedLoss,
        *,
        advances: bool = True,
        optimizer: OptimizerConfig | Mapping[int, OptimizerConfig] | None = None,
        adapters: Sequence[int] = (),
    ) -> dict[str, float]:
        """`sft_update` by any loss; an item may also be a pair of such, `chosen` and `rejected`.

        Further lists of an item, one number a token, are fields that the loss reads. Each place of
        an adapter takes a step of its own: with its gradient's norm and its count of updates, or
        none, where there is no gradient, or one that is not finite.

        Args:
            adapters: with `actor.lora.places`, the place of each row's adapter, which it is
                computed with, and trains; (): that is 0.
            optimizer: AdamW's settings for this update, or those of each place that rows are of;
                None: those of `actor.optimizer`.
        Returns: see `sft_update`; where `optimizer` is given, also `grad_norm_<place>` of each
            place that has stepped.
        Raises: ConfigError: as `sft_update`, or there is no such place.
        """
        self._check_trains()
        is_policy = self.role == TRAIN_ROLE and self._common.needs and self.publishes
        if advances and (self.ranks.reader or is_policy):
            raise ConfigError(POLICY_ADVANCES)
        if isinstance(optimizer, OptimizerConfig):
            optimizer = dict.fromkeys(range(self._num_places), optimizer)
        for place in optimizer or ():
            self._check_place(place)
        if advances:  # else it is part of a step that goes on
            await self.standstill.hold(self._check_lives)
        named = await self._step.readable(rows, indices)
        shares = self._step.named(*named, adapters)
        content = [*named, *adapters]
        return await self._step.update(
            shares, loss, content, (), (), advances=advances, optimizers=optimizer
        )

    async def fill_adapter_async(
        self,
        place: int,
        folder: str | Path | None = None,
        *,
        rank: int | None = None,
        seed: int = 0,
        with_optimizer: bool = False,
    ) -> None:
        """The adapter of a place begins anew, as a new one does, or goes on from a folder.

        It is a part of the step that goes on, as an update is: the folder stays as it is until the
        next version. Its moments and its count of updates are 0.

        Args:
            folder: what `save_adapter` or peft has written, where rank 0 sees it; None: it is new.
            rank: up to `actor.lora.rank`; None: that one, or the folder's.
            seed: of a new one.
            with_optimizer: moments and count of updates are those of the folder, if it has them.
        Raises: ConfigError: there is no such place, or the rank is larger. ModelError: the folder
            has no adapter of this model; nothing has changed.
        """
        self._check_trains()
        self._check_adapter(place)
        largest = self.config.lora.rank
        smallest = 1 if self._num_places > 1 else largest
        if rank is not None and not smallest <= rank <= largest:
            raise ConfigError(
                f"rank of an adapter: expected {smallest} to {largest} (actor.lora.rank), got "
                f"{rank}"
            )
        beginning = AdapterBeginning(_absolute(folder), rank or 0, seed, with_optimizer)
        await self._step.fill_adapter(place, beginning)

    async def save_adapter_async(
        self, place: int, folder: str | Path, *, with_optimizer: bool
    ) -> None:
        """Writes the adapter of a place in peft's format; replaces a model or adapter there.

        Args:
            with_optimizer: also `optimizer.safetensors`, its moments and its count of updates.
        Raises: ConfigError: there is no such place. CheckpointError: as `save_hf`.
        """
        self._check_adapter(place)
        finish = await self.ranks.begin_export(
            check_replaceable(folder), place, with_optimizer=with_optimizer
        )
        await finish()

    @property
    def publishes(self) -> bool:
        """Whether generation follows its weights; else it gets adapters from folders."""
        return self._num_places == 1

    @property
    def _num_places(self) -> int:
        return self.config.lora.places if self.config.has_adapter else 1

    def _check_adapter(self, place: int) -> None:
        """Raises: ConfigError: there is no such place, or no adapter at all."""
        if not self.config.has_adapter:
            raise ConfigError(f"actor.lora.rank: expected one above 0 for {self.role!r}, got 0")
        self._check_place(place)

    def _check_place(self, place: int) -> None:
        """Raises: ConfigError: there is no such place."""
        if not 0 <= place < self._num_places:
            raise ConfigError(
                f"place of an adapter: expected 0 to {self._num_places - 1} (actor.lora.places), "
                f"got {place}"
            )

    def _check_trains(self) -> None:
        """Raises: ConfigError: the model only computes."""
        if self.config.is_frozen:
            raise ConfigError(
                f"the model of role {self.role!r} is frozen: it has no optimizer, and is not "
                "trained; give it an ActorConfig without is_frozen"
            )

    def _check_lives(self) -> None:
        """Raises: WorkerError, RunFolderError: the run cannot go on. StepsLost: a step is lost."""
        if self.worker_lost is not None:
            raise self.worker_lost
        self.ranks.step.check()

    async def score_rows_async(
        self,
        rows: PromptSource,
        indices: Sequence[int],
        output: str = "logprobs",
        *,
        per_token: bool = False,
        adapters: Sequence[int] = (),
    ) -> list[tuple[float, ...]]:
        """One number of each row, two of a pair: what `rank_methods.ScoreRows` says of `output`.

        Args:
            per_token: each row's has one a token, [T]; rows are no pairs.
            adapters: as of `update_rows`.
        """
        return await self._step.score(rows, indices, output, per_token=per_token, adapters=adapters)

    async def score_async(self, batch: BatchMetadata, output: str | TokenFunction) -> list[float]:
        """A number of each row of a batch, for its reward: see `BatchMetadata.add_rewards`.

        Args:
            output: `scores`, of a model with a value head: its score of the row up to the last
                trained token. `logprobs`, `entropy`, or a token function, as of `compute`: a sum
                over the trained tokens.
        Raises: as `compute`. ValueError: also for `values`, whose sum says nothing.
        """
        if output == "values":
            raise ValueError("output: expected scores, of a model with a value head, got values")
        if isinstance(output, str):
            column_of(output, self.config)
        return await self._step.score_batch(batch, output)

    async def publish_weights_async(self, rollout: WeightsReader) -> None:
        """Publishes the weights as version + 1, in the way that `weight_update.method` names.

        Returns once the weights are sealed, broadcast or written; generation goes on. An update
        to the version before that is still going on is waited for.

        Raises: BatchLost: train workers died, and rows that they need to make the step again are
            gone; the weights are those before the step, whose batch can be formed anew.
            ConfigError: the model is frozen.
        """
        self._check_trains()
        self._check_publishes()
        await self._step.publish(rollout, self.version + 1)

    async def share_weights_async(self, rollout: WeightsReader) -> None:
        """Gives the current version to rollout workers that hold another one (after a resume)."""
        self._check_publishes()
        await self._step.publish(rollout, self.version)

    def _check_publishes(self) -> None:
        """Raises: ConfigError: generation gets the adapters from folders."""
        if not self.publishes:
            raise ConfigError(
                f"actor.lora.places: expected 1 to publish weights, got {self._num_places}: "
                "save_adapter writes the adapter of a place"
            )

    async def save_hf_async(self, folder: str | Path) -> None:
        """Writes the model and its tokenizer in Hugging Face layout; replaces a model there.

        Raises: CheckpointError: the disk is full, say, or other files are in `folder`; it is left
            as it was.
        """
        await (await self.ranks.begin_export(check_replaceable(folder)))()

    def begin_save_hf(self, folder: str | Path) -> Future[None]:
        """`save_hf` beside training: returns once the ranks have copied their weights."""
        return self._submit(self._run(self.ranks.begin_export(check_replaceable(folder)))())

    def begin_snapshot(self) -> Future[None]:
        """Writes weights, optimizer, schedule and RNG to `engine` of an unfinished snapshot.

        Returns once the ranks have copied their state; they write it beside training.
        `areal_sc.trainer.checkpoints` adds the controllers' state and gives it its final name.

        Raises: CheckpointError: earlier snapshots are left as they were.
        """
        return self._submit(self._run(self.ranks.begin_snapshot())())

    async def begin_anew(self) -> None:
        """Ranks that an earlier start has left go back to the initial model."""
        if self.found is not None:
            await self.load_snapshot_async(0)
            self.found = None

    async def load_snapshot_async(self, step: int) -> None:
        """Goes back to the snapshot of that step; `version` becomes `step`, in a new lineage.

        At any time, also after `StepsLost`. Step 0 without a snapshot is the initial model.

        Raises: CheckpointError: it cannot be read.
        """
        has_snapshot = step > 0 or self._folder.snapshot_path(step).exists()
        place = SnapshotPlace.disk if has_snapshot else SnapshotPlace.initial
        lineage = self._common.enter_lineage(self.role, self._folder)
        await self.place.begin(lineage, step)
        await self.ranks.load(lineage, StartingPoint(step, place))

    def note_snapshot(self, step: int) -> None:
        """The snapshot that was begun after so many steps has got its final name.

        Ranks that die in the step that follows may begin from it.
        """

        async def note() -> None:
            self.ranks.state.note_durable(step)

        self._run(note())

    @property
    def publication_stats(self) -> dict[str, float]:
        """Where the time of publications went; see `PublicationTimes`."""
        return asdict(self.ranks.channel.times)

    def _hear(self, event: FleetEvent) -> None:
        match event:
            case UnitLost():
                self.ranks.end_calls()
            case RunFailed(cause):
                self._give_up(cause)

    compute = blocking(compute_async)
    compute_logprobs = blocking(compute_logprobs_async)
    compute_top_logprobs = blocking(compute_top_logprobs_async)
    compute_proximal_logprobs = blocking(compute_proximal_logprobs_async)
    update = blocking(update_async)
    ppo_update = blocking(ppo_update_async)
    sft_update = blocking(sft_update_async, before=Controller.copy_prompts)
    update_rows = blocking(update_rows_async, before=Controller.copy_prompts)
    fill_adapter = blocking(fill_adapter_async)
    save_adapter = blocking(save_adapter_async)
    score_rows = blocking(score_rows_async, before=Controller.copy_prompts)
    score = blocking(score_async)
    publish_weights = blocking(publish_weights_async)
    share_weights = blocking(share_weights_async)
    save_hf = blocking(save_hf_async)
    load_snapshot = blocking(load_snapshot_async)


def _absolute(folder: str | Path | None) -> str:
    return "" if folder is None else str(Path(folder).expanduser().absolute())


def _check_role(role: str) -> None:
    """Raises: ConfigError: it is no name for workers, logs and snapshots of a model."""
    is_word = role.isascii() and role.isidentifier() and role.islower()
    if role == ROLLOUT_ROLE or not is_word:
        raise ConfigError(
            f"role: expected a lower-case word other than {ROLLOUT_ROLE}, such as actor or ref, "
            f"got {role!r}"
        )
