"""What the trainer says of tokens, as the page tells it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from recorded_groups import add_trained

from areal_sc.page.trained_numbers import TrainedNumbers
from areal_sc.records.blocks import block

MASK = np.array([False, True, True, False, True])
ALL = slice(0, 5)
BEGAN = 1000.5


def test_the_newest_numbers_of_a_row_count(tmp_path: Path) -> None:
    numbers, name = TrainedNumbers(tmp_path / "records"), (16, 0, 1, 0)
    assert numbers.of_row(name, MASK, ALL, BEGAN) is None
    add_trained(tmp_path, 16, {(1, 0): 3}, rank=1, step=6)
    newest = add_trained(tmp_path, 16, {(1, 0): 3}, step=7)[1, 0]
    add_trained(tmp_path, 16, {(0, 0): 7, (1, 0): 3}, rank=2, step=5)
    add_trained(tmp_path, 32, {(1, 0): 3}, step=8)
    found = numbers.of_row(name, MASK, slice(1, 5), BEGAN)
    assert found is not None
    assert found.keys() == {"step", "minibatch", "gaps", "entropies", "advantages"}
    assert (found["step"], found["minibatch"]) == (7, 0)
    gaps = np.float16(newest.gaps).astype(float).tolist()
    assert found["gaps"] == [None, pytest.approx(gaps[1], abs=1e-6), None, pytest.approx(gaps[2])]
    assert numbers.of_row((16, 0, 0, 0), MASK, ALL, BEGAN) is None, "another number of tokens"
    assert numbers.of_row(name, MASK, ALL, 1007.0) is not None
    assert numbers.of_row(name, MASK, ALL, 1007.5) is None, "another group had its number"
    assert numbers.of_row((16, 1, 1, 0), MASK, ALL, BEGAN) is None
    for path in (tmp_path / "records").glob("train-0.trained.*"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    numbers = TrainedNumbers(tmp_path / "records")
    assert numbers.of_row((32, 0, 1, 0), MASK, ALL, BEGAN) is None, "it is damaged"
    for path in (tmp_path / "records").glob("train-1.trained.*"):
        path.write_bytes(block(b"?", b""))
    numbers = TrainedNumbers(tmp_path / "records")
    assert numbers.of_row((32, 0, 1, 0), MASK, ALL, BEGAN) is None
    (told,) = numbers.damage
    assert told.startswith("train-1.trained.000001: the head of a trained row cannot be read")
