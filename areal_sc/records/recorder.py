"""What a process records of itself, written by a thread of its own.

consumes     played groups, evaluated answers, rows that were trained, and spans, from any thread of
             the process
waits for    the disk, in its own thread; who records something never waits
unblocked by the passing of `FLUSH_S`, or `close`

What has come meanwhile is written at once: a thread that woke for each span would take the
interpreter's lock from the engine some hundred times a step.

A record is lost rather than that a run waits for it: one that comes when the thread is far behind,
and is counted; what a killed process has not written yet; and, with one warning, all that follows a
failure to write, for example because the disk is full.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

from msgspec.structs import replace

from areal_sc.config.follow_settings import KeepRecords, RecordsConfig
from areal_sc.records.blocks import block
from areal_sc.records.record_files import RecordStore, Series, newest_bytes
from areal_sc.records.recorded_calls import pack_calls
from areal_sc.records.recorded_pictures import KnownPictures, RecordedPicture, pack_picture
from areal_sc.records.recorded_rows import (
    PlayedAnswer,
    PlayedRow,
    RecordedGroup,
    numbers_of,
    pack_answers,
    pack_group,
    pack_tokens,
    tokens_like,
)
from areal_sc.records.spans import LOST, NO_VERSION, RecordedSpan, pack_spans
from areal_sc.records.trained_rows import TrainedRow, TrainedTokens, pack_trained
from areal_sc.user_code import describe

logger = logging.getLogger(__name__)

FLUSH_S: Final = 1.0
"""Time between two writes."""
RANK_BYTES: Final = 256 << 20
"""Limit of the records of a process that generates no rows: some million spans, and the numbers of
30 million trained tokens."""
KEPT_EVERY: Final = 16
"""One of so many groups is remarkable, by its number: so a thinned history stays. Of these groups
train ranks record numbers of each token."""
SAMPLED_GROUPS: Final = 2
"""About so many groups a step leave their best and worst answer where nothing else is kept."""
_MAX_WAITING: Final = 1 << 16
MAX_WAITING_TOKENS: Final = 4 << 20
"""Groups that wait have about so many tokens at most: some hundred MiB."""
_SPANS_PER_BLOCK: Final = 4096
_ANSWER_TOKENS: Final = 1 << 16
"""Evaluated answers of about so many tokens are a block at most: one of them is read with all."""
_CLOSE_LIMIT_S: Final = 3.0


@dataclass(frozen=True)
class PlayedGroup:
    """A group that has just ended.

    Attributes:
        group: without its rows and pictures.
        episodes: number within the group -> its rows.
        pictures: of its prompt, compressed.
    """

    group: RecordedGroup
    episodes: Mapping[int, Sequence[PlayedRow]]
    pictures: Sequence[bytes] = ()

    @property
    def is_remarkable(self) -> bool:
        return bool(self.group.rejected or not self.episodes) or self.group.group % KEPT_EVERY == 0

    @property
    def num_tokens(self) -> int:
        rows = (row for its in self.episodes.values() for row in its)
        return tokens_like(self.pictures) + sum(len(row.input_ids) for row in rows)


class _WaitingRow(NamedTuple):
    """What an update has computed of a row."""

    row: TrainedRow
    tokens: TrainedTokens

    @property
    def num_tokens(self) -> int:
        return len(self.tokens.gaps)


class Recorder:
    """Records what one process does.

    Args:
        store: what it records goes there.
        process: `rollout/0`, say.
        groups_per_step: of the run; which groups `keep=none` keeps follows from it.

    Attributes:
        process: see above.
        is_open: it records the groups that `keep` asks for.
        is_on: it also records what the process does, and what updates compute.
    """

    def __init__(
        self, store: RecordStore, process: str, config: RecordsConfig, groups_per_step: int = 1
    ) -> None:
        self.process = process
        self._keep = config.keep
        self._sampled_every = max(1, groups_per_step // SAMPLED_GROUPS)
        self.is_open, self.is_on = True, config.keep is not KeepRecords.none
        self._waiting = deque[
            PlayedGroup | PlayedAnswer | _WaitingRow | RecordedSpan | threading.Event
        ]()
        self._is_closing, self._is_wanted = threading.Event(), threading.Event()
        self._store = store
        self._pictures = KnownPictures(newest_bytes(store.max_bytes))
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._num_waiting_tokens = 0
        self._num_lost = 0
        self._counting = threading.Lock()

    def add_group(self, played: PlayedGroup) -> None:
        """Records a group. Its rows must not change any more."""
        if self.is_open and self._keeps(played):
            self._add_tokens(played)

    def _keeps(self, played: PlayedGroup) -> bool:
        if self._keep is KeepRecords.none:
            return bool(played.episodes) and played.group.group % self._sampled_every == 0
        return self._keep is KeepRecords.all or played.is_remarkable

    def add_answer(self, played: PlayedAnswer) -> None:
        """Records an answer of an evaluation. Its rows must not change any more.

        Where groups are thinned, so are held-out prompts: those that stay are always the same.
        """
        answer, is_all = played.answer, self._keep is KeepRecords.all
        if self.is_on and (is_all or answer.rejected or answer.index % KEPT_EVERY == 0):
            self._add_tokens(played)

    def add_trained(self, row: TrainedRow, tokens: TrainedTokens) -> None:
        """Records what an update has computed of a row."""
        if self.is_on:
            self._add_tokens(_WaitingRow(row, tokens))

    def _add_tokens(self, record: PlayedGroup | PlayedAnswer | _WaitingRow) -> None:
        with self._counting:
            if self._num_waiting_tokens > MAX_WAITING_TOKENS:
                self._num_lost += 1
            elif self._has_room_for(1):
                self._waiting.append(record)
                self._num_waiting_tokens += record.num_tokens

    def add_spans(self, spans: Sequence[RecordedSpan]) -> None:
        """Records spans of this process."""
        if self.is_on:
            with self._counting:
                if self._has_room_for(len(spans)):
                    self._waiting.extend(spans)

    def add_event(self, kind: str) -> None:
        """Records that something happens now."""
        self.add_spans([self._span(kind)])

    @contextmanager
    def span(self, kind: str, *, about: str = "", version: int = NO_VERSION) -> Iterator[None]:
        """Records the time that a block takes, whatever it raises."""
        began_s, begun = time.perf_counter(), self._span(kind, about, version)
        try:
            yield
        finally:
            self.add_spans([replace(begun, took_s=time.perf_counter() - began_s)])

    def _span(self, kind: str, about: str = "", version: int = NO_VERSION) -> RecordedSpan:
        """One that begins now."""
        return RecordedSpan(
            process=self.process,
            kind=kind,
            began=time.time(),
            took_s=0.0,
            about=about,
            first_version=version,
            last_version=version,
        )

    def flush(self, limit_s: float = FLUSH_S) -> None:
        """Blocks until the groups that were added are written, or for `limit_s`."""
        if self.is_on:
            is_written = threading.Event()
            self._waiting.append(is_written)
            self._is_wanted.set()
            is_written.wait(limit_s)

    def close(self) -> None:
        """Writes what waits. Blocks, but not for a disk that does not answer."""
        with self._starting:
            self.is_open = self.is_on = False
            thread = self._thread
        self._is_closing.set()
        self._is_wanted.set()
        if thread is not None:
            thread.join(_CLOSE_LIMIT_S)
            if thread.is_alive():
                logger.warning("%s ends before all that it recorded is written", self.process)

    def _has_room_for(self, num_records: int) -> bool:
        """Whether so many more may wait; else they are lost."""
        self._start()
        if len(self._waiting) < _MAX_WAITING:
            return True
        self._num_lost += num_records
        return False

    def _start(self) -> None:
        if self._thread is not None:
            return
        with self._starting:
            if self._thread is None and self.is_open:
                self._thread = threading.Thread(target=self._write, name="records", daemon=True)
                self._thread.start()

    def _write(self) -> None:
        try:
            with closing(self._store):
                while not self._is_closing.is_set():
                    self._is_wanted.wait(FLUSH_S)
                    self._is_wanted.clear()
                    self._write_waiting()
                self._write_waiting()
        except Exception as error:  # a disk, or a value that nobody has thought of
            self.is_open = self.is_on = False
            what = describe(error)
            logger.warning("%s records nothing more of what it does: %s", self.process, what)
        finally:
            self._waiting.clear()

    def _write_waiting(self) -> None:
        spans, answers = list[RecordedSpan](), list[PlayedAnswer]()
        for _ in range(len(self._waiting)):
            record = self._waiting.popleft()
            if isinstance(record, RecordedSpan):
                spans.append(record)
                continue
            if isinstance(record, threading.Event):
                record.set()
                continue
            if isinstance(record, PlayedAnswer):
                told = replace(record.answer, pictures=self._write_pictures(record.pictures))
                answers.append(record._replace(answer=told))
            elif isinstance(record, _WaitingRow):
                self._append(Series.trained, *pack_trained(record.row, record.tokens))
            else:
                self._write_group(record)
            with self._counting:
                self._num_waiting_tokens -= record.num_tokens
        self._write_answers(answers)
        with self._counting:
            num_lost, self._num_lost = self._num_lost, 0
        if num_lost:
            spans.append(self._span(LOST, str(num_lost)))
        for first in range(0, len(spans), _SPANS_PER_BLOCK):
            part = spans[first : first + _SPANS_PER_BLOCK]
            self._append(Series.spans, b"", pack_spans(part))

    def _write_group(self, played: PlayedGroup) -> None:
        rows = [
            (numbers_of(row, episode, number), row)
            for episode, its in played.episodes.items()
            for number, row in enumerate(its)
        ]
        left_out: list[float] = []
        if self._keep is KeepRecords.none:
            rewards = [numbers.reward for numbers, _ in rows]
            sampled = {rewards.index(max(rewards)), rewards.index(min(rewards))}
            left_out = [it for number, it in enumerate(rewards) if number not in sampled]
            rows = [rows[number] for number in sorted(sampled)]
        calls = pack_calls([row.calls for _, row in rows])
        told = {
            "rows": tuple(numbers for numbers, _ in rows),
            "num_call_bytes": len(calls),
            "left_out": tuple(left_out),
            "pictures": self._write_pictures(played.pictures),
        }
        body = pack_tokens([row for _, row in rows]) + calls if rows else b""
        series = Series.kept if played.is_remarkable else Series.rows
        self._append(series, pack_group(replace(played.group, **told)), body)

    def _write_pictures(self, pictures: Sequence[bytes]) -> tuple[RecordedPicture, ...]:
        """What a record tells of its pictures; those that the files do not have are written."""
        told = tuple(map(RecordedPicture.of, pictures))
        for picture, content in zip(told, pictures, strict=True):
            if self._pictures.is_new(picture):
                self._append(Series.pictures, pack_picture(picture), content)
        return told

    def _write_answers(self, answers: Sequence[PlayedAnswer]) -> None:
        part, num_tokens = list[PlayedAnswer](), 0
        for number, answer in enumerate(answers, start=1):
            part.append(answer)
            num_tokens += answer.num_tokens
            if num_tokens > _ANSWER_TOKENS or number == len(answers):
                self._append(Series.evaluated, *pack_answers(part))
                part, num_tokens = [], 0

    def _append(self, series: Series, head: bytes, body: bytes) -> None:
        self._store.append(series, block(head, body))
