"""Every recorded row of a run in a database, by which it is found: numbers, texts, places.

consumes     the files of rows, of evaluated answers and of pictures in `records/`, which grow and
             go, and what the ledger says of groups
waits for    another page of the same run that is just writing to the database

The database lies outside the run folder and holds nothing that is not in there: what reads it goes
on where it was, and whatever is wrong with it, it is made anew. Text takes 4 bytes a token there.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple

import msgspec
from tokenizers import Tokenizer

from areal_sc.errors import RunFolderError
from areal_sc.page.followed_blocks import FollowedBlocks, Progress
from areal_sc.page.row_texts import TextReader, Texts
from areal_sc.page.stamps import Stamp
from areal_sc.records.blocks import RecordBlock, read_block, read_body
from areal_sc.records.reading import answers_of, rows_of
from areal_sc.records.record_files import RecordFile, Series
from areal_sc.records.recorded_pictures import RecordedPicture, unpack_picture
from areal_sc.records.recorded_rows import (
    EvaluatedAnswer,
    RecordedGroup,
    RecordedRow,
    RecordedTokens,
)

REJECTED: Final = -1
"""Instead of an episode's number: of episodes that have no rows, for the same cause."""
UNFINISHED: Final = "unfinished"
"""What has become of an attempt whose worker recorded that it began, and nothing since."""

EVALUATED: Final = "evaluated"
"""The outcome of an answer of an evaluation."""

_FOLLOWED: Final = (Series.rows, Series.kept, Series.evaluated, Series.pictures)
_FORMAT: Final = 6
_BATCH_TOKENS: Final = 1 << 20
"""After so many the database is written: they take 0.2 s."""
_MAX_METRICS: Final = 200
_BUSY_S: Final = 30.0

_SCHEMA: Final = """
CREATE TABLE state (json BLOB);
CREATE TABLE groups (id INTEGER PRIMARY KEY, number INT, attempt INT, began REAL, file TEXT,
    begins_at INT, ends_at INT, data_row TEXT, nth INT, pictures TEXT);
CREATE INDEX groups_by_number ON groups (number, attempt);
CREATE INDEX groups_by_file ON groups (file);
CREATE TABLE rows (id INTEGER PRIMARY KEY, place INT, "group" INT, attempt INT, episode INT,
    row INT, dataset INT, "index" INT, worker TEXT, reward REAL, group_reward REAL,
    num_tokens INT, num_trained_tokens INT, first_version INT, last_version INT,
    num_interruptions INT, time REAL, step INT, staleness INT, outcome TEXT, cause TEXT,
    output TEXT, evaluation TEXT);
CREATE INDEX rows_by_place ON rows (place);
CREATE INDEX rows_by_data_row ON rows ("index", dataset);
CREATE TABLE pictures (digest TEXT, file TEXT, begins_at INT, ends_at INT);
CREATE INDEX pictures_by_digest ON pictures (digest);
CREATE TABLE texts (id INTEGER PRIMARY KEY, prompt BLOB, answer BLOB);
CREATE TABLE metrics (name TEXT PRIMARY KEY, name_of_column TEXT);
"""
_COLUMNS: Final = (
    *("id", "place", "group", "attempt", "episode", "row", "dataset", "index", "worker", "time"),
    *("reward", "group_reward", "num_tokens", "num_trained_tokens"),
    *("first_version", "last_version", "num_interruptions", "step", "staleness"),
    *("outcome", "cause", "output", "evaluation"),
)


class Fate(NamedTuple):
    """What became of an attempt of a group, as the page tells it.

    Attributes:
        step: the one that trained it.
        cause: of a rejection; "" without one.
    """

    outcome: str
    step: int | None
    cause: str


_NO_FATE: Final = Fate("", None, "")


class PlacedGroup(NamedTuple):
    """Where an attempt of a group, or an evaluated answer, is.

    Attributes:
        begin, end: of its block.
        nth: its number among the answers of the block; None: the block is a group's.
    """

    path: Path
    begin: int
    end: int
    nth: int | None


class _IndexState(msgspec.Struct):
    """What the database holds.

    Attributes:
        made: tells it from a database that was made before, or since (Unix time, ns).
        num_changes: how often the database was written.
        has_texts: there was a tokenizer.
    """

    progress: Progress = msgspec.field(default_factory=Progress)
    made: int = 0
    num_changes: int = 0
    has_texts: bool = False

    @property
    def edition(self) -> tuple[int, int]:
        """It is another one when there is something else to find."""
        return self.made, self.num_changes


class _NewGroup(NamedTuple):
    """A group, or an evaluated answer as one, that is new.

    Attributes:
        tokens: of its rows.
        answer: what it was made of, and its number in the block; None: it is a group.
    """

    file: RecordFile
    block: RecordBlock
    group: RecordedGroup
    tokens: list[RecordedTokens]
    answer: tuple[EvaluatedAnswer, int] | None = None


class RowIndex:
    """Follows the files of rows.

    Args:
        folder: `records/` of a run.
        database: a file; its folder is made.
        tokenizer: gives the run's tokenizer, None where there is none: then the prompts of the
            data set are the only texts.
    """

    def __init__(
        self,
        folder: Path,
        database: Path,
        tokenizer: Callable[[], Tokenizer | None],
    ) -> None:
        self._folder = folder
        self._database = database
        self._tokenizer = tokenizer
        self._blocks = FollowedBlocks(folder, _FOLLOWED)
        self._fates: Mapping[tuple[int, int], Fate] = {}
        self._following = Lock()
        self._read_of: Stamp | None = None
        self._made = 0
        self._reader: TextReader | None = None

    def stamp(self) -> Stamp:
        """It changes when there are new rows."""
        return self._blocks.stamp()

    @property
    def damage(self) -> list[str]:
        """What cannot be read, and what is gone, in sentences."""
        return self._blocks.damage

    @contextmanager
    def connected(self) -> Iterator[sqlite3.Connection]:
        """The database, for one thread.

        Raises: RunFolderError: it cannot be had.
        """
        try:
            with closing(self._connection()) as connection:
                yield connection
        except sqlite3.OperationalError as error:
            raise self._failure(error) from error
        except sqlite3.DatabaseError as error:
            self._database.unlink(missing_ok=True)
            raise RunFolderError(
                f"{self._database} was damaged ({error}); it is made anew: try again"
            ) from error

    def _failure(self, error: Exception) -> RunFolderError:
        return RunFolderError(
            f"the rows that were read are kept in {self._database}, which fails: {error}; "
            "XDG_CACHE_HOME names another folder for it"
        )

    def _connection(self) -> sqlite3.Connection:
        try:
            self._database.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise self._failure(error) from error
        while True:
            connection = sqlite3.connect(self._database, _BUSY_S, isolation_level=None)
            try:
                connection.execute("PRAGMA synchronous = OFF")  # it can be made anew
                connection.execute("PRAGMA cache_size = -65536")
                (found,) = connection.execute("PRAGMA user_version").fetchone()
                if found == _FORMAT:
                    return connection
                if found == 0:
                    _make(connection)
                    return connection
            except BaseException:
                connection.close()
                raise
            connection.close()
            self._database.unlink(missing_ok=True)  # of another areal_sc

    def follow(self, seconds: float = 0.0) -> dict[str, Any]:
        """Reads what is new, for about so long.

        Returns: `is_whole`: nothing new is left; `num_read_bytes` of `num_bytes` in the files;
            `num_changes`: it is larger when there is more to find than before.
        Raises: RunFolderError: the database cannot be had.
        """
        ends = time.monotonic() + seconds
        with self._following, self.connected() as database:
            stamp, made = self._blocks.stamp(of_all=True), state_of(database).made
            if made != self._made:  # what was read went with the database before it
                self._made, self._read_of = made, None
            while stamp != self._read_of:
                self._read_of = None
                with _written(database):
                    is_whole = self._read_batch(database)
                if is_whole:
                    self._read_of = stamp
                if time.monotonic() > ends:
                    break
            num_read, num_bytes = self._blocks.num_bytes()
            return {
                "is_whole": self.is_whole,
                "num_read_bytes": num_read,
                "num_bytes": num_bytes,
                "num_changes": state_of(database).num_changes,
            }

    @property
    def is_whole(self) -> bool:
        """All that was there at the last look is read."""
        return self._read_of is not None

    def _read_batch(self, database: sqlite3.Connection) -> bool:
        """Whether nothing is left."""
        state, blocks, tokenizer = state_of(database), self._blocks, self._tokenizer()
        blocks.go_on_from(state.progress)
        if blocks.begins_again() or state.has_texts != (tokenizer is not None):
            for table in ("groups", "rows", "texts", "pictures"):
                database.execute(f"DELETE FROM {table}")
            state.has_texts = tokenizer is not None
            blocks.go_on_from(Progress())
        for name in blocks.forget_gone():
            _delete(database, "SELECT id FROM groups WHERE file = ?", name)
            database.execute("DELETE FROM pictures WHERE file = ?", (name,))
        new, num_tokens, is_whole = list[_NewGroup](), 0, True
        for file, descriptor, found in blocks.read_new():
            if file.series is Series.pictures:
                self._note_picture(database, file, found)
                continue
            for read in self._read(file, descriptor, found):
                new.append(read)
                num_tokens += sum(row.num_tokens for row in read.group.rows)
            if num_tokens > _BATCH_TOKENS:
                is_whole = False
                break
        if self._reader is None or self._reader.tokenizer is not tokenizer:
            self._reader = TextReader(tokenizer)
        all_texts = self._reader.texts([(it.group, it.tokens) for it in new])
        for it, texts in zip(new, all_texts, strict=True):
            self._insert(database, it, texts)
        state.progress = blocks.progress
        state.num_changes += 1
        database.execute("UPDATE state SET json = ?", [msgspec.json.encode(state)])
        return is_whole

    def _read(self, file: RecordFile, descriptor: int, found: RecordBlock) -> list[_NewGroup]:
        try:
            body = read_body(descriptor, found)
            if file.series is Series.evaluated:
                return [
                    _NewGroup(file, found, group_of(it.answer), it.tokens, (it.answer, nth))
                    for nth, it in enumerate(answers_of(found.head, body))
                ]
            group, tokens, _ = rows_of(found.head, body)
        except ValueError as error:
            self._blocks.note_bad(file, str(error))
            return []
        return [_NewGroup(file, found, group, tokens)]

    def _note_picture(
        self, database: sqlite3.Connection, file: RecordFile, found: RecordBlock
    ) -> None:
        try:
            digest = unpack_picture(found.head).digest
        except ValueError as error:
            self._blocks.note_bad(file, str(error))
            return
        place = digest, file.path.name, found.begin, found.end
        database.execute("INSERT INTO pictures VALUES (?, ?, ?, ?)", place)

    def _insert(self, database: sqlite3.Connection, new: _NewGroup, texts: list[Texts]) -> None:
        group = new.group
        name = group.group, group.attempt
        among = "FROM groups WHERE number = ? AND attempt = ?"
        (began,) = database.execute(f"SELECT max(began) {among}", name).fetchone()
        if began is not None:
            # a run that has gone back may have played another group of this number since
            if began > group.began or (began == group.began and group.has_only_begun):
                return
            _delete(database, f"SELECT id {among}", *name)
        its_place = new.file.path.name, new.block.begin, new.block.end
        nth = None if new.answer is None else new.answer[1]
        pictures = msgspec.json.encode(group.pictures).decode()
        place = database.execute(
            "INSERT INTO groups (number, attempt, began, file, begins_at, ends_at, data_row, nth, "
            "pictures) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*name, group.began, *its_place, group.prompt, nth, pictures),
        ).lastrowid
        columns = metric_columns(database)
        for metric in sorted({metric for row in group.rows for metric in row.metrics}):
            if metric not in columns and len(columns) < _MAX_METRICS:
                columns[metric] = column = f"metric_{len(columns)}"
                database.execute("INSERT INTO metrics VALUES (?, ?)", (metric, column))
                database.execute(f"ALTER TABLE rows ADD COLUMN {column} REAL")
        (last,) = database.execute("SELECT coalesce(max(id), 0) FROM rows").fetchone()
        names = [*_COLUMNS, *columns.values()]
        rows = [
            (number, place, *values, *(metrics.get(it) for it in columns))
            for number, (values, metrics) in enumerate(self._values(new), start=last + 1)
        ]
        marks = ", ".join("?" * len(names))
        filled = ", ".join(f'"{name}"' for name in names)
        database.executemany(f"INSERT INTO rows ({filled}) VALUES ({marks})", rows)
        database.executemany(
            "INSERT INTO texts VALUES (?, ?, ?)",
            ((number, *it) for number, it in enumerate(texts, start=last + 1)),
        )

    def _values(self, new: _NewGroup) -> Iterator[tuple[tuple[Any, ...], dict[str, float]]]:
        """What `_COLUMNS` hold of each row, and of episodes without rows; and their metrics."""
        group, answer = new.group, None if new.answer is None else new.answer[0]
        name = group.group, group.attempt
        fate, evaluation = self._fates.get(name, _NO_FATE), ""
        if answer is not None:
            fate, evaluation = Fate(EVALUATED, answer.step, ""), answer.evaluation
        of_group = group.dataset, group.index, group.worker, group.began + group.took_s
        for row in group.rows:
            runs = row.versions
            first, last = (runs[0][0], runs[-1][0]) if runs else (None, None)
            yield (
                (
                    *(*name, row.episode, row.row, *of_group),
                    *(row.reward, group.mean_reward, row.num_tokens, row.num_trained_tokens),
                    *(first, last, row.num_interruptions),
                    fate.step,
                    None if evaluation else _staleness(row, fate.step),
                    *(fate.outcome, fate.cause, row.output, evaluation),
                ),
                row.metrics,
            )
        none = (None,) * 9
        for number, it in enumerate(group.rejected):
            ended = EVALUATED if evaluation else "rejected", it.cause, "", evaluation
            yield (*name, REJECTED, number, *of_group, *none, *ended), {}
        if group.has_only_begun:
            yield (*name, REJECTED, 0, *of_group, *none, UNFINISHED, "", "", ""), {}

    def note_fates(self, fates: Mapping[tuple[int, int], Fate]) -> None:
        """What became of attempts of groups, by the numbers of both.

        Raises: RunFolderError: the database cannot be had.
        """
        with self._following:
            gone = dict.fromkeys(self._fates.keys() - fates.keys(), _NO_FATE)
            new = [
                (key, it)
                for key, it in (*gone.items(), *fates.items())
                if self._fates.get(key) != it
            ]
            if not new:
                return
            with self.connected() as database, _written(database):
                if not self._fates:  # of an earlier page, which may have known less
                    database.execute(
                        "UPDATE rows SET step = NULL, outcome = '', cause = '', staleness = NULL "
                        "WHERE episode >= 0 AND outcome != '' AND evaluation = ''"
                    )
                database.executemany(
                    "UPDATE rows SET step = ?, outcome = ?, cause = ?, "
                    "staleness = ? - 1 - first_version WHERE episode >= 0 AND place IN "
                    "(SELECT id FROM groups WHERE number = ? AND attempt = ?)",
                    ((it.step, it.outcome, it.cause, it.step, *key) for key, it in new),
                )
                state = state_of(database)
                state.num_changes += 1
                database.execute("UPDATE state SET json = ?", [msgspec.json.encode(state)])
            self._fates = dict(fates)

    def places(self, number: int) -> dict[int, PlacedGroup]:
        """Where the blocks of a group's attempts are.

        Raises: RunFolderError: the database cannot be had.
        """
        with self.connected() as database:
            found = database.execute(
                "SELECT attempt, file, begins_at, ends_at, nth FROM groups WHERE number = ? "
                "ORDER BY attempt",
                (number,),
            ).fetchall()
        return {
            attempt: PlacedGroup(self._folder / name, begin, end, nth)
            for attempt, name, begin, end, nth in found
        }

    def picture(self, digest: str) -> tuple[RecordedPicture, bytes] | None:
        """A picture of the run's records, and its content; None: they have none, or no longer.

        Raises: RunFolderError: it cannot be read, or the database cannot be had.
        """
        with self.connected() as database:
            found = database.execute(
                "SELECT file, begins_at, ends_at FROM pictures WHERE digest = ?", (digest,)
            ).fetchall()
        for name, begin, end in reversed(found):
            try:
                head, content = read_block(self._folder / name, begin, end)
                return unpack_picture(head), content
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                raise RunFolderError(f"{name} cannot be read: {error}") from error
        return None


def group_of(answer: EvaluatedAnswer) -> RecordedGroup:
    """An evaluated answer as the page tells it: all to a prompt in one evaluation are a group.

    Its number, which is negative, follows from what it is, so that links to it hold; `attempt` is
    the number of the answer.
    """
    name = f"{answer.step} {answer.dataset} {answer.index} {answer.evaluation}".encode()
    # JavaScript's numbers are exact to 53 bits
    number = int.from_bytes(hashlib.blake2b(name, digest_size=6).digest(), "big")
    return RecordedGroup(
        worker=answer.worker,
        group=-1 - number,
        attempt=answer.sample,
        dataset=answer.dataset,
        index=answer.index,
        prompt=answer.prompt,
        admitted_version=answer.step,
        began=answer.began,
        took_s=answer.took_s,
        rows=answer.rows,
        rejected=() if answer.rejected is None else (answer.rejected,),
        num_call_bytes=answer.num_call_bytes,
        pictures=answer.pictures,
    )


def state_of(database: sqlite3.Connection) -> _IndexState:
    """How far the files are read."""
    (content,) = database.execute("SELECT json FROM state").fetchone()
    return msgspec.json.decode(content, type=_IndexState)


def metric_columns(database: sqlite3.Connection) -> dict[str, str]:
    """Name of a number that the workflow reports -> name of its column."""
    return dict(database.execute("SELECT * FROM metrics ORDER BY rowid"))


def _make(database: sqlite3.Connection) -> None:
    with _written(database):
        (found,) = database.execute("PRAGMA user_version").fetchone()
        if found == 0:  # another page has not made it meanwhile
            for statement in _SCHEMA.split(";"):
                database.execute(statement)
            state = _IndexState(made=time.time_ns())
            database.execute("INSERT INTO state VALUES (?)", [msgspec.json.encode(state)])
            database.execute(f"PRAGMA user_version = {_FORMAT}")


@contextmanager
def _written(database: sqlite3.Connection) -> Iterator[None]:
    """All that is written meanwhile, or nothing of it."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def _delete(database: sqlite3.Connection, groups: str, *values: Any) -> None:
    """Args: groups: a query that gives their ids, and its values."""
    rows = f"SELECT id FROM rows WHERE place IN ({groups})"
    database.execute(f"DELETE FROM texts WHERE id IN ({rows})", values)
    database.execute(f"DELETE FROM rows WHERE place IN ({groups})", values)
    database.execute(f"DELETE FROM groups WHERE id IN ({groups})", values)


def _staleness(row: RecordedRow, step: int | None) -> int | None:
    """How old the first trained token is, in policy versions, as the command `samples` tells it."""
    return step - 1 - row.versions[0][0] if row.versions and step is not None else None
