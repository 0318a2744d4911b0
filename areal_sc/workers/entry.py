"""The main function of a worker process, forked by the fork server of its agent."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from importlib.metadata import version
from typing import Any, Final

import msgspec

from areal_sc.log import setup_logging
from areal_sc.nodes.spec import ROLLOUT_ROLE, WorkerSpec
from areal_sc.system.process import take_arguments_of_script
from areal_sc.transport.sockets.interface import Interface
from areal_sc.user_code import run_worker_loop

_ALLOCATOR_VARIABLES: Final = frozenset(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
_EXACT_PINNED_SINCE: Final = (2, 13)
"""The first torch that is known to take the setting; older ones refuse to start with it."""


def prepare_model_loading() -> None:
    """Compiles the patterns by which transformers renames the tensors of all its models.

    It does so with the first model of a process: two thirds of the time of loading a small one.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("")  # type: ignore[no-untyped-call]


def tell_allocator(environment: MutableMapping[str, str] = os.environ) -> None:
    """Has torch keep a GPU's memory in segments that grow, unless the user has set its allocator.

    Micro-batches differ in size; otherwise what one has freed may be in pieces too small for
    another. Pinned host memory gets the size that was asked for; torch would take the next power of
    two, up to twice as much. Not for servers, which would get it from their worker, and set their
    own.
    """
    if not environment.keys() & _ALLOCATOR_VARIABLES:
        settings = ["expandable_segments:True"]
        torch = tuple(int(part) for part in version("torch").split(".")[:2])
        if torch >= _EXACT_PINNED_SINCE:
            settings.append("pinned_max_round_threshold_mb:1")
        environment["PYTORCH_CUDA_ALLOC_CONF"] = ",".join(settings)


def tell_cuda(environment: MutableMapping[str, str] = os.environ) -> None:
    """Has CUDA number its devices as nvidia-smi does, whose numbers a run is planned with.

    Its own order begins with the fastest device.
    """
    environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def run_worker(spec_dict: dict[str, Any]) -> int:
    """Serves until told to shut down; what it raises ends the process, with its own exit code.

    Args:
        spec_dict: a `WorkerSpec` as a dict, and in `fd` the socket to the agent.
    """
    agent = spec_dict.pop("fd")
    spec = msgspec.convert(spec_dict, WorkerSpec)
    os.environ["CUDA_VISIBLE_DEVICES"] = spec.visible_devices
    tell_cuda()
    take_arguments_of_script()
    setup_logging(spec.name)
    Interface.of(spec.run.transport.bind).tell_libraries()
    is_rollout = spec.order.role == ROLLOUT_ROLE
    if spec.visible_devices and not is_rollout:
        tell_allocator()
    # After the environment is set: torch reads it when it is first used.
    from transformers.utils.logging import disable_progress_bar

    from areal_sc.workers.rollout_worker import RolloutWorker
    from areal_sc.workers.train_worker import TrainWorker

    disable_progress_bar()  # type: ignore[no-untyped-call]
    kind = RolloutWorker if is_rollout else TrainWorker
    run_worker_loop(kind(spec, agent).serve())  # made before there is a loop, since it forks
    return 0
