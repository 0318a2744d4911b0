"""Workflows and datasets by number: references written to the run folder, read by workers.

A worker builds the user's objects from files that this process wrote, never from what arrives on
a socket; what arrives is the file's number.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from areal_sc.errors import RunFolderError, WorkflowError
from areal_sc.run_folder import RunFolder
from areal_sc.workflows.base import Prompts, Workflow
from areal_sc.workflows.prompts import write_prompts
from areal_sc.workflows.reference import ObjectReference, Referable, reference_of, resolve

T = TypeVar("T")

PromptSource = Prompts | Sequence[Mapping[str, Any]]


class SourceRegistry:
    """Numbers the workflows and datasets that a controller was given.

    Several controllers share the folder, and copies are made in threads: a number belongs to who
    made its file.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = RunFolder(run_dir).sources
        self._numbers: dict[int, int] = {}
        self._written: dict[str, int] = {}
        self._kept: list[object] = []  # keeps ids in `_numbers` from being reused
        self._prompts: dict[int, Prompts] = {}

    def register_workflow(self, workflow: Workflow) -> int:
        """Number of the workflow; the same object gets the same number.

        Raises: WorkflowError: it cannot be built again in a worker (a lambda, a local class ...).
            RunFolderError: its file cannot be written.
        """
        if not isinstance(workflow, Workflow):
            raise WorkflowError(
                f"expected an instance of areal_sc.Workflow, got {type(workflow).__name__}"
            )
        return self._register(workflow)

    async def register_prompts_async(self, prompts: PromptSource) -> int:
        """As `register_prompts`, but copies in a thread, so that the event loop goes on.

        Raises: as `register_prompts`.
        """
        if isinstance(prompts, Prompts) or id(prompts) in self._numbers:
            return self.register_prompts(prompts)
        return await asyncio.to_thread(self.register_prompts, prompts)

    def register_prompts(self, prompts: PromptSource) -> int:
        """Number of the dataset; what is no `Prompts` is first copied to the run folder.

        Raises: WorkflowError: it is empty, too large to be copied, or cannot be built again in a
            worker. RunFolderError: its file cannot be written.
        """
        known = self._numbers.get(id(prompts))
        if known is not None:
            return known
        if isinstance(prompts, Prompts):
            dataset = prompts
        else:
            with self._new_file("prompts-{}.jsonl") as (_, path):
                dataset = write_prompts(prompts, path)
        if len(dataset) == 0:
            raise WorkflowError(
                f"the dataset {type(dataset).__name__} is empty: expected at least 1 prompt, got 0"
            )
        number = self._register(dataset)
        self._numbers[id(prompts)] = number
        self._kept.append(prompts)
        self._prompts[number] = dataset
        return number

    def prompts(self, number: int) -> Prompts:
        """The dataset of that number."""
        return self._prompts[number]

    def _register(self, source: Referable) -> int:
        if id(source) in self._numbers:
            return self._numbers[id(source)]
        wire = json.dumps(reference_of(source).to_wire(), sort_keys=True)
        if wire not in self._written:  # an equal object, made anew, is the same source
            with self._new_file("{}.json") as (number, path):
                path.write_text(wire)
            self._written[wire] = number
        self._numbers[id(source)] = self._written[wire]
        self._kept.append(source)
        return self._written[wire]

    @contextmanager
    def _new_file(self, name: str) -> Iterator[tuple[int, Path]]:
        """A number that is free, and the empty file of that number, which the block fills.

        Raises: RunFolderError: it cannot be written.
        """
        path = self._folder
        try:
            path.mkdir(parents=True, exist_ok=True)
            for number in itertools.count():
                path = self._folder / name.format(number)
                try:
                    path.touch(exist_ok=False)
                    break
                except FileExistsError:
                    continue
            yield number, path
        except OSError as error:
            raise RunFolderError(f"cannot write {path}: {error.strerror}") from error


class SourceReader:
    """A worker's side: builds each referenced object once."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = RunFolder(run_dir).sources
        self._built: dict[int, Any] = {}

    def workflow(self, number: int) -> Workflow:
        return self._get(number, Workflow)

    def prompts(self, number: int) -> Prompts:
        return self._get(number, Prompts)

    def _get(self, number: int, expected: type[T]) -> T:
        if number not in self._built:
            path = self._folder / f"{int(number)}.json"
            try:
                wire = json.loads(path.read_text())
            except FileNotFoundError:
                raise WorkflowError(f"source {number}: {path} does not exist") from None
            self._built[number] = resolve(ObjectReference.from_wire(wire))
        source = self._built[number]
        if not isinstance(source, expected):
            raise WorkflowError(
                f"source {number}: expected a {expected.__name__}, got {type(source).__name__}"
            )
        return source
