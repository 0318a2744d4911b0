"""Writes the API reference of what users name: `python docs/build_api.py FOLDER`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pdoc

import areal_sc

MODULES = (
    "areal_sc",
    "areal_sc.algorithms.losses",
    "areal_sc.config.optimizer_settings",
    "areal_sc.config.schema",
    "areal_sc.config.transport_settings",
    "areal_sc.engines.base",
    "areal_sc.errors",
    "areal_sc.records.reading",
    "areal_sc.records.samples",
    "areal_sc.schedulers.base",
    "areal_sc.records.metrics",
    "areal_sc.records.trackers.base",
    "areal_sc.workflows.base",
    "areal_sc.workflows.math_reward",
    "areal_sc.workflows.text",
    "areal_sc.workflows.transcript",
)
"""The package's own names, and the modules of which a user's script imports more."""


def main(folder: Path) -> None:
    """Writes a page a module. Raises: SystemExit: names without a docstring."""
    for name in areal_sc.__all__:  # they are lazy, and pdoc looks into the module itself
        found = vars(areal_sc)[name] = getattr(areal_sc, name)
        if is_dataclass(found):  # it looks for types of inherited fields in the wrong module
            hints = get_type_hints(found)
            given = {field.name: hints[field.name] for field in fields(found) if field.init}
            found.__init__.__annotations__.update(given)
    pages = [pdoc.doc.Module(import_module(name)) for name in MODULES]
    if missing := [name for page in pages for name in undocumented(page)]:
        raise SystemExit(f"without a docstring: {', '.join(missing)}")
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*MODULES, output_directory=folder)


def undocumented(namespace: pdoc.doc.Namespace) -> Iterator[str]:
    """Its public modules, classes, functions, methods and properties that say nothing."""
    if not namespace.docstring:
        yield namespace.fullname
    for member in namespace.members.values():
        is_property = isinstance(inspect.getattr_static(namespace.obj, member.name, None), property)
        if member.name.startswith("_") or not (is_property or member.kind != "variable"):
            continue  # what a field of a dataclass means stands in the class's docstring
        if isinstance(member, pdoc.doc.Namespace):
            yield from undocumented(member)
        elif not member.docstring:
            yield member.fullname


if __name__ == "__main__":
    main(Path(sys.argv[1]))
