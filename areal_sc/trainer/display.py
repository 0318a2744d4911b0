"""What a run shows while it works: a live display on a terminal, plain lines elsewhere.

Both are trackers with the same further methods.

    phase      a context: shows progress while it is open; phases may be nested
    note       something worth knowing
    warning    something is worse than it should be; the run goes on
    close      gives the terminal back; a second call does nothing
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from areal_sc.trainer.live_display import LiveDisplay
from areal_sc.trainer.plain_display import PlainDisplay

RunDisplay = LiveDisplay | PlainDisplay


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
        return LiveDisplay(console, run_dir, total_steps)
    return PlainDisplay(console, run_dir, total_steps)
