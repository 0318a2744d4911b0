"""What SGLang is asked for one completion, and what its answer means. No I/O."""

from __future__ import annotations

import math
from typing import Any

from msgspec import Struct, ValidationError, convert

from areal_sc.engines.servers.answer_checks import finite_logprobs, versions_of
from areal_sc.engines.servers.client import ABORTED
from areal_sc.engines.servers.requests import AnswerPart, CompletionRequest
from areal_sc.errors import ProtocolError

_FINISHED = ("stop", "length")


class _FinishReason(Struct):
    type: str
    message: str | None = None


class _SGLangSpan(Struct):
    version: int
    start: int
    end: int


class _MetaInfo(Struct):
    """The `meta_info` of an answer of `/generate`.

    Attributes:
        output_token_logprobs: log-probability, token id and text of each token; not a number and
            infinity arrive as null. An aborted request that never ran has no list at all.
        input_token_logprobs: the same of the prompt, if asked for; the first has none.
        output_token_sampling_logprobs: the same under the truncated distribution, if asked for.
        weight_version: at the end of the answer.
        weight_versions: None from servers that do not tell.
    """

    finish_reason: _FinishReason
    weight_version: str = ""
    weight_versions: list[_SGLangSpan] | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    input_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    output_token_sampling_logprobs: list[float | None] | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0


class _SGLangAnswer(Struct):
    meta_info: _MetaInfo


def request_body(
    request: CompletionRequest, request_id: str, max_support: int | None
) -> dict[str, Any]:
    """The body of `/generate`; see `ServerClient.generate`."""
    sampling = request.sampling
    parameters: dict[str, Any] = {
        "max_new_tokens": request.num_asked_tokens,
        "temperature": sampling.temperature,
        "stop_token_ids": list(request.stop_token_ids),
        "skip_special_tokens": False,
    }
    body: dict[str, Any] = {
        "rid": request_id,
        "input_ids": [*request.prompt, *request.token_ids],
        "sampling_params": parameters,
        "return_logprob": True,
        "logprob_start_len": -1,
    }
    if max_support is not None:
        parameters["top_p"] = sampling.top_p
        parameters["top_k"] = min(sampling.top_k or max_support, max_support)
        body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
    return body


def read_answer(answer: dict[str, Any], *, is_truncated: bool) -> AnswerPart:
    """Checks an answer of `/generate` and takes out what matters.

    Raises: ProtocolError: something is missing, or lengths differ. EngineFailed: a
        log-probability is not finite.
    """
    try:
        meta = convert(answer, _SGLangAnswer, strict=False).meta_info
        entries = meta.output_token_logprobs or []
        versions = _versions(meta, len(entries))
    except (ValidationError, ValueError) as error:
        raise ProtocolError(f"an answer of SGLang cannot be read: {error}") from error
    finish, logprobs = meta.finish_reason, [entry[0] for entry in entries]
    if is_truncated:
        logprobs = meta.output_token_sampling_logprobs or []
    if finish.type not in (*_FINISHED, ABORTED):
        raise ProtocolError(f"an answer of SGLang ended for an unknown reason: {finish.type!r}")
    if len(logprobs) != len(entries):
        raise ProtocolError(
            f"an answer of SGLang has {len(entries)} tokens and {len(logprobs)} log-probabilities"
        )
    return AnswerPart(
        [entry[1] for entry in entries],
        finite_logprobs(logprobs, versions),
        versions,
        finish.type,
        finish.message or "",
        meta.prompt_tokens,
        meta.cached_tokens,
    )


def read_prompt_logprobs(answer: dict[str, Any], num_tokens: int) -> list[float]:
    """[P - 1] nats, of a prompt's tokens but the first; NaN where one is not finite.

    Raises: ProtocolError: something is missing.
    """
    try:
        entries = convert(answer, _SGLangAnswer, strict=False).meta_info.input_token_logprobs or []
    except ValidationError as error:
        raise ProtocolError(f"an answer of SGLang cannot be read: {error}") from error
    if len(entries) != num_tokens:
        raise ProtocolError(
            f"an answer of SGLang has {len(entries)} log-probabilities for a prompt of "
            f"{num_tokens} tokens"
        )
    return [math.nan if entry[0] is None else entry[0] for entry in entries[1:]]


def _versions(meta: _MetaInfo, num_tokens: int) -> list[int]:
    """[num_tokens] policy version that sampled each token.

    A server without spans tells one version; then nothing may be updated under a running request,
    which is why such servers are paused by aborting.
    """
    if num_tokens == 0:
        return []
    if meta.weight_versions is None:
        return [int(meta.weight_version)] * num_tokens
    return versions_of(meta.weight_versions, num_tokens, "SGLang")
