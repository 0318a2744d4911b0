"""Requests to SGLang, and what its answers mean."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_sc.config.schema import (
    Device,
    GenerationConfig,
    RolloutConfig,
)
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.servers.requests import CompletionRequest
from areal_sc.engines.servers.sglang.answers import read_answer, request_body, with_asked
from areal_sc.engines.servers.sglang.handle import SGLangEngine
from areal_sc.errors import ConfigError, EngineFailed, ProtocolError, WorkflowError


def answer(**meta: Any) -> dict[str, Any]:
    return {
        "meta_info": {
            "finish_reason": {"type": "length", "length": 3},
            "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None], [-2.5, 9, None]],
            "weight_version": "2",
            "weight_versions": [
                {"version": "1", "start": 0, "end": 2},
                {"version": "2", "start": 2, "end": 3},
            ],
            "prompt_tokens": 10,
            "cached_tokens": 4,
            **meta,
        }
    }


def test_an_answer_is_read() -> None:
    part = read_answer(answer(), is_truncated=False)
    assert part.token_ids == [7, 8, 9]
    assert part.logprobs == [-0.5, -1.5, -2.5]
    assert part.versions == [1, 1, 2]
    assert (part.finish, part.num_prompt_tokens, part.num_cached_tokens) == (
        "length",
        10,
        4,
    )


def test_truncated_logprobs_are_taken_where_they_were_asked_for() -> None:
    reply = answer(output_token_sampling_logprobs=[-0.1, -0.2, -0.3])
    assert read_answer(reply, is_truncated=True).logprobs == [-0.1, -0.2, -0.3]
    assert read_answer(reply, is_truncated=False).logprobs == [-0.5, -1.5, -2.5]


def test_an_aborted_answer_may_be_empty() -> None:
    reply = {
        "meta_info": {
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "weight_version": "default",
        }
    }
    part = read_answer(reply, is_truncated=False)
    assert (part.token_ids, part.finish) == ([], "abort")
    assert part.reason == "Abort in waiting queue"


def test_a_server_without_spans_tells_one_version() -> None:
    reply = answer(weight_version="5", weight_versions=None)
    assert read_answer(reply, is_truncated=False).versions == [5, 5, 5]


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"finish_reason": {"type": "gone"}}, "unknown reason: 'gone'"),
        ({"finish_reason": None}, "cannot be read"),
        ({"output_token_logprobs": [[-0.5]]}, "cannot be read"),
        ({"output_token_logprobs": 3}, "cannot be read"),
        ({"weight_versions": [{"version": "1", "start": 0, "end": 2}]}, "cover not 3 tokens"),
        ({"weight_versions": [{"version": "1", "start": 1, "end": 3}]}, "do not join"),
        ({"weight_versions": None, "weight_version": "default"}, "cannot be read"),
    ],
)
def test_answers_that_no_server_gives(meta: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        read_answer(answer(**meta), is_truncated=False)
    with pytest.raises(ProtocolError):
        read_answer({}, is_truncated=False)
    with pytest.raises(ProtocolError, match="3 tokens and 0 log-probabilities"):
        read_answer(answer(), is_truncated=True)


def test_a_logprob_that_is_not_finite_is_the_engine_s_failure() -> None:
    reply = answer(output_token_logprobs=[[-0.5, 7, None], [None, 8, None], [-1.0, 9, None]])
    with pytest.raises(EngineFailed, match="policy version 2 gave a log-probability"):
        read_answer(reply, is_truncated=False)


def body(sampling: GenerationConfig, max_support: int | None) -> dict[str, Any]:
    request = CompletionRequest(
        prompt=[1],
        sampling=sampling,
        max_new_tokens=6,
        length_reason="length",
        stop_token_ids=(9,),
        is_truncated=max_support is not None,
        token_ids=[2],  # sampled before
        request_id="id",
    )
    return request_body(request, max_support)


async def test_the_whole_distribution_is_asked_for_without_filters() -> None:
    asked = body(GenerationConfig(temperature=0.7), None)
    assert asked["sampling_params"] == {
        "max_new_tokens": 5,
        "temperature": 0.7,
        "stop_token_ids": [9],
        "skip_special_tokens": False,
    }
    assert (asked["rid"], asked["input_ids"], asked["return_logprob"]) == ("id", [1, 2], True)


async def test_no_token_ends_an_answer_that_is_too_short() -> None:
    asked = body(GenerationConfig(min_new_tokens=4), None)["sampling_params"]
    assert asked["max_new_tokens"] == 3, "one is there"
    assert math.exp(asked["logit_bias"]["9"]) == 0
    assert "logit_bias" not in body(GenerationConfig(min_new_tokens=1), None)["sampling_params"]


async def test_a_truncated_distribution_has_a_bound_that_the_server_can_tell() -> None:
    asked = body(GenerationConfig(top_p=0.9), 64)
    assert asked["sampling_params"]["top_p"] == 0.9
    assert asked["sampling_params"]["top_k"] == 64
    assert asked["return_sampling_mask"] is True
    assert body(GenerationConfig(top_k=5), 64)["sampling_params"]["top_k"] == 5


@pytest.fixture(scope="module")
def make_request(
    tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., CompletionRequest]:
    """What an engine that takes 8 tokens makes of a call of `generate`."""
    config = RolloutConfig(path=str(tiny_model_folder), device=Device.cpu, max_context_tokens=8)
    engine = ServerEngine(
        SGLangEngine(config), log_folder=tmp_path_factory.mktemp("logs"), name="rollout"
    )

    def make(prompt: list[int], **sampling: Any) -> CompletionRequest:
        return engine._make_request(prompt, GenerationConfig(**sampling))

    return make


async def test_the_limit_of_an_answer_and_its_name(
    make_request: Callable[..., CompletionRequest],
) -> None:
    def limit(max_new_tokens: int) -> tuple[int, str]:
        request = make_request([1, 2, 3], max_new_tokens=max_new_tokens, stop_token_ids=[5, 5])
        assert request.stop_token_ids[-1] == 5
        assert len(set(request.stop_token_ids)) == len(request.stop_token_ids)
        return request.max_new_tokens, request.length_reason

    assert limit(4) == (4, "length")
    assert limit(5) == (5, "length")
    assert limit(6) == (5, "context")


async def test_which_distributions_are_truncated(
    make_request: Callable[..., CompletionRequest],
) -> None:
    for settings in ({}, {"top_k": 39}, {"temperature": 0.0, "top_p": 0.5, "top_k": 3}):
        assert not make_request([1], **settings).is_truncated
    for settings in ({"top_p": 0.99}, {"top_k": 38}):
        assert make_request([1], **settings).is_truncated


@pytest.mark.parametrize(
    ("prompt", "sampling", "error"),
    [
        ([], {}, WorkflowError),
        ([1] * 8, {}, WorkflowError),
        ([39], {}, WorkflowError),
        ([-1], {}, WorkflowError),
        ([1], {"temperature": float("nan")}, ConfigError),
        ([1], {"top_k": -1}, ConfigError),
        ([1], {"max_new_tokens": 0}, ConfigError),
    ],
)
async def test_requests_that_cannot_be(
    prompt: list[int],
    sampling: dict[str, Any],
    error: type[Exception],
    make_request: Callable[..., CompletionRequest],
) -> None:
    with pytest.raises(error):
        make_request(prompt, **sampling)


def told_routes(first: int, number: int) -> str:
    """Of tokens that went through experts of their own number."""
    values = np.arange(first, first + number, dtype=np.int32)
    return base64.b64encode(values.repeat(3 * 2).tobytes()).decode()


def test_routes_are_asked_for_from_the_first_that_is_not_known() -> None:
    """An answer in two parts of three tokens; nothing is known of the last one."""
    request = CompletionRequest([1, 2], GenerationConfig(), 6, "length", (), False)
    assert "return_routed_experts" not in request_body(request, None)
    request.routes = np.zeros((2 + 6, 3, 2), np.uint8)
    for first, number in ((0, 4), (4, 3)):
        body = request_body(request, None)
        assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, first)
        reply = answer(routed_experts=told_routes(first, number))
        request.extend(read_answer(reply, is_truncated=False))
    found = request.completion("stop").routes
    assert found is not None
    assert found[:, 2, 1].tolist() == [0, 1, 2, 3, 4, 5, 6, 0]


@pytest.mark.parametrize("number", [5, 6 * 9])
def test_routes_of_another_model_are_refused(number: int) -> None:
    """No whole token, or more tokens than there are."""
    request = CompletionRequest([1, 2], GenerationConfig(), 5, "length", (), False)
    request.routes = np.zeros((2 + 5, 3, 2), np.uint8)
    told = base64.b64encode(np.zeros(number, np.int32).tobytes()).decode()
    part = read_answer(answer(routed_experts=told), is_truncated=False)
    with pytest.raises(ProtocolError, match="routed experts are not"):
        request.extend(part)


def asking(**settings: Any) -> CompletionRequest:
    """Two tokens of a prompt, and one that was sampled before; all is asked for."""
    return CompletionRequest(
        prompt=[1, 2],
        sampling=GenerationConfig(max_new_tokens=9),
        max_new_tokens=9,
        length_reason="length",
        stop_token_ids=(),
        is_truncated=False,
        token_ids=[3],
        logprobs=[-1.0],
        versions=[0],
        adapter="adapter-1",
        **{"asks_prompt": True, "num_top": 2, **settings},
    )


def told(**meta: Any) -> dict[str, Any]:
    pairs = [[-0.1, 7, None], [-2.5, 4, None]]
    return answer(
        **{
            "input_token_logprobs": [[None, 1, None], [-0.25, 2, None], [-9.0, 3, None]],
            "input_top_logprobs": [None, [[-0.25, 2, None], [-1.5, 6, None]], pairs],
            "output_top_logprobs": [pairs, pairs, pairs],
            **meta,
        }
    )


def test_what_is_asked_for_besides_is_in_the_body() -> None:
    body = request_body(asking(), None)
    assert (body["logprob_start_len"], body["top_logprobs_num"]) == (0, 2)
    body = request_body(asking(prompt_logprobs=[math.nan, -1.0], num_top=0), None)
    assert body["logprob_start_len"] == -1  # it is known
    assert "top_logprobs_num" not in body


def test_what_is_asked_for_besides_is_read_once() -> None:
    request, pairs = asking(), [(7, -0.1), (4, -2.5)]
    part = with_asked(read_answer(told(), is_truncated=False), told(), request)
    assert math.isnan(part.prompt_logprobs[0])
    assert part.prompt_logprobs[1:] == [-0.25]
    assert part.prompt_top == [[], [(2, -0.25), (6, -1.5)]]
    request.extend(part)
    later = answer(output_top_logprobs=told()["meta_info"]["output_top_logprobs"])
    request.extend(with_asked(read_answer(later, is_truncated=False), later, request))
    completion = request.completion("length")
    assert completion.prompt_top == part.prompt_top
    assert completion.top == [pairs] * 6


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"input_token_logprobs": None}, "has 0 log-probabilities for a prompt of 3 tokens"),
        ({"input_top_logprobs": None}, "has not the most probable tokens"),
        ({"output_top_logprobs": [[[-0.1, 7, None]], None, None]}, "has not the most probable"),
    ],
)
def test_what_was_asked_for_besides_is_missing(meta: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        with_asked(read_answer(told(**meta), is_truncated=False), told(**meta), asking())


def test_a_prompt_whose_answer_was_aborted_at_once_is_asked_for_again() -> None:
    reply = {"meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "2"}}
    request = asking()
    request.extend(with_asked(read_answer(reply, is_truncated=False), reply, request))
    assert request_body(request, None)["logprob_start_len"] == 0
