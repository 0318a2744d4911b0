"""Datasets, and the order in which their prompts are taken. No torch.

Controllers need a dataset's length and `prompt_at` only; the rows are read by workers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from areal_sc.errors import WorkflowError
from areal_sc.sources.pictures import with_pictures
from areal_sc.sources.reference import Referable
from areal_sc.sources.text_files import read_rows
from areal_sc.sources.values import MALFORMED, UnfitValue, from_wire, to_json, to_wire
from areal_sc.system.durable import write_atomic
from areal_sc.user_code import user_code

MAX_COPIED_ROWS: Final = 100_000
"""Every worker holds a copied list in memory, about a kilobyte a row."""

_FEISTEL_ROUNDS = 6


class Prompts(Referable):
    """Base class of datasets that a script gives by reference; workers read the rows.

    `len()` is the number of prompts; one epoch is a seeded permutation of it. A row holds what
    `values` can send to other processes as it is; another one ends the run when it is read.
    """

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise NotImplementedError


class JsonlPrompts(Prompts):
    """Rows of a JSON Lines file, e.g. `{"prompt": "12 + 7 =", "answer": "19"}`.

    Blank lines are skipped. Rows keep all their keys.

    Raises: WorkflowError: the file is not there or has no row, or a line is no JSON object.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(os.path.expanduser(path)).absolute()
        self._rows = list(read_rows(self.path, ".jsonl"))
        if not self._rows:
            raise WorkflowError(f"empty dataset: {self.path} has no row; expected at least 1")

    def constructor_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self.path,), {}  # absolute: workers have another working directory

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self._rows[index])


class CopiedPrompts(JsonlPrompts):
    """Rows that `write_prompts` has copied; they come back equal, see `values`.

    Args:
        digest: of the file's content.
    Raises: WorkflowError: see `JsonlPrompts`; or the content is another one by now.
    """

    def __init__(self, path: Path, digest: str) -> None:
        self._digest = digest
        super().__init__(path)
        if _digest_of(path.read_bytes()) != digest:
            raise WorkflowError(f"{path} is damaged: its checksum is wrong")

    def constructor_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self.path, self._digest), {}

    def __getitem__(self, index: int) -> dict[str, Any]:
        return row_of(self._rows[index], f"row {index} of {self.path}")


def write_prompts(rows: Sequence[Mapping[str, Any]], folder: Path) -> CopiedPrompts:
    """Copies a list of prompts to where workers can read it. Blocks.

    The file is named by its content, so an equal list replaces the copy that an earlier start left.

    Raises: WorkflowError: it is empty, or one of them is no dict, or would not come back equal.
        OSError: the file cannot be written.
    """
    kind = type(rows).__name__
    wires = (row_to_wire(row, index, kind) for index, row in enumerate(rows))
    content = b"".join(to_json(wire) + b"\n" for wire in wires)
    digest = _digest_of(content)
    path = folder / f"prompts-{digest}.jsonl"
    write_atomic(path, content)
    return CopiedPrompts(path, digest)


def _digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def row_to_wire(row: Any, index: int, kind: str) -> dict[str, Any]:
    """What JSON can hold of row `index` of a dataset of this kind: other processes get that.

    Raises: WorkflowError: it is not a dict, or would not come back equal; names the value.
    """
    where = f"row {index} of the dataset ({kind})"
    if not isinstance(row, Mapping):
        raise WorkflowError(
            f'{where} is a {type(row).__name__}: expected a dict such as {{"prompt": "...", '
            '"answer": "..."}'
        )
    with user_code(where):
        try:
            wire: dict[str, Any] = to_wire(with_pictures(dict(row)))
            return wire
        except UnfitValue as error:
            raise WorkflowError(f"{where}: {error.located('')}") from None
        except WorkflowError as error:
            raise WorkflowError(f"{where}: {error}") from error


def row_of(wire: Any, where: str) -> dict[str, Any]:
    """Inverse of `row_to_wire`; each call makes another row.

    Raises: WorkflowError: another version of areal_sc wrote it.
    """
    try:
        row: dict[str, Any] = from_wire(wire)
    except MALFORMED as error:
        raise WorkflowError(
            f"{where} was written by another version of areal_sc ({error}): go on with that one, "
            "or start another run"
        ) from error
    return row


def prompt_at(position: int, length: int, seed: int) -> int:
    """Index of the prompt taken at `position`, counted from 0 over all epochs.

    Each epoch of `length` positions takes every prompt once, in an order of its own. A pure
    function in constant memory, also for a dataset of 2^31 prompts: a Feistel network permutes
    the next power of four, and cycle walking stays below `length`.

    Raises: ValueError: position < 0 or length < 1.
    """
    if position < 0 or length < 1:
        raise ValueError(f"expected position >= 0 and length >= 1, got {position} and {length}")
    epoch, index = divmod(position, length)
    half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
    key = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=16).digest()
    while True:
        index = _permuted(index, half_bits, key)
        if index < length:
            return index


def _permuted(value: int, half_bits: int, key: bytes) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for round_number in range(_FEISTEL_ROUNDS):
        digest = hashlib.blake2b(
            right.to_bytes(8, "little"), key=key, salt=bytes([round_number]), digest_size=8
        ).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return (left << half_bits) | right
