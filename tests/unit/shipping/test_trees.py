"""What of a path goes to nodes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from areal_sc.errors import ConfigError
from areal_sc.run.named_paths import Contents, NamedPath, find_named_path, name_path
from areal_sc.shipping import trees
from areal_sc.shipping.trees import Trees, digest_of


def write(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def names_in(root: Path, contents: Contents) -> set[str]:
    return {it.name for it in Trees().list(NamedPath(str(root), contents)).files}


def test_code_is_python_files_and_no_environment_run_or_cache(tmp_path: Path) -> None:
    code = {"train.py", "task/__init__.py", "task/rewards/math.py"}
    write(tmp_path, *code, "notes.md", "data.jsonl", ".hidden.py", ".git/hook.py")
    write(tmp_path, "venv/pyvenv.cfg", "venv/lib/x.py", "runs/1/run.json", "runs/1/sources/x.py")
    write(tmp_path, "task/__pycache__/x.py", "lib/site-packages/y.py")
    os.symlink("/etc", tmp_path / "linked")
    assert names_in(tmp_path, Contents.code) == code


def test_a_model_is_all_its_files_also_those_that_are_links(tmp_path: Path) -> None:
    write(tmp_path, "blobs/1", "model/tokenizer.json", "model/extra/x.txt", "model/.hidden")
    os.symlink("../blobs/1", tmp_path / "model" / "model.safetensors")
    os.symlink("nowhere", tmp_path / "model" / "broken")
    model = tmp_path / "model"
    listing = Trees().list(NamedPath(str(model), Contents.all))
    assert {it.name for it in listing.files} == {
        "model.safetensors",
        "tokenizer.json",
        "extra/x.txt",
    }
    [weights] = [it for it in listing.files if it.name == "model.safetensors"]
    assert weights.sha256 == hashlib.sha256(b"blobs/1").hexdigest()


def test_the_digest_is_that_of_names_and_contents(tmp_path: Path) -> None:
    known, named = Trees(), NamedPath(str(tmp_path), Contents.all)
    digests = set()
    for name, text in (("a", "1"), ("a", "2"), ("b", "2")):
        for entry in tmp_path.iterdir():
            entry.unlink()
        (tmp_path / name).write_text(text)
        digests.add(digest_of(known.list(named)))
    assert len(digests) == 3
    assert digest_of(Trees().list(named)) in digests


def test_one_file_and_nothing(tmp_path: Path) -> None:
    write(tmp_path, "x.jsonl")
    listing = Trees().list(NamedPath(str(tmp_path / "x.jsonl"), Contents.all))
    assert listing.is_file
    assert [it.name for it in listing.files] == ["x.jsonl"]
    assert Trees().list(NamedPath(str(tmp_path / "y"), Contents.all)).is_missing


def test_too_much_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a.py", "b.py", "c.py")
    for limit, said in (("MAX_CODE_BYTES", "Python files"), ("MAX_FILES", "more than 2 files")):
        with monkeypatch.context() as patch:
            patch.setattr(trees, limit, 2)
            with pytest.raises(ConfigError, match=f"{said}.* put the script, and what it imports"):
                names_in(tmp_path, Contents.code)


def test_only_paths_that_were_named_are_found(tmp_path: Path) -> None:
    name_path(tmp_path / "sources", "/models/x", Contents.all)
    name_path(tmp_path / "sources", "/models/x", Contents.all)
    assert find_named_path(tmp_path / "sources", "/models/x") == NamedPath(
        "/models/x", Contents.all
    )
    for path in ("/models", "/models/x/", "/models/x/..", "/etc/passwd", ""):
        assert find_named_path(tmp_path / "sources", path) is None
