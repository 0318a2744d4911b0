"""The picture that a run leaves behind: what it learned, and how stale its batches were."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from areal_sc.errors import RunFolderError
from areal_sc.trainer.metrics import EvaluationResult, StepMetrics
from areal_sc.trainer.metrics_log import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SMOOTHED_SHARE = 1 / 15
"""Part of a run's steps that one smoothed value is the mean of."""

_FEW_STEPS = 10
"""Runs up to this length show a dot a step: a line needs two of them."""

_ACCURACY_COLOR = "#1f5fa8"
_REWARD_COLOR = "#2a8f5c"
_TOKEN_COLOR = "#c2601f"
_GROUP_COLOR = "#6b5b95"


def plot_learning_curve(history: History, title: str, png_path: Path) -> None:
    """Draws a run: accuracy and reward a step, evaluations, and staleness below.

    Accuracy and reward share a panel where they are the same.

    Raises: RunFolderError: the picture cannot be written.
    """
    # figure and canvas are made directly: no pyplot, no global state, no screen needed
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, evaluations = history.steps, history.evaluations
    accuracies = [math.nan if step.accuracy is None else step.accuracy for step in steps]
    rewards = [step.reward for step in steps]
    evaluated_accuracies = [result.accuracy for result in evaluations]
    evaluated_rewards = [result.reward for result in evaluations]
    has_accuracy = any(map(math.isfinite, accuracies)) or any(
        accuracy is not None for accuracy in evaluated_accuracies
    )
    has_reward = not has_accuracy or rewards != accuracies

    num_panels = 1 + has_accuracy + has_reward
    figure = Figure(figsize=(8, 2 + 2 * num_panels), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    ratios = [2.0] * (num_panels - 1) + [1.0]
    panels = list(figure.subplots(num_panels, 1, sharex=True, height_ratios=ratios))
    learning = panels[:-1]
    if has_accuracy:
        axes = learning.pop(0)
        _draw_values(axes, steps, accuracies, "accuracy", _ACCURACY_COLOR)
        _draw_evaluations(axes, evaluations, evaluated_accuracies)
        axes.set_ylim(-0.02, 1.08)
    if has_reward:
        axes = learning.pop(0)
        _draw_values(axes, steps, rewards, "reward", _REWARD_COLOR)
        _draw_evaluations(axes, evaluations, evaluated_rewards)
        axes.margins(y=0.12)
    _draw_staleness(panels[-1], steps)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(
                frameon=False, fontsize=9, ncols=3, loc="lower right", bbox_to_anchor=(1, 0.98)
            )
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    panels[-1].set_xlabel("training step")
    figure.suptitle(title, x=0.02, ha="left", fontweight="bold")
    try:
        canvas.print_figure(png_path, format="png")
    except OSError as error:
        raise RunFolderError(f"cannot write {png_path}: {error.strerror}") from error


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Centred means over up to `window` values; not finite ones are left out of each mean."""
    before, after = (window - 1) // 2, window // 2
    means = []
    for i in range(len(values)):
        near = [v for v in values[max(i - before, 0) : i + after + 1] if math.isfinite(v)]
        means.append(sum(near) / len(near) if near else math.nan)
    return means


def _draw_values(
    axes: Axes, steps: Sequence[StepMetrics], values: Sequence[float], name: str, color: str
) -> None:
    """One value a step, faint, and its smoothed course."""
    axes.set_ylabel(name)
    if not steps:
        return
    numbers = [step.step for step in steps]
    window = max(round(len(steps) * _SMOOTHED_SHARE), 1)
    marker = "." if len(steps) <= _FEW_STEPS else ""
    axes.plot(numbers, values, color=color, alpha=0.35, linewidth=1, marker=marker)
    label = f"training batch, mean of {window} steps" if window > 1 else "training batch"
    axes.plot(numbers, smoothed(values, window), color=color, linewidth=2, label=label)


def _draw_evaluations(
    axes: Axes, evaluations: Sequence[EvaluationResult], values: Sequence[float | None]
) -> None:
    """Points with their values; each kind of sampling is one entry of the legend."""
    known = [
        (result.temperature == 0, result.step, value)
        for result, value in zip(evaluations, values, strict=True)
        if value is not None and math.isfinite(value)
    ]
    for is_greedy, label, marker, size, face, below in (
        (True, "held out, greedy", "*", 13, "gold", 8),
        (False, "held out, sampled", "o", 7, "white", -16),
    ):
        points = [(step, value) for greedy, step, value in known if greedy == is_greedy]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                linestyle="none",
                marker=marker,
                markersize=size,
                color="black",
                markerfacecolor=face,
                zorder=5,
                clip_on=False,
                label=label,
            )
        for step, value in points:
            axes.annotate(
                f"{value:.3f}",
                (step, value),
                textcoords="offset points",
                xytext=(0, below),
                ha="center",
                fontsize=9,
                zorder=6,
                annotation_clip=False,
                bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1},
            )


def _draw_staleness(axes: Axes, steps: Sequence[StepMetrics]) -> None:
    """Mean staleness of groups and of tokens, each shaded up to the step's maximum."""
    axes.set_ylabel("staleness\n(versions)")
    if not steps:
        return
    numbers = [step.step for step in steps]
    marker = "." if len(steps) <= _FEW_STEPS else ""
    for name, color in (("group", _GROUP_COLOR), ("token", _TOKEN_COLOR)):
        means = [getattr(step, f"{name}_staleness_mean") for step in steps]
        maxima = [getattr(step, f"{name}_staleness_max") for step in steps]
        axes.fill_between(numbers, means, maxima, color=color, alpha=0.18, linewidth=0)
        axes.plot(numbers, maxima, color=color, alpha=0.5, linewidth=0.8)
        axes.plot(
            numbers, means, color=color, marker=marker, label=f"{name}s: mean, shaded to maximum"
        )
    axes.set_ylim(bottom=0)
