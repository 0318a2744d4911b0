"""What one rank of every training engine does: rows in, an update or log-probabilities out.

A minibatch (one optimizer update) is cut into micro-batches of whole rows, packed without padding.
Where ranks meet in each of them, every rank runs equally many: they agree on the largest count, and
a rank with fewer rows than that fills up with empty ones. Where they meet once an update, a rank
runs its own, or an empty one if it has no rows.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Final

import torch
from torch._C._distributed_c10d import TCPStore

from areal_sc.algorithms.loss_tokens import LossCounts
from areal_sc.algorithms.losses import Loss
from areal_sc.algorithms.named_loss import NamedLoss
from areal_sc.algorithms.shared_prefixes import Forest
from areal_sc.config.optimizer_settings import OptimizerConfig
from areal_sc.config.schema import ActorConfig, ModelHead
from areal_sc.engines.base import SCORES, AdapterBeginning, RankPosition, column_of
from areal_sc.engines.training.background import BackgroundWriter
from areal_sc.engines.training.kept_states import KeptStates
from areal_sc.engines.training.learning_rate import learning_rate
from areal_sc.engines.training.process_group import (
    ProcessGroup,
    host_rendezvous,
    place_by_torchrun,
    select_device,
    take_device,
)
from areal_sc.engines.training.row_numbers import RowNumbers, ShareOfRows, count_rows
from areal_sc.engines.training.snapshots import Snapshots
from areal_sc.engines.training.updates.micro_batches import (
    MicroBatch,
    RowUnits,
    check_routes,
    check_top_tokens,
    places_of_rows,
    trained_tokens,
    with_advantage,
    with_staleness,
    with_token_advantages,
)
from areal_sc.engines.training.updates.minibatch_loss import MinibatchLoss, Outputs
from areal_sc.engines.training.updates.update_metrics import (
    MISMATCH,
    MISMATCH_NOISE,
    UpdateMetrics,
)
from areal_sc.engines.training.updates.update_trace import UpdateTrace
from areal_sc.engines.training.whole_tensors import Publication
from areal_sc.errors import ConfigError
from areal_sc.sizing.machine import threads_of_rank
from areal_sc.sizing.routed_experts import RoutedExperts
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.weights.group import NamedTensor
from areal_sc.weights.published import BucketLayout

logger = logging.getLogger(__name__)

_NO_COUNTS: Final = LossCounts(tokens=0, sequences=0, episodes=0, prompts=0)
_NO_ADAPTERS: Final = "actor.lora.rank: expected one above 0, of adapters, got 0"


@dataclass(frozen=True)
class PlannedBatch:
    """Rows of this rank, and how they go through the model.

    Attributes:
        rows: all of them.
        asked: [T] bool, tokens that the model is asked for.
        packed: the rows of each micro-batch; equally many on every rank, where they meet in each.
        forests: how those of each share their first tokens; None: they do not.
        most_packed: micro-batches of the rank that has most of them.
        is_behind: the model is asked behind these tokens, which it has read; else before them.
        numbers: what a loss may know of the rows; None: there is no loss.
        counts: what the minibatch holds on all ranks; nothing where there is no loss.
        top_k: most probable tokens that are asked for; 0: the rows' own.
        row_places: of each row's adapter; empty: there is one.
        places: of the rows of all ranks, each once.
    """

    rows: PackedRows
    asked: torch.Tensor
    packed: list[list[int]]
    forests: list[Forest | None]
    most_packed: int
    is_behind: bool = False
    numbers: RowNumbers | None = None
    counts: LossCounts = _NO_COUNTS
    top_k: int = 0
    row_places: Sequence[int] = ()
    places: Sequence[int] = ()

    @cached_property
    def num_row_tokens(self) -> list[int]:
        """Tokens of each micro-batch's rows."""
        return [sum(self.rows.lengths[row] for row in chosen) for chosen in self.packed]

    @cached_property
    def num_computed_tokens(self) -> list[int]:
        """The same, each shared token once."""
        each = zip(self.num_row_tokens, self.forests, strict=True)
        return [count if forest is None else forest.num_tokens for count, forest in each]


class RankEngine(ABC):
    """One rank. Every rank must get the same calls in the same order; rows may differ.

    Args:
        config: the actor section of the settings.

    Attributes:
        world: all ranks.
        rows: ranks that compute different tokens, and together all of them.
        counts_rows: whether this rank is the one of its model group that counts for its rows in
            sums over `rows`.
        counts_metrics: whether it counts for what the losses of its tokens report.
        shares_files, node: see `TrainEngine`.
        logprob_noise: nats by which rounding moves a log-probability, in the mean over a few
            likely rows; None: not known.
        routed_experts: of a model that replays routes; None: it does not.
        reads_pictures: rows may have pictures.
    """

    world: ProcessGroup
    rows: ProcessGroup
    counts_rows: bool
    counts_metrics: bool

    def __init__(self, config: ActorConfig) -> None:
        self.config = config
        self.shares_files = True
        self.node = ""
        self.logprob_noise: float | None = None
        self.routed_experts: RoutedExperts | None = None
        self._places = range(config.lora.places if config.has_adapter else 0)
        self.reads_pictures = False
        self._hosted: TCPStore | None = None
        self._writer: BackgroundWriter
        self._snapshots: Snapshots
        self._kept_states: KeptStates
        self._publication: Publication

    def create_rendezvous(self, host: str = "127.0.0.1") -> str:
        self._hosted, address = host_rendezvous(host)
        return address

    def initialize(
        self, rank: int | None = None, world_size: int = 1, init_method: str = "env://"
    ) -> RankPosition:
        """Meets the other ranks and loads the model.

        Args:
            rank: None: this process is the rank that torchrun made it, or the only one.
            init_method: from `create_rendezvous`, or `tcp://host:port` that rank 0 will open, or
                `env://` under torchrun. A single rank ignores it.
        Raises: WorkerStartError: the ranks did not meet, or there is no such device.
            ModelError: the model folder cannot be used. ConfigError: torchrun has started another
            number of ranks than `actor.parallel` has.
        """
        if rank is None:
            rank, world_size = place_by_torchrun(self.config.parallel)
        device = self._select_device(rank)
        take_device(rank, device)
        num_ranks, is_cuda = self.config.parallel.num_ranks, device.type == "cuda"
        torch.set_num_threads(threads_of_rank(self.config.num_threads, num_ranks, is_cuda=is_cuda))
        torch.manual_seed(self.config.seed)
        position = self._join(rank, world_size, init_method, device)
        return replace(position, min_saved_tokens=self._min_saved_tokens)

    def _select_device(self, rank: int) -> torch.device:
        """Raises: ConfigError: this machine has not what the settings ask for."""
        return select_device(self.config.device, rank)

    @abstractmethod
    def _join(
        self, rank: int, world_size: int, init_method: str, device: torch.device
    ) -> RankPosition:
        """Meets the other ranks and loads the model; sets all attributes."""

    @abstractmethod
    def _outputs(self, batch: PlannedBatch) -> Iterator[tuple[MicroBatch, Outputs]]:
        """Computes each micro-batch, without gradients; gives those that this rank knows."""

    @abstractmethod
    def _add_gradients(self, batch: PlannedBatch, loss: MinibatchLoss) -> None:
        """Forward and backward of each micro-batch; gradients of the minibatch's loss add up.

        Those of an earlier minibatch do not count.
        """

    @abstractmethod
    def _take_step(
        self, step: int, optimizers: Mapping[int, OptimizerConfig], *, is_void: bool
    ) -> dict[int, float]:
        """One optimizer update at the learning rate of the training step.

        Args:
            optimizers: its settings, by the place of an adapter; of place 0 those of all that is
                not an adapter's, too.
            is_void: this rank's gradients are not those of the loss: no rank takes the step.
        Returns: by place, the norm of the gradients before clipping; not finite, or 0: nothing of
            that place has changed.
        """

    def _own_metrics(self) -> dict[str, float]:
        """Further numbers of an update, the same on all ranks."""
        return {}

    @property
    @abstractmethod
    def _pads_rows(self) -> bool:
        """Whether the rows of a micro-batch are padded to one length."""

    def _combined_outputs(self, values: torch.Tensor) -> torch.Tensor:
        """[T] of what the ranks of a model group know of the tokens."""
        return values

    def forward(self, rows: PackedRows, output: str) -> torch.Tensor:
        """What the current weights say of trained tokens, on the CPU.

        Args:
            rows: fields `input_ids` and `loss_mask`; `temperatures`, else 1; `adapter`, the place
                of each row's adapter, else 0. Where advantages are known, rows without any are left
                out: nothing is trained on them.
        Raises: ValueError: there is no such output, a field is missing, or a row is too long.
        """
        column = column_of(output, self.config)
        values = torch.zeros(rows.num_tokens)
        (values,) = self._asked(rows, {column: values}, is_behind=output == SCORES)
        return values

    def top_logprobs(self, rows: PackedRows, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The current weights' most probable tokens at the trained ones, on the CPU.

        Args: rows: as of `forward`.
        Returns: [T, top_k] float32, nats, falling, and the tokens, [T, top_k] int32.
        Raises: ValueError: as `forward`; or the vocabulary is smaller.
        """
        if not 1 <= top_k <= self._vocab_size or self.config.head is not ModelHead.lm:
            raise ValueError(
                f"top_k: expected 1 to {self._vocab_size}, the tokens that "
                f"{self.config.path} gives a probability, got {top_k}"
            )
        shape = (rows.num_tokens, top_k)
        values = {0: torch.zeros(shape), 1: torch.zeros(shape, dtype=torch.int32)}
        logprobs, tokens = self._asked(rows, values, top_k=top_k)
        return logprobs, tokens

    def _asked(
        self,
        rows: PackedRows,
        values: Mapping[int, torch.Tensor],
        *,
        is_behind: bool = False,
        top_k: int = 0,
    ) -> Iterator[torch.Tensor]:
        """Values [T, ...] of some outputs, by number, into which those of trained tokens go."""
        known = with_token_advantages(rows)
        (batch,) = self._plan([rows], lambda _: with_advantage(known, trained_tokens(known, None)))
        batch = replace(batch, is_behind=is_behind, top_k=top_k)
        with torch.no_grad():
            each = [
                (it.own_token_index, [outputs[column] for column in values])
                for it, outputs in self._outputs(batch)
            ]
        for number, of_column in enumerate(values.values()):
            if each:  # all at the end: the host waits for the device once
                found = torch.cat([asked[number].to(of_column.dtype) for _, asked in each]).cpu()
                of_column[torch.cat([index for index, _ in each])] = found
            yield self._combined_outputs(of_column)

    def update(
        self,
        minibatches: Sequence[PackedRows],
        loss: NamedLoss | Loss,
        *,
        step: int,
        min_token_version: int | None = None,
        trace: UpdateTrace | None = None,
        optimizers: Mapping[int, OptimizerConfig] | None = None,
    ) -> dict[str, float]:
        """One optimizer update a minibatch; none where nothing is learned, as its gradient is 0.

        Args:
            minibatches: fields `input_ids`, `loss_mask`, with `min_token_version` `versions`, those
                that the loss reads, and `temperatures`, else 1. The first minibatch may do without
                `proximal_logprobs`, or have NaN there: no weight has changed, so its own forward is
                that of the proximal policy.
            loss: its name and settings, or the function itself. Where it is known to be zero
                without an advantage, rows none of whose tokens has one go through no forward; they
                count in the denominators all the same.
            optimizers: settings of these updates, by the place of an adapter, of which rows may be;
                None: those of the model, of all places. Each place steps by itself.
        Returns: see `UpdateMetrics.summary`; and `num_computed_tokens`, those of all ranks that
            went through the model, each token that rows share once; `shared_token_share`, the
            share of these rows' tokens that were computed with another row. With `optimizers` also
            `grad_norm_<place>` of each place that has stepped.
        Raises: ValueError: a field that every loss needs is missing, a row is over the micro-batch
            limit, or the ranks have different numbers of minibatches. ConfigError: no such loss,
            or the model is frozen.
            WorkflowError: on all ranks: on one of them the loss raised, asked for a field that the
            rows lack, or returned something else than a loss does.
        """
        if self.config.is_frozen:
            raise ConfigError("actor.is_frozen: a model that is frozen is not trained")
        named = loss if isinstance(loss, NamedLoss) else None
        compute_loss = loss.load() if isinstance(loss, NamedLoss) else loss
        settings = optimizers or dict.fromkeys(self._places or (0,), self.config.optimizer)
        minibatches = [with_token_advantages(rows) for rows in minibatches]
        if named is not None and "staleness" in (named.fields or ()):
            minibatches = [with_staleness(rows, step) for rows in minibatches]
        batches = self._plan_updates(minibatches, named, min_token_version, settings)
        metrics = UpdateMetrics()
        for index, batch in enumerate(batches):
            if batch.counts.tokens == 0:
                logger.warning("minibatch=%d step=%d has no token to train on", index, step)
                continue
            of_minibatch = MinibatchLoss(
                compute_loss,
                batch.rows,
                batch.counts,
                is_first=not metrics.gradient_norms,
                version=step,
                head=self.config.head,
                metrics=metrics,
                trace=trace,
            )
            if trace is not None:
                trace.begin(index, batch.rows)
            self._add_gradients(batch, of_minibatch)
            norms = self._take_step(step, settings, is_void=metrics.failure is not None)
            for place, norm in norms.items():
                if not math.isfinite(norm):
                    what = "minibatch=%d step=%d place=%d skipped: gradient_norm=%s"
                    logger.warning(what, index, step, place, norm)
            metrics.add_norms(norms)
            metrics.num_micro_batches += batch.most_packed
        summary = metrics.summary(
            self.world,
            is_counted=self.counts_metrics,
            own_tokens={
                "num_tokens": sum(rows.num_tokens for rows in minibatches),
                "num_computed_tokens": sum(sum(it.num_computed_tokens) for it in batches),
                "num_row_tokens": sum(sum(it.num_row_tokens) for it in batches),
            },
            num_loss_tokens=sum(batch.counts.tokens for batch in batches),
            lr=learning_rate(next(iter(settings.values())), step),
            tells_places=optimizers is not None,
        )
        num_row_tokens = summary.pop("num_row_tokens")
        saved = num_row_tokens - summary["num_computed_tokens"]
        summary["shared_token_share"] = saved / num_row_tokens if num_row_tokens else 0.0
        if MISMATCH in summary and self.logprob_noise is not None:
            summary[MISMATCH_NOISE] = self.logprob_noise
        return self._own_metrics() | summary

    def _plan_updates(
        self,
        minibatches: Sequence[PackedRows],
        loss: NamedLoss | None,
        min_token_version: int | None,
        places: Collection[int],
    ) -> list[PlannedBatch]:
        """The minibatches of an update, with all that its loss may know of them; as `_plan`.

        Args: loss: None: a function, of which nothing is known.
        """

        def learning(rows: PackedRows) -> torch.Tensor:
            check_top_tokens(rows, self._vocab_size)
            tokens = trained_tokens(rows, min_token_version)
            return with_advantage(rows, tokens) if is_zero_elsewhere else tokens

        is_zero_elsewhere = loss is not None and loss.is_zero_without_advantage
        keeps_groups = loss is not None and loss.compares_rows
        is_behind = loss is not None and loss.reads_scores
        batches = self._plan(minibatches, learning, keeps_groups=keeps_groups, places=places)
        trained = [trained_tokens(rows, min_token_version) for rows in minibatches]
        counted = count_rows(minibatches, trained, self.rows.rank, self._shares_of_rows)
        return [
            replace(batch, is_behind=is_behind, numbers=numbers, counts=counts)
            for batch, (numbers, counts) in zip(batches, counted, strict=True)
        ]

    @property
    @abstractmethod
    def _vocab_size(self) -> int:
        """Tokens that the model gives a probability."""

    @property
    def is_cuda(self) -> bool:
        return self.world.device.type == "cuda"

    def gather_weights(self, bucket_bytes: int) -> Iterator[list[NamedTensor]]:
        return self._publication.whole(bucket_bytes)

    def published_parts(self) -> tuple[dict[str, torch.Tensor], Iterator[torch.Tensor]]:
        return self._publication.own_parts()

    def weight_layouts(self, bucket_bytes: int) -> list[BucketLayout]:
        return self._publication.layouts(bucket_bytes)

    def fill_adapter(self, place: int, beginning: AdapterBeginning) -> None:
        """See `TrainEngine`. Raises: ConfigError: this engine trains no adapters."""
        raise ConfigError(_NO_ADAPTERS)

    def begin_save_adapter(self, place: int, folder: Path, *, with_optimizer: bool) -> Future[None]:
        """See `TrainEngine`. Raises: as `fill_adapter`."""
        raise ConfigError(_NO_ADAPTERS)

    @abstractmethod
    def begin_save_hf(self, folder: Path, *, is_staged: bool = True) -> Future[None]:
        """Takes the weights as they are now; a folder that `transformers` loads is written later.

        One write goes on at a time: the one before is waited for.

        Returns: a future that is done when the folder, tokenizer included, is on the disk under
            its name. It fails with CheckpointError, on every rank, when it could not be written;
            what was at `folder` then stays.
        """

    def begin_snapshot(self, folder: Path) -> Future[None]:
        """Takes weights, optimizer state and random state as they are now; see `Snapshots`."""
        return self._snapshots.begin(folder)

    def load_snapshot(self, folder: Path) -> None:
        """Restores what `begin_snapshot` took, also with other ranks."""
        self._snapshots.load(folder)

    def keep_state(self, folder: Path, name: str, *, beside: str) -> None:
        """Copies the same into a buffer in memory; see `KeptStates`."""
        self._kept_states.keep(folder, name, beside=beside)

    def load_state(self, folder: Path, name: str) -> None:
        """Restores what `keep_state` took."""
        self._kept_states.load(folder, name)

    def forget_states(self) -> None:
        self._kept_states.forget()

    def close(self) -> None:
        """Waits for what is being written, and leaves the group."""
        if hasattr(self, "_writer"):
            self._writer.close()
        self._leave()
        self._hosted = None

    @abstractmethod
    def _leave(self) -> None:
        """Leaves the other ranks, if it has joined them."""

    def _shares_of_rows(self, own: list[ShareOfRows]) -> list[list[ShareOfRows]]:
        """What each share of the rows holds; ranks of one model group have the same rows."""
        return [share for share in self.rows.gather(own if self.counts_rows else []) if share]

    def _plan(
        self,
        batches: Sequence[PackedRows],
        asked_of: Callable[[PackedRows], torch.Tensor],
        *,
        keeps_groups: bool = False,
        places: Collection[int] | None = None,
    ) -> list[PlannedBatch]:
        """Micro-batches of each batch, as many as on every other rank.

        Args: places: of adapters that rows may have; None: any that there is.
        Raises: ValueError: ranks have different numbers of batches, a row is too long or of no such
            place, or `asked_of` raises.
        """
        of_batches, error = list[RowUnits](), None
        own: list[tuple[int, set[int]]] = []  # micro-batches of each batch, and its places
        try:
            of_batches = [
                self._units(rows, asked_of(rows), places, keeps_groups=keeps_groups)
                for rows in batches
            ]
            own = [(len(self._pack(units, 1)), set(units.places)) for units in of_batches]
        except ValueError as failure:
            error = failure
        # One exchange tells of errors, too: a rank that raised alone would leave others waiting.
        everyone = self.world.gather((own, str(error) if error else None))
        for rank, (_, message) in enumerate(everyone):
            if message is not None:
                raise ValueError(f"train rank {rank}: {message}") from error
        lengths = [len(of_rank) for of_rank, _ in everyone]
        if len(set(lengths)) > 1:
            raise ValueError(f"the ranks have {lengths} minibatches; expected equally many")
        planned = []
        for units, *of_ranks in zip(of_batches, *(of_rank for of_rank, _ in everyone), strict=True):
            count = self._rounded_count(max(count for count, _ in of_ranks))
            in_units = self._pack(units, count if self._meets_each else 1)
            batch = PlannedBatch(
                units.rows,
                units.asked,
                [list(chain.from_iterable(each)) for each in in_units],
                [units.forest(each) for each in in_units],
                count,
                row_places=units.places,
                places=sorted(set().union(*(found for _, found in of_ranks))),
            )
            planned.append(batch)
        return planned

    def _units(
        self,
        rows: PackedRows,
        asked: torch.Tensor,
        places: Collection[int] | None,
        *,
        keeps_groups: bool,
    ) -> RowUnits:
        """Raises: ValueError: the model cannot compute the rows, or one has no such place."""
        check_routes(rows, self.routed_experts)
        if not self.reads_pictures and any(rows.picture_bytes(range(rows.num_rows))):
            raise ValueError(
                f"the rows have pictures, and the model in {self.config.path} reads none"
            )
        known = self._places if places is None else set(self._places).intersection(places)
        its_places = places_of_rows(rows, known) if self._places else []
        return RowUnits.of(
            rows,
            asked,
            self.config.max_tokens_per_micro_batch,
            are_padded=self._pads_rows,
            keeps_groups=keeps_groups,
            min_saved=self._min_saved_tokens,
            places=its_places if len(self._places) > 1 else [],
        )

    def _pack(self, units: RowUnits, count: int) -> list[list[list[int]]]:
        """The units of at least so many micro-batches."""
        return units.pack(count, fills=self._has_few_sizes)

    @property
    def _min_saved_tokens(self) -> float:
        """From how many saved tokens on rows share their first ones; infinite: they never do."""
        return math.inf

    @property
    def _meets_each(self) -> bool:
        """Whether ranks that compute other tokens meet in each micro-batch."""
        return True

    @property
    def _has_few_sizes(self) -> bool:
        """Whether micro-batches are padded to a few sizes."""
        return False

    def _rounded_count(self, count: int) -> int:
        """How many micro-batches are run where a rank has so many."""
        return count
