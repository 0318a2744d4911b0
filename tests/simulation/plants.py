"""Bugs to plant in the code under test: a simulation that finds none of them proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

PLANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {}
