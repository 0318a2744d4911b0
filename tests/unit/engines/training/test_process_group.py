"""How a rank begins to use its device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from areal_sc.engines.training.process_group import take_device
from areal_sc.errors import WorkerStartError

TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040)."


def test_an_error_of_cuda_is_told_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as a meeting of ranks that failed; and with the driver that is needed."""

    def fail(_: Any) -> None:
        raise RuntimeError(TOO_OLD)

    monkeypatch.setattr(torch.cuda, "set_device", fail)
    for built_for, expected in (
        ("13.0", r"built for 13\.0, and needs an NVIDIA driver of at least 580 "),
        ("12.8", r"built for 12\.8, and needs an NVIDIA driver of at least 525 "),
        (None, r"built for no CUDA \(nvidia-smi"),
    ):
        monkeypatch.setattr(torch.version, "cuda", built_for)
        with pytest.raises(WorkerStartError, match=rf"rank 3 cannot use cuda:1: .*{expected}") as e:
            take_device(3, torch.device("cuda", 1))
        assert TOO_OLD in str(e.value)
        assert "meet" not in str(e.value)
    take_device(0, torch.device("cpu"))
