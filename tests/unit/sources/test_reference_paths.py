"""A reference on a machine where the script's files have other places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from areal_sc.sources.reference import ObjectReference, reference_of, resolve
from areal_sc.sources.reference_paths import code_folders, data_paths, moved, script_files

MODULE = """
from areal_sc.sources.reference import Referable
class Task(Referable):
    def __init__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
"""


def reference(folder: str) -> dict[str, Any]:
    """One of a script and its module, with paths at any depth."""
    of_module = ObjectReference(
        "task_elsewhere:Task", [{"$": "path", "path": f"{folder}/c"}], {}, folder
    )
    of_script = ObjectReference(
        f"{folder}/train.py:Task",
        [{"$": "path", "path": f"{folder}/a"}, [{"$": "tuple", "items": [1, "/text"]}]],
        {
            "deep": {"b": {"$": "path", "path": "/elsewhere/b"}},
            "inner": {"$": "reference", "reference": of_module.to_wire()},
        },
        folder,
    )
    return json.loads(json.dumps(of_script.to_wire()))  # type: ignore[no-any-return]


def test_all_paths_of_a_reference_are_named() -> None:
    wire = reference("/home/me")
    assert code_folders(wire) == {"/home/me"}
    assert script_files(wire) == {"/home/me/train.py"}
    assert data_paths(wire) == {"/home/me/a", "/elsewhere/b", "/home/me/c"}
    of_slurm = ObjectReference(
        "/spool/job1/slurm_script:right", search_path="/spool/job1"
    ).to_wire()
    assert data_paths(of_slurm) == {"/spool/job1/slurm_script"}, "the folder's code is `*.py`"
    installed = reference_of(Path.exists).to_wire()
    assert (code_folders(installed), script_files(installed), data_paths(installed)) == (
        *(set(), set(), set()),
    )


def test_what_was_moved_is_built_there(tmp_path: Path) -> None:
    for name in ("train.py", "task_elsewhere.py"):
        (tmp_path / name).write_text(MODULE)
    wire = reference("/home/me")
    places = {"/home/me": str(tmp_path), "/elsewhere": "/here"}

    def place(path: str) -> str:
        [root] = [it for it in places if path.startswith(it)]
        return path.replace(root, places[root], 1)

    built = resolve(ObjectReference.from_wire(moved(wire, place)))
    assert built.args == (tmp_path / "a", [(1, "/text")])
    assert built.kwargs["deep"] == {"b": Path("/here/b")}
    assert built.kwargs["inner"].args == (tmp_path / "c",)
    assert wire == reference("/home/me"), "the number of a source is that of its own paths"
    assert moved(wire, str) == wire
