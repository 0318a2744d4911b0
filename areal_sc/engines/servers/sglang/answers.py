"""What SGLang is asked for one completion, and what its answer means. No I/O."""

from __future__ import annotations

import math
from typing import Any

from areal_sc.engines.servers.client import ABORTED, AnswerPart, PartRequest
from areal_sc.errors import EngineFailed, ProtocolError

_FINISHED = ("stop", "length")


def request_body(request: PartRequest) -> dict[str, Any]:
    """The body of `/generate`."""
    sampling = request.sampling
    parameters: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens,
        "temperature": sampling.temperature,
        "stop_token_ids": list(request.stop_token_ids),
        "skip_special_tokens": False,
    }
    body: dict[str, Any] = {
        "rid": request.request_id,
        "input_ids": list(request.input_ids),
        "sampling_params": parameters,
        "return_logprob": True,
        "logprob_start_len": -1,
    }
    if request.max_support is not None:
        parameters["top_p"] = sampling.top_p
        parameters["top_k"] = min(sampling.top_k or request.max_support, request.max_support)
        body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
    return body


def read_answer(answer: dict[str, Any], *, is_truncated: bool) -> AnswerPart:
    """Checks an answer of `/generate` and takes out what matters.

    Raises: ProtocolError: something is missing, or lengths differ. EngineFailed: a
        log-probability is not finite.
    """
    try:
        meta = answer["meta_info"]
        finish = meta["finish_reason"]["type"]
        reason = str(meta["finish_reason"].get("message", ""))
        # an aborted request that never ran has no list at all
        entries = meta.get("output_token_logprobs") or []
        token_ids = [int(entry[1]) for entry in entries]
        logprobs = [entry[0] for entry in entries]
        if is_truncated:
            logprobs = meta.get("output_token_sampling_logprobs") or []
        versions = read_versions(meta, len(token_ids))
        num_prompt_tokens = int(meta.get("prompt_tokens", 0))
        num_cached_tokens = int(meta.get("cached_tokens", 0))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"an answer of SGLang cannot be read: {error!r}") from error
    if finish not in (*_FINISHED, ABORTED):
        raise ProtocolError(f"an answer of SGLang ended for an unknown reason: {finish!r}")
    if len(logprobs) != len(token_ids):
        raise ProtocolError(
            f"an answer of SGLang has {len(token_ids)} tokens and {len(logprobs)} log-probabilities"
        )
    # not a number and infinity arrive as null
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in logprobs):
        raise EngineFailed(
            f"the model of policy version {versions[-1] if versions else '?'} gave a "
            "log-probability that is not finite; its weights or its dtype's range are the likely "
            "cause"
        )
    return AnswerPart(
        token_ids,
        [float(value) for value in logprobs],
        versions,
        finish,
        reason,
        num_prompt_tokens,
        num_cached_tokens,
    )


def read_versions(meta: dict[str, Any], num_tokens: int) -> list[int]:
    """[num_tokens] policy version that sampled each token.

    A server without spans tells one version; then nothing may be updated under a running request,
    which is why such servers are paused by aborting.
    Raises: ProtocolError: the spans leave tokens out or overlap.
    """
    if num_tokens == 0:
        return []
    spans = meta.get("weight_versions")
    if spans is None:
        return [int(meta["weight_version"])] * num_tokens
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions) or span["end"] < span["start"]:
            raise ProtocolError(f"the version spans of an answer do not join: {spans}")
        versions += [int(span["version"])] * (span["end"] - span["start"])
    if len(versions) != num_tokens:
        raise ProtocolError(
            f"the version spans of an answer cover not {num_tokens} tokens: {spans}"
        )
    return versions
