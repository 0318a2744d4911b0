"""Collects what the parts of `gpu.sh` have left in a folder: `summary.json`, and a line a number.

python benchmarks/gpu_summary.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def summary(folder: Path) -> dict[str, Any]:
    """Exit codes and metrics of the parts, and what the main job has reached."""
    parts = {path.stem: int(path.read_text()) for path in sorted(folder.glob("*.status"))}
    metrics = {
        path.stem: {name: entry["value"] for name, entry in json.loads(path.read_text()).items()}
        for path in sorted(folder.glob("*.json"))
        if path.stem in parts
    }
    job = folder / "letter_sort" / "summary.json"
    return {
        "exit_codes": parts,
        "metrics": metrics,
        "letter_sort": json.loads(job.read_text()) if job.is_file() else None,
    }


def main() -> None:
    folder = Path(sys.argv[1])
    found = summary(folder)
    (folder / "summary.json").write_text(json.dumps(found, indent=1))
    for part, code in found["exit_codes"].items():
        print(f"{part}: exit code {code}")
        for name, value in found["metrics"].get(part, {}).items():
            print(f"    {name} {value:.4g}")


if __name__ == "__main__":
    main()
