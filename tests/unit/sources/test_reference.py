"""Objects are named so that another process makes them again."""

from __future__ import annotations

import json
import math
import py_compile
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import msgpack
import pytest

from areal_sc.config.schema import GenerationConfig, LrSchedule
from areal_sc.errors import WorkflowError
from areal_sc.sources.reference import (
    ObjectReference,
    Referable,
    reference_of,
    resolve,
)
from areal_sc.workflows.single_turn import SingleTurnWorkflow


class Color(Enum):
    red = 1
    blue = 2


@dataclass(frozen=True)
class Inner:
    color: Color
    sizes: tuple[int, ...]


@dataclass
class Outer:
    inner: Inner
    names: list[str] = field(default_factory=list)


class Task(Referable):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs


class Bare(Referable):
    pass


@dataclass
class DataclassTask(Referable):
    weight: float
    steps: int = 3


def double(x: float) -> float:
    return 2 * x


def through_json(obj: Any) -> Any:
    wire = reference_of(obj).to_wire()
    assert msgpack.unpackb(msgpack.packb(wire)) == wire
    return resolve(ObjectReference.from_wire(json.loads(json.dumps(wire))))


# the test's own module is not importable by its name everywhere: it travels by its file, and what
# comes back belongs to another module object, so types are compared by name
def name_of(obj: Any) -> str:
    return str(type(obj).__qualname__)


def test_plain_arguments_come_back_equal() -> None:
    args = (None, True, -3, 2.5, "text", [1, [2]], (1, (2, "x")), {"a": {"b": 1}}, {1: "x"})
    again = through_json(Task(*args, path=Path("/tmp/x"), tagged={"$": "tuple"}))
    assert again.args == args
    assert [type(value) for value in again.args] == [type(value) for value in args]
    assert again.kwargs == {"path": Path("/tmp/x"), "tagged": {"$": "tuple"}}


def test_dataclasses_and_enums_come_back_as_their_type() -> None:
    config = GenerationConfig(max_new_tokens=5, stop_token_ids=[7])
    again = through_json(Task(config, schedule=LrSchedule.cosine))
    assert again.args == (config,)
    assert type(again.args[0]) is GenerationConfig
    assert again.kwargs["schedule"] is LrSchedule.cosine

    (outer,) = through_json(Task(Outer(Inner(Color.blue, (1, 2)), ["x"]))).args
    assert (name_of(outer), name_of(outer.inner), outer.names) == ("Outer", "Inner", ["x"])
    assert outer.inner.color.name == "blue"
    assert outer.inner.sizes == (1, 2)


def test_functions_and_other_referables_nest() -> None:
    again = through_json(Task(double, Task(math.sqrt, depth=2), cls=GenerationConfig))
    assert again.args[0](4) == 8
    assert again.args[1].args[0] is math.sqrt
    assert again.args[1].kwargs == {"depth": 2}
    assert again.kwargs["cls"] is GenerationConfig


def test_a_dataclass_that_is_referable_is_constructed_with_its_arguments() -> None:
    again = through_json(DataclassTask(0.5, steps=9))
    assert (again.weight, again.steps) == (0.5, 9)


def test_a_reference_made_from_a_resolved_object_is_the_same() -> None:
    reference = reference_of(Task(double))
    assert reference_of(resolve(reference)) == reference


def test_an_argument_that_is_missing_is_no_traceback() -> None:
    with pytest.raises(WorkflowError, match=r"SingleTurnWorkflow\(...\): missing .*'reward'"):
        SingleTurnWorkflow()  # type: ignore[call-arg]
    with pytest.raises(WorkflowError, match="got an unexpected keyword argument 'rewards'"):
        SingleTurnWorkflow(double, rewards=[])  # type: ignore[call-arg]


def test_a_class_without_constructor_refuses_arguments() -> None:
    with pytest.raises(TypeError, match="takes no arguments"):
        Bare(1)
    assert name_of(through_json(Bare())) == "Bare"


def local_function() -> Any:
    def inner() -> None: ...

    return inner


class NotReferable:
    def method(self) -> None: ...


@pytest.mark.parametrize(
    ("obj", "advice"),
    [
        (lambda prompt, completion: 1.0, "make it a function with a name"),
        (local_function(), "move it to the top level"),
        (NotReferable(), "an instance of a Workflow"),
        (NotReferable().method, "a function defined at the top level"),
        (Task(NotReferable()), "argument 0 of Task"),
        (Task(nested={"key": [NotReferable()]}), r"argument 'nested' of Task\['key'\]\[0\] is"),
        (Task(lambda: 1), "make it a function with a name"),
    ],
)
def test_what_cannot_be_sent_is_refused_with_advice(obj: Any, advice: str) -> None:
    with pytest.raises(WorkflowError, match=advice):
        reference_of(obj)


def test_a_local_class_is_refused() -> None:
    class Local(Referable):
        pass

    with pytest.raises(WorkflowError, match=r"Local of .* is defined inside a function"):
        reference_of(Local())


def test_a_shadowed_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = double
    monkeypatch.setattr(sys.modules[__name__], "double", print)
    with pytest.raises(WorkflowError, match="the name double of module"):
        reference_of(original)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no.such.module:f", "No module named 'no'"),
        ("math:no_such_name", "math has no 'no_such_name'"),
        ("/no/such/script.py:f", "No such file"),
        ("areal_sc.config.schema:GenerationConfig", "unexpected keyword argument 'typo'"),
    ],
)
def test_what_cannot_be_loaded_names_the_target(target: str, message: str) -> None:
    with pytest.raises(WorkflowError, match=message) as caught:
        resolve(ObjectReference(target, [], {"typo": 1}))
    assert target in str(caught.value)


@pytest.mark.parametrize(
    "wire",
    [
        None,
        {},
        {"target": "math", "args": None, "kwargs": {}, "search_path": None},
        {"target": "math:pi", "args": 3, "kwargs": {}, "search_path": None},
        {"target": "math:pi", "args": [], "kwargs": None, "search_path": None},
    ],
)
def test_a_malformed_reference_is_refused(wire: Any) -> None:
    with pytest.raises(WorkflowError, match="not an object reference"):
        ObjectReference.from_wire(wire)


def run_python(*arguments: str, cwd: Path) -> str:
    finished = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


RESOLVE = """
import json, sys
from areal_sc.sources.reference import ObjectReference, resolve
wire = json.loads(sys.argv[1])
task = resolve(ObjectReference.from_wire(wire))
again = resolve(ObjectReference.from_wire(wire))
assert type(task) is type(again), "the script was loaded twice"
print(task.score(), "torch" in sys.modules)
"""


def test_a_script_is_loaded_without_its_main_block_and_finds_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run as `__main__` in one process, resolved in another with another working directory."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    scripts, elsewhere = tmp_path / "scripts", tmp_path / "elsewhere"
    scripts.mkdir()
    elsewhere.mkdir()
    (scripts / "my_rewards.py").write_text("def half(x):\n    return x / 2\n")
    (scripts / "train.py").write_text(
        textwrap.dedent(
            """
            import json
            from dataclasses import dataclass
            from my_rewards import half
            from areal_sc.sources.reference import Referable, reference_of

            @dataclass
            class Settings:
                value: float

            def triple(x):
                return 3 * x

            class MyTask(Referable):
                def __init__(self, settings, *functions):
                    self.settings, self.functions = settings, functions

                def score(self):
                    result = self.settings.value
                    for function in self.functions:
                        result = function(result)
                    return result

            if __name__ == "__main__":
                print(json.dumps(reference_of(MyTask(Settings(4.0), triple, half)).to_wire()))
            """
        )
    )
    wire = run_python("scripts/train.py", cwd=tmp_path)
    assert json.loads(wire)["target"] == f"{scripts / 'train.py'}:MyTask"
    assert json.loads(wire)["args"][2]["reference"]["target"] == "my_rewards:half"
    assert run_python("-c", RESOLVE, wire, cwd=elsewhere).split() == ["6.0", "False"]


def test_a_script_that_fails_while_loading_can_be_loaded_again(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import no_such_module_anywhere\n")
    reference = ObjectReference(f"{script}:f", None)
    for _ in range(2):
        with pytest.raises(WorkflowError, match="No module named 'no_such_module_anywhere'"):
            resolve(reference)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys\nsys.exit('no tag')\n", r"the import raised SystemExit: no tag at it\.py:2"),
        ("raise BaseException('so')\n", r"the import raised BaseException: so at it\.py:1"),
        ("def f(:\n", r"the import raised SyntaxError: .* at it\.py:1"),
        (
            "from areal_sc.sources.reference import Referable\nclass Task(Referable):\n"
            "    def __init__(self):\n        raise KeyError('gold')\n",
            r"recorded arguments: it raised KeyError: 'gold' at it\.py:4",
        ),
    ],
)
def test_what_a_script_raises_in_a_worker_is_told_with_its_line(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "it.py").write_text(text)
    with pytest.raises(WorkflowError, match=message):
        resolve(ObjectReference(f"{tmp_path}/it.py:Task", []))


@pytest.mark.parametrize(
    "tool",
    [[], ["-m", "cProfile", "-o", "profile"], ["-m", "pdb", "-cc", "-cq"], ["own_profiler.py"]],
)
def test_a_script_of_any_name_is_found_under_tools_too(
    tool: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM calls its copy `slurm_script`; a profiler's `__main__` is the profiler."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    script = tmp_path / "slurm_script"
    script.write_text(
        "import json\nfrom areal_sc.sources.reference import Referable, reference_of\n"
        "class Task(Referable):\n    def score(self): return 7\n"
        "if __name__ == '__main__': print('>', json.dumps(reference_of(Task()).to_wire()))\n"
    )
    (tmp_path / "own_profiler.py").write_text(  # as kernprof, installed as a program
        "import sys\nsys.argv[:] = sys.argv[1:]\n"
        "exec(open(sys.argv[0]).read(), {'__name__': '__main__'})\n"
    )
    printed = run_python(*tool, str(script), cwd=tmp_path)
    wire = printed.partition(">")[2].partition("\n")[0]
    assert json.loads(wire)["target"] == f"{script}:Task"
    assert run_python("-c", RESOLVE, wire, cwd=tmp_path).split() == ["7", "False"]


def test_a_script_in_an_archive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = type(sys)("__main__")
    main.__file__ = str(tmp_path / "app.pyz" / "__main__.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(double, "__module__", "__main__")
    main.__dict__["double"] = double
    with pytest.raises(WorkflowError, match="it is no file of its own"):
        reference_of(double)


def test_a_compiled_script_is_loaded(tmp_path: Path) -> None:
    source, compiled = tmp_path / "train.py", tmp_path / "train.pyc"
    source.write_text("def score(): return 7\n")
    py_compile.compile(str(source), str(compiled), doraise=True)
    assert resolve(ObjectReference(f"{compiled}:score"))() == 7
