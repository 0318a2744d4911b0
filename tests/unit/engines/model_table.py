"""The table of models in docs/models.md: read, made, and written anew by

PYTHONPATH=tests python -m unit.engines.model_table
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path

import torch
import transformers
from unit.engines.families import FAMILIES, OWN_ATTENTION, build
from unit.engines.family_check import Verdict, check

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
HEADER = (
    *("family", "class", "rows", "logits", "log-probabilities"),
    *("update", "export", "generation", "refusal"),
)
_FIRST_LINE = f"| {' | '.join(HEADER)} |"


def check_family(family: str, folder: Path) -> Verdict:
    return check(build(family), folder, "sdpa" if family in OWN_ATTENTION else "eager")


def table_row(family: str, verdict: Verdict) -> str:
    row = f"| {' | '.join((family, *astuple(verdict)))} |"
    row = re.sub(r"differ by \S+ times", "differ by … times", row)  # every machine rounds otherwise
    return re.sub(r" {2,}", " ", row)


def read_rows() -> dict[str, str]:
    """Family -> its row as it stands in the page."""
    _, _, table = PAGE.read_text(encoding="utf-8").partition(_FIRST_LINE)
    lines = table.strip().partition("\n\n")[0].splitlines()[1:]
    return {line.split("|")[1].strip(): line for line in lines}


def write_rows(rows: Mapping[str, str]) -> None:
    before, _, table = PAGE.read_text(encoding="utf-8").partition(_FIRST_LINE)
    _, _, after = table.strip().partition("\n\n")
    lines = [_FIRST_LINE, "| --- " * len(HEADER) + "|", *rows.values()]
    parts = [before + "\n".join(lines), *([after] if after else [])]
    PAGE.write_text("\n\n".join(parts).rstrip() + "\n", encoding="utf-8")


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            rows[family] = table_row(family, check_family(family, Path(folder)))
            print(rows[family], flush=True)
    write_rows(rows)


if __name__ == "__main__":
    main()
