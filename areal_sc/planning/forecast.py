"""What a step would take at another operating point: by a simulated run, set to what was measured.

What was measured has in it already how processes on one machine slow each other down, as it is at
the present point: what everything takes that computes alone follows from it. What a group takes
beyond its answers (rewards, tools) is what its measured time leaves.

A step that is forecast for the present point differs from what was measured; every other forecast
is corrected by the same factor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from areal_sc.config.schema import GRPOConfig
from areal_sc.planning.cores import SharedCores
from areal_sc.planning.figures import Figures, OperatingPoint, Training, Turn
from areal_sc.planning.lengths import fit_lengths
from areal_sc.planning.simulated_run import Forecast, Pace, SimulatedRun

NUM_PACES: Final = 3
"""Rounds in which it is found how fast all computes at the present point, and what a group takes
beyond its answers: each depends on the other."""


class Forecaster:
    """Forecasts of one run.

    Args:
        cores: of the machine that all processes share; None: they do not share one.
    """

    def __init__(
        self, figures: Figures, config: GRPOConfig, cores: SharedCores | None = None
    ) -> None:
        self.figures = figures
        self._config = config
        self._cores = cores
        self._pace = Pace()
        self._beside_s = 0.0
        self._usual_tokens = 0.0
        self._factor = 1.0
        self._known: dict[OperatingPoint, Forecast] = {}
        self._lengths = fit_lengths(
            figures.mean_tokens,
            figures.longest_tokens,
            figures.longest_std,
            figures.longest_max,
            config.rollout.group_size,
        )
        for _ in range(1 if cores is None else NUM_PACES):
            self._beside_s = 0.0
            present = self._simulate(figures.point)
            self._beside_s = max(0.0, figures.group_s - present.group_s)
            if cores is not None:
                self._pace = self._simulate(figures.point).pace
        # an engine may compute a shared prompt once, so the measured number may be the smaller one;
        # if it is the larger one, the simulation has too few answers here
        self._usual_tokens = max(present.held_tokens, figures.recomputed_tokens)
        present = self._simulate(figures.point)
        self._factor = figures.step_s / present.step_s

    @property
    def error(self) -> float:
        """How much longer a step was than simulated at the present point, as a share."""
        return self._factor - 1

    def at(self, point: OperatingPoint) -> Forecast:
        """The forecast for a point."""
        if point not in self._known:
            found = self._simulate(point)
            self._known[point] = replace(
                found, step_s=found.step_s * self._factor, wait_s=found.wait_s * self._factor
            )
        return self._known[point]

    def _simulate(self, point: OperatingPoint) -> Forecast:
        return SimulatedRun(
            _alone(self.figures, self._pace),
            self._config,
            point,
            self._lengths,
            self._beside_s,
            self._cores,
            self._usual_tokens,
        ).forecast()


def _alone(figures: Figures, pace: Pace) -> Figures:
    """What would have been measured if nothing else had computed at the same time."""
    training, turn = figures.training, figures.turn
    return replace(
        figures,
        training=Training(
            training.fixed_s * pace.training,
            training.divided_s * pace.training,
            training.std_s * pace.training,
        ),
        rest_s=figures.rest_s * pace.training,
        turn=Turn(turn.fixed_s * pace.generation, turn.per_answer_s * pace.generation),
        update_s=figures.update_s * pace.generation,
        recompute_s=figures.recompute_s * pace.generation,
    )
