"""What a notebook defined, in a worker: with all that it uses, and nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import pickle
import stat
import subprocess
import sys
import types
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from areal_sc import SingleTurnWorkflow
from areal_sc.errors import WorkflowError
from areal_sc.sources import session
from areal_sc.sources.reference import ObjectReference, reference_of, resolve, written_reference
from areal_sc.sources.session import load_session, write_session
from areal_sc.workflows.registry import SourceReader, SourceRegistry

RunCell = Callable[..., None]


@pytest.fixture
def run_cell(monkeypatch: pytest.MonkeyPatch) -> RunCell:
    """Runs text in a `__main__` without a file, as a notebook, and Python's own prompt, do."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(session, "_loaded", {})

    def run(text: str, *, fails: bool = False) -> None:
        if fails:
            with pytest.raises(ZeroDivisionError):
                exec(compile(text, "<stdin>", "exec", dont_inherit=True), vars(main))
        else:
            exec(compile(text, "<stdin>", "exec", dont_inherit=True), vars(main))

    return run


def defined(name: str) -> Any:
    return vars(sys.modules["__main__"])[name]


def sent(folder: Path, *names: str) -> list[Any]:
    """What a worker makes of these definitions."""
    location = write_session(folder, [defined(name) for name in names])
    session._loaded.clear()  # each of them is another worker's
    return load_session(folder, location)


def test_a_reward_comes_with_all_that_it_uses_and_nothing_else(
    run_cell: RunCell, tmp_path: Path
) -> None:
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
    (reward,) = sent(tmp_path, "reward")
    assert reward({}, "AAb") == 1.0 + 2 + 10
    assert {"ascii_letters", "smtplib", "unused", "raised"}.isdisjoint(reward.__globals__)
    (file,) = tmp_path.iterdir()
    assert b"smtplib" not in file.read_bytes()


def test_classes_come_with_bases_decorators_defaults_and_their_own_kind(
    run_cell: RunCell, tmp_path: Path
) -> None:
    run_cell("import enum\nfrom dataclasses import dataclass, field\nfrom typing import Any")
    run_cell("class Color(enum.Enum):\n    red = 1\n    blue = 2\n")
    run_cell("class Base:\n    def shade(self) -> 'Color':\n        return Color.blue\n")
    run_cell(
        "@dataclass\nclass Paint(Base):\n    color: Color = Color.red\n"
        "    names: list[Any] = field(default_factory=list)\n"
    )
    paint_class, color = sent(tmp_path, "Paint", "Color")
    paint = paint_class()
    assert paint.color is color.red
    assert paint.shade() is color.blue
    assert paint == paint_class(color.red, [])


def test_the_definition_that_holds_is_the_one_that_is_sent(
    run_cell: RunCell, tmp_path: Path
) -> None:
    run_cell("def reward(p, c):\n    return 1.0\n")
    run_cell("LIMIT = 3\ndef reward(p, c):\n    return 2.0 * LIMIT\n")
    run_cell("1 / 0\ndef reward(p, c):\n    return 3.0\n", fails=True)
    run_cell("LIMIT += 1\n")
    assert sent(tmp_path, "reward")[0]({}, "") == 8.0
    run_cell("from dataclasses import dataclass\n")
    for size in (1, 2, 1):  # the first cell once more
        run_cell(f"@dataclass\nclass Size:\n    value: int = {size}\n")
    assert sent(tmp_path, "Size")[0]().value == 1


def test_lambdas_closures_and_values_that_are_not_plain_are_sent(
    run_cell: RunCell, tmp_path: Path
) -> None:
    run_cell("import math\nasync def waits(p, c):\n    return math.pi\n")
    assert asyncio.run(sent(tmp_path, "waits")[0]({}, "")) == math.pi
    run_cell("def scaled(by):\n    return lambda p, c: by * len(c)\n\ntwice = scaled(2.0)\n")
    assert sent(tmp_path, "twice")[0]({}, "abc") == 6.0
    run_cell("from fractions import Fraction as half\nhalf = half(1, 2)\ndef other(x): return x\n")
    run_cell("scale, names = float('inf'), [type('Name', (str,), {})('a')]\n")
    run_cell("def reward(p, c): return half, scale, names\n")
    assert sent(tmp_path, "reward")[0]({}, "") == (Fraction(1, 2), math.inf, ["a"])
    run_cell("def half(x): return 1\n\nhalf = other\n")
    assert sent(tmp_path, "reward")[0]({}, "")[0](7) == 7


def test_what_cannot_be_sent_is_named_with_what_to_do(run_cell: RunCell, tmp_path: Path) -> None:
    run_cell("import threading\nclient = threading.Lock()\n")
    run_cell("def inner(c):\n    return client or reward\n")
    run_cell("def reward(p, c):\n    return inner(c)\n")
    run_cell("class Mine:\n    def reward(self):\n        return client\n")
    run_cell("def by_default(p, c, lock=client): return 1.0\n")
    for name in ("reward", "Mine", "by_default"):
        told = rf"{name} cannot be sent .*lock.*%%writefile.*from rewards import {name}`"
        with pytest.raises(WorkflowError, match=told):
            write_session(tmp_path, [defined(name)])
    assert not list(tmp_path.iterdir())


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
    (file,) = (tmp_path / "sources").glob(".session_*")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    here: Any = SourceReader(tmp_path).workflow(number)  # a dry run's
    assert type(here) is main["Mine"]
    program = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from areal_sc.sources.reference import ObjectReference, resolve, written_reference\n"
        "from areal_sc.workflows.registry import SourceReader\n"
        "folder, number, wire = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])\n"
        "if wire:\n"
        "    reward = resolve(ObjectReference.from_wire(wire), folder / 'sources')\n"
        "    print(reward({}, 'b'), reward({}, 'c'))\n"
        "else:\n"
        "    mine = SourceReader(folder).workflow(number)\n"
        "    assert type(mine).__name__ == 'Mine' and mine.reward({}, 'b') == 1.0\n"
        # an argument that only looks like a reference
        "    assert mine.limits == {'target': '__main__:reward'}\n"
        "    print(json.dumps(written_reference(mine.reward, folder / 'sources')))\n"
    )

    def in_process(wire: str) -> str:
        arguments = [str(tmp_path), str(number), wire]
        return subprocess.check_output([sys.executable, "-c", program, *arguments], text=True)

    # a reward process gets it from a worker
    assert in_process(in_process("null")).split() == ["1.0", "0.0"]
    run_cell("KINDS = ()\n")
    assert registry.register_workflow(main["Mine"](main["reward"], first.limits)) != number


def test_a_worker_whose_main_module_has_a_file_passes_a_session_on(
    run_cell: RunCell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_cell("class Double:\n    def __call__(self, p, c): return 2.0\n")
    (double,) = sent(tmp_path, "Double")
    agent = types.ModuleType("__main__")
    agent.__file__ = __file__
    monkeypatch.setitem(sys.modules, "__main__", agent)
    wire = written_reference(double, tmp_path)
    session._loaded.clear()
    assert resolve(ObjectReference.from_wire(wire), tmp_path)()({}, "") == 2.0


def test_a_reference_names_a_digest_alone(run_cell: RunCell, tmp_path: Path) -> None:
    run_cell("def reward(p, c): return 1.0\n")
    wire = json.dumps(written_reference(SingleTurnWorkflow(defined("reward")), tmp_path))
    (file,) = tmp_path.iterdir()
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert file.name == f".session_{digest}"
    assert f'"session_{digest}:0"' in wire
    assert str(tmp_path) not in wire
    assert reference_of(defined("reward")).target == "__main__:reward"  # for a comparison


class Trap:
    """Says so when somebody loads it."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("it was loaded",)


def test_a_file_is_loaded_only_as_it_was_written(run_cell: RunCell, tmp_path: Path) -> None:
    run_cell("def reward(p, c): return 1.0\n")
    location = write_session(tmp_path, [defined("reward")])
    session._loaded.clear()
    (file,) = tmp_path.iterdir()
    header = file.read_bytes().partition(b"\n")[0]
    file.write_bytes(header + b"\n" + pickle.dumps([Trap()]))
    with pytest.raises(WorkflowError, match=r"is damaged: its SHA-256 is wrong"):
        load_session(tmp_path, location)
    for elsewhere in (None, tmp_path / "other"):
        with pytest.raises(WorkflowError, match=r"not share the run folder: put it into a file"):
            load_session(elsewhere, location)
    older = json.dumps(json.loads(header) | {"python": "cpython-39"}).encode()
    content = older + b"\n" + pickle.dumps([Trap()])
    location = f"session_{hashlib.sha256(content).hexdigest()}"
    (tmp_path / f".{location}").write_bytes(content)
    with pytest.raises(WorkflowError, match=r"written by cpython-39.*run cpython-.*into a file"):
        load_session(tmp_path, location)
