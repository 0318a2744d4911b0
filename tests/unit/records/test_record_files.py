"""The files of a process: each kind of them has its share, and none comes again under its name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from recorded_groups import MEBI

from areal_sc.page.followed_blocks import FollowedBlocks
from areal_sc.records.blocks import block
from areal_sc.records.record_files import (
    FilesOfProcess,
    Series,
    record_files,
)

BLOCK = block(b"", bytes(4000))


def files_of(folder: Path, max_bytes: int = MEBI) -> FilesOfProcess:
    return FilesOfProcess(folder, "rollout/0", max_bytes)


def test_what_is_written_most_leaves_the_others_their_share(tmp_path: Path) -> None:
    for most in Series:
        folder = tmp_path / most
        files = files_of(folder)
        for number in range(2000):
            for series in Series:
                if series is most or number % 8 == 0:
                    files.append(series, BLOCK)
        files.close()
        sizes = Counter[Series]()
        for it in record_files(folder):
            sizes[it.series] += it.path.stat().st_size
        assert sizes.total() <= MEBI
        assert min(sizes.values()) >= MEBI // 10


def test_a_file_that_another_life_has_just_deleted_takes_nothing(tmp_path: Path) -> None:
    (tmp_path / "rollout-0.rows.000001").symlink_to("gone")  # it is listed, and not there
    files = files_of(tmp_path)
    files.append(Series.rows, BLOCK)
    files.close()
    assert (tmp_path / "rollout-0.rows.000002").read_bytes() == BLOCK


def test_whoever_follows_reads_a_life_that_has_room_for_less(tmp_path: Path) -> None:
    followed = FollowedBlocks(tmp_path, (Series.rows,))
    files = files_of(tmp_path, 64 * MEBI)
    for _ in range(1000):
        files.append(Series.rows, BLOCK)
    files.close()
    assert sum(1 for _ in followed.read_new()) == 1000
    files = files_of(tmp_path)
    files.append(Series.spans, BLOCK)
    files.append(Series.rows, BLOCK)
    files.close()
    assert sum(1 for _ in followed.read_new()) == 1
