"""Exit codes: one table in the code, one for users."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal_sc.errors import (
    EXIT_CODES,
    ArealError,
    ConfigError,
    CrashLoop,
    StaleTerm,
    WorkerLost,
    exit_code_of,
)

GUIDE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


def kinds() -> list[type[ArealError]]:
    found: list[type[ArealError]] = [ArealError]
    for kind in found:
        found += kind.__subclasses__()
    return found


def test_each_code_is_in_the_table_and_in_the_guide() -> None:
    assert {kind.exit_code for kind in kinds()} <= EXIT_CODES.keys()
    in_guide = {int(code) for code in re.findall(r"^\| (\d+) \|", GUIDE.read_text(), re.MULTILINE)}
    assert in_guide == EXIT_CODES.keys() | {137}, "that of kill -9 is the kernel's"


def test_what_ends_a_run_is_told_apart() -> None:
    ends = [ConfigError("a"), WorkerLost("b"), CrashLoop("c"), StaleTerm("d"), KeyboardInterrupt()]
    codes = [exit_code_of(end) for end in (*ends, ValueError(), None)]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize(("end", "code"), [(SystemExit(3), 3), (SystemExit("why"), 1)])
def test_sys_exit_keeps_its_code(end: SystemExit, code: int) -> None:
    assert exit_code_of(end) == code


def test_of_a_group_the_first_error_counts() -> None:
    assert exit_code_of(ExceptionGroup("g", [CrashLoop("a"), ValueError("b")])) == 10
