"""How a worker finds a handle, also one of a user's own, by a name and the plain settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from areal_sc.config.loading.plain import from_plain
from areal_sc.engines.handle_base import GeneratorHandle, TrainHandle
from areal_sc.engines.handles import HANDLES
from areal_sc.errors import ConfigError
from areal_sc.sources.reference import ObjectReference, reference_of, resolve

_BASES: Final = (TrainHandle, GeneratorHandle)


def own_code(handle: TrainHandle | GeneratorHandle) -> tuple[str, list[str]]:
    """The name by which `handle_from_plain` finds its class, and the folders that a process needs
    on `sys.path` for that class and its optimizer, where these are a user's own.

    Raises: WorkflowError, ConfigError: other processes could not import them; says what to do.
    """
    kind, folders = type(handle), list[str | None]()
    name = kind.__name__
    if kind not in HANDLES.values():
        reference = reference_of(kind)
        name = reference.target
        folders.append(reference.search_path)
    if isinstance(handle, TrainHandle) and not handle.config.is_frozen:
        folders.append(handle.config.optimizer.folder_of_own())
    return name, [folder for folder in folders if folder]


def handle_from_plain(name: str, plain: Mapping[str, Any]) -> TrainHandle | GeneratorHandle:
    """The handle of this name; a worker accepts these names, and classes of handles.

    Args:
        name: class name of a handle, e.g. `FSDPPPOActor`, or where to import a user's own.
        plain: its section of the settings, as `to_plain` gives it.
    Raises: ConfigError: there is no such handle. WorkflowError: it cannot be imported.
    """
    found = resolve(ObjectReference(name)) if ":" in name else HANDLES.get(name)
    if not (isinstance(found, type) and issubclass(found, _BASES)):
        raise ConfigError(f"no engine handle is called {name!r}; there are {', '.join(HANDLES)}")
    handle_class: Any = found
    handle: TrainHandle | GeneratorHandle = handle_class(
        config=from_plain(handle_class.config_class, plain)
    )
    return handle
