"""Every family of models is exact beyond its limits, or refused by name, as docs/models.md says."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.engines.families import FAMILIES
from unit.engines.model_table import check_family, read_cells, told


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_as_the_table_says(family: str, tmp_path: Path) -> None:
    assert told(check_family(family, tmp_path)) == read_cells().get(family)


def test_the_table_has_no_other_families() -> None:
    assert read_cells().keys() == FAMILIES.keys()
