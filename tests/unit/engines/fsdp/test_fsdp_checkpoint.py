"""Snapshots of one process: what they hold, when they are taken, and what is refused."""

from __future__ import annotations

import functools
import json
import logging
import os
import pickle
import random
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import engines_on, packed_rows
from random_models import random_model
from safetensors.torch import load_file

from areal_sc.algorithms.named_loss import CROSS_ENTROPY
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.engines.snapshot_model import export_snapshot
from areal_sc.engines.training.snapshot_index import FORMAT
from areal_sc.errors import CheckpointError

LENGTHS = (6, 3, 8)
WAIT_S = 60.0
Build = Callable[..., FSDPEngine]


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    random_model(vocab_size=30, tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def build(model_folder: Path) -> Iterator[Build]:
    with engines_on(model_folder) as build_engine:
        yield functools.partial(build_engine, max_tokens_per_micro_batch=32)


def train(engine: FSDPEngine, step: int) -> None:
    engine.update([packed_rows(LENGTHS, step)], CROSS_ENTROPY, step=step)


def weights(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    return {n: v.clone() for bucket in engine.gather_weights(1000) for n, v in bucket}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


class Disk:
    """A disk that takes nothing until told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_reached = threading.Event()
        self.goes_on = threading.Event()
        self._pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", self._wait)

    def _wait(self, *arguments: Any) -> int:
        self.is_reached.set()
        assert self.goes_on.wait(WAIT_S)
        return self._pwrite(*arguments)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.goes_on.set()


def test_a_snapshot_holds_the_step_it_was_begun_at(
    build: Build, slow_disk: Disk, tmp_path: Path
) -> None:
    engine = build()
    train(engine, 0)
    at_begin = weights(engine)
    random_at_begin = torch.get_rng_state()
    written = engine.begin_snapshot(tmp_path / "snapshot")
    assert slow_disk.is_reached.wait(WAIT_S)
    for step in (1, 2, 3):
        train(engine, step)
    torch.rand(5)
    assert not written.done()
    assert not (tmp_path / "snapshot").exists()
    slow_disk.goes_on.set()
    written.result(WAIT_S)
    assert [path.name for path in tmp_path.glob("*snapshot*")] == ["snapshot"]

    train(engine, 4)
    other = build()
    other.load_snapshot(tmp_path / "snapshot")
    assert_equal(weights(other), at_begin)
    assert torch.equal(torch.get_rng_state(), random_at_begin)
    for step in (1, 2, 3, 4):  # the same optimizer state, too, or they would part
        train(other, step)
    assert_equal(weights(other), weights(engine))


@pytest.mark.parametrize("second", ["begin_snapshot", "begin_save_hf"])
def test_one_write_goes_on_at_a_time(
    second: str, build: Build, slow_disk: Disk, tmp_path: Path
) -> None:
    engine = build()
    train(engine, 0)
    at_begin = weights(engine)
    first = engine.begin_snapshot(tmp_path / "first")
    assert slow_disk.is_reached.wait(WAIT_S)
    train(engine, 1)
    begun: list[Any] = []
    beginner = threading.Thread(
        target=lambda: begun.append(getattr(engine, second)(tmp_path / "second"))
    )
    beginner.start()
    beginner.join(
        0.2
    )  # would end here, with the first one's memory overwritten, if it did not wait
    assert beginner.is_alive()
    slow_disk.goes_on.set()
    first.result(WAIT_S)
    beginner.join(WAIT_S)
    begun[0].result(WAIT_S)
    other = build()
    other.load_snapshot(tmp_path / "first")
    assert_equal(weights(other), at_begin)
    assert (tmp_path / "second").is_dir()


def test_a_failed_write_is_in_its_future_and_in_the_log(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = build()
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        failed = engine.begin_snapshot(tmp_path / "file" / "snapshot")
        train(engine, 0)  # training is not concerned
        engine.begin_snapshot(tmp_path / "snapshot").result(WAIT_S)
    with pytest.raises(CheckpointError, match=r"cannot write .*file/snapshot .*NotADirectory"):
        failed.result(WAIT_S)
    assert "file/snapshot" in caplog.text
    build().load_snapshot(tmp_path / "snapshot")


def test_an_interrupted_replacement_is_made_good(build: Build, tmp_path: Path) -> None:
    """The only moment at which the folder has no content under its name."""
    engine = build()
    engine.begin_snapshot(tmp_path / "snapshot").result()
    (tmp_path / "snapshot").rename(tmp_path / ".snapshot.former")
    (tmp_path / ".snapshot.partial").mkdir()
    engine.load_snapshot(tmp_path / "snapshot")
    engine.begin_snapshot(tmp_path / "snapshot").result()
    assert [path.name for path in tmp_path.glob("*snapshot*")] == ["snapshot"]


def test_the_model_must_be_the_same(build: Build, tmp_path: Path) -> None:
    build().begin_snapshot(tmp_path / "snapshot").result()
    random_model(vocab_size=31, num_hidden_layers=3, tie_word_embeddings=False).save_pretrained(
        tmp_path / "other"
    )
    engine = build(tmp_path / "other")
    before = weights(engine)
    with pytest.raises(CheckpointError) as refused:
        engine.load_snapshot(tmp_path / "snapshot")
    message = str(refused.value)
    assert "holds another model" in message
    assert (
        "parameter.model.embed_tokens.weight is F32 [30, 32] in the snapshot and "
        "F32 [31, 32] in the model" in message
    )
    assert "model.layers.2.self_attn.q_proj.weight is absent in the snapshot" in message
    assert "more. actor.path must be the model that" in message
    assert len(message) < 1000
    assert_equal(weights(engine), before)


def test_the_model_of_a_snapshot_is_what_the_engine_would_have_written(
    build: Build, model_folder: Path, tmp_path: Path
) -> None:
    """File for file: tied weights, and what lies beside the weights, too."""
    (model_folder / "tokenizer.json").write_text("{}")
    engine = build(dtype="bfloat16")
    train(engine, 0)
    engine.begin_snapshot(tmp_path / "snapshot").result()
    engine.begin_save_hf(tmp_path / "expected").result()
    export_snapshot(engine.config, tmp_path / "snapshot", tmp_path / "found")
    found, expected = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("found", "expected")
    )
    assert found == expected
    assert {"tokenizer.json", "config.json", "model.safetensors"} <= found.keys()


def test_a_snapshot_that_gives_no_model_leaves_nothing(build: Build, tmp_path: Path) -> None:
    engine, snapshot = build(), tmp_path / "snapshot"
    engine.begin_snapshot(snapshot).result()
    random_model(vocab_size=31).save_pretrained(tmp_path / "other")
    other = replace(engine.config, path=str(tmp_path / "other"))
    with pytest.raises(CheckpointError, match=r"holds another model .* than actor\.path "):
        export_snapshot(other, snapshot, tmp_path / "found")
    flip(snapshot / "rank-0.safetensors")
    with pytest.raises(CheckpointError, match=r"rank-0\.safetensors: its checksum is wrong"):
        export_snapshot(engine.config, snapshot, tmp_path / "found")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "other", "snapshot"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)


def old_format(path: Path) -> None:
    path.write_text(json.dumps({"format": 1, "shapes": {}}))


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """An index that says something else, and has the right checksum for it."""
    content = json.loads(path.read_text())["content"]
    change(content)
    text = json.dumps(content)
    checksum = zlib.crc32(text.encode())
    path.write_text(f'{{"format": {FORMAT}, "checksum": {checksum}, "content": {text}}}')


def no_number(path: Path) -> None:
    rewrite(path, lambda content: content["files"][0].update(num_bytes="../../secret"))


def another_rank(path: Path) -> None:
    rewrite(path, lambda content: content["files"].append(content["files"][0]))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("rank-0.safetensors", cut, r"expected \d+ bytes, got \d+; it is truncated"),
        ("rank-0.safetensors", flip, "checksum is wrong"),
        ("rank-0.safetensors", Path.unlink, "FileNotFoundError"),
        ("snapshot.json", Path.unlink, r"is no snapshot: it has no snapshot\.json"),
        ("snapshot.json", cut, "content is damaged"),
        ("snapshot.json", old_format, "expected format 5, got 1"),
        ("snapshot.json", no_number, "content is damaged"),
        ("snapshot.json", another_rank, r"FileNotFoundError.*rank-1"),
    ],
)
def test_damage_is_found_before_anything_changes(
    name: str, damage: Callable[[Path], None], message: str, build: Build, tmp_path: Path
) -> None:
    engine = build()
    engine.begin_snapshot(tmp_path / "snapshot").result()
    train(engine, 0)
    before = weights(engine)
    damage(tmp_path / "snapshot" / name)
    with pytest.raises(CheckpointError, match=message):
        engine.load_snapshot(tmp_path / "snapshot")
    assert_equal(weights(engine), before)


def test_no_flipped_bit_is_loaded(build: Build, tmp_path: Path) -> None:
    """Any bit of any file: it is refused, and the engine stays as it is."""
    engine = build()
    train(engine, 0)
    engine.begin_snapshot(tmp_path / "snapshot").result()
    stored = weights(engine)
    train(engine, 1)
    before = weights(engine)
    rng = random.Random(0)
    for path in sorted((tmp_path / "snapshot").iterdir()):
        content = path.read_bytes()
        bits = range(8 * len(content))
        for bit in rng.sample(bits, min(len(bits), 400)):
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError):
                engine.load_snapshot(tmp_path / "snapshot")
        path.write_bytes(content)
    assert_equal(weights(engine), before)
    engine.load_snapshot(tmp_path / "snapshot")
    assert_equal(weights(engine), stored)


def test_nothing_is_unpickled(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("a snapshot was unpickled")

    engine = build()
    engine.begin_snapshot(tmp_path / "snapshot").result()
    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    engine.load_snapshot(tmp_path / "snapshot")
    names = {path.name for path in (tmp_path / "snapshot").iterdir()}
    assert names == {"snapshot.json", "rank-0.safetensors"}


def test_a_snapshot_without_updates_has_empty_moments(build: Build, tmp_path: Path) -> None:
    build().begin_snapshot(tmp_path / "snapshot").result()
    stored = load_file(tmp_path / "snapshot" / "rank-0.safetensors")
    moments = [values for name, values in stored.items() if name.startswith(("exp_", "step"))]
    assert moments
    assert all(values.count_nonzero() == 0 for values in moments)
    engine, fresh = build(), build()
    train(engine, 0)
    engine.load_snapshot(tmp_path / "snapshot")
    train(engine, 1)
    train(fresh, 1)
    assert_equal(weights(engine), weights(fresh))
