"""Pictures of recorded rows: stored once, found by their digest, and within the records' limit."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from builders import picture
from recorded_groups import MEBI, answered, played, recorder_of, trajectory

from areal_sc.page.row_index import RowIndex
from areal_sc.records.reading import evaluated_answers, pictures, rows
from areal_sc.records.record_files import Series, record_files
from areal_sc.records.recorded_pictures import RecordedPicture
from areal_sc.sources.pictures import CONTENT_TYPES


def test_a_picture_is_stored_once_and_each_row_names_it(tmp_path: Path) -> None:
    first, second, held_out = (picture(seed) for seed in range(3))
    recorder = recorder_of(tmp_path)
    recorder.add_group(played(0, *([trajectory(it)] for it in range(8)), pictures=[first]))
    recorder.add_group(played(1, [trajectory(9)], pictures=[second, first]))
    recorder.add_group(played(2, [trajectory(10)]))
    for sample in range(3):
        its = [held_out, second]
        recorder.add_answer(answered(0, [trajectory(11)], sample=sample, pictures=its))
    recorder.close()
    content = {told.digest: it for told, it in pictures(tmp_path)}
    assert Counter(it for _, it in pictures(tmp_path)) == Counter([first, second, held_out])
    given = {0: [first], 1: [second, first], 2: []}
    for row in rows(tmp_path):
        assert [content[it.digest] for it in row.pictures] == given[row.group]
    for answer, _, _ in evaluated_answers(tmp_path):
        assert [content[it.digest] for it in answer.pictures] == [held_out, second]


@pytest.mark.parametrize("kind", CONTENT_TYPES)
def test_kind_and_size_are_those_of_the_picture(kind: str) -> None:
    content = picture(1, 21, 20, kind=kind)
    told = RecordedPicture.of(content)
    assert (told.kind, told.width, told.height, told.num_bytes) == (kind, 21, 20, len(content))
    assert str(told) == f"{kind}, 21 x 20 pixels, {len(content)} bytes"


def test_pictures_come_again_once_they_may_be_gone(tmp_path: Path) -> None:
    """Each of the newest groups finds its pictures, however often files have gone meanwhile."""
    chance, drawn = random.Random(0), [picture(seed, 61, 60) for seed in range(60)]
    assert sum(map(len, drawn)) > MEBI // 2
    recorder = recorder_of(tmp_path, max_bytes=MEBI)
    wanted = dict[str, bytes]()
    for number in range(600):
        content = chance.choice(drawn[: 5 + number // 10])
        wanted[RecordedPicture.of(content).digest] = content
        recorder.add_group(played(number, [trajectory(number)], pictures=[content]))
        if number % 100 == 99:
            recorder.flush(limit_s=60.0)
            found = {told.digest: it for told, it in pictures(tmp_path)}
            newest = max(rows(tmp_path), key=lambda it: it.group)
            assert newest.group == number
            assert found[newest.pictures[0].digest] == content
    recorder.close()
    files = record_files(tmp_path / "records")
    assert sum(it.path.stat().st_size for it in files) <= MEBI
    assert min(it.number for it in files if it.series is Series.pictures) > 1
    assert all(wanted[told.digest] == it for told, it in pictures(tmp_path))
    index = RowIndex(tmp_path / "records", tmp_path / "database", lambda: None)
    while not index.follow(1.0)["is_whole"]:
        pass
    kept = {told.digest for told, _ in pictures(tmp_path)}
    for digest, content in wanted.items():
        found_one = index.picture(digest)
        assert (found_one[1] if found_one else None) == (content if digest in kept else None)


@pytest.mark.parametrize(("keep", "groups"), [("none", [0, 4]), ("sample", [0])])
def test_groups_that_are_not_recorded_leave_no_picture(
    tmp_path: Path, keep: str, groups: list[int]
) -> None:
    drawn = [picture(seed) for seed in range(8)]
    recorder = recorder_of(tmp_path, keep=keep, groups_per_step=8)
    for number, it in enumerate(drawn):
        recorder.add_group(played(number, [trajectory(1)], pictures=[it]))
    recorder.close()
    assert [it for _, it in pictures(tmp_path)] == [drawn[number] for number in groups]
