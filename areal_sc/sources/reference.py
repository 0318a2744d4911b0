"""Naming an object so that another process can make it again. No torch.

The user's workflow, reward function and dataset live in the user's script, but run in workers. An
`ObjectReference` is plain JSON: where the class or function is found, and with which arguments the
instance was constructed. It is written to the run folder by the controller and read from there by
workers; a reference names code to import, so it is never accepted from a socket.

    reference_of(MathWorkflow(reward=exact_match, max_turns=3))
      target  "/home/me/train.py:MathWorkflow"       (defined in the script that was started)
      kwargs  {"reward": <reference to areal_sc.workflows.math_reward:exact_match>, "max_turns": 3}

What is defined in the script (`__main__`) is loaded from the script's file under another module
name, once per process, so its `if __name__ == "__main__":` block does not run. Where `__main__` has
no file, in a REPL or a notebook, the target leads to a file of the run folder: see `session`.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import types
from collections.abc import Iterator
from functools import cache, reduce
from importlib.machinery import BYTECODE_SUFFIXES, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from typing import Annotated, Any, Final, Self

import msgspec

from areal_sc.errors import WorkflowError
from areal_sc.sources.session import (
    SESSION,
    is_location,
    is_of_session,
    load_session,
    write_session,
)
from areal_sc.sources.values import UnfitValue, from_wire, to_wire
from areal_sc.user_code import user_code

_SCRIPT_PREFIX = "areal_sc_script_"
"""Module names of loaded scripts; `sys.modules` is the registry of what is loaded."""


class Referable:
    """Base of what a script hands to workers: remembers its constructor's arguments.

    An argument may be what `values` can send (None, numbers, text, dates, lists, dicts, ...), a
    Path, a dataclass instance, an enum member, a function or class of a module, or another
    Referable.

    Raises: WorkflowError: an argument is missing, such as the reward, or is none of the class.
    """

    _constructor_arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, /, *args: Any, **kwargs: Any) -> Self:
        if cls.__init__ is object.__init__ and (args or kwargs):
            # object.__init__ stays silent about surplus arguments when __new__ is overridden
            raise TypeError(f"{cls.__name__}() takes no arguments")
        if cls.__init__ is not object.__init__:
            try:
                inspect.signature(cls.__init__).bind(None, *args, **kwargs)
            except TypeError as error:
                raise WorkflowError(f"{cls.__qualname__}(...): {error}") from None
        instance = super().__new__(cls)
        object.__setattr__(instance, "_constructor_arguments", (args, kwargs))
        return instance

    def constructor_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What to construct an equal instance with in another process and working directory."""
        return self._constructor_arguments


class ObjectReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function, a class, an enum's member, or an instance made from plain arguments.

    Attributes:
        target: `package.module:qualname`, `/absolute/script.py:qualname`, or `session_<hash>:0`.
        args: positional constructor arguments in JSON form; None means the named object itself.
        kwargs: keyword constructor arguments in JSON form.
        search_path: folder that must be on `sys.path` to import the target, or None.
    """

    target: Annotated[str, msgspec.Meta(pattern=":")]
    args: list[Any] | None = None
    kwargs: dict[str, Any] = {}
    search_path: str | None = None

    def to_wire(self) -> dict[str, Any]:
        """A dict that JSON can hold."""
        return msgspec.structs.asdict(self)

    @classmethod
    def from_wire(cls, wire: Any) -> Self:
        """Raises: WorkflowError: `wire` is not what `to_wire` made."""
        try:
            return msgspec.convert(wire, cls)
        except msgspec.ValidationError as error:
            raise WorkflowError(f"not an object reference: {wire!r}: {error}") from error


def written_reference(obj: Any, sources: Path) -> dict[str, Any]:
    """The wire form of a reference like that of `reference_of`, which also reaches a session.

    Args:
        sources: the run's folder `sources`; gets a file of what a session defines.
    Raises: WorkflowError: see `reference_of`. WorkflowError, RunFolderError: see `write_session`.
    """
    of_session: list[Any] = []
    wire = reference_of(obj, of_session).to_wire()
    if of_session:
        location = write_session(sources, of_session)
        for reference in references_in(wire):
            if reference["target"].startswith(f"{SESSION}:"):
                reference["target"] = location + reference["target"].removeprefix(SESSION)
    return wire


def reference_of(obj: Any, of_session: list[Any] | None = None) -> ObjectReference:
    """Names a function or class of a module, an enum's member, or a Referable or dataclass.

    Args:
        of_session: gets the functions and classes that only their place in this list names.
    Raises: WorkflowError: another process could not make the object again; says what to do.
    """
    if isinstance(obj, enum.Enum):
        target, search_path = _target_of(type(obj), of_session)
        return ObjectReference(f"{target}.{obj.name}", search_path=search_path)
    if isinstance(obj, types.FunctionType | types.BuiltinFunctionType | type):
        target, search_path = _target_of(obj, of_session)
        return ObjectReference(target, search_path=search_path)
    if isinstance(obj, Referable):
        args, kwargs = obj.constructor_arguments()
    elif dataclasses.is_dataclass(obj):
        args = ()
        kwargs = {f.name: getattr(obj, f.name) for f in dataclasses.fields(obj) if f.init}
    else:
        raise WorkflowError(
            f"{_short(obj)} cannot be sent to workers: give an instance of a Workflow or Prompts "
            "subclass, or a function defined at the top level of a module or of your script"
        )
    target, search_path = _target_of(type(obj), of_session)
    owner = type(obj).__qualname__

    def argument(value: Any, name: int | str) -> Any:
        try:
            return to_wire(value, lambda value: _named(value, of_session))
        except UnfitValue as error:
            raise WorkflowError(
                f"{error.located(f'argument {name!r} of {owner}')}; build the rest from them in "
                "the constructor, or pass dataclasses, enums, and functions or classes of a module"
            ) from None

    return ObjectReference(
        target,
        [argument(value, number) for number, value in enumerate(args)],
        {name: argument(value, name) for name, value in kwargs.items()},
        search_path,
    )


def values_in(wire: dict[str, Any]) -> Iterator[Any]:
    """All that the arguments of a reference hold, in wire form; with those of other references."""
    values = [wire["args"], wire["kwargs"]]
    while values:
        value = values.pop()
        yield value
        if is_of_kind(value, "reference"):
            values += [value["reference"]["args"], value["reference"]["kwargs"]]
        elif isinstance(value, dict | list):
            values += value.values() if isinstance(value, dict) else value


def is_of_kind(value: Any, kind: str) -> bool:
    """Whether it is what `to_wire` makes of a `path`, say, or a `reference`."""
    return isinstance(value, dict) and value.get("$") == kind


def references_in(wire: dict[str, Any]) -> list[dict[str, Any]]:
    """A reference in its wire form, and those among its arguments."""
    among = [it["reference"] for it in values_in(wire) if is_of_kind(it, "reference")]
    return [wire, *among]


def resolve(reference: ObjectReference, sources: Path | None = None) -> Any:
    """Imports the target and, when the reference has arguments, constructs the instance.

    Args:
        sources: the run's folder `sources`, which has what a session defines.
    Raises: WorkflowError: the module or name is not there, or does not take the arguments.
    """

    def made(wire: dict[str, Any]) -> Any:
        if wire["$"] != "reference":
            raise WorkflowError(f"an argument of unknown kind {wire['$']!r} in an object reference")
        return resolve(ObjectReference.from_wire(wire["reference"]), sources)

    found = _import_target(reference.target, reference.search_path, sources)
    if reference.args is None:
        return found
    args = [from_wire(value, made) for value in reference.args]
    kwargs = {name: from_wire(value, made) for name, value in reference.kwargs.items()}
    with user_code(f"{reference.target} cannot be constructed with its recorded arguments: it"):
        return found(*args, **kwargs)


def _target_of(obj: Any, of_session: list[Any] | None) -> tuple[str, str | None]:
    """(target, search path) of a function or class.

    Raises: WorkflowError: it cannot be found again by its name.
    """
    name, module_name = obj.__qualname__, obj.__module__
    kind = "class" if isinstance(obj, type) else "function"
    module = sys.modules.get(module_name)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if is_of_session(obj, found):
        if of_session is None:
            return f"{SESSION}:{name}", None
        if not any(it is obj for it in of_session):
            of_session.append(obj)
        return f"{SESSION}:{[it is obj for it in of_session].index(True)}", None
    if "<lambda>" in name:
        raise WorkflowError(
            f"a lambda of {module_name} cannot be sent to workers: "
            "make it a function with a name (def) at the top level of the module"
        )
    if "<locals>" in name:
        raise WorkflowError(
            f"{kind} {name} of {module_name} is defined inside a function and cannot be sent to "
            "workers: move it to the top level of the module, and pass what it takes from the "
            "surrounding function as arguments of a Workflow's constructor"
        )
    if found is not obj and module_name == "__main__" and (script := _script_of_tool(module)):
        return f"{script}:{name}", str(script.parent)
    if module is None or found is not obj:
        where = f"{module_name} ({getattr(module, '__file__', None)})"
        raise WorkflowError(
            f"{kind} {name} cannot be sent to workers: the name {name} of module {where} means "
            f"{_short(found)}; keep the object under its own name, in a file that can be imported "
            "(a method is no function of the module; a tool that runs the script may be `__main__`)"
        )
    location, search_path = _location_of(module)
    return f"{location}:{name}", search_path


def _location_of(module: types.ModuleType) -> tuple[str, str | None]:
    """Import path of the module, or the path of its file where it has no importable name."""
    name = module.__name__
    spec = getattr(module, "__spec__", None)  # a debugger empties `__main__`
    if name == "__main__" and spec is not None:
        name = spec.name  # started by `python -m package.module`
    if getattr(module, "__file__", None) is None:
        return name, None  # built into the interpreter
    file = Path(str(module.__file__)).resolve()
    if not file.is_file():
        raise WorkflowError(
            f"workers cannot import {file}: it is no file of its own (in an archive, or read from "
            "standard input); run the script from a file, or put what workers need into a module"
        )
    if name not in ("__main__", "__mp_main__"):
        inner = file.parent / file.name.partition(".")[0]
        inner = inner.parent if inner.name == "__init__" else inner
        parts = name.split(".")
        if inner.parts[-len(parts) :] == tuple(parts):
            root = inner.parents[len(parts) - 1]
            return name, None if is_always_importable(root) else str(root)
    return str(file), str(file.parent)


def _script_of_tool(main: types.ModuleType | None) -> Path | None:
    """The script that a tool runs as `__main__`, `python -m cProfile` say, beside its own module.

    Its names are not in that module; but it is the first of the arguments, as ever.
    """
    script = Path(sys.argv[0]).resolve()
    is_tools = script != Path(getattr(main, "__file__", None) or "").resolve()
    return script if is_tools and script.is_file() else None


@cache
def is_always_importable(root: Path) -> bool:
    """Whether every process of this interpreter has `root` on its `sys.path`."""
    own = Path(__file__).resolve().parents[2]
    return root in {own, *(Path(path).resolve() for path in sysconfig.get_paths().values())}


_MOVED: Final = {
    "areal_sc.workflows.prompts": "areal_sc.sources.prompts",
    "areal_sc.workflows.row_file": "areal_sc.sources.row_file",
}
"""Modules by the names that older run folders have for them."""


def _import_target(target: str, search_path: str | None, sources: Path | None) -> Any:
    location, _, qualname = target.rpartition(":")
    if is_location(location):
        number, *members = qualname.split(".")
        return reduce(getattr, members, load_session(sources, location)[int(number)])
    if search_path is not None and search_path not in sys.path:
        sys.path.insert(0, search_path)
    with user_code(
        f"{target} cannot be loaded: workers import it from the same file as the script, with the "
        "script's folder on sys.path, and the import"
    ):
        found: Any = (
            _load_script(Path(location))
            if Path(location).is_absolute()
            else importlib.import_module(_MOVED.get(location, location))
        )
    try:
        return reduce(getattr, qualname.split("."), found)
    except AttributeError as error:
        raise WorkflowError(
            f"{target} cannot be loaded: {location} has no {qualname!r}; is it defined only "
            'under `if __name__ == "__main__":`?'
        ) from error


def _load_script(path: Path) -> types.ModuleType:
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    name = f"{_SCRIPT_PREFIX}{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    main = sys.modules["__main__"]
    # Where this package started the process, the first script takes the part of `__main__` as in a
    # process that `multiprocessing` has spawned. So it can spawn others, which import it likewise.
    is_main = main.__spec__ is not None and main.__spec__.name.startswith("areal_sc.")
    kind = SourcelessFileLoader if path.suffix in BYTECODE_SUFFIXES else SourceFileLoader
    loader = kind("__mp_main__" if is_main else name, str(path))  # whatever else its suffix
    spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before the body runs: dataclasses look their module up
    if is_main:
        module.__spec__ = None  # it is found by its file
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        if is_main:
            sys.modules["__main__"] = main
        raise
    return module


def _named(value: Any, of_session: list[Any] | None) -> dict[str, Any] | None:
    """What is found by its name, or its path, in another process."""
    if isinstance(value, Path):  # absolute: workers have another working directory
        return {"$": "path", "path": str(value.expanduser().absolute())}
    if isinstance(
        value, Referable | enum.Enum | types.FunctionType | types.BuiltinFunctionType | type
    ) or dataclasses.is_dataclass(value):
        return {"$": "reference", "reference": reference_of(value, of_session).to_wire()}
    return None


def _short(obj: Any) -> str:
    text = repr(obj)
    return f"{text[:80]}..." if len(text) > 80 else text
