"""Which models can be mapped to Megatron-core, and their sizes. No torch: read from `config.json`.

A family is in the table when every tensor has its place in Megatron-core's decoder and its forward
is the same one. What a model of a family has beyond that is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from areal_sc.config.parallel_settings import ParallelConfig
from areal_sc.errors import ConfigError, ModelError


@dataclass(frozen=True)
class Family:
    """What the models of one family have in common.

    Attributes:
        has_qkv_bias: queries, keys and values have biases.
        normalizes_heads: queries and keys of each head are normalised.
        has_experts: feed-forward layers are mixtures of experts.
    """

    has_qkv_bias: bool = False
    normalizes_heads: bool = False
    has_experts: bool = False


FAMILIES = {
    "llama": Family(),
    "qwen2": Family(has_qkv_bias=True),
    "qwen3": Family(normalizes_heads=True),
    "qwen3_moe": Family(normalizes_heads=True, has_experts=True),
}

_ROPE_TYPES = ("default", "linear", "llama3")
_OTHERWISE = "set actor.engine=fsdp"


@dataclass(frozen=True)
class ModelSizes:
    """What a mesh has to divide, and what the decoder is built from.

    Attributes:
        feed_forward: inner width of a feed-forward layer, or of one expert.
        num_experts: of a layer; 0: it has none.
        experts_per_token: that a token goes through.
        normalizes_experts: the weights of a token's experts add up to 1.
    """

    family: Family
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    norm_eps: float
    is_tied: bool
    num_experts: int = 0
    experts_per_token: int = 0
    normalizes_experts: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelSizes:
        """Args:
            config: `config.json`, or a Hugging Face configuration as a mapping.
        Raises: ModelError: such a model cannot be mapped.
        """
        name = str(config.get("model_type"))
        family = FAMILIES.get(name)
        if family is None:
            raise ModelError(
                f"actor.engine=megatron cannot map models of type {name!r}; it maps "
                f"{', '.join(FAMILIES)}; {_OTHERWISE}"
            )
        if reasons := list(_differences(config, family)):
            raise ModelError(
                f"actor.engine=megatron cannot map this {name} model, which has "
                f"{', and '.join(reasons)}; {_OTHERWISE}"
            )
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        width = "moe_intermediate_size" if family.has_experts else "intermediate_size"
        return cls(
            family,
            num_layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            feed_forward=int(config[width]),
            vocabulary=int(config["vocab_size"]),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            is_tied=bool(config.get("tie_word_embeddings", False)),
            num_experts=_num_experts(config) if family.has_experts else 0,
            experts_per_token=int(config["num_experts_per_tok"]) if family.has_experts else 0,
            normalizes_experts=bool(config.get("norm_topk_prob", False)),
        )

    def check_mesh(self, parallel: ParallelConfig) -> None:
        """Raises: ConfigError: the model does not come out even on the ranks."""
        tensor, expert = parallel.tensor, parallel.expert
        parallel.check_heads(self.heads, self.kv_heads)
        if self.num_experts and tensor > 1 and expert == 1:
            raise ConfigError(
                f"actor.parallel.expert: expected at least 2 for a model with experts on "
                f"actor.parallel.tensor={tensor} ranks, which compute whole experts each; got 1"
            )
        if self.vocabulary <= -(-self.vocabulary // tensor) * (tensor - 1):
            raise ConfigError(
                f"actor.parallel.tensor: expected ranks that each get some of the model's "
                f"{self.vocabulary} tokens, got {tensor}"
            )
        stages = parallel.pipeline * parallel.virtual_pipeline
        for setting, size, number, what in (
            ("tensor", tensor, self.kv_heads, "key-value heads"),
            ("tensor", 1 if self.num_experts else tensor, self.feed_forward, "features"),
            ("expert", expert, self.num_experts, "experts"),
            ("pipeline", stages, self.num_layers, "layers"),
        ):
            if number % size or (setting == "expert" and not number and size > 1):
                product = " times virtual_pipeline" if parallel.virtual_pipeline > 1 else ""
                times = product if setting == "pipeline" else ""
                raise ConfigError(
                    f"actor.parallel.{setting}{times}: expected a divisor of the model's {number} "
                    f"{what}, got {size}"
                )


def check_ranks(parallel: ParallelConfig) -> None:
    """Raises: ConfigError: no model could be spread over such a mesh."""
    if parallel.sequence > 1:
        raise ConfigError(
            f"actor.parallel.sequence: expected 1 with actor.engine=megatron, got "
            f"{parallel.sequence}: Megatron-core's context parallelism was never run here. Ranks "
            "of actor.parallel.tensor share the tokens outside of attention, too; or set "
            "actor.engine=fsdp, which shares them everywhere"
        )
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        raise ConfigError(
            "actor.parallel.virtual_pipeline: expected 1 with actor.parallel.pipeline=1, got "
            f"{parallel.virtual_pipeline}"
        )
    if parallel.data * parallel.tensor % parallel.expert:
        raise ConfigError(
            "actor.parallel.expert: expected a divisor of data times tensor "
            f"({parallel.data * parallel.tensor}), whose ranks share the experts, got "
            f"{parallel.expert}"
        )


def _num_experts(config: Mapping[str, Any]) -> int:
    return int(config.get("num_experts") or config["num_local_experts"])


def _differences(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """What keeps a model from being computed as the others of its family."""
    if config.get("attention_bias"):
        yield "biases in attention"
    if config.get("mlp_bias"):
        yield "biases in feed-forward layers"
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        yield "layers that attend to a window"
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        yield f"the activation {activation}"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind not in _ROPE_TYPES or float(rope.get("partial_rotary_factor", 1.0)) != 1:
        yield f"rotary embeddings other than {', '.join(_ROPE_TYPES)}"
    if family.has_experts:
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            yield "layers without experts"
        if config.get("norm_topk_prob") and config.get("num_experts_per_tok") == 1:
            yield "one expert a token, whose weight is made 1"
