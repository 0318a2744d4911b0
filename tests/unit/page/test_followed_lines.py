"""A file of JSON lines, read while it grows, is cut short, is replaced, or holds anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from areal_sc.page.followed_lines import FollowedLines


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines.jsonl"


def followed(path: Path) -> FollowedLines[dict[str, Any]]:
    return FollowedLines(path, msgspec.json.Decoder(dict[str, Any]).decode)


def new(lines: FollowedLines[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*lines.read_new()]


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def test_only_what_is_new_and_whole_is_read(path: Path) -> None:
    lines = followed(path)
    assert new(lines) == []
    append(path, b'{"a": 1}\n{"a": 2}\n{"a"')
    assert new(lines) == [{"a": 1}, {"a": 2}]
    assert "the last 4 bytes are left out" in lines.damage[0]
    append(path, b": 3}\n")
    assert new(lines) == [{"a": 3}]
    assert new(lines) == lines.damage == []
    assert lines.num_begun == 1


def test_a_line_that_is_longer_than_what_is_read_at_once(path: Path) -> None:
    long = "ü" * 5_000_000
    append(path, f'{{"a": 1}}\n\n{{"b": "{long}"}}\n{{"c": 3}}\n'.encode())
    assert new(followed(path)) == [{"a": 1}, {"b": long}, {"c": 3}]


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (b'{"a": 1', "line 2 is left out: Input data was truncated"),
        (b"\x00\xff{", "line 2 is left out"),
        (b"[1]", "line 2 is left out: Expected `object`, got `array`"),
        (b"", "line 2 is left out"),
    ],
)
def test_a_bad_line_is_told_and_the_others_are_read(path: Path, bad: bytes, told: str) -> None:
    append(path, b'{"a": 1}\n' + bad + b'\n{"a": 3}\n')
    lines = followed(path)
    assert new(lines) == [{"a": 1}, {"a": 3}]
    (text,) = lines.damage
    assert text.startswith(f"lines.jsonl, {told}")


def test_what_is_no_utf8_is_shown_with_a_replacement(path: Path) -> None:
    append(path, b'{"a": "x\xff\xfey"}\n')
    lines = followed(path)
    assert new(lines) == [{"a": "x\ufffd\ufffdy"}]
    assert "line 1 is no valid UTF-8" in lines.damage[0]


def test_many_bad_lines_are_counted(path: Path) -> None:
    append(path, b"x\n" * 100)
    lines = followed(path)
    assert new(lines) == []
    assert lines.damage[-1] == "lines.jsonl: 95 more such lines"
    assert len(lines.damage) == 6


@pytest.mark.parametrize("is_longer", [False, True])
def test_a_file_that_took_its_place_is_read_from_its_beginning(path: Path, is_longer: bool) -> None:
    append(path, b'{"a": 1}\n{"a": 2}\n')
    lines = followed(path)
    new(lines)
    path.unlink()
    append(path, b'{"b": 1}\n' * (9 if is_longer else 1))
    assert new(lines) == [{"b": 1}] * (9 if is_longer else 1)
    assert lines.num_begun == 2


def test_a_file_that_is_gone_holds_nothing(path: Path) -> None:
    append(path, b'{"a": 1}\n')
    lines = followed(path)
    new(lines)
    path.unlink()
    assert new(lines) == []
    assert (lines.num_begun, lines.num_bytes) == (2, 0)


def test_what_is_no_file_is_told(path: Path) -> None:
    path.mkdir()
    lines = followed(path)
    assert new(lines) == []
    assert lines.damage == ["lines.jsonl cannot be read: Is a directory"]
