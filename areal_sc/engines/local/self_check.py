"""Whether embedded generation gives a model's own log-probabilities: tried before it serves."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from areal_sc.engines.base import Completion
from areal_sc.engines.likely_rows import likely_rows, plain_logprobs
from areal_sc.engines.local.generator import SlotGenerator
from areal_sc.engines.local.model import LocalModel
from areal_sc.engines.local.slots import SlotRequest, SlotTable
from areal_sc.engines.rounding import Expected, measure_noise, require_determined
from areal_sc.engines.small_limits import with_small_limits
from areal_sc.errors import ModelError

_PROMPT_LENGTHS = (11, 4)
_NEW_TOKENS = 4
_MAX_TOKENS = max(_PROMPT_LENGTHS) + _NEW_TOKENS
_MAX_PREFILL_TOKENS = 8  # the longer prompt takes two passes


def check_generation(model: PreTrainedModel, longest_input: int) -> None:
    """Generates tokens of two prompts together and compares their log-probabilities.

    The prompts are text that the model finds likely, and longer than its windows and the like:
    these are made small. In half precision rounding may hide a wrong attention, so that a float32
    copy on the CPU is tried, too.

    Args:
        longest_input: most tokens of a sequence or a pass; longer windows stay as they are.
    Raises: ModelError: they are further from those of the model's own forward pass than rounding
        explains, or are not finite.
    """
    is_training = model.training
    model.eval()  # type: ignore[no-untyped-call]  # dropout is no rounding
    try:
        exact = model if model.dtype == torch.float32 else _in_float32(model)
        exact = _with_small_limits(exact, longest_input)
        prompts = likely_rows(exact, _PROMPT_LENGTHS)
        _compare(exact, exact, prompts)
        if model.dtype != torch.float32:
            _compare(_with_small_limits(model, longest_input), exact, prompts)
    finally:
        model.train(is_training)


def _with_small_limits(model: PreTrainedModel, longest_input: int) -> PreTrainedModel:
    smaller: PreTrainedModel = with_small_limits(
        model, model.config._attn_implementation, longest_input
    )
    return smaller


def _in_float32(model: PreTrainedModel) -> PreTrainedModel:
    converted = {
        id(p): nn.Parameter(p.detach().to("cpu", torch.float32), requires_grad=False)
        for p in model.parameters()
    }
    copied: Any = copy.deepcopy(model, converted)
    whole: PreTrainedModel = copied.to("cpu", torch.float32)  # its buffers, too
    return whole


def _compare(
    model: PreTrainedModel, exact: PreTrainedModel, prompts: Sequence[torch.Tensor]
) -> None:
    """Raises: ModelError. Args: exact: the same model in float32, by which rounding is measured."""
    local = LocalModel(model)
    generator = SlotGenerator(
        local, SlotTable(len(prompts), _MAX_TOKENS, _MAX_PREFILL_TOKENS, seed=0), _MAX_TOKENS
    )
    for index, prompt in enumerate(prompts):
        plain_logprobs(model, [prompt.to(model.device)])  # raises where they are not finite
        request = SlotRequest(index, prompt.cpu().numpy(), len(prompt) + _NEW_TOKENS, "length")
        generator.table.add(request)
    rows, found = list[torch.Tensor](), list[torch.Tensor]()
    while generator.table.has_work:
        try:
            finished = generator.step()
        except (IndexError, RuntimeError) as error:  # its layers differ in what they cache
            raise ModelError(
                f"{type(model).__name__} cannot be run by embedded generation: {error}"
            ) from error
        for request, completion in finished:
            assert isinstance(completion, Completion), "no request has an adapter"
            rows.append(torch.tensor([*request.prompt.tolist(), *completion.token_ids]))
            found.append(torch.tensor(completion.logprobs))

    def compute(num_copies: int) -> torch.Tensor:
        copies = [row.to(exact.device) for row in rows] * num_copies
        return _newest(plain_logprobs(exact, copies), copies).view(num_copies, -1)

    alone = [row.to(model.device) for row in rows]
    own = torch.cat([_newest(plain_logprobs(model, [row]), [row]) for row in alone])
    noise = measure_noise(exact, model.dtype, compute)
    if model.dtype == torch.float32:
        require_determined(model, noise)
    expected = Expected(own.cpu()[None], noise.cpu()[None], model.dtype)
    if (distance := expected.distance(torch.cat(found)[None])) > expected.limit:
        raise ModelError(
            f"{type(model).__name__}: log-probabilities of embedded generation differ by "
            f"{distance:.2g} times what rounding explains from those of a plain forward pass, "
            f"expected at most {expected.limit:g}; it attends in a way that embedded generation "
            "does not know: use SGLang"
        )


def _newest(logprobs: torch.Tensor, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """[R * K] of log-probabilities [T] of the tokens of rows: those of each one's last K tokens."""
    of_rows = torch.split(logprobs, [len(row) for row in rows])
    return torch.cat([of_row[-_NEW_TOKENS:] for of_row in of_rows])
