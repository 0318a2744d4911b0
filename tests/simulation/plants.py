"""Bugs to plant in the code under test: a simulation that finds none of them proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

PLANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {}
