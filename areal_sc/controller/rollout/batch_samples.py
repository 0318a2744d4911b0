"""The samples of each batch: a few of its rows, read as text beside training.

consumes     batches, when they are formed
waits for    the worker that holds the rows of a group, at most `SAMPLE_TIMEOUT_S`
unblocked by its reply, or that limit

Nobody waits for the samples. What cannot be read in time is missing: the rows are swept when the
batch has been trained, and a batch that comes while the one before is still being read has none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from areal_sc.config.follow_settings import SamplesConfig
from areal_sc.controller.background import Background
from areal_sc.controller.rollout.rollout_workers import RolloutWorkers
from areal_sc.errors import ArealError, RunFolderError
from areal_sc.metadata import BatchMetadata
from areal_sc.records.samples import Place, Sample
from areal_sc.system.json_lines import JsonLines
from areal_sc.workers.calls import READ_TEXTS, ReadTexts, RowText

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class BatchSamples:
    """Writes `samples.jsonl`.

    Args:
        workers: hold the rows.
        path: the file; it is made with the first batch.

    Attributes:
        newest: the samples of the last batch that were read, group by group, best first.
    """

    config: SamplesConfig
    workers: RolloutWorkers
    background: Background
    path: Path

    def __post_init__(self) -> None:
        self.newest: tuple[Sample, ...] = ()
        self._lines: JsonLines | None = None
        self._batch_id = ""
        self._reading: asyncio.Task[None] | None = None
        self._step = 0  # that is read
        self._is_unwritable = False

    def begin(self, batch: BatchMetadata) -> None:
        """Begins to read samples of a batch; of one that is given again it does nothing."""
        if not self.config.groups_per_step or self._is_unwritable:
            return
        if batch.batch_id == self._batch_id:
            return
        self._batch_id = batch.batch_id
        if self._reading is not None and not self._reading.done():
            logger.info("step=%d has no samples: those before are late", batch.global_step + 1)
            return
        self._reading = self.background.start(self._read(batch), "samples")
        self._step = batch.global_step + 1

    def close(self) -> None:
        """To be called when what runs in the background has ended."""
        if self._reading is not None and self._reading.cancelled():
            logger.info("step=%d has no samples: the run ends before they are read", self._step)
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    async def _read(self, batch: BatchMetadata) -> None:
        now_s = round(time.time(), 3)
        groups = chosen_groups(batch, self.config.groups_per_step)
        found = await asyncio.gather(*(self._read_group(batch, rows, now_s) for rows in groups))
        samples = [sample for group in found for sample in group]
        if not samples:
            return
        self.newest = tuple(samples)
        try:
            if self._lines is None:
                self._lines = JsonLines(self.path)
            self._lines.append(*samples)
        except RunFolderError as error:
            self._is_unwritable = True
            logger.warning("no more samples are kept: %s", error)

    async def _read_group(
        self, batch: BatchMetadata, rows: Sequence[int], now_s: float
    ) -> list[Sample]:
        """The best and the worst row of a group; nothing if its worker cannot read them."""
        chosen = _best_and_worst(batch, rows)
        part = batch.take(list(chosen)).select(["input_ids", "loss_mask"])
        try:
            texts = await self._texts(part)
        except ArealError as error:
            logger.info("step=%d lacks a sample: %s", batch.global_step + 1, error)
            return []
        group_reward = fmean(batch.rows[row].reward for row in rows)
        episodes = [batch.rows[row].episode for row in rows]
        samples = []
        for number, (row, text) in enumerate(zip(chosen, texts, strict=True)):
            at = rows.index(row)
            of_episode = episodes[:at].count(episodes[at])
            samples.append(
                _sample(part, number, chosen[row], text, group_reward, row=of_episode, time=now_s)
            )
        return samples

    async def _texts(self, part: BatchMetadata) -> tuple[RowText, ...]:
        """Raises: ArealError: the worker that sealed the rows is lost, late, or has swept them."""
        owner = part.shards[0].node_id  # one worker ran the whole group
        wanted = ReadTexts(part, self.config.max_chars)
        return await self.workers.call_named(owner, READ_TEXTS, wanted)


def chosen_groups(batch: BatchMetadata, num_groups: int) -> list[tuple[int, ...]]:
    """Row numbers of at most `num_groups` groups, at even distances in the batch.

    The batch is in the order of admission, so they are of old groups and of young ones.
    """
    rows_of: dict[int, list[int]] = {}
    for number, row in enumerate(batch.rows):
        rows_of.setdefault(row.group_id, []).append(number)
    groups = list(rows_of.values())
    num_groups = min(num_groups, len(groups))
    return [tuple(groups[i * len(groups) // num_groups]) for i in range(num_groups)]


def _best_and_worst(batch: BatchMetadata, rows: Sequence[int]) -> dict[int, Place]:
    """Row number -> its place; the first row of a group whose rewards are all the same."""
    best = max(rows, key=lambda row: batch.rows[row].reward)
    worst = min(rows, key=lambda row: batch.rows[row].reward)
    if batch.rows[best].reward == batch.rows[worst].reward:
        return {best: Place.equal}
    return {best: Place.best, worst: Place.worst}


def _sample(
    batch: BatchMetadata,
    number: int,
    place: Place,
    text: RowText,
    group_reward: float,
    *,
    row: int,
    time: float,
) -> Sample:
    of_row = batch.rows[number]
    # tokens are sampled by ascending versions
    first_version, last_version = of_row.version_spans[0][0], of_row.version_spans[-1][0]
    return Sample(
        time=time,
        step=batch.global_step + 1,
        group=of_row.group_id,
        place=place,
        reward=of_row.reward,
        group_reward=group_reward,
        metrics=text.metrics,
        num_tokens=of_row.sequence_length,
        first_version=first_version,
        last_version=last_version,
        staleness=batch.global_step - first_version,
        prompt=text.prompt,
        answer=text.answer,
        output=text.output,
        attempt=of_row.attempt,
        episode=of_row.episode,
        row=row,
    )
