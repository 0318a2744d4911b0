"""What a model's role is called, and whether it is trained."""

from __future__ import annotations

from areal_sc.config.schema import ActorConfig
from areal_sc.errors import ConfigError
from areal_sc.nodes.spec import ROLLOUT_ROLE


def check_role(role: str) -> None:
    """Raises: ConfigError: it is no name for workers, logs and snapshots of a model."""
    is_word = role.isascii() and role.isidentifier() and role.islower()
    if role == ROLLOUT_ROLE or not is_word:
        raise ConfigError(
            f"role: expected a lower-case word other than {ROLLOUT_ROLE}, such as actor or ref, "
            f"got {role!r}"
        )


def check_trains(config: ActorConfig, role: str) -> None:
    """Raises: ConfigError: the model of this role only computes."""
    if config.is_frozen:
        raise ConfigError(
            f"the model of role {role!r} is frozen: it has no optimizer, and is not trained; give "
            "it an ActorConfig without is_frozen"
        )
