"""The probe at start: which of its ways a packed model takes, and what it makes of a few rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from areal_sc.config.schema import ModelHead
from areal_sc.engines.finite import require_finite
from areal_sc.engines.fsdp.packed_model import ModelAbilities, PackedModel
from areal_sc.engines.small_limits import with_small_limits
from areal_sc.engines.training.probe import probe_rows
from areal_sc.errors import ModelError

logger = logging.getLogger(__name__)

# Models that fail the probe do so by far: 0.66 where attention crosses rows.
_PROBE_TOLERANCE = 3e-4  # nats, float32

# Of a model's forward that lacks what a way needs, or takes rows of some lengths only.
_FORWARD_ERRORS = (TypeError, AttributeError, ValueError, IndexError, RuntimeError)

_SLOWEST = ModelAbilities(packs=False, has_linear_head=False)


@torch.no_grad()
def probe_abilities(
    model: PackedModel, longest_input: int, fill: Callable[[Any], None] = lambda causal_lm: None
) -> ModelAbilities:
    """Compares the fast paths with the model's own forward of one row at a time.

    The rows are longer than the model's windows, chunks and the like: these are made small.

    Args:
        model: whole (not sharded), in float32; its `abilities` are left as they were.
        longest_input: most tokens of a micro-batch; limits that it never reaches stay.
        fill: gives a copy of the model that is tried in its place the values that it lacks.
    Raises: ModelError: not even a padded batch gives what single rows give, or what they give
        depends on later tokens, or is not finite.
    """
    causal_lm = with_small_limits(model.causal_lm, model.own_attention, longest_input)
    if causal_lm is not model.causal_lm:
        fill(causal_lm)
        model = PackedModel(causal_lm, chunk_tokens=model.chunk_tokens, head=model.head)
    vocabulary = int(model.causal_lm.get_input_embeddings().weight.shape[0])
    name = type(model.causal_lm).__name__
    rows = probe_rows(vocabulary, model.device)
    try:
        with _trying(model, _SLOWEST):
            expected = [_single_row(model, row) for row in rows]
            shorter = _single_row(model, rows[0][:-1])
    except _FORWARD_ERRORS as error:
        raise ModelError(f"{name} does not compute rows of any length: {error!r}") from error
    require_finite(causal_lm, torch.cat([*expected, shorter]))
    if not bool((expected[0][:-1] - shorter).abs().max() <= _PROBE_TOLERANCE):
        raise ModelError(f"{name} is not causal here: a token changes what comes before it")

    def agrees(abilities: ModelAbilities) -> bool:
        try:
            difference = (_probe(model, rows, abilities) - torch.cat(expected)).abs().max()
        except _FORWARD_ERRORS as error:
            logger.info("model_probe abilities=%s error=%r", abilities, error)
            return False
        return bool(difference <= _PROBE_TOLERANCE)

    packs = agrees(ModelAbilities(packs=True, has_linear_head=False))
    found = ModelAbilities(
        packs,
        has_linear_head=model.head is ModelHead.lm
        and _gives_outputs_of_head(model, rows[0])
        and agrees(ModelAbilities(packs, has_linear_head=True)),
    )
    if not packs:
        if not agrees(found):
            raise ModelError(f"{name}: rows of a padded batch do not give what single rows give")
        logger.warning("model=%s cannot attend within packed rows: rows are padded, slower", name)
    if not found.has_linear_head and model.head is ModelHead.lm:
        logger.info("model=%s changes its logits: they are made by its own forward", name)
    return found


def _single_row(model: PackedModel, row: torch.Tensor) -> torch.Tensor:
    """[T] log-probabilities of token 1 after each of a row's, by the model's own forward.

    Of a model with a value head, what `_summed` gives.
    """
    if model.head is ModelHead.value:
        return _summed(model.body(input_ids=row[None], use_cache=False).last_hidden_state[0])
    logits = model.causal_lm(input_ids=row[None], use_cache=False).logits[0]
    logprobs: torch.Tensor = logits.log_softmax(-1)[:, 1]
    return logprobs


@torch.no_grad()
def probe_hidden(
    model: PackedModel, layers: Sequence[nn.Module], device: torch.device
) -> torch.Tensor:
    """Hidden states of a few rows behind the last of the layers, float32, of this rank's tokens.

    The model may be spread over ranks; all make the call.

    Args:
        device: on which it computes.
    Returns: [1, C, H], padding included; or padded rows, where the model does not pack them.
    Raises: ModelError: no layer is called.
    """
    newest: list[torch.Tensor] = []

    def capture(_module: Any, _inputs: Any, outputs: Any) -> None:
        newest[:] = [outputs if isinstance(outputs, torch.Tensor) else outputs[0]]

    vocabulary = int(model.causal_lm.config.get_text_config().vocab_size)
    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(capture))
        _outputs(model, probe_rows(vocabulary, device))
    if not newest:
        raise ModelError(f"{type(model.causal_lm).__name__} does not name its decoder layers")
    return newest[0].float().cpu()


def _gives_outputs_of_head(model: PackedModel, row: torch.Tensor) -> bool:
    """Whether the logits are what the output layer gives, even if that were large.

    Soft-capping, for one, changes small logits less than rounding does.
    """
    given: list[torch.Tensor] = []

    def enlarge(_module: Any, _inputs: Any, outputs: torch.Tensor) -> torch.Tensor:
        given.append(outputs * (1e3 / outputs.abs().max().clamp(min=1e-6)))
        return given[-1]

    head = model.causal_lm.get_output_embeddings()
    with _trying(model, _SLOWEST), head.register_forward_hook(enlarge):
        logits = model.causal_lm(input_ids=row[None], use_cache=False).logits
    return len(given) == 1 and torch.allclose(logits, given[0])


def _probe(
    model: PackedModel, rows: Sequence[torch.Tensor], abilities: ModelAbilities
) -> torch.Tensor:
    """[T] log-probabilities that `model` with these abilities gives; as `_single_row`."""
    with _trying(model, abilities):
        if model.head is ModelHead.lm:
            return _outputs(model, rows)
        layout = model.layout([len(row) for row in rows], model.device).on(model.device)
        _, hidden = model.hidden_states(torch.cat(list(rows)), layout)
        return _summed(hidden)  # values are 0 at first


def _outputs(model: PackedModel, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """[T] what the model gives of token 1 after each of the rows'."""
    input_ids = torch.cat(list(rows))
    device = input_ids.device
    layout = model.layout([len(row) for row in rows], device).on(device)
    positions = torch.arange(len(layout.own_tokens), device=input_ids.device)
    outputs: torch.Tensor = model(input_ids, layout, positions, torch.ones_like(positions), None)[0]
    return outputs


def _summed(hidden: torch.Tensor) -> torch.Tensor:
    """[T] of hidden states [T, H]: a sum with weights, of about the size of each."""
    width = hidden.shape[-1]
    weights = torch.arange(width, device=hidden.device).cos() / width**0.5
    summed: torch.Tensor = hidden.float() @ weights
    return summed


@contextmanager
def _trying(model: PackedModel, abilities: ModelAbilities) -> Iterator[None]:
    before, model.abilities = model.abilities, abilities
    try:
        yield
    finally:
        model.abilities = before
