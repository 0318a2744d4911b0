"""What a run was begun with, and what is told of it later."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_sc.config.ppo_settings import PPOConfig
from areal_sc.config.schema import ActorConfig, GRPOConfig, RolloutConfig
from areal_sc.run.run_begin import RunBegin, content_of
from areal_sc.run.run_folder import RunFolder
from areal_sc.trainer.snapshots import compare_with_begin


def test_what_changed_stays_changed_until_it_is_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begin = RunBegin(tmp_path / "begun.json")
    told = []
    for now in (
        {"a": "1", "b": "2"},
        {"a": "1", "c": "3"},
        {"a": "1", "c": "3"},
        {"a": "1", "b": "2"},
    ):
        caplog.clear()
        begin.compare({"thing": now})
        told.append(caplog.messages)
    change = "thing changed since the run began: b 2 -> (none), c (none) -> 3"
    assert told == [[], [change], [change], []]


def test_a_model_folder_and_a_script_that_changed_are_told_by_their_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, script = tmp_path / "model", tmp_path / "train.py"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "chat_template.jinja").write_text("a")
    script.write_text("lr = 1")
    loss = tmp_path / "begun_loss.py"
    loss.write_text("def loss(tokens): return 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(script)))
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    config = GRPOConfig(
        actor=ActorConfig(path=str(model), ppo=PPOConfig(loss="begun_loss:loss")),
        rollout=RolloutConfig(path="owner/name"),
    )
    for _ in range(2):
        compare_with_begin(folder, config)
    assert caplog.messages == []
    (model / "chat_template.jinja").write_text("b")
    (model / "added.json").write_text("{}")
    script.write_text("lr = 2")
    compare_with_begin(folder, config)
    of_model, of_script = caplog.messages
    loss.write_text("def loss(tokens): return 2")
    compare_with_begin(folder, config)
    of_loss = caplog.messages[-1]
    assert of_loss.startswith("loss begun_loss:loss changed since the run began: begun_loss.py ")
    assert of_model.startswith(f"model {model} changed since the run began: added.json (none) -> ")
    assert "chat_template.jinja" in of_model
    assert "config.json" not in of_model
    assert of_script.startswith(f"script {script} changed since the run began: train.py ")


def test_a_large_file_is_known_by_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_sc.run.run_begin.MAX_HASHED_BYTES", 3)
    (tmp_path / "a").write_bytes(b"1234")
    (tmp_path / "b").write_bytes(b"123")
    found = content_of(tmp_path)
    assert found["a"] == "4 bytes"
    assert len(found["b"]) == 12
    (tmp_path / "c").write_bytes(b"1")
    assert content_of(tmp_path)["b"] == "3 bytes", "4 are too many"
    assert len(content_of(tmp_path)["c"]) == 12
    monkeypatch.setattr("areal_sc.run.run_begin.MAX_FILES", 2)
    assert content_of(tmp_path) == {tmp_path.name: "3 files"}
    assert content_of(tmp_path / "none") == {}
