"""Which models can be mapped to Megatron-core, and their sizes. No torch: read from `config.json`.

A family is in the table when every tensor has its place in Megatron-core's decoder and its forward
is the same one. What a model of a family has beyond that is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from areal_sc.config.parallel_settings import ParallelConfig
from areal_sc.errors import ConfigError, ModelError


@dataclass(frozen=True)
class Family:
    """What the models of one family have in common.

    Attributes:
        has_qkv_bias: queries, keys and values have biases.
        normalizes_heads: queries and keys of each head are normalised.
        has_experts: feed-forward layers are mixtures of experts, unless a model says otherwise.
        has_windows: a model may say that tokens attend to a window of the last ones.
        types_layers: it says of which layers this is so; otherwise it is so of all.
    """

    has_qkv_bias: bool = False
    normalizes_heads: bool = False
    has_experts: bool = False
    has_windows: bool = False
    types_layers: bool = False


FAMILIES = {
    "llama": Family(),
    "mistral": Family(has_windows=True),
    "mixtral": Family(has_experts=True, has_windows=True),
    "qwen2": Family(has_qkv_bias=True, has_windows=True, types_layers=True),
    "qwen3": Family(normalizes_heads=True, has_windows=True, types_layers=True),
    "qwen3_moe": Family(normalizes_heads=True, has_experts=True, has_windows=True),
}

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_OTHERWISE = "set actor.engine=fsdp"


class LayerKind(NamedTuple):
    """In what the layers of a model differ.

    Attributes:
        has_experts: its feed-forward layer is a mixture of experts.
        has_window: its tokens attend to a window.
    """

    has_experts: bool
    has_window: bool


@dataclass(frozen=True)
class ModelSizes:
    """What a mesh has to divide, and what the decoder is built from.

    Attributes:
        layers: from the first to the last one.
        window: tokens that a token attends to, itself included, in layers with a window.
        feed_forward: inner width of a feed-forward layer without experts.
        expert_width: inner width of one expert.
        num_experts: of each layer that has them; 0: no layer has.
        experts_per_token: that a token goes through.
        normalizes_experts: the weights of a token's experts add up to 1.
    """

    family: Family
    layers: tuple[LayerKind, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    norm_eps: float
    is_tied: bool
    window: int = 0
    expert_width: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    normalizes_experts: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelSizes:
        """Args:
            config: a Hugging Face configuration as a mapping; or `config.json`, which may not say
                which layers have windows: no mesh depends on that.
        Raises: ModelError: such a model cannot be mapped, or its sizes are not there.
        """
        name = str(config.get("model_type"))
        family = FAMILIES.get(name)
        if family is None:
            raise ModelError(
                f"actor.engine=megatron cannot map models of type {name!r}; it maps "
                f"{', '.join(FAMILIES)}; {_OTHERWISE}"
            )
        try:
            return cls._of(family, config)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ModelError(
                f"config.json does not give the sizes of a {name} model ({error!r}); copy it again"
            ) from error

    @classmethod
    def _of(cls, family: Family, config: Mapping[str, Any]) -> ModelSizes:
        if reasons := list(_differences(config, family)):
            name = config["model_type"]
            raise ModelError(
                f"actor.engine=megatron cannot map this {name} model, which has "
                f"{', and '.join(reasons)}; {_OTHERWISE}"
            )
        hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        window, layers = _window(config, family), _layers(config, family)
        experts: dict[str, Any] = {}
        if any(layer.has_experts for layer in layers):
            num_experts, per_token = _num_experts(config), _size(config, "num_experts_per_tok")
            if per_token > num_experts:
                raise ValueError(
                    f"expected num_experts_per_tok of at most {num_experts} experts, got "
                    f"{per_token}"
                )
            experts = {
                "expert_width": _size(config, "moe_intermediate_size", "intermediate_size"),
                "num_experts": num_experts,
                "experts_per_token": per_token,
                "normalizes_experts": bool(config.get("norm_topk_prob", True)),
            }
        return cls(
            family,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=_size(config, "num_key_value_heads", "num_attention_heads"),
            head_dim=int(config.get("head_dim") or hidden // heads),
            feed_forward=_size(config, "intermediate_size"),
            vocabulary=_size(config, "vocab_size"),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            is_tied=bool(config.get("tie_word_embeddings", False)),
            window=window,
            **experts,
        )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def rows_of_heads(self) -> int:
        """Rows of the matrix that makes queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def check_mesh(self, parallel: ParallelConfig) -> None:
        """Raises: ConfigError: the model does not come out even on the ranks."""
        tensor, expert = parallel.tensor, parallel.expert
        parallel.check_heads(self.heads, self.kv_heads)
        if expert > 1 and not self.num_experts:
            raise ConfigError(
                f"actor.parallel.expert: expected 1 for a model without experts, got {expert}"
            )
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
        is_dense = not all(layer.has_experts for layer in self.layers)
        stages = parallel.pipeline * parallel.virtual_pipeline
        times = " times virtual_pipeline" if parallel.virtual_pipeline > 1 else ""
        for setting, size, number, what in (
            ("tensor", tensor, self.rows_of_heads, "rows for queries, keys and values"),
            ("tensor", tensor if is_dense else 1, self.feed_forward, "features"),
            ("expert", expert, self.num_experts, "experts"),
            (f"pipeline{times}", stages, self.num_layers, "layers"),
        ):
            if number % size:
                raise ConfigError(
                    f"actor.parallel.{setting}: expected a divisor of the model's {number} "
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


def _size(config: Mapping[str, Any], *names: str) -> int:
    """The first of these settings that is there. Raises: ValueError: it is no size."""
    name = next((name for name in names if config.get(name) is not None), names[-1])
    size = int(config[name])
    if size < 1:
        raise ValueError(f"expected at least 1, got {name}={size}")
    return size


def _window(config: Mapping[str, Any], family: Family) -> int:
    """0: no layer has a window."""
    # Mistral and Mixtral have no switch beside the length
    is_used = family.has_windows and config.get("use_sliding_window", True)
    return int(config.get("sliding_window") or 0) if is_used else 0


def _layers(config: Mapping[str, Any], family: Family) -> tuple[LayerKind, ...]:
    number = _size(config, "num_hidden_layers")
    types = config.get("layer_types") if family.types_layers else None
    with_window = [
        _window(config, family) > 0 and (types is None or types[index] == "sliding_attention")
        for index in range(number)
    ]
    num_experts = _num_experts(config) if family.has_experts else 0
    dense = set(config.get("mlp_only_layers") or ())
    step = int(config.get("decoder_sparse_step", 1))
    with_experts = [
        num_experts > 0 and index not in dense and (index + 1) % step == 0
        for index in range(number)
    ]
    return tuple(map(LayerKind, with_experts, with_window))


def _num_experts(config: Mapping[str, Any]) -> int:
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def _differences(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """What keeps a model from being computed as the others of its family."""
    if config.get("attention_bias"):
        yield "biases in attention"
    if config.get("mlp_bias"):
        yield "biases in feed-forward layers"
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        yield f"the activation {activation}"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind not in _ROPE_TYPES:
        yield f"rotary embeddings of type {kind}, none of {', '.join(_ROPE_TYPES)}"
    if float(rope.get("partial_rotary_factor", 1.0)) != 1:
        yield "rotary embeddings of a part of each head"
    is_normalized = config.get("norm_topk_prob", True)
    if family.has_experts and is_normalized and config.get("num_experts_per_tok") == 1:
        yield "one expert a token, whose weight is made 1"
