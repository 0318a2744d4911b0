"""The dry run's estimate against numbers worked out by hand."""

from __future__ import annotations

import functools
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from builders import load

from areal_sc.config.parallel_settings import TrainEngineKind
from areal_sc.config.placement import Purpose
from areal_sc.config.schema import GRPOConfig
from areal_sc.engines.handle_base import TrainHandle
from areal_sc.engines.handles import make_generator
from areal_sc.errors import ConfigError
from areal_sc.preflight.load import load_config
from areal_sc.preflight.plan import PlannedNode, plan, plans
from areal_sc.sizing.machine import Machine
from areal_sc.sizing.output_layer import PIECE_BYTES
from areal_sc.sizing.worker_plan import PROCESS_BYTES, format_bytes

NUM_PARAMETERS = 1000
KV_VALUES = 2 * 2 * 1 * 8  # key and value, 2 layers, 1 head of 8
SIZES = [
    "rollout.train_batch_groups=2",
    "rollout.group_size=4",
    "rollout.max_context_tokens=100",
    "rollout.max_running_sequences=5",
    "rollout.max_staleness=1",
    "generation.max_new_tokens=50",
]
# 4 episodes of 100 tokens, in whole cache lines of 64: four fields of 4 bytes each, and one of 1
GROUP_BYTES = 4 * (4 * 7 * 64 + 2 * 64)
ROW_BYTES = (1 + 2) * 2 * GROUP_BYTES  # eta + 1 batches admitted, one in training
GATHERED_BYTES = 3 * 4 * NUM_PARAMETERS
"""All parameters are those of the vocabulary: at most float32, gradients, and these averaged."""
ADDED_BYTES = (2 + 2) * NUM_PARAMETERS
"""Of one rank, which has them all: rounded copies, and their gradients."""
SGLANG = ["rollout.engine=sglang", "actor.dtype=bfloat16"]
REPOSITORY = Path(__file__).parents[3]
ONE_GPU = str(REPOSITORY / "configs" / "one_gpu.yaml")


def stand_in(folder: Path, others: int, *layers: int, **sizes: int) -> Path:
    """A model folder that has sizes, but no values.

    Args:
        others, layers: numbers of parameters, of each decoder layer and outside of them.
        sizes: of `config.json`.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(sizes))
    entries, end = {}, 0
    counts = {"w": others} | {f"model.layers.{n}.w": count for n, count in enumerate(layers)}
    for name, count in counts.items():
        begin, end = end, end + 4 * count
        entries[name] = {"dtype": "F32", "shape": [count], "data_offsets": [begin, end]}
    header = json.dumps(entries)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header.encode())
        file.truncate(file.tell() + end)  # takes no room on the disk
    return folder


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model; its activations, which would hide all else, have tests of their own."""
    monkeypatch.setattr(TrainHandle, "_activation_bytes", lambda *_: (0, 0))
    return stand_in(
        tmp_path / "model",
        NUM_PARAMETERS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
    )


@pytest.fixture
def half_billion(tmp_path: Path) -> Path:
    """The sizes of Qwen2.5-0.5B."""
    return stand_in(
        tmp_path / "half_billion",
        136_135_552,
        *(24 * [14_912_384]),
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
    )


def test_memory_on_one_cpu(model: Path) -> None:
    config = load(f"actor.path={model}", *SIZES)
    result = plan(config, lambda: Machine(host_memory_bytes=1 << 40))
    train, rollout = result.workers
    assert (train.role, train.index, train.device) == ("train", 0, "cpu")
    assert train.parameter_bytes == (4 + 4) * NUM_PARAMETERS  # and gradients
    assert train.optimizer_bytes == 8 * NUM_PARAMETERS
    assert train.store_bytes == 2 * 4 * NUM_PARAMETERS
    assert train.copy_bytes == 12 * NUM_PARAMETERS
    assert train.snapshot_bytes == 2 * 12 * NUM_PARAMETERS
    assert (rollout.role, rollout.index, rollout.device) == ("rollout", 0, "cpu")
    assert rollout.parameter_bytes == 4 * NUM_PARAMETERS
    assert rollout.kv_bytes == 5 * 100 * KV_VALUES * 4
    assert rollout.store_bytes == ROW_BYTES
    total = 16 + 8 + 4 + 36
    assert result.needed_bytes == {
        "host": total * NUM_PARAMETERS + 64000 + ROW_BYTES + 2 * PROCESS_BYTES
    }
    assert result.fits


def test_weights_that_nobody_gets_are_in_no_store(model: Path) -> None:
    """A run on rows of a data set publishes nothing, and nobody generates with a critic."""
    config = load(f"actor.path={model}", f"critic.path={model}", *SIZES)
    assert [worker.store_bytes for worker in plan(config, Machine, generates=False).workers] == [
        0,
        0,
    ]
    stores = {worker.role: worker.store_bytes for worker in plan(config, Machine).workers}
    assert stores == {"train": 2 * 4 * NUM_PARAMETERS, "critic": 0, "rollout": ROW_BYTES}


def test_what_has_changed_takes_a_version_more_and_three_on_other_nodes(model: Path) -> None:
    sizes = [
        f"actor.path={model}",
        *SIZES,
        "rollout.num_workers=2",
        "weight_update.whole_every_steps=9",
    ]
    machine = Machine(1 << 40, ())
    nodes = [PlannedNode("a", machine, Purpose.train), PlannedNode("b", machine, Purpose.rollout)]
    versions = 3 * 4 * NUM_PARAMETERS
    planned = plans(load(*sizes), nodes)
    assert [worker.store_bytes for worker in planned["a"].workers] == [versions]
    with_copy, without = (worker.store_bytes for worker in planned["b"].workers)
    assert with_copy - without == versions
    both = plan(load(*sizes), lambda: machine).workers
    assert [worker.store_bytes for worker in both] == [versions, without, without]


def test_snapshots_in_memory_can_be_done_without(model: Path) -> None:
    config = load(f"actor.path={model}", *SIZES, "checkpoint.memory_snapshots=false")
    train, _ = plan(config, Machine).workers
    assert (train.copy_bytes, train.snapshot_bytes) == (12 * NUM_PARAMETERS, 0)


def test_ranks_share_parameters_and_devices_in_turn(model: Path) -> None:
    config = load(
        f"actor.path={model}",
        *SIZES,
        "actor.parallel.data=2",
        "rollout.num_workers=2",
        "actor.dtype=bfloat16",
        num_devices=3,
    )
    result = plan(config, lambda: Machine(1 << 40, (1 << 30,) * 3))
    assert [(f"{w.role}/{w.index}", w.device) for w in result.workers] == [
        ("train/0", "cuda:0"),
        ("train/1", "cuda:1"),
        ("rollout/0", "cuda:2"),
        ("rollout/1", "cuda:0"),
    ]
    train = result.workers[0]
    assert train.parameter_bytes + train.optimizer_bytes == 16 * NUM_PARAMETERS // 2
    kv_bytes = 5 * 100 * KV_VALUES * 2
    needed, trained = result.needed_bytes, 16 * NUM_PARAMETERS // 2 + GATHERED_BYTES
    assert needed["cuda:0"] == trained + 2 * NUM_PARAMETERS + kv_bytes
    assert needed["cuda:1"] == trained
    assert needed["cuda:2"] == 2 * NUM_PARAMETERS + kv_bytes
    # weights for publication, rows and processes stay in host memory
    assert needed["host"] == (2 * 2 + 36) * NUM_PARAMETERS + ROW_BYTES + 4 * PROCESS_BYTES


def gathered_bytes(folder: Path, *settings: str) -> int:
    config = load(f"actor.path={folder}", *SIZES, *settings)
    return plan(config, lambda: Machine(1 << 40)).workers[0].gathered_bytes


def test_layers_are_gathered_one_after_the_other(tmp_path: Path) -> None:
    """One layer with its gradients, which are copied to be averaged, and the next one's parameters.

    The output layer, which is one piece, is beside it; what else is outside of layers needs less.
    """
    folder = stand_in(tmp_path / "model", 100, 400, 300, 400)
    gathered, head = functools.partial(gathered_bytes, folder), 4 * 100
    assert gathered("actor.parallel.data=2") == 4 * (3 + 1) * 400 + head
    assert gathered("actor.parallel={data: 2, tensor: 2}") == 4 * (3 + 1) * 400 // 2 + head
    assert gathered("actor.parallel.sequence=2") == 4 * (3 + 1) * 400 + head
    assert gathered("actor.dtype=bfloat16", "actor.parallel.data=2") == 2 * 3 * 400 + 4 * 400 + head
    assert gathered("actor.dtype=bfloat16") == (2 + 4) * 400, "alone, a layer's gradients"
    assert gathered("actor.parallel.tensor=2") == gathered() == 0


def test_what_is_offloaded_lies_in_host_memory(tmp_path: Path) -> None:
    """And the device has what is gathered, of which a layer's share comes and goes."""
    folder = stand_in(tmp_path / "model", 100, 400, 300, 400)
    num_parameters = 1200
    machine = Machine(1 << 40, (1 << 30,))
    needed = {}
    for offload in ("false", "true"):
        settings = (*SIZES, "actor.dtype=bfloat16", f"actor.cpu_offload={offload}")
        trainer = plan(load(f"actor.path={folder}", *settings), lambda: machine).workers[0]
        needed[offload] = trainer.memory
    held, gathered = (8 + 8) * num_parameters, (2 * 3 + 4) * 400
    assert needed["false"]["cuda:0"] == held + 2 * num_parameters + (2 + 4) * 400
    assert needed["true"]["cuda:0"] == gathered + (2 + 4) * 400
    assert needed["true"]["host"] - needed["false"]["host"] == held


def test_inputs_of_layers_lie_in_host_memory(tmp_path: Path) -> None:
    """All of them, and one of them on the card while its layer goes backward."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8}
    folder = stand_in(tmp_path / "model", 100, 400, 300, 400, **sizes)
    machines = {"gpu": Machine(1 << 40, (1 << 30,)), "cpu": Machine(1 << 40)}
    needed = dict[tuple[str, str], dict[str, int]]()
    for kept in ("false", "true"):
        settings = (*SIZES, "actor.dtype=float16", "actor.activation_checkpointing=layers")
        settings += (f"actor.activation_offload={kept}",)
        config = load(f"actor.path={folder}", "actor.max_tokens_per_micro_batch=100", *settings)
        for name, machine in machines.items():
            needed[kept, name] = plan(config, lambda it=machine: it).workers[0].memory
    inputs = 2 * 100 * 64
    on_card, on_host = needed["false", "gpu"], needed["true", "gpu"]
    assert on_card["cuda:0"] - on_host["cuda:0"] == 2 * inputs
    assert on_host["host"] - on_card["host"] == 3 * inputs
    assert needed["false", "cpu"] == needed["true", "cpu"]


def test_nothing_is_kept_that_could_be_offloaded(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"without actor\.activation_checkpointing=layers, got"):
        load(f"actor.path={model}", *SIZES, "actor.activation_offload=true")


def test_the_vocabulary_is_gathered_in_pieces(tmp_path: Path) -> None:
    """Values, gradients and their copy; alone, gradients."""
    folder = stand_in(tmp_path / "model", PIECE_BYTES, 400)
    gathered = functools.partial(gathered_bytes, folder)
    assert gathered("actor.parallel.data=2") == 3 * PIECE_BYTES
    assert gathered("actor.parallel={data: 2, tensor: 2}") == 3 * PIECE_BYTES
    assert gathered("actor.parallel.tensor=2", "actor.dtype=bfloat16") == 2 * PIECE_BYTES // 2
    both = ("actor.cpu_offload=true", "actor.dtype=bfloat16")
    assert gathered(*both) == 2 * (2 + 4) * PIECE_BYTES


def test_store_limit_bounds_the_rows(model: Path) -> None:
    config = load(f"actor.path={model}", *SIZES, f"rollout.store_bytes={2 * GROUP_BYTES}")
    assert plan(config, Machine).workers[1].store_bytes == 2 * GROUP_BYTES


def test_too_little_memory(model: Path) -> None:
    config = load(f"actor.path={model}", *SIZES)
    needed = plan(config, Machine).needed_bytes["host"]  # unknown memory fits
    plan(config, lambda: Machine(host_memory_bytes=needed))
    with pytest.raises(ConfigError, match="does not fit into memory") as caught:
        plan(config, lambda: Machine(host_memory_bytes=needed - 1))
    assert "TOO LITTLE" in str(caught.value)
    sizes = {"train": plan(config, Machine).workers[0], "rollout": plan(config, Machine).workers[1]}
    named = re.search(r"; most of host is '(.+)' of (\w+), ([\d.]+ \w+)", str(caught.value))
    assert named is not None
    largest = max(n for worker in sizes.values() for n in worker.parts.values())
    assert sizes[named[2]].parts["host", named[1]] == largest
    assert named[3] == format_bytes(largest)
    assert "rollout/0" in str(caught.value)
    assert "rollout.store_bytes need less\n" in str(caught.value), "nothing of a GPU"


@pytest.mark.parametrize("engine", list(TrainEngineKind))
def test_nothing_is_advised_that_is_set_or_refused(engine: TrainEngineKind, model: Path) -> None:
    config = load(f"actor.path={model}", *SIZES, num_devices=1)
    config.actor.engine = engine
    way_out = r"less on a GPU with more ranks of actor\.parallel"
    if engine is TrainEngineKind.fsdp:
        with pytest.raises(ConfigError, match=way_out + r" or actor\.cpu_offload=true\n"):
            plan(config, lambda: Machine(1 << 40, (1,)))
        config.actor.cpu_offload = True
    with pytest.raises(ConfigError, match=way_out + r"\n"):
        plan(config, lambda: Machine(1 << 40, (1,)))


def test_lines_say_what_is_not_counted() -> None:
    lines = plan(load(*SIZES), lambda: Machine(host_memory_bytes=1 << 40)).lines()
    assert lines[0].split()[:2] == ["worker", "device"]
    assert lines[1].split()[:2] == ["train/0", "cpu"]
    assert lines[2].split()[:2] == ["rollout/0", "cpu"]
    assert lines[3].endswith("of 1.0 TiB")
    assert lines[-1] == "not counted: the model, which is not there yet"


def test_servers_take_their_share_of_each_device(model: Path) -> None:
    config = load(
        f"actor.path={model}",
        *SIZES,
        *SGLANG,
        "servers.tp_size=4",
        "+sglang.args.mem_fraction_static=0.5",
        num_devices=4,
    )
    result = plan(config, lambda: Machine(1 << 40, (100_000,) * 4))
    assert [(f"{w.role}/{w.index}", w.device) for w in result.workers] == [
        ("train/0", "cuda:0"),
        ("rollout/0", "cpu"),
        ("server/0", "cuda:0"),
        ("server/1", "cuda:1"),
        ("server/2", "cuda:2"),
        ("server/3", "cuda:3"),
    ]
    assert (result.workers[1].parameter_bytes, result.workers[1].kv_bytes) == (0, 0)
    # 1,000 parameters of 2 bytes over four ranks; training leaves 82,000 bytes of the first device
    assert (result.workers[2].parameter_bytes, result.workers[2].kv_bytes) == (500, 40_500)
    for rank in result.workers[3:]:
        assert (rank.parameter_bytes, rank.kv_bytes) == (500, 49_500)
    needed = result.needed_bytes
    assert needed["cuda:0"] == 16 * NUM_PARAMETERS + ADDED_BYTES + 41_000
    assert needed["cuda:3"] == 50_000
    assert needed["host"] == (2 * 2 + 36) * NUM_PARAMETERS + ROW_BYTES + 6 * PROCESS_BYTES


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_each_worker_has_a_server_of_its_own(model: Path, tp_size: int) -> None:
    config = load(
        f"actor.path={model}",
        *SIZES,
        *SGLANG,
        "actor.parallel.data=4",
        *(f"rollout.num_workers={4 // tp_size}", f"servers.tp_size={tp_size}"),
        num_devices=8,
    )
    result = plan(config, lambda: Machine(1 << 40, (100_000,) * 8))
    places = {f"{w.role}/{w.index}": w.device for w in result.workers}
    for number in range(4):
        assert places[f"train/{number}"] == f"cuda:{number}"
        assert places[f"server/{number}"] == f"cuda:{4 + number}"
    assert [role for role in places if role.startswith("rollout")] == [
        f"rollout/{number}" for number in range(4 // tp_size)
    ]
    assert result.needed_bytes["cuda:4"] == 88_000, "SGLang's own share where none is given"


def test_a_device_of_unknown_memory(model: Path) -> None:
    config = load(f"actor.path={model}", *SIZES, *SGLANG, num_devices=1)
    server = plan(config, lambda: Machine(1 << 40, (None,))).workers[2]
    assert (server.device, server.parameter_bytes, server.kv_bytes) == ("cuda:0", 2000, 0)


@pytest.mark.parametrize(
    ("overrides", "num_tokens"),
    [
        # 5 sequences of 100 tokens, and the 8 that SGLang keeps of each context
        ([], 5 * 108),
        (["rollout.max_running_sequences=5000"], 65536),
        (["+sglang.args.max_total_tokens=200"], 200),
    ],
)
def test_servers_on_a_cpu(model: Path, overrides: list[str], num_tokens: int) -> None:
    config = load(f"actor.path={model}", *SIZES, "rollout.engine=sglang", *overrides)
    result = plan(config, lambda: Machine(host_memory_bytes=1 << 40))
    server = result.workers[2]
    assert (server.role, server.device, server.parameter_bytes) == ("server", "cpu", 4000)
    assert server.kv_bytes == num_tokens * KV_VALUES * 4
    assert result.needed_bytes == {
        "host": (28 + 36) * NUM_PARAMETERS + server.kv_bytes + ROW_BYTES + 3 * PROCESS_BYTES
    }


def test_running_servers_cost_this_machine_nothing(model: Path) -> None:
    config = load(
        f"actor.path={model}",
        *SIZES,
        *SGLANG,
        "servers.urls=['http://gpu1:30000','http://gpu2:30000']",
        *("rollout.num_workers=2", "weight_update.method=disk"),
        num_devices=1,
    )
    assert make_generator(config.rollout).devices == ("cpu", 0)
    result = plan(config, lambda: Machine(1 << 40, (100_000,)))
    assert [w.role for w in result.workers] == ["train", "rollout", "rollout"]
    assert list(result.workers[1].memory) == ["host"]


def test_no_share_fits_beside_a_trainer(model: Path) -> None:
    config = load(f"actor.path={model}", *SIZES, *SGLANG, num_devices=1)
    # 18,000 for training leave 1,500, and the parameters alone take 2,000
    with pytest.raises(
        ConfigError,
        match=r"mem_fraction_static: 0\.\d+ of what is free .* \(1\.5 KiB\) ",
    ):
        plan(config, lambda: Machine(1 << 40, (19_500,)))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "mem_fraction_static=0.01",
            r"0\.01 of what is free on cuda:0 \(80\.1 KiB\) does not hold .* \(2\.0 KiB\)",
        ),
        ("mem_fraction_static=1.5", "above 0 and below 1, got 1.5"),
        ("mem_fraction_static=much", "above 0 and below 1, got much"),
        ("max_total_tokens=many", "above 0, got many"),
        ("model_path=x", r"set rollout\.path instead"),
    ],
)
def test_impossible_settings_of_servers(model: Path, setting: str, message: str) -> None:
    words = (f"actor.path={model}", *SIZES, *SGLANG, f"+sglang.args.{setting}")
    name = setting.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"sglang\.args\.{name}: .*{message}"):
        plan(load(*words, num_devices=1), lambda: Machine(1 << 40, (100_000,)))


def test_servers_on_a_device_too_small_for_both(model: Path) -> None:
    config = load(
        f"actor.path={model}",
        *SIZES,
        *SGLANG,
        *("rollout.num_workers=2", "servers.tp_size=2"),
        num_devices=3,
    )
    with pytest.raises(ConfigError, match=r"mem_fraction_static may be at most 0\.5 beside"):
        plan(config, lambda: Machine(1 << 40, (100_000,) * 3))


def test_one_gpu_holds_half_a_billion_parameters(half_billion: Path) -> None:
    arguments = ["--config", ONE_GPU, f"actor.path={half_billion}"]
    config = load_config(arguments, GRPOConfig, count_devices=lambda: 1)
    for card in (23_028 << 20, 24_564 << 20):  # A10, RTX 4090
        result = plan(config, lambda card=card: Machine(32 << 30, (card,)))
        train, _, server = result.workers
        assert train.parameter_bytes + train.optimizer_bytes == 18 * 494_032_768
        assert server.parameter_bytes == 2 * 494_032_768
        free = card - 18 * 494_032_768
        assert server.parameter_bytes + server.kv_bytes == int(0.36 * free)
        # room for all sequences, also when 4 GiB more are taken: the server was started again
        cache_bytes = 0.36 * (free - (4 << 30)) - server.parameter_bytes
        assert cache_bytes > 128 * 1024 * (2 * 24 * 2 * 64 * 2)
        assert card - result.needed_bytes["cuda:0"] > 6 << 30, "for CUDA, and what SGLang computes"


def dry_run(tmp_path: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """The command of the file's head, on a machine that has what `nvidia-smi` tells."""
    script = REPOSITORY / "examples" / "jsonl_math.py"
    environment = {name: v for name, v in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    return subprocess.run(
        [sys.executable, str(script), "--config", ONE_GPU, *overrides, "--dry-run"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_dry_run_of_the_shipped_file(tmp_path: Path, model: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 24564\n")
    tool.chmod(0o755)
    done = dry_run(tmp_path, f"actor.path={model}")
    assert done.returncode == 7, done.stderr  # the plan is shown, then the task is looked at
    assert "examples/data/arithmetic.jsonl does not exist" in done.stderr
    assert "server/0    cuda:0" in done.stdout
    needed = re.search(r"cuda:0: needs about ([\d.]+) GiB of 24\.0 GiB", done.stdout)
    assert needed is not None
    assert float(needed[1]) == pytest.approx(8.7, abs=0.06)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 << 30, "3.0 GiB"),
        (1 << 51, "2048.0 TiB"),
    ],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


SEVEN_BILLION = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}
"""What `config.json` of Qwen2.5-7B says."""
EIGHT_GPUS = ("--dry-run", "--gpus", "8", "--gpu-memory", "80", "--host-memory", "1000")
SPREAD = ("actor.parallel.data=4", "rollout.num_workers=4")


@pytest.fixture
def seven_billion(tmp_path: Path) -> Path:
    """A folder with `config.json` alone."""
    (tmp_path / "config.json").write_text(json.dumps(SEVEN_BILLION))
    return tmp_path


def test_a_machine_that_is_not_there_against_a_count_by_hand(
    seven_billion: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A 7B model on eight GPUs of 80 GB: four train, four serve."""
    with pytest.raises(SystemExit) as exit_:
        load_config(["--config", ONE_GPU, f"actor.path={seven_billion}", *SPREAD, *EIGHT_GPUS])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    by_place = dict(re.findall(r"^(cuda:\d): needs about ([\d.]+) GiB of 80.0 GiB$", text, re.M))
    assert len(by_place) == 8
    held = 16 * 7_615_616_512 / 4
    vocabulary = 3 * (80 << 30) / 32  # pieces of the output layer: values, gradients, their copy
    # 8,192 tokens: the input of 28 layers, one layer of 116,224 numbers a token, hidden states
    layer = 2 * 8192 * (8 * 3584 + 3 * 3584 + 2 * 512 + 4 * 18944)
    logits = 2 * 80 * (1 << 30) / 32  # as many as have room in a 32nd, and their gradient
    logits += 2 * 8192 * 152064  # what is kept of all
    activations = 28 * 2 * 8192 * 3584 + layer + 4 * 8192 * 3584 + logits
    expected = (held + min(vocabulary, 3 * 4 * 152064 * 3584) + activations) / (1 << 30)
    for number in range(4):
        assert float(by_place[f"cuda:{number}"]) == pytest.approx(expected, abs=0.06)
    for number in range(4, 8):  # a server's share, of which 14.2 GiB are parameters
        assert float(by_place[f"cuda:{number}"]) == pytest.approx(0.36 * 80, abs=0.06)
    assert "server/3    cuda:7      14.2 GiB" in text


def test_a_machine_that_is_too_small_says_what_needs_less(seven_billion: Path) -> None:
    arguments = [
        "--config",
        ONE_GPU,
        f"actor.path={seven_billion}",
        *SPREAD,
        *EIGHT_GPUS[:-1],
        "64",
    ]
    with pytest.raises(ConfigError, match=r"most of host is 'snapshots' of train") as caught:
        load_config(arguments)
    assert "checkpoint.memory_snapshots=false needs a third of it" in str(caught.value)
    assert "on a GPU" not in str(caught.value)
    arguments = ["--config", ONE_GPU, f"actor.path={seven_billion}", *SPREAD, *EIGHT_GPUS]
    long = "actor.max_tokens_per_micro_batch=131072"
    with pytest.raises(
        ConfigError, match=r"'activations' of train.*activation_checkpointing=layers"
    ):
        load_config([*arguments, long, "actor.activation_checkpointing=none"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus", "8"], "--gpus: expected a number of at least 0, with --dry-run"),
        (["--dry-run", "--gpus", "-1"], "--gpus: expected a number of at least 0"),
        (["--dry-run", "--gpu-memory", "80"], "expected with --gpus"),
        (["--dry-run", "--gpus", "many"], "invalid int value: 'many'"),
    ],
)
def test_flags_of_another_machine_go_together(
    seven_billion: Path, flags: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(["--config", ONE_GPU, f"actor.path={seven_billion}", *flags])


def test_attention_that_stores_scores_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """8 heads of rows of 4,096 tokens, four times in float32: 2 GiB in each layer."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
    for family, is_capped in (("gemma2", True), ("llama", False)):
        capped = {"attn_logit_softcapping": 50.0} if is_capped else {}
        written = {**sizes, **capped, "model_type": family, "vocab_size": 100}
        (tmp_path / "config.json").write_text(json.dumps(written))
        rows = ("rollout.max_context_tokens=4096", "rollout.store_bytes=8000000000")
        arguments = ["--config", ONE_GPU, f"actor.path={tmp_path}", *rows, *EIGHT_GPUS]
        with pytest.raises(SystemExit):
            load_config(arguments)
        planned = re.search(r"^train/0 .*$", capsys.readouterr().out, re.M)
        assert planned is not None
        # of micro-batches of 8,192 tokens: 8 GiB a layer
        assert (" 8.0 GiB" in planned[0]) == is_capped
