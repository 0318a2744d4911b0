"""What every kind of server's answer has to keep. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from msgspec import ValidationError, convert

from areal_sc.errors import EngineFailed, ProtocolError

T = TypeVar("T")

ABORTED: Final = "abort"
_FINISHES: Final = ("stop", "length", ABORTED)


class Span(Protocol):
    """Tokens `start .. end` of an answer, sampled by one version of the weights."""

    @property
    def version(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


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


def versions_of(spans: Sequence[Span], num_tokens: int, program: str) -> list[int]:
    """[num_tokens] policy version that sampled each token.

    Raises: ProtocolError: the spans do not join, or do not cover the tokens.
    """
    versions: list[int] = []
    for span in spans:
        if span.start != len(versions) or span.end < span.start:
            raise ProtocolError(f"the version spans of an answer of {program} do not join")
        versions += [span.version] * (span.end - span.start)
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
