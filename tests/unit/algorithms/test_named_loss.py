"""A loss of the user's own: whatever it raises is told with its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal_sc.algorithms.named_loss import NamedLoss
from areal_sc.errors import ConfigError, WorkflowError

LOSS = """
def stops(tokens):
    return next(iter(()))

def exits(tokens):
    raise SystemExit("no reference model")
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        # a future of asyncio cannot hold a StopIteration: whoever waited would wait for ever
        ("stops", r"loss 'my_loss:stops' raised StopIteration at my_loss\.py:3"),
        ("exits", r"loss 'my_loss:exits' raised SystemExit: no reference model at my_loss\.py:6"),
    ],
)
def test_what_a_loss_raises_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_loss.py").write_text(LOSS)
    tokens: Any = None
    with pytest.raises(WorkflowError, match=message):
        NamedLoss(f"my_loss:{name}").load()(tokens)


def test_a_module_that_ends_its_importer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "exiting_loss.py").write_text("import sys\n\nsys.exit(3)\n")
    with pytest.raises(ConfigError, match=r"its import raised SystemExit: 3 at exiting_loss\.py:3"):
        NamedLoss("exiting_loss:loss").load()
