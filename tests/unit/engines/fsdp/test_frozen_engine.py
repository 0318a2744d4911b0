"""A model that only computes: the same numbers, and no memory for what trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from builders import engines_on, packed_rows
from random_models import random_model

from areal_sc.algorithms.named_loss import CROSS_ENTROPY
from areal_sc.config.schema import ActorConfig
from areal_sc.engines.handles import make_actor
from areal_sc.errors import ConfigError
from areal_sc.sizing.machine import Machine
from areal_sc.sizing.model_folder import ModelShape

ROWS = packed_rows((4, 5))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # without FSDP, and with it
def test_a_frozen_engine_computes_the_same_and_has_no_optimizer(tmp_path: Path, dtype: str) -> None:
    random_model(vocab_size=30).save_pretrained(tmp_path)
    computed = []
    with engines_on(tmp_path) as build:
        for is_frozen in (False, True):
            engine = build(dtype=dtype, is_frozen=is_frozen)
            computed.append(engine.forward(ROWS, "logprobs"))
            has_optimizer = bool(engine._optimizer.moments())
            assert has_optimizer is not is_frozen
            if is_frozen:
                with pytest.raises(ConfigError, match="is frozen"):
                    engine.update([ROWS], CROSS_ENTROPY, step=0)
    assert torch.equal(*computed)


def test_the_plan_of_a_frozen_model_has_parameters_alone() -> None:
    shape, config = ModelShape(num_parameters=1000), ActorConfig(path="model")
    (trained,), (frozen,) = (
        make_actor(config, is_frozen=is_frozen).plan_worker(0, shape, ["cpu"], Machine())
        for is_frozen in (False, True)
    )
    assert (trained.parameter_bytes, trained.optimizer_bytes) == (8000, 8000)
    assert (frozen.parameter_bytes, frozen.optimizer_bytes) == (4000, 0)
    assert frozen.store_bytes == frozen.copy_bytes == frozen.snapshot_bytes == 0


def test_megatron_refuses_to_be_frozen() -> None:
    config = ActorConfig(path="model", engine="megatron")
    with pytest.raises(ConfigError, match=r"actor.is_frozen: expected false .*engine=fsdp has it"):
        make_actor(config, is_frozen=True).check(None)
