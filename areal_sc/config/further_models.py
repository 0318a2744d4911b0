"""The models beside the policy: which a run has, each with settings of its own.

A section of a run's settings names such a model by its `path`; what else is not set there is the
actor's.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final, NamedTuple

from areal_sc.config.ppo_settings import PPOConfig
from areal_sc.config.schema import (
    ActorConfig,
    CriticConfig,
    GRPOConfig,
    ModelBesideConfig,
    TeacherConfig,
)
from areal_sc.errors import ConfigError


class FurtherModel(NamedTuple):
    """What the models of a section are for.

    Attributes:
        output: what they compute of each trained token of a batch.
        field: its name among the fields of the batch; "": it is a number a row, for the reward.
    """

    output: str
    field: str


FURTHER_MODELS: Final = {
    "reference": FurtherModel("logprobs", "reference_logprobs"),
    "critic": FurtherModel("values", "values"),
    "teacher": FurtherModel("logprobs", "teacher_logprobs"),
    "reward_model": FurtherModel("scores", ""),
}
"""Sections, which are the roles of their models as well."""


_OF_TRAINING: Final = (
    *("algorithm", "ppo", "optimizer", "memory_snapshots"),
    *("activation_checkpointing", "activation_offload"),
)
"""Fields of `ActorConfig` that nothing reads of a model which only computes."""


def further_models(config: GRPOConfig) -> dict[str, ActorConfig]:
    """The settings of the models that a run has beside the policy, by their roles."""
    roles = (role for role in FURTHER_MODELS if getattr(config, role).path)
    return {role: as_actor(getattr(config, role), config.actor) for role in roles}


def further_model(config: GRPOConfig, role: str) -> ActorConfig:
    """The settings of one of them.

    Raises: ConfigError: there is no such section, or it names no model.
    """
    if role not in FURTHER_MODELS:
        raise ConfigError(f"role: expected one of {', '.join(FURTHER_MODELS)}, got {role!r}")
    models = further_models(config)
    if role not in models:
        raise ConfigError(f"{role}.path: no value; name the model of {role}, actor.path say")
    return models[role]


def as_actor(section: ModelBesideConfig, actor: ActorConfig) -> ActorConfig:
    """The settings of an engine: the section's own, and the actor's where it has none."""
    own: dict[str, Any] = {it.name: getattr(section, it.name) for it in fields(section)}
    if isinstance(section, CriticConfig):
        ppo = section.ppo
        own["ppo"] = PPOConfig(ppo.num_minibatches, ppo.loss, ppo.loss_settings)
    elif isinstance(section, TeacherConfig):
        own["lora"] = section.lora.whole()
    own |= {"is_frozen": section.is_frozen, "head": section.head, "routing_replay": False}
    # a folder without weights is drawn alike, whatever the model is for
    own["random_init"] = actor.random_init and section.path == actor.path
    idle = _OF_TRAINING if section.is_frozen else ("algorithm",)
    names = {it.name for it in fields(ActorConfig)}.difference(own, idle)
    return ActorConfig(**{name: getattr(actor, name) for name in names}, **own)
