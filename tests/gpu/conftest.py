"""The device of the tests of this folder: CUDA, and where there is none they are skipped.

`GPU_TESTS_ON=cpu python -m pytest tests/gpu` tries the tests' own logic on a CPU.
"""

from __future__ import annotations

import os

import pytest
import torch

from areal_sc.config.schema import Device


@pytest.fixture
def device() -> Device:
    chosen = Device(os.environ.get("GPU_TESTS_ON", Device.cuda))
    if chosen == Device.cuda and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, there is none")
    return chosen
