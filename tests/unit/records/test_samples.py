"""Texts for people."""

from __future__ import annotations

from areal_sc.records.samples import shortened


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    assert shortened("x" * 20, 20) == "x" * 20
    assert shortened("a" * 500 + "b" * 501, 20) == f"{'a' * 10} [... 981 characters ...] {'b' * 10}"
