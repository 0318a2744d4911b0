"""What the ranks do with the rows of a batch: each model group gets a share of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain

from msgspec.structs import replace

from areal_sc.algorithms.named_advantage import weight_spread
from areal_sc.algorithms.named_loss import NamedLoss
from areal_sc.algorithms.token_function import TokenFunction
from areal_sc.controller.ledger.ledger_records import Split
from areal_sc.controller.train.model_place import PlaceFile
from areal_sc.controller.train.rank_layout import try_loss, with_sealed_field
from areal_sc.controller.train.rank_state import Asked
from areal_sc.controller.train.ranks import Ranks
from areal_sc.controller.train.train_step import MODEL_FIELDS, TrainStep
from areal_sc.errors import ROWS_GONE, MetadataError
from areal_sc.fleet.fleet import Fleet
from areal_sc.metadata import BatchMetadata, RowMetadata
from areal_sc.sources.row_file import PromptSource
from areal_sc.workers import rank_methods
from areal_sc.workers.operations import Kind
from areal_sc.workflows.registry import SourceRegistry


class RankWork:
    """Computes fields, and makes updates.

    Workers read a loss from a file of the run folder; what arrives on a socket is its number.
    """

    def __init__(
        self,
        ranks: Ranks,
        fleet: Fleet,
        step: TrainStep,
        sources: SourceRegistry,
        place: PlaceFile,
    ) -> None:
        self._ranks = ranks
        self._fleet = fleet
        self._place = place
        self._sources = sources
        self._step = step
        self._losses: list[tuple[NamedLoss, int]] = []  # that the ranks have tried, by number

    def begin_losses(self, own: NamedLoss) -> int:
        """Number of the loss of the settings, which the ranks try when they start.

        Raises: ConfigError: there is no module of it.
        """
        number = self._sources.register_function(own)
        self._losses = [(own, number)]
        return number

    async def _number_of(self, loss: NamedLoss) -> int:
        """Raises: ConfigError: there is no such loss, or the ranks cannot use it."""
        for known, number in self._losses:
            if known == loss:
                return number
        number = self._sources.register_function(loss)
        await self._ranks.repeated(lambda: try_loss(self._fleet, number))
        self._losses.append((loss, number))
        return number

    async def compute(
        self, batch: BatchMetadata, output: str | TokenFunction, field: str
    ) -> BatchMetadata:
        """The batch with a field that the ranks compute.

        With `advantages` of tokens those of rows go.
        """
        computed = await self._computed(batch, self._wanted(batch, output, field))
        return computed.without_advantages() if field == "advantages" else computed

    def _wanted(
        self, batch: BatchMetadata, output: str | TokenFunction, field: str
    ) -> rank_methods.Compute:
        """An output of the model, which reads some fields; a token function may read any."""
        if isinstance(output, TokenFunction):
            number = self._sources.register_function(output)
            return rank_methods.Compute(batch, number, field)
        selected = batch.select(MODEL_FIELDS).without_advantages()
        return rank_methods.Compute(selected, output, field)

    async def _computed(
        self, batch: BatchMetadata, wanted: rank_methods.Compute, *, skips_first: bool = False
    ) -> BatchMetadata:
        if wanted.field in batch.fields:
            raise MetadataError(f"batch {batch.batch_id} has the field {wanted.field!r} already")
        shares, share_rows = await self._computed_shares(batch, wanted, skips_first=skips_first)
        try:
            computed = await self._ranks.compute(Asked(rank_methods.COMPUTE, shares))
        except ROWS_GONE as error:
            raise self._step.lose_rows(batch, error) from error
        await asyncio.sleep(0)
        return with_sealed_field(batch, wanted.field, share_rows, computed.shards)

    async def compute_proximal(self, batch: BatchMetadata, *, whole: bool) -> BatchMetadata:
        """The batch with field `proximal_logprobs`, if the loss needs it.

        Args:
            whole: in any case, and for the first minibatch, too.
        """
        if not (whole or self._step.needs_proximal_logprobs):
            return batch
        selected = self._step.read_of_proximal(batch)
        wanted = rank_methods.Compute(selected, "logprobs", "proximal_logprobs")
        computed = await self._computed(batch, wanted, skips_first=not whole)
        if not whole:  # NaN stands in the first minibatch
            self._step.note_without_first(computed)
        return computed

    async def _computed_shares(
        self, batch: BatchMetadata, wanted: rank_methods.Compute, *, skips_first: bool = False
    ) -> tuple[list[rank_methods.Compute], list[list[int]]]:
        """What each model group computes, and which rows of the batch these are."""
        shares, share_rows = list[rank_methods.Compute](), list[list[int]]()
        for minibatches in self._step.split(batch):
            rows = list(chain.from_iterable(minibatches))
            share_rows.append(rows)  # there may be none, and then the share has no fields
            await asyncio.sleep(0)  # of thousands of rows: the loop has a turn between two of them
            num_left_out = len(minibatches[0]) if skips_first else 0
            taken = wanted.batch.take(rows)
            shares.append(replace(wanted, batch=taken, num_left_out=num_left_out))
        return shares, share_rows

    async def score_batch(self, batch: BatchMetadata, output: str | TokenFunction) -> list[float]:
        """What `rank_methods.SCORE_BATCH` says of each row."""
        field = output if isinstance(output, str) else output.name
        wanted = self._wanted(batch, output, field)
        shares, share_rows = await self._computed_shares(batch, wanted)
        try:
            replies = await self._ranks.ask(Asked(rank_methods.SCORE_BATCH, shares))
        except ROWS_GONE as error:
            raise self._step.lose_rows(batch, error) from error
        places, scores = map(chain.from_iterable, (share_rows, replies))
        return [score for _, score in sorted(zip(places, scores, strict=True))]

    async def shares(
        self, batch: BatchMetadata, loss: NamedLoss, num_minibatches: int
    ) -> tuple[list[rank_methods.Rows], Split]:
        """The minibatches of each model group, and which rows of the batch are in them."""
        shares = list[rank_methods.Rows]()
        split = self._step.split(batch, loss, num_minibatches)
        for share_rows in split:
            minibatches = []
            for rows in share_rows:
                await asyncio.sleep(0)  # as above
                minibatches.append(batch.take(rows))
            shares.append(tuple(minibatches))
        return shares, tuple(tuple(map(tuple, share_rows)) for share_rows in split)

    async def readable(self, rows: PromptSource, indices: Sequence[int]) -> tuple[int, list[int]]:
        """The dataset's number, and those of its rows, which workers can read then."""
        dataset = await self._sources.register_prompts_async(rows)
        numbers = [int(index) for index in indices]  # of NumPy, say
        await self._sources.make_readable(dataset, *numbers)
        return dataset, numbers

    def named(self, dataset: int, indices: Sequence[int]) -> list[rank_methods.Demonstrations]:
        """The rows of a dataset that each model group gets."""
        num_shares, places = self._ranks.layout.num_shares, range(len(indices))
        return [
            rank_methods.Demonstrations(
                dataset, tuple(indices[share::num_shares]), tuple(places[share::num_shares])
            )
            for share in range(num_shares)
        ]

    async def score(
        self, rows: PromptSource, indices: Sequence[int], output: str
    ) -> list[tuple[float, ...]]:
        """What `rank_methods.SCORE` says of each of these rows, in their order."""
        shares = self.named(*await self.readable(rows, indices))
        wanted = [rank_methods.ScoreRows(share, output) for share in shares]
        replies = await self._ranks.ask(Asked(rank_methods.SCORE, wanted))
        scores = dict[int, tuple[float, ...]]()
        for share, reply in zip(shares, replies, strict=True):
            scores |= zip(share.places, reply, strict=True)
        return [scores[place] for place in range(len(indices))]

    async def update(
        self,
        shares: Sequence[rank_methods.Rows],
        loss: NamedLoss,
        content: object,
        trained: Sequence[RowMetadata],
        split: Split,
        *,
        advances: bool,
    ) -> dict[str, float]:
        """Metrics of the update, which every rank makes once.

        Args:
            content: all that decides what the update does, but for the loss.
            trained: the rows, where they are those of a batch.
            split: which of them are in which share.
            advances: the ranks are at the next version then.
        """
        named, number = await self._number_of(loss), self._ranks.step.num_updates
        operation = self._ranks.operation(Kind.update, str(number), [content, named])
        updates = [rank_methods.Update(operation, named, rows, advances) for rows in shares]
        asked = Asked(rank_methods.UPDATE, updates)

        async def advance() -> None:
            await self._place.advance(operation.version + 1)
            self._ranks.advance(operation.version + 1)

        then = advance if advances else None
        metrics = await self._ranks.update(asked, number, trained, split, then)
        if self._ranks.state.version == operation.version:
            self._ranks.step.num_updates = number + 1
        if "behavior_weight_square" in metrics:
            metrics |= weight_spread(metrics)
            del metrics["behavior_weight_square"]
        return metrics
