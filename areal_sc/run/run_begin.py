"""What a run was begun with: settings, datasets, code and models, by name and content.

The file `begun.json` of a run folder keeps what each of them was when it was first seen. A later
start compares with that, not with the start before it: what has changed once stays changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from areal_sc.errors import RunFolderError
from areal_sc.run.run_marker import SHA256, digest_of
from areal_sc.system.durable import os_errors_as, write_atomic

SETTINGS: Final = "settings"
MAX_HASHED_BYTES: Final = 64 << 20
"""Each start waits for it. Larger files, and the largest ones of a folder with more in it, are
compared by their size."""
MAX_FILES: Final = 10_000
"""Most files of a folder that are compared one by one; of a folder with more, their number is."""

_one_compares: Final = threading.Lock()
"""Datasets are registered by several threads."""

_logger = logging.getLogger(__name__)


class RunBegin:
    """The file; construct it anywhere. Damaged, it counts as not written yet, with a warning."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def noted(self, name: str) -> dict[str, str] | None:
        """What was noted of it; None: nothing yet. Raises: RunFolderError: it cannot be read."""
        found = self._read().get(name)
        return dict(found) if isinstance(found, dict) else None

    def note_begin(self, now: Mapping[str, Mapping[str, str]]) -> None:
        """Args: now: name -> facts. Raises: RunFolderError: it cannot be read, or written."""
        content = {**self._read(), **now}
        sealed = json.dumps({**content, SHA256: digest_of(content)}, indent=1)
        with os_errors_as(RunFolderError, f"cannot write {self._path}"):
            write_atomic(self._path, sealed.encode())

    def compare(self, now: Mapping[str, Mapping[str, str]]) -> None:
        """Warns where something is not what it was at the begin of the run; what is new is noted.

        Args: now: name -> facts. Raises: RunFolderError: see `note`.
        """
        with _one_compares:
            noted = self._read()
            begun = {name: facts for name in now if isinstance(facts := noted.get(name), dict)}
            if new := {name: facts for name, facts in now.items() if name not in begun}:
                self.note_begin(new)
        for name, before in begun.items():
            changed = [
                f"{key} {before.get(key, '(none)')} -> {now[name].get(key, '(none)')}"
                for key in sorted({*before, *now[name]})
                if before.get(key) != now[name].get(key)
            ]
            if changed:
                _logger.warning("%s changed since the run began: %s", name, ", ".join(changed))

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self._path.read_bytes())
            if not isinstance(content, dict):
                raise ValueError("it is no JSON object")
            digest = content.pop(SHA256, None)  # an older areal_sc wrote none
            if digest not in (None, digest_of(content)):
                raise ValueError("its checksum is wrong")
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise RunFolderError(f"cannot read {self._path}: {error.strerror}") from error
        except ValueError as error:
            _logger.warning(
                "%s cannot be read (%s): what the run was begun with is not known any more",
                self._path,
                error,
            )
            return {}
        return content


def content_of(path: Path) -> dict[str, str]:
    """A file, or the files of a folder, by name and content; nothing where there is none.

    Raises: RunFolderError: one of them cannot be read.
    """
    found, left = dict[str, str](), MAX_HASHED_BYTES
    try:
        files = list(path.iterdir()) if path.is_dir() else [path]
        if len(files) > MAX_FILES:
            return {path.name: f"{len(files)} files"}
        sizes = {file: file.stat().st_size for file in files if file.is_file()}
        for file in sorted(sizes, key=lambda it: (sizes[it], it.name)):
            left -= sizes[file]
            found[file.name] = f"{sizes[file]} bytes"
            if left >= 0:
                found[file.name] = hashlib.blake2b(file.read_bytes(), digest_size=6).hexdigest()
    except OSError as error:
        raise RunFolderError(f"cannot read {error.filename}: {error.strerror}") from error
    return found
