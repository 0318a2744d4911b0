"""Requests to vLLM, and what its answers mean."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.servers.requests import CompletionRequest
from areal_sc.engines.servers.vllm.answers import read_answer, request_body, with_asked
from areal_sc.errors import ConfigError, EngineFailed, ProtocolError


def answer(**changed: Any) -> dict[str, Any]:
    choice = {
        "index": 0,
        "finish_reason": "length",
        "token_ids": [7, 8, 9],
        "logprobs": {
            "content": [
                {"token_id": 7, "logprob": -0.5, "rank": 1, "top_logprobs": []},
                {"token_id": 8, "logprob": -1.5, "rank": 4, "top_logprobs": []},
                {"token_id": 9, "logprob": -2.5, "rank": None, "top_logprobs": []},
            ]
        },
        "weight_versions": [
            {"version": "0", "start": 0, "end": 2},
            {"version": "12", "start": 2, "end": 3},
        ],
        **changed,
    }
    usage = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}
    return {"request_id": "x", "choices": [choice], "usage": usage}


def request(**settings: Any) -> CompletionRequest:
    sampling = GenerationConfig(max_new_tokens=9, **settings)
    return CompletionRequest(
        prompt=[1, 2],
        sampling=sampling,
        max_new_tokens=9,
        length_reason="length",
        stop_token_ids=(5, 6),
        is_truncated=sampling.top_p < 1 or sampling.top_k > 0,
        token_ids=[3],
        logprobs=[-1.0],
        versions=[0],
        request_id="abc",
    )


def test_an_answer_is_read() -> None:
    part = read_answer(answer())
    assert part.token_ids == [7, 8, 9]
    assert part.logprobs == [-0.5, -1.5, -2.5]
    assert part.versions == [0, 0, 12]
    found = (part.finish, part.num_prompt_tokens, part.num_cached_tokens)
    assert found == ("length", 10, 4)


def test_an_aborted_answer_may_be_empty() -> None:
    empty = {"token_ids": [], "logprobs": None, "weight_versions": None}
    part = read_answer(answer(finish_reason="abort", **empty))
    assert (part.token_ids, part.logprobs, part.versions, part.finish) == ([], [], [], "abort")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"finish_reason": "bored"}, "ended for an unknown reason: 'bored'"),
        ({"token_ids": [7, 8]}, "has 2 tokens, and log-probabilities of 3"),
        ({"token_ids": [7, 8, 8]}, "which are not those"),
        ({"weight_versions": None}, "cover not 3 tokens but 0"),
        ({"weight_versions": [{"version": "1", "start": 1, "end": 3}]}, "do not join"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 3}]}, "cannot be read"),
        ({"token_ids": ["a"]}, "cannot be read"),
    ],
)
def test_an_answer_that_makes_no_sense(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        read_answer(answer(**changed))


@pytest.mark.parametrize("reply", [{}, {"choices": []}, {"choices": 3}, {"choices": [3]}])
def test_another_reply_than_an_answer(reply: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        read_answer(reply)


def test_a_logprob_that_is_not_finite() -> None:
    content = [{"token_id": t, "logprob": v} for t, v in ((7, -0.5), (8, -9999.0), (9, -1.0))]
    with pytest.raises(EngineFailed, match=r"policy version 12 gave .* not finite"):
        read_answer(answer(logprobs={"content": content}))


def test_a_request_goes_on_from_what_was_sampled() -> None:
    body = request_body(request(temperature=0.5, stop_token_ids=[6]))
    assert body["request_id"] == "abc"
    assert body["token_ids"] == [1, 2, 3]
    parameters = body["sampling_params"]
    assert parameters["max_tokens"] == 8
    assert parameters["temperature"] == 0.5
    assert parameters["stop_token_ids"] == [5, 6]
    assert parameters["logprobs"] == 0
    assert "top_p" not in parameters


def test_no_token_ends_an_answer_that_is_too_short() -> None:
    asked = request_body(request(min_new_tokens=5))["sampling_params"]
    assert asked["min_tokens"] == asked["max_tokens"] == 4
    assert request_body(request(min_new_tokens=1))["sampling_params"]["min_tokens"] == 0


def test_truncation_is_asked_for() -> None:
    assert request_body(request(top_k=7))["sampling_params"]["top_k"] == 7
    parameters = request_body(request(top_p=0.25))["sampling_params"]
    assert (parameters["top_p"], parameters["top_k"]) == (0.25, -1)


def test_a_temperature_that_vllm_would_raise_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected 0, or at least 0\.01 with vLLM, got 0\.001"):
        request_body(request(temperature=0.001))
    assert request_body(request(temperature=0.0))["sampling_params"]["temperature"] == 0


def asking(**settings: Any) -> CompletionRequest:
    return replace(request(), **{"asks_prompt": True, "num_top": 2, **settings})


def told(**changed: Any) -> dict[str, Any]:
    """vLLM tells the token itself beside the most probable ones."""
    entries = [{"token_id": it, "logprob": lp} for it, lp in ((7, -0.5), (4, -0.1), (5, -2.5))]
    reply = answer()
    for entry in reply["choices"][0]["logprobs"]["content"]:
        entry["top_logprobs"] = entries
    places = [None, {"2": {"logprob": -4.0}, "6": {"logprob": -1.0}, "5": {"logprob": -0.5}}]
    reply["prompt_logprobs"] = [*places, {"3": {"logprob": -1.0}}]
    return {**reply, **changed}


def test_what_is_asked_for_besides() -> None:
    parameters = request_body(asking())["sampling_params"]
    assert (parameters["prompt_logprobs"], parameters["logprobs"]) == (2, 3)
    known = request_body(asking(prompt_logprobs=[math.nan, -1.0]))["sampling_params"]
    assert "prompt_logprobs" not in known
    part = with_asked(read_answer(told()), told(), asking())
    assert math.isnan(part.prompt_logprobs[0])
    assert part.prompt_logprobs[1:] == [-4.0]
    assert part.prompt_top == [[], [(5, -0.5), (6, -1.0)]]
    assert part.top == [[(4, -0.1), (7, -0.5)]] * 3


def test_what_was_asked_for_besides_is_missing() -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        with_asked(read_answer(answer()), answer(), asking())
    without = answer(finish_reason="abort")
    request_ = asking(num_top=0)
    request_.extend(with_asked(read_answer(without), without, request_))
    assert request_.is_prompt_missing


@pytest.mark.parametrize("settings", [{"num_top": 20}, {"num_top": 1, "is_truncated": True}])
def test_what_vllm_does_not_tell_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="top_k_logprobs: expected at most 19 with vLLM"):
        request_body(replace(request(), **settings))
