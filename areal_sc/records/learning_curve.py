"""The picture that a run leaves behind: what it learned, and how stale its batches were."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from areal_sc.errors import RunFolderError
from areal_sc.records.metrics import EvaluationResult, StepMetrics
from areal_sc.records.metrics_log import History
from areal_sc.system.durable import os_errors_as

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = npt.NDArray[np.float64]

_SMOOTHED_SHARE = 1 / 15
"""One smoothed value is the mean over this share of a run's steps."""

_FEW_STEPS = 10
"""Runs up to this length show a dot a step: a line needs two of them."""

_COLORS = {"accuracy": "#1f5fa8", "reward": "#2a8f5c", "token": "#c2601f", "group": "#6b5b95"}

_EVALUATION_COLORS = ("black", "#b03a5b", "#4f7d1e", "#7a4fb0")

_MARKERS: dict[bool, dict[str, Any]] = {
    True: {"label": "held out, greedy", "marker": "*", "markersize": 13, "markerfacecolor": "gold"},
    False: {"label": "held out, sampled", "marker": "o", "markerfacecolor": "white"},
}
"""Style of an evaluation's points, by whether the evaluation is greedy."""


def plot_learning_curve(history: History, title: str, png_path: Path) -> None:
    """Draws a run: accuracy and reward a step with the evaluations, and the staleness below.

    Accuracy and reward share a panel where they are the same. Of several reward functions each has
    a panel of its own. A run on rows of a data set has its loss in their place.

    Raises: RunFolderError: the picture cannot be written.
    """
    # figure and canvas are made directly: no pyplot, no global state, no screen needed
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    accuracies, rewards = (_values(history.steps, name) for name in ("accuracy", "reward"))
    has_accuracy = np.isfinite([*accuracies, *_values(history.evaluations, "accuracy")]).any()
    is_same = np.array_equal(accuracies, rewards, equal_nan=True)
    is_of_rows = bool(history.steps) and history.steps[-1].is_of_rows()
    names = ["accuracy"] * bool(has_accuracy)
    names += ["loss"] if is_of_rows else ["reward"] * (not has_accuracy or not is_same)

    parts = (name for step in history.steps for name in step.reward_parts())
    names += dict.fromkeys(parts)

    figure = Figure(figsize=(8, 4 + 2 * len(names)), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    ratios = [2.0] * len(names) + [1.0] * (not is_of_rows)
    panels = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios, squeeze=False)[:, 0]
    for axes, name in zip(panels, names, strict=False):
        _draw_values(axes, history.steps, name)
        _draw_evaluations(axes, history.evaluations, name)
        axes.margins(y=0.12)
        if name == "accuracy":
            axes.set_ylim(-0.02, 1.08)
    if not is_of_rows:
        _draw_staleness(panels[-1], history.steps)
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
    with os_errors_as(RunFolderError, f"cannot write {png_path}"):
        canvas.print_figure(png_path, format="png")


def smoothed(values: Values, window: int) -> Values:
    """Centred means over up to `window` values; not finite ones are left out of each mean."""
    is_known, box = np.isfinite(values), np.ones(window)
    sums = np.convolve(np.where(is_known, values, 0.0), box, "same")
    with np.errstate(invalid="ignore"):  # 0 of 0 is not a number
        means: Values = sums / np.convolve(is_known, box, "same")
    return means


def _values(records: Sequence[StepMetrics | EvaluationResult], name: str) -> Values:
    """One number a record, not a number where it has none."""
    return np.array([record.value(name) for record in records], np.float64)


def _draw_values(axes: Axes, steps: Sequence[StepMetrics], name: str) -> None:
    """One value a step, faint, and its smoothed course."""
    axes.set_ylabel(name)
    if not steps:
        return
    numbers, values = _values(steps, "step"), _values(steps, name)
    window = max(round(len(steps) * _SMOOTHED_SHARE), 1)
    color = _COLORS.get(name, _COLORS["reward"])
    marker = "." if len(steps) <= _FEW_STEPS else ""
    axes.plot(numbers, values, color=color, alpha=0.35, linewidth=1, marker=marker)
    label = f"training batch, mean of {window} steps" if window > 1 else "training batch"
    axes.plot(numbers, smoothed(values, window), color=color, linewidth=2, label=label)


def _draw_evaluations(axes: Axes, evaluations: Sequence[EvaluationResult], name: str) -> None:
    """Points; each kind of sampling is one entry of the legend, and so is each
    of several `Evaluations`, which begin the names of their results."""
    values = _values(evaluations, name)
    owners = dict.fromkeys(result.name.rpartition("/")[0] for result in evaluations)
    for (number, owner), (is_greedy, style) in product(enumerate(owners), _MARKERS.items()):
        points = [
            (result.step, value)
            for result, value in zip(evaluations, values, strict=True)
            if np.isfinite(value)
            and result.name.rpartition("/")[0] == owner
            and (result.temperature == 0) == is_greedy
        ]
        if points:
            label = f"{owner}: {style['label']}" if owner else style["label"]
            color = _EVALUATION_COLORS[number % len(_EVALUATION_COLORS)]
            xy = zip(*points, strict=True)
            own = {**style, "label": label, "color": color}
            axes.plot(*xy, linestyle="", zorder=5, clip_on=False, **own)


def _draw_staleness(axes: Axes, steps: Sequence[StepMetrics]) -> None:
    """Mean staleness of groups and of tokens, each shaded up to the step's maximum."""
    axes.set_ylabel("staleness\n(versions)")
    numbers, marker = _values(steps, "step"), "." if len(steps) <= _FEW_STEPS else ""
    for name in ("group", "token") if steps else ():
        means, maxima = (_values(steps, f"{name}_staleness_{of}") for of in ("mean", "max"))
        color, label = _COLORS[name], f"{name}s: mean, shaded to maximum"
        axes.fill_between(numbers, means, maxima, color=color, alpha=0.18, linewidth=0)
        axes.plot(numbers, means, color=color, marker=marker, label=label)
    axes.set_ylim(bottom=0)
