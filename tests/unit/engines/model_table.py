"""The table of models in docs/models.md: read, made, and written anew by

PYTHONPATH=tests python -m unit.engines.model_table
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from unit.engines.families import FAMILIES, OWN_ATTENTION, build
from unit.engines.family_check import Verdict, check

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
HEADER = ("families", "rows", "logits", "trainer", "`local`", "refusal")
_FIRST_LINE = f"| {' | '.join(HEADER)} |"


def check_family(family: str, folder: Path) -> Verdict:
    return check(build(family), folder, "sdpa" if family in OWN_ATTENTION else "eager")


def told(verdict: Verdict) -> str:
    """The cells of the page for a family with this verdict, behind the family's name.

    Of the refusals it is the first one's cause; the page says once what to do.
    """
    trained = (verdict.logprobs, verdict.update, verdict.export)
    trainer = trained[0] if len(set(trained)) == 1 else ", ".join(trained)
    refusal = re.split("; |, by which |, expected ", verdict.refusals)[0]
    refusal = re.sub(rf"{verdict.architecture}:? ", "", refusal)
    refusal = re.sub(r"differ by \S+ times", "differ by … times", refusal)  # as machines round
    cells = (verdict.rows, verdict.logits, trainer, verdict.generation, refusal)
    return re.sub(r" {2,}", " ", f"| {' | '.join(cells)} |")


def read_cells() -> dict[str, str]:
    """Family -> the cells of its line in the page."""
    _, _, table = PAGE.read_text(encoding="utf-8").partition(_FIRST_LINE)
    lines = table.strip().partition("\n\n")[0].splitlines()[1:]
    split = [line.removeprefix("| ").partition(" |") for line in lines]
    return {name: f"|{cells}" for names, _, cells in split for name in names.split(", ")}


def write_cells(cells: Mapping[str, str]) -> None:
    """One line for all families with the same cells."""
    before, _, table = PAGE.read_text(encoding="utf-8").partition(_FIRST_LINE)
    _, _, after = table.strip().partition("\n\n")
    families: dict[str, list[str]] = {}
    for family, told_of in cells.items():
        families.setdefault(told_of, []).append(family)
    rows = [f"| {', '.join(names)} {told_of}" for told_of, names in families.items()]
    lines = [_FIRST_LINE, "| --- " * len(HEADER) + "|", *rows]
    parts = [before + "\n".join(lines), *([after] if after else [])]
    PAGE.write_text("\n\n".join(parts).rstrip() + "\n", encoding="utf-8")


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    cells = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            cells[family] = told(check_family(family, Path(folder)))
            print(family, cells[family], flush=True)
    write_cells(cells)


if __name__ == "__main__":
    main()
