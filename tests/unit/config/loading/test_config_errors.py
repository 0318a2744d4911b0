"""One readable sentence for everything that can be wrong with files and overrides."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import load

from areal_sc.config.fields import known_keys
from areal_sc.config.loading.explain import nearest_keys, unknown_key
from areal_sc.config.loading.loader import compose_config
from areal_sc.config.loading.other_words import OTHER_WORDS
from areal_sc.config.loading.removed_settings import REMOVED
from areal_sc.config.schema import GRPOConfig
from areal_sc.errors import ConfigError
from areal_sc.preflight.load import load_config

WriteYaml = Callable[..., Path]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "max_staleness=2",
            "override max_staleness=2: unknown setting max_staleness; "
            "did you mean rollout.max_staleness?",
        ),
        (
            "rollout.max_stalness=2",
            "override rollout.max_stalness=2: unknown setting rollout.max_stalness; "
            "did you mean rollout.max_staleness?",
        ),
        (
            "samples.show=true",
            "override samples.show=true: unknown setting samples.show; records.keep says which",
        ),
        (
            "rolout.num_workers=2",
            "override rolout.num_workers=2: unknown setting rolout.num_workers; "
            "did you mean rollout.num_workers?",
        ),
        (
            "rollout.autoscale.max_workers=2",
            "override rollout.autoscale.max_workers=2: unknown setting "
            "rollout.autoscale.max_workers; did you mean rollout.autoscale.max?",
        ),
        (
            "actor.optimizer.lr_min_ratio=0.1",
            "override actor.optimizer.lr_min_ratio=0.1: unknown setting "
            "actor.optimizer.lr_min_ratio; did you mean actor.optimizer.min_lr_ratio",
        ),
        (
            "actor.num_workers=2",
            "override actor.num_workers=2: unknown setting actor.num_workers; "
            "it is called actor.parallel.data now",
        ),
        (
            "vllm.num_servers=4",
            "override vllm.num_servers=4: unknown setting vllm.num_servers; a rollout worker has "
            "one server: set rollout.num_workers to the number of servers",
        ),
        (
            "sglang.environment.NCCL_DEBUG=INFO",
            "override sglang.environment.NCCL_DEBUG=INFO: unknown setting "
            "sglang.environment.NCCL_DEBUG; both kinds of servers have it in one place, "
            "servers.environment",
        ),
        (
            "scheduler.slurm.train.role_workers=2",
            "override scheduler.slurm.train.role_workers=2: unknown setting "
            "scheduler.slurm.train.role_workers; it follows from actor.parallel: leave it out",
        ),
        (
            "+actor.zzz=2",
            "override +actor.zzz=2: unknown setting actor.zzz; actor has actor.path, ",
        ),
        (
            "task.shuffel=true",
            "override task.shuffel=true: task.shuffel is not in the YAML's own 'task' section; "
            "check its spelling, or add it by +task.shuffel=...",
        ),
        (
            "rollout.max_staleness=two",
            "override rollout.max_staleness=two: rollout.max_staleness: "
            "expected an integer, or null, got 'two'",
        ),
        (
            "total_steps=1.5",
            "override total_steps=1.5: total_steps: expected an integer, got 1.5",
        ),
        ("seed=null", "override seed=null: seed: expected an integer, got None"),
        (
            "actor.optimizer.lr=fast",
            "override actor.optimizer.lr=fast: actor.optimizer.lr: expected a number, got 'fast'",
        ),
        (
            "overwrite=perhaps",
            "override overwrite=perhaps: overwrite: expected true or false, got 'perhaps'",
        ),
        (
            "rollout.over_bound=drop",
            "override rollout.over_bound=drop: rollout.over_bound: "
            "expected one of train, mask, wait, regenerate, got 'drop'",
        ),
        (
            "generation.stop_token_ids=[1,a]",
            "override generation.stop_token_ids=[1,a]: generation.stop_token_ids[1]: "
            "expected a list, each element an integer, got [1, 'a']",
        ),
        (
            "checkpoint=3",
            "override checkpoint=3: checkpoint: "
            "expected a section with the keys every_steps, every_minutes, keep, "
            "memory_snapshots, stop_within_s, export_every_steps, keep_best, got 3",
        ),
        (
            "checkpoint={kep:3}",
            "{kep:3}: unknown setting checkpoint.kep; did you mean checkpoint.keep",
        ),
        (
            "rollout.generation.top_kk=3",
            "unknown setting rollout.generation.top_kk; did you mean generation.top_k?",
        ),
        ("task=3", "override task=3: task: expected a mapping, got 3"),
        (
            "run_dir=${actor.pth}",
            "run_dir: ${actor.pth} names no setting; did you mean actor.path or actor.lora.path?",
        ),
        ("seed=${run_dir}", "seed: expected an integer; "),
        ("run_dir=${actor.path} actor.path=${run_dir}", "Recursive interpolation detected"),
        ("run_dir=${oc.env:NO_SUCH_VARIABLE}", "run_dir: its ${...} has no value: "),
        ("total_steps=???", "no value for total_steps; set it in the YAML or on the command line"),
        ("seed=1,2", "override seed=1,2: one value is needed, not several"),
        ("~seed", "override ~seed: a setting cannot be removed"),
        ("seed", "command line: expected key=value, got 'seed'"),
        ("seed=[1", "override seed=[1: not of the form key=value"),
        ("y.yaml", "command line: expected key=value, got 'y.yaml'; did you mean --config y.yaml?"),
        ("--print", "command line: unrecognized arguments: --print"),
    ],
)
def test_wrong_command_line(override: str, message: str, write_yaml: WriteYaml) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", str(write_yaml()), *override.split(" ")])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    # what the user sees when nobody catches it: no frame of hydra or OmegaConf
    shown = "".join(traceback.format_exception(caught.value))
    assert "site-packages" not in shown.replace(os.sep, "/")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run_dir: [1\ntotal_steps: 2\n", ", line 2, column 12: not valid YAML: expected"),
        ("\trun_dir: x\n", ", line 1, column 1: not valid YAML: found character"),
        ("seed: 1\nseed: 2\n", ", line 2, column 1: not valid YAML: found duplicate key seed"),
        ("- a\n- b\n", "expected `key: value` lines, got a list"),
        ("just text\n", "expected `key: value` lines, got a str"),
        ("", "no value for run_dir, total_steps, actor.path; "),
        (
            "rollout: {max_stalness: 1}\n",
            "unknown setting rollout.max_stalness; did you mean rollout.max_staleness?",
        ),
        ("max_staleness: 1\n", "unknown setting max_staleness; did you mean rollout.max_staleness"),
        (
            "rollout: {max_staleness: x}\n",
            "rollout.max_staleness: expected an integer, or null, got 'x'",
        ),
        ("rollout: {over_bound: x}\n", "rollout.over_bound: expected one of train, mask, "),
        ("checkpoint: [1]\n", "checkpoint: expected a section with the keys every_steps, "),
        ("actor: {optimizer: 3}\n", "actor.optimizer: expected a section with the keys type, lr, "),
        ("checkpoint: 1\n", "checkpoint: expected a section with the keys every_steps, "),
        ("rollout:\n", "rollout: expected a section with the keys "),
        ("run_dir: ${nope}\ntotal_steps: 1\nactor: {path: m}\n", "run_dir: ${nope} names no"),
        ("run_dir: ${nope\n", "run_dir: not a valid ${...}: "),
        ("defaults: [nope]\n", "its defaults list names 'nope', but there is no "),
        ("defaults: 3\n", "defaults must be a list (got int)"),
    ],
)
def test_wrong_yaml(write_yaml: WriteYaml, text: str, message: str) -> None:
    path = write_yaml(text)
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", str(path)], GRPOConfig)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "site-packages" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: x\n", "base.yaml: seed: expected an integer, got 'x'"),
        ("sed: 1\n", "base.yaml: unknown setting sed; did you mean seed"),
        ("run_dir: [1\nseed: 2\n", "base.yaml, line 2, column 5: not valid YAML"),
        ("defaults: [nope]\n", "base.yaml: its defaults list names 'nope'"),
        ("defaults: [x]\n", "x.yaml: its defaults list leads back to itself"),
        ("- 1\n", "base.yaml: expected `key: value` lines, got a list"),
    ],
)
def test_error_names_the_file_among_composed_ones(
    write_yaml: WriteYaml, text: str, message: str
) -> None:
    base = write_yaml(text, "base.yaml")
    path = write_yaml("defaults: [base]\n")
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", str(path)], GRPOConfig)
    assert str(base.with_name(message)) in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(["--config", str(path)], GRPOConfig)
        return str(caught.value)

    missing = tmp_path / "missing.yaml"
    assert f"{missing}: there is no such file" in message(missing)
    assert str(Path.cwd()) in message(missing)
    assert "is a folder" in message(tmp_path)
    json = tmp_path / "x.json"
    json.write_text("{}")
    assert "expected a name that ends in .yaml" in message(json)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00run_dir")
    assert "not valid YAML" in message(binary)


def test_missing_config_names_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"name a YAML file by --config FILE\.yaml"):
        load_config(["seed=1"], GRPOConfig)
    with pytest.raises(ConfigError, match=r"--config: expected one argument"):
        load_config(["--config"], GRPOConfig)


def test_nearest_keys_prefers_the_named_section() -> None:
    keys = known_keys(GRPOConfig)
    assert nearest_keys("actr.num_threads", keys) == ["actor.num_threads", "rollout.num_threads"]
    assert nearest_keys("learning_rate_of_nothing_known", keys) == []
    # a setting that is taken from elsewhere has one place to be set
    assert nearest_keys("top_kk", keys) == ["generation.top_k"]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("batch_size", "rollout.train_batch_groups (prompts a step"),
        ("actor.ppo.beta", "here that is actor.ppo.kl_coefficient"),
        ("actor.optimizer.beta", "actor.optimizer.beta2"),
        ("num_generations", "rollout.group_size"),
        ("actor_rollout_ref.rollout.n", "rollout.group_size"),
        ("actor.ppo_mini_batch_size", "actor.ppo.num_minibatches (how many, not how large"),
        ("gconfig.n_samples", "rollout.group_size"),
        ("rollout.max_head_offpolicyness", "rollout.max_staleness"),
        ("trainer.total_epochs", "total_steps (an epoch is"),
        ("reward_funcs", "the script gives rewards"),
        ("gconfig.min_p", "answers are sampled by generation.temperature"),
        ("saver.freq_steps", "checkpoint.every_steps"),
        ("stats_logger.wandb.mode", "here that is trackers"),
        ("critic.model.path", "did you mean critic.path"),
        (
            "actor_rollout_ref.ref.fsdp_config.param_offload",
            "the reference model is the one of section reference",
        ),
        ("train_dataset.path", "the script gives prompts"),
        ("train_dataset.batch_size", "rollout.train_batch_groups"),
        ("optim", "actor.optimizer.type"),
        ("precision", "actor.dtype"),
        ("pp", "actor.parallel.pipeline"),
        ("vllm_server_port", "the top level has run_dir"),
        ("gconfig.temperature", "did you mean generation.temperature?"),
        ("temperature", "did you mean generation.temperature?"),
        ("rollout.group_sise", "did you mean rollout.group_size?"),
        ("nothing_like_it", "the top level has run_dir"),
        ("scheduler.slurm.heterogeneous", "nodes that differ are a job each now: leave it out"),
    ],
)
def test_words_of_others_are_understood_by_what_they_mean(word: str, meant: str) -> None:
    keys = known_keys(GRPOConfig)
    assert f"unknown setting {word}; " in str(unknown_key("here", word, keys))
    assert meant in str(unknown_key("here", word, keys))


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_setting_says_what_to_do(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(None, (), GRPOConfig, {key: 1})
    assert str(caught.value) == f"settings: unknown setting {key}; {REMOVED[key]}"


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("rollout.generation.top_p", "its only place is generation.top_p"),
        ("rollout.sglang.args.a", "its only place is sglang.args.a"),
        ("rollout.seed", "its only place is seed"),
        ("actor.weight_update.method", "its only place is weight_update.method"),
        ("actor.memory_snapshots", "its only place is checkpoint.memory_snapshots"),
        ("scheduler.transport.bind", "its only place is transport.bind"),
        ("critic.ppo.clip_low", "such a model has none of its own, only actor.ppo.clip_low"),
        ("critic.compile_layers", "such a model has none of its own, only actor.compile_layers"),
        ("reference.lora.rank", "such a model has none of its own, only actor.lora.rank"),
        ("teacher.seed", "such a model has none of its own, only seed"),
    ],
)
def test_a_setting_has_one_place(key: str, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config(None, (), GRPOConfig, {key: 1})
    assert str(caught.value) == f"settings: unknown setting {key}; {place}"


def test_every_setting_that_others_words_lead_to_is_there() -> None:
    keys, sections = (
        known_keys(GRPOConfig),
        {key.partition(".")[0] for key in known_keys(GRPOConfig)},
    )
    named = {
        name for text in OTHER_WORDS.values() for name in re.findall(r"[a-z]+[.][a-z_.0-9]+", text)
    }
    assert {name for name in named if name.partition(".")[0] in sections} - set(keys) == set()
    assert len(named) > 30
    own = {key.rpartition(".")[2] for key in keys}
    assert own & {word for word in OTHER_WORDS if "." not in word} == set()


def test_an_unknown_section_is_told_by_its_first_setting() -> None:
    with pytest.raises(
        ConfigError, match=r"algorithm\.kl_ctrl\.kl_coef; here that is actor.ppo.kl_coef"
    ):
        load("+algorithm={kl_ctrl: {kl_coef: 0.1}}")
