"""Algorithms by name: they load, what the user sets wins, and each trains as its paper says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from loss_rows import made_tokens

from areal_sc.algorithms.loss_tokens import LossTokens
from areal_sc.algorithms.named_loss import loss_of
from areal_sc.config.loading.loader import compose_config
from areal_sc.config.loading.presets import preset_names, preset_path, preset_warnings
from areal_sc.config.ppo_settings import PPOConfig, ppo_requirements
from areal_sc.config.schema import GRPOConfig
from areal_sc.errors import ConfigError

REPOSITORY = Path(__file__).parents[4]
GIVEN = {"run_dir": "r", "total_steps": 3, "actor.path": "m"}


def loaded(*overrides: str, **given: Any) -> GRPOConfig:
    return compose_config(None, overrides, GRPOConfig, GIVEN | given)


def test_the_files_are_those_beside_the_configurations() -> None:
    shown = sorted(path.stem for path in (REPOSITORY / "configs/algorithms").glob("*.yaml"))
    assert shown == preset_names()
    assert len(shown) >= 18


@pytest.mark.parametrize("name", preset_names())
def test_each_has_settings_that_go_together_and_a_source(name: str) -> None:
    config = loaded(f"actor.algorithm={name}")
    assert not list(preset_warnings(config))
    for key, is_met, expected in ppo_requirements(config.actor.ppo):
        assert is_met, (key, expected)
    given = yaml.safe_load(preset_path(name).read_text())["actor"]["ppo"]
    found = {key: getattr(config.actor.ppo, key) for key in given}
    assert found == given
    text = preset_path(name).read_text()
    assert "arXiv:" in text or "F. Yao" in text or name == "sft"
    assert text.count("\n") <= 8


def test_the_default_is_what_it_says() -> None:
    assert loaded().actor.ppo == loaded("actor.algorithm=decoupled_ppo").actor.ppo
    expected = PPOConfig()
    expected.aggregation_tokens = loaded().generation.max_new_tokens
    assert loaded().actor.ppo == expected


def test_what_the_user_sets_wins(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("actor: {algorithm: gspo, ppo: {clip_low: 0.2}}\n")
    config = compose_config(file, ["actor.ppo.aggregation=token"], GRPOConfig, GIVEN)
    ppo = config.actor.ppo
    assert (ppo.ratio, ppo.clip_low, ppo.clip_high, ppo.aggregation) == (
        "sequence",
        0.2,
        4e-4,
        "token",
    )
    assert loaded("actor.algorithm=dpo").actor.ppo.loss_settings == {"beta": 0.1}
    given = loaded("actor.algorithm=dpo", "+actor.ppo.loss_settings.label_smoothing=0.1")
    assert given.actor.ppo.loss_settings == {"beta": 0.1, "label_smoothing": 0.1}
    given = loaded(**{"actor.algorithm": "dpo", "actor.ppo.loss_settings": {"beta": 0.5}})
    assert given.actor.ppo.loss_settings == {"beta": 0.5}


def test_constant_aggregation_takes_the_longest_answer() -> None:
    config = loaded("actor.algorithm=dr_grpo", "generation.max_new_tokens=77")
    assert config.actor.ppo.aggregation_tokens == 77


def test_an_algorithm_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"actor.algorithm: expected one of .*gspo.*, got 'gpo'"):
        loaded("actor.algorithm=gpo")


def test_a_preset_that_has_no_effect() -> None:
    config = GRPOConfig(run_dir="r", total_steps=1)
    config.actor.algorithm = "gspo"
    (warning,) = preset_warnings(config)
    assert (
        "actor.algorithm=gspo has no effect: actor.ppo.aggregation, actor.ppo.behavior" in warning
    )
    config.actor.ppo.clip_low = 3e-4
    assert not list(preset_warnings(config))
    (warning,) = preset_warnings(loaded("actor.algorithm=dapo", "actor.ppo.clip_high=0.2"))
    assert "no effect: actor.ppo.clip_high is set otherwise" in warning


SHAPE = [(4, 0, 0), (2, 0, 1), (3, 1, 0), (1, 1, 1), (5, 2, 0), (2, 2, 1)]


def surrogate(name: str, logprobs: torch.Tensor, given: LossTokens) -> torch.Tensor:
    """The loss as its paper has it, row by row; gradients by autograd of plain expressions."""
    fields, rows = given.fields, given.rows
    row_losses, token_losses = [], []
    for row in range(len(SHAPE)):
        own = rows.of_token == row
        pi, old, mu = (
            logprobs[own],
            fields["proximal_logprobs"][own],
            fields["behavior_logprobs"][own],
        )
        a = fields["advantages"][own][0]
        r, w = (pi - old).exp(), (old - mu).exp()
        low, high = 0.8, 1.28 if name == "dapo" else 1.2
        clipped = torch.minimum(r * a, r.clamp(low, high) * a)
        capped = torch.where(w <= 5, w, 0.0)
        match name:
            case "gspo":
                s = (pi - old).mean().exp()
                v = (old - mu).mean().exp()
                of_tokens = (
                    v * torch.minimum(s * a, s.clamp(1 - 3e-4, 1 + 4e-4) * a) * torch.ones_like(pi)
                )
            case "cispo":
                of_tokens = capped * r.detach().clamp(0, 5) * a * pi
            case "sapo":
                tau = 1.0 if a > 0 else 1.05
                of_tokens = capped * 4 / tau * torch.sigmoid(tau * (r - 1)) * a
            case "tis":
                of_tokens = w.clamp(max=2) * clipped
            case "icepop":
                of_tokens = torch.where((w >= 0.5) & (w <= 5), w, 0.0) * clipped
            case "rloo":
                of_tokens = capped * r * a
            case "dppo":
                ratio = (pi - mu).exp()
                far = (pi.exp() - mu.exp()).abs() > 0.15
                leaving = ((a > 0) & (ratio > 1)) | ((a < 0) & (ratio < 1))
                of_tokens = torch.where(far & leaving, 0.0, ratio * a)
            case "m2po":
                ratio = (pi - mu).exp()
                squares = (pi - mu).detach().square()
                left = [t for t in range(len(pi)) if (ratio[t] - 1) * a > 0]
                while left and sum(squares[t] for t in left) / len(left) > 0.04:
                    left.remove(max(left, key=lambda t: squares[t]))
                keep = torch.tensor(
                    [t in left or bool((ratio[t] - 1) * a <= 0) for t in range(len(pi))]
                )
                of_tokens = torch.where(keep, ratio * a, 0.0)
            case "a3po":
                d = fields["staleness"][own].double()
                alpha = torch.where(d > 0, (d - 1) / d.clamp(min=1), 0.0)
                center = mu + alpha * (pi.detach() - mu)
                weight = (center - mu).exp()
                ratio = (pi - center).exp()
                weight = torch.where(weight <= 5, weight, 0.0)
                of_tokens = weight * torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
            case _:
                of_tokens = capped * clipped
        token_losses.append(-of_tokens.sum())
        row_losses.append(-of_tokens.mean())
    if name in ("grpo", "gdpo", "gspo", "sapo"):
        return torch.stack(row_losses).mean()
    if name in ("dr_grpo", "rloo"):
        return torch.stack(token_losses).sum() / len(SHAPE) / 128  # each row is an answer
    return torch.stack(token_losses).sum() / given.counts.tokens


OF_POLICIES = [
    name
    for name in preset_names()
    if name not in ("sft", "dpo", "reward_model", "distillation", "distillation_top_k")
]


@pytest.mark.parametrize("name", OF_POLICIES)
def test_three_steps_of_each_are_those_of_its_paper(name: str) -> None:
    """A table of log-probabilities, moved by plain gradient descent."""
    tokens = made_tokens(SHAPE, seed=11)
    loss = loss_of(loaded(f"actor.algorithm={name}").actor.ppo).load()
    ours = tokens.logprobs.detach().clone().requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    start = ours.detach().clone()
    for _ in range(3):
        value, _ = loss(LossTokens(ours, tokens.entropy, tokens.fields, tokens.rows, tokens.counts))
        expected = surrogate(name, theirs, tokens)
        assert value.item() == pytest.approx(expected.item(), rel=1e-6)
        for moved, objective in ((ours, value), (theirs, expected)):
            (gradient,) = torch.autograd.grad(objective, moved)
            moved.data -= gradient
        assert ours.tolist() == pytest.approx(theirs.tolist(), rel=1e-6)
    assert (ours != start).any()


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        (["gain=divergence"], "max_divergence", "a limit"),
        (["gain=divergence", "max_divergence=0.1", "ratio=sequence"], "ratio", "single tokens"),
        (["advantage=gae"], "advantage_std", "sees no others"),
        (["clip_dual=1.1"], "clip_dual", "above 1 \\+ actor.ppo.clip_high=1.2"),
        (["clip_center=interpolated", "behavior_weight=none"], "behavior_weight", "moves with"),
        (["row_filter={of: k4, high: 1}"], "row_filter", "ratio, k1, k2, k3"),
        (["row_filter={of: k1, over: product, high: 1}"], "row_filter", "of a ratio alone"),
        (["row_filter={of: k1}"], "row_filter", "a number as low"),
        (["row_filter={high: x}"], "row_filter", "a number as low"),
        (["row_filter={low: 2, high: 1}"], "row_filter", "low <= high"),
        (["+loss_settings.beta=1"], "loss_settings", "none with actor.ppo.loss=policy_gradient"),
        (["+advantage_settings.a=1"], "advantage_settings", "of your own function"),
    ],
)
def test_switches_that_do_not_go_together(overrides: list[str], key: str, reason: str) -> None:
    given = [
        f"+actor.ppo.{text[1:]}" if text.startswith("+") else f"actor.ppo.{text}"
        for text in overrides
    ]
    wrong = [
        (where, expected)
        for where, is_met, expected in ppo_requirements(loaded(*given).actor.ppo)
        if not is_met
    ]
    assert [where for where, _ in wrong] == [f"actor.ppo.{key}"]
    assert re.search(reason, wrong[0][1])
