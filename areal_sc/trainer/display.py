"""What a run shows while it works: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, Self

from rich.console import Console

from areal_sc.trainer.live_display import LiveDisplay
from areal_sc.trainer.metrics import EvaluationResult, StepMetrics, Summary
from areal_sc.trainer.plain_display import PlainDisplay


class Phase(Protocol):
    """A part of the run whose progress is shown."""

    def advance(self, n: int = 1) -> None:
        """Counts `n` more of the phase's units as done."""
        ...

    def update(self, text: str) -> None:
        """Says what the phase is doing now."""
        ...


class RunDisplay(Protocol):
    """Shows a run on standard output. Called from one thread.

    Used as a context manager, so that the terminal is itself again however the run ends.
    """

    def phase(
        self, name: str, total: int | None = None, unit: str = ""
    ) -> AbstractContextManager[Phase]:
        """Shows progress while the context is open; phases may be nested.

        Args:
            name: e.g. `start-up`, `warm start`, `training`.
            total: number of units to do; None where it is not known.
            unit: what is counted, in the plural: `steps`.
        """
        ...

    def step(self, metrics: StepMetrics) -> None:
        """One line for a finished training step."""
        ...

    def evaluation(self, result: EvaluationResult) -> None:
        """One line for a finished evaluation."""
        ...

    def note(self, text: str) -> None:
        """Something worth knowing."""
        ...

    def warning(self, text: str) -> None:
        """Something is worse than it should be; the run goes on."""
        ...

    def finish(self, summary: Summary, run_dir: Path) -> None:
        """The result, and what lies in the run folder."""
        ...

    def close(self) -> None:
        """Ends the display; a second call does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


def make_display(
    console: Console | None = None,
    *,
    run_dir: Path | None = None,
    total_steps: int | None = None,
) -> RunDisplay:
    """The display that fits the output.

    Args:
        console: where to show it; None is standard output, live only where that is a terminal
            that can move its cursor (`TERM=dumb` cannot).
        run_dir: shown at the top.
        total_steps: training steps of the whole run; None where it is not known.
    """
    if console is None:
        # given explicitly, because FORCE_COLOR would make rich take a pipe for a terminal
        console = Console(force_terminal=sys.stdout.isatty())
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console, run_dir=run_dir, total_steps=total_steps)
    return PlainDisplay(console, run_dir=run_dir, total_steps=total_steps)
