"""Data sets of the Hugging Face hub, and files, as prompts. No torch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from string import Formatter
from typing import Any, Final

from areal_sc.errors import WorkflowError
from areal_sc.hub import is_hub_name, why_not_had
from areal_sc.workflows.prompts import JsonlPrompts

_logger = logging.getLogger(__name__)

_READERS: Final = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
"""Endings of files, and what `datasets` calls their format."""


def load_prompts(
    path: str | Path,
    *,
    name: str | None = None,
    split: str = "train",
    revision: str | None = None,
    prompt_key: str = "prompt",
    answer_key: str = "answer",
    template: str | None = None,
    streaming: bool = False,
) -> Iterable[dict[str, Any]]:
    """Prompts of a data set of the Hugging Face hub, or of a file; rows of the form
    `{"prompt": ..., "answer": ..., and all other columns}`.

    `datasets` downloads and keeps it, once a machine, with the token of `HF_TOKEN` or
    `hf auth login`; with `HF_HUB_OFFLINE=1` it asks for nothing. What it returns is a
    `datasets.Dataset`, so `.select(...)`, `.filter(...)` and `.shuffle(seed=...)` are there; the
    rows of a JSONL file are a list. Of an answer such as GSM8K's, `... #### 72`, `numeric_match`
    reads what is behind the mark.

    Args:
        path: `owner/name` on the hub, a file (.json, .jsonl, .csv, .parquet), or a folder of such.
        name: the configuration, where a data set has several: `main` of `openai/gsm8k`.
        split: also a part of one, such as `train[:1000]`.
        revision: branch, tag or commit of the hub's repository.
        prompt_key: column with the prompt, a text or a list of chat messages.
        answer_key: column with the answer; "": there is none.
        template: the prompt in place of `prompt_key`, with columns in braces:
            `"Question: {question}\\nAnswer:"`.
        streaming: the rows are read in order while the run goes on, each once, and nothing is
            downloaded beforehand.
    Raises: WorkflowError: it cannot be had, is empty, or a column is missing; says what to do.
    """
    columns = {"prompt": prompt_key} if template is None else {}
    columns |= {"answer": answer_key} if answer_key else {}
    needed = {*columns.values(), *_fields(template or "")}
    where = f"dataset {path}, split {split}"
    if str(path).endswith(".jsonl") and not streaming:
        where = f"dataset {path}"
        lines = JsonlPrompts(path)
        listed = [lines[number] for number in range(len(lines))]
        for number, row in enumerate(listed):
            _check_columns(row, needed, f"{where}: row {number}")
        return [{**row, **_renamed(row, columns, template)} for row in listed]
    rows = _load(str(path), name, split, revision, streaming, where)
    _check_columns(rows.column_names or next(iter(rows), {}), needed, where)
    if template is None and all(key == column for key, column in columns.items()):
        return rows  # type: ignore[no-any-return]
    return rows.map(_renamed, fn_kwargs={"columns": columns, "template": template})  # type: ignore[no-any-return]


def _renamed(
    row: Mapping[str, Any], columns: Mapping[str, str], template: str | None
) -> dict[str, Any]:
    """The columns of a row that workflows and rewards look for."""
    found = {key: row[column] for key, column in columns.items()}
    return found if template is None else {**found, "prompt": template.format(**row)}


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


def _check_columns(known: Iterable[str], needed: set[str], where: str) -> None:
    missing = sorted(needed - set(known))
    if missing:
        raise WorkflowError(
            f"{where} has no column {missing[0]!r}; it has {', '.join(sorted(known))}: name them "
            "by prompt_key, answer_key and template"
        )


def _load(
    path: str, name: str | None, split: str, revision: str | None, streaming: bool, where: str
) -> Any:
    """What `datasets.load_dataset` gives."""
    if find_spec("datasets") is None:
        raise WorkflowError(
            f"{where}: only JSONL files are read without the package `datasets`; "
            "`pip install areal-sc[datasets]`"
        )
    import datasets

    reader = _READERS.get(Path(path).suffix.lower())
    local = Path(path).expanduser()
    if reader is not None and local.is_file():
        source: dict[str, Any] = {"path": reader, "data_files": {"train": str(local)}}
    elif local.is_dir() or (reader is None and is_hub_name(path)):
        source = {"path": path if is_hub_name(path) else str(local), "name": name}
    else:
        raise WorkflowError(
            f"{where}: there is no such file or folder; expected one ({', '.join(_READERS)}), or a "
            "name of the hub, owner/name"
        )
    with _offline_if_away(path):
        try:
            return datasets.load_dataset(
                **source, split=split, revision=revision, streaming=streaming
            )
        except Exception as error:  # those of readers, of the hub and of the disk
            failure = error
    raise WorkflowError(f"{where}: {_why_not_loaded(failure, path, revision)}") from failure


@contextmanager
def _offline_if_away(path: str) -> Iterator[None]:
    """As with HF_HUB_OFFLINE=1 where the hub cannot be reached; `datasets` tries for 25 s."""
    import datasets
    from huggingface_hub import HfApi, constants, errors

    with ExitStack() as stack:
        if is_hub_name(path) and not constants.HF_HUB_OFFLINE:
            try:
                HfApi().dataset_info(path)
            except errors.HfHubHTTPError:  # it answers
                pass
            except Exception as error:  # those of its HTTP library
                _logger.warning(
                    "%s gives no answer, so only an earlier download is used: %r",
                    constants.ENDPOINT,
                    error,
                )
                modules: tuple[Any, ...] = (constants, datasets.config)
                for module in modules:
                    stack.callback(setattr, module, "HF_HUB_OFFLINE", module.HF_HUB_OFFLINE)
                    module.HF_HUB_OFFLINE = True
        yield


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
