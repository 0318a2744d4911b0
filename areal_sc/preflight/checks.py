"""Which settings go together, and which have no effect; what each alone may be is in `schema`.

Everything here is cheap and needs no worker: it runs before any is started.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum
from importlib.util import find_spec
from pathlib import Path

from omegaconf import MISSING

from areal_sc.algorithms.named_loss import loss_of
from areal_sc.config.fields import check_ranges, check_shared, value_at
from areal_sc.config.follow_settings import EvaluationSetConfig
from areal_sc.config.parallel_settings import Placement
from areal_sc.config.placement import Purpose
from areal_sc.config.ppo_settings import ppo_requirements
from areal_sc.config.schema import (
    ActorConfig,
    Device,
    Dtype,
    GRPOConfig,
    KeepGroups,
    ModelHead,
    OverBound,
    Resume,
    RolloutEngine,
    WeightUpdateMethod,
    further_models,
)
from areal_sc.config.slurm_jobs import nodes_for
from areal_sc.config.slurm_settings import SchedulerType, own_scheduler
from areal_sc.engines.handle_base import GeneratorHandle, TrainHandle
from areal_sc.engines.handles import make_actor, make_generator
from areal_sc.engines.stop_strings import STOP_STRINGS, are_stop_strings
from areal_sc.errors import ConfigError
from areal_sc.hub import cached_model, fetch_model, is_hub_name, local_model
from areal_sc.preflight.idle_settings import ScriptFacts, settings_warnings
from areal_sc.preflight.plan import check_turns
from areal_sc.sizing.adapter_folder import check_adapter
from areal_sc.sizing.machine import count_cuda_devices, resolved_device
from areal_sc.sizing.model_context import known_context
from areal_sc.sizing.model_folder import (
    VALUE_HEAD,
    check_model_folder,
    read_model_config,
    read_stored_shapes,
    tokens_of,
)
from areal_sc.sizing.model_formula import first_int
from areal_sc.sizing.store_room import describe_largest_group, max_group_bytes
from areal_sc.sources.prompt_choice import WITH_SIGNAL, PromptChoice
from areal_sc.transport.sockets.interface import Interface

OF_GENERATION = ("rollout.", "generation.", "weight_update.", "actor.ppo.", "actor.head")
"""Where the settings begin that say how a model is trained on what it generates."""

MIN_HEARTBEATS_TO_ORPHAN = 2
"""Heartbeats that must be missing before a worker gives its controller up."""


def check_config(
    config: GRPOConfig,
    count_devices: Callable[[], int] = count_cuda_devices,
    *,
    generates: bool = True,
    may_have_more: bool = False,
) -> list[str]:
    """Checks every setting and what goes together.

    Args:
        count_devices: number of CUDA devices of this machine; asked only when it matters.
        generates: False: a run on rows of a data set, for which settings of generation do nothing.
        may_have_more: the script may have agents, and prompts for evaluations, of which settings
            do not tell.
    Returns: warnings: settings without effect, and settings that are allowed but seldom meant.
    Raises:
        ConfigError: names the setting, its value, and what is allowed.
        ModelError: the folder at `actor.path` exists and cannot be read.
    """
    _check_python_values(config)
    check_ranges(config)
    _check_names(config)
    for key, is_met, expected in (
        *(_batch_requirements(config) if generates else ()),
        *ppo_requirements(config.actor.ppo),
        *_other_requirements(config),
    ):
        if not is_met and (generates or not key.startswith(OF_GENERATION)):
            got = value_at(config, key)
            shown = got.value if isinstance(got, Enum) else repr(got)
            raise ConfigError(f"{key}: expected {expected}, got {shown}")
    _check_evaluation(config)
    is_local = config.scheduler.type == SchedulerType.local
    for role, model in _trained_models(config).items():
        handle = make_actor(model)
        handle.check(count_devices if is_local else None)
        if folder := cached_model(model.path):
            handle.check_model(folder)
        if generates:
            loss_of(model.ppo).search_path(f"{role}.ppo.loss")  # raises where there is none
    if generates:
        _check_generation(config, count_devices)
    facts = ScriptFacts(generates, has_agents=may_have_more, evaluates=may_have_more)
    return [
        *settings_warnings(config, facts),
        *_check_devices(config, count_devices, generates=generates),
    ]


def check_models(config: GRPOConfig) -> None:
    """Checks that the models that the workers load are there; downloads those of the hub.

    Raises: ModelError: there is no such model, or a folder holds none that can be used.
        ConfigError: its tokens are not the policy's, or too few, or it gives no scores.
    """
    for role, model in _trained_models(config).items():
        folder = local_model(model.path)
        check_model_folder(folder, needs_weights=not model.random_init)
        if model.has_adapter and model.lora.path:
            check_adapter(model.lora)
        _check_tokenizer(role, model, config.actor)
    teacher, top_k = further_models(config).get("teacher"), loss_of(config.actor.ppo).top_k
    if teacher and top_k:
        told, most = (
            first_int(read_model_config(local_model(path)) or {}, "vocab_size") or 0
            for path in (teacher.path, config.actor.path)
        )
        if 0 < told < top_k:
            raise ConfigError(
                f"actor.ppo.loss_settings.top_k: expected at most {told}, the tokens of "
                f"teacher.path={teacher.path}, got {top_k}"
            )
        if 0 < most < told:
            raise ConfigError(
                f"teacher.path={teacher.path} gives {told} tokens a probability, and "
                f"actor.path={config.actor.path} {most}: its most probable ones may be others; "
                "take a teacher with as many, or actor.ppo.loss=reverse_kl"
            )
    if scorer := further_models(config).get("reward_model"):
        stored = read_stored_shapes(local_model(scorer.path))
        if stored and not scorer.random_init and stored.get(VALUE_HEAD, ())[:1] != (1,):
            raise ConfigError(
                "reward_model.path: expected a model with a layer `score` of one output, as "
                f"RewardModelTrainer writes, got {scorer.path}: every row would be scored 0"
            )


def fetch_models(config: GRPOConfig) -> bool:
    """Downloads the models that are named as on the hub; tells whether there were any.

    What lies beside the run folder is a path, also when a script has yet to make it.

    Raises: ModelError: there is no such model, or it cannot be had.
    """
    beside = Path(config.run_dir).parts[0]
    named = [
        path for path in _model_paths(config) if is_hub_name(path) and Path(path).parts[0] != beside
    ]
    for path in named:
        fetch_model(path)
    return bool(named)


def _check_tokenizer(role: str, model: ActorConfig, actor: ActorConfig) -> None:
    """Raises: ConfigError: another model than the policy reads other text in the same tokens."""
    folders = [cached_model(each.path) for each in (model, actor)]
    if folders[0] == folders[1] or None in folders:
        return
    own, actors = (tokens_of(folder) for folder in folders if folder is not None)
    if own is None or actors is None or own == actors:
        return
    differing = sorted(own.items() ^ actors.items(), key=lambda pair: pair[1])
    token, number = differing[0]
    raise ConfigError(
        f"{role}.path: expected a model with the tokenizer of actor.path={actor.path}, since it "
        f"reads the policy's tokens, got {model.path}: {len(differing)} tokens differ, the first "
        f"is {token!r}, number {number}"
    )


def _trained_models(config: GRPOConfig) -> dict[str, ActorConfig]:
    """The models of training engines, by their sections."""
    return {"actor": config.actor, **further_models(config)}


def _model_paths(config: GRPOConfig) -> set[str]:
    return {model.path for model in _trained_models(config).values()}


def _check_python_values(config: GRPOConfig) -> None:
    """Checks settings that were built in Python for what the loader makes sure of."""
    for key in ("run_dir", "total_steps", "actor.path"):
        if value_at(config, key) == MISSING:
            raise ConfigError(f"{key}: no value; set it in the YAML, or when GRPOConfig is made")
    check_shared(config)


def _check_names(config: GRPOConfig) -> None:
    """Names and lists, as far as this machine can tell; local workers are all that there are."""
    for key in ("run_dir", "actor.path", "transport.bind"):
        if not value_at(config, key):
            raise ConfigError(f"{key}: expected a name, got an empty one")
    if config.overwrite and config.resume == Resume.must:
        raise ConfigError(
            "resume: must needs the run that overwrite=true would delete; give one of them"
        )
    own_scheduler(config.scheduler.type)  # raises where there is none
    if config.scheduler.type == SchedulerType.local:  # else it is for the nodes to tell
        Interface.of(config.transport.bind)


def _batch_requirements(config: GRPOConfig) -> Iterator[tuple[str, bool, str]]:
    """Numbers of rows and tokens that fit together: (setting, whether it is right, expected)."""
    rollout, ppo = config.rollout, config.actor.ppo
    num_episodes = rollout.train_batch_groups * rollout.group_size
    yield (
        "actor.ppo.num_minibatches",
        ppo.num_minibatches <= num_episodes,
        f"at most {num_episodes} (rollout.train_batch_groups * rollout.group_size, the episodes of "
        "a step)",
    )
    group = rollout.group_size
    sizes = {"group": group, "leave_one_out": group, "batch": num_episodes}
    for key in ("advantage", "advantage_std"):
        scope = value_at(ppo, key)
        yield (
            "rollout.group_size",
            sizes.get(scope, 2) >= 2,
            f"at least 2 with actor.ppo.{key}={scope} (one answer alone has no better or worse)",
        )
    for key in ("keep_groups", "choose_prompts"):
        yield (
            "rollout.group_size",
            value_at(rollout, key) != WITH_SIGNAL or group >= 2,
            f"at least 2 with rollout.{key}=with_signal (one answer alone never has signal)",
        )
    yield (
        "rollout.over_bound",
        rollout.max_staleness is not None or rollout.over_bound is OverBound.train,
        "train with rollout.max_staleness=null (no group is ever over the bound)",
    )
    context, named = rollout.max_context_tokens, "rollout.max_context_tokens"
    yield (
        "generation.max_new_tokens",
        not context or config.generation.max_new_tokens < context,
        f"less than {named}={context}, which is prompt and answer (0 takes the model's limit, at "
        "most actor.max_tokens_per_micro_batch)",
    )
    yield (
        "generation.min_new_tokens",
        config.generation.min_new_tokens <= config.generation.max_new_tokens,
        f"at most generation.max_new_tokens={config.generation.max_new_tokens}",
    )
    yield (
        "rollout.max_episode_tokens",
        rollout.episode_tokens >= context,
        f"0 or at least {named}={context}, the longest row",
    )
    num_groups = -(-rollout.train_batch_groups // rollout.fewest_workers)
    least = num_groups * max_group_bytes(rollout)
    yield (
        "rollout.store_bytes",
        not 0 < rollout.store_bytes < least,
        f"0, or at least {least} (room for {num_groups} of the rollout.train_batch_groups="
        f"{rollout.train_batch_groups} groups of a batch; {describe_largest_group(rollout)}: "
        "smaller batches, or a smaller rollout.max_context_tokens, need less)",
    )
    soft = rollout.soft_length
    if soft.limit_tokens:
        yield (
            "rollout.soft_length.margin_tokens",
            0 < soft.margin_tokens <= soft.limit_tokens,
            f"1 to rollout.soft_length.limit_tokens={soft.limit_tokens}",
        )
        yield (
            "rollout.soft_length.limit_tokens",
            not context or soft.limit_tokens - soft.margin_tokens < context,
            f"less than {context + soft.margin_tokens} (no row is longer than {named}={context}, "
            "so nothing would be taken from any)",
        )
    for role, model in _trained_models(config).items():
        yield (
            f"{role}.max_tokens_per_micro_batch",
            model.max_tokens_per_micro_batch >= context,
            f"at least {named}={context}, the longest row",
        )
    for path in _model_paths(config):
        limit = known_context(path) or context
        yield named, context <= limit, f"at most {limit} (the context of the model in {path})"


def _check_generation(config: GRPOConfig, count_devices: Callable[[], int]) -> None:
    """Raises: ConfigError: the engine, or the choice of prompts, cannot be as it is set."""
    PromptChoice(config.rollout.choose_prompts, config.rollout.seed)  # raises where there is none
    generator = make_generator(config.rollout)
    generator.check(config)
    if config.rollout.placement is Placement.turns:
        check_turns(config, count_devices)
    elif config.rollout.autoscale.max:
        generator.check_scaling()


def _other_requirements(config: GRPOConfig) -> Iterator[tuple[str, bool, str]]:
    """The rest of the requirements, in the form of `_batch_requirements`."""
    shared_memory, update = config.transport.shared_memory, config.weight_update
    yield "actor.head", config.actor.head == ModelHead.lm, "lm, since the policy generates"
    if config.actor.routing_replay:
        with_replay, engine = "with actor.routing_replay", config.rollout.engine
        yield "rollout.engine", engine != RolloutEngine.vllm, f"local or sglang {with_replay}"
        yield "actor.compile_layers", not config.actor.compile_layers, f"false {with_replay}"
    if config.reward_model.path:
        why = "all with reward_model.path (it scores the rows of a batch, after they are chosen)"
        yield "rollout.keep_groups", config.rollout.keep_groups == KeepGroups.all, why
        yield "rollout.choose_prompts", config.rollout.choose_prompts != WITH_SIGNAL, why
    yield "generation.stop", are_stop_strings(config.generation.stop), STOP_STRINGS
    yield (
        "generation.stop_token_ids",
        all(token >= 0 for token in config.generation.stop_token_ids),
        "token ids of at least 0",
    )
    for tracker in config.trackers:
        yield (
            "trackers",
            find_spec(tracker) is not None,
            f"packages that are installed (`pip install {tracker}`)",
        )
    yield (
        "transport.shared_memory",
        shared_memory in ("auto", "off") or os.path.isabs(os.path.expanduser(shared_memory)),
        "auto, off, or the absolute path of a folder",
    )
    least = MIN_HEARTBEATS_TO_ORPHAN * config.scheduler.heartbeat_interval_s
    yield (
        "scheduler.orphan_timeout_s",
        config.scheduler.orphan_timeout_s >= least,
        f"at least {least:g} ({MIN_HEARTBEATS_TO_ORPHAN} heartbeats of "
        "scheduler.heartbeat_interval_s)",
    )
    autoscale, num_workers = config.rollout.autoscale, config.rollout.num_workers
    if autoscale.max:
        yield (
            "rollout.num_workers",
            autoscale.min <= num_workers <= autoscale.max,
            f"from rollout.autoscale.min={autoscale.min} to rollout.autoscale.max={autoscale.max}",
        )
        yield (
            "rollout.max_staleness",
            config.rollout.staleness_bound > 0,
            "at least 1 with rollout.autoscale.max (a synchronous trainer always waits for "
            "generation, so that its waits do not say how many workers it needs)",
        )
    yield (
        "rollout.max_unavailable",
        update.method != WeightUpdateMethod.collective or not config.rollout.max_unavailable,
        "0 with weight_update.method=collective (a broadcast needs all servers at one time)",
    )
    yield (
        "actor.lora.publish_merged",
        not config.rollout.lora.is_published_alone
        or (
            config.rollout.engine != RolloutEngine.local
            and update.method != WeightUpdateMethod.collective
        ),
        "true with rollout.engine=local or weight_update.method=collective (an adapter alone goes "
        "to servers, by pull or disk)",
    )
    yield (
        "weight_update.folder",
        update.method != WeightUpdateMethod.disk or bool(update.folder),
        "a folder that trainers and servers see",
    )


def _check_evaluation(config: GRPOConfig) -> None:
    """Checks the sets, and what evaluations decide of.

    Raises: ConfigError: names the setting, its value, and what is allowed.
    """
    evaluation = config.evaluation
    for number, one in enumerate(evaluation.sets, start=1):
        where = f"evaluation.sets, {one.name or f'number {number}'}"
        try:
            check_ranges(one)
            _check_evaluation_set(one)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    names = Counter(one.name for one in evaluation.sets)
    for name, count in names.items():
        if count > 1:
            raise ConfigError(f"evaluation.sets: expected different names, got {name!r} twice")
    if evaluation.stop_after and not (config.checkpoint.keep_best and evaluation.every_steps):
        raise ConfigError(
            f"evaluation.stop_after={evaluation.stop_after}: expected checkpoint.keep_best, the "
            "number that is to get better, and evaluation.every_steps above 0"
        )


def _check_evaluation_set(one: EvaluationSetConfig) -> None:
    if not one.name or "/" in one.name:
        raise ConfigError(f"name: expected one without '/', got {one.name!r}")
    if not one.prompts:
        raise ConfigError("prompts: expected a file, or a name of the hub, got an empty one")
    temperature = one.temperature
    if temperature is not None and not (temperature >= 0 and math.isfinite(temperature)):
        raise ConfigError(
            f"temperature: expected a finite number at least 0, or null, got {temperature:g}"
        )
    if temperature == 0 and one.num_samples > 1:
        raise ConfigError(
            f"num_samples: expected 1 with temperature 0, at which all answers to a prompt are the "
            f"same, got {one.num_samples}"
        )


def _check_devices(
    config: GRPOConfig, count_devices: Callable[[], int], *, generates: bool
) -> list[str]:
    """Returns: a warning, where float32 is computed on CUDA."""
    rollout = config.rollout
    most = "autoscale.max" if rollout.most_workers > rollout.num_workers else "num_workers"
    roles: list[tuple[str, TrainHandle | GeneratorHandle, Dtype, str, int]] = [
        (role, make_actor(model), model.dtype, "parallel", model.parallel.num_ranks)
        for role, model in _trained_models(config).items()
    ]
    if generates:
        generator = make_generator(rollout)
        roles.append(("rollout", generator, rollout.dtype, most, rollout.most_workers))
    is_known = config.scheduler.type in (SchedulerType.local, SchedulerType.slurm)
    # what any other scheduler lends, it will tell
    if not is_known or all(handle.devices[0] == Device.cpu for _, handle, _, _, _ in roles):
        return []
    is_local = config.scheduler.type == SchedulerType.local
    where = "of this machine" if is_local else "asked of SLURM"
    slow = []
    for role, handle, dtype, setting, num_workers in roles:
        device, num_taken = handle.devices
        num_devices = count_devices() if is_local else _asked_devices(config, role, num_taken)
        if resolved_device(device, num_devices, f"{role}.device") == Device.cpu:
            continue
        if num_workers > num_devices:
            raise ConfigError(
                f"{role}.{setting}: expected at most {num_devices} with {role}.device={device} "
                f"(the CUDA devices {where}), got {num_workers}; {role}.device=cpu needs none"
            )
        if dtype == Dtype.float32:
            slow.append(f"{role}.dtype=float32")
    return slow and [
        f"{' and '.join(slow)} on CUDA: several times slower than bfloat16, which needs half "
        "the memory for it; the trainer's parameters and optimizer state are float32 anyway"
    ]


def _asked_devices(config: GRPOConfig, role: str, num_taken: int) -> int:
    """CUDA devices of the nodes that a role may have, all of them together.

    Args:
        num_taken: by one worker, which is on one node.
    Raises: ConfigError: no node has as many.
    """
    name = Purpose.rollout if role == "rollout" else Purpose.train
    num_nodes, request = nodes_for(config.scheduler.slurm, name)
    asked, device = request.gpus_per_node, value_at(config, role).device
    if asked < num_taken and (asked or device == Device.cuda):
        raise ConfigError(
            f"scheduler.slurm.gpus_per_node: expected at least {num_taken}, which one worker of "
            f"{role} takes, got {asked} (scheduler.slurm.{name}.gpus_per_node is of its nodes "
            f"alone; {role}.device=cpu needs none)"
        )
    if asked and name is Purpose.rollout and not config.scheduler.slurm.gang:
        return max(num_nodes * asked, config.rollout.most_workers)  # the run asks for more nodes
    return num_nodes * asked
