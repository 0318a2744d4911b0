"""What vLLM is asked for one completion, and what its answer means. No I/O."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from msgspec import Struct

from areal_sc.engines.servers.requests import (
    ABORTED,
    AnswerPart,
    CompletionRequest,
    VersionSpan,
    add_asked,
    check_finish,
    finite_logprobs,
    read_as,
    versions_of,
)
from areal_sc.errors import ConfigError, ProtocolError

_LEAST_TEMPERATURE = 0.01
"""vLLM takes this one for every lower temperature that is not 0."""

MAX_TOP = 19
"""vLLM tells 20 tokens at a place by default, of which the sampled one is one."""

_NOT_FINITE = -9999.0
"""What vLLM says in place of a log-probability that is not finite."""


class _LogprobEntry(Struct):
    """One token's.

    Attributes:
        top_logprobs: of the most probable tokens at its place, itself maybe among them.
    """

    token_id: int
    logprob: float
    top_logprobs: list[_LogprobEntry] = []


class _LogProbs(Struct):
    content: list[_LogprobEntry] | None = None


class _Choice(Struct):
    """A choice in an answer of `/inference/v1/generate`.

    Attributes:
        finish_reason: None in a part of a stream that is not the last one.
        weight_versions: of all tokens; None where none was sampled, and in such a part.
    """

    finish_reason: str | None
    token_ids: list[int] | None = None
    logprobs: _LogProbs | None = None
    weight_versions: list[VersionSpan] | None = None


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _PromptLogprob(Struct):
    logprob: float


class _VLLMAnswer(Struct):
    """A whole answer; or a part of a stream: of the answer, or behind it what was used."""

    choices: list[_Choice]
    usage: _Usage | None = None
    prompt_logprobs: list[dict[int, _PromptLogprob] | None] | None = None


def request_body(request: CompletionRequest) -> dict[str, Any]:
    """The body of `/inference/v1/generate`.

    Raises: ConfigError: vLLM would sample at another temperature.
    """
    sampling = request.sampling
    if 0 < sampling.temperature < _LEAST_TEMPERATURE:
        raise ConfigError(
            f"generation.temperature: expected 0, or at least {_LEAST_TEMPERATURE} with vLLM, got "
            f"{sampling.temperature}"
        )
    parameters: dict[str, Any] = {
        "max_tokens": request.num_asked_tokens,
        "min_tokens": request.num_asked_tokens if request.is_endless else 0,
        "temperature": sampling.temperature,
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": True,  # they are among the stop tokens
        "detokenize": False,
        # 0: of sampled tokens alone; they count where they are not the most probable ones
        "logprobs": request.num_top and request.num_top + 1,
    }
    if request.num_top > MAX_TOP or (request.num_top and request.is_truncated):
        raise ConfigError(
            f"top_k_logprobs: expected at most {MAX_TOP} with vLLM, and 0 with top_p or top_k, got "
            f"{request.num_top}"
        )
    if request.is_prompt_missing:
        parameters["prompt_logprobs"] = request.num_top
    if request.is_truncated:
        parameters |= {"top_p": sampling.top_p, "top_k": sampling.top_k or -1}
    body: dict[str, Any] = {
        "request_id": request.request_id,
        "token_ids": request.sent_ids,
        "sampling_params": parameters,
    }
    if request.pictures is not None:
        parts = [{"type": "image_url", "url": url} for url in request.pictures.urls]
        body |= {"content_parts": parts, "return_token_ids": True}
    return body


def read_answer(answer: dict[str, Any]) -> AnswerPart:
    """Checks an answer of `/inference/v1/generate` and takes out what matters.

    Raises: ProtocolError: something is missing, or lengths differ. EngineFailed: a
        log-probability is not finite.
    """
    whole = read_as(_VLLMAnswer, answer, "vLLM")
    try:
        (choice,) = whole.choices
    except ValueError as error:
        raise ProtocolError(f"an answer of vLLM cannot be read: {error}") from error
    if choice.finish_reason is None:
        raise ProtocolError("an answer of vLLM cannot be read: it does not tell why it ended")
    return _with_usage(_part_of(choice, 0), whole.usage or _Usage())


class StreamReader:
    """Reads the parts of one stream."""

    _last: AnswerPart | None = None

    def read(self, answer: dict[str, Any], num_known: int) -> AnswerPart | None:
        """The next part of the answer, if it is there; the last one comes with what was used.

        Raises: as `read_answer`.
        """
        part = read_as(_VLLMAnswer, answer, "vLLM")
        for choice in part.choices:
            read = _part_of(choice, num_known)
            if not read.finish:
                return read
            self._last = read
        if part.usage is None or self._last is None:
            return None
        return _with_usage(self._last, part.usage)


def _part_of(choice: _Choice, num_known: int) -> AnswerPart:
    """Without what is known of the prompt."""
    token_ids = choice.token_ids or []
    entries = (choice.logprobs and choice.logprobs.content) or []
    if [entry.token_id for entry in entries] != token_ids:
        raise ProtocolError(
            f"an answer of vLLM has {len(token_ids)} tokens, and log-probabilities of "
            f"{len(entries)}, which are not those"
        )
    finish, versions = choice.finish_reason or "", list[int]()
    if finish:
        check_finish(finish, "vLLM")
        versions = versions_of(choice.weight_versions or (), num_known + len(token_ids), "vLLM")
    told = [entry.logprob if entry.logprob > _NOT_FINITE else None for entry in entries]
    return AnswerPart(token_ids, finite_logprobs(told, versions), versions, finish, "", 0, 0)


def _with_usage(part: AnswerPart, usage: _Usage) -> AnswerPart:
    details = usage.prompt_tokens_details
    num_cached_tokens = (details and details.cached_tokens) or 0
    return replace(part, num_prompt_tokens=usage.prompt_tokens, num_cached_tokens=num_cached_tokens)


def with_asked(part: AnswerPart, answer: dict[str, Any], request: CompletionRequest) -> AnswerPart:
    """The part with what its request asks for besides.

    Raises: ProtocolError: it is missing. EngineFailed: a log-probability is not finite.
    """
    if not (request.is_prompt_missing or request.num_top):
        return part
    whole, prompt_logprobs = read_as(_VLLMAnswer, answer, "vLLM"), list[float]()
    if request.is_prompt_missing and (whole.prompt_logprobs or part.finish != ABORTED):
        prompt_logprobs = read_prompt_logprobs(answer, [*request.prompt, *request.token_ids])
    (choice,) = whole.choices
    entries = (choice.logprobs and choice.logprobs.content) or []
    return add_asked(
        part,
        request,
        prompt_logprobs,
        prompt_top=[
            [(token, it.logprob) for token, it in (of_place or {}).items()]
            for of_place in (whole.prompt_logprobs or [])[1:]
        ],
        top=[[(it.token_id, it.logprob) for it in entry.top_logprobs] for entry in entries],
        program="vLLM",
    )


def read_logprobs(answer: dict[str, Any]) -> list[float]:
    """[S] nats, of each sampled token, whatever weights it is of.

    Raises: ProtocolError: something is missing.
    """
    choices = read_as(_VLLMAnswer, answer, "vLLM").choices
    found = [(it.logprobs and it.logprobs.content) or [] for it in choices]
    return [entry.logprob for entries in found for entry in entries]


def read_prompt_logprobs(answer: dict[str, Any], token_ids: list[int]) -> list[float]:
    """[P - 1] nats, of a prompt's tokens but the first; NaN where one is not finite.

    Raises: ProtocolError: something is missing.
    """
    entries = read_as(_VLLMAnswer, answer, "vLLM").prompt_logprobs or []
    try:
        told = [
            of_place[token].logprob  # type: ignore[index]  # only the first place has nothing
            for token, of_place in zip(token_ids[1:], entries[1:], strict=True)
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"an answer of vLLM cannot be read: {error!r}") from error
    return [value if value > _NOT_FINITE else math.nan for value in told]
