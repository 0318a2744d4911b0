"""What a worker on a GPU sets for torch and NCCL, and leaves to the user."""

from __future__ import annotations

import pytest

from areal_sc.engines.weight_group import tell_nccl
from areal_sc.workers.entry import tell_allocator


def test_memory_of_a_rank_is_in_segments_that_grow() -> None:
    environment: dict[str, str] = {}
    tell_allocator(environment)
    assert environment == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_users_allocator_stays(name: str) -> None:
    environment = {name: "max_split_size_mb:128"}
    tell_allocator(environment)
    assert environment == {name: "max_split_size_mb:128"}


def test_ranks_of_a_weight_group_have_the_settings_of_sglangs_servers() -> None:
    environment = {"NCCL_CUMEM_ENABLE": "1"}
    tell_nccl(environment)
    assert environment == {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
