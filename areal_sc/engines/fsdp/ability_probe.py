"""The probe at start: which of its ways a packed model takes, and what it makes of a few rows."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence

from areal_sc.algorithms.shared_prefixes import Forest, share_prefixes
from areal_sc.config.schema import ModelHead
from areal_sc.engines.finite import require_finite
from areal_sc.engines.fsdp.packed_model import ModelAbilities, PackedModel
from areal_sc.engines.likely_rows import likely_rows
from areal_sc.engines.rounding import WRONG, Expected, measure_noise, require_determined
from areal_sc.engines.small_limits import with_same_weights, with_small_limits
from areal_sc.engines.training.streamed_layers import SharedPasses
from areal_sc.errors import ModelError

T = TypeVar("T")

logger = logging.getLogger(__name__)

# Of a model's forward that lacks what a way needs, or takes rows of some lengths only.
_FORWARD_ERRORS = (TypeError, AttributeError, ValueError, IndexError, RuntimeError)

_SLOWEST = ModelAbilities(packs=False, has_linear_head=False)


@dataclass(frozen=True, eq=False)
class ModelTrial:
    """What a probe at start found out about a model.

    Attributes:
        abilities: the ways that it takes.
        rows: those that were tried, each [T] int64: text that the model finds likely; one of them
            is a single token.
        expected: [T] what `probe_model` gives of the rows in the type that is computed in; nats.
        noise: what rounding does to one of these values, the mean over the rows' tokens.
    """

    abilities: ModelAbilities
    rows: tuple[torch.Tensor, ...]
    expected: Expected
    noise: float


class _ModelPasses:
    """Passes of a model that is tried. One whose layers are streamed is read once for all of them.

    Args: fill: gives a copy of the model the values that it lacks.
    """

    def __init__(self, model: PackedModel, fill: Callable[[Any], None]) -> None:
        self._model = model
        self._fill = fill
        self._is_streamed = any(parameter.is_meta for parameter in model.parameters())
        self._passes = SharedPasses()
        self.run = self._passes.run

    def add(
        self, compute: Callable[[PackedModel], T], abilities: ModelAbilities = _SLOWEST
    ) -> Future[T]:
        """What `compute` will have given, or raised, of a model that has these abilities."""

        def of_one() -> T:
            model = self._copy() if self._is_streamed else self._model
            with _trying(model, abilities):
                return compute(model)

        return self._passes.add(of_one)

    def _copy(self) -> PackedModel:
        model, causal_lm = self._model, self._model.causal_lm
        config = copy.deepcopy(causal_lm.config)
        causal_lm = with_same_weights(causal_lm, config, model.own_attention)
        self._fill(causal_lm)
        return PackedModel(causal_lm, chunk_tokens=model.chunk_tokens, head=model.head)


@torch.no_grad()
def probe_abilities(
    model: PackedModel,
    longest_input: int,
    fill: Callable[[Any], None] = lambda causal_lm: None,
    dtype: torch.dtype = torch.float32,
) -> ModelTrial:
    """Compares the fast paths with the model's own forward of one row at a time.

    The rows are longer than the model's windows, chunks and the like: these are made small. What is
    further apart than rounding explains is not taken.

    Args:
        model: whole (not sharded), in float32; its `abilities` are left as they were. One whose
            layers are streamed is read twice, four times if it cannot pack rows.
        longest_input: most tokens of a micro-batch; limits that it never reaches stay.
        fill: gives a copy of the model that is tried in its place the values that it lacks.
        dtype: the type that the model will compute in.
    Raises: ModelError: not even a padded batch gives what single rows give, or what they give
        depends on later tokens, or is not finite.
    """
    original = model
    causal_lm = with_small_limits(model.causal_lm, model.own_attention, longest_input)
    if causal_lm is not model.causal_lm:
        fill(causal_lm)
        model = PackedModel(causal_lm, chunk_tokens=model.chunk_tokens, head=model.head)
    name = type(causal_lm).__name__
    may_be_linear = model.head is ModelHead.lm
    packed = ModelAbilities(packs=True, has_linear_head=False)
    fastest = ModelAbilities(packs=True, has_linear_head=may_be_linear)
    sharing = ModelAbilities(packs=True, has_linear_head=False, shares=True)
    try:
        with _trying(model, _SLOWEST):
            rows = likely_rows(causal_lm)
        passes = _ModelPasses(model, fill)
        alone = [passes.add(partial(_of_batch, rows=[row])) for row in (*rows, rows[0][:-1])]
        moved = [
            passes.add(partial(_noise, rows=rows, dtype=it))
            for it in dict.fromkeys((torch.float32, dtype))
        ]
        is_linear = passes.add(partial(_gives_outputs_of_head, row=rows[0]))
        tried = {
            it: passes.add(partial(probe_model, rows=rows), it)
            for it in dict.fromkeys((packed, fastest, sharing))
        }
        passes.run()
        *of_rows, shorter = (it.result()[0] for it in alone)
        require_finite(causal_lm, torch.cat([*of_rows, shorter]))
        noises = [it.result() for it in moved]
    except _FORWARD_ERRORS as error:
        raise ModelError(f"{name} does not compute rows of any length: {error!r}") from error
    require_determined(causal_lm, noises[0])
    expected = Expected(torch.cat(of_rows), noises[0])
    before = expected.part(range(len(shorter) - 1))  # its last value is of another next token
    if before.distance(shorter[:-1]) > before.limit:
        raise ModelError(f"{name} is not causal here: a token changes what comes before it")

    def distance(abilities: ModelAbilities) -> float:
        if abilities not in tried:
            alone = _ModelPasses(model, fill)
            tried[abilities] = alone.add(partial(probe_model, rows=rows), abilities)
            alone.run()
        try:
            return expected.distance(tried[abilities].result())
        except _FORWARD_ERRORS as error:
            logger.info("model_probe abilities=%s error=%r", abilities, error)
            return math.inf

    pictures = original.pictures
    sees_ahead = pictures is not None and pictures.see_each_other
    packs = not sees_ahead and distance(packed) <= expected.limit
    found = ModelAbilities(
        packs,
        has_linear_head=may_be_linear
        and is_linear.result()
        and distance(ModelAbilities(packs, has_linear_head=True)) <= expected.limit,
        shares=packs and distance(sharing) <= expected.limit,
    )
    if not packs:
        _check_padded(name, distance(found))
    _tell_slower(name, found, may_be_linear=may_be_linear)
    is_likely = torch.cat([torch.arange(len(row)) < len(row) - 1 for row in rows])
    in_dtype = Expected(expected.values, noises[-1], dtype)
    return ModelTrial(found, tuple(rows), in_dtype, float(noises[-1][is_likely].mean()))


def _tell_slower(name: str, found: ModelAbilities, *, may_be_linear: bool) -> None:
    if found.packs and not found.shares:
        logger.info("model=%s: prompts that rows share are computed for each row", name)
    if may_be_linear and not found.has_linear_head:
        logger.info("model=%s changes its logits: they are made by its own forward", name)


def _check_padded(name: str, apart: float) -> None:
    """Raises: ModelError: padded rows are so far from single ones that something is wrong."""
    if apart > WRONG:
        raise ModelError(
            f"{name}: rows of a padded batch do not give what single rows give: they are "
            f"{apart:.2g} times as far apart as rounding moves them"
        )
    logger.warning(
        "model=%s cannot attend within packed rows: rows are padded, slower; distance=%.2g",
        name,
        apart,
    )


def _of_batch(model: PackedModel, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """For each row [T] log-probabilities of what `_targets` says, by the model's own forward.

    Of a model with a value head, what `_summed` gives.
    """
    batch = pad_sequence(list(rows), batch_first=True)
    if model.head is ModelHead.value:
        outputs = _summed(model.body(input_ids=batch, use_cache=False).last_hidden_state)
    else:
        targets = pad_sequence([_targets([row]) for row in rows], batch_first=True)
        logits = model.causal_lm(input_ids=batch, use_cache=False).logits
        outputs = logits.log_softmax(-1).gather(2, targets[..., None])[..., 0]
    return [output[: len(row)] for row, output in zip(rows, outputs, strict=True)]


def _noise(model: PackedModel, rows: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """[T] what rounding does to each of the values of `_of_batch`."""

    def compute(num_copies: int) -> torch.Tensor:
        return torch.cat(_of_batch(model, [*rows] * num_copies)).view(num_copies, -1)

    return measure_noise(model.causal_lm, dtype, compute)


def _targets(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """[T] the token behind each one of its row; behind the last one, the first."""
    return torch.cat([row.roll(-1) for row in rows])


def _gives_outputs_of_head(model: PackedModel, row: torch.Tensor) -> bool:
    """Whether the logits are what the output layer gives, even if that were large.

    Soft-capping, for one, changes small logits less than rounding does.
    """
    given: list[torch.Tensor] = []

    def enlarge(_module: Any, _inputs: Any, outputs: torch.Tensor) -> torch.Tensor:
        given.append(outputs * (1e3 / outputs.abs().max().clamp(min=1e-6)))
        return given[-1]

    head = model.causal_lm.get_output_embeddings()
    if head is None:
        return False
    with head.register_forward_hook(enlarge):
        logits = model.causal_lm(input_ids=row[None], use_cache=False).logits
    return len(given) == 1 and torch.allclose(logits, given[0])


@torch.no_grad()
def probe_model(model: PackedModel, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """[T] log-probabilities of what `_targets` says, of this rank's tokens.

    The model may be spread over ranks; all make the call. Of a model with a value head, whose
    values are 0 at first, what `_summed` gives.
    """
    if model.head is ModelHead.lm:
        return _outputs(model, rows)
    found = list[torch.Tensor]()
    with model.body.register_forward_hook(lambda *it: found.append(it[-1].last_hidden_state)):
        _outputs(model, rows)
    if model.abilities.packs:
        forest, summed = _forest(model, rows), _summed(found[0][0])
        return summed if forest is None else summed[torch.from_numpy(forest.computed_index)]
    return torch.cat([_summed(it[: len(row)]) for it, row in zip(found[0], rows, strict=True)])


def _outputs(model: PackedModel, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """[T] log-probabilities of what `_targets` says."""
    input_ids = torch.cat(list(rows))
    device = input_ids.device
    forest = _forest(model, rows)
    if forest is None:
        layout = model.layout([len(row) for row in rows], device).on(device)
        own = layout.own_tokens
        positions = torch.arange(len(own), device=device)
    else:
        layout = model.layout(forest.lengths, device, forest.parents).on(device)
        own, positions = range(len(input_ids)), torch.from_numpy(forest.computed_index).to(device)
        input_ids = input_ids[torch.from_numpy(forest.token_index).to(device)]
    targets = _targets(rows)[own.start : own.stop]
    outputs: torch.Tensor = model(input_ids, layout, positions, targets, None)[0]
    return outputs


def _forest(model: PackedModel, rows: Sequence[torch.Tensor]) -> Forest | None:
    """How the rows share their first token; ranks that share tokens would have them in parts."""
    if not model.abilities.shares or model.sequence is not None:
        return None
    return share_prefixes([[row.cpu().numpy() for row in rows]], 1)


def _summed(hidden: torch.Tensor) -> torch.Tensor:
    """[..., T] of hidden states [..., T, H]: a sum with weights, of about the size of each."""
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
