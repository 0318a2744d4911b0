"""Ranges, combinations and warnings, each with the setting, its value and what is allowed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import load

from areal_sc.config.loading.loader import config_text
from areal_sc.config.schema import Device, GRPOConfig
from areal_sc.errors import ConfigError
from areal_sc.preflight.checks import check_config
from areal_sc.preflight.load import load_config
from areal_sc.sizing.machine import resolved_device
from areal_sc.sizing.model_folder import ModelShape


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "rollout.max_episode_tokens=4095 rollout.max_context_tokens=4096",
            "rollout.max_episode_tokens: expected 0 or at least rollout.max_context_tokens=4096",
        ),
        (
            "rollout.max_staleness=null rollout.over_bound=wait",
            "rollout.over_bound: expected train with rollout.max_staleness=null (no group is ever ",
        ),
        ("generation.top_p=1.1", "generation.top_p: expected a number above 0 and at most 1"),
        ("actor.optimizer.lr=nan", "actor.optimizer.lr: expected a number at least 0, got nan"),
        ("transport.bind=", "transport.bind: expected a name, got an empty one"),
        ("transport.bind=eth99", "transport.bind='eth99': Name or service not known; expected au"),
        ("transport.bind=203.0.113.7", "203.0.113.7 cannot be listened on: Cannot assign requ"),
        ("transport.bind=203.0.113.0/24", "has no address in that network; its interfaces: lo"),
        (
            "transport.shared_memory=relative_dir",
            "transport.shared_memory: expected auto, off, or the absolute path of a folder, got "
            "'relative_dir'",
        ),
        ("transport.shared_memory='~nobody_here/x'", "transport.shared_memory: expected auto, "),
        ("transport.shared_memory=true", "transport.shared_memory: expected auto, off, or the "),
        (
            "generation.stop=['']",
            "generation.stop: expected at most 16 strings of 1 to 64 characte",
        ),
        ("generation.stop_token_ids=[-3]", "generation.stop_token_ids: expected token ids of at"),
        (
            "evaluation.sets=[{name:a,prompts:b},{name:a,prompts:c}]",
            "evaluation.sets: expected different names, got 'a' twice",
        ),
        (
            "evaluation.sets=[{prompts:b}]",
            "evaluation.sets, number 1: name: expected one without '/', got ''",
        ),
        (
            "evaluation.sets=[{name:a/b,prompts:b}]",
            "evaluation.sets, a/b: name: expected one without '/'",
        ),
        ("evaluation.sets=[{name:a}]", "evaluation.sets, a: prompts: expected a file, or a name"),
        (
            "evaluation.sets=[{name:a,prompts:b,num_samples:4,temperature:0}]",
            "evaluation.sets, a: num_samples: expected 1 with temperature 0",
        ),
        (
            "evaluation.sets=[{name:a,prompts:b,num_samples:-1}]",
            "evaluation.sets, a: num_samples: expected an integer at least 0 and at most 1024",
        ),
        (
            "evaluation.sets=[{name:a,prompts:b,temperature:-1}]",
            "evaluation.sets, a: temperature: expected a finite number at least 0",
        ),
        (
            "evaluation.stop_after=2",
            "evaluation.stop_after=2: expected checkpoint.keep_best, the number that is to get",
        ),
        ("run_dir=''", "run_dir: expected a name, got an empty one"),
        ("scheduler.type=kubernetes", "expected local, slurm, ray or package.module:Class, got '"),
        ("scheduler.type=no_such:Scheduler", "'no_such:Scheduler': ModuleNotFoundError: No module"),
        ("--overwrite --resume", "resume: must needs the run that overwrite=true would delete"),
        (
            "scheduler.orphan_timeout_s=3",
            "scheduler.orphan_timeout_s: expected at least 4 "
            "(2 heartbeats of scheduler.heartbeat_interval_s), got 3",
        ),
        (
            "generation.max_new_tokens=4096 rollout.max_context_tokens=4096",
            "generation.max_new_tokens: expected less than rollout.max_context_tokens=4096",
        ),
        (
            "actor.max_tokens_per_micro_batch=4095 rollout.max_context_tokens=4096",
            "actor.max_tokens_per_micro_batch: expected at least rollout.max_context_tokens=4096, "
            "the longest row, got 4095",
        ),
        (
            "rollout.autoscale.max=4 rollout.max_staleness=0",
            "rollout.max_staleness: expected at least 1 with rollout.autoscale.max",
        ),
        (
            "rollout.autoscale.max=4 rollout.num_workers=5",
            "rollout.num_workers: expected from rollout.autoscale.min=1 to "
            "rollout.autoscale.max=4, got 5",
        ),
        (
            "rollout.autoscale.max=2 rollout.engine=sglang weight_update.method=disk "
            "servers.urls=['http://a:1']",
            "servers.urls names the servers of each worker",
        ),
        (
            "actor.ppo.num_minibatches=257",
            "actor.ppo.num_minibatches: expected at most 256 ",
        ),
        (
            "rollout.group_size=1",
            "rollout.group_size: expected at least 2 with actor.ppo.advantage=group",
        ),
        (
            "rollout.group_size=1 actor.ppo.advantage=none actor.ppo.advantage_std=none "
            "rollout.keep_groups=with_signal",
            "rollout.group_size: expected at least 2 with rollout.keep_groups=with_signal",
        ),
        (
            "rollout.group_size=1 actor.ppo.advantage=none actor.ppo.advantage_std=none "
            "rollout.choose_prompts=with_signal",
            "rollout.group_size: expected at least 2 with rollout.choose_prompts=with_signal",
        ),
        (
            "rollout.choose_prompts=with_signals",
            "expected all, with_signal or package.module:function, which takes a PromptPast",
        ),
        (
            "rollout.soft_length.limit_tokens=64",
            "rollout.soft_length.margin_tokens: expected 1 to rollout.soft_length.limit_tokens=64",
        ),
        (
            "rollout.soft_length.limit_tokens=64 rollout.soft_length.margin_tokens=65",
            "rollout.soft_length.margin_tokens: expected 1 to rollout.soft_length.limit_tokens=64",
        ),
        (
            "rollout.max_context_tokens=256 rollout.soft_length.limit_tokens=300 "
            "rollout.soft_length.margin_tokens=44",
            "rollout.soft_length.limit_tokens: expected less than 300 (no row is longer than",
        ),
        (
            "rollout.group_size=1 actor.ppo.advantage=batch",
            "rollout.group_size: expected at least 2 with actor.ppo.advantage_std=group",
        ),
    ],
)
def test_impossible_settings(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*override.split(" "))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "rollout.max_staleness=0",
        "rollout.max_staleness=null",
        "rollout.over_bound=regenerate",
        "generation.max_new_tokens=4095",
        "actor.max_tokens_per_micro_batch=4096",
        "actor.ppo.num_minibatches=256",
        "actor.ppo.behavior_weight_cap=inf",
        "rollout.group_size=1 actor.ppo.advantage=batch actor.ppo.advantage_std=batch",
        "rollout.group_size=1 actor.ppo.advantage=none actor.ppo.advantage_std=none",
        "scheduler.orphan_timeout_s=4",
        "actor.optimizer.max_grad_norm=0",
        "transport.bind=auto",
        "transport.bind=lo",
        "transport.bind=127.0.0.0/8",
        "transport.bind=localhost",
        "transport.shared_memory=/scratch/shared",
    ],
)
def test_settings_at_the_edge_are_allowed(override: str) -> None:
    assert check_config(load(*override.split(" ")), lambda: 0) == []


# 3 groups on 2 workers: one of them holds 2
STORE_SIZES = (
    "rollout.train_batch_groups=3",
    "rollout.group_size=4",
    "rollout.max_context_tokens=100",
    "rollout.num_workers=2",
    "generation.max_new_tokens=50",
)
# 4 rows of 100 tokens, in whole cache lines of 64: four fields of 4 bytes each, and one of 1
GROUP_BYTES = 4 * (4 * 7 * 64 + 2 * 64)


def test_store_limit_under_one_batch() -> None:
    least = 2 * GROUP_BYTES
    load(*STORE_SIZES, f"rollout.store_bytes={least}")
    with pytest.raises(ConfigError) as caught:
        load(*STORE_SIZES, f"rollout.store_bytes={least - 1}")
    assert str(caught.value) == (
        f"rollout.store_bytes: expected 0, or at least {least} (room for 2 of the "
        f"rollout.train_batch_groups=3 groups of a batch; a group takes up to {GROUP_BYTES} bytes: "
        "rollout.group_size=4 episodes of rollout.max_context_tokens=100 tokens: smaller batches, "
        f"or a smaller rollout.max_context_tokens, need less), got {least - 1}"
    )


def test_the_fewest_workers_that_there_may_be_hold_a_batch() -> None:
    load(*STORE_SIZES, f"rollout.store_bytes={3 * GROUP_BYTES}", "rollout.autoscale.max=2")
    with pytest.raises(ConfigError, match=r"rollout\.store_bytes: .* \(room for 3 of the"):
        load(*STORE_SIZES, f"rollout.store_bytes={2 * GROUP_BYTES}", "rollout.autoscale.max=2")


def test_a_dry_run_does_not_pass_what_the_run_would_refuse(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.store_bytes: .* got 10"):
        load("--dry-run", "rollout.store_bytes=10", "rollout.max_context_tokens=999")
    assert capsys.readouterr().out == ""


def test_ranks_and_devices() -> None:
    load("actor.device=cuda", "actor.parallel.data=2", num_devices=2)
    load("actor.parallel.data=3", "rollout.num_workers=3", num_devices=0)  # auto: on the CPU
    with pytest.raises(
        ConfigError,
        match=r"actor\.parallel: expected at most 2 with actor\.device=cuda .*, got 3",
    ):
        load("actor.device=cuda", "actor.parallel.data=3", num_devices=2)
    with pytest.raises(ConfigError, match=r"actor\.parallel: expected at most 3 .*, got 4"):
        load("actor.device=cuda", "actor.parallel={data: 2, tensor: 2}", num_devices=3)
    with pytest.raises(
        ConfigError, match=r"rollout\.num_workers: expected at most 1 with rollout\.device=auto"
    ):
        load("rollout.num_workers=2", num_devices=1)
    load("rollout.autoscale.max=2", num_devices=2)
    with pytest.raises(ConfigError, match=r"rollout\.autoscale\.max: expected at most 2 .* got 3;"):
        load("rollout.autoscale.max=3", num_devices=2)
    with pytest.raises(ConfigError, match=r"actor\.device: cuda, but .* has no CUDA device"):
        load("actor.device=cuda", num_devices=0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["actor.device=cuda"], r"gpus_per_node: expected at least 1, which one worker of actor"),
        (
            ["rollout.nodes=2", "rollout.gpus_per_node=2", "num_workers=5"],
            r"rollout\.num_workers: expected at most 4 .*asked of SLURM",
        ),
        (
            ["rollout.nodes=2", "rollout.gpus_per_node=2", "engine=sglang", "servers.tp_size=4"],
            r"gpus_per_node: expected at least 4, which one worker of rollout takes, got 2 .*rollo",
        ),
    ],
)
def test_devices_are_those_that_slurm_is_asked_for(words: list[str], said: str) -> None:
    sections = {"rollout.nodes": "scheduler.slurm.", "rollout.gpus_per_node": "scheduler.slurm."}
    sections |= {"num_workers": "rollout.", "engine": "rollout."}
    settings = [sections.get(word.partition("=")[0], "") + word for word in words]
    settings += ["actor.dtype=bfloat16"]
    with pytest.raises(ConfigError, match=said):
        load("scheduler.type=slurm", *settings, num_devices=0)


def test_more_devices_are_asked_of_slurm_where_nodes_join_singly() -> None:
    words = ["scheduler.type=slurm", "scheduler.slurm.gpus_per_node=1", "rollout.autoscale.max=8"]
    words += ["actor.dtype=bfloat16", "rollout.dtype=bfloat16"]
    with pytest.raises(ConfigError, match=r"rollout\.autoscale\.max: expected at most 1 .* got 8;"):
        load(*words, num_devices=0)
    load(*words, "scheduler.slurm.gang=false", num_devices=0)


def test_devices_are_not_counted_for_the_cpu() -> None:
    config = load("actor.device=cpu", "rollout.device=cpu")

    def count() -> int:
        raise AssertionError("counted")

    check_config(config, count)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("{tensor: 3}", r"actor\.parallel\.tensor: .* model's 4 attention heads, .* got 3"),
        ("{tensor: 2, sequence: 4}", r"sequence: .* 2 attention heads of each tensor rank .*got 4"),
        ("{tensor: 2, sequence: 2}", ""),
    ],
)
def test_ranks_divide_the_heads_of_a_model_that_is_there(
    mesh: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "model" / "config.json").write_text(json.dumps(heads))
    settings = (f"actor.path={tmp_path / 'model'}", f"actor.parallel={mesh}")
    if message:
        with pytest.raises(ConfigError, match=message):
            load(*settings)
    else:
        load(*settings)


def test_context_over_that_of_the_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 4095}))
    with pytest.raises(ConfigError) as caught:
        load(f"actor.path={model}", "rollout.max_context_tokens=4096")
    assert (
        f"rollout.max_context_tokens: expected at most 4095 (the context of the model in {model}), "
        "got 4096" in str(caught.value)
    )
    load(f"actor.path={model}", "rollout.max_context_tokens=4095")


@pytest.mark.parametrize(
    ("positions", "settings", "tokens"),
    [
        (1000, "", 1000),
        (131072, "", 4096),  # the default of actor.max_tokens_per_micro_batch
        (131072, "actor.max_tokens_per_micro_batch=200000", 131072),
        (131072, "generation.max_new_tokens=8192", 4096 + 8192),
        (10000, "generation.max_new_tokens=8192", 10000),
        (1000, "rollout.max_context_tokens=300", 300),
        (None, "", 0),  # the model does not say
    ],
)
def test_the_longest_row_follows_from_the_model(
    tmp_path: Path, positions: int | None, settings: str, tokens: int
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    config = load(f"actor.path={folder}", *settings.split())
    assert config.rollout.max_context_tokens == tokens
    assert check_config(config, lambda: 0) == []


def test_the_longest_row_is_that_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 700}))
    path = f"actor.path={tmp_path}"
    assert load(path).rollout.max_context_tokens == 700
    with pytest.raises(ConfigError, match=r"less than rollout\.max_context_tokens=700, which is p"):
        load(path, "generation.max_new_tokens=700")


def test_long_rows_that_the_stores_do_not_hold_say_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 131072}))
    with pytest.raises(ConfigError) as caught:
        load(
            f"actor.path={tmp_path}",
            "actor.max_tokens_per_micro_batch=131072",
            "rollout.store_bytes=500_000_000",
        )
    message = str(caught.value)
    assert "episodes of rollout.max_context_tokens=131072 tokens: smaller" in message
    assert message.endswith("or a smaller rollout.max_context_tokens, need less), got 500000000")


@pytest.mark.parametrize(
    ("override", "warning"),
    [
        ("generation.top_p=0.9", "generation.top_p=0.9: the sampled distribution is cut"),
        ("generation.top_k=9", "generation.top_k=9: the sampled distribution is cut"),
        (
            "generation.top_p=0.9 generation.top_k=9",
            "generation.top_p=0.9 and generation.top_k=9: the sampled distribution is cut",
        ),
        ("actor.optimizer.warmup_steps=10", "actor.optimizer.warmup_steps=10 is not below"),
        ("evaluation.every_steps=11", "evaluation.every_steps=11 has no effect with total_steps"),
        ("checkpoint.every_steps=11", "checkpoint.every_steps=11 has no effect with total_steps"),
    ],
)
def test_warnings(override: str, warning: str) -> None:
    warnings = check_config(load(*override.split(" ")), lambda: 0)
    assert len(warnings) == 1
    assert warnings[0].startswith(warning)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("", "actor.dtype=float32 and rollout.dtype=float32 on CUDA"),
        ("rollout.dtype=bfloat16", "actor.dtype=float32 on CUDA"),
        ("actor.device=cpu rollout.device=auto", "rollout.dtype=float32 on CUDA"),
        ("actor.dtype=bfloat16", None),
        ("actor.device=cpu", None),
    ],
)
def test_float32_on_cuda(settings: str, named: str | None) -> None:
    config = load(*settings.split(), num_devices=2)
    warnings = check_config(config, lambda: 2)
    assert [warning.startswith(f"{named}: several times slower") for warning in warnings] == (
        [True] if named else []
    )


def test_no_warning_without_a_reason() -> None:
    assert check_config(load(), lambda: 0) == []


@pytest.mark.parametrize("spelled", ["off", "Off", "false", "'off'"])
def test_shared_memory_is_off_however_yaml_reads_it(
    write_yaml: Callable[..., Path], spelled: str
) -> None:
    path = write_yaml()
    path.write_text(f"{path.read_text()}transport: {{shared_memory: {spelled}}}\n")
    config = load_config(["--config", str(path)], GRPOConfig)
    assert config.transport.shared_memory == "off"
    assert config.scheduler.transport.shared_memory == "off"
    assert "shared_memory: 'off'" in config_text(config)


def test_a_plain_string_counts_as_the_setting_of_that_name() -> None:
    assert resolved_device("cpu", 2) == Device.cpu  # type: ignore[arg-type]
    assert resolved_device("auto", 0) == Device.cpu  # type: ignore[arg-type]
    assert resolved_device("auto", 2) == Device.cuda  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("engine", "num_parameters", "is_warned"),
    [("local", 1_500_000_000, True), ("local", 900_000_000, False), ("vllm", 7_000_000_000, False)],
)
def test_the_embedded_engine_says_that_it_is_for_small_models(
    engine: str, num_parameters: int, is_warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = ModelShape(num_parameters=num_parameters)
    monkeypatch.setattr("areal_sc.sizing.model_context.read_model_shape", lambda path: shape)
    warnings = check_config(load(f"rollout.engine={engine}"), lambda: 0)
    texts = [w for w in warnings if w.startswith("rollout.engine=local is made for small models")]
    assert len(texts) == is_warned
    assert not is_warned or "has 1.5 billion parameters: sglang or vllm" in texts[0]
