"""What a worker on a GPU sets for torch and NCCL, and leaves to the user."""

from __future__ import annotations

import pytest

from areal_sc.weights.group import tell_nccl
from areal_sc.workers import entry
from areal_sc.workers.entry import tell_allocator, tell_cuda


def test_memory_of_a_rank_is_in_segments_that_grow() -> None:
    environment: dict[str, str] = {}
    tell_allocator(environment)
    settings = environment["PYTORCH_CUDA_ALLOC_CONF"].split(",")
    assert "expandable_segments:True" in settings
    assert environment.keys() == {"PYTORCH_CUDA_ALLOC_CONF"}


def test_pinned_memory_is_as_large_as_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch knows the setting; others refuse to start with it."""
    for version, knows in (("2.9.1", False), ("2.12.0", False), ("2.13.0+cu130", True)):
        monkeypatch.setattr(entry, "version", lambda _, version=version: version)
        environment: dict[str, str] = {}
        tell_allocator(environment)
        found = "pinned_max_round_threshold_mb:1" in environment["PYTORCH_CUDA_ALLOC_CONF"]
        assert found == knows


def test_devices_have_the_numbers_that_a_run_is_planned_with() -> None:
    environment: dict[str, str] = {}
    tell_cuda(environment)
    assert environment == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    tell_cuda(of_user := {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    assert of_user == {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_users_allocator_stays(name: str) -> None:
    environment = {name: "max_split_size_mb:128"}
    tell_allocator(environment)
    assert environment == {name: "max_split_size_mb:128"}


def test_ranks_of_a_weight_group_have_the_settings_of_sglangs_servers() -> None:
    environment = {"NCCL_CUMEM_ENABLE": "1"}
    tell_nccl(environment)
    assert environment == {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
