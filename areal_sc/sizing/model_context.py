"""What is known of a model, and lengths of rows that follow from it, unless they are set."""

from __future__ import annotations

from areal_sc.config.schema import FURTHER_MODELS, ActorConfig, GRPOConfig, RolloutConfig
from areal_sc.errors import ConfigError
from areal_sc.hub import cached_model
from areal_sc.sizing.model_folder import ModelShape, read_model_shape


def known_shape(path: str) -> ModelShape | None:
    """The sizes of a model; None: it is not on this machine yet.

    Raises: ModelError: its folder exists and cannot be read.
    """
    folder = cached_model(path)
    return read_model_shape(folder) if folder else None


def num_parameters(model: ActorConfig | RolloutConfig) -> int:
    """Parameters of a model; 0: they are not known. Raises: as `known_shape`."""
    shape = known_shape(model.path)
    return (shape and shape.num_parameters) or 0


def known_context(path: str) -> int | None:
    """The longest sequence of a model; None: it is not on this machine, or does not say."""
    shape = known_shape(path)
    return shape.max_context_tokens if shape else None


def model_context(path: str) -> int:
    """The longest sequence of a model that has to be there.

    Raises: ConfigError: it is not, or does not say.
    """
    tokens = known_context(path)
    if tokens is None:
        raise ConfigError(
            f"rollout.max_context_tokens: 0 takes the limit of the model in {path}, which is not "
            "there yet or has none in its config.json; give a number, enough for prompt and answer"
        )
    return tokens


def take_context(config: GRPOConfig, *, generates: bool = True) -> None:
    """Puts a number in place of `rollout.max_context_tokens=0`, if the models are there already.

    A longer row than a micro-batch could be generated, but not trained. So where the length of rows
    or answers is set, and that of micro-batches is its default, these hold the longest row.

    Args:
        generates: False: nothing reads the number.
    """
    if not generates:
        return
    default = ActorConfig.max_tokens_per_micro_batch
    rollout, actor = config.rollout, config.actor
    known = known_context(actor.path)
    if known is not None and not rollout.max_context_tokens:
        num_tokens, of_answer = actor.max_tokens_per_micro_batch, config.generation.max_new_tokens
        if num_tokens == default <= of_answer:
            num_tokens += of_answer
        rollout.max_context_tokens = min(known, num_tokens)
    for model in (actor, *(getattr(config, role) for role in FURTHER_MODELS)):
        if model.max_tokens_per_micro_batch == default < rollout.max_context_tokens:
            model.max_tokens_per_micro_batch = rollout.max_context_tokens
