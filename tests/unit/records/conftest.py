"""Recorders for a machine that is busy with other work."""

from __future__ import annotations

import pytest

from areal_sc.records import recorder


@pytest.fixture(autouse=True)
def patient_recorders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write all that waits when they are closed."""
    monkeypatch.setattr(recorder, "_CLOSE_LIMIT_S", 60.0)
