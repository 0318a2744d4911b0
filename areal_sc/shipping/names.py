"""Which names that come over a socket may become paths; every other one is refused.

A name is relative, and none of its parts begins with a dot. So it cannot lead out of its folder.
What may be read of the run folder, and what may be written there, is listed here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from areal_sc.errors import NotPermitted
from areal_sc.transport.security.passes import Caller

MAX_NAME_CHARS: Final = 1000
MAX_PARTS: Final = 20
TOKEN: Final = re.compile(r"[0-9a-f]{8,64}")

_PART: Final = r"[^./\0-\x1f\x7f\\][^/\0-\x1f\x7f\\]{0,200}"
_NAME: Final = re.compile(rf"{_PART}(/{_PART}){{0,{MAX_PARTS - 1}}}")
_ENGINE: Final = r"engine(-[a-z0-9_-]{1,32})?"
_READABLE: Final = re.compile(
    rf"sources/{_PART}|checkpoints/step-[0-9]+/{_ENGINE}/{_PART}"
    rf"|{_PART}(/{_PART}){{0,{MAX_PARTS - 2}}}/adapter_(config\.json|model\.safetensors)"
)
_LISTABLE: Final = re.compile(rf"checkpoints/step-[0-9]+/{_ENGINE}")
_LOG: Final = rf"logs/{_PART}/{_PART}"
_WRITABLE: Final = re.compile(
    rf"checkpoints/\.step-[0-9]+\.partial/{_ENGINE}/{_PART}"
    rf"|exports/[a-z0-9_-]{{1,32}}/[0-9a-f]{{4,64}}/{_PART}|{_LOG}"
)
_WRITABLE_BY_GENERATORS: Final = re.compile(_LOG)


def checked_name(name: str) -> str:
    """The name, if it is one of a file below a folder. Raises: NotPermitted."""
    return _matched(_NAME, name, "no name of a file below a folder")


def readable(run_dir: Path, name: str) -> Path:
    """A file of the run folder that nodes may read. Raises: NotPermitted."""
    return run_dir / _matched(_READABLE, name, "no file of a run that nodes read")


def listable(run_dir: Path, name: str) -> Path:
    """A folder of the run that nodes may list. Raises: NotPermitted."""
    return run_dir / _matched(_LISTABLE, name, "no folder of a run that nodes list")


def writable(run_dir: Path, name: str, caller: Caller | None) -> Path:
    """A file that this worker may put into the run folder. Raises: NotPermitted."""
    pattern = _WRITABLE if caller is Caller.train else _WRITABLE_BY_GENERATORS
    return run_dir / _matched(pattern, name, "no file of a run that nodes write")


def _matched(pattern: re.Pattern[str], name: str, what: str) -> str:
    if len(name) > MAX_NAME_CHARS or not pattern.fullmatch(name):
        raise NotPermitted(f"{name[:MAX_NAME_CHARS]!r} is {what}")
    return name
