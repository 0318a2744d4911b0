"""Tasks of the library reasoning-gym as rows: `load_prompts("reasoning_gym:chain_sum")`. No torch.

    script ──► tasks, seeds, settings ──► a process whose hash seed is 0 ──► rows

Some tasks go through sets of texts, whose order Python's hash seed decides, and one seeds NumPy's
global generator. In a process of its own, always with the same hash seed, each task gives the same
rows for the same seed, and the script's own random numbers stay as they were. So a row cannot be
made again elsewhere: it carries all that its verifier needs.
"""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import fields
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Final

from areal_sc.errors import WorkflowError
from areal_sc.sources.shares import numbers_by_weight
from areal_sc.sources.values import UnfitValue, from_json, from_wire, to_json, to_wire

PREFIX: Final = "reasoning_gym:"
COLUMN: Final = "reasoning_gym"
"""The column with what else a verifier needs: `task`, `settings` and `metadata`."""

_START_S: Final = 300.0
_ROW_S: Final = 60.0
"""Bounds of the time that the process may take to start, and for one row; most rows take a
millisecond, those of the slowest task two seconds."""

_MAX_SAID_CHARS: Final = 2000

_NOT_OFFERED: Final = "composite"
"""The library's own mix of tasks, whose settings are objects; `load_prompts` takes a list."""


def tasks_in(path: str | Path | Sequence[str]) -> list[str] | None:
    """The names of the tasks that a path of `load_prompts` gives; None: it gives another source.

    Raises: WorkflowError: a list has something else in it, or nothing.
    """
    if isinstance(path, Path) or (isinstance(path, str) and not path.startswith(PREFIX)):
        return None
    paths = [path] if isinstance(path, str) else list(path)
    others = [it for it in paths if not str(it).startswith(PREFIX)]
    if others or not paths:
        raise WorkflowError(
            f"{paths}: expected one source, or a list of tasks of reasoning-gym, {PREFIX}TASK"
        )
    return [it.removeprefix(PREFIX) for it in paths]


def generated_rows(
    tasks: Sequence[str],
    *,
    size: int | None,
    seed: int,
    weights: Sequence[float] | None,
    settings: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
) -> list[dict[str, Any]]:
    """Rows with the columns `question`, `answer` and COLUMN; those of several tasks alternate.

    Args:
        tasks: names of the library.
        size: number of rows, of all tasks together, >= 1.
        seed: another one gives other rows.
        weights: one for each task, > 0; its share is this over the sum of all. None: all equal.
        settings: fields of the task's configuration, but for `size` and `seed`; of several tasks
            one mapping for each. None: the library's own.
    Raises: WorkflowError: an argument is out of bounds; the library is not installed, has no such
        task or setting, or cannot make the rows.
    """
    if size is None or size < 1:
        raise WorkflowError(f"size={size}: expected the number of rows, 1 or more")
    weights = [1.0] * len(tasks) if weights is None else weights
    per_task = [settings] if isinstance(settings, Mapping) else settings or [{}] * len(tasks)
    if not len(tasks) == len(weights) == len(per_task):
        raise WorkflowError(
            f"{len(tasks)} tasks, {len(weights)} weights, {len(per_task)} settings: expected one "
            "weight and one mapping of settings for each task"
        )
    for task, weight in zip(tasks, weights, strict=True):
        if not 0 < weight < math.inf:
            raise WorkflowError(f"task {task!r}: expected a finite weight above 0, got {weight}")
    check_installed()
    drawn = list(islice(numbers_by_weight(weights), size))
    wanted = [
        [task, dict(own), _library_seed(seed, number), drawn.count(number)]
        for number, (task, own) in enumerate(zip(tasks, per_task, strict=True))
    ]
    rows = [iter(rows) for rows in _made_apart(wanted, size)]
    return [next(rows[number]) for number in drawn]


def library_task(task: str, settings: Mapping[str, Any], seed: int = 0, size: int = 1) -> Any:
    """The library's generator and verifier of a task.

    Raises: WorkflowError: the library is not installed, or has no such task or setting.
    """
    check_installed()
    from reasoning_gym.factory import DATASETS, create_dataset

    names = sorted(set(DATASETS) - {_NOT_OFFERED})
    if task not in names:
        near = ", ".join(get_close_matches(task, names, n=5) or names)
        raise WorkflowError(f"{PREFIX}{task}: there is no such task; expected one such as {near}")
    known = sorted({it.name for it in fields(DATASETS[task][1])} - {"seed", "size"})
    if unknown := sorted(set(settings) - set(known)):
        raise WorkflowError(
            f"task {task!r} has no setting {unknown[0]!r}; it has {', '.join(known)}, and "
            "load_prompts itself takes size and seed"
        )
    try:
        return create_dataset(task, seed=seed, size=size, **settings)
    except Exception as error:  # assertions of the library, and what its tasks' files raise
        raise WorkflowError(
            f"task {task!r} with the settings {dict(settings)}: {type(error).__name__}: {error}"
        ) from error


def check_installed() -> None:
    """Raises: WorkflowError: the library is not there; says how to install it."""
    if find_spec("reasoning_gym") is None:
        raise WorkflowError(
            f"{PREFIX}... needs the package `reasoning-gym`; `pip install areal-sc[reasoning-gym]`"
        )


def _library_seed(seed: int, number: int) -> int:
    """The library's row i is a function of seed + i, so seeds side by side would share rows."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) % 2**31  # NumPy takes 32 bits


def _made_apart(wanted: list[list[Any]], size: int) -> list[list[dict[str, Any]]]:
    """What `_rows_of` makes of each item of `wanted`, in a process of its own."""
    try:
        asked = to_json(to_wire(wanted))
    except UnfitValue as error:
        raise WorkflowError(error.located("settings of a reasoning-gym task")) from None
    paths = [path or os.getcwd() for path in sys.path]
    limit_s = _START_S + _ROW_S * size
    try:
        finished = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", __name__],
            input=asked,
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(paths)},
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise WorkflowError(f"reasoning-gym made no {size} rows within {limit_s:g} s") from None
    if finished.returncode:
        said = finished.stderr.decode(errors="replace")[-_MAX_SAID_CHARS:]
        raise WorkflowError(
            f"reasoning-gym ended with {finished.returncode} and made no rows: {said}"
        )
    made: dict[str, Any] = from_json(finished.stdout)
    if "error" in made:
        raise WorkflowError(made["error"])
    return [[from_wire(row) for row in rows] for rows in made["rows"]]


def _rows_of(task: str, settings: dict[str, Any], seed: int, num_rows: int) -> list[dict[str, Any]]:
    """Raises: WorkflowError: see `library_task`; or one of them cannot be made."""
    generator = library_task(task, settings, seed, max(1, num_rows))
    rows = []
    for index in range(num_rows):
        try:
            entry = generator[index]
            verified = {"task": task, "settings": settings, "metadata": entry["metadata"]}
            rows.append(
                {"question": entry["question"], "answer": entry["answer"], COLUMN: verified}
            )
        except Exception as error:  # whatever its tasks raise
            raise WorkflowError(
                f"task {task!r}: row {index}: {type(error).__name__}: {error}"
            ) from error
    return rows


def main() -> None:
    """Reads what `generated_rows` wants, and writes the rows."""
    with redirect_stdout(sys.stderr):
        wanted = from_wire(from_json(sys.stdin.buffer.read()))
        try:
            made: dict[str, Any] = {"rows": [to_wire(_rows_of(*one)) for one in wanted]}
        except WorkflowError as error:
            made = {"error": str(error)}
    sys.stdout.buffer.write(to_json(made))


if __name__ == "__main__":
    main()
