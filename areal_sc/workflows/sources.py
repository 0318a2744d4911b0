"""Workflows and datasets by number: references written to the run folder, read by workers.

A worker builds the user's objects from files that this process wrote, never from what arrives on
a socket; what arrives is the file's number.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from areal_sc.durable import write_atomic
from areal_sc.errors import RunFolderError, WorkflowError
from areal_sc.run_folder import RunFolder
from areal_sc.workflows.base import Prompts, Workflow
from areal_sc.workflows.prompts import write_prompts
from areal_sc.workflows.reference import (
    ObjectReference,
    Referable,
    reference_of,
    references_in,
    resolve,
)
from areal_sc.workflows.session import SESSION, session_module

T = TypeVar("T")

PromptSource = Prompts | Sequence[Mapping[str, Any]]


class SourceRegistry:
    """Numbers the workflows and datasets that a controller was given.

    Equal sources have the same number, a hash of their reference, so controllers and restarts of
    the script can share the folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = RunFolder(run_dir).sources
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []  # keeps ids in `_numbers` from being reused
        self._prompts: dict[int, Prompts] = {}

    def register_workflow(self, workflow: Workflow) -> int:
        """Number of the workflow; an equal one gets the same number.

        Raises: WorkflowError: it cannot be built again in a worker (a lambda, a local class ...).
            RunFolderError: its file cannot be written.
        """
        if not isinstance(workflow, Workflow):
            raise WorkflowError(
                f"expected an instance of areal_sc.Workflow, got {type(workflow).__name__}"
            )
        if id(workflow) not in self._numbers:
            self._keep(workflow, self._write(workflow))
        return self._numbers[id(workflow)]

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
        if id(prompts) not in self._numbers:
            dataset = prompts if isinstance(prompts, Prompts) else self._copy(prompts)
            if len(dataset) == 0:
                kind = type(dataset).__name__
                raise WorkflowError(f"the dataset {kind} is empty: expected at least 1 prompt")
            number = self._write(dataset)
            self._prompts[number] = dataset
            self._keep(prompts, number)
        return self._numbers[id(prompts)]

    def prompts(self, number: int) -> Prompts:
        """The dataset of that number."""
        return self._prompts[number]

    def _keep(self, source: object, number: int) -> None:
        self._kept.append(source)
        self._numbers[id(source)] = number

    def _copy(self, rows: Sequence[Mapping[str, Any]]) -> Prompts:
        path = self._folder / f"prompts-{secrets.token_hex(8)}.jsonl"
        with _writing(path):
            return write_prompts(rows, path)

    def _write(self, source: Referable) -> int:
        reference = reference_of(source).to_wire()
        self._write_session(list(references_in(reference)))
        wire = json.dumps(reference, sort_keys=True).encode()
        number = int.from_bytes(hashlib.blake2b(wire, digest_size=6).digest())
        path = self._folder / f"{number}.json"
        with _writing(path):
            write_atomic(path, wire)
        return number

    def _write_session(self, references: list[dict[str, Any]]) -> None:
        """Makes those to a notebook or REPL lead to a module that has its definitions."""
        defined_here = [r for r in references if r["target"].startswith(f"{SESSION}:")]
        if not defined_here:
            return
        names = [r["target"].removeprefix(f"{SESSION}:") for r in defined_here]
        text = session_module(name.partition(".")[0] for name in names).encode()
        path = self._folder / f"session_{hashlib.blake2b(text, digest_size=6).hexdigest()}.py"
        with _writing(path):
            write_atomic(path, text)
        for reference, name in zip(defined_here, names, strict=True):
            reference["target"] = f"{path}:{name}"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Makes the folder of a file that the block writes.

    Raises: RunFolderError: one of them cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
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
