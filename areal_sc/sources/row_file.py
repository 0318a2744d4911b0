"""Rows of the script's datasets that workers could not read by themselves. No torch.

A database handle, a stream, a `datasets.Dataset`: whatever is no `Prompts` is read where it is, in
the script. A row is read when its group is admitted, so the size of the dataset does not matter.

    script   RowWriter: rows[index], or the next rows of a stream
                | appends a line
             rows-<name>.jsonl of the run folder
                | looks the line up
    worker   WrittenRows[index]

consumes     the numbers of the rows that groups need, in the order of admission
waits for    the user's code, on a thread of its own, one row at a time
unblocked by each row that was written; without any for `READ_TIMEOUT_S`, the wait ends
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, Final, Protocol

from areal_sc.errors import RunFolderError, WaitTimeout, WorkflowError
from areal_sc.sources.prompts import Prompts, row_of, row_to_wire
from areal_sc.sources.values import from_json, to_json
from areal_sc.system.durable import own_file
from areal_sc.user_code import blame

GROWING: Final = "rows-"
"""Begins the names of files that get further rows while the run goes on."""
_logger = logging.getLogger(__name__)

_ENDED: Final = object()
READ_TIMEOUT_S: Final = 600.0
"""The user's code may take so long for one row; more than that, and the row will not come."""


class MapStyle(Protocol):
    """Rows by number, as PyTorch's and Hugging Face's datasets are."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


PromptSource = MapStyle | Iterable[Mapping[str, Any]]
"""A `Prompts`, a list of dicts, a dataset with a length, or a stream of dicts."""


def num_rows_of(rows: PromptSource) -> int | None:
    """The number of rows; None: a stream, which does not say.

    Raises: WorkflowError: it is empty, or neither a dataset nor a stream.
    """
    kind = type(rows).__name__
    try:
        num_rows = len(rows)  # type: ignore[arg-type]  # a stream has none
    except TypeError:
        if isinstance(rows, Iterable):
            return None
        raise WorkflowError(
            f"the dataset is a {kind}: expected a list of dicts, an object with __len__ and "
            "__getitem__, an iterable of dicts, or what areal_sc.load_prompts returns"
        ) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's code may raise anything
        raise WorkflowError(f"the length of the dataset ({kind}): {blame(error)}") from error
    if num_rows == 0:
        raise WorkflowError(f"the dataset ({kind}) is empty: expected at least 1 prompt")
    return num_rows


class WrittenRows(Prompts):
    """A worker's side: the rows that the script has written so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[int, int] = {}  # number of the row -> where its line begins
        self._end = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Raises: WorkflowError: the script could not read the row."""
        with self._path.open("rb") as file:
            self._look_on(file)  # another start of the script may have written the row anew
            file.seek(self._places[index])
            line = from_json(file.readline())
        if "error" in line:
            raise WorkflowError(line["error"])
        return row_of(line["row"], f"row {index} of {self._path}")

    def _look_on(self, file: Any) -> None:
        file.seek(self._end)
        for line in file:
            if not line.endswith(b"\n"):
                return  # it is being written
            if (index := _index_of(line)) is not None:
                self._places[index] = self._end
            self._end += len(line)


class RowWriter:
    """The script's side: reads the rows that are asked for, and writes them for the workers.

    A resumed script reads again: rows of a dataset by their numbers, those of a stream from its
    beginning. Workers of an earlier start may read the file meanwhile, so what is in it stays; a
    row that is another one now is written behind the others, and counts from then on.

    Args:
        rows: is read by one thread.
        path: of the file.
    Raises: OSError: the file cannot be written. WorkflowError: `rows` is empty, or no dataset.

    Attributes:
        num_rows: None: a stream, which does not say.
    """

    def __init__(self, rows: PromptSource, path: Path) -> None:
        self.num_rows = num_rows_of(rows)
        # the user's __iter__ is called where the first row is read
        given: Any = rows
        self._rows: Any = chain.from_iterable([given]) if self.num_rows is None else given
        self._kind = type(rows).__name__
        self._earlier = _found_rows(path)
        self._file = open(path, "ab", opener=own_file)  # noqa: SIM115
        self._written: set[int] = set()
        # None: nothing more is wanted
        self._wanted: queue.SimpleQueue[tuple[Sequence[int], Future[None]] | None]
        self._wanted = queue.SimpleQueue()
        self._is_closed = False
        self._has_told = False
        threading.Thread(target=self._serve, name=f"rows of {self._kind}", daemon=True).start()

    def write_first(self) -> None:
        """Reads one row, to see whether that works at all. Blocks.

        Raises: WorkflowError: it does not. WaitTimeout: it takes longer than `READ_TIMEOUT_S`.
        """
        try:
            self._want([0]).result(READ_TIMEOUT_S)
        except TimeoutError:
            raise self._silence(0) from None

    async def write(self, indices: Sequence[int]) -> None:
        """Returns when workers can read these rows.

        Raises: WorkflowError: a stream has ended, or failed; or a row is none that workers could
            get as it is. WaitTimeout: nothing was read for
            `READ_TIMEOUT_S`. RunFolderError: the file cannot be written.
        """
        if self._written.issuperset(indices):
            return
        written = asyncio.wrap_future(self._want(indices))
        while not written.done():
            num_before = len(self._written)
            await asyncio.wait([written], timeout=READ_TIMEOUT_S)
            if not written.done() and len(self._written) == num_before:
                written.cancel()
                raise self._silence(indices[0])
        written.result()

    def close(self) -> None:
        """The row that the dataset is giving now is the last; nobody may wait for others."""
        self._is_closed = True
        self._wanted.put(None)

    def _want(self, indices: Sequence[int]) -> Future[None]:
        written: Future[None] = Future()
        self._wanted.put((indices, written))
        return written

    def _silence(self, index: int) -> WaitTimeout:
        return WaitTimeout(
            f"the dataset ({self._kind}) gave no row for {READ_TIMEOUT_S:g} s; row {index} was "
            "waited for"
        )

    def _serve(self) -> None:
        while wanted := self._wanted.get():
            indices, written = wanted
            if not written.set_running_or_notify_cancel():
                continue
            try:
                for index in indices:
                    self._write_up_to(index)
                self._file.flush()
                written.set_result(None)
            except OSError as error:
                text = f"cannot write {self._file.name}: {error.strerror}"
                written.set_exception(RunFolderError(text))
            except Exception as error:  # raised where the rows are waited for
                written.set_exception(error)
        with suppress(OSError):  # of what could not be written before
            self._file.close()

    def _write_up_to(self, index: int) -> None:
        if self.num_rows is None:
            for following in range(len(self._written), index + 1):  # a stream has no gaps
                self._write_row(following, self._read(following, index))
        elif index not in self._written:
            try:
                row = self._read(index, index)
            except WorkflowError as error:
                if not self._written:
                    raise  # the first one: it is not this row alone
                self._write(index, b"error", json.dumps(str(error)).encode())
            else:
                self._write_row(index, row)

    def _write_row(self, index: int, row: Any) -> None:
        self._write(index, b"row", to_json(row_to_wire(row, index, self._kind)))

    def _write(self, index: int, key: bytes, text: bytes) -> None:
        line = b'{"index": %d, "%s": %s}\n' % (index, key, text)
        digest = _digest(line)
        first, last = self._earlier.pop(index, (digest, b""))
        if last != digest:
            self._file.write(line)
        if first != digest and not self._has_told:
            self._has_told = True
            _logger.warning(
                "row %d of the dataset (%s) changed since the run began, and so may others",
                index,
                self._kind,
            )
        self._written.add(index)

    def _read(self, index: int, wanted: int) -> Any:
        """A row; calls the user's code."""
        if self._is_closed:
            raise CancelledError
        try:
            row = next(self._rows, _ENDED) if self.num_rows is None else self._rows[index]
        except BaseException as error:  # the user's code may raise anything
            raise WorkflowError(
                f"row {index} of the dataset ({self._kind}) cannot be read: {blame(error)}"
            ) from error
        if row is _ENDED:
            raise WorkflowError(
                f"the dataset ({self._kind}) ended after {index} rows, but row {wanted} is needed: "
                "a stream gives each row once; let it go on (`.repeat(None)` of `datasets`, "
                "itertools.cycle), give a dataset with a length, whose rows come again in each "
                "epoch, or lower total_steps"
            )
        return row


def _found_rows(path: Path) -> dict[int, tuple[bytes, bytes]]:
    """Digests of each row's first and last line; a line that was cut short is cut off."""
    found: dict[int, tuple[bytes, bytes]] = {}
    if path.exists():
        with path.open("r+b") as file:
            end = 0
            for line in file:
                if not line.endswith(b"\n"):
                    file.truncate(end)
                    break
                if (index := _index_of(line)) is not None:
                    digest = _digest(line)
                    found[index] = found.get(index, (digest, digest))[0], digest
                else:
                    _logger.warning("%s has a damaged line: its row is written anew", path)
                end += len(line)
    return found


def _index_of(line: bytes) -> int | None:
    """Number of the row of a line; None: the line is damaged."""
    try:
        return int(from_json(line)["index"])
    except (ValueError, TypeError, KeyError):
        return None


def _digest(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=8).digest()
