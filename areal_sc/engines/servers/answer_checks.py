"""What every kind of server's answer has to keep. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from msgspec import Struct, ValidationError, convert

from areal_sc.errors import EngineFailed, ProtocolError

T = TypeVar("T")

ABORTED: Final = "abort"
_FINISHES: Final = ("stop", "length", ABORTED)


INITIAL_VERSION: Final = "default"
"""Name of the weights of a server that was given no version yet."""


class VersionSpan(Struct):
    """Tokens `start .. end` of an answer, sampled by one version of the weights, by its name."""

    version: str | int
    start: int
    end: int


def read_as(kind: type[T], answer: Mapping[str, Any], program: str) -> T:
    """An answer with the fields of a struct. Raises: ProtocolError: it has not got them."""
    try:
        return convert(answer, kind, strict=False)
    except ValidationError as error:
        raise ProtocolError(f"an answer of {program} cannot be read: {error}") from error


def check_finish(finish: str, program: str) -> None:
    """Raises: ProtocolError: an answer ended so, for an unknown reason."""
    if finish not in _FINISHES:
        raise ProtocolError(f"an answer of {program} ended for an unknown reason: {finish!r}")


def version_number(name: object) -> int | None:
    """Policy version that a server knows its weights by; None: they are no run's."""
    text = str(name)
    return int(text) if text.isdecimal() else {INITIAL_VERSION: 0}.get(text)


def version_of(name: object, program: str) -> int:
    """The same of weights that sampled tokens. Raises: ProtocolError: nobody has named them."""
    if not str(name).isdecimal():
        raise ProtocolError(
            f"an answer of {program} cannot be read: weights {name!r} are no policy version"
        )
    return int(str(name))


def versions_of(spans: Sequence[VersionSpan], num_tokens: int, program: str) -> list[int]:
    """[num_tokens] policy version that sampled each token.

    Raises: ProtocolError: the spans do not join, or do not cover the tokens, or are of weights that
        are no run's.
    """
    versions: list[int] = []
    for span in spans:
        if span.start != len(versions) or span.end < span.start:
            raise ProtocolError(f"the version spans of an answer of {program} do not join")
        versions += [version_of(span.version, program)] * (span.end - span.start)
    if len(versions) != num_tokens:
        raise ProtocolError(
            f"the version spans of an answer of {program} cover not {num_tokens} tokens but "
            f"{len(versions)}"
        )
    return versions


def finite_logprobs(logprobs: Sequence[float | None], versions: Sequence[int]) -> list[float]:
    """The log-probabilities, one a token.

    Args:
        versions: of the tokens, for the message; [] where they are not known.
    Raises: EngineFailed: one is missing or not finite.
    """
    finite = [value for value in logprobs if value is not None and math.isfinite(value)]
    if len(finite) != len(logprobs):
        version = f" of policy version {versions[-1]}" if versions else ""
        raise EngineFailed(
            f"the model{version} gave a log-probability that is not finite; its weights or its "
            "dtype's range are the likely cause"
        )
    return finite
