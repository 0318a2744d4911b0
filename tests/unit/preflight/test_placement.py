"""Which placements are refused, which fit a machine, and what `auto` takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import load

from areal_sc.config.parallel_settings import Placement, TrainEngineKind
from areal_sc.engines.servers.sglang import handle as sglang_handle
from areal_sc.errors import ConfigError
from areal_sc.preflight.dry_run import placed_lines
from areal_sc.preflight.plan import check_turns, placement_lines, plan, settle_placement
from areal_sc.sizing.machine import Machine

SIZES = (
    *("rollout.train_batch_groups=2", "rollout.group_size=4", "rollout.max_context_tokens=100"),
    *("rollout.max_running_sequences=5", "generation.max_new_tokens=50"),
)
HOST = 1 << 40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["weight_update.method=collective"], "expected pull or disk with placement=turns"),
        (["rollout.autoscale.max=2"], "placement: expected another one than turns, with which the"),
        (["rollout.engine=sglang"], "with SGLang on a CPU, where it cannot give its memory up"),
        (["rollout.engine=vllm"], "with vLLM on a CPU"),
    ],
)
def test_what_cannot_take_turns_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load("placement=turns", *words)


def test_ranks_that_cannot_give_their_memory_up_are_refused() -> None:
    config = load()
    config.actor.engine = TrainEngineKind.megatron
    with pytest.raises(ConfigError, match=r"actor\.engine: expected fsdp with placement"):
        check_turns(config, lambda: 1)


def test_sglang_without_a_memory_saver_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("placement=turns", "rollout.engine=sglang", *SIZES)
    with pytest.raises(ConfigError, match="pip install torch-memory-saver there"):
        load(*words, num_devices=1)
    monkeypatch.setattr(sglang_handle, "_FINDS_SAVER", "")
    load(*words, num_devices=1)
    config = load(*words, "sglang.args={enable_memory_saver: false}", num_devices=1)
    with pytest.raises(ConfigError, match="enable_memory_saver"):
        plan(config, lambda: Machine(HOST, (None,)))


@pytest.mark.parametrize(
    ("room", "expected"),
    [("both", Placement.auto), ("one", Placement.turns), ("none", Placement.auto)],
)
def test_auto_takes_turns_where_nothing_else_fits(
    tiny_model_folder: Path, room: str, expected: Placement
) -> None:
    config = load(f"actor.path={tiny_model_folder}", *SIZES, num_devices=1)
    planned = plan(config, lambda: Machine(HOST, (None,)))
    sides = [worker.memory["cuda:0"] for worker in planned.workers]
    memory = {"both": sum(sides), "one": max(sides), "none": max(sides) - 1}[room]
    found = settle_placement(config, lambda: Machine(HOST, (memory,)))
    assert config.placement is config.rollout.placement is expected
    lines = list(placement_lines(config, found))
    assert [line[12:].split()[0] for line in lines] == ["apart", "beside", "turns"]
    taken = "turns" if room == "one" else "beside"
    assert [line.split()[2] for line in lines if line[10] == "*"] == [taken]
    assert ("yes" in lines[2]) == (room != "none")
    assert "yes" in lines[1] if room == "both" else "no: " in lines[1]


def test_sides_that_share_no_gpu_have_no_choice(tiny_model_folder: Path) -> None:
    config = load(f"actor.path={tiny_model_folder}", *SIZES, num_devices=2)
    assert settle_placement(config, lambda: Machine(HOST, (None, None))) == []
    config.placement = config.rollout.placement = Placement.apart
    with pytest.raises(ConfigError, match="both sides need cuda:0"):
        settle_placement(config, lambda: Machine(HOST, (None,)))


@pytest.mark.parametrize("placement", [Placement.auto, Placement.apart])
@pytest.mark.parametrize("lack", ["GPU", "host"])
def test_too_little_memory_is_no_shared_gpu(
    tiny_model_folder: Path, lack: str, placement: Placement
) -> None:
    config = load(
        f"actor.path={tiny_model_folder}", *SIZES, f"placement={placement}", num_devices=2
    )
    memory = 1000 if lack == "GPU" else None
    machine = Machine(1000 if lack == "host" else HOST, (memory, memory))
    assert settle_placement(config, lambda: machine) == []
    assert config.placement is placement
    cause = {
        "GPU": r"most of cuda:0 is 'activations' of train",
        "host": r"most of host is",
    }
    with pytest.raises(ConfigError, match=cause[lack]):
        list(placed_lines(config, machine, generates=True))


def test_in_turns_a_gpu_holds_the_larger_side(tiny_model_folder: Path) -> None:
    config = load(f"actor.path={tiny_model_folder}", *SIZES, num_devices=1)
    machine = Machine(HOST, (None,))
    beside = plan(config, lambda: machine)
    config.rollout.placement = Placement.turns
    turns = plan(config, lambda: machine)
    trainer, generator = (worker.memory["cuda:0"] for worker in turns.workers)
    assert beside.needed_bytes["cuda:0"] == trainer + generator
    assert turns.needed_bytes["cuda:0"] == max(trainer, generator)
    stowed = turns.needed_bytes["host"] - beside.needed_bytes["host"]
    assert stowed == turns.workers[0].parameter_bytes + turns.workers[0].optimizer_bytes
