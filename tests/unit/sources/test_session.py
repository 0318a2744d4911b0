"""What a notebook defined, as a module: with all that it uses, and nothing else."""

from __future__ import annotations

import asyncio
import linecache
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_sc import SingleTurnWorkflow
from areal_sc.errors import WorkflowError
from areal_sc.sources.session import session_module
from areal_sc.workflows.registry import SourceReader, SourceRegistry

RunCell = Callable[..., None]


@pytest.fixture
def run_cell(monkeypatch: pytest.MonkeyPatch) -> RunCell:
    """Runs text in a `__main__` without a file, and keeps it as a notebook does."""
    main = types.ModuleType("__main__")
    cells: list[str] = [""]
    vars(main)["In"] = cells
    monkeypatch.setitem(sys.modules, "__main__", main)

    def run(text: str, *, fails: bool = False) -> None:
        name = f"/tmp/ipykernel_0/{hash(text)}.py"
        monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(True), name))
        cells.append(text)
        if fails:
            with pytest.raises(ZeroDivisionError):
                exec(compile(text, name, "exec", dont_inherit=True), vars(main))
        else:
            exec(compile(text, name, "exec", dont_inherit=True), vars(main))

    return run


def copied(*names: str) -> dict[str, Any]:
    """The namespace of the module, made from nothing."""
    module = types.ModuleType("copy_of_session")
    sys.modules[module.__name__] = module  # dataclasses look it up
    try:
        exec(compile(session_module(names), "<copy>", "exec", dont_inherit=True), vars(module))
    finally:
        del sys.modules[module.__name__]
    return vars(module)


def test_a_reward_comes_with_all_that_it_uses_and_nothing_else(run_cell: RunCell) -> None:
    run_cell(
        "import re, os.path as paths\nfrom string import *\nfrom math import (sqrt as root)\n"
        "import xml.dom\n"
    )
    run_cell("import xml.sax\nimport smtplib\nPATTERN = re.compile('a+', re.I)\nSCALE = {'x': 2.0}")
    run_cell("def unused():\n    return nowhere\n\nraised = []\nraised.append(1 / 1)\n")
    run_cell(
        "def half(x):\n    return double(x) / 4 if x else 0\n\n"
        "def double(x, *, by=SCALE['x']):\n    return half(0) + by * x\n"
    )
    run_cell(
        "def reward(prompt: dict[str, str], completion: str) -> float:\n"
        "    found = PATTERN.match(completion)\n"
        "    unused = [SCALE for SCALE in range(3)]  # names of its own\n"
        "    assert xml.dom.Node and xml.sax.parse and paths.join\n"
        "    return half(root(4.0)) + len(found[0]) + len(digits)\n"
    )
    found = copied("reward")
    assert found["reward"]({}, "AAb") == 1.0 + 2 + 10
    assert "ascii_letters" not in found
    assert "smtplib" not in found
    assert "unused" not in found
    assert "raised" not in found


def test_classes_come_with_bases_decorators_defaults_and_their_own_kind(run_cell: RunCell) -> None:
    run_cell("import enum\nfrom dataclasses import dataclass, field\nfrom typing import Any")
    run_cell("class Color(enum.Enum):\n    red = 1\n    blue = 2\n")
    run_cell("class Base:\n    def shade(self) -> 'Color':\n        return Color.blue\n")
    run_cell(
        "@dataclass\nclass Paint(Base):\n    color: Color = Color.red\n"
        "    names: list[Any] = field(default_factory=list)\n"
    )
    found = copied("Paint")
    paint = found["Paint"]()
    assert paint.color is found["Color"].red
    assert paint.shade() is found["Color"].blue
    assert paint == found["Paint"](found["Color"].red, [])


def test_the_definition_that_holds_is_the_one_that_is_copied(run_cell: RunCell) -> None:
    run_cell("def reward(p, c):\n    return 1.0\n")
    run_cell("LIMIT = 3\ndef reward(p, c):\n    return 2.0 * LIMIT\n")
    run_cell("1 / 0\ndef reward(p, c):\n    return 3.0\n", fails=True)
    run_cell("LIMIT += 1\n")
    assert copied("reward")["reward"]({}, "") == 8.0
    run_cell("from dataclasses import dataclass\n")
    for size in (1, 2, 1):  # the first cell once more
        run_cell(f"@dataclass\nclass Size:\n    value: int = {size}\n")
    assert copied("Size")["Size"]().value == 1


def test_a_cell_may_hold_what_is_no_python_and_what_awaits(run_cell: RunCell) -> None:
    run_cell("import math\nasync def reward(p, c):\n    return math.pi\n")
    cells: list[str] = vars(sys.modules["__main__"])["In"]
    cells.extend(["%%html\n<b>", "await something()\nimport math\n"])
    assert asyncio.run(copied("reward")["reward"]({}, "")) == math.pi


def test_an_object_that_cannot_be_written_down_is_named(run_cell: RunCell) -> None:
    run_cell("client = object()\nscale = float('inf')\nnames = [type('Name', (str,), {})('a')]\n")
    run_cell("def inner(c):\n    return client\n\ndef reward(p, c):\n    return inner(c)\n")
    with pytest.raises(
        WorkflowError, match=r"inner uses client, .*of type object.*%%writefile rewards\.py"
    ):
        session_module(["reward"])
    run_cell("def other(p, c):\n    return names\n")
    with pytest.raises(WorkflowError, match=r"other uses names, .*list"):
        session_module(["other"])
    run_cell("def third(p, c):\n    return scale\n")
    assert copied("third")["third"]({}, "") == math.inf


def test_a_name_that_means_something_else_by_now_is_not_taken_for_what_it_was(
    run_cell: RunCell,
) -> None:
    run_cell("from fractions import Fraction as half\nhalf = half(1, 2)\ndef other(x): return x\n")
    run_cell("def reward(p, c): return half\n")
    with pytest.raises(WorkflowError, match=r"reward uses half, .*of type Fraction"):
        session_module(["reward"])
    run_cell("def half(x): return 1\n\nhalf = other\n")
    with pytest.raises(WorkflowError, match=r"reward uses half, .*of type function"):
        session_module(["reward"])


def test_a_session_without_text_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python's own prompt, and `python -c`."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile("def reward(p, c): ...", "<stdin>", "exec"), vars(main))
    with pytest.raises(WorkflowError, match=r"from rewards import reward`") as caught:
        session_module(["reward"])
    assert "`rewards.py`" in str(caught.value)


def test_workers_find_a_session_by_its_file(run_cell: RunCell, tmp_path: Path) -> None:
    run_cell("from areal_sc import SingleTurnWorkflow\nKINDS = ('a', 'b')")
    run_cell("def reward(p, c):\n    return float(c in KINDS)\n")
    run_cell(
        "class Mine(SingleTurnWorkflow):\n"
        "    def __init__(self, score, limits):\n"
        "        super().__init__(score)\n"
        "        self.limits = limits\n"
        "        assert score is reward\n"
    )
    main = vars(sys.modules["__main__"])
    registry = SourceRegistry(tmp_path, "rollout")
    first = main["Mine"](main["reward"], {"target": "__main__:reward"})
    number = registry.register_workflow(first)
    assert registry.register_workflow(main["Mine"](main["reward"], first.limits)) == number
    mine: Any = SourceReader(tmp_path).workflow(number)
    assert type(mine).__name__ == "Mine"
    assert mine.reward({}, "b") == 1.0
    assert mine.limits == first.limits  # an argument that only looks like a reference
    assert Path(sys.modules[type(mine).__module__].__file__ or "").parent == tmp_path / "sources"
    # a reward process gets it from a worker, where it has a file
    (tmp_path / "other").mkdir()
    other = SourceRegistry(tmp_path / "other", "rollout")
    assert other.register_workflow(SingleTurnWorkflow(mine.reward))
    assert not list((tmp_path / "other" / "sources").glob("*.py"))
    run_cell("KINDS = ()\n")
    assert registry.register_workflow(main["Mine"](main["reward"], first.limits)) != number
