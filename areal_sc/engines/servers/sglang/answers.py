"""What SGLang is asked for one completion, and what its answer means. No I/O."""

from __future__ import annotations

import math
from typing import Any, Final

from msgspec import Struct

from areal_sc.engines.base import TopTokens
from areal_sc.engines.servers.requests import (
    ABORTED,
    AnswerPart,
    CompletionRequest,
    VersionSpan,
    add_asked,
    check_finish,
    finite_logprobs,
    read_as,
    version_of,
    versions_of,
)
from areal_sc.errors import ProtocolError

_NEVER: Final = -1e9
"""Added to a logit that the token must not be sampled; JSON has no infinity."""

_Top = list[tuple[float | None, int, Any]]


class _FinishReason(Struct):
    """`status_code`: of HTTP, of a request that failed or was refused while it was streamed."""

    type: str
    message: str | None = None
    status_code: int | None = None


class _MetaInfo(Struct):
    """The `meta_info` of an answer of `/generate`.

    Attributes:
        finish_reason: None in a part of a stream that is not the last one.
        output_token_logprobs: log-probability, token id and text of each token; not a number and
            infinity arrive as null. An aborted request that never ran has no list at all.
        input_token_logprobs: the same of the prompt, if asked for; the first has none.
        output_top_logprobs, input_top_logprobs: the same of the most probable tokens at each place,
            if asked for; the first of the prompt has none.
        output_token_sampling_logprobs: the same under the truncated distribution, if asked for.
        completion_tokens: up to here, in a part of a stream; its lists may have these, or only
            those of the part.
        weight_version: at the end of the answer.
        weight_versions: None from servers that do not tell.
        routed_experts: see `AnswerPart.routes`, at the end of the answer, if asked for.
    """

    finish_reason: _FinishReason | None = None
    weight_version: str = ""
    weight_versions: list[VersionSpan] | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    input_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    output_top_logprobs: list[_Top | None] | None = None
    input_top_logprobs: list[_Top | None] | None = None
    output_token_sampling_logprobs: list[float | None] | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    routed_experts: str = ""


class _SGLangAnswer(Struct):
    meta_info: _MetaInfo


def request_body(request: CompletionRequest, max_support: int | None) -> dict[str, Any]:
    """The body of `/generate`; see `ServerClient.answer`."""
    sampling = request.sampling
    parameters: dict[str, Any] = {
        "max_new_tokens": request.num_asked_tokens,
        "temperature": sampling.temperature,
        "stop_token_ids": list(request.stop_token_ids),
        "skip_special_tokens": False,
    }
    body: dict[str, Any] = {
        "rid": request.request_id,
        "input_ids": request.sent_ids,
        "sampling_params": parameters,
        "return_logprob": True,
        "logprob_start_len": 0 if request.is_prompt_missing else -1,
    }
    if request.is_endless:  # its own `min_new_tokens` needs a tokenizer, which it has not
        parameters["logit_bias"] = {str(token): _NEVER for token in request.stop_token_ids}
    if request.pictures is not None:
        body |= {"image_data": request.pictures.urls, "return_prompt_token_ids": True}
    if request.num_top:
        body["top_logprobs_num"] = request.num_top
    if request.routes is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.num_routed}
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
    meta = _meta_of(answer)
    if meta.finish_reason is None:
        raise ProtocolError("an answer of SGLang cannot be read: it does not tell why it ended")
    return _part_of(meta, 0, len(meta.output_token_logprobs or ()), is_truncated=is_truncated)


def read_part(answer: dict[str, Any], num_known: int, *, is_truncated: bool) -> AnswerPart:
    """The same with a part of a stream; see `ServerClient.stream_answer`.

    Args:
        num_known: tokens of the parts before it.
    """
    meta = _meta_of(answer)
    num_tokens = meta.completion_tokens - num_known
    return _part_of(meta, num_known, num_tokens, is_truncated=is_truncated)


def _meta_of(answer: dict[str, Any]) -> _MetaInfo:
    return read_as(_SGLangAnswer, answer, "SGLang").meta_info


def _part_of(meta: _MetaInfo, num_known: int, num_tokens: int, *, is_truncated: bool) -> AnswerPart:
    """The last of its tokens; its lists may have the known ones, too."""
    finish = meta.finish_reason
    if finish is not None:
        check_finish(finish.type, "SGLang")
    # the lists may be missing where nothing is new: an answer was held, and then aborted
    entries = (num_tokens and meta.output_token_logprobs) or []
    logprobs = [entry[0] for entry in entries]
    if is_truncated and num_tokens:
        logprobs = meta.output_token_sampling_logprobs or []
    if len(logprobs) != len(entries):
        raise ProtocolError(
            f"an answer of SGLang has {len(entries)} tokens and {len(logprobs)} log-probabilities"
        )
    if num_tokens < 0 or len(entries) not in (num_tokens, num_known + num_tokens):
        raise ProtocolError(
            f"a part of an answer of SGLang has {len(entries)} tokens, expected {num_tokens} new "
            f"ones, or these and the {num_known} before them"
        )
    start = len(entries) - num_tokens
    versions = _versions(meta, num_known + num_tokens) if finish else []
    return AnswerPart(
        [entry[1] for entry in entries[start:]],
        finite_logprobs(logprobs[start:], versions),
        versions,
        finish.type if finish else "",
        (finish and finish.message) or "",
        meta.prompt_tokens,
        meta.cached_tokens,
        meta.routed_experts,
    )


def read_prompt_logprobs(answer: dict[str, Any], num_tokens: int) -> list[float]:
    """[P - 1] nats, of a prompt's tokens but the first; NaN where one is not finite.

    Raises: ProtocolError: something is missing.
    """
    entries = _meta_of(answer).input_token_logprobs or []
    if len(entries) != num_tokens:
        raise ProtocolError(
            f"an answer of SGLang has {len(entries)} log-probabilities for a prompt of "
            f"{num_tokens} tokens"
        )
    return [math.nan if entry[0] is None else entry[0] for entry in entries[1:]]


def with_asked(part: AnswerPart, answer: dict[str, Any], request: CompletionRequest) -> AnswerPart:
    """The part with what its request asks for besides.

    Raises: ProtocolError: it is missing. EngineFailed: a log-probability is not finite.
    """
    if not (request.is_prompt_missing or request.num_top):
        return part
    meta, prompt_logprobs = _meta_of(answer), list[float]()
    if request.is_prompt_missing and (meta.input_token_logprobs or part.finish != ABORTED):
        prompt_logprobs = read_prompt_logprobs(answer, len(request.prompt) + len(request.token_ids))
    return add_asked(
        part,
        request,
        prompt_logprobs,
        prompt_top=[_pairs(it) for it in (meta.input_top_logprobs or [])[1:]],
        top=[_pairs(it) for it in meta.output_top_logprobs or []],
        program="SGLang",
    )


def _pairs(top: _Top | None) -> TopTokens:
    return [(token, logprob) for logprob, token, _ in top or () if logprob is not None]


def _versions(meta: _MetaInfo, num_tokens: int) -> list[int]:
    """[num_tokens] policy version that sampled each token.

    A server without spans tells one version; then nothing may be updated under a running request,
    which is why such servers are paused by aborting.
    """
    if num_tokens == 0:
        return []
    if meta.weight_versions is not None:
        return versions_of(meta.weight_versions, num_tokens, "SGLang")
    return [version_of(meta.weight_version, "SGLang")] * num_tokens
