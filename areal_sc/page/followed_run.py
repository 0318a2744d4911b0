"""One run of the page: its folder, read as far as somebody looks at it.

consumes     the files of a run folder, which other processes write
waits for    nothing; each view reads what is new when it is asked for

Views are made on threads, and one at a time follows the files; the ledger, whose reading may take
long, has a lock of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, Final

from tokenizers import Tokenizer

from areal_sc.config.loading.differences import settings_of
from areal_sc.config.schema import Dtype
from areal_sc.errors import RunFolderError
from areal_sc.hub import cached_model
from areal_sc.page.fleet_view import fleet_view, log_end
from areal_sc.page.group_book import GroupBook, GroupQuery
from areal_sc.page.metric_columns import MetricColumns
from areal_sc.page.page_cache import cache_folder, database_of
from areal_sc.page.prompt_book import PromptBook
from areal_sc.page.recorded_groups import RecordedGroups, tokenizer_of
from areal_sc.page.row_index import RowIndex
from areal_sc.page.row_search import RowQuery, RowSearch
from areal_sc.page.stamps import Stamp, stamp_of
from areal_sc.page.time_line import TimeLine
from areal_sc.page.trained_numbers import TrainedNumbers
from areal_sc.records.reading import spans, trace_events
from areal_sc.records.recorded_pictures import RecordedPicture
from areal_sc.records.spans import SCRIPT, START_UP, RecordedSpan
from areal_sc.run.run_folder import FORMAT_VERSION, RunFolder, check_is_run
from areal_sc.run.run_status import read_status
from areal_sc.system.json_lines import to_json
from areal_sc.trainer.learning_rules import LearningHealth

READ_S: Final = 1.0
"""A view that needs all rows waits so long for those that are not read yet."""
_MAX_SETTINGS_BYTES: Final = 64 << 20
"""Largest `config.yaml` that is read, in bytes."""


class FollowedRun:
    """Views of a run, as plain data.

    Args:
        name: what the page calls it.
        cache: folder of what is read of runs; None: that of the user.

    Attributes:
        index: of its recorded rows.

    Raises: CommandError: it is not the folder of a run.
    """

    def __init__(self, path: Path, name: str, cache: Path | None = None) -> None:
        cache = cache or cache_folder()
        self.name = name
        self.folder = RunFolder(path)
        check_is_run(self.folder)
        self._lock, self._lock_of_groups = Lock(), Lock()
        self._columns = MetricColumns(self.folder.metrics_path)
        self._groups = GroupBook(self.folder.ledger)
        self._health, self._health_of = LearningHealth(), 0  # which epoch of the columns
        self.index = RowIndex(
            self.folder.records,
            database_of(cache, path),
            lambda: self._tokenizer,
        )
        self._search = RowSearch(self.index)
        self._prompts = PromptBook(self.index)
        self._trained = TrainedNumbers(self.folder.records)
        self._recorded = RecordedGroups(self.index, self._trained)
        self._fates_of = 0  # which reading of the ledger the index knows
        self._time_line = TimeLine(self.folder.records)
        self._script: tuple[list[RecordedSpan], int] = (
            [],
            0,
        )  # spans of it, and how many were told
        self._known_start_up: list[RecordedSpan] = []
        self._lock_of_records = Lock()

    def stamps(self) -> dict[str, Stamp]:
        """A stamp for each part of the run; it changes when the part does."""
        folder = self.folder
        return {
            "steps": stamp_of(folder.metrics_path),
            "groups": self._groups.stamp(),
            "records": self._time_line.stamp(),
            "recorded": self.index.stamp(),
            "fleet": stamp_of(folder.status_path, folder.summary_path),
        }

    def about(self) -> dict[str, Any]:
        """Its name, folder and settings; `notes` say what is particular about it.

        `model_folders` are those in which its tokenizer is sought.
        """
        notes = []
        marker = self.folder.marker()
        if marker is None:
            notes.append("run.json is gone or damaged")
        elif marker.format_version != FORMAT_VERSION:
            notes.append(
                f"an earlier areal_sc wrote this folder (format {marker.format_version}, now "
                f"{FORMAT_VERSION}): what it did not record is missing"
            )
        settings, failure = self._settings()
        return {
            "name": self.name,
            "path": str(self.folder.path),
            "settings": settings,
            "model_folders": [str(path) for path in self.model_folders],
            "notes": [*notes, failure] if failure else notes,
        }

    def steps(self, epoch: int = 0, first: int = 0) -> dict[str, Any]:
        """New steps: what `MetricColumns.since` returns."""
        with self._lock:
            self._columns.follow()
            return self._columns.since(epoch, first)

    def health(self) -> dict[str, Any]:
        """`complaints`: what is wrong with the learning now, by the names of the rules."""
        with self._lock:
            self._columns.follow()
            columns = self._columns
            if columns.epoch != self._health_of:
                self._health, self._health_of = LearningHealth(self._dtype()), columns.epoch
            self._health.remember(columns.history)
            return {"complaints": self._health.complaints, "num_steps": columns.num_steps}

    def groups(self, query: GroupQuery, at: int, limit: int) -> dict[str, Any]:
        """What `GroupBook.found` returns; each group gets a `data_row` and `rewards`.

        These are its row of the dataset, and mean, lowest and highest reward of its last attempt;
        None where they are recorded nowhere.
        """
        with self._lock_of_groups:
            found = self._groups.found(query, at, limit)
        self._add_data_rows(found["groups"])
        return found

    def lives(self, groups: Set[int]) -> dict[int, dict[str, Any]]:
        """What `GroupBook.lives` returns; accounts get a `data_row`, see `groups`."""
        with self._lock_of_groups:
            lives = self._groups.lives(groups)
        self._add_data_rows([life["account"] for life in lives.values()])
        return lives

    def _add_data_rows(self, accounts: Sequence[dict[str, Any]]) -> None:
        self.index.follow()
        rewards = self._search.rewards([it["group"] for it in accounts])
        for it in accounts:
            it["rewards"] = rewards.get((it["group"], it["attempt"]))
        found = self._search.data_rows([(it["index"], it["dataset"]) for it in accounts])
        for it in accounts:
            it["data_row"] = found.get((it["index"], it["dataset"]))

    def read_rows(self, seconds: float) -> dict[str, Any]:
        """Reads new rows and what became of their groups; see `RowIndex.follow`."""
        with self._lock_of_groups:
            self._groups.follow()
            if self._groups.num_readings != self._fates_of:
                self.index.note_fates(self._groups.fates())
                self._fates_of = self._groups.num_readings
        return self.index.follow(seconds)

    def recorded_rows(self, query: RowQuery, at: int, limit: int) -> dict[str, Any]:
        """Recorded rows: what `RowSearch.found` returns."""
        self.index.follow()
        found = self._search.found(query, at, limit)
        return {**found, "damage": [*found["damage"], *self._time_line.lost]}

    def prompts(self, of_set: str, sort: str, at: int, limit: int) -> dict[str, Any]:
        """What recorded rows tell by prompt; see `PromptBook.found`."""
        self.index.follow()
        return self._prompts.found(of_set, sort, at, limit)

    def prompt(self, of_set: str, dataset: int, index: int) -> dict[str, Any] | None:
        """All tries of a prompt; see `PromptBook.tries`."""
        self.index.follow()
        return self._prompts.tries(of_set, dataset, index)

    def every_recorded_row(self, query: RowQuery) -> Iterator[list[dict[str, Any]]]:
        """What `RowSearch.every` gives, once all recorded rows are read."""
        while not self.read_rows(READ_S)["is_whole"]:
            pass
        return self._search.every(query)

    @property
    def has_texts(self) -> bool:
        """Whether the run's tokenizer is on this machine."""
        return self._tokenizer is not None

    def recorded(self, group: int) -> dict[str, Any]:
        """`attempts` of `RecordedGroups.of_group`, `rows` with texts, and `damage`."""
        # the ledger, whose reading may take long, is read anew when the list of rows is seen
        progress = self.index.follow(READ_S) if self._fates_of else self.read_rows(READ_S)
        damage = [*self.index.damage, *self._trained.damage, *self._time_line.lost]
        if not progress["is_whole"]:
            share = progress["num_read_bytes"] / progress["num_bytes"]
            damage = [*damage, f"the rows are still being read: {share:.0%} so far"]
        return {
            "attempts": self._recorded.of_group(group),
            "rows": self._search.of_group(group),
            "damage": damage,
        }

    def tokens(
        self, group: int, attempt: int, episode: int, row: int, first: int = 0
    ) -> dict[str, Any] | None:
        """The tokens of a recorded row; see `RecordedGroups.tokens`."""
        self.index.follow()
        return self._recorded.tokens(group, attempt, episode, row, self._tokenizer, first)

    def picture(self, digest: str) -> tuple[RecordedPicture, bytes] | None:
        """A recorded picture by its digest; see `RowIndex.picture`."""
        self.index.follow()
        return self.index.picture(digest)

    def time_line(
        self, first: float | None = None, last: float | None = None, width: int = 2000
    ) -> dict[str, Any]:
        """What its processes did when; see `TimeLine.shown`."""
        with self._lock_of_records:
            with self._lock:
                self._columns.follow()
                spans = self._columns.spans
            (known, num_told), start_up = self._script, self._start_up(spans)
            if spans is not known or start_up != self._known_start_up:
                self._time_line.forget_script()
                self._time_line.add_of_script(start_up)
                num_told = 0
            self._time_line.add_of_script(spans[num_told:])
            self._script, self._known_start_up = (spans, len(spans)), start_up
            self._time_line.follow()
            return self._time_line.shown(first, last, width)

    def _start_up(self, of_script: Sequence[RecordedSpan]) -> list[RecordedSpan]:
        """The newest start of the script until its first step; none where nothing tells of it."""
        try:
            status = read_status(self.folder.status_path)
        except RunFolderError:
            return []
        if status is None:
            return []
        began = status.began
        ended = next((it.began for it in of_script if it.took_s and it.began >= began), None)
        took_s = max(0.0, (status.written if ended is None else ended) - began)
        return [RecordedSpan(process=SCRIPT, kind=START_UP, began=began, took_s=took_s)]

    def trace(self) -> bytes:
        """What its processes did when, as JSON that Perfetto and Chrome show."""
        events = b",\n".join(map(to_json, trace_events(spans(self.folder.path))))
        return b'{"traceEvents": [' + events + b"]}"

    def fleet(self) -> dict[str, Any]:
        """State and workers; see `fleet_view`."""
        return fleet_view(self.folder)

    def held(self) -> dict[str, int]:
        """Policy versions of workers; see `TimeLine.held`."""
        with self._lock_of_records:
            self._time_line.follow()
            return self._time_line.held()

    def log(self, name: str) -> str | None:
        """The end of a log; see `log_end`."""
        return log_end(self.folder, name)

    def _settings(self) -> tuple[dict[str, Any], str]:
        path = self.folder.config_path
        try:
            if path.stat().st_size > _MAX_SETTINGS_BYTES:
                return {}, "config.yaml is too large to be settings"
            settings = settings_of(path.read_text(errors="replace"))
        except FileNotFoundError:
            return {}, ""
        except OSError as error:
            return {}, f"config.yaml cannot be read: {error.strerror}"
        except RunFolderError as error:
            return {}, f"config.yaml cannot be read: {error.__cause__ or 'it is not a mapping'}"
        return {name: str(value) for name, value in settings.items()}, ""

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the run's model, if that is on this machine."""
        return tokenizer_of(*self.model_folders)

    @property
    def model_folders(self) -> list[Path]:
        """Where the tokenizer may be: in the run folder, and with the run's model, which may be as
        given, seen from the run folder, and as it was saved."""
        settings = self._settings()[0]
        path, run_dir = settings.get("actor.path", ""), settings.get("run_dir", "")
        model = None
        with suppress(ValueError):  # it looks like a name of the hub, which has no such names
            model = cached_model(path) if path else None
        folders = [*filter(None, [model]), self.folder.path / "model"]
        if path and run_dir and os.path.isabs(path) == os.path.isabs(run_dir):
            # from where the script was started, which is not known here, both are seen
            beside = self.folder.path / os.path.relpath(path, run_dir)
            folders.insert(0, Path(os.path.normpath(beside)))
        return [self.folder.path, *folders]

    def _dtype(self) -> Dtype:
        name = self._settings()[0].get("actor.dtype", "")
        return Dtype(name) if name in list(Dtype) else Dtype.float32
