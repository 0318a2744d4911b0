"""The main function of a worker process, forked by the fork server of its agent."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import msgspec

from areal_sc import open_files
from areal_sc.errors import ArealError
from areal_sc.log import setup_logging
from areal_sc.workers.spec import ROLLOUT_ROLE, WorkerSpec

logger = logging.getLogger(__name__)


def run_worker(spec_dict: dict[str, Any]) -> int:
    """Serves until told to shut down; returns the exit code.

    Args:
        spec_dict: a `WorkerSpec` as a dict, and in `fds` the socket to the agent.
    """
    (agent,) = spec_dict.pop("fds")
    spec = msgspec.convert(spec_dict, WorkerSpec)
    os.environ.update(spec.environment)
    setup_logging(spec.name)
    open_files.raise_limit()
    # After the environment is set: torch reads CUDA_VISIBLE_DEVICES when it is first used.
    from transformers.utils.logging import disable_progress_bar

    from areal_sc.workers.rollout_worker import RolloutWorker
    from areal_sc.workers.train_worker import TrainWorker

    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        kind = RolloutWorker if spec.order.role == ROLLOUT_ROLE else TrainWorker
        worker = kind(spec, agent)
        asyncio.run(worker.serve())
    except ArealError as error:
        logger.error("worker ended: %s", error, exc_info=True)
        return error.exit_code
    except Exception:  # the process's main: what ends it is in its log
        logger.exception("worker ended")
        return 1
    return 0
