from __future__ import annotations

import math
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from builders import make_evaluation, make_step
from matplotlib.axes import Axes
from matplotlib.image import imread

from areal_sc.errors import RunFolderError
from areal_sc.records.learning_curve import plot_learning_curve, smoothed
from areal_sc.records.metrics_log import History, MetricsLog

BLUE = (0x1F, 0x5F, 0xA8)
GREEN = (0x2A, 0x8F, 0x5C)
GOLD = (0xFF, 0xD7, 0x00)


def count_pixels(png: Path, color: tuple[int, int, int]) -> int:
    pixels = np.rint(imread(png)[..., :3] * 255).astype(int)
    return int((abs(pixels - color).max(axis=-1) <= 2).sum())


def test_curve_and_evaluations_are_drawn(tmp_path: Path) -> None:
    def draw(name: str, num_steps: int, final: float) -> Path:
        metrics = tmp_path / f"{name}.jsonl"
        with closing(MetricsLog(metrics)) as log:
            log.on_evaluation(make_evaluation("before"))
            for step in range(1, num_steps + 1):
                accuracy = 0.2 + (final - 0.2) * step / num_steps
                log.on_step(make_step(step, accuracy=accuracy, reward=accuracy))
            log.on_evaluation(
                make_evaluation("greedy", step=num_steps, accuracy=0.9, temperature=0.0)
            )
        png = tmp_path / f"{name}.png"
        plot_learning_curve(History.read(metrics), "run", png)
        return png

    rising, flat = draw("rising", 60, 0.9), draw("flat", 60, 0.2)
    height, width = imread(rising).shape[:2]
    assert (height, width) == (900, 1200)
    assert count_pixels(rising, BLUE) > 2000
    assert count_pixels(rising, GREEN) == 0  # the reward is the accuracy
    assert count_pixels(rising, GOLD) > 100
    assert not np.array_equal(imread(rising), imread(flat))


def test_each_of_several_evaluations_has_a_label_and_a_color(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[str, str]] = []

    def plot(
        axes: Axes, *points: object, label: str = "", color: str = "", **style: object
    ) -> None:
        drawn.append((label, color))

    monkeypatch.setattr(Axes, "plot", plot)
    results = [make_evaluation(name) for name in ("periodic", "math/periodic", "code/periodic")]
    plot_learning_curve(History([], [*results, results[1]]), "run", tmp_path / "named.png")
    assert [label for label, _ in drawn] == [
        *("held out, sampled", "math: held out, sampled", "code: held out, sampled")
    ]
    assert len({color for _, color in drawn}) == 3


def test_each_of_several_rewards_has_a_panel(tmp_path: Path) -> None:
    png = tmp_path / "parts.png"
    parts = {"reward/right": 1.0, "reward/length": -40.0}
    history = History([make_step(step, workflow=parts) for step in (1, 2)], [])
    plot_learning_curve(history, "run", png)
    assert imread(png).shape[0] == 150 * (4 + 2 * 3)  # with that of the reward


def test_a_resumed_run_shows_nothing_of_the_history_that_it_left(tmp_path: Path) -> None:
    def draw(name: str, *, went_back: bool) -> Path:
        metrics = tmp_path / f"{name}.jsonl"
        with closing(MetricsLog(metrics)) as log:
            log.on_step(make_step(1))
            if went_back:
                log.on_step(make_step(2, reward=9.0))
                log.on_evaluation(make_evaluation("periodic", step=2, accuracy=0.9))
                log.event("resumed", step=1)
            log.on_step(make_step(2))
            log.on_evaluation(make_evaluation("periodic", step=2, accuracy=0.3))
        png = tmp_path / f"{name}.png"
        plot_learning_curve(History.read(metrics), "run", png)
        return png

    straight, resumed = draw("straight", went_back=False), draw("resumed", went_back=True)
    assert np.array_equal(imread(straight), imread(resumed))


def test_reward_gets_its_own_panel(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    with closing(MetricsLog(metrics)) as log:
        for step in range(1, 30):
            log.on_step(make_step(step, accuracy=step / 30, reward=step * 10.0))
    png = tmp_path / "learning_curve.png"
    plot_learning_curve(History.read(metrics), "run", png)
    assert imread(png).shape[0] == 1200
    assert count_pixels(png, BLUE) > 1000
    assert count_pixels(png, GREEN) > 1000


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_short_runs_and_missing_values(tmp_path: Path, num_steps: int) -> None:
    metrics = tmp_path / "metrics.jsonl"
    with closing(MetricsLog(metrics)) as log:
        for step in range(1, num_steps + 1):
            log.on_step(make_step(step, accuracy=None, reward=math.nan if step == 2 else 1.0))
    png = tmp_path / "learning_curve.png"
    plot_learning_curve(History.read(metrics), "run", png)
    assert (count_pixels(png, GREEN) > 0) == (num_steps > 0)


def test_picture_that_cannot_be_written(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    with closing(MetricsLog(metrics)) as log:
        log.on_step(make_step())
    with pytest.raises(RunFolderError, match=r"cannot write .*missing.curve\.png: No such file"):
        plot_learning_curve(History.read(metrics), "run", tmp_path / "missing" / "curve.png")


def test_smoothing_is_a_centred_mean() -> None:
    values = np.array([1.0, 2.0, 6.0, math.nan, 10.0, 4.0])
    assert np.array_equal(smoothed(values, 1), values, equal_nan=True)
    assert smoothed(values, 3).tolist() == [1.5, 3.0, 4.0, 8.0, 7.0, 7.0]
    assert smoothed(values, 4).tolist() == [1.5, 3.0, 3.0, 6.0, pytest.approx(20 / 3), 7.0]


def test_trainer_floor_imports_neither_torch_nor_matplotlib() -> None:
    program = (
        "import sys\n"
        "from areal_sc.records import learning_curve, metrics\n"
        "from areal_sc.trainer import advice, display, failure\n"
        "print([name for name in ('torch', 'matplotlib') if name in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout == "[]\n"
