"""The training step that goes on: which rows its updates train, and what if these are gone.

Pure state: nothing here waits.
"""

from __future__ import annotations

from itertools import chain, islice
from typing import Any, Final

import numpy as np
from msgspec.structs import replace

from areal_sc.algorithms.advantages import AdvantageRows
from areal_sc.algorithms.named_advantage import advantage_of
from areal_sc.algorithms.named_loss import NamedLoss
from areal_sc.config.ppo_settings import GAE, ClipCenter, PPOConfig
from areal_sc.controller.step_life import StepState
from areal_sc.controller.train.ranks import Ranks
from areal_sc.errors import ArealError, BatchLost, ConfigError, MetadataError
from areal_sc.metadata import BatchMetadata, RowMetadata
from areal_sc.weights.channel import WeightsReader

MODEL_FIELDS: Final = ("input_ids", "loss_mask", "temperatures")
"""What a model reads of a row."""

PPO_FIELDS: Final = ("input_ids", "loss_mask", "behavior_logprobs", "versions", "temperatures")
"""What a row must have to be trained by `actor.ppo`."""


POLICY_ADVANCES: Final = (
    "sft_update: expected advances=False with the policy, since each update would take one of "
    "total_steps; or train a model of another role, and begin from its save_hf"
)


class TrainStep:
    """What the ranks of a model make of the batch of a step."""

    def __init__(self, ranks: Ranks, ppo: PPOConfig, loss: NamedLoss) -> None:
        self._ranks = ranks
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

    def read_of_proximal(self, batch: BatchMetadata) -> BatchMetadata:
        """What the ranks read of a batch for its proximal log-probabilities.

        Advantages are part of it where tokens without any are left out.
        """
        seen = seen_by_loss(batch, self._loss)
        of_tokens = [name for name in ("advantages",) if name in seen.fields]
        return seen.select([*MODEL_FIELDS, *of_tokens])

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
        return self._ranks.calls.layout.split(learning, min(most, len(batch.episodes)))

    def with_advantages(self, batch: BatchMetadata) -> BatchMetadata:
        """The batch with advantages of its rows, or of their returns, by `actor.ppo.advantage`.

        Raises: ConfigError: a critic gives them, or the rewards have no KL in them yet.
        """
        is_due = self._ppo.advantage != GAE and self._ppo.reward_kl_coefficient > 0
        if is_due and not batch.has_model_rewards:
            raise ConfigError(
                "actor.ppo.kl_place=reward: expected rewards with the KL in them "
                "(areal_sc.algorithms.named_advantage.KL_OF_TOKEN, docs/own-loop.md)"
            )
        compute = self._advantages_of or advantage_of(self._ppo)  # which says so
        parts = [(row, *part) for row in batch.rows for part in row.parts]
        rows = AdvantageRows(
            rewards=np.asarray([reward for _, reward, _ in parts], dtype=np.float64),
            groups=np.asarray([row.group_id for row, _, _ in parts], dtype=np.int64),
            episodes=np.asarray([row.episode for row, _, _ in parts], dtype=np.int64),
            num_tokens=np.asarray([row.sequence_length for row, _, _ in parts], dtype=np.int64),
            num_loss_tokens=np.asarray([num_tokens for _, _, num_tokens in parts], dtype=np.int64),
            judged=np.asarray([reward - row.shaping for row, reward, _ in parts], dtype=np.float64),
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

    def check(self, rollout: WeightsReader) -> None:
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
