"""Where a model is, on the disk, between two starts of a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_sc.controller.ledger.ledger import Ledger
from areal_sc.controller.ledger.ledger_records import LedgerState
from areal_sc.controller.train.model_place import ModelPlace, PlaceFile
from areal_sc.errors import RunFolderError
from areal_sc.system.disk import Disk


def at(lineage: int, version: int) -> Ledger:
    """The journal of a run that is there."""
    ledger = Ledger()
    ledger.go_back(lineage, LedgerState(version=version))
    return ledger


async def test_a_start_reads_what_the_one_before_has_left(tmp_path: Path) -> None:
    path = tmp_path / "histories" / "ref.json"
    first = PlaceFile(path, Disk())
    assert first.read() is None
    await first.begin(2, 0)
    await first.advance(3)
    assert PlaceFile(path, Disk()).read() == ModelPlace(2, 3)
    await first.begin_to_publish()
    await first.begin(4, 1)
    assert PlaceFile(path, Disk()).read() == ModelPlace(4, 1, is_published=True)


@pytest.mark.parametrize(
    ("place", "ledger", "version"),
    [
        (ModelPlace(2, 3), None, 3),
        (ModelPlace(2, 3), at(9, 9), 3),
        (ModelPlace(2, 3, is_published=True), at(2, 7), 7),
        (ModelPlace(2, 3, is_published=True), at(1, 7), None),
        (ModelPlace(2, 3, is_published=True), None, None),
    ],
)
def test_the_journal_counts_the_versions_that_are_published(
    place: ModelPlace, ledger: Ledger | None, version: int | None
) -> None:
    assert place.newest_version(ledger) == version


@pytest.mark.parametrize("content", [b"", b'{"lineage": 2', b'{"lineage": "2", "version": 0}'])
async def test_a_damaged_file_is_told_and_written_anew(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "train.json"
    path.write_bytes(content)
    place = PlaceFile(path, Disk())
    assert place.read() is None
    assert f"{path} cannot be read, so its model does not go on" in caplog.text
    await place.begin(5, 0)
    assert PlaceFile(path, Disk()).read() == ModelPlace(5, 0)


async def test_a_folder_in_its_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.json").mkdir()
    place = PlaceFile(tmp_path / "train.json", Disk())
    assert place.read() is None
    with pytest.raises(RunFolderError, match=r"cannot write .*train\.json"):
        await place.begin(1, 0)
