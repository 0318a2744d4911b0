"""A run whose episodes agents outside claim: see `tiny_run.yaml`."""

from __future__ import annotations

import sys

from areal_sc import GRPOConfig, OnlineWorkflow, PPOTrainer, load_config, run_script


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    PPOTrainer(config).fit(OnlineWorkflow(), [{"question": f"a{n}"} for n in range(8)])


if __name__ == "__main__":
    sys.exit(run_script(main))
