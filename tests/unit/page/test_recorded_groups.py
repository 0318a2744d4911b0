"""Recorded rows as the page shows them, also while they grow, and from damaged files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from recorded_groups import played, recorder_of, trajectory
from tokenizers import Tokenizer, decoders, models

from areal_sc.errors import RunFolderError
from areal_sc.page.recorded_groups import RecordedGroups, texts_of, tokenizer_of
from areal_sc.page.row_index import RowIndex
from areal_sc.page.trained_numbers import TrainedNumbers
from areal_sc.records.recorded_rows import RecordedRejection


def record(run: Path, *numbers: int) -> None:
    recorder = recorder_of(run)
    for number in numbers:
        recorder.add_group(played(number, [trajectory(number)], [trajectory(number + 100, 30)]))
    recorder.close()


class Followed(RecordedGroups):
    """The groups of a run, and the index that has their places."""

    def __init__(self, run: Path) -> None:
        self.index = RowIndex(run / "records", run / "rows.sqlite", lambda: None)
        super().__init__(self.index, TrainedNumbers(run / "records"))
        self.follow()

    def follow(self) -> None:
        self.index.follow(60.0)

    @property
    def damage(self) -> list[str]:
        return self.index.damage


def followed(run: Path) -> Followed:
    return Followed(run)


def test_numbers_and_tokens_are_what_was_recorded(tmp_path: Path) -> None:
    rejected = (RecordedRejection("timeout", "took <b>long</b>", 1),)
    recorder = recorder_of(tmp_path)
    recorder.add_group(played(3, [trajectory(1), trajectory(2, 25)], rejected=rejected))
    recorder.close()
    groups = followed(tmp_path)
    (attempt,) = groups.of_group(3)
    assert attempt["rejected"] == rejected
    assert attempt["prompt"] == "{'prompt': 'sort <script>\u202e'}"
    assert [(it["episode"], it["row"]) for it in attempt["rows"]] == [(0, 0), (0, 1)]
    assert attempt["rows"][1]["versions"] == ((3, 10), (4, 9))
    assert attempt["rows"][1]["num_interruptions"] == 1
    was = trajectory(2, 25)
    told = groups.tokens(3, 0, 0, 1, None)
    assert told is not None
    assert (told["ids"], told["mask"], told["versions"]) == (
        was.input_ids,
        was.loss_mask,
        was.versions,
    )
    np.testing.assert_allclose(told["logprobs"], was.behavior_logprobs, rtol=1e-3, atol=1e-4)
    assert told["texts"] is None
    assert groups.tokens(3, 0, 0, 2, None) is groups.tokens(3, 1, 0, 0, None) is None
    assert groups.of_group(4) == []


def test_it_follows_a_run_that_goes_on_and_ends_and_goes_on(tmp_path: Path) -> None:
    groups = followed(tmp_path)  # nothing is there yet
    assert (groups.of_group(1), groups.damage) == ([], [])
    record(tmp_path, 1)
    groups.follow()
    assert len(groups.of_group(1)) == 1
    record(tmp_path, 2, 3)
    groups.follow()
    groups.follow()
    assert [len(groups.of_group(number)) for number in (1, 2, 3)] == [1, 1, 1]
    assert groups.damage == []


def test_of_a_group_that_was_played_again_the_later_one_counts(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path)
    later = played(16, [trajectory(2)])
    recorder.add_group(replace(later, group=structs.replace(later.group, began=2000.0)))
    recorder.add_group(played(16, [trajectory(1)]))
    recorder.close()
    told = followed(tmp_path).tokens(16, 0, 0, 0, None)
    assert told is not None
    assert told["ids"] == trajectory(2).input_ids


def test_what_is_damaged_is_left_out_and_told(tmp_path: Path) -> None:
    record(tmp_path, 1, 2, 3)
    (path,) = (tmp_path / "records").iterdir()
    whole = path.read_bytes()
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 : -5])
    groups = followed(tmp_path)
    assert len(groups.of_group(1)) == 1
    assert groups.of_group(3) == []
    assert any("last" in it and "cut short" in it for it in groups.damage)
    assert groups.of_group(2) == []
    assert any("damaged" in it or "checksum" in it for it in groups.damage)


def test_what_is_gone_is_told(tmp_path: Path) -> None:
    record(tmp_path, 1)
    record(tmp_path, 2)
    groups = followed(tmp_path)
    first, _ = sorted((tmp_path / "records").iterdir())
    first.unlink()
    with pytest.raises(RunFolderError, match="gone"):
        groups.tokens(1, 0, 0, 0, None)
    assert groups.of_group(1) == []
    groups.follow()
    assert groups.damage == [
        "records: the oldest 1 files are gone: rollout workers keep records.max_bytes, each other "
        "process 256 MiB"
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    record(tmp_path, 1)
    (tmp_path / "records").chmod(0)
    groups = followed(tmp_path)
    (tmp_path / "records").chmod(0o700)
    assert "cannot be read" in groups.damage[0]


def test_a_character_of_several_tokens_stands_at_the_last_one(tmp_path: Path) -> None:
    alphabet = [f"<0x{number:02X}>" for number in range(256)]
    tokenizer = Tokenizer(models.WordLevel({it: number for number, it in enumerate(alphabet)}))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    ids = list("a\u202e€<".encode())
    assert texts_of(tokenizer, ids) == ["a", "", "", "\u202e", "", "", "€", "<"]
    damaged = texts_of(tokenizer, [255, *b"abcd", 9999, *b"ef"])
    assert damaged == ["\ufffd"] * 5 + ["", "e", "f"]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_of(tmp_path / "none", tmp_path) is not None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_of(tmp_path) is None


def test_a_byte_that_begins_no_character_leaves_the_next_token_as_it_is() -> None:
    alphabet = {f"<0x{number:02X}>": number for number in range(256)} | {"a": 256}
    tokenizer = Tokenizer(models.WordLevel(alphabet))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    assert texts_of(tokenizer, [0x41, 0xE2, 256, 256]) == ["A", "\ufffd", "a", "a"]
    assert texts_of(tokenizer, [0x0A, *"€".encode(), 256]) == ["\n", "", "", "€", "a"]
