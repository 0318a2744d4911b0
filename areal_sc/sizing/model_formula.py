"""A decoder's sizes by formula, from `config.json` alone: parameters and activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_DENSE = frozenset(("llama", "mistral", "phi3", "qwen2", "qwen3"))
_OF_EXPERTS = frozenset(("mixtral", "qwen3_moe"))
"""Families whose parameters the formulas count, each layer like the others."""

HEADS = ("num_attention_heads", "n_head")
_HIDDEN = ("hidden_size", "n_embd")
_FEED_FORWARD_TO_HIDDEN = 4
"""Where a file names no width of the feed-forward part."""


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of one decoder layer.

    Attributes:
        num_layers: like it.
        hidden: width of the hidden states.
        queries, keys: width of all query heads, and of all key heads, together.
        feed_forward: width of the gated part, or of one expert.
        num_experts: 0: none.
        experts_per_token: 0 without experts.
        heads: number of query heads.
        normalizes_heads: queries and keys have a norm of their own.
        stores_scores: its attention needs a formula that no fused kernel has (soft caps, sinks).
    """

    num_layers: int
    hidden: int
    queries: int
    keys: int
    feed_forward: int
    num_experts: int
    experts_per_token: int
    heads: int
    normalizes_heads: bool
    stores_scores: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> LayerSizes | None:
        """The sizes that the decoder's part of a `config.json` tells; None: it lacks one."""
        layers = first_int(config, "num_hidden_layers", "n_layer")
        heads, hidden = first_int(config, *HEADS), first_int(config, *_HIDDEN)
        if not layers or not heads or not hidden:
            return None
        head_dim = first_int(config, "head_dim") or hidden // heads
        experts = first_int(config, "num_local_experts", "num_experts") or 0
        width = first_int(config, "intermediate_size", "n_inner")
        if experts:
            width = first_int(config, "moe_intermediate_size") or width
        family = str(config.get("model_type"))
        return cls(
            num_layers=layers,
            hidden=hidden,
            queries=heads * head_dim,
            keys=(first_int(config, "num_key_value_heads") or heads) * head_dim,
            feed_forward=width or _FEED_FORWARD_TO_HIDDEN * hidden,
            num_experts=experts,
            experts_per_token=(first_int(config, "num_experts_per_tok") or 1) if experts else 0,
            heads=heads,
            normalizes_heads=family.startswith(("qwen3", "gemma3")),
            stores_scores=bool(config.get("attn_logit_softcapping")) or family == "gpt_oss",
        )

    def adapter_values(self, rank: int, targets: Sequence[str]) -> int:
        """Numbers of a low-rank adapter, over all layers; experts have none.

        Args:
            targets: ends of the names of its linear layers; (): all. One that is not known counts
                as the largest.
        """
        hidden = self.hidden
        sizes = {
            **dict.fromkeys(("q_proj", "o_proj"), hidden + self.queries),
            **dict.fromkeys(("k_proj", "v_proj"), hidden + self.keys),
        }
        if not self.num_experts:
            names = ("gate_proj", "up_proj", "down_proj")
            sizes |= dict.fromkeys(names, hidden + self.feed_forward)
        chosen = (target.rpartition(".")[2] for target in targets or sizes)
        largest = max(sizes.values())
        return self.num_layers * rank * sum(sizes.get(name, largest) for name in chosen)

    def score_bytes(self, row_tokens: int) -> int:
        """Bytes of attention scores that a layer keeps of one row; 0 where no kernel stores them.

        They are scaled, capped, masked, and normalised; each step keeps its own, in float32.
        """
        return 4 * 4 * self.heads * row_tokens**2 if self.stores_scores else 0

    @property
    def activation_values(self) -> int:
        """Numbers that a layer keeps of each token for its backward pass.

        Measured on transformers' layers in bfloat16: two norms and their float32 steps take 8 of
        the hidden width, a gated feed-forward part 4 of its own, attention 3 of its queries and 2
        of its keys, and 3 more of both where they are normalised. Float32 takes fewer.
        """
        experts = self.experts_per_token or 1
        of_norms = 3 * (self.queries + self.keys) if self.normalizes_heads else 0
        moved = 2 * self.experts_per_token * self.hidden
        of_attention = 3 * self.queries + 2 * self.keys + of_norms
        return 8 * self.hidden + of_attention + 4 * experts * self.feed_forward + moved

    @property
    def product_values(self) -> int:
        """Numbers of each token that a layer's products and attention give, and the layer gets."""
        experts = self.experts_per_token or 1
        of_feed_forward = experts * (2 * self.feed_forward + self.hidden)
        return 2 * self.hidden + 2 * (self.queries + self.keys) + of_feed_forward


def numbers_of_parameters(config: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of parameters in `ModelShape`; {} for families that are not known."""
    family, sizes = config.get("model_type"), LayerSizes.of(config)
    vocabulary = first_int(config, "vocab_size")
    if sizes is None or not vocabulary or family not in _DENSE | _OF_EXPERTS:
        return {}
    hidden, queries, keys = sizes.hidden, sizes.queries, sizes.keys
    layer = 2 * hidden * (queries + keys) + 2 * hidden  # projections, norms
    if family == "qwen2":
        layer += queries + 2 * keys
    elif config.get("attention_bias"):
        layer += queries + 2 * keys + hidden
    if sizes.normalizes_heads:
        layer += 2 * (queries // sizes.heads)
    feed_forward, experts = 3 * hidden * sizes.feed_forward, 0
    if family in _OF_EXPERTS:
        experts = sizes.num_experts * feed_forward
        layer += sizes.num_experts * hidden  # the router
        feed_forward = 0
    layer += feed_forward + experts
    matrix = vocabulary * hidden
    others = (1 if config.get("tie_word_embeddings") else 2) * matrix + hidden
    return {
        "num_parameters": sizes.num_layers * layer + others,
        "num_expert_parameters": sizes.num_layers * experts,
        "num_layer_parameters": layer,
        "num_other_parameters": others,
        "num_vocabulary_parameters": matrix,
    }


def first_int(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of the settings that is a number."""
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)
