"""`python -m areal_sc COMMAND ...`, as a script."""

from __future__ import annotations

import sys

from areal_sc.__main__ import main
from areal_sc.trainer.failure import run_script

if __name__ == "__main__":
    sys.exit(run_script(main))
