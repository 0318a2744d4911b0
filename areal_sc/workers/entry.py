"""The main function of a worker process, forked by the fork server of its agent."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Final

import msgspec

from areal_sc.log import setup_logging
from areal_sc.workers.spec import ROLLOUT_ROLE, WorkerSpec

PRELOAD: Final = (
    "torch",
    "transformers",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.auto.modeling_auto",
    "areal_sc.workers.entry",
    "areal_sc.workers.train_worker",
    "areal_sc.workers.rollout_worker",
    "areal_sc.engines.fsdp.engine",
    "areal_sc.engines.local.engine",
)
"""What the fork server imports to make workers start fast, where there are no CUDA devices."""


def run_worker(spec_dict: dict[str, Any]) -> int:
    """Serves until told to shut down; what it raises ends the process, with its own exit code.

    Args:
        spec_dict: a `WorkerSpec` as a dict, and in `fd` the socket to the agent.
    """
    agent = spec_dict.pop("fd")
    spec = msgspec.convert(spec_dict, WorkerSpec)
    os.environ["CUDA_VISIBLE_DEVICES"] = spec.visible_devices
    setup_logging(spec.name)
    # After the environment is set: torch reads CUDA_VISIBLE_DEVICES when it is first used.
    from transformers.utils.logging import disable_progress_bar

    from areal_sc.workers.rollout_worker import RolloutWorker
    from areal_sc.workers.train_worker import TrainWorker

    disable_progress_bar()  # type: ignore[no-untyped-call]
    kind = RolloutWorker if spec.order.role == ROLLOUT_ROLE else TrainWorker
    asyncio.run(kind(spec, agent).serve())
    return 0
