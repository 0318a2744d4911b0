"""Room for shared memory, and what a run keeps on the disk, counted by hand."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import load

from areal_sc.errors import ConfigError
from areal_sc.preflight.machine_limits import DiskPlan, check_disk, check_named_memory
from areal_sc.preflight.plan import plan_ranks

SIZES = (
    *("rollout.train_batch_groups=2", "rollout.group_size=4", "rollout.max_context_tokens=100"),
    *("generation.max_new_tokens=50", "total_steps=60", "evaluation.every_steps=0"),
)
RECORDED = int(3.5 * 60 * 8 * 100)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets what all file systems have free."""

    def have(num_bytes: int) -> None:
        space = SimpleNamespace(f_bavail=num_bytes, f_frsize=1, f_blocks=1 << 50)
        monkeypatch.setattr(os, "statvfs", lambda path: space)

    return have


@pytest.fixture
def counted(tiny_model_folder: Path, tmp_path: Path) -> Callable[..., DiskPlan]:
    def count(*words: str, generates: bool = True) -> DiskPlan:
        own = (f"actor.path={tiny_model_folder}", f"run_dir={tmp_path / 'run'}", *SIZES)
        return DiskPlan.of(load(*own, *words), generates=generates)

    return count


@pytest.fixture
def num_parameters(tiny_model_folder: Path) -> int:
    (rank,) = plan_ranks(load(f"actor.path={tiny_model_folder}").actor)
    return rank.copy_bytes // 12


def test_snapshots_models_and_records(
    counted: Callable[..., DiskPlan], num_parameters: int
) -> None:
    usual = counted("checkpoint.every_steps=10", "checkpoint.keep=2")
    assert usual.parts == {
        "snapshots": 3 * 12 * num_parameters,  # the third one is whole before the first one goes
        "models": 4 * num_parameters,
        "exports": 0,
        "shared memory": 0,
        "records": RECORDED,
    }
    few = counted("checkpoint.every_steps=25", "checkpoint.keep=9", "records.keep=none")
    assert few.parts["snapshots"] == 3 * 12 * num_parameters, "of steps 25, 50 and 60"
    assert few.parts["records"] == 0
    assert counted("checkpoint.every_steps=0").parts["snapshots"] == 0
    every_model = counted("checkpoint.export_every_steps=25", "actor.dtype=bfloat16")
    assert every_model.parts["models"] == 2 * num_parameters
    assert every_model.parts["exports"] == 2 * 2 * num_parameters
    best = counted("checkpoint.keep_best=accuracy", "evaluation.every_steps=5")
    assert best.parts["models"] == 3 * 4 * num_parameters
    assert counted("records.max_bytes=2000000").parts["records"] == RECORDED
    assert counted("records.max_bytes=1048576", "total_steps=9000").parts["records"] == 1048576


def test_models_beside_the_policy_and_weights_that_travel_by_disk(
    counted: Callable[..., DiskPlan], num_parameters: int, tiny_model_folder: Path
) -> None:
    beside = (f"critic.path={tiny_model_folder}", f"reference.path={tiny_model_folder}")
    with_critic = counted(*beside, "checkpoint.every_steps=60", "weight_update.method=disk")
    assert with_critic.parts["snapshots"] == 2 * 12 * num_parameters, "the reference has none"
    assert with_critic.parts["weights"] == 2 * 4 * num_parameters
    elsewhere = counted("weight_update.method=disk", "weight_update.folder=/somewhere/else")
    assert "weights" not in elsewhere.parts
    of_rows = counted("weight_update.method=disk", generates=False)
    assert of_rows.parts.keys() == {"snapshots", "models", "exports", "shared memory"}


def test_a_disk_that_is_too_small_is_told_before_the_run(
    counted: Callable[..., DiskPlan],
    free: Callable[[int], None],
    tiny_model_folder: Path,
    tmp_path: Path,
) -> None:
    run_dir, words = tmp_path / "run", ("checkpoint.every_steps=1", "checkpoint.keep=50")
    parts = counted(*words).parts
    needed = sum(parts.values())
    free(needed)
    assert not counted(*words).is_short
    free(needed - 1)
    assert counted(*words).is_short
    assert "TOO LITTLE: checkpoint.keep=1 needs less" in counted(*words).line()
    own = (f"actor.path={tiny_model_folder}", f"run_dir={run_dir}", *SIZES, *words)
    assert check_disk(load(*own)) == [counted(*words).line()], "there may be fewer records"
    load(*own, "--dry-run")
    free(parts["snapshots"] + parts["models"] - 1)
    for starts in (lambda: check_disk(load(*own)), lambda: load(*own, "--dry-run")):
        with pytest.raises(ConfigError, match=r"the run does not fit on the disk: .* TOO LITTLE"):
            starts()
    free(needed - 1)
    run_dir.mkdir()
    (run_dir / "of-an-earlier-start").write_bytes(b"x")
    assert not counted(*words).is_short, "what the run has there already is room of its own"


def test_the_disk_is_in_the_forecast(
    tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load(f"actor.path={tiny_model_folder}", f"run_dir={tmp_path / 'run'}", *SIZES, "--dry-run")
    assert f"disk of {tmp_path / 'run'}: up to " in (shown := capsys.readouterr().out)
    assert "(snapshots " in shown


def test_named_shared_memory_has_to_hold_two_versions(
    free: Callable[[int], None], tiny_model_folder: Path, tmp_path: Path
) -> None:
    words = (f"actor.path={tiny_model_folder}", f"run_dir={tmp_path / 'run'}", *SIZES)
    config = load(*words, f"transport.shared_memory={tmp_path / 'memory'}")
    needed = sum(rank.store_bytes for rank in plan_ranks(config.actor))
    free(needed)
    check_named_memory(config)
    free(needed - 1)
    with pytest.raises(ConfigError, match=r"transport\.shared_memory: .* two versions of the"):
        check_named_memory(config)
    check_named_memory(load(*words))  # auto: the agent chooses
    config.scheduler.type = "slurm"  # this machine runs no worker
    check_named_memory(config)
