"""What the operating system refuses, told by an error of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from areal_sc.errors import ArealError


@contextmanager
def os_errors_as(kind: type[ArealError], what: str) -> Iterator[None]:
    """An OSError within is raised as `kind`; `what` says what cannot be done."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}") from error
