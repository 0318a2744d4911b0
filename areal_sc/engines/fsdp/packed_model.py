"""A causal language model seen as a function from packed rows to log-probabilities."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.initialization import no_init_weights

from areal_sc.algorithms.logprobs import chunked_logprobs, logprobs_of_logits
from areal_sc.engines.fsdp.packed_attention import PackedLayout, register_packed_attention
from areal_sc.engines.rotary import rotate_rows_by_own_length
from areal_sc.errors import ModelError

logger = logging.getLogger(__name__)

# Models that fail the probe do so by far: 0.66 where attention crosses rows.
_PROBE_TOLERANCE = 3e-4  # nats, float32
_PROBE_LENGTHS = (13, 3, 6, 1)
# A model may compute something else where a row, or all rows together, are longer than one of these
# settings. The probe makes them smaller than its rows.
_LENGTH_LIMITS = (
    *("sliding_window", "window_size", "attention_chunk_size", "keep_window_size"),
    *("floor_scale", "original_max_position_embeddings"),
)
_PROBE_LIMIT = 4


@dataclass(frozen=True)
class ModelAbilities:
    """What a probe at start found out about the model.

    Attributes:
        packs: rows can share one sequence. Otherwise they are padded into a batch, and the model
            attends by its own means.
        has_linear_head: logits are the output layer's product with the hidden states (and its
            bias), so they can be computed in chunks. Otherwise the model computes all of them.
    """

    packs: bool
    has_linear_head: bool


_OWN_FORWARD = ModelAbilities(packs=False, has_linear_head=False)


class PackedModel(nn.Module):
    """Wraps an unmodified Hugging Face causal language model.

    It is the root that FSDP shards, so that within `forward` the output layer's weight is whole.

    Attributes:
        own_attention: the implementation that transformers has chosen for the model.
    """

    def __init__(self, causal_lm: Any, *, chunk_tokens: int) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.chunk_tokens = chunk_tokens
        self.own_attention: str = causal_lm.config._attn_implementation
        rotate_rows_by_own_length(causal_lm)
        self.abilities = ModelAbilities(packs=True, has_linear_head=True)
        text_config = causal_lm.config.get_text_config()
        self.attention_width = int(getattr(text_config, "hidden_size", 0) or 1)

    @property
    def abilities(self) -> ModelAbilities:
        """Which ways it takes: what `probe_abilities` has found."""
        return self._abilities

    @abilities.setter
    def abilities(self, abilities: ModelAbilities) -> None:
        self._abilities = abilities
        model = self.causal_lm
        if model._supports_attention_backend and model._can_set_attn_implementation():
            model.set_attn_implementation(
                register_packed_attention() if abilities.packs else self.own_attention
            )

    def layout(self, lengths: Sequence[int], device: torch.device) -> PackedLayout:
        return PackedLayout.of(lengths, device, self.attention_width)

    def forward(
        self,
        input_ids: torch.Tensor,
        layout: PackedLayout,
        positions: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of `targets`, each after the packed token at its position.

        Args:
            input_ids: [T] int64, the rows one after the other.
            layout: their lengths and positions.
            positions: [N] int64, indices into the T tokens.
            targets: [N] int64, token ids.
            temperatures: [N] > 0, divide the logits at each position; None: 1.
        Returns: logprobs [N] float32, entropy [N] float32 without gradient; nats.
        """
        if not self.abilities.has_linear_head:
            logits = self._own_logits(input_ids, layout, positions)
            return logprobs_of_logits(logits, targets, temperatures=temperatures)
        hidden = self._hidden(input_ids, layout)[positions]
        head = self.causal_lm.get_output_embeddings()
        return chunked_logprobs(
            hidden,
            head.weight,
            targets,
            bias=head.bias,
            temperatures=temperatures,
            chunk_tokens=self.chunk_tokens,
        )

    def _hidden(self, input_ids: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        """[T, H] final hidden states."""
        arguments, is_token = self._inputs(input_ids, layout)
        hidden: torch.Tensor = self.causal_lm.base_model(**arguments).last_hidden_state
        return hidden[0] if is_token is None else hidden[is_token]

    def _own_logits(
        self, input_ids: torch.Tensor, layout: PackedLayout, positions: torch.Tensor
    ) -> torch.Tensor:
        """[N, V] logits at the positions, as the model makes them."""
        arguments, is_token = self._inputs(input_ids, layout)
        forward = self.causal_lm.forward
        if is_token is None and "logits_to_keep" in inspect.signature(forward).parameters:
            kept: torch.Tensor = self.causal_lm(**arguments, logits_to_keep=positions).logits[0]
            return kept
        logits: torch.Tensor = self.causal_lm(**arguments).logits
        return (logits[0] if is_token is None else logits[is_token])[positions]

    def _inputs(
        self, input_ids: torch.Tensor, layout: PackedLayout
    ) -> tuple[dict[str, Any], torch.Tensor | None]:
        """The model's arguments, and [R, L] which places hold tokens when rows are padded."""
        # With a cache or an attention mask of ones, models silently attend across packed rows.
        if self.abilities.packs:
            return {
                "input_ids": input_ids[None],
                "attention_mask": None,
                "position_ids": layout.position_ids,
                "use_cache": False,
                "layout": layout,
            }, None
        rows = torch.split(input_ids, list(layout.lengths))
        padded = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
        sizes = torch.tensor(layout.lengths, device=input_ids.device)
        is_token = torch.arange(padded.shape[1], device=input_ids.device)[None] < sizes[:, None]
        return {
            "input_ids": padded,
            "attention_mask": is_token.long(),
            "use_cache": False,
        }, is_token


@torch.no_grad()
def probe_abilities(model: PackedModel) -> ModelAbilities:
    """Compares the fast paths with the model's own forward of one row at a time.

    The rows are longer than the model's windows, chunks and the like: these are made small.

    Args:
        model: whole (not sharded), in float32; its `abilities` are left as they were.
    Raises: ModelError: not even a padded batch gives what single rows give.
    """
    model = _with_small_limits(model)
    device = next(model.parameters()).device
    vocabulary = int(model.causal_lm.get_input_embeddings().weight.shape[0])
    rows = [
        (torch.arange(length, device=device) * 7 + 3 * index) % vocabulary
        for index, length in enumerate(_PROBE_LENGTHS)
    ]
    expected = torch.cat([_probe(model, [row], _OWN_FORWARD) for row in rows])

    def agrees(abilities: ModelAbilities) -> bool:
        try:
            difference = (_probe(model, rows, abilities) - expected).abs().max()
        except (TypeError, AttributeError) as error:  # the forward lacks what this path needs
            logger.info("model_probe abilities=%s error=%r", abilities, error)
            return False
        return bool(difference <= _PROBE_TOLERANCE)

    packs = agrees(ModelAbilities(packs=True, has_linear_head=False))
    found = ModelAbilities(
        packs,
        has_linear_head=_gives_outputs_of_head(model, rows[0])
        and agrees(ModelAbilities(packs, has_linear_head=True)),
    )
    name = type(model.causal_lm).__name__
    if not packs:
        if not agrees(found):
            raise ModelError(f"{name}: rows of a padded batch do not give what single rows give")
        logger.warning("model=%s cannot attend within packed rows: rows are padded, slower", name)
    if not found.has_linear_head:
        logger.warning(
            "model=%s changes its logits: those of all trained tokens are in memory at once", name
        )
    return found


def _with_small_limits(model: PackedModel) -> PackedModel:
    """The same weights in a model whose limits are small; `model` itself if it has none.

    Raises: ModelError: the model cannot be built with such settings.
    """
    config = copy.deepcopy(model.causal_lm.config)
    if not _make_limits_small(vars(config.get_text_config())):
        return model
    config._attn_implementation = model.own_attention
    name = type(model.causal_lm).__name__
    try:
        with no_init_weights():
            causal_lm = type(model.causal_lm)(config)
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{name}: rows beyond its limits cannot be tried: {error}") from error
    causal_lm.load_state_dict(model.causal_lm.state_dict(), assign=True)  # shared, not copied
    return PackedModel(causal_lm.eval(), chunk_tokens=model.chunk_tokens)


def _make_limits_small(settings: dict[str, Any]) -> bool:
    """Changes the limits in the settings, nested ones too; whether there were any."""
    has_changed = False
    for name, value in settings.items():
        if isinstance(value, dict):
            has_changed |= _make_limits_small(value)
        elif name in _LENGTH_LIMITS and isinstance(value, int) and value > _PROBE_LIMIT:
            settings[name] = _PROBE_LIMIT
            has_changed = True
    return has_changed


def _gives_outputs_of_head(model: PackedModel, row: torch.Tensor) -> bool:
    """Whether the logits are what the output layer gives, even if that were large.

    Soft-capping, for one, changes small logits less than rounding does.
    """
    given: list[torch.Tensor] = []

    def enlarge(_module: Any, _inputs: Any, outputs: torch.Tensor) -> torch.Tensor:
        given.append(outputs * (1e3 / outputs.abs().max().clamp(min=1e-6)))
        return given[-1]

    head = model.causal_lm.get_output_embeddings()
    with _trying(model, _OWN_FORWARD), head.register_forward_hook(enlarge):
        logits = model.causal_lm(input_ids=row[None], use_cache=False).logits
    return len(given) == 1 and torch.allclose(logits, given[0])


def _probe(
    model: PackedModel, rows: Sequence[torch.Tensor], abilities: ModelAbilities
) -> torch.Tensor:
    """[T] log-probabilities that `model` with these abilities gives."""
    with _trying(model, abilities):
        input_ids = torch.cat(list(rows))
        positions = torch.arange(len(input_ids), device=input_ids.device)
        layout = model.layout([len(row) for row in rows], input_ids.device)
        targets = torch.ones_like(input_ids)
        logprobs: torch.Tensor = model(input_ids, layout, positions, targets, None)[0]
        return logprobs


@contextmanager
def _trying(model: PackedModel, abilities: ModelAbilities) -> Iterator[None]:
    before, model.abilities = model.abilities, abilities
    try:
        yield
    finally:
        model.abilities = before
