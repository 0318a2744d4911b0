"""What makes a folder a run's, with the settings of its newest start: `run.json`, and its copy.

    {"kind": "areal_sc run", "format_version": 5, "settings": <YAML>, "sha256": <of the rest>}

Either of the two is enough, so no damage of one file ends a run. An older areal_sc wrote the first
two entries alone, and no copy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MARKER: Final = "run.json"
COPY: Final = ".run.json"
SHA256: Final = "sha256"
_KIND: Final = "areal_sc run"


@dataclass(frozen=True)
class RunMarker:
    """What the file says.

    Attributes:
        format_version: anything at all, in a file of another areal_sc.
        settings: of the newest start, as YAML; None: the file does not say.
    """

    format_version: Any
    settings: str | None = None

    def _to_json(self) -> bytes:
        content = {"kind": _KIND, "format_version": self.format_version, "settings": self.settings}
        return json.dumps({**content, SHA256: digest_of(content)}, indent=1).encode() + b"\n"

    @classmethod
    def read(cls, folder: Path) -> RunMarker | None:
        """The marker of a folder, or its copy; None: neither is there and sound."""
        return _read(folder / MARKER) or _read(folder / COPY)

    def write(self, folder: Path, write: Callable[[str, bytes], None]) -> list[str]:
        """Marks the folder; returns what damage is made good by it.

        Args:
            write: replaces a file of the folder; what it raises is raised.
        """
        warnings = []
        for name, other in ((COPY, MARKER), (MARKER, COPY)):
            path = folder / name
            if _read(path) is None and _read(folder / other) is not None and path.exists():
                warnings.append(f"{path} was damaged; {other} is whole, and its copy")
            write(name, self._to_json())
        return warnings


def _read(path: Path) -> RunMarker | None:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    is_old = content.keys() == {"kind", "format_version"}
    digest = content.pop(SHA256, None)
    if content.get("kind") != _KIND or not (is_old or digest == digest_of(content)):
        return None
    return RunMarker(content.get("format_version"), content.get("settings"))


def digest_of(content: dict[str, Any]) -> str:
    """What stands in a JSON file for all the rest of it, so that damage is told from content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
