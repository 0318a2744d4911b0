"""`python -m areal_sc COMMAND ...`, with a journal of the served that is small."""

from __future__ import annotations

import sys

from areal_sc.__main__ import main
from areal_sc.serving import server
from areal_sc.trainer.failure import run_script

server.JOURNAL_BYTES = 12_000  # type: ignore[misc]

if __name__ == "__main__":
    sys.exit(run_script(main))
