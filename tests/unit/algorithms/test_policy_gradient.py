"""Each switch against plain float64 loops, written from the papers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_rows import ROW, made_tokens, shapes

from areal_sc.algorithms.kl import KL_ESTIMATORS, kl_estimate
from areal_sc.algorithms.loss_tokens import LossTokens, loss_tokens_of
from areal_sc.algorithms.named_loss import needed_fields
from areal_sc.algorithms.policy_gradient import policy_gradient

Reference = tuple[float, list[float], list[float]]
"""Loss, its gradient by each log-probability, and by each entropy."""


def row_mean(values: list[float], rows: list[int], row: int) -> float:
    own = [value for value, r in zip(values, rows, strict=True) if r == row]
    return math.fsum(own) / len(own)


def share(tokens: LossTokens, t: int, over: str, constant: int) -> float:
    """What token t's value is multiplied by in the aggregate."""
    rows = tokens.rows.of_token.tolist()
    ids = {
        "sequence": list(range(len(tokens.rows.group))),
        "episode": tokens.rows.episode.tolist(),
        "prompt": tokens.rows.group.tolist(),
    }
    if over == "token":
        return 1 / len(rows)
    if over == "constant":
        return 1 / (len(set(ids["episode"])) * constant)
    own = ids[over][rows[t]]
    return 1 / sum(ids[over][row] == own for row in rows) / len(set(ids[over]))


def leaves(advantage: float, log_ratio: float) -> bool:
    return (advantage > 0 and log_ratio > 0) or (advantage < 0 and log_ratio < 0)


def second_moment(
    away: list[float], advantages: list[float], rows: list[int], limit: float
) -> set[int]:
    """M2PO, algorithm 1, in each row: the largest goes until the mean of the others is small."""
    dropped: set[int] = set()
    for row in set(rows):
        left = [t for t, r in enumerate(rows) if r == row and leaves(advantages[t], away[t])]
        while left and math.fsum(away[t] ** 2 for t in left) / len(left) > limit:
            worst = max(left, key=lambda t: away[t] ** 2)
            left.remove(worst)
            dropped.add(worst)
    return dropped


def gain_of(
    r: float, advantage: float, logprob: float, center: float, s: dict[str, Any]
) -> tuple[float, float]:
    """The gain and its derivative by log pi, without the weight."""
    low, high = 1 - s["clip_low"], 1 + s["clip_high"]
    if s["gain"] == "none":
        return r * advantage, r * advantage
    if s["gain"] == "clip":
        if advantage < 0 and r > s["clip_dual"]:
            return s["clip_dual"] * advantage, 0.0
        clipped = min(max(r, low), high)
        is_cut = clipped * advantage < r * advantage
        return min(r * advantage, clipped * advantage), 0.0 if is_cut else r * advantage
    if s["gain"] == "stop_gradient_clip":
        factor = min(max(r, low), high) * advantage
        return factor * logprob, factor
    if s["gain"] == "soft_gate":
        tau = s["gate_positive"] if advantage > 0 else s["gate_negative"]
        gate = 1 / (1 + math.exp(-tau * (r - 1)))
        return 4 / tau * gate * advantage, 4 * gate * (1 - gate) * r * advantage
    p, q = math.exp(center), math.exp(logprob)
    distance = abs(p - q)
    if s["divergence"] == "kl":
        distance = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    if leaves(advantage, math.log(r)) and distance > s["max_divergence"]:
        return 0.0, 0.0
    return r * advantage, r * advantage


DEFAULTS: dict[str, Any] = {
    "ratio": "token",
    "gain": "clip",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "clip_dual": math.inf,
    "gate_positive": 1.0,
    "gate_negative": 1.05,
    "divergence": "tv",
    "max_divergence": 0.1,
    "clip_center": "proximal",
    "behavior_weight": "token",
    "behavior_weight_bound": "mask",
    "behavior_weight_floor": 0.0,
    "behavior_weight_cap": math.inf,
    "max_second_moment": math.inf,
    "max_behavior_kl": math.inf,
    "row_filter": {},
    "aggregation": "token",
    "aggregation_tokens": 0,
    "kl_coefficient": 0.0,
    "kl_estimator": "k3",
    "entropy_coefficient": 0.0,
}


def outside_of_filter(
    log_ratios: list[float],
    rows: list[int],
    *,
    of: str = "ratio",
    over: str = "geometric_mean",
    low: float = -math.inf,
    high: float = math.inf,
    also: dict[str, Any] | None = None,
) -> set[int]:
    """The tokens that a filter leaves out, number by number."""
    found = set() if also is None else outside_of_filter(log_ratios, rows, **also)
    for token, row in enumerate(rows):
        own = [it for it, number in zip(log_ratios, rows, strict=True) if number == row]
        value = {
            "ratio": math.exp,
            "error": lambda d: math.exp(abs(d)),
            "k1": lambda d: -d,
            "k2": lambda d: d * d / 2,
            "k3": lambda d: math.exp(d) - 1 - d,
        }[of]
        values = [value(d) for d in own]
        whole = {
            "mean": statistics.fmean(values),
            "sum": math.fsum(values),
            "max": max(values),
            "min": min(values),
            "product": math.exp(math.fsum(own)),
            "geometric_mean": math.exp(statistics.fmean(own)),
            "token": value(log_ratios[token]),
        }[over]
        if not low <= whole <= high:
            found.add(token)
    return found


def by_hand(tokens: LossTokens, **given: Any) -> Reference:
    s = DEFAULTS | given
    rows = tokens.rows.of_token.tolist()
    logprobs, behavior, proximal, reference, advantages = (
        values.tolist()
        for values in (
            tokens.logprobs.detach(),
            *(tokens.fields[f"{name}_logprobs"] for name in ("behavior", "proximal", "reference")),
            tokens.fields["advantages"],
        )
    )
    count = range(len(rows))
    match s["clip_center"]:
        case "proximal":
            center = proximal
        case "behavior":
            center = behavior
        case _:
            stale = tokens.fields["staleness"].tolist()
            alphas = [(d - 1) / d if d else 0.0 for d in stale]
            center = [behavior[t] + alphas[t] * (logprobs[t] - behavior[t]) for t in count]
    log_ratios = [logprobs[t] - center[t] for t in count]
    log_weights = [center[t] - behavior[t] for t in count]
    if s["ratio"] == "sequence":
        log_ratios = [row_mean(log_ratios, rows, rows[t]) for t in count]
    if s["behavior_weight"] == "sequence":
        log_weights = [row_mean(log_weights, rows, rows[t]) for t in count]
    if s["behavior_weight"] == "product":
        sums = [math.fsum(log_weights[i] for i in count if rows[i] == rows[t]) for t in count]
        log_weights = sums
    if s["behavior_weight"] == "none":
        log_weights = [0.0 for _ in count]
    away = [logprobs[t] - behavior[t] for t in count]
    dropped = second_moment(away, advantages, rows, s["max_second_moment"])
    at = logprobs if s["clip_center"] == "behavior" else center
    outside = outside_of_filter([at[t] - behavior[t] for t in count], rows, **s["row_filter"])
    loss = 0.0
    gradient, of_entropy = [0.0 for _ in count], [0.0 for _ in count]
    for t in count:
        part = share(tokens, t, s["aggregation"], s["aggregation_tokens"])
        weight = math.exp(log_weights[t])
        is_outside = not s["behavior_weight_floor"] <= weight <= s["behavior_weight_cap"]
        if s["behavior_weight_bound"] == "clamp":
            weight = min(max(weight, s["behavior_weight_floor"]), s["behavior_weight_cap"])
        elif is_outside:
            weight = 0.0
        if t in dropped or t in outside:
            weight = 0.0
        if advantages[t] < 0 and -row_mean(away, rows, rows[t]) > s["max_behavior_kl"]:
            weight = 0.0
        gain, slope = gain_of(math.exp(log_ratios[t]), advantages[t], logprobs[t], center[t], s)
        loss -= part * weight * gain
        gradient[t] -= part * weight * slope
        d = logprobs[t] - reference[t]
        value = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[s["kl_estimator"]]
        of_stale = math.exp(min(away[t], 5.0))
        loss += part * s["kl_coefficient"] * of_stale * value
        gradient[t] += part * s["kl_coefficient"] * of_stale * d
        loss -= part * s["entropy_coefficient"] * tokens.entropy[t].item()
        of_entropy[t] = -part * s["entropy_coefficient"]
    return loss, gradient, of_entropy


def assert_agree(tokens: LossTokens, **given: Any) -> None:
    expected, gradient, of_entropy = by_hand(tokens, **given)
    loss, metrics = policy_gradient(tokens, **(DEFAULTS | given))
    assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-12)
    found = torch.autograd.grad(
        loss, (tokens.logprobs, tokens.entropy), allow_unused=True, materialize_grads=True
    )
    assert found[0].tolist() == pytest.approx(gradient, rel=1e-6, abs=1e-12)
    assert found[1].tolist() == pytest.approx(of_entropy, rel=1e-6, abs=1e-12)
    assert all(metric.value.isfinite() for metric in metrics.values())


BOUNDS = {
    "none": {},
    "mask": {"behavior_weight_floor": 0.7, "behavior_weight_cap": 1.4},
    "clamp": {
        "behavior_weight_bound": "clamp",
        "behavior_weight_floor": 0.7,
        "behavior_weight_cap": 1.4,
    },
    "second moment": {"max_second_moment": 0.3},
    "behaviour KL": {"max_behavior_kl": 0.1},
    "product": {"row_filter": {"over": "product", "low": 0.5, "high": 2.0}},
    "with a weight": {"row_filter": {"low": 0.8}, "behavior_weight_cap": 1.4},
    "outlier": {"row_filter": {"over": "min", "low": 0.6}},
    "largest": {"row_filter": {"of": "k3", "over": "max", "high": 0.1}},
    "sum": {"row_filter": {"of": "k1", "over": "sum", "low": -0.5, "high": 0.5}},
    "mean": {"row_filter": {"of": "k2", "over": "mean", "high": 0.05}},
    "tokens": {"row_filter": {"of": "k2", "over": "token", "high": 0.05}},
    "error": {"row_filter": {"of": "error", "over": "mean", "high": 1.25}},
    "two": {
        "row_filter": {
            **{"of": "k3", "over": "mean", "high": 0.1},
            "also": {"over": "token", "low": 0.7, "high": 1.4},
        }
    },
}
GAINS = {
    "clip": {"clip_high": 0.28},
    "dual clip": {"clip_dual": 1.5},
    "stop_gradient_clip": {"gain": "stop_gradient_clip", "clip_low": 0.5, "clip_high": 0.4},
    "soft_gate": {"gain": "soft_gate", "gate_negative": 1.9},
    "none": {"gain": "none"},
    "tv": {"gain": "divergence"},
    "kl": {"gain": "divergence", "divergence": "kl", "max_divergence": 0.02},
}


@settings(max_examples=120)
@given(
    shape=shapes(),
    seed=st.integers(0, 10_000),
    gain=st.sampled_from(list(GAINS)),
    bound=st.sampled_from(list(BOUNDS)),
    ratio=st.sampled_from(["token", "sequence"]),
    center=st.sampled_from(["proximal", "behavior", "interpolated"]),
    weight=st.sampled_from(["token", "sequence", "product", "none"]),
    aggregation=st.sampled_from(["token", "sequence", "episode", "prompt", "constant"]),
    kl=st.sampled_from([{}, *({"kl_estimator": name} for name in KL_ESTIMATORS)]),
)
def test_every_combination_of_switches(
    shape: list[ROW],
    seed: int,
    gain: str,
    bound: str,
    ratio: str,
    center: str,
    weight: str,
    aggregation: str,
    kl: dict[str, str],
) -> None:
    if GAINS[gain].get("gain") == "divergence":
        ratio = "token"  # refused together when settings are read
    extra = {"kl_coefficient": 0.3, "entropy_coefficient": 0.2} if kl else {}
    assert_agree(
        made_tokens(shape, seed),
        **GAINS[gain],
        **BOUNDS[bound],
        **kl,
        **extra,
        ratio=ratio,
        clip_center=center,
        behavior_weight=weight,
        aggregation=aggregation,
        aggregation_tokens=7,
    )


SHAPE = [(6, 0, 0), (3, 0, 1), (1, 1, 0), (5, 1, 0), (7, 1, 1), (4, 2, 0)]


@pytest.mark.parametrize("bound", [name for name in BOUNDS if name != "none"])
def test_each_bound_changes_the_loss(bound: str) -> None:
    tokens = made_tokens(SHAPE, seed=3)
    without, _ = policy_gradient(tokens, **DEFAULTS)
    bounded, _ = policy_gradient(tokens, **(DEFAULTS | BOUNDS[bound]))
    assert without.item() != pytest.approx(bounded.item(), rel=1e-3)


def test_what_clamped_is_told() -> None:
    tokens = made_tokens(SHAPE, seed=3)
    _, metrics = policy_gradient(tokens, **(DEFAULTS | BOUNDS["clamp"]))
    names = ("proximal_logprobs", "behavior_logprobs")
    proximal, behavior = (tokens.fields[name].tolist() for name in names)
    outside = [not 0.7 <= math.exp(p - b) <= 1.4 for p, b in zip(proximal, behavior, strict=True)]
    told = metrics["clamped_fraction"]
    assert 0 < sum(outside) < len(outside)
    assert (told.combine, told.value.item(), told.weight) == ("mean", sum(outside), len(outside))
    assert metrics["capped_fraction"].value == 0
    assert "clamped_fraction" not in policy_gradient(tokens, **(DEFAULTS | BOUNDS["mask"]))[1]


@pytest.mark.parametrize("gain", [name for name in GAINS if name != "clip"])
def test_each_gain_differs_from_the_others(gain: str) -> None:
    tokens = made_tokens(SHAPE, seed=3)
    found = {
        name: policy_gradient(tokens, **(DEFAULTS | given))[0].item()
        for name, given in GAINS.items()
    }
    others = [value for name, value in found.items() if name != gain]
    assert min(abs(found[gain] - value) for value in others) > 1e-3 * abs(found[gain])


def test_micro_batches_add_up_with_filters_by_rows() -> None:
    whole = made_tokens(SHAPE, seed=5)
    given = DEFAULTS | BOUNDS["second moment"] | {"ratio": "sequence", "aggregation": "prompt"}
    parts = [policy_gradient(part_of(whole, rows), **given)[0] for rows in ([0, 1], [2], [3, 4, 5])]
    expected = policy_gradient(whole, **given)[0]
    assert sum(parts).item() == pytest.approx(expected.item(), rel=1e-12)


def part_of(tokens: LossTokens, numbers: list[int]) -> LossTokens:
    """The micro-batch of these rows."""
    rows = tokens.rows
    keep = torch.isin(rows.of_token, torch.tensor(numbers))
    of_rows = {
        name: getattr(rows, name)[numbers]
        for name in rows.__dataclass_fields__
        if name not in ("of_token", "position", "fields")
    }
    of_token = torch.unique(rows.of_token[keep], return_inverse=True)[1]
    return LossTokens(
        tokens.logprobs[keep],
        tokens.entropy[keep],
        {name: values[keep] for name, values in tokens.fields.items()},
        type(rows)(of_token=of_token, position=rows.position[keep], **of_rows),
        tokens.counts,
    )


def test_a_sequence_ratio_has_the_gradient_of_the_geometric_mean() -> None:
    """GSPO, eq. 7, by autograd through the mean itself."""
    tokens = made_tokens(SHAPE, seed=7, scale=0.1)
    given = {"ratio": "sequence", "aggregation": "sequence", "behavior_weight": "none"}
    found = torch.autograd.grad(policy_gradient(tokens, **(DEFAULTS | given))[0], tokens.logprobs)
    loss = torch.zeros((), dtype=torch.float64)
    for row in range(len(SHAPE)):
        own = tokens.rows.of_token == row
        log_ratio = (tokens.logprobs - tokens.fields["proximal_logprobs"])[own]
        s, a = log_ratio.mean().exp(), tokens.fields["advantages"][own][0]
        loss = loss - torch.minimum(s * a, s.clamp(0.8, 1.2) * a) / len(SHAPE)
    expected = torch.autograd.grad(loss, tokens.logprobs)
    assert found[0].tolist() == pytest.approx(expected[0].tolist(), rel=1e-9)


@pytest.mark.parametrize("gain", ["soft_gate", "stop_gradient_clip", "clip"])
def test_ratios_that_overflow_keep_the_gradient_of_the_others(gain: str) -> None:
    tokens = made_tokens(SHAPE, seed=1)
    fields = {name: values.float() for name, values in tokens.fields.items()}
    fields["proximal_logprobs"][0] = -200.0
    fields["behavior_logprobs"][0] = -200.0
    fields["advantages"][0] = 1.0
    logprobs = tokens.logprobs.detach().float().requires_grad_()
    single = LossTokens(logprobs, tokens.entropy, fields, tokens.rows, tokens.counts)
    loss, _ = policy_gradient(single, **(DEFAULTS | {"gain": gain}))
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()
    assert loss.isfinite()


def test_the_gates_are_as_exact_as_the_tokens() -> None:
    tokens = made_tokens(SHAPE, seed=4)
    given = {"gain": "soft_gate", "behavior_weight": "none", "gate_positive": 0.7}
    loss, _ = policy_gradient(tokens, **(DEFAULTS | given))
    differences = tokens.logprobs - tokens.fields["proximal_logprobs"]
    gains = []
    for difference, a in zip(
        differences.tolist(), tokens.fields["advantages"].tolist(), strict=True
    ):
        tau = 0.7 if a > 0 else 1.05
        gains.append(4 / tau / (1 + math.exp(-tau * math.expm1(difference))) * a)
    assert loss.item() == pytest.approx(-math.fsum(gains) / len(gains), rel=1e-13)


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), estimator=st.sampled_from(KL_ESTIMATORS))
def test_kl_estimates(seed: int, estimator: str) -> None:
    tokens = made_tokens(SHAPE, seed)
    reference = tokens.fields["reference_logprobs"]
    by_name: dict[str, Callable[[float], float]] = {
        "k1": lambda d: d,
        "k2": lambda d: d**2 / 2,
        "k3": lambda d: math.exp(-d) + d - 1,
    }
    expected = [by_name[estimator](d) for d in (tokens.logprobs - reference).tolist()]
    found = kl_estimate(tokens.logprobs, reference, estimator).tolist()
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_expected_values_of_kl_estimates_are_the_divergence() -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    divergence = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    for estimator in ("k1", "k3"):
        estimates = kl_estimate(p.log(), q.log(), estimator)
        assert (p * estimates).sum().item() == pytest.approx(divergence)
    with pytest.raises(ValueError, match="expected one of k1, k2, k3"):
        kl_estimate(p, q, "k4")


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("is_stale", [False, True])
def test_what_a_kl_in_the_loss_trains_is_the_divergence(estimator: str, is_stale: bool) -> None:
    """All outcomes of a policy, each as often as the policy that sampled gives it."""
    generator = torch.Generator().manual_seed(3)
    draws = torch.randn(3, 6, dtype=torch.float64, generator=generator)
    logits = draws[0].clone().requires_grad_()
    policy, reference = logits.log_softmax(0), (1.5 * draws[1]).log_softmax(0)
    behavior = (draws[0] + is_stale * draws[2]).log_softmax(0)
    divergence = (policy.exp() * (policy - reference)).sum()
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    fields = {
        "advantages": torch.zeros(6, dtype=torch.float64),
        "behavior_logprobs": behavior,
        "proximal_logprobs": behavior,
        "reference_logprobs": reference,
    }
    found = torch.zeros(6, dtype=torch.float64)
    for outcome, weight in enumerate(behavior.exp().tolist()):
        own = {name: values[outcome : outcome + 1] for name, values in fields.items()}
        one = loss_tokens_of(policy[outcome : outcome + 1], torch.zeros(1), own, [1])
        loss, _ = policy_gradient(one, kl_coefficient=1.0, kl_estimator=estimator)
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        found += weight * gradient
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("nats", [88.0, 95.0, 1e4])
def test_policies_far_apart_have_a_finite_kl(estimator: str, nats: float) -> None:
    for sign in (-1, 1):
        logprobs = torch.tensor([sign * nats - 0.1, -1.0], requires_grad=True)
        kl = kl_estimate(logprobs, torch.tensor([-0.1, -1.1]), estimator)
        kl.mean().backward()
        assert logprobs.grad is not None
        assert logprobs.grad.tolist() == pytest.approx([sign * nats / 2, 0.05], rel=1e-5)
        assert bool(kl.isfinite().all())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("advantages", "behavior_logprobs", "proximal_logprobs")),
        ({"behavior_weight": "none"}, ("advantages", "proximal_logprobs")),
        ({"clip_center": "behavior"}, ("advantages", "behavior_logprobs")),
        (
            {"behavior_weight": "none", "max_second_moment": 1.0, "kl_coefficient": 0.1},
            ("advantages", "behavior_logprobs", "proximal_logprobs", "reference_logprobs"),
        ),
        ({"clip_center": "interpolated"}, ("advantages", "behavior_logprobs", "staleness")),
        (
            {"behavior_weight": "none", "kl_coefficient": 0.1},
            ("advantages", "behavior_logprobs", "proximal_logprobs", "reference_logprobs"),
        ),
    ],
)
def test_fields_that_are_needed(given: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert needed_fields(DEFAULTS | given) == expected
    tokens = made_tokens(SHAPE, seed=0)
    asked: set[str] = set()

    class Asked(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            asked.add(name)
            return super().__getitem__(name)

    seen = LossTokens(
        tokens.logprobs, tokens.entropy, Asked(tokens.fields), tokens.rows, tokens.counts
    )
    policy_gradient(seen, **(DEFAULTS | given))
    assert tuple(sorted(asked)) == expected
