"""Which settings may change between a run and its resumption."""

from __future__ import annotations

from functools import cache

import pytest
import yaml
from builders import load

from areal_sc.config.fields import known_keys
from areal_sc.config.loading.differences import (
    FIXED,
    FREE,
    check_resumable,
    config_differences,
)
from areal_sc.config.loading.loader import config_text
from areal_sc.config.schema import GRPOConfig
from areal_sc.errors import RunFolderError


@cache
def text_of(*overrides: str) -> str:
    """The text of settings with overrides, which is made once for all tests."""
    return config_text(load(*overrides))


def test_differences_of_nested_settings() -> None:
    old = "a: 1\nb: {c: 2, d: 3}\ne: [1, 2]\n"
    new = "a: 1\nb: {c: 4, f: 5}\ne: [1]\n"
    assert list(config_differences(old, new).items()) == [
        ("b.c", "2 -> 4"),
        ("b.f", "(not set) -> 5"),
        ("e", "[1, 2] -> [1]"),
        ("b.d", "3 -> (not set)"),
    ]
    assert config_differences(old, old) == {}


def test_settings_that_do_not_touch_learning_change_in_silence() -> None:
    old = text_of("run_dir=a")
    new = text_of(
        "run_dir=b",
        "actor.optimizer.total_steps=10",
        "total_steps=20",
        "--resume",
        "evaluation.every_steps=5",
        "checkpoint.every_steps=5",
        "transport.call_timeout_s=9",
        "scheduler.startup_timeout_s=9",
    )
    assert len(config_differences(old, new)) >= 7
    assert check_resumable(old, new) == []


def test_other_changes_are_reported() -> None:
    old = text_of()
    new = text_of("actor.optimizer.lr=0.5", "rollout.max_staleness=1")
    assert check_resumable(old, new) == [
        "actor.optimizer.lr: 1e-06 -> 0.5",
        "rollout.max_staleness: 4 -> 1",
    ]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("seed=1", "seed: 0 -> 1"),
        ("actor.path=other", "actor.path: no_such_model -> other"),
        ("actor.dtype=bfloat16", "actor.dtype: float32 -> bfloat16"),
        ("rollout.group_size=4", "rollout.group_size: 8 -> 4"),
        ("rollout.train_batch_groups=4", "rollout.train_batch_groups: 32 -> 4"),
    ],
)
def test_changes_that_cannot_be_are_refused_with_the_reason(override: str, line: str) -> None:
    old, new = text_of(), text_of(override)
    with pytest.raises(RunFolderError) as caught:
        check_resumable(old, new)
    assert f"{line} ({FIXED[line.partition(':')[0]]})" in str(caught.value)
    assert "--overwrite" in str(caught.value)


def test_settings_that_there_are_no_more_are_named_unless_they_said_nothing() -> None:
    settings = yaml.safe_load(text_of())
    settings["rollout"] |= {"seed": 0, "generation": settings["generation"]}
    settings["critic"] |= {"path": "c", "compile_layers": None}
    new = yaml.safe_dump(yaml.safe_load(text_of()) | {"critic": {"path": "c"}})
    assert "no more" not in str(check_resumable(yaml.safe_dump(settings), new))
    settings["rollout"] |= {"seed": 3, "max_prefill_tokens": 9}
    old = yaml.safe_dump(settings)
    said = check_resumable(old, new)
    assert said[-1] == (
        "settings that there are no more, and that count no more: rollout.max_prefill_tokens=9, "
        "rollout.seed=3"
    )


def test_listed_settings_exist() -> None:
    assert {*FIXED, *FREE} <= set(known_keys(GRPOConfig))


@pytest.mark.parametrize("text", ["a: [1", "- a"])
def test_unreadable_old_settings(text: str) -> None:
    with pytest.raises(RunFolderError, match=r"config\.yaml cannot be read"):
        config_differences(text, "a: 1")


def test_an_adapter_stays_what_it_is() -> None:
    none, old = text_of(), text_of("actor.lora.rank=4")
    before_adapters = none.replace("lora:", "unknown:")
    assert not check_resumable(none, text_of("actor.lora.alpha=4"))  # it says nothing
    assert "actor.lora" not in str(check_resumable(before_adapters, none))
    for changed in ("actor.lora.rank=8", "actor.lora.rank=0"):
        with pytest.raises(RunFolderError, match=r"actor.lora.rank: 4 -> .*another adapter"):
            check_resumable(old, text_of(changed))
    for changed in ("actor.lora.alpha=4", "actor.lora.targets=[q_proj]"):
        with pytest.raises(RunFolderError, match=r"the snapshot holds another adapter"):
            check_resumable(old, text_of("actor.lora.rank=4", changed))
