"""Advantages by name: built-in baselines, or a function of the user's own. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from areal_sc.algorithms.advantages import AdvantageRows, normalized_advantages
from areal_sc.algorithms.token_function import TokenFunction
from areal_sc.config.ppo_settings import BASELINES, GAE, PPOConfig
from areal_sc.errors import ConfigError
from areal_sc.user_code import user_code, user_function

AdvantageFunction = Callable[[AdvantageRows], npt.NDArray[np.float64]]
"""[R] advantages, one a row."""


def advantage_of(ppo: PPOConfig) -> AdvantageFunction:
    """The function that `actor.ppo.advantage` names, with its settings.

    Raises: ConfigError: there is no such function, it takes other settings, or advantages come
        from a critic, which only ranks have.
    """
    name = ppo.advantage
    if name in BASELINES:

        def normalize(rows: AdvantageRows) -> npt.NDArray[np.float64]:
            # of a sum with the KL in it nobody knows whether anything else differs
            is_unknown = rows.judged is None and ppo.reward_kl_coefficient > 0
            return normalized_advantages(
                rows.rewards,
                rows.groups,
                rows.episodes,
                mean=name,
                std="none" if is_unknown else ppo.advantage_std,
                deviation=ppo.advantage_deviation,
                judged=rows.judged,
            )

        return normalize
    names = f"{', '.join(BASELINES)}, {GAE} or package.module:function"
    if name == GAE:
        raise ConfigError(
            f"actor.ppo.advantage={GAE}: ranks compute it from a critic's values, a token each "
            "(areal_sc.algorithms.named_advantage.critic_fields)"
        )
    named = name, "rows", ppo.advantage_settings
    found = user_function(*named, what="actor.ppo.advantage", expected=names)

    def compute(rows: AdvantageRows) -> npt.NDArray[np.float64]:
        with user_code(f"advantage {name!r}"):
            advantages = np.asarray(found(rows), dtype=np.float64)
        if advantages.shape != rows.rewards.shape or not np.isfinite(advantages).all():
            raise ConfigError(
                f"actor.ppo.advantage {name!r}: expected {len(rows.rewards)} finite numbers, one a "
                f"row, got {advantages!s:.200}"
            )
        return advantages

    return compute


def critic_fields(ppo: PPOConfig) -> dict[str, TokenFunction]:
    """The fields that ranks make of a critic's `values`, with `actor.ppo.advantage: gae`.

    `advantages`, which the policy's loss reads, and `returns`, which the critic's does. Functions
    of tokens, for `TrainController.compute`.
    """
    settings: dict[str, Any] = {"discount": ppo.discount, "gae_lambda": ppo.gae_lambda}
    if ppo.reward_kl_coefficient:
        settings |= {"kl_coefficient": ppo.kl_coefficient, "kl_estimator": str(ppo.kl_estimator)}
    return {
        "returns": TokenFunction("areal_sc.algorithms.gae:token_returns", settings),
        "advantages": TokenFunction("areal_sc.algorithms.gae:token_advantages", settings),
    }


def kl_of_row(ppo: PPOConfig) -> TokenFunction:
    """The KL of a token to the reference, by `actor.ppo.kl_estimator`.

    For `TrainController.score`, which sums it up over a row: `actor.ppo.kl_coefficient` times this
    is what `kl_place: reward` takes from the row's reward, where no critic gives advantages.
    """
    return TokenFunction("areal_sc.algorithms.kl:sampled_kl", {"estimator": str(ppo.kl_estimator)})


def weight_spread(metrics: Mapping[str, float]) -> dict[str, float]:
    """How unequal the weights of a step's tokens are.

    Args: metrics: with the means of the weights and of their squares.
    Returns: their standard deviation, `behavior_weight_std`; and `effective_share`, the share of
        equally weighted tokens that would tell as much: (mean w)^2 / mean w^2 (Kish).
    """
    mean, square = metrics["behavior_weight"], metrics["behavior_weight_square"]
    share = mean**2 / square if square > 0 else math.nan
    spread = math.sqrt(max(0.0, square - mean**2)) if math.isfinite(square) else math.nan
    return {"behavior_weight_std": spread, "effective_share": share}


def explained_variance(metrics: Mapping[str, float]) -> float:
    """The share of the returns' variance that a critic's values explain, at most 1.

    1 - mean (V - R)^2 / Var(R): below 0 where the mean return would have been the better guess.

    Args:
        metrics: of a step, of the loss `value`.
    Returns: NaN where all returns are equal.
    """
    variance = metrics["return_square"] - metrics["return"] ** 2
    return 1 - metrics["value_error"] / variance if variance > 0 else math.nan
