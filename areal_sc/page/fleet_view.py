"""How a run is and who works for it, by what its folder says, and the ends of its logs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final

from areal_sc.errors import CommandError
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.verdict import steps_of, verdict

LOG_BYTES: Final = 64 << 10
"""The end of a log that is shown, in bytes."""
LINE_BYTES: Final = 1 << 10
"""The end of a log among which its last line is."""
_WARNINGS: Final = 20
_WORDS: Final = (" WARNING ", " ERROR ", " CRITICAL ")


def fleet_view(folder: RunFolder) -> dict[str, Any]:
    """State of a run, its workers, and its logs.

    Returns: `state` and `text`, of the verdict; `step`, `total_steps`; `status`, as in
        `status.json` (None: nothing that can be read); `have_workers_ended`; `snapshots`, their
        names; `logs`, with `name`, `num_bytes`, `changed` and `last`, their last line;
        `warnings`, the newest lines of the script's log, equal ones once; `now`; `damage`.
    """
    now, damage = time.time(), list[str]()
    told: dict[str, Any] = {"now": now, "state": "unknown", "text": "", "status": None}
    try:
        found = verdict(folder, now)
    except (CommandError, OSError) as error:
        damage.append(str(error))
        told |= {"have_workers_ended": False, "step": None, "total_steps": None}
    else:
        told |= {"state": found.state.value, "text": found.text}
        told["have_workers_ended"] = found.have_workers_ended
        told["status"] = found.status
        roles = {} if found.status is None else found.status.roles
        told["step"], told["total_steps"] = steps_of(roles)
        damage += [found.damage] if found.damage else []
    try:
        told["snapshots"] = [path.name for path in folder.snapshots()]
        told["logs"] = _logs(folder.logs)
        told["warnings"] = _warnings(folder.log_path("controller"))
    except OSError as error:
        damage.append(f"{error.filename} cannot be read: {error.strerror}")
    return {"snapshots": [], "logs": [], "warnings": [], **told, "damage": damage}


def log_end(folder: RunFolder, name: str) -> str | None:
    """The last whole lines of a log; None: the run has no log of that name.

    Raises: OSError: it cannot be read.
    """
    if name not in {log["name"] for log in _logs(folder.logs)}:
        return None
    return _end_of(folder.logs / name)


def _logs(folder: Path) -> list[dict[str, Any]]:
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        files = [(e.name, e.stat()) for e in entries if e.is_file(follow_symlinks=False)]
    return [
        {
            "name": name,
            "num_bytes": stat.st_size,
            "changed": stat.st_mtime,
            "last": _last_line(folder / name),
        }
        for name, stat in sorted(files)
    ]


def _last_line(path: Path) -> str:
    """ "" of a log that is empty, or cannot be read."""
    try:
        return next(iter(_end_of(path, LINE_BYTES).splitlines()[-1:]), "")
    except OSError:
        return ""


def _end_of(path: Path, num_bytes: int = LOG_BYTES) -> str:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = os.pread(file.fileno(), num_bytes, max(0, size - num_bytes))
    if size > num_bytes:
        content = content.partition(b"\n")[2] or content
    return content.decode(errors="replace")


def _warnings(path: Path) -> list[str]:
    if not path.exists():
        return []
    found: dict[str, list[str]] = {}  # what is said, without its time
    for line in _end_of(path).splitlines():
        if any(word in line for word in _WORDS):
            what = line.partition(" ")[2]
            found[what] = [*found.pop(what, []), line]
    newest = [*found.values()][-_WARNINGS:]
    return [f"{its[-1]} ({len(its)} times)" if its[1:] else its[0] for its in newest]
