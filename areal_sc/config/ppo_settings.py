"""What a policy learns by: the loss, its switches, and where advantages come from.

`--help` says what each switch is for, docs/algorithms.md which papers choose what.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from areal_sc.config.fields import Section, apart, setting

BASELINES: Final = ("group", "leave_one_out", "batch", "none")
"""What is subtracted from a reward: the mean of these."""

BASELINES_OF_OTHERS: Final = ("batch", "none")
"""Baselines to which a prompt's own answers give little or nothing."""

ROW_VALUES: Final = ("ratio", "k1", "k2", "k3", "error")
ROW_MEANS: Final = ("geometric_mean", "product", "mean", "sum", "max", "min", "token")
"""What `row_filter` may look at: `of` a token, `over` a row, or of each token by itself."""

ROW_FILTER: Final = (
    f"of: one of {', '.join(ROW_VALUES)}; over: one of {', '.join(ROW_MEANS)}, the first two "
    "of a ratio alone; also: maybe another such filter; and a number as low, high or both, "
    "low <= high"
)
"""What is expected of `row_filter`."""

GAE: Final = "gae"
"""Advantages from a critic's values."""

POLICY_GRADIENT: Final = "policy_gradient"
WITH_CROSS_ENTROPY: Final = "policy_gradient_and_cross_entropy"
POLICY_LOSSES: Final = (POLICY_GRADIENT, WITH_CROSS_ENTROPY)
"""The losses that have their settings in the section itself."""

# When a setting is idle, as `preflight.idle_settings` reads it.
_OTHER_LOSS: Final = f"loss!={','.join(POLICY_LOSSES)}"
_OF_LOSS: Final = (_OTHER_LOSS,)
_OF_RATIO: Final = (
    *_OF_LOSS,
    "num_minibatches=1 and clip_center=proximal: the only update starts at the clip's centre",
)
_OF_WEIGHT: Final = (*_OF_LOSS, "clip_center=behavior")
_OF_BOUNDS: Final = (*_OF_WEIGHT, "behavior_weight=none")
_OF_ADVANTAGE: Final = ("loss lacks advantages",)
_OF_DEVIATION: Final = (
    *_OF_ADVANTAGE,
    f"advantage!={','.join(BASELINES)}",
    "advantage_std=none",
)
_OF_GAE: Final = (*_OF_ADVANTAGE, f"advantage!={GAE}")
_OF_KL: Final = (
    "kl_coefficient=0",
    f"kl_place=loss and {_OTHER_LOSS}",
    "kl_place=reward and loss lacks advantages",
)


class NormScope(StrEnum):
    """Which episodes give an advantage's deviation: the prompt's, its others, the batch's, none."""

    group = "group"
    leave_one_out = "leave_one_out"
    batch = "batch"
    none = "none"


class Deviation(StrEnum):
    """Which standard deviation advantages are divided by: that of n, or of n - 1 degrees."""

    population = "population"
    sample = "sample"


class Level(StrEnum):
    """What a ratio is of.

    token: the token's two probabilities.
    sequence: the geometric mean over the row's trained tokens.
    """

    token = "token"
    sequence = "sequence"


class Gain(StrEnum):
    """How far a ratio counts.

    clip: PPO's: it is cut beyond clip_low and clip_high.
    stop_gradient_clip: it only weighs the log-probability, within these bounds.
    soft_gate: it counts less the further away it is.
    divergence: not at all where the token's divergence is above max_divergence.
    none: always.
    """

    clip = "clip"
    stop_gradient_clip = "stop_gradient_clip"
    soft_gate = "soft_gate"
    divergence = "divergence"
    none = "none"


class Divergence(StrEnum):
    """The distance of two policies at a token: total variation, or Kullback-Leibler."""

    tv = "tv"
    kl = "kl"


class ClipCenter(StrEnum):
    """The policy around which PPO clips.

    proximal: the one before this step's first update; decoupled PPO.
    behavior: the one that generated; the naive form.
    interpolated: between the one that generated and the current one, by staleness.
    """

    proximal = "proximal"
    behavior = "behavior"
    interpolated = "interpolated"


class BehaviorWeight(StrEnum):
    """The factor pi_centre / pi_behav: a token's, its row's geometric mean or product, or 1."""

    token = "token"
    sequence = "sequence"
    product = "product"
    none = "none"


class WeightBound(StrEnum):
    """What becomes of a token whose weight is out of bounds: it is left out, or clamped."""

    mask = "mask"
    clamp = "clamp"


class Aggregation(StrEnum):
    """What counts the same in the loss.

    token, sequence, episode, prompt: each one in the minibatch.
    constant: tokens, and what they sum up to is divided by episodes * aggregation_tokens.
    """

    token = "token"
    sequence = "sequence"
    episode = "episode"
    prompt = "prompt"
    constant = "constant"


class KLEstimator(StrEnum):
    """How the divergence from a reference is estimated: d, d^2 / 2, or exp(-d) - 1 + d.

    In a loss the gradient is that of the divergence with each of them; in a reward only with k1.
    """

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class KLPlace(StrEnum):
    """Where the divergence from a reference is a penalty."""

    loss = "loss"
    reward = "reward"


@dataclass
class PPOConfig(Section):
    """Decoupled PPO (AReaL, arXiv:2505.24298, section 5.2), and switches to other losses."""

    num_minibatches: int = setting(4, "optimizer updates a training step", ge=1)
    loss: str = setting(
        POLICY_GRADIENT, "its name; your own by import path: package.module:function"
    )
    loss_settings: dict[str, Any] = setting(dict, "settings of another loss than policy_gradient")
    advantage: str = setting(
        "group",
        "reward less the mean of: group, leave_one_out, batch, none; gae; or your function",
        idle=_OF_ADVANTAGE,
    )
    advantage_settings: dict[str, Any] = setting(
        dict, "settings of a function of your own", idle=_OF_ADVANTAGE
    )
    advantage_std: NormScope = setting(
        NormScope.group, idle=(*_OF_ADVANTAGE, f"advantage!={','.join((*BASELINES, GAE))}")
    )
    advantage_deviation: Deviation = setting(Deviation.population, idle=_OF_DEVIATION)
    discount: float = setting(1.0, "gamma, a token; with advantage gae", ge=0, le=1, idle=_OF_GAE)
    gae_lambda: float = setting(1.0, "lambda of GAE; with advantage gae", ge=0, le=1, idle=_OF_GAE)
    ratio: Level = setting(Level.token, idle=_OF_RATIO)
    gain: Gain = setting(Gain.clip, idle=_OF_LOSS)
    clip_low: float = setting(
        0.2,
        "the ratio is clipped below 1 - clip_low",
        gt=0,
        le=1,
        idle=(*_OF_RATIO, "gain!=clip,stop_gradient_clip"),
    )
    clip_high: float = setting(
        0.2,
        "the ratio is clipped above 1 + clip_high",
        gt=0,
        infinite=True,
        idle=(*_OF_RATIO, "gain!=clip,stop_gradient_clip"),
    )
    clip_dual: float = setting(
        math.inf,
        "where the advantage is negative the ratio counts as no more",
        gt=1,
        infinite=True,
        idle=(*_OF_RATIO, "gain!=clip"),
    )
    gate_positive: float = setting(
        1.0,
        "of soft_gate, where the advantage is positive",
        gt=0,
        idle=(*_OF_RATIO, "gain!=soft_gate"),
    )
    gate_negative: float = setting(
        1.05,
        "of soft_gate, where the advantage is negative",
        gt=0,
        idle=(*_OF_RATIO, "gain!=soft_gate"),
    )
    divergence: Divergence = setting(Divergence.tv, idle=(*_OF_RATIO, "gain!=divergence"))
    max_divergence: float = setting(
        math.inf,
        "of gain divergence; in nats, or for tv of [0, 1]",
        gt=0,
        infinite=True,
        idle=(*_OF_RATIO, "gain!=divergence"),
    )
    clip_center: ClipCenter = setting(
        ClipCenter.proximal, idle=(f"{_OTHER_LOSS} and loss lacks proximal_logprobs",)
    )
    behavior_weight: BehaviorWeight = setting(BehaviorWeight.token, idle=_OF_WEIGHT)
    behavior_weight_bound: WeightBound = setting(
        WeightBound.mask,
        idle=(*_OF_BOUNDS, "behavior_weight_floor=0 and behavior_weight_cap=inf"),
    )
    behavior_weight_floor: float = setting(
        0.0, "lower bound of the behaviour weight", ge=0, le=1, idle=_OF_BOUNDS
    )
    behavior_weight_cap: float = setting(
        5.0,
        "upper bound of the behaviour weight pi_centre / pi_behav",
        ge=1,
        infinite=True,
        idle=_OF_BOUNDS,
    )
    max_second_moment: float = setting(
        math.inf,
        "a row's mean of log(pi / pi_behav)^2 is kept below",
        gt=0,
        infinite=True,
        idle=_OF_LOSS,
    )
    max_behavior_kl: float = setting(
        math.inf,
        "bad rows whose mean log(pi_behav / pi) is larger are left out",
        gt=0,
        infinite=True,
        idle=_OF_LOSS,
    )
    row_filter: dict[str, Any] = setting(
        dict,
        "rows too far from their sampler are left out: {of, over, low, high, also}",
        idle=_OF_LOSS,
    )
    aggregation: Aggregation = setting(Aggregation.token, idle=_OF_LOSS)
    aggregation_tokens: int = apart(
        "${generation.max_new_tokens}",
        128,
        "divisor of aggregation constant",
        ge=1,
        idle=(*_OF_LOSS, "aggregation!=constant"),
    )
    kl_coefficient: float = setting(
        0.0, "beta: the weight of the KL to the reference", ge=0, idle=_OF_KL
    )
    kl_estimator: KLEstimator = setting(KLEstimator.k1, idle=_OF_KL)
    kl_place: KLPlace = setting(KLPlace.loss, idle=_OF_KL)
    entropy_coefficient: float = setting(
        0.0, "the weight of the mean entropy, a bonus", ge=0, idle=_OF_LOSS
    )

    @property
    def tried_staleness(self) -> int:
        """The largest rollout.max_staleness with which such a preset was seen to learn.

        Measured (benchmarks/RESULTS.md, "What each preset learns"). 0 where nothing is known: a
        loss or an advantage of the user's own, or stale rows that nothing corrects.
        """
        is_own = ":" in self.loss or ":" in self.advantage
        is_weighed = self.behavior_weight != "none" or self.clip_center == "behavior"
        if is_own or not is_weighed:
            return 0
        return 2 if self.advantage in BASELINES_OF_OTHERS else 16

    @property
    def loss_kl_coefficient(self) -> float:
        """The weight of the KL within the loss."""
        return 0.0 if self.kl_place == KLPlace.reward else self.kl_coefficient

    @property
    def reward_kl_coefficient(self) -> float:
        """The weight of the KL within the reward."""
        return self.kl_coefficient - self.loss_kl_coefficient


@dataclass
class CriticPPOConfig(Section):
    """What a critic learns by. A single update a step is too few to follow the policy."""

    num_minibatches: int = apart(
        "${actor.ppo.num_minibatches}", 4, "optimizer updates a training step", ge=1
    )
    loss: str = setting("value", "its name; your own by import path: package.module:function")
    loss_settings: dict[str, Any] = setting(dict, "settings of the loss")


def ppo_requirements(ppo: PPOConfig) -> Iterator[tuple[str, bool, str]]:
    """Switches that go together: (setting, whether it is right, what is expected and why)."""
    if ppo.loss in POLICY_LOSSES:
        yield (
            "actor.ppo.loss_settings",
            not ppo.loss_settings,
            f"none with actor.ppo.loss={ppo.loss} (its settings are those of actor.ppo)",
        )
    yield (
        "actor.ppo.row_filter",
        not ppo.row_filter or is_row_filter(ppo.row_filter),
        ROW_FILTER,
    )
    yield (
        "actor.ppo.advantage",
        ppo.advantage in (*BASELINES, GAE) or ":" in ppo.advantage,
        f"one of {', '.join(BASELINES)}, {GAE}, or package.module:function",
    )
    yield (
        "actor.ppo.advantage_settings",
        not ppo.advantage_settings or ":" in ppo.advantage,
        f"none with actor.ppo.advantage={ppo.advantage} (they are those of your own function)",
    )
    yield (
        "actor.ppo.advantage_std",
        ppo.advantage != GAE or ppo.advantage_std is NormScope.none,
        "none with actor.ppo.advantage=gae (each rank computes it of its own rows, and sees no "
        "others)",
    )
    yield (
        "actor.ppo.ratio",
        ppo.gain is not Gain.divergence or ppo.ratio is Level.token,
        "token with actor.ppo.gain=divergence (it bounds the probability of single tokens)",
    )
    yield (
        "actor.ppo.max_divergence",
        ppo.gain is not Gain.divergence or ppo.max_divergence < math.inf,
        "a limit with actor.ppo.gain=divergence",
    )
    yield (
        "actor.ppo.clip_dual",
        ppo.clip_dual > 1 + ppo.clip_high or ppo.clip_dual == math.inf,
        f"above 1 + actor.ppo.clip_high={1 + ppo.clip_high:g} (it is the wider bound), or inf",
    )
    yield (
        "actor.ppo.behavior_weight",
        ppo.clip_center is not ClipCenter.interpolated or ppo.behavior_weight != "none",
        "token, sequence or product with actor.ppo.clip_center=interpolated (the centre moves with "
        "the policy, so that without the weight the gradient is none of the objective)",
    )


def is_row_filter(given: Mapping[str, Any]) -> bool:
    """Whether they are arguments of `algorithms.behavior_weights.is_outside_of_row`."""
    of, over = given.get("of", ROW_VALUES[0]), given.get("over", ROW_MEANS[0])
    limits = [given[name] for name in ("low", "high") if name in given]
    return (
        not given.keys() - {"of", "over", "low", "high", "also"}
        and of in ROW_VALUES
        and over in ROW_MEANS
        and (of == ROW_VALUES[0] or over not in ROW_MEANS[:2])
        and bool(limits)
        and all(isinstance(it, int | float) and not math.isnan(it) for it in limits)
        and limits == sorted(limits)
        and isinstance(given.get("also", {}), Mapping)
        and ("also" not in given or is_row_filter(given["also"]))
    )
