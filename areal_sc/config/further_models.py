"""The models beside the policy: which a run has, each with settings of its own.

A section of a run's settings names such a model by its `path`; what else is not set there is the
actor's.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final, NamedTuple

from areal_sc.config.schema import ActorConfig, GRPOConfig
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


def further_models(config: GRPOConfig) -> dict[str, ActorConfig]:
    """The settings of the models that a run has beside the policy, by their roles."""
    sections: dict[str, Any] = {role: getattr(config, role) for role in FURTHER_MODELS}
    return {role: as_actor(section) for role, section in sections.items() if section.path}


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


def as_actor(section: ActorConfig) -> ActorConfig:
    """The same settings as those of an engine."""
    return ActorConfig(**{each.name: getattr(section, each.name) for each in fields(ActorConfig)})
