"""A causal language model seen as a function from packed rows to log-probabilities."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from areal_sc.algorithms.logprobs import (
    VocabularyPart,
    chunked_logprobs,
    chunked_top_logprobs,
    float32_linear,
    logprobs_of_logits,
    top_logprobs_of_logits,
)
from areal_sc.config.schema import ModelHead
from areal_sc.engines.fsdp.rounded_copies import RoundedCopies
from areal_sc.engines.fsdp.spread_vocabulary import SpreadRows
from areal_sc.engines.picture_inputs import PictureInputs, PictureRun, PictureSpan
from areal_sc.engines.rotary import rotate_rows_by_own_length
from areal_sc.engines.routers import Routers
from areal_sc.engines.training.packed_attention import (
    ATTENTION_NAME,
    COMPILED_NAME,
    PackedLayout,
    min_saved_tokens,
    register_packed_attention,
)
from areal_sc.engines.training.process_group import ProcessGroup
from areal_sc.engines.training.streamed_layers import text_part
from areal_sc.engines.training.value_head import values_of
from areal_sc.errors import ModelError

logger = logging.getLogger(__name__)

COMPILER = "inductor"
"""The backend of torch.compile."""

_MAX_GRAPHS = 32
"""Of a kind of layer: with and without gradients, adapter, windows; torch allows 8 by itself."""

_NO_GRAPH = (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit)


@dataclass(frozen=True)
class ModelAbilities:
    """What a probe at start found out about the model.

    Attributes:
        packs: rows can share one sequence. Otherwise they are padded into a batch, and the model
            attends by its own means.
        has_linear_head: logits are the output layer's product with the hidden states (and its
            bias). Otherwise the model's own forward makes them of the hidden states.
        shares: packed rows can share their first tokens: only attention sees other tokens.
    """

    packs: bool
    has_linear_head: bool
    shares: bool = False


class PackedModel(nn.Module):
    """Wraps an unmodified Hugging Face causal language model.

    It is the root that FSDP shards, so that within `forward` what FSDP has of the output layer is
    whole.

    Args:
        chunk_tokens, kept_tokens: see `chunked_logprobs`.
        head: of the model: with a value head it gives values in place of log-probabilities.
        replays_routes: tokens go through the experts that `forward` is given.
        pictures: of a model that reads them.

    Attributes:
        own_attention: the implementation that transformers has chosen for the model.
        packed_attention: the name of the implementation for packed rows.
        vocabulary: what the ranks that share this one's tokens have of the output layer; None: all
            of it.
        spread_rows: how embeddings and output layer are spread over ranks which compute other
            tokens, the latter last; nothing: they are not.
        adds_head_gradient: whether it is neither spread nor FSDP's, so that its gradient can be
            added up without autograd.
        sequence: ranks that share the tokens of each forward; None: this one has them all.
        meets_once: see `meet_once`.
        copies: with which it computes; None: with the parameters, or with what FSDP makes of them.
        is_compiled: torch compiles its layers.
        routers: of a model that replays routes; None: it does not.
    """

    def __init__(
        self,
        causal_lm: Any,
        *,
        chunk_tokens: int,
        kept_tokens: int = 0,
        head: ModelHead = ModelHead.lm,
        replays_routes: bool = False,
        pictures: PictureInputs | None = None,
    ) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.pictures = pictures
        self.head = head
        self.chunk_tokens = chunk_tokens
        self.kept_tokens = kept_tokens
        self.own_attention: str = text_part(causal_lm).config._attn_implementation
        self.packed_attention = ATTENTION_NAME
        self.vocabulary: VocabularyPart | None = None
        self.spread_rows: Sequence[SpreadRows] = ()
        self.adds_head_gradient = False
        self.sequence: ProcessGroup | None = None
        self.copies: RoundedCopies | None = None
        self.routers = Routers(causal_lm) if replays_routes else None
        self.is_compiled = self.has_few_sizes = self.meets_once = False
        rotate_rows_by_own_length(causal_lm)
        self.abilities = ModelAbilities(packs=True, has_linear_head=True)
        text_config = causal_lm.config.get_text_config()
        self.attention_width = int(getattr(text_config, "hidden_size", 0) or 1)

    @property
    def device(self) -> torch.device:
        """The device of this rank's parameters."""
        return next(self.parameters()).device

    @property
    def abilities(self) -> ModelAbilities:
        """Which ways it takes: what `probe_abilities` has found."""
        return self._abilities

    @abilities.setter
    def abilities(self, abilities: ModelAbilities) -> None:
        self._abilities = abilities
        model = text_part(self.causal_lm)
        if model._supports_attention_backend and model._can_set_attn_implementation():
            register_packed_attention()
            model.set_attn_implementation(
                self.packed_attention if abilities.packs else self.own_attention
            )

    @property
    def attends_by_interface(self) -> bool:
        """Whether its layers call the attention of this engine, and none of their own."""
        config = text_part(self.causal_lm).config
        return bool(config._attn_implementation == self.packed_attention)

    def compile_layers(self, layers: Sequence[nn.Module]) -> None:
        """Has torch compile the forward of each of its decoder layers, as one graph.

        The layers stay the modules that they are: parameters keep their names, and hooks of FSDP,
        which come later, are not compiled. Layers of one class share what is compiled, and it
        serves micro-batches of any size. Where torch cannot make one graph of a layer, all layers
        compute as they are, and a warning says why.

        Raises: ModelError: the layers are not known, or do not call this engine's attention.
        """
        name = type(self.causal_lm).__name__
        if not layers:
            raise ModelError(
                f"{name} does not name its decoder layers; expected actor.compile_layers=false, "
                "got true"
            )
        if not self.attends_by_interface:
            raise ModelError(
                f"{name} does not attend within packed rows by transformers' attention interface; "
                "expected actor.compile_layers=false, got true"
            )
        torch._dynamo.config.recompile_limit = _MAX_GRAPHS
        for layer in layers:
            compiled = torch.compile(layer.forward, backend=COMPILER, dynamic=True, fullgraph=True)
            layer.forward = functools.partial(self._of_layer, compiled, layer.forward)
        self.is_compiled = self.has_few_sizes = True
        self.packed_attention = COMPILED_NAME
        self.abilities = self._abilities

    def _of_layer(
        self,
        compiled: Callable[..., Any],
        plain: Callable[..., Any],
        *arguments: Any,
        **named: Any,
    ) -> Any:
        if self.is_compiled:
            try:
                return compiled(*arguments, **named)
            except _NO_GRAPH as error:
                self.is_compiled = False
                reason = " ".join(str(error).split())[:300]
                logger.warning("layers are not compiled, and slower: %s", reason)
        return plain(*arguments, **named)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Within it the model may compute; at its end the parameters are this rank's own again.

        What stands for them meanwhile, gathered or rounded, does not outlive a change of them.
        Where a pass fails within it, its gradients are forgotten, and the next one begins anew.
        """
        with nullcontext() if self.copies is None else self.copies.in_place():
            try:
                yield
                for rows in self.spread_rows:
                    rows.finish()
            except BaseException:
                self.forget_gradients()
                raise
            finally:
                for rows in self.spread_rows:
                    rows.let_go()
                for unit in self._units:
                    unit.reshard()  # the root stays whole after a forward without backward

    @property
    def _units(self) -> Iterator[FSDPModule]:
        return (unit for unit in self.modules() if isinstance(unit, FSDPModule))

    def meet_once(self) -> None:
        """From now on ranks that compute other tokens meet once within `computing`.

        Parameters that were gathered stay, and gradients are added up where they are computed, in
        float32: up to 6 bytes a parameter in 16 bits, 8 in float32. Each rank may run any number of
        micro-batches, but at least one.
        """
        self.meets_once = True
        for rows in self.spread_rows:
            rows.meets_once = True
        for unit in self._units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.set_reshard_after_backward(False, recurse=False)

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Where ranks meet once, gradients of all micro-batches are reduced behind the last one."""
        if self.meets_once and isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(is_last)

    def forget_gradients(self) -> None:
        """Those of an update that has failed, in whichever pass it was."""
        # FSDP would stay in the midst of that pass, and not drop what it has gathered; before
        # torch 2.13 nothing public ends the pass
        if (
            isinstance(self, FSDPModule)
            and hasattr(self, "reset_iter_state")
            and self._get_fsdp_state()._is_root  # None before the first pass
        ):
            self.reset_iter_state()
        for parameter in (*self.parameters(), *(self.copies.tensors if self.copies else ())):
            parameter.grad = None
        for rows in self.spread_rows:
            rows.forget_gradients()
        for unit in self._units:
            group = unit._get_fsdp_state()._fsdp_param_group
            for gathered in group.fsdp_params if group else ():
                gathered.unsharded_accumulated_grad = None
                if hasattr(gathered, "_unsharded_param"):  # in float32 they stay there
                    gathered._unsharded_param.grad = None

    @property
    def body(self) -> Any:
        """The model without its head."""
        decoder = self.causal_lm.get_decoder()
        if decoder is not self.causal_lm and isinstance(decoder, PreTrainedModel):
            return decoder
        # It is named as in the multimodal model that this one is a part of (Llama 4), or its
        # output layer is named `decoder` (ModernBERT).
        inner = (it for it in self.causal_lm.children() if isinstance(it, PreTrainedModel))
        return next(inner, decoder)

    def min_saved_tokens(self, device: torch.device) -> float:
        """From how many saved tokens on rows share their first ones; infinite: they never do."""
        # equal tokens of two rows may have gone through different experts
        if not self.abilities.shares or self.routers is not None:
            return math.inf
        return min_saved_tokens(device, self.attention_width)

    def layout(
        self,
        lengths: Sequence[int],
        device: torch.device,
        parents: Sequence[int] | None = None,
    ) -> PackedLayout:
        return PackedLayout.of(lengths, device, self.attention_width, self.sequence, parents)

    def forward(
        self,
        input_ids: torch.Tensor,
        layout: PackedLayout,
        positions: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor | None,
        routes: torch.Tensor | None = None,
        top_k: int = 0,
        pictures: Sequence[PictureRun] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of `targets`, each after the packed token at its position.

        Args:
            input_ids: [T] int64, the rows, or the runs that they share, one after the other.
            layout: their lengths and positions.
            positions: [N] int64, indices into this rank's tokens, `layout.own_tokens`.
            targets: [N] or [N, K] int64, token ids.
            temperatures: [N] > 0, divide the logits at each position; None: 1.
            routes: [T, L, k], see `Routers.given`, of a model that replays them.
            top_k: not 0: the most probable tokens are asked for, in place of `targets`.
            pictures: where tokens of rows with pictures are.
        Returns: logprobs as `targets`, entropy [N]; float32, nats. Of a model with a value head:
            values [N] float32, zeros [N]. With `top_k`: see `chunked_top_logprobs`.
        """
        if self.routers is not None:
            self.routers.given = None if routes is None else self._own_routes(routes, layout)
        output, hidden = self.hidden_states(input_ids, layout, pictures)
        hidden = hidden[positions]
        if self.head is ModelHead.value:
            values = values_of(self.causal_lm, hidden)
            return values, torch.zeros_like(values)
        if not self.abilities.has_linear_head:
            return self._own_logprobs(output, hidden, targets, temperatures, top_k)
        head = self.causal_lm.get_output_embeddings()
        if top_k:
            return chunked_top_logprobs(
                hidden,
                head.weight,
                top_k,
                bias=head.bias,
                temperatures=temperatures,
                chunk_tokens=self.chunk_tokens,
                vocabulary=self.vocabulary,
                rows=self.spread_rows[-1] if self.spread_rows else None,
            )
        return chunked_logprobs(
            hidden,
            head.weight,
            targets,
            bias=head.bias,
            temperatures=temperatures,
            chunk_tokens=self.chunk_tokens,
            kept_tokens=self.kept_tokens,
            vocabulary=self.vocabulary,
            adds_gradient=self.adds_head_gradient,
            rows=self.spread_rows[-1] if self.spread_rows else None,
        )

    def hidden_states(
        self,
        input_ids: torch.Tensor,
        layout: PackedLayout,
        pictures: Sequence[PictureRun] = (),
    ) -> tuple[Any, torch.Tensor]:
        """What the model without its head returns, and the [T, H] final hidden states in it."""
        arguments, is_token = self._inputs(input_ids, layout)
        body = self.body
        if pictures:
            given = self._picture_arguments(input_ids, layout, pictures)
            del arguments["input_ids"]
            arguments |= given
            if "token_type_ids" in given:  # of which the whole model makes a mask
                body = self.causal_lm.model
        output: Any = body(**arguments)
        hidden: torch.Tensor = output.last_hidden_state
        if self.pictures is not None and self.pictures.is_trained and torch.is_grad_enabled():
            hidden = hidden + self.pictures.zero().to(hidden)
        return output, hidden[0] if is_token is None else hidden[is_token]

    def _picture_arguments(
        self, input_ids: torch.Tensor, layout: PackedLayout, pictures: Sequence[PictureRun]
    ) -> dict[str, Any]:
        """What a forward is given in place of tokens, of which some are of pictures."""
        assert self.pictures is not None, "the engine has refused them"
        lengths = list(layout.lengths)
        spans = [
            PictureSpan(
                it.first, self.pictures.of_row(it.token_ids, it.pictures), it.start, it.stop
            )
            for it in pictures
        ]

        def spread(values: torch.Tensor) -> torch.Tensor:
            if self.abilities.packs:
                return values[None]
            return nn.utils.rnn.pad_sequence(list(torch.split(values, lengths)), batch_first=True)

        embed = self.causal_lm.get_input_embeddings()
        positions = layout.position_ids[0]
        return self.pictures.arguments(input_ids, spans, embed, positions, spread)

    def _own_logprobs(
        self,
        output: Any,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        temperatures: torch.Tensor | None,
        top_k: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes `forward` from logits that the model makes, in chunks, and in backward again.

        Args:
            output: of the model without its head, which gives `hidden` in its place meanwhile.
        """
        body, kind = self.body, type(output)
        head = self.causal_lm.get_output_embeddings()
        is_linear = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward

        def of_chunk(
            hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            # these hide the forwards of their classes
            body.forward = lambda *_, **__: kind(last_hidden_state=hidden[None])
            if is_linear:  # no rounding before the model scales or caps them
                head.forward = functools.partial(float32_linear, head)
            try:
                ids = targets if targets.dim() == 1 else targets[:, 0]
                logits = self.causal_lm(input_ids=ids[None], use_cache=False).logits[0]
            finally:
                del body.forward
                if is_linear:
                    del head.forward
            if top_k:
                return top_logprobs_of_logits(logits, top_k, temperatures=temperatures)
            return logprobs_of_logits(logits, targets, temperatures=temperatures)

        if len(targets) <= self.chunk_tokens:
            return of_chunk(hidden, targets, temperatures)
        parts = [
            checkpoint(
                of_chunk,
                hidden[chunk],
                targets[chunk],
                None if temperatures is None else temperatures[chunk],
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for first in range(0, len(targets), self.chunk_tokens)
            for chunk in [slice(first, first + self.chunk_tokens)]
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def _own_routes(self, routes: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        """The routes [T, L, k] of the tokens that this rank computes, in the order of its layers.

        Those of padding are not known.
        """
        if self.abilities.packs:
            return layout.own_values(routes.movedim(0, -1)).movedim(-1, 0)
        rows = torch.split(routes, list(layout.lengths))
        return nn.utils.rnn.pad_sequence(list(rows), batch_first=True).flatten(0, 1)

    def _inputs(
        self, input_ids: torch.Tensor, layout: PackedLayout
    ) -> tuple[dict[str, Any], torch.Tensor | None]:
        """The model's arguments, and [R, L] which places hold tokens when rows are padded."""
        # With a cache or an attention mask of ones, models silently attend across packed rows.
        if self.abilities.packs:
            return {
                "input_ids": layout.own_values(input_ids[None]),
                "attention_mask": None,
                "position_ids": layout.own_values(layout.position_ids),
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
