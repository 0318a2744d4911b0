"""Data sets of the Hugging Face hub, and files, as prompts. No torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack, cast, overload

from areal_sc.errors import WorkflowError
from areal_sc.hub import is_hub_name, why_not_had
from areal_sc.sources.prompt_lengths import PromptLimit
from areal_sc.sources.reasoning_gym import PREFIX, generated_rows, tasks_in
from areal_sc.sources.text_files import READERS, Row, part_of, stream_of
from areal_sc.sources.values import is_missing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_logger = logging.getLogger(__name__)

_PARQUET: Final = ".parquet"
_LEAVE_OUT: Final = "leave the row out, or give another column by prompt_key or answer_key"


class SourceWords(TypedDict, total=False):
    """What is said of a source beside its path; see `load_prompts`."""

    name: str | None
    split: str
    revision: str | None
    prompt_key: str
    answer_key: str
    template: str | None
    max_tokens: int | None
    tokenizer: PreTrainedTokenizerBase | str | None
    streaming: bool
    size: int | None
    seed: int
    weights: Sequence[float] | None
    settings: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


@overload
def load_prompts(
    path: str | Path | Sequence[str], *, num_held_out: None = ..., **words: Unpack[SourceWords]
) -> Iterable[dict[str, Any]]: ...


@overload
def load_prompts(
    path: str | Path | Sequence[str], *, num_held_out: int, **words: Unpack[SourceWords]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]: ...


def load_prompts(
    path: str | Path | Sequence[str],
    *,
    num_held_out: int | None = None,
    name: str | None = None,
    split: str = "train",
    revision: str | None = None,
    prompt_key: str = "prompt",
    answer_key: str = "answer",
    template: str | None = None,
    max_tokens: int | None = None,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    streaming: bool = False,
    size: int | None = None,
    seed: int = 0,
    weights: Sequence[float] | None = None,
    settings: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
) -> Any:
    """Prompts of a data set of the Hugging Face hub, of a file, or of tasks of reasoning-gym; rows
    of the form `{"prompt": ..., "answer": ..., and all other columns}`.

    A JSON, JSON Lines or CSV file of this machine, or a folder of such, is read as it is written,
    and its rows are a list: nothing is rounded, and every cell of a CSV is a text. Everything else
    `datasets` reads: it downloads and keeps it, once a machine, with the token of `HF_TOKEN` or
    `hf auth login`; with `HF_HUB_OFFLINE=1` it asks for nothing. What it returns is a
    `datasets.Dataset`, so `.select(...)`, `.filter(...)` and `.shuffle(seed=...)` are there. Of an
    answer such as GSM8K's, `... #### 72`, `numeric_match` reads what is behind the mark.

    Rows of reasoning-gym are a list, made here and now; `ReasoningGymReward` scores answers.

    Args:
        path: `owner/name` on the hub, a file (.json, .jsonl, .csv, .parquet), or a folder of such;
            or `reasoning_gym:TASK`, or a list of these.
        num_held_out: returns two lists, the second with so many of the last rows.
        name: the configuration, where a data set has several: `main` of `openai/gsm8k`. A file has
            none.
        split: also a part of one, such as `train[:1000]`. A file is the split `train`.
        revision: branch, tag or commit of the hub's repository; of nothing else.
        prompt_key: column with the prompt, a text or a list of chat messages; "": there is none.
        answer_key: column with the answer; "": there is none.
        template: the prompt in place of `prompt_key`, with columns in braces:
            `"Question: {question}\\nAnswer:"`.
        max_tokens: prompts of more are left out, and how many is told. A list of messages counts
            with the model's chat template around it, a text as it is. None: there is no limit.
        tokenizer: that `max_tokens` are counted by: `config.actor.path`, or a loaded one.
        streaming: the rows are read in order while the run goes on, each once, and nothing is
            downloaded beforehand.
        size: of reasoning-gym alone, as all that follows: number of rows, >= 1.
        seed: the same one gives the same rows, another one gives others.
        weights: of several tasks: > 0, one for each; None: they have equal shares.
        settings: of the task, by name; of several tasks, one such mapping for each.
    Raises: WorkflowError: it cannot be had, is empty, a column is missing, or a row has no value in
        one of these columns (null, or an empty cell of a CSV); says what to do.
    """
    if streaming and num_held_out is not None:
        raise WorkflowError(f"{path}: num_held_out: of rows that are not streamed; leave one out")
    limit = None if max_tokens is None else PromptLimit(max_tokens, tokenizer, f"dataset {path}")
    tasks = tasks_in(path)
    if tasks is not None:
        given: dict[str, Any] = {
            "name": name is not None,
            "split": split != "train",
            "revision": revision,
        }
        given |= {"prompt_key": prompt_key != "prompt", "answer_key": answer_key != "answer"}
        _refuse(given | {"streaming": streaming}, path, "data sets and files")
        rows = generated_rows(tasks, size=size, seed=seed, weights=weights, settings=settings)
        columns = {"prompt": "question"} if template is None else {}
        shape = _Shape(str(path), columns, template, {"question", *_fields(template or "")})
        made = [shape.of_row(row, number) for number, row in enumerate(rows)]
        if limit is not None:
            made = limit.of_rows(made)
        return made if num_held_out is None else _held_out(path, made, num_held_out)
    given = {"size": size is not None, "seed": seed, "weights": weights is not None}
    _refuse(
        given | {"settings": settings is not None}, path, f"tasks of reasoning-gym, {PREFIX}TASK,"
    )
    columns = {"prompt": prompt_key} if template is None and prompt_key else {}
    columns |= {"answer": answer_key} if answer_key else {}
    needed = {*columns.values(), *_fields(template or "")}
    shape = _Shape(f"dataset {path}, split {split}", columns, template, needed)
    found = _shaped(cast("str | Path", path), name, split, revision, shape, streaming=streaming)
    if limit is not None:
        if not prompt_key and template is None:
            raise WorkflowError(f"{path}: max_tokens: of rows with a prompt alone; leave it out")
        found = limit.of_rows(found)
    return found if num_held_out is None else _held_out(path, found, num_held_out)


def _refuse(given: Mapping[str, Any], path: Any, what: str) -> None:
    """Raises: WorkflowError: an argument was given that is of `what` alone."""
    if names := [name for name, is_given in given.items() if is_given]:
        raise WorkflowError(f"{path}: {', '.join(names)}: of {what} alone; leave it out")


def load_rows(
    path: str | Path | Sequence[str], *, num_held_out: int = 0, **words: Unpack[SourceWords]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows as they are, from where `load_prompts` has prompts; and the last of them, held out.

    Args:
        words: those of `load_prompts`. Unless they name columns, none is needed.
    Raises: WorkflowError: see `load_prompts`; or no row would be left.
    """
    if tasks_in(path) is None:
        words = {"prompt_key": "", "answer_key": "", **words}
    return load_prompts(path, num_held_out=num_held_out, **words)


def _held_out(
    path: Any, loaded: Iterable[dict[str, Any]], number: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Raises: WorkflowError: no row would be left."""
    rows = [dict(row) for row in loaded]
    if not 0 <= number < len(rows):
        raise WorkflowError(
            f"dataset {path}: expected 0 to {len(rows) - 1} rows to hold out of {len(rows)}, got "
            f"{number}"
        )
    return rows[: len(rows) - number], rows[len(rows) - number :]


def _shaped(
    path: str | Path,
    name: str | None,
    split: str,
    revision: str | None,
    shape: _Shape,
    *,
    streaming: bool,
) -> Iterable[dict[str, Any]]:
    local, where = Path(os.path.expanduser(path)).absolute(), shape.where
    if revision is not None and (local.exists() or not is_hub_name(str(path))):
        raise WorkflowError(f"{where}: revision={revision!r} is of data sets of the hub alone")
    splits = _text_files(local, name, where)
    if not splits:
        loaded = _load(str(path), name, split, revision, streaming, where)
        return shape.of_dataset(loaded)  # type: ignore[no-any-return]
    try:
        rows = stream_of(splits, split) if streaming else part_of(splits, split)
        first = next(rows, None)
    except WorkflowError as error:
        raise WorkflowError(f"{where}: {error}") from error
    if first is None:
        raise WorkflowError(f"{where}: empty dataset: it has no row; expected at least 1")
    shaped = map(shape.of_row, chain([first], rows), count())
    return shaped if streaming else list(shaped)


def _text_files(local: Path, name: str | None, where: str) -> Mapping[str, Sequence[Path]]:
    """Split -> files that are read as they are written; none if there are others.

    Raises: WorkflowError: a file has no configurations; a folder cannot be read.
    """
    is_text = local.suffix.lower() in READERS
    if not local.is_dir():
        if name is not None and (local.is_file() or is_text):
            raise WorkflowError(f"{where}: name={name!r} is of folders and of the hub alone")
        return {"train": [local]} if is_text else {}
    datasets = _package(where)
    try:
        found = datasets.load_dataset_builder(str(local), name=name).config.data_files or {}
    except Exception as error:  # those of its readers, and of the disk
        raise WorkflowError(f"{where}: {type(error).__name__}: {error}") from error
    splits = {str(split): [Path(file) for file in files] for split, files in found.items()}
    are_text = all(file.suffix.lower() in READERS for file in chain(*splits.values()))
    return splits if are_text else {}


@dataclass(frozen=True)
class _Shape:
    """What becomes of a row.

    Attributes:
        columns: key that workflows and rewards look for -> column.
        needed: the columns that every row has to have.
    """

    where: str
    columns: Mapping[str, str]
    template: str | None
    needed: set[str]

    def of_row(self, row: Row, number: int) -> Row:
        """Raises: WorkflowError: it lacks what is needed."""
        where = f"{self.where}: row {number}"
        self.check_columns(row, where)
        for column in sorted(self.needed):
            if is_missing(row[column]):
                raise WorkflowError(f"{where} has nothing in its column {column!r}; {_LEAVE_OUT}")
        found = {**row, **{key: row[column] for key, column in self.columns.items()}}
        return found if self.template is None else {**found, "prompt": self._filled(row, where)}

    def of_dataset(self, rows: Any) -> Any:
        """The same for a dataset of `datasets`."""
        self.check_columns(rows.column_names or next(iter(rows), {}), self.where)
        guessed = {
            column: kind.dtype
            for column, kind in (rows.features or {}).items()
            if column in self.needed and "string" not in getattr(kind, "dtype", "string")
        }
        if guessed and rows.builder_name in ("csv", "json"):
            _logger.warning(
                "%s: `datasets` has guessed the types %s from text: long numbers are rounded, 007 "
                "is 7, dates are objects. Download its files, and give load_prompts their folder, "
                "which it reads as it is written",
                self.where,
                guessed,
            )
        is_listed = hasattr(rows, "data")
        if is_listed and self.template is None and all(k == c for k, c in self.columns.items()):
            for column in sorted(self.needed):
                if rows.data.column(column).null_count:
                    number = list(rows[column]).index(None)
                    self.of_row(rows[number], number)
            return rows
        return rows.map(self.of_row, with_indices=True)

    def check_columns(self, known: Iterable[str], where: str) -> None:
        missing = sorted(self.needed - set(known))
        if missing:
            raise WorkflowError(
                f"{where} has no column {missing[0]!r}; it has {', '.join(sorted(known))}: name "
                "them by prompt_key, answer_key and template"
            )

    def _filled(self, row: Row, where: str) -> str:
        assert self.template is not None
        try:
            return _Filled().vformat(self.template, (), row)
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            raise WorkflowError(f"{where}: template {self.template!r}: {error}") from error


class _Filled(Formatter):
    """Never writes None into a prompt."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        value, first = super().get_field(field_name, args, kwargs)
        if is_missing(value):
            raise ValueError(f"there is nothing in {field_name!r}; {_LEAVE_OUT}")
        return value, first


def _package(where: str) -> Any:
    """The package `datasets`. Raises: WorkflowError: it is not installed."""
    if find_spec("datasets") is None:
        raise WorkflowError(
            f"{where}: only JSON, JSON Lines and CSV files are read without the package "
            "`datasets`; `pip install areal-sc[datasets]`"
        )
    import datasets

    return datasets


def _fields(template: str) -> set[str]:
    """Columns that a template names.

    Raises: WorkflowError: it is none.
    """
    try:
        fields = [field for _, field, _, _ in Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise WorkflowError(
            f"template {template!r}: {error}; write {{{{ and }}}} for braces that stay"
        ) from None
    return {field.partition(".")[0].partition("[")[0] for field in fields}


def _load(
    path: str, name: str | None, split: str, revision: str | None, streaming: bool, where: str
) -> Any:
    """What `datasets.load_dataset` gives."""
    datasets = _package(where)
    local = Path(os.path.expanduser(path))
    is_parquet = local.suffix.lower() == _PARQUET
    if is_parquet and local.is_file():
        source: dict[str, Any] = {"path": "parquet", "data_files": {"train": str(local)}}
    elif local.is_dir() or (not is_parquet and is_hub_name(path)):
        source = {"path": path if is_hub_name(path) else str(local), "name": name}
    else:
        endings = ", ".join([*READERS, _PARQUET])
        what = "there is no such file or folder"
        if local.exists():
            what = "the file is of no kind that is read"
        raise WorkflowError(
            f"{where}: {what}; expected one ({endings}), or a name of the hub, owner/name"
        )
    try:
        loaded = datasets.load_dataset(
            **source, split=split, revision=revision, streaming=streaming
        )
        return _with_compressed_pictures(datasets, loaded)
    except Exception as error:  # those of readers, of the hub and of the disk
        raise WorkflowError(f"{where}: {_why_not_loaded(error, path, revision)}") from error


def _with_compressed_pictures(datasets: Any, loaded: Any) -> Any:
    """The same rows, whose pictures are `{"bytes", "path"}` as they were stored, not decoded."""
    stored = datasets.Image(decode=False)
    for column, kind in (loaded.features or {}).items():
        if isinstance(kind, datasets.Image):
            loaded = loaded.cast_column(column, stored)
        elif isinstance(getattr(kind, "feature", None), datasets.Image):
            loaded = loaded.cast_column(column, type(kind)(stored))
    return loaded


def _why_not_loaded(error: Exception, path: str, revision: str | None) -> str:
    """The hub is asked once more: `datasets` wraps its answers in errors of its own."""
    from huggingface_hub import HfApi

    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if is_hub_name(path) and not isinstance(cause, ValueError):
        try:
            HfApi().auth_check(path, repo_type="dataset")
            HfApi().dataset_info(path, revision=revision)
        except Exception as refusal:
            cause = refusal
        return why_not_had(cause, path, "dataset")
    return f"{type(cause).__name__}: {cause}"
