"""Where the threads of another process are, as it writes them to its own log when it is asked.

`faulthandler` writes them from a signal handler in C. So they come from a process that hangs in C
code, or whose interpreter is locked, but not from one that is stopped.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

STACKS_SIGNAL: Final = signal.SIGUSR2
"""What each process that a fork server has forked takes for this question."""

WAIT_S: Final = 2.0
"""A process that has written nothing by then will not."""
POLL_S: Final = 0.2
"""One that has written nothing more for so long has written all."""
MAX_FRAMES: Final = 16
"""Most frames of one thread, the innermost ones."""
MAX_LINES: Final = 60

_MAX_BYTES: Final = 256 << 10
_THREAD: Final = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+ .*\n(?:  .*\n?)*")
_IDLE: Final = re.compile(r'concurrent/futures/thread\.py", line \d+ in _worker$')
_WAITING: Final = re.compile(r'/(?:selectors|threading|queue)\.py", line \d+ in \w+$')


async def written_stacks(log: Path | str, ask: Callable[[], None]) -> list[str]:
    """Lines of the stacks that a process writes to its log when it is asked; [] if it does not.

    At most `MAX_LINES` of them; all are in the log. The innermost frame of a thread comes first.
    Threads that compute come last, and idle ones of thread pools not at all.
    """
    loop = asyncio.get_running_loop()
    begun = seen = _num_bytes(log)
    give_up_s = loop.time() + WAIT_S
    ask()
    while loop.time() < give_up_s:
        await asyncio.sleep(POLL_S)
        now = _num_bytes(log)
        if begun != now == seen:
            break
        seen = now
    return shortened(_text_from(log, begun))


def shortened(text: str) -> list[str]:
    """The stacks among the lines of a log, as `written_stacks` gives them."""
    threads = []
    for found in _THREAD.findall(text):
        header, *frames = found.splitlines()
        if frames and not _IDLE.search(frames[0]):
            threads.append([header, *frames[:MAX_FRAMES]])
    threads.sort(key=lambda lines: _WAITING.search(lines[1]) is None)
    return [line for lines in threads for line in lines][-MAX_LINES:]


def _num_bytes(log: Path | str) -> int:
    try:
        return Path(log).stat().st_size
    except OSError:
        return 0


def _text_from(log: Path | str, begun: int) -> str:
    try:
        with Path(log).open("rb") as file:
            file.seek(begun)
            return file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
