"""The training step that goes on: what the ranks make of its rows, up to the version published.

Consumes: a batch, which it cuts into minibatches and shares; each model group computes a field of
its share, or makes an update on it. Waits for: the ranks; to publish, for the updates of workers to
the version before, the journal of the reader, and the channel. Unblocked by: those, see `ranks`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain, islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from areal_sc.algorithms.advantages import AdvantageRows
from areal_sc.algorithms.named_advantage import advantage_of, weight_spread
from areal_sc.algorithms.named_loss import NamedLoss
from areal_sc.algorithms.token_function import TokenFunction
from areal_sc.config.optimizer_settings import OptimizerConfig
from areal_sc.config.ppo_settings import GAE, ClipCenter, PPOConfig
from areal_sc.controller.ledger.ledger_records import Split
from areal_sc.controller.step_life import StepState
from areal_sc.controller.train.model_place import PlaceFile
from areal_sc.controller.train.rank_layout import try_loss, with_sealed_fields
from areal_sc.controller.train.rank_state import Asked
from areal_sc.controller.train.ranks import Ranks
from areal_sc.engines.base import AdapterBeginning
from areal_sc.errors import ROWS_GONE, ArealError, BatchLost, ConfigError, MetadataError
from areal_sc.metadata import BatchMetadata, RowMetadata
from areal_sc.sources.row_file import PromptSource
from areal_sc.token_fields import ADAPTER, PICTURES, ROUTED_EXPERTS, TOP_LOGPROBS
from areal_sc.weights.channel import WeightsReader
from areal_sc.workers import rank_methods
from areal_sc.workers.operations import Kind
from areal_sc.workflows.registry import SourceRegistry

MODEL_FIELDS: Final = ("input_ids", "loss_mask", "temperatures")
"""What a model reads of a row."""

PPO_FIELDS: Final = ("input_ids", "loss_mask", "behavior_logprobs", "versions", "temperatures")
"""What a row must have to be trained by `actor.ppo`."""


POLICY_ADVANCES: Final = (
    "sft_update: expected advances=False with the policy, since each update would take one of "
    "total_steps; or train a model of another role, and begin from its save_hf"
)


class TrainStep:
    """What the ranks of a model make of the batch of a step.

    Workers read a loss from a file of the run folder; what arrives on a socket is its number.
    """

    def __init__(
        self,
        ranks: Ranks,
        ppo: PPOConfig,
        loss: NamedLoss,
        sources: SourceRegistry,
        place: PlaceFile,
        *,
        replays_routes: bool = False,
    ) -> None:
        self._ranks = ranks
        self._replays_routes = replays_routes
        self._sources = sources
        self._place = place
        self._losses: list[tuple[NamedLoss, int]] = []  # that the ranks have tried, by number
        self._ppo = ppo
        self._loss = loss
        self._advantages_of = None if ppo.advantage == GAE else advantage_of(ppo)
        self._lost_batch = ""
        self._without_first: tuple[frozenset[str], frozenset[tuple[int, ...]], int]
        self._without_first = frozenset(), frozenset(), 0

    @property
    def needs_proximal_logprobs(self) -> bool:
        """Whether the weights change between the proximal policy and the last minibatch."""
        read = self._loss.fields
        if read is None:  # a loss of the user's own
            is_read = self._ppo.clip_center == ClipCenter.proximal
        else:
            is_read = "proximal_logprobs" in read
        return is_read and not self._is_one_forward(self._ppo.num_minibatches)

    def _is_one_forward(self, num_minibatches: int) -> bool:
        """Whether an update in so many minibatches is the step's first one, by its own forward."""
        return num_minibatches == 1 and self._ranks.step.num_updates == 0

    def check_fields(self, batch: BatchMetadata, loss: NamedLoss, num_minibatches: int) -> None:
        """Before an update, which leaves the ranks between two versions where it fails.

        Raises: MetadataError: the batch lacks what the loss is known to read. ConfigError: the loss
            compares rows, which minibatches and ranks tear apart.
        """
        if loss.compares_rows:
            raise ConfigError(
                f"loss {loss.name}: expected pairs of a data set (DPOTrainer, RewardModelTrainer, "
                "update_rows), got a batch, whose rows go to different minibatches and ranks"
            )
        read = set(loss.fields or ()) - {"staleness"}
        if self._is_one_forward(min(num_minibatches, len(batch.episodes))):
            read -= {"proximal_logprobs"}
        if all(row.advantage is not None for row in batch.rows):
            read -= {"advantages"}
        batch.select([*MODEL_FIELDS, *sorted(read)])

    def without_idle_routes(self, batch: BatchMetadata) -> BatchMetadata:
        """The batch without the experts of its tokens, where the model does not replay them."""
        if self._replays_routes or ROUTED_EXPERTS not in batch.fields:
            return batch
        return batch.select([name for name in batch.fields if name != ROUTED_EXPERTS])

    def read_of_model(self, batch: BatchMetadata, *also: str) -> BatchMetadata:
        """What the model reads of a batch, and further fields where these are there."""
        its = self.without_idle_routes(batch)
        names = (ROUTED_EXPERTS, ADAPTER, PICTURES, *also)
        further = [name for name in names if name in its.fields]
        return its.select([*MODEL_FIELDS, *further])

    def note_without_first(self, batch: BatchMetadata) -> None:
        """Its proximal log-probabilities are there, but for the first minibatch of an update."""
        first = batch.take(self._minibatches(batch, self._ppo.num_minibatches)[0])
        episodes = frozenset(map(_episode_of, first.rows))
        self._without_first = _proximal_shards(batch), episodes, self._ranks.step.num_updates

    def check_first(self, batch: BatchMetadata, num_minibatches: int) -> None:
        """Before an update on a batch, cut into so many minibatches.

        Raises: MetadataError: more than its first minibatch would need what is not there.
        """
        shards, episodes, number = self._without_first
        if not shards & _proximal_shards(batch):
            return
        minibatches = self._minibatches(batch, num_minibatches)
        is_next = self._ranks.step.num_updates == number
        others = chain.from_iterable(minibatches[1:] if is_next else minibatches)
        if any(_episode_of(batch.rows[row]) in episodes for row in others):
            raise MetadataError(
                f"batch {batch.batch_id} has proximal log-probabilities for one ppo_update; "
                "compute_proximal_logprobs(batch, whole=True) computes those of its first "
                "minibatch, too"
            )

    def _minibatches(self, batch: BatchMetadata, most: int) -> list[list[int]]:
        return batch.partition(max(1, min(most, len(batch.episodes))), "episodes")

    def split(
        self, batch: BatchMetadata, loss: NamedLoss | None = None, num_minibatches: int = 0
    ) -> list[list[list[int]]]:
        """Row numbers of each share of each minibatch: [share][minibatch][row].

        Args:
            loss, num_minibatches: of the update; else those of PPO, for what is computed: so
                log-probabilities stay with the share that trains on them.
        """
        most = num_minibatches or self._ppo.num_minibatches
        learning = seen_by_loss(batch, loss or self._loss)
        return self._ranks.layout.split(learning, min(most, len(batch.episodes)))

    def with_advantages(self, batch: BatchMetadata) -> BatchMetadata:
        """The batch with advantages of its rows, or of their returns, by `actor.ppo.advantage`.

        Raises: ConfigError: a critic gives them, or the rewards have no KL in them yet.
        """
        is_due = self._ppo.advantage != GAE and self._ppo.reward_kl_coefficient > 0
        if is_due and not batch.has_model_rewards:
            raise ConfigError(
                "actor.ppo.kl_place=reward: expected rewards with the KL in them "
                "(areal_sc.algorithms.named_advantage.kl_of_row, docs/own-loop.md)"
            )
        compute = self._advantages_of or advantage_of(self._ppo)  # which says so
        parts: list[_Part] = [(row, *part) for row in batch.rows for part in row.parts]
        rows = AdvantageRows(
            rewards=np.asarray([reward for _, reward, _ in parts], dtype=np.float64),
            groups=np.asarray([row.group_id for row, _, _ in parts], dtype=np.int64),
            episodes=np.asarray([row.episode for row, _, _ in parts], dtype=np.int64),
            num_tokens=np.asarray([row.sequence_length for row, _, _ in parts], dtype=np.int64),
            num_loss_tokens=np.asarray([num_tokens for _, _, num_tokens in parts], dtype=np.int64),
            judged=np.asarray([reward - row.shaping for row, reward, _ in parts], dtype=np.float64),
            parts=_of_reward_parts(parts, 0, math.nan),
            weights=_of_reward_parts(parts, 1, 0.0),
        )
        of_parts = iter(compute(rows).tolist())
        each = (tuple(islice(of_parts, len(row.parts))) for row in batch.rows)
        return batch.with_advantages([it if len(it) > 1 and any(it) else it[0] for it in each])

    def lose_rows(self, batch: BatchMetadata, error: ArealError) -> ArealError:
        """Rows that the ranks need are gone; returns what the caller gets to know.

        The same batch can be lost once: who asks for it again gets another one, or all its rows are
        there, and something else is wrong.
        """
        lost = self._begin_anew(str(error))
        if batch.batch_id == self._lost_batch:
            return error
        self._lost_batch = batch.batch_id
        return lost

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
        await self._ranks.repeated(lambda: try_loss(self._ranks.fleet, number))
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

    async def compute_top(self, batch: BatchMetadata, top_k: int) -> BatchMetadata:
        """The batch with the two fields of the most probable tokens."""
        wanted = replace(self._wanted(batch, "logprobs", TOP_LOGPROBS), top_k=top_k)
        return await self._computed(batch, wanted)

    def _wanted(
        self, batch: BatchMetadata, output: str | TokenFunction, field: str
    ) -> rank_methods.Compute:
        """An output of the model, which reads some fields; a token function may read any."""
        if isinstance(output, TokenFunction):
            number = self._sources.register_function(output)
            return rank_methods.Compute(batch, number, field)
        selected = self.read_of_model(batch).without_advantages()
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
            raise self.lose_rows(batch, error) from error
        await asyncio.sleep(0)
        return with_sealed_fields(batch, wanted.types, share_rows, computed.shards)

    async def compute_proximal(self, batch: BatchMetadata, *, whole: bool) -> BatchMetadata:
        """The batch with field `proximal_logprobs`, if the loss needs it.

        Args:
            whole: in any case, and for the first minibatch, too.
        """
        if not (whole or self.needs_proximal_logprobs):
            return batch
        # tokens without advantages are left out where the loss has no gradient there
        selected = self.read_of_model(seen_by_loss(batch, self._loss), "advantages")
        wanted = rank_methods.Compute(selected, "logprobs", "proximal_logprobs")
        computed = await self._computed(batch, wanted, skips_first=not whole)
        if not whole:  # NaN stands in the first minibatch
            self.note_without_first(computed)
        return computed

    async def _computed_shares(
        self, batch: BatchMetadata, wanted: rank_methods.Compute, *, skips_first: bool = False
    ) -> tuple[list[rank_methods.Compute], list[list[int]]]:
        """What each model group computes, and which rows of the batch these are."""
        shares, share_rows = list[rank_methods.Compute](), list[list[int]]()
        for minibatches in self.split(batch):
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
            raise self.lose_rows(batch, error) from error
        places, scores = map(chain.from_iterable, (share_rows, replies))
        return [score for _, score in sorted(zip(places, scores, strict=True))]

    async def shares(
        self, batch: BatchMetadata, loss: NamedLoss, num_minibatches: int
    ) -> tuple[list[rank_methods.Rows], Split]:
        """The minibatches of each model group, and which rows of the batch are in them."""
        shares = list[rank_methods.Rows]()
        split = self.split(batch, loss, num_minibatches)
        batch = self.without_idle_routes(batch)
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

    def named(
        self, dataset: int, indices: Sequence[int], adapters: Sequence[int] = ()
    ) -> list[rank_methods.Demonstrations]:
        """The rows of a dataset that each model group gets."""
        num_shares = self._ranks.layout.num_shares
        each = indices, range(len(indices)), adapters
        return [
            rank_methods.Demonstrations(dataset, *(tuple(it[share::num_shares]) for it in each))
            for share in range(num_shares)
        ]

    async def score(
        self,
        rows: PromptSource,
        indices: Sequence[int],
        output: str,
        *,
        per_token: bool,
        adapters: Sequence[int],
    ) -> list[tuple[float, ...]]:
        """What `rank_methods.SCORE` says of each of these rows, in their order."""
        shares = self.named(*await self.readable(rows, indices), adapters)
        wanted = [rank_methods.ScoreRows(share, output, per_token) for share in shares]
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
        optimizers: Mapping[int, OptimizerConfig] | None = None,
    ) -> dict[str, float]:
        """Metrics of the update, which every rank makes once.

        Args:
            content: all that decides what the update does, but for the loss.
            trained: the rows, where they are those of a batch.
            split: which of them are in which share.
            advances: the ranks are at the next version then.
            optimizers: its settings, by the place of an adapter; None: those of the model.
        """
        named, number = await self._number_of(loss), self._ranks.step.num_updates
        settings = None if optimizers is None else dict(optimizers)
        decisive = [content, named]
        decisive += [sorted((place, asdict(it)) for place, it in (settings or {}).items())]
        operation = self._ranks.operation(Kind.update, str(number), decisive)
        updates = [
            rank_methods.Update(operation, named, rows, advances, settings) for rows in shares
        ]
        asked = Asked(rank_methods.UPDATE, updates)

        async def advance() -> None:
            await self._place.advance(operation.version + 1)
            self._ranks.advance(operation.version + 1)

        then = advance if advances else None
        metrics = await self._ranks.update(asked, number, trained, split, then)
        if self._ranks.state.version == operation.version:
            self._ranks.step.num_updates = number + 1
        if {"behavior_weight", "behavior_weight_square"} <= metrics.keys():
            metrics |= weight_spread(metrics)
            del metrics["behavior_weight_square"]
        return metrics

    async def fill_adapter(self, place: int, beginning: AdapterBeginning) -> None:
        """Every rank does once what `TrainEngine.fill_adapter` says; as an update it is noted."""
        number, decisive = self._ranks.step.num_updates, [place, asdict(beginning)]
        operation = self._ranks.operation(Kind.update, str(number), decisive)
        filled = rank_methods.FillAdapter(operation, place, beginning)
        asked = Asked(rank_methods.FILL_ADAPTER, [filled] * self._ranks.layout.num_shares)
        await self._ranks.update(asked, number, (), (), None)
        self._ranks.step.num_updates = number + 1

    async def publish(self, reader: WeightsReader, version: int) -> None:
        """Gives the reader the present version, or the next one, which it makes.

            hold ──► seal ──► snapshot ──► record ──► advance ──► send ──► reader.adopt_weights
            no worker  the ranks'   of the   in the     the ranks   by the channel
            updates    weights      ranks    journal    are at it

        Returns once the weights are sealed, broadcast or written; generation goes on. A death of
        ranks repeats the sequence, see `Ranks.repeated`.
        """
        await self._place.begin_to_publish()
        is_next = version > self._ranks.state.version
        await self._ranks.repeated(lambda: self._publish(reader, version, is_next=is_next))

    async def _publish(self, reader: WeightsReader, version: int, *, is_next: bool) -> None:
        ranks, step = self._ranks, self._ranks.step
        if is_next and ranks.state.version == version:
            return  # a repeat
        if is_next:
            self._check_publishable(reader)
        operation = ranks.operation(Kind.publish, str(version))
        with ranks.channel.times.adding_to("publish_hold_s"):
            oldest = await reader.updates.hold()
        weights = await ranks.channel.seal(operation, version, reader, oldest)
        if is_next:
            await ranks.take_snapshot(version)  # ranks that broadcast do nothing else meanwhile
        ranks.note_reader(reader)
        if is_next:
            await reader.record_version_async(version, step.trained_rows, step.splits)
            ranks.advance(version)  # a repeat is one from here on: `send` tells the reader at once
        await ranks.channel.send(weights, reader)

    def _check_publishable(self, rollout: WeightsReader) -> None:
        """Before the next version is published.

        Raises: BatchLost: the ranks could not make the updates again after a death; or the batch
            was formed anew after they were made.
        """
        step = self._ranks.step
        if step.state is StepState.undone:
            cause = "train workers died, and could not read them again"
        elif rollout.has_taken_back(step.trained_rows):
            cause = "prepare_batch has formed another batch since"
        else:
            return
        rollout.updates.end_hold()
        raise self._begin_anew(cause)

    def _begin_anew(self, cause: str) -> BatchLost:
        lost = self._ranks.step.begin_anew(cause)
        self._ranks.undo_step()
        return lost


_Part = tuple[RowMetadata, float, int]
"""A row with one of its `parts`."""


def _of_reward_parts(
    parts: list[_Part], place: int, missing: float
) -> dict[str, npt.NDArray[np.float64]]:
    """By name of the part of the reward, [R] the value (place 0) or the weight (1) of each row."""
    found: dict[str, npt.NDArray[np.float64]] = {}
    for number, (row, _, _) in enumerate(parts):
        for name, *numbers in row.reward_parts:
            column = found.setdefault(name, np.full(len(parts), missing))
            column[number] = numbers[place]
    return found


def _episode_of(row: RowMetadata) -> tuple[int, int, int]:
    return row.group_id, row.attempt, row.episode


def _proximal_shards(batch: BatchMetadata) -> frozenset[str]:
    """Ids of the shards where the batch's proximal log-probabilities are."""
    found = (columns.shards for columns in batch.columns if "proximal_logprobs" in columns.dtypes)
    return frozenset(shard.shard_id for shards in found for shard in shards)


def seen_by_loss(batch: BatchMetadata, loss: NamedLoss) -> BatchMetadata:
    """The batch without advantages, where tokens without one go through the model as well."""
    if loss.is_zero_without_advantage:
        return batch
    fields = [name for name in batch.fields if name != "advantages"]
    return batch.select(fields).without_advantages()


def trained_content(batch: BatchMetadata) -> list[Any]:
    """All that decides what an update on a batch does, but for what models compute from it.

    Shards never change, so their ids stand for their values. Computed fields lie in other shards
    each time that they are computed, and computed rewards may differ by rounding.
    """
    rows = batch.rows
    if batch.has_model_rewards:
        rows = tuple(
            replace(row, reward=0.0, returns=(), shaping=0.0, advantage=None) for row in rows
        )
    given = [columns for columns in batch.columns if not columns.is_computed]
    shards = [(s.shard_id, s.runs) for columns in given for s in columns.shards]
    return [rows, batch.min_token_version, [sorted(c.dtypes) for c in given], shards]
