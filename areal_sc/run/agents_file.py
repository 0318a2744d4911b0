"""`agents.json` of a run folder: where agents outside find the run, and with which key."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from areal_sc.errors import RunFolderError
from areal_sc.system.durable import replace_file
from areal_sc.system.os_errors import os_errors_as


class AgentsFile(msgspec.Struct, frozen=True):
    """What the file says, which is for its owner alone.

    Attributes:
        url: of the run's address, as clients of OpenAI take it.
        key: whoever has it claims episodes there.
    """

    url: str
    key: str

    @classmethod
    def read(cls, path: Path) -> AgentsFile | None:
        """None: there is none that can be read."""
        with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return msgspec.json.decode(path.read_bytes(), type=cls)
        return None

    @property
    def port(self) -> int:
        """0: it says none."""
        with suppress(ValueError):
            return urlsplit(self.url).port or 0
        return 0

    def write(self, path: Path) -> None:
        """Raises: RunFolderError: it cannot be written."""
        cannot = os_errors_as(RunFolderError, f"cannot write {path}")
        with cannot, replace_file(path, mode=0o600) as file:
            file.write(msgspec.json.encode(self))
