"""Whether embedded generation gives a model's own log-probabilities: tried before it serves."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from areal_sc.engines.finite import require_finite
from areal_sc.engines.local.generator import SlotGenerator
from areal_sc.engines.local.model import LocalModel
from areal_sc.engines.local.slots import SlotRequest, SlotTable
from areal_sc.engines.small_limits import with_small_limits
from areal_sc.errors import ModelError

_PROMPT_LENGTHS = (11, 4)
_NEW_TOKENS = 3
_MAX_TOKENS = max(_PROMPT_LENGTHS) + _NEW_TOKENS
_MAX_PREFILL_TOKENS = 8  # the longer prompt takes two passes
# Attention that is another one than the model's differs by far: 0.7 nats and more.
_TOLERANCE = 3e-4  # nats, float32
_TOLERANCE_HALF_PRECISION = 0.5


def check_generation(model: PreTrainedModel, longest_input: int) -> None:
    """Generates tokens of two prompts together and compares their log-probabilities.

    The prompts are longer than the model's windows and the like: these are made small. In half
    precision rounding may hide a wrong attention, so that a float32 copy on the CPU is tried, too.

    Args:
        longest_input: most tokens of a sequence or a pass; longer windows stay as they are.
    Raises: ModelError: they differ from those of the model's own forward pass, or are not finite.
    """
    if model.dtype == torch.float32:
        _compare(model, longest_input, _TOLERANCE)
        return
    _compare(_in_float32(model), longest_input, _TOLERANCE)
    _compare(model, longest_input, _TOLERANCE_HALF_PRECISION)


def _in_float32(model: PreTrainedModel) -> PreTrainedModel:
    converted = {
        id(p): nn.Parameter(p.detach().to("cpu", torch.float32), requires_grad=False)
        for p in model.parameters()
    }
    copied: Any = copy.deepcopy(model, converted)
    whole: PreTrainedModel = copied.to("cpu", torch.float32)  # its buffers, too
    return whole


def _compare(model: PreTrainedModel, longest_input: int, limit: float) -> None:
    model = with_small_limits(model, model.config._attn_implementation, longest_input)
    local = LocalModel(model)
    generator = SlotGenerator(
        local, SlotTable(2, _MAX_TOKENS, _MAX_PREFILL_TOKENS, seed=0), _MAX_TOKENS
    )
    for index, length in enumerate(_PROMPT_LENGTHS):
        prompt = (np.arange(length) * 7 + 3 * index) % local.vocab_size
        require_finite(model, torch.tensor(_own_logprobs(model, prompt.tolist())))
        generator.table.add(SlotRequest(index, prompt, length + _NEW_TOKENS, "length"))
    differences = []
    while generator.table.has_work:
        try:
            finished = generator.step()
        except (IndexError, RuntimeError) as error:  # its layers differ in what they cache
            raise ModelError(
                f"{type(model).__name__} cannot be run by embedded generation: {error}"
            ) from error
        for request, completion in finished:
            expected = _own_logprobs(model, [*request.prompt.tolist(), *completion.token_ids])
            differences.append(np.subtract(completion.logprobs, expected[-_NEW_TOKENS:]))
    worst = float(np.abs(np.concatenate(differences)).max())
    if not worst <= limit:
        raise ModelError(
            f"{type(model).__name__}: log-probabilities of embedded generation differ by "
            f"{worst:.2g} nats from those of a plain forward pass, expected at most {limit:g}; "
            "it attends in a way that embedded generation does not know: use SGLang"
        )


@torch.inference_mode()
def _own_logprobs(model: Any, token_ids: list[int]) -> list[float]:
    """Log-probability of each token but the first, given those before it."""
    ids = torch.tensor([token_ids], device=model.device)
    is_training = model.training
    model.eval()
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    model.train(is_training)
    logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return logprobs.tolist()  # type: ignore[no-any-return]
