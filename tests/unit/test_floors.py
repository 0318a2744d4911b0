"""The floors of the package: imports point down only, without cycles, and the upper floors that a
script runs in never load torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import areal_sc

PACKAGE = Path(areal_sc.__file__).parent

FLOORS = {
    "balance": 0,
    "config": 0,
    "errors": 0,
    "hub": 0,
    "ids": 0,
    "log": 0,
    "metadata": 0,
    "quantities": 0,
    "run": 0,
    "rejection": 0,
    "reward_signal": 0,
    "sizing": 0,
    "system": 0,
    "token_fields": 0,
    "user_code": 0,
    "weights": 0,
    "transport": 1,
    "algorithms": 1,
    "engines": 2,
    "sources": 2,
    "rewards": 3,
    "records": 4,
    "workflows": 4,
    "agents": 5,
    "demonstrations": 5,
    "nodes": 4,
    "shipping": 4,
    "workers": 6,
    "schedulers": 7,
    "fleet": 8,
    "controller": 9,
    "planning": 10,
    "trainer": 10,
    "preflight": 10,
    "page": 11,
    "serving": 11,
    "commands": 12,
    "__main__": 12,
    # the way of weights, in one folder: each file stands on the floor of what it is a part of
    "weights.changes": 1,
    "weights.group": 1,
    "weights.methods": 6,
    "weights.rank_weights": 6,
    "weights.adopter": 6,
    "weights.updates": 9,
    "weights.tree": 9,
    "weights.channel": 9,
}
"""Of a package, or of a module of one."""

LAZY_IMPORTS = {
    # (importer, imported): why it stands inside a function
    ("areal_sc.commands.serve", "areal_sc.serving.serve"): "it needs a package that few have",
    ("areal_sc.commands.export", "areal_sc.engines.snapshot_model"): "only an export loads torch",
    ("areal_sc.controller.dry_run", "areal_sc.algorithms.loss_trial"): "only a dry run loads torch",
    **{
        (f"areal_sc.controller.{user}", "areal_sc.controller.dry_run"): "only a dry run loads HTTP"
        for user in ("base", "rollout.rollout_controller", "train.train_controller")
    },
    ("areal_sc.controller.dry_run", "areal_sc.engines.tokenizer"): "only a dry run loads torch",
    (
        "areal_sc.controller.dry_run",
        "areal_sc.engines.picture_processor",
    ): "only a dry run loads torch",
    (
        "areal_sc.controller.dry_run",
        "areal_sc.engines.training.adapters.lora",
    ): "only a dry run loads torch",
    ("areal_sc.trainer.row_trainer", "areal_sc.engines.tokenizer"): "only rows load transformers",
    (
        "areal_sc.trainer.row_trainer",
        "areal_sc.engines.picture_processor",
    ): "only rows load transformers",
    (
        "areal_sc.trainer.evaluation.model_evaluation",
        "areal_sc.engines.tokenizer",
    ): "only rescoring loads transformers",
    (
        "areal_sc.trainer.evaluation.model_evaluation",
        "areal_sc.engines.picture_processor",
    ): "only rescoring loads transformers",
    ("areal_sc.preflight.load", "areal_sc.preflight.dry_run"): "a script does not wait for it",
    ("areal_sc.nodes.agent", "areal_sc.shipping.node_side"): "most nodes see the run folder",
    ("areal_sc.workers.base", "areal_sc.shipping.worker_side"): "most nodes see the run folder",
    ("areal_sc.workers.entry", "areal_sc.workers.rollout_worker"): "after the environment is set",
    ("areal_sc.workers.entry", "areal_sc.workers.train_worker"): "after the environment is set",
}

TORCH_FREE = (
    "areal_sc",
    *(f"areal_sc.{name}" for name, floor in FLOORS.items() if floor == 0),
    "areal_sc.weights.published",
    "areal_sc.weights.methods",
    *(f"areal_sc.{name}" for name, floor in FLOORS.items() if "." in name and floor == 9),
    "areal_sc.run.",
    "areal_sc.sizing.",
    "areal_sc.system.",
    "areal_sc.config.",
    "areal_sc.schedulers.",
    "areal_sc.controller.",
    "areal_sc.fleet.",
    "areal_sc.nodes.",
    "areal_sc.page.",
    "areal_sc.planning.",
    "areal_sc.trainer.",
    "areal_sc.commands.",
    "areal_sc.__main__",
    "areal_sc.shipping.",
    "areal_sc.records.",
    "areal_sc.rewards.",
    "areal_sc.sources.",
    "areal_sc.workflows.",
    "areal_sc.agents.",
    "areal_sc.engines.base",
    "areal_sc.engines.handles",
    "areal_sc.engines.handle_base",
    "areal_sc.engines.fsdp.handle",
    "areal_sc.engines.training.snapshot_index",
    "areal_sc.engines.local.handle",
    "areal_sc.engines.megatron.handle",
    "areal_sc.engines.megatron.family",
    "areal_sc.engines.megatron.machine",
    "areal_sc.engines.servers.handle",
    "areal_sc.engines.servers.sglang.handle",
    "areal_sc.preflight.",
    "areal_sc.algorithms.packing",
    "areal_sc.algorithms.advantages",
    "areal_sc.algorithms.named_loss",
    *(
        f"areal_sc.transport.{name}"
        for name in (
            "shards.arena",
            "shards.memory_folder",
            "security.",
            "sockets.",
            "plane_stats",
            "rpc.",
        )
    ),
    "areal_sc.workers.calls",
    "areal_sc.workers.operations",
    "areal_sc.workers.entry",
)
"""Modules, and folders of modules (with a dot at the end), that scripts import."""

HEAVY = ("torch", "transformers", "numba", "tensorflow", "jax")


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(path: Path, name: str, *, of_types: bool = False) -> list[tuple[str, bool]]:
    """(imported module of the package, whether inside a function).

    Args:
        of_types: with those for type checking alone.
    """
    tree = ast.parse(path.read_text())
    if not of_types:
        _RuntimeOnly().visit(tree)
    return list(_imports_in(tree, name, inside_function=False))


class _RuntimeOnly(ast.NodeTransformer):
    """Leaves out what is for type checking alone."""

    def visit_If(self, node: ast.If) -> ast.If | None:
        return None if "TYPE_CHECKING" in ast.dump(node.test) else node


def _imports_in(node: ast.AST, name: str, *, inside_function: bool) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                if alias.name.split(".")[0] == "areal_sc":
                    yield alias.name, inside_function
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{name} has a relative import"
            if child.module and child.module.split(".")[0] == "areal_sc":
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    yield (full if full in MODULES else child.module), inside_function
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports_in(child, name, inside_function=inside_function or is_function)


MODULES = modules()


def floor_of(module: str) -> int:
    """The package's own `__init__` stands above all: it names what is on every floor."""
    _, *inside = module.split(".")
    if not inside:
        return max(FLOORS.values()) + 1
    return FLOORS.get(".".join(inside[:2]), FLOORS[inside[0]])


def test_every_module_has_a_floor() -> None:
    packages = {name.split(".")[1] for name in MODULES if "." in name}
    assert packages == {name for name in FLOORS if "." not in name}
    assert {f"areal_sc.{name}" for name in FLOORS if "." in name} <= MODULES.keys()


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name: str) -> None:
    for imported, _ in imports(MODULES[name], name):
        assert floor_of(imported) <= floor_of(name), f"{name} imports {imported}, which is above it"


def test_imports_inside_functions_are_the_known_ones() -> None:
    found = {
        (name, imported)
        for name, path in MODULES.items()
        for imported, inside_function in imports(path, name)
        if inside_function
    }
    assert found == LAZY_IMPORTS.keys()


def test_there_is_no_cycle() -> None:
    """Lazy imports count, and those for types: a reader follows them, too."""
    graph = {
        name: {imported for imported, _ in imports(path, name, of_types=True)}
        for name, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"a cycle: {' -> '.join([*trail[trail.index(name) :], name])}"
        if name not in done:
            for imported in sorted(graph[name]):
                visit(imported, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())
    assert done == graph.keys()


def test_a_class_name_is_that_of_one_class() -> None:
    places: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(f"{module}.{node.name}")
    twice = [found for found in places.values() if len(found) > 1]
    assert not twice, f"one name, several classes: {twice}"


def test_packages_import_nothing_by_themselves() -> None:
    """So that a module is loaded alone, and not with all its neighbours."""
    for name, path in MODULES.items():
        if path.name == "__init__.py" and path.parent != PACKAGE:
            body = ast.parse(path.read_text()).body
            assert len(body) == 1, f"{name} has more in it than a docstring"
            assert ast.get_docstring(ast.parse(path.read_text())), f"{name} has no docstring"


def test_unit_tests_stand_where_their_packages_do() -> None:
    unit = Path(__file__).parent
    folders = {path.parent.relative_to(unit) for path in unit.rglob("test_*.py")}
    strays = sorted(str(folder) for folder in folders if not (PACKAGE / folder).is_dir())
    assert strays == ["examples"]  # of the repository's own examples


def torch_free_modules() -> list[str]:
    return [
        name
        for name in MODULES
        if any(
            name == entry or (entry.endswith(".") and name.startswith(entry))
            for entry in TORCH_FREE
        )
    ]


REPORT_HEAVY = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
{more}
heavy = [name for name in {heavy!r} if name in sys.modules]
print(" ".join(heavy))
"""


def heavy_modules_after(names: list[str], more: str = "") -> str:
    finished = subprocess.run(
        [sys.executable, "-c", REPORT_HEAVY.format(more=more, heavy=HEAVY), *names],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_what_a_script_imports_does_not_load_torch() -> None:
    names = torch_free_modules()
    assert len(names) > 40
    for entry in TORCH_FREE:
        assert any(name.startswith(entry) for name in names), f"{entry} names no module"
    assert heavy_modules_after(names) == ""


def test_no_public_name_loads_torch() -> None:
    more = "import areal_sc\nfor name in areal_sc.__all__: getattr(areal_sc, name)"
    assert heavy_modules_after(["areal_sc"], more) == ""


def test_the_check_would_notice() -> None:
    assert "torch" in heavy_modules_after(["areal_sc.algorithms.losses"])
