"""A start refuses what computes something else, and nothing that only rounds otherwise."""

from __future__ import annotations

import contextlib
import functools

import planted_faults
import pytest
from planted_faults import GENERATION, TRAINER, Fault
from unit.engines.families import build


def cases(faults: dict[str, Fault]) -> list[tuple[str, str]]:
    return [(name, family) for name, fault in faults.items() for family in fault.families]


@pytest.mark.parametrize(("name", "family"), cases(TRAINER))
def test_a_fault_of_packed_rows_is_not_taken(name: str, family: str) -> None:
    make = functools.partial(build, family)
    assert planted_faults.is_refused(make, TRAINER[name].plant)


@pytest.mark.parametrize(("name", "family"), cases(GENERATION))
def test_a_fault_of_generation_is_refused(name: str, family: str) -> None:
    make = functools.partial(build, family)
    assert not planted_faults.generation_is_refused(make, contextlib.nullcontext)
    assert planted_faults.generation_is_refused(make, GENERATION[name].plant)
