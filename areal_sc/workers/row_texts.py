"""The rows of a rollout worker as text, for people who want to read what the model writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from areal_sc.records.samples import shortened
from areal_sc.transport.plane import DataPlane
from areal_sc.workers.calls import ReadTexts, RowText
from areal_sc.workflows.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RowTexts:
    """Reads rows of the worker's own store, and keeps what the workflow tells of each.

    Args:
        plane: of the worker.
    """

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._told: dict[str, list[tuple[dict[str, float], str]]] = {}  # by shard, one a row

    def keep(self, shard_id: str, rows: Sequence[Trajectory]) -> None:
        """Remembers metrics and output of the rows of a new shard, as long as the store has it."""
        self._told[shard_id] = [
            ({name: float(value) for name, value in row.metrics.items()}, row.output)
            for row in rows
        ]

    def forget(self) -> None:
        """Drops what was told of shards that were swept."""
        store = self._plane.store
        self._told = {name: rows for name, rows in self._told.items() if name in store}

    async def read(
        self, wanted: ReadTexts, tokenizer: PreTrainedTokenizerBase
    ) -> tuple[RowText, ...]:
        """The wanted rows, in their order.

        Raises: ShardGone: the rows were swept.
        """
        packed = await self._plane.puller.pull(wanted.batch)
        told = {
            offset + i: self._told[shard.shard_id][first + i]
            for shard in wanted.batch.shards
            if shard.shard_id in self._told  # not of an earlier life of the worker
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
            metrics, output = told.get(number, ({}, ""))
            texts.append(RowText(prompt, answer, metrics, shortened(output, wanted.max_chars)))
        return tuple(texts)


def _decoded(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    """The text with its special tokens: they show where the model ended, and who speaks."""
    return str(tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))
