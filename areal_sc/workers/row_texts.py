"""The rows of a rollout worker as text, for people who want to read what the model writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from areal_sc.records.samples import shortened
from areal_sc.transport.plane import DataPlane
from areal_sc.workers.calls import ReadTexts, RowText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RowTexts:
    """Reads rows of the worker's own store, and keeps what the workflow measured of each.

    Args:
        plane: of the worker.
    """

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._metrics: dict[str, list[dict[str, float]]] = {}  # by shard, one a row

    def keep(self, shard_id: str, metrics: Sequence[Mapping[str, float]]) -> None:
        """Remembers the metrics of the rows of a new shard, as long as the store has it."""
        self._metrics[shard_id] = [
            {name: float(value) for name, value in of_row.items()} for of_row in metrics
        ]

    def forget(self) -> None:
        """Drops the metrics of shards that were swept."""
        store = self._plane.store
        self._metrics = {name: rows for name, rows in self._metrics.items() if name in store}

    async def read(
        self, wanted: ReadTexts, tokenizer: PreTrainedTokenizerBase
    ) -> tuple[RowText, ...]:
        """The wanted rows, in their order.

        Raises: ShardGone: the rows were swept.
        """
        packed = await self._plane.puller.pull(wanted.batch)
        metrics = {
            offset + i: self._metrics[shard.shard_id][first + i]
            for shard in wanted.batch.shards
            if shard.shard_id in self._metrics  # not of an earlier life of the worker
            for offset, first, num_rows in shard.runs
            for i in range(num_rows)
        }
        texts = []
        for number, (start, length) in enumerate(zip(packed.starts, packed.lengths, strict=True)):
            tokens = packed.fields["input_ids"][start : start + length].tolist()
            mask = packed.fields["loss_mask"][start : start + length].tolist()
            num_given = mask.index(True)  # every row has a trained token
            prompt, answer = (
                shortened(_decoded(tokenizer, part), wanted.max_chars)
                for part in (tokens[:num_given], tokens[num_given:])
            )
            texts.append(RowText(prompt, answer, metrics.get(number, {})))
        return tuple(texts)


def _decoded(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    """The text with its special tokens: they show where the model ended, and who speaks."""
    return str(tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))
