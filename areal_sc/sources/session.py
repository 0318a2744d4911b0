"""What a notebook defines, copied to a module that workers can import. No torch.

A session has no file. IPython keeps the text of its cells, though; Python's own prompt does not. A
function or class is copied from there, with the imports and definitions that it uses; plain values
that it uses are written down as they are now. Nothing else of a cell runs in a worker.

    In [1]: import re                                 import re
            THRESHOLD = 0.5                  ->       THRESHOLD = ...from_json(b'0.5')
    In [2]: def reward(prompt, answer): ...           def reward(prompt, answer): ...
            PPOTrainer(config).fit(...)
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import re
import symtable
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from types import NoneType
from typing import Any

from areal_sc.errors import WorkflowError
from areal_sc.sources import values

SESSION = "__main__"
"""Module name of what has no file."""

_PLAIN = (NoneType, bool, int, float, complex, str, bytes, list, tuple, dict, set)

_HEADER = """\
from __future__ import annotations

import sys

sys.path[:0] = [folder for folder in {folders!r} if folder not in sys.path]
"""


def session_module(names: Iterable[str]) -> str:
    """The text of a module that has these functions and classes of the session.

    Raises: WorkflowError: the text of one is not known, or it uses what cannot be written down;
        says what to do.
    """
    copy = _Copy()
    for name in names:
        copy.add(name, name)
    folders = [os.path.abspath(folder) for folder in sys.path]
    return "\n\n".join([_HEADER.format(folders=folders), *copy.statements]) + "\n"


class _Copy:
    """Statements of the session, each after those that it uses."""

    def __init__(self) -> None:
        self.statements: list[str] = []
        self._values = vars(sys.modules[SESSION])
        self._cells = [_statements(cell) for cell in self._values.get("In", ())]  # oldest first
        self._seen: set[str] = set()

    def add(self, name: str, user: str) -> None:
        """Args: user: the definition that uses the name."""
        if name in self._seen or name not in self._values:  # a builtin, or nothing yet
            return
        self._seen.add(name)
        value = self._values[name]
        defined_as = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if defined_as == (SESSION, name):
            statement = self._definition(name, value)
            for used in sorted(_global_names(symtable.symtable(statement, name, "exec"))):
                self.add(used, name)
        elif type(value) in _PLAIN and (packed := _packed(value)):
            module = f"__import__({values.__name__!r}, fromlist=[1])"
            statement = f"{name} = {module}.from_wire({module}.from_json({packed!r}))"
        elif isinstance(value, re.Pattern):
            statement = f"{name} = __import__('re').compile({value.pattern!r}, {value.flags})"
        else:
            statement = "\n".join(dict.fromkeys(self._imports(name, value)))
            if not statement:
                raise WorkflowError(
                    f"{user} uses {name}, which cannot be sent to workers from an interactive "
                    f"session (it is of type {type(value).__name__}): make it inside of {user}, or "
                    f"{_to_file(user)}"
                )
        self.statements.append(statement)

    def _definition(self, name: str, value: Any) -> str:
        for statements in [*_cells_of(value), *reversed(self._cells)]:
            for node in reversed(statements):
                if isinstance(node, _DEFINITIONS) and node.name == name:
                    return ast.unparse(node)
        raise WorkflowError(
            f"{name} is defined in an interactive session, which keeps no text of it, so it cannot "
            f"be sent to workers: {_to_file(name)}"
        )

    def _imports(self, name: str, value: Any) -> Iterator[str]:
        """The imports of the session that give the name this value."""
        for node in chain(*self._cells):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    module = alias.name if alias.asname else alias.name.partition(".")[0]
                    if name == (alias.asname or module) and sys.modules.get(module) is value:
                        yield ast.unparse(ast.Import([alias]))
            elif isinstance(node, ast.ImportFrom):
                origin = sys.modules.get(node.module or "")
                for alias in node.names:
                    attribute = name if alias.name == "*" else alias.name
                    is_named = name == (alias.asname or attribute)
                    if is_named and getattr(origin, attribute, None) is value:
                        yield f"from {node.module} import {attribute} as {name}"


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _to_file(name: str) -> str:
    return (
        "put it into a file of the current folder, `rewards.py` say (a notebook cell whose first "
        f"line is `%%writefile rewards.py` writes it), and `from rewards import {name}`"
    )


def _cells_of(value: Any) -> Iterator[list[ast.stmt]]:
    """The very cells that a function, or the methods of a class, come from."""
    for part in (value, *vars(value).values()) if isinstance(value, type) else (value,):
        code = getattr(inspect.unwrap(part), "__code__", None)
        if code is not None:
            yield _statements("".join(linecache.getlines(code.co_filename)))


def _statements(cell: str) -> list[ast.stmt]:
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        tree: ast.Module = compile(cell, "<cell>", "exec", flags, dont_inherit=True)
    except SyntaxError:  # it did not run either
        return []
    return tree.body


def _global_names(table: symtable.SymbolTable) -> set[str]:
    """Global names that a scope, or one within it, reads."""
    symbols = table.get_symbols()
    names = {s.get_name() for s in symbols if s.is_global() and s.is_referenced()}
    return names.union(*map(_global_names, table.get_children()))


def _packed(value: Any) -> bytes:
    """The value as bytes; none if it would not come back equal."""
    try:
        return values.to_json(values.to_wire(value))
    except values.UnfitValue:
        return b""
