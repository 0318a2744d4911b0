"""What Megatron-core needs of a machine. No torch: scripts check it before anything starts.

Megatron-core computes on GPUs. This project's tests run it on CPUs all the same: with
`MEGATRON_ON_CPU=1` a checkout loads its own `tests/megatron_on_cpu.py`, which puts CPU tensors in
the place of CUDA's. It is slow, it changes torch for the whole process, and it is for tests alone.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from areal_sc.config.schema import Device
from areal_sc.errors import ConfigError
from areal_sc.sizing.machine import resolved_device

ON_CPU = "MEGATRON_ON_CPU"
SHIM = Path(__file__).parents[3] / "tests" / "megatron_on_cpu.py"
"""Beside the package in a checkout; an installed package has none."""

_OTHERWISE = "or set actor.engine=fsdp"


def is_on_cpu() -> bool:
    """Whether the variable asks for the tests' CPU."""
    return os.environ.get(ON_CPU) == "1"


def check_machine(device: Device, count_devices: Callable[[], int]) -> None:
    """Raises: ConfigError: a package or a device is missing."""
    if not _is_installed("megatron.core"):
        raise ConfigError(
            "actor.engine: megatron needs Megatron-core, which is not installed here: "
            f"pip install areal-sc[megatron], {_OTHERWISE}"
        )
    if is_on_cpu():
        if not SHIM.is_file():
            raise ConfigError(
                f"{ON_CPU}=1 is for this project's own tests and needs {SHIM}, which is not there; "
                f"run from a checkout, {_OTHERWISE}"
            )
        if device == Device.cuda:
            raise ConfigError(f"actor.device: expected cpu with {ON_CPU}=1, got cuda")
        return
    if resolved_device(device, count_devices(), "actor.device") == Device.cpu:
        raise ConfigError(
            "actor.engine: megatron needs GPUs, and actor.device is the CPU here: use a machine "
            f"with CUDA devices, {_OTHERWISE}"
        )
    if not _is_installed("transformer_engine"):
        raise ConfigError(
            "actor.engine: megatron needs TransformerEngine on GPUs, which is not installed here: "
            f"pip install transformer-engine[pytorch], {_OTHERWISE}"
        )


def load_cpu_shim() -> None:
    """With the variable set, lets Megatron-core compute on the CPU in this process."""
    if not is_on_cpu():
        return
    runpy.run_path(str(SHIM))["install"]()


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # not even what it is in
        return False
