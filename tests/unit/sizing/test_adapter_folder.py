"""Which adapters of peft are taken for plain ones, by their settings alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal_sc.config.lora_settings import ADAPTER_CONFIG, LoraConfig
from areal_sc.errors import ModelError
from areal_sc.sizing.adapter_folder import ADAPTER_WEIGHTS, check_adapter

WRITTEN = {
    **{"peft_type": "LORA", "peft_version": "0.21.2", "task_type": "CAUSAL_LM"},
    **{"base_model_name_or_path": "model", "revision": None, "inference_mode": True},
    **{"r": 4, "lora_alpha": 12, "lora_dropout": 0.05, "bias": "none", "init_lora_weights": True},
    **{"target_modules": ["q_proj"], "megatron_core": "megatron.core", "qalora_group_size": 16},
    **{name: {} for name in ("rank_pattern", "alpha_pattern", "loftq_config")},
    **dict.fromkeys(
        [
            *("fan_in_fan_out", "use_rslora", "use_dora", "use_qalora", "lora_bias"),
            "ensure_weight_tying",
        ],
        False,
    ),
    **dict.fromkeys(
        [
            *("auto_mapping", "exclude_modules", "modules_to_save", "layers_to_transform"),
            *("layers_pattern", "megatron_config", "trainable_token_indices", "eva_config"),
            *("corda_config", "lora_ga_config", "velora_config", "alora_invocation_tokens"),
            *("monteclora_config", "layer_replication", "target_parameters", "use_bdlora"),
            *("arrow_config", "kasa_config"),
        ],
    ),
}
"""What peft 0.21 writes of an adapter with its defaults, rank 4 and alpha 12."""


def check(folder: Path, **settings: Any) -> None:
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings))
    (folder / ADAPTER_WEIGHTS).touch()
    check_adapter(LoraConfig(rank=4, alpha=12, path=str(folder)))


@pytest.mark.parametrize(
    "plain",
    [
        {},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": False},
        {"init_lora_weights": "eva", "eva_config": {"rho": 1.0}},
        {"layers_to_transform": [0], "layers_pattern": "layers"},
        {"a_kind_of_next_year": None, "another": False, "a_third": []},
    ],
)
def test_a_plain_adapter_is_taken(tmp_path: Path, plain: dict[str, Any]) -> None:
    check(tmp_path, **WRITTEN | plain)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("init_lora_weights", it) for it in ("pissa", "pissa_niter_4", "olora", "corda")),
        *(("init_lora_weights", it) for it in ("loftq", "lora_ga", "a kind of next year")),
        ("peft_type", "ADALORA"),
        ("peft_type", None),
        ("bias", "all"),
        ("fan_in_fan_out", True),
        ("use_rslora", True),
        ("rank_pattern", {"q_proj": 8}),
        ("modules_to_save", ["lm_head"]),
        ("target_parameters", ["experts.up"]),
        ("alora_invocation_tokens", [7, 8]),
        ("use_bdlora", {"nblocks": 2}),
        ("kasa_config", {"beta": 1e-4}),
        ("a_kind_of_next_year", {"on": True}),
        ("a_kind_of_next_year", "on"),
        ("a_kind_of_next_year", 1),
    ],
)
def test_an_adapter_that_may_compute_something_else_is_refused_by_name(
    tmp_path: Path, name: str, value: Any
) -> None:
    with pytest.raises(ModelError, match=rf"expected an adapter with(out)? {name}.*, got "):
        check(tmp_path, **WRITTEN | {name: value})


def test_an_adapter_without_sizes_has_those_of_peft(tmp_path: Path) -> None:
    settings = {name: value for name, value in WRITTEN.items() if name not in ("r", "lora_alpha")}
    with pytest.raises(ModelError, match=r"actor\.lora\.rank: expected 8, which the adapter in"):
        check(tmp_path, **settings)
    with pytest.raises(ModelError, match="expected an adapter with peft_type=LORA, got None"):
        check(tmp_path, r=4, lora_alpha=12)
