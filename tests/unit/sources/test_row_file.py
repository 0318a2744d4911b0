"""Datasets that the script reads: huge ones, streams, and what workers could not build again."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import datasets
import pytest
from small_disk import small_disk

from areal_sc.errors import RunFolderError, WaitTimeout, WorkflowError
from areal_sc.sources import row_file
from areal_sc.sources.row_file import WrittenRows
from areal_sc.workflows.registry import SourceReader, SourceRegistry


class Squares:
    """A dataset as PyTorch knows it, with what no other process could get."""

    def __init__(self, num_rows: int = 10**9) -> None:
        self.num_rows = num_rows
        self.lock = threading.Lock()
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self.lock:
            self.read.append(index)
        if index % 10 == 7:
            raise OSError(f"row {index} is on a broken disk")
        return {"prompt": f"{index} * {index} =", "answer": str(index * index)}


class Ends(Mapping[str, Any]):
    """Raises what is no Exception, or means something else elsewhere, wherever it is called."""

    def __init__(self, where: str) -> None:
        self.where = where

    def _at(self, where: str) -> None:
        if where == self.where:
            raise SystemExit(3) if where != "row" else StopIteration("mine")

    def keys(self) -> Any:
        self._at("keys")
        return []

    def __len__(self) -> int:
        self._at("len")
        if self.where == "iter":
            raise TypeError("it has none")
        return 9

    def __getitem__(self, key: Any) -> Any:
        self._at("row")
        return self

    def __iter__(self) -> Iterator[Any]:
        self._at("iter")
        return iter([])


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("len", r"the length of the dataset \(Ends\): SystemExit: 3"),
        ("iter", r"row 0 of the dataset \(Ends\) cannot be read: SystemExit: 3"),
        ("row", r"row 0 of the dataset \(Ends\) cannot be read: StopIteration: mine"),
        ("keys", r"row 0 of the dataset \(Ends\) raised SystemExit: 3"),
    ],
)
def test_whatever_a_dataset_raises_is_told_with_its_line(
    where: str, said: str, tmp_path: Path
) -> None:
    registry = SourceRegistry(tmp_path, "rollout")
    with pytest.raises(WorkflowError, match=rf"{said} at test_row_file.py:\d+"):
        registry.register_prompts(Ends(where))


def stream(num_rows: int) -> Iterator[dict[str, Any]]:
    for index in range(num_rows):
        yield {"prompt": str(index)}


async def test_of_a_huge_dataset_only_what_is_needed_is_read(tmp_path: Path) -> None:
    squares = Squares()
    registry = SourceRegistry(tmp_path, "rollout")
    number = registry.register_prompts(squares)
    assert registry.num_rows(number) == 10**9
    await registry.make_readable(number, 999_999_999, 5, 999_999_999)
    rows = SourceReader(tmp_path).prompts(number)
    assert rows[999_999_999]["answer"] == "999999998000000001"
    await registry.make_readable(number, 12)  # after the worker has opened the file
    assert [rows[index]["answer"] for index in (12, 5)] == ["144", "25"]
    await registry.make_readable(number, 12, 5)
    assert squares.read == [0, 999_999_999, 5, 12]


async def test_a_closed_registry_reads_no_more_and_one_that_is_used_again_reads_anew(
    tmp_path: Path,
) -> None:
    registry, squares = SourceRegistry(tmp_path, "rollout"), Squares()
    for _ in range(2):
        others = set(threading.enumerate())
        number = registry.register_prompts(squares)
        await registry.make_readable(number, 5)
        assert SourceReader(tmp_path).prompts(number)[5]["answer"] == "25"
        [reading] = set(threading.enumerate()) - others
        registry.close()
        reading.join(30)
        assert not reading.is_alive()
    assert squares.read == [0, 5, 0, 5]


async def test_a_row_that_cannot_be_read_is_an_error_of_its_group_alone(tmp_path: Path) -> None:
    registry = SourceRegistry(tmp_path, "rollout")
    number = registry.register_prompts(Squares())
    await registry.make_readable(number, 16, 17, 18)
    rows = SourceReader(tmp_path).prompts(number)
    assert [rows[index]["answer"] for index in (16, 18)] == ["256", "324"]
    with pytest.raises(WorkflowError, match=r"row 17 of the dataset \(Squares\).*broken disk"):
        rows[17]


async def test_a_row_that_would_arrive_as_another_one_ends_the_run(tmp_path: Path) -> None:
    class Spans(Squares):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"span": (index, {2: b"x"}), "more": [Counter() if index == 6 else None]}

    registry = SourceRegistry(tmp_path, "rollout")
    number = registry.register_prompts(Spans())
    await registry.make_readable(number, 5)
    assert SourceReader(tmp_path).prompts(number)[5] == {"span": (5, {2: b"x"}), "more": [None]}
    with pytest.raises(WorkflowError, match=r"row 6 of the dataset \(Spans\): \['more'\]\[0\] is"):
        await registry.make_readable(number, 6)


def test_rows_of_an_older_version_are_read_or_refused_by_their_place(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"index": 0, "row": {"n": [1, {"a": null}]}}\n{"index": 1, "row": {"$": 1}}\n')
    rows = WrittenRows(path)
    assert rows[0] == {"n": [1, {"a": None}]}
    with pytest.raises(
        WorkflowError, match=r"row 1 of .*rows\.jsonl was written by another version"
    ):
        rows[1]


async def test_a_stream_gives_its_rows_in_order_and_each_once(tmp_path: Path) -> None:
    registry = SourceRegistry(tmp_path, "rollout")
    number = registry.register_prompts(stream(10))
    assert registry.num_rows(number) is None
    await asyncio.gather(*(registry.make_readable(number, index) for index in (2, 0, 1, 9)))
    rows = SourceReader(tmp_path).prompts(number)
    assert [rows[index]["prompt"] for index in range(10)] == [str(i) for i in range(10)]
    with pytest.raises(WorkflowError, match=r"ended after 10 rows, but row 12 is needed"):
        await registry.make_readable(number, 12)


async def test_a_resumed_stream_goes_on_at_its_row(tmp_path: Path) -> None:
    first = SourceRegistry(tmp_path, "rollout")
    number = first.register_prompts(stream(100))
    await first.make_readable(number, 20)
    resumed = SourceRegistry(tmp_path, "rollout")
    assert resumed.register_prompts(stream(100)) == number  # so groups of before find their rows
    await resumed.make_readable(number, 21)
    rows = SourceReader(tmp_path).prompts(number)
    assert [rows[index]["prompt"] for index in (21, 3)] == ["21", "3"]


async def test_datasets_and_controllers_have_files_of_their_own(tmp_path: Path) -> None:
    registries = [SourceRegistry(tmp_path, owner) for owner in ("train", "rollout")]
    kept = [stream(3) for _ in range(4)]
    numbers = [registries[i % 2].register_prompts(rows) for i, rows in enumerate(kept)]
    assert len(set(numbers)) == 4


async def test_a_dataset_of_hugging_face_is_used_as_it_is(tmp_path: Path) -> None:
    whole = datasets.Dataset.from_dict({"prompt": [str(i) for i in range(100)], "n": range(100)})
    registry = SourceRegistry(tmp_path, "rollout")
    chosen = whole.select(range(50, 100)).shuffle(seed=1)
    number = registry.register_prompts(chosen)
    assert registry.num_rows(number) == 50
    await registry.make_readable(number, 49)
    assert SourceReader(tmp_path).prompts(number)[49] == chosen[49]
    number = registry.register_prompts(chosen.to_iterable_dataset())
    await registry.make_readable(number, 3)
    assert SourceReader(tmp_path).prompts(number)[3] == chosen[3]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"dataset \(list\) is empty"),
        (Squares(0), r"dataset \(Squares\) is empty"),
        (stream(0), "ended after 0 rows"),
        (7, "the dataset is a int: expected a list of dicts"),
        ({"a": 1}, r"row 0 of the dataset \(dict\) cannot be read: KeyError: 0"),
        (iter(["x"]), "row 0 of the dataset .* is a str: expected a dict"),
        (iter([{"prompt": object()}]), r"row 0 of the dataset .*: \['prompt'\] is <object"),
    ],
)
def test_what_gives_no_rows_is_refused_at_once(tmp_path: Path, rows: Any, message: str) -> None:
    with pytest.raises(WorkflowError, match=message):
        SourceRegistry(tmp_path, "rollout").register_prompts(rows)


async def test_a_dataset_that_hangs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def hanging() -> Iterator[dict[str, Any]]:
        yield {"prompt": "0"}
        goes_on.wait(60)
        yield from stream(5)

    registry = SourceRegistry(tmp_path, "rollout")
    number = registry.register_prompts(hanging())
    monkeypatch.setattr(row_file, "READ_TIMEOUT_S", 0.05)
    with pytest.raises(WaitTimeout, match=r"dataset \(generator\) gave no row for .* row 1 was"):
        await registry.make_readable(number, 1)
    monkeypatch.undo()
    goes_on.set()
    await registry.make_readable(number, 2)  # whoever gave up does not stop the others


def test_a_line_that_is_being_written_is_not_read_yet(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"index": 4, "row": {"prompt": "\ud83d"}}\n{"index": 5, "r', "utf-8", "surrogatepass"
    )
    rows = WrittenRows(path)
    assert rows[4] == {"prompt": "\ud83d"}
    with pytest.raises(KeyError):
        rows[5]
    with path.open("a") as file:
        file.write('ow": {"prompt": "five"}}\n')
    assert rows[5] == {"prompt": "five"}


async def test_rows_that_changed_since_the_run_began_are_told_once_a_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Cubes(Squares):
        def __getitem__(self, index: int) -> dict[str, Any]:
            row = super().__getitem__(index)
            return row | {"answer": str(index**3)} if index > 2 else row

    told = []
    for rows in (Squares(), Squares(), Cubes(), Cubes(), Squares()):
        caplog.clear()
        registry = SourceRegistry(tmp_path, "rollout")
        number = registry.register_prompts(rows)
        await registry.make_readable(number, 2, 3, 4)
        told.append(caplog.messages)
    changed = "row 3 of the dataset (Cubes) changed since the run began, and so may others"
    assert told == [[], [], [changed], [changed], []], "with the begin, not with the last start"


async def test_another_start_goes_on_with_the_file_that_workers_read(tmp_path: Path) -> None:
    registry = SourceRegistry(tmp_path, "rollout")
    number = registry.register_prompts(Squares())
    await registry.make_readable(number, 5, 3)
    rows = SourceReader(tmp_path).prompts(number)  # a worker's, which lives on
    assert rows[5]["answer"] == "25"
    path = tmp_path / "sources" / "rows-rollout-0.jsonl"
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(b'{"index": 8, "ro')  # the script was killed

    class Cubes(Squares):
        def __getitem__(self, index: int) -> dict[str, Any]:
            row = super().__getitem__(index)
            return row | {"answer": str(index**3)} if index == 3 else row

    again = SourceRegistry(tmp_path, "rollout")
    assert again.register_prompts(Cubes()) == number
    assert path.read_bytes() == whole
    assert rows[3]["answer"] == "9", "it is there before the new script has read it"
    await again.make_readable(number, 3, 5, 8)
    assert [rows[index]["answer"] for index in (3, 5, 8)] == ["27", "25", "64"]


async def test_a_damaged_line_is_written_anew(tmp_path: Path) -> None:
    for damage in (b'{"indey": ', b'{"index"\xba '):
        with closing(SourceRegistry(tmp_path, "rollout")) as registry:
            number = registry.register_prompts(Squares())
            await registry.make_readable(number, 3, 5)
            path = next((tmp_path / "sources").glob("rows-*.jsonl"))
            rows = SourceReader(tmp_path).prompts(number)
            assert [rows[index]["answer"] for index in (3, 5)] == ["9", "25"]
        content = path.read_bytes()
        path.write_bytes(content.replace(b'{"index": ', damage, 2))


async def test_rows_that_a_full_disk_refused_come_when_there_is_room(tmp_path: Path) -> None:
    with closing(SourceRegistry(tmp_path, "rollout")) as registry:
        number = registry.register_prompts(Squares())
        with small_disk(64), pytest.raises(RunFolderError, match=r"cannot write .*File too large"):
            await registry.make_readable(number, 3)
        await registry.make_readable(number, 5)
        rows = SourceReader(tmp_path).prompts(number)
        assert [rows[index]["answer"] for index in (3, 5)] == ["9", "25"]
        thread = [it for it in threading.enumerate() if it.name == "rows of Squares"][-1]
        with small_disk(64), pytest.raises(RunFolderError):
            await registry.make_readable(number, 6)
        with small_disk(64):
            registry.close()
            thread.join(20)  # it raises nothing
