"""Workflows, datasets, functions by number: references in the run folder, which workers read.

A worker builds the user's objects from files that this process wrote, never from what arrives on
a socket; what arrives is the file's number.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from areal_sc.algorithms.named_loss import NamedLoss
from areal_sc.algorithms.token_function import TokenFunction
from areal_sc.errors import RunFolderError, WorkflowError
from areal_sc.run.named_paths import Contents, name_path
from areal_sc.run.run_begin import RunBegin, content_of
from areal_sc.run.run_folder import RunFolder
from areal_sc.sources.prompts import MAX_COPIED_ROWS, CopiedPrompts, Prompts, write_prompts
from areal_sc.sources.reference import (
    ObjectReference,
    Referable,
    is_always_importable,
    reference_of,
    resolve,
    written_reference,
)
from areal_sc.sources.reference_paths import (
    code_files,
    code_folders,
    data_paths,
    moved,
    named_files,
)
from areal_sc.sources.row_file import GROWING, PromptSource, RowWriter, WrittenRows, num_rows_of
from areal_sc.system.durable import os_errors_as, write_atomic
from areal_sc.workflows.base import Workflow

T = TypeVar("T")

MAX_COMPARED: Final = 4
"""Datasets, and workflows, that are compared with the run's begin: a loop may make ever more."""


class SourceRegistry:
    """Numbers the workflows, datasets and functions that a controller was given.

    Equal sources have the same number, a hash of their reference, so controllers and restarts of
    the script can share the folder.

    Args:
        owner: the role of the controller.
    """

    def __init__(self, run_dir: Path, owner: str) -> None:
        self._folder = RunFolder(run_dir).sources
        self._owner = owner
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []  # keeps ids in `_numbers` from being reused
        self._num_rows: dict[int, int | None] = {}
        self._file_numbers = itertools.count()
        self._writers: dict[int, RowWriter] = {}  # of the datasets that the script reads
        self._begin_path = RunFolder(run_dir).begun_path
        self._compared: dict[str, dict[int, str]] = {}  # kind -> number -> what it is called
        self._compared_code: set[str] = set()

    def register_workflow(self, workflow: Workflow) -> int:
        """Number of the workflow; an equal one gets the same number.

        Raises: WorkflowError: it can play no episode, or cannot be built again in a worker (a
            lambda of a module, a local class ...). RunFolderError: its file cannot be written.
        """
        if not isinstance(workflow, Workflow):
            raise WorkflowError(
                f"expected an instance of areal_sc.Workflow, got {type(workflow).__name__}"
            )
        if id(workflow) not in self._numbers:
            workflow.check()
            workflow.check_group_reward()
            number = self._write(workflow)
            self._keep(workflow, number)
            self._compare("workflow", number, workflow, {})
        return self._numbers[id(workflow)]

    def register_function(self, function: NamedLoss | TokenFunction) -> int:
        """Number of a loss or a token function; an equal one gets the same number.

        Raises: ConfigError: see its `search_path`. RunFolderError: its file cannot be written.
        """
        return self._write(function, function.search_path() or None)

    async def register_prompts_async(self, prompts: PromptSource) -> int:
        """Registers like `register_prompts`, in a thread where that may block the event loop.

        Raises: the errors of `register_prompts`.
        """
        if isinstance(prompts, Prompts) or id(prompts) in self._numbers:
            return self.register_prompts(prompts)
        return await asyncio.to_thread(self.register_prompts, prompts)

    def register_prompts(self, prompts: PromptSource) -> int:
        """Number of the dataset; workers read a `Prompts`, and the script reads what is none.

        A list is copied to the run folder, unless it is very long. Blocks.

        Raises: WorkflowError: it is empty, its first row cannot be read, a row of a list is no dict
            or would not come back equal, or a worker cannot build it again. RunFolderError: its
            file cannot be written.
        """
        if id(prompts) not in self._numbers:
            num_rows = num_rows_of(prompts)
            writer: RowWriter | None = None
            if isinstance(prompts, Prompts):
                dataset: Prompts = prompts
            elif isinstance(prompts, list | tuple) and len(prompts) <= MAX_COPIED_ROWS:
                dataset = self._copy(prompts)
            else:
                # resumed scripts give the same name to the same dataset
                path = self._folder / f"{GROWING}{self._owner}-{next(self._file_numbers)}.jsonl"
                with _writing(path):
                    writer = RowWriter(prompts, path)
                dataset = WrittenRows(path)
            try:
                if writer is not None:
                    writer.write_first()
                number = self._write(dataset)
            except BaseException:
                if writer is not None:
                    writer.close()
                raise
            if writer is not None:
                self._writers[number] = writer
            self._num_rows[number] = num_rows
            self._keep(prompts, number)
            self._compare("dataset", number, dataset, {"number of rows": str(num_rows)})
        return self._numbers[id(prompts)]

    def num_rows(self, number: int) -> int | None:
        """Number of rows of the dataset of that number; None: a stream, which does not say."""
        return self._num_rows[number]

    async def make_readable(self, number: int, *indices: int) -> None:
        """Returns when workers can read these rows of the dataset.

        Raises: the errors of `RowWriter.write`.
        """
        if number in self._writers:
            await self._writers[number].write(indices)

    def close(self) -> None:
        """No dataset is read any more; what is registered afterwards is new."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
        self._numbers.clear()
        self._kept.clear()

    def _keep(self, source: object, number: int) -> None:
        self._kept.append(source)
        self._numbers[id(source)] = number

    def _compare(self, what: str, number: int, source: Referable, facts: dict[str, str]) -> None:
        """Says what of it, and of the code that it needs, is not as it was at the run's begin."""
        numbers = self._compared.setdefault(what, {})
        if number in numbers or len(numbers) == MAX_COMPARED:
            return
        wire = reference_of(source).to_wire()
        own = json.dumps(moved(wire, lambda path: Path(path).name))  # folders may move
        content = "content" if isinstance(source, CopiedPrompts) else "arguments"
        facts[content] = hashlib.blake2b(own.encode(), digest_size=6).hexdigest()
        for path in map(Path, named_files(wire)):
            if path.parent != self._folder:  # whose names say what is in it
                facts |= content_of(path)
        name = numbers[number] = f"{what} {len(numbers)} of {self._owner}"
        found = {name: facts}
        for file in sorted(code_files(wire) - self._compared_code):
            self._compared_code.add(file)
            found[f"code {file}"] = content_of(Path(file))
        RunBegin(self._begin_path).compare(found)

    def _copy(self, rows: Sequence[Any]) -> Prompts:
        with _writing(self._folder / "prompts-*.jsonl"):
            return write_prompts(rows, self._folder)

    def _write(
        self, source: Referable | NamedLoss | TokenFunction, search_path: str | None = None
    ) -> int:
        """Args: search_path: of what it names by its arguments alone; None: as it is found."""
        reference = written_reference(source, self._folder)
        reference["search_path"] = search_path or reference["search_path"]
        wire = json.dumps(reference).encode()
        number = _number_of(wire)
        path = self._folder / f"{number}.json"
        with _writing(path):
            self._name_paths(reference)
            write_atomic(path, wire)
        return number

    def name_model(self, path: str) -> None:
        """Nodes may have this folder. Raises: RunFolderError: that cannot be noted."""
        with _writing(self._folder):
            name_path(self._folder, path, Contents.all)

    def name_code(self, folder: str) -> None:
        """Nodes may have the code of this folder. Raises: as `name_model`."""
        with _writing(self._folder):
            self._name_code(folder)

    def _name_code(self, folder: str) -> None:
        if not is_always_importable(Path(folder)):
            name_path(self._folder, folder, Contents.code)

    def _name_paths(self, reference: dict[str, Any]) -> None:
        """Nodes may have what it names; they read files of the run folder as they are."""
        for folder in code_folders(reference):
            self._name_code(folder)
        for path in data_paths(reference):
            if not Path(path).is_relative_to(self._folder):
                name_path(self._folder, path, Contents.all)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Makes the folder of a file that the block writes.

    Raises: RunFolderError: one of them cannot be written.
    """
    with os_errors_as(RunFolderError, f"cannot write {path}"):
        path.parent.mkdir(exist_ok=True)  # not a run folder that was moved away
        yield


def _number_of(wire: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(wire, digest_size=6).digest())


class SourceReader:
    """A worker's side: builds each referenced object once.

    Args:
        place: from a path of the script's machine to one of this machine.

    Attributes:
        folder: `sources` of the run.
    """

    def __init__(self, run_dir: Path, place: Callable[[str], str] = str) -> None:
        self.folder = RunFolder(run_dir).sources
        self._place = place
        self._built: dict[int, Any] = {}

    def workflow(self, number: int) -> Workflow:
        return self._get(number, Workflow)

    def prompts(self, number: int) -> Prompts:
        return self._get(number, Prompts)

    def loss(self, number: int) -> NamedLoss:
        return self._get(number, NamedLoss)

    def token_function(self, number: int) -> TokenFunction:
        return self._get(number, TokenFunction)

    def _get(self, number: int, expected: type[T]) -> T:
        if number not in self._built:
            path = self.folder / f"{int(number)}.json"
            try:
                wire = path.read_bytes()
            except OSError as error:
                raise WorkflowError(f"source {number}: {path}: {error.strerror}") from None
            if _number_of(wire) != number:
                raise WorkflowError(f"source {number}: {path} is damaged: its checksum is wrong")
            reference = moved(json.loads(wire), self._here)
            self._built[number] = resolve(ObjectReference.from_wire(reference), self.folder)
        source = self._built[number]
        if not isinstance(source, expected):
            raise WorkflowError(
                f"source {number}: expected a {expected.__name__}, got {type(source).__name__}"
            )
        return source

    def _here(self, path: str) -> str:
        """Where a path of the script's machine is; the run folder may have been moved since."""
        of_run = self.folder / Path(path).name
        is_of_run = Path(path).parent.name == self.folder.name and of_run.exists()
        return str(of_run) if is_of_run else self._place(path)
