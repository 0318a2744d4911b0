"""One completion to sample, and what a server answers to it, whatever its kind. No I/O."""

from __future__ import annotations

import math
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct, ValidationError, convert

from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion, OnTokens, TopTokens
from areal_sc.engines.servers.pictures import SentPictures, check_read
from areal_sc.engines.stop_strings import StopStrings
from areal_sc.errors import EngineFailed, ProtocolError

T = TypeVar("T")

ABORTED: Final = "abort"
_FINISHES: Final = ("stop", "length", ABORTED)


INITIAL_VERSION: Final = "default"
"""Name of the weights of a server that was given no version yet."""

PIECE_TOKENS: Final = 64
"""Tokens that a server is asked for at once where strings end an answer: it has no tokenizer, so it
would go on behind them. It has the prompt of the next piece in its cache."""


@dataclass(frozen=True)
class AnswerPart:
    """One server's part of a completion.

    Attributes:
        token_ids, logprobs, versions: [S] tokens that the server sampled, the stop token included.
        finish: `stop`, `length`, or `abort`: there may be more. "": the server goes on.
        reason: with `abort`: what the server says of it.
        num_prompt_tokens: of the request, earlier parts included.
        num_cached_tokens: of these, those whose KV the server had.
        routes: base64 of int32 [n, layers, experts of a token], from the token on that the server
            was asked for; "": it does not tell.
        prompt_logprobs, prompt_top, top: as in `Completion`, where they were asked for; [] in later
            parts of a stream.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: str
    reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    routes: str = ""
    prompt_logprobs: Sequence[float] = ()
    prompt_top: Sequence[TopTokens] = ()
    top: Sequence[TopTokens] = ()

    def cut(self, num_tokens: int) -> AnswerPart:
        """Its first tokens, with which the answer ends."""
        return replace(
            self,
            token_ids=self.token_ids[:num_tokens],
            logprobs=self.logprobs[:num_tokens],
            versions=self.versions[:num_tokens],
            top=self.top[:num_tokens],
            finish="stop",
        )


@dataclass(eq=False)
class CompletionRequest:
    """One `generate` call, and what is known of its answer.

    Attributes:
        prompt: [P] token ids.
        max_new_tokens: that its length or the context allows.
        length_reason: `length` or `context`, whichever of the two is the limit.
        stop_token_ids: all that end it.
        is_truncated: the distribution that is sampled from is not the whole one.
        stops: strings that end it; they have read what was sampled so far.
        on_tokens: takes what is sampled, at once; None: it is asked for as a whole.
        token_ids, logprobs, versions: [C] sampled so far, as in `Completion`.
        request_id: by which its server knows what it is asked for now.
        has_stopped: a stop string is complete.
        is_given_up: nobody waits for it any more.
        num_losses: attempts that brought nothing, as their connection was lost.
        routes: [P + max_new_tokens, layers, experts of a token], of which the server has told the
            first `num_routed`; None: it is not asked.
        busy_since_s: since when the server has refused it, as it is full; None: it has not.
        adapter: name of the server's adapter to compute with; "": what all requests name.
        asks_prompt: the prompt's log-probabilities are asked for.
        num_top: the most probable tokens that are asked for at each place.
        prompt_logprobs, prompt_top, top: as in `Completion`, as far as the server has told.
        pictures: of the prompt; None: it has none.
    """

    prompt: list[int]
    sampling: GenerationConfig
    max_new_tokens: int
    length_reason: str
    stop_token_ids: tuple[int, ...]
    is_truncated: bool
    stops: StopStrings | None = None
    on_tokens: OnTokens | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    request_id: str = ""
    has_stopped: bool = False
    is_given_up: bool = False
    num_losses: int = 0
    busy_since_s: float | None = None
    routes: npt.NDArray[Any] | None = None
    num_routed: int = 0
    adapter: str = ""
    asks_prompt: bool = False
    num_top: int = 0
    prompt_logprobs: Sequence[float] = ()
    prompt_top: Sequence[TopTokens] = ()
    top: list[TopTokens] = field(default_factory=list)
    pictures: SentPictures | None = None

    @property
    def known_ids(self) -> list[int]:
        """The prompt and what was sampled behind it."""
        return [*self.prompt, *self.token_ids]

    @property
    def sent_ids(self) -> list[int]:
        """The same as a server takes them. Raises: WorkflowError: see `SentPictures.behind`."""
        if self.pictures is None:
            return self.known_ids
        return self.pictures.behind(self.token_ids)

    def check_read(self, answer: Mapping[str, Any], part: AnswerPart) -> None:
        """Compares the prompt that a server says it has read with this one, if it has pictures.

        Args:
            answer: the first one, and what it came to.
        Raises: NeverWorks: see `check_read`.
        """
        if self.pictures is not None and part.token_ids:
            check_read(answer.get("prompt_token_ids"), self.known_ids)

    @property
    def is_prompt_missing(self) -> bool:
        """The server has to tell the prompt's log-probabilities with the next part."""
        return self.asks_prompt and not self.prompt_logprobs

    @property
    def num_missing_tokens(self) -> int:
        return self.max_new_tokens - len(self.token_ids)

    @property
    def end_reason(self) -> str:
        """Why the answer ends with its last token; "" while more is to come."""
        if self.has_stopped or (self.token_ids and self.token_ids[-1] in self.stop_token_ids):
            return "stop"
        return self.length_reason if self.num_missing_tokens <= 0 else ""

    @property
    def num_asked_tokens(self) -> int:
        """The most tokens that the next part is asked for."""
        return self._num_asked_behind(len(self.token_ids))

    @property
    def is_endless(self) -> bool:
        """No token may end the next part."""
        return len(self.token_ids) < self.sampling.min_new_tokens

    def _num_asked_behind(self, num_known: int) -> int:
        num_tokens = self.max_new_tokens - num_known
        if num_known < self.sampling.min_new_tokens:
            num_tokens = min(num_tokens, self.sampling.min_new_tokens - num_known)
        return min(num_tokens, PIECE_TOKENS) if self._is_in_pieces else num_tokens

    @property
    def _is_in_pieces(self) -> bool:
        return self.stops is not None and self.on_tokens is None

    def extend(self, part: AnswerPart) -> AnswerPart:
        """Takes the part up to where a stop string is complete; returns this much of it."""
        if (stops := self.stops) is not None:
            ends = (n for n, token in enumerate(part.token_ids, 1) if stops.completes(token))
            if n := next(ends, 0):
                part, self.has_stopped = part.cut(n), True
        if part.token_ids:
            self.num_losses = 0
            if self.on_tokens is not None:
                self.on_tokens(part.token_ids)
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs
        self.versions += part.versions
        self.top += part.top
        if self.is_prompt_missing:
            self.prompt_logprobs, self.prompt_top = part.prompt_logprobs, part.prompt_top
        if self.routes is not None and part.routes:
            self._take_routes(self.routes[self.num_routed :], part.routes)
        return part

    def _take_routes(self, targets: npt.NDArray[Any], told: str) -> None:
        """Raises: ProtocolError: they are not of this model, or of more tokens."""
        try:
            new = np.frombuffer(b64decode(told), np.int32).reshape(-1, *targets.shape[1:])
            targets[: len(new)] = new
        except ValueError as error:
            raise ProtocolError(
                f"a server's routed experts are not of this model: {error}"
            ) from error
        self.num_routed += len(new)

    def needs_next_piece(self, part: AnswerPart) -> bool:
        """Whether the last part is all that its server was asked for, but not the whole rest."""
        num_asked = self._num_asked_behind(len(self.token_ids) - len(part.token_ids))
        is_piece = part.finish == "length" and len(part.token_ids) == num_asked
        return is_piece and self.num_missing_tokens > 0

    def completion(self, finish_reason: str) -> Completion:
        num_tokens = len(self.prompt) + len(self.token_ids)
        if self.routes is not None:  # the server may have sampled more
            self.routes[num_tokens - 1] = 0
        return Completion(
            self.token_ids,
            self.logprobs,
            self.versions,
            finish_reason,
            self.sampling.temperature,
            self.stops.strings if self.stops else (),
            None if self.routes is None else self.routes[:num_tokens],
            list(self.prompt_logprobs),
            list(self.prompt_top),
            self.top,
        )


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


def add_asked(
    part: AnswerPart,
    request: CompletionRequest,
    prompt_logprobs: Sequence[float],
    *,
    prompt_top: Sequence[TopTokens],
    top: Sequence[TopTokens],
    program: str,
) -> AnswerPart:
    """The part with what its request asks for besides.

    Args:
        prompt_logprobs, prompt_top: that the server has told, from the prompt's second token on;
            also those of tokens that were sampled before, and sent behind the prompt.
        top: where the part's tokens stand.
    Raises: ProtocolError: something is missing. EngineFailed: a log-probability is not finite.
    """

    def checked(tops: Sequence[TopTokens], num_tokens: int) -> list[TopTokens]:
        told = [sorted(it, key=lambda pair: -pair[1])[: request.num_top] for it in tops]
        if len(told) < num_tokens or not all(told[:num_tokens]):
            raise ProtocolError(f"an answer of {program} has not the most probable tokens")
        return told[:num_tokens]

    num_told = len(request.prompt) - 1
    if request.is_prompt_missing and (prompt_logprobs or part.finish != ABORTED):
        part = replace(
            part,
            prompt_logprobs=[
                math.nan,
                *finite_logprobs(prompt_logprobs[:num_told], part.versions),
            ],
            prompt_top=[[], *checked(prompt_top, num_told)] if request.num_top else [],
        )
    if request.num_top:
        part = replace(part, top=checked(top, len(part.token_ids)))
    return part


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
