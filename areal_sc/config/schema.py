"""Every setting of a run, as dataclasses.

A setting's line gives its default, its meaning and its range; `--help` shows all three, and
`checks.py` holds what goes together. A `shared` field takes the value of a setting elsewhere, so
that each is set in one place; one that is `apart` does so unless it is given. In a section that is
built by itself they have their second argument.
Scripts import every section from here, whichever module it stands in.

`further_models` are those beside the policy. A section of a run's settings names such a model by
its `path`; what else is not set there is the actor's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, ClassVar, Final, NamedTuple

from omegaconf import MISSING

from areal_sc.config.agent_settings import AgentsConfig
from areal_sc.config.fields import Section, apart, in_code, join_sections, setting, shared
from areal_sc.config.follow_settings import (
    CheckpointConfig,
    EvaluationConfig,
    RecordsConfig,
    TrackerKind,
)
from areal_sc.config.length_settings import CutAnswers as CutAnswers
from areal_sc.config.length_settings import SoftLengthConfig
from areal_sc.config.lora_settings import FrozenAdapterConfig, LoraConfig
from areal_sc.config.optimizer_settings import LrSchedule as LrSchedule
from areal_sc.config.optimizer_settings import OptimizerConfig as OptimizerConfig
from areal_sc.config.parallel_settings import (
    AutoscaleConfig,
    ParallelConfig,
    Placement,
    TrainEngineKind,
)
from areal_sc.config.ppo_settings import CriticPPOConfig, PPOConfig
from areal_sc.config.run_only import KnowsRunOnly
from areal_sc.config.sandbox_settings import SandboxConfig
from areal_sc.config.server_settings import ServersConfig, SGLangConfig, VLLMConfig
from areal_sc.config.slurm_settings import RayConfig, SchedulerType, SlurmConfig
from areal_sc.config.transport_settings import TransportConfig as TransportConfig
from areal_sc.config.weight_settings import OnWeightUpdate as OnWeightUpdate
from areal_sc.config.weight_settings import WeightUpdateConfig as WeightUpdateConfig
from areal_sc.config.weight_settings import WeightUpdateMethod as WeightUpdateMethod
from areal_sc.errors import ConfigError


class Dtype(StrEnum):
    """What numbers are computed and kept in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class ActivationCheckpointing(StrEnum):
    """What of each decoder layer is computed again in its backward pass, to save memory."""

    none = "none"
    selective = "selective"
    layers = "layers"


class Device(StrEnum):
    """Where it computes; auto is CUDA if this machine has such a device, else the CPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Resume(StrEnum):
    """Whether to go on with the run in `run_dir`.

    auto: if there is one.
    never: it must be empty, or `overwrite` be given.
    must: it is an error if there is none.
    """

    auto = "auto"
    never = "never"
    must = "must"


class KeepGroups(StrEnum):
    """Which finished groups are trained.

    all: every one.
    with_signal: those whose episodes differ in reward; the others are thrown away, and further
        prompts drawn in their place (dynamic sampling of DAPO, arXiv:2503.14476, eq. 11).
    """

    all = "all"
    with_signal = "with_signal"


class AdmissionMode(StrEnum):
    """When a group begins that `max_staleness` allows.

    just_in_time: when it is needed, so that batches are complete a little before they are asked
        for, and as fresh as that allows.
    eager: at once.
    """

    just_in_time = "just_in_time"
    eager = "eager"


class OverBound(StrEnum):
    """What happens to a group or token that is staler than `max_staleness`.

    train: it is trained like any other.
    mask: the token adds nothing to the loss.
    wait: the batch waits for groups that would get too old.
    regenerate: the group is thrown away and its prompt generated anew.
    """

    train = "train"
    mask = "mask"
    wait = "wait"
    regenerate = "regenerate"


class RolloutEngine(StrEnum):
    """What generates.

    local: an engine embedded in the worker.
    sglang: SGLang's own servers.
    vllm: vLLM's own servers.
    """

    local = "local"
    sglang = "sglang"
    vllm = "vllm"


class ModelHead(StrEnum):
    """What a model gives of each token.

    lm: log-probabilities.
    value: one number, as a critic does: what the tokens before it will be worth.
    """

    lm = "lm"
    value = "value"


@dataclass
class GenerationConfig:
    """How completions are sampled."""

    max_new_tokens: int = setting(128, "most tokens of a completion", ge=1)
    min_new_tokens: int = setting(
        0, "no token ends a completion before it has so many; strings do", ge=0
    )
    temperature: float = setting(1.0, "sampling temperature; 0 (greedy) only in evaluations", gt=0)
    top_p: float = setting(
        1.0, "sample from the likeliest tokens of this total probability", gt=0, le=1
    )
    top_k: int = setting(0, "sample from this many likeliest tokens; 0: no limit", ge=0)
    stop: list[str] = setting(list, "strings that end a completion; its text ends before them")
    stop_token_ids: list[int] = setting(list, "tokens that end a completion, beside EOS")
    cut_answers: CutAnswers = setting(CutAnswers.paid)


_ON_ROWS = ("in a run on rows of a data set",)


@dataclass
class ActorConfig(Section):
    """The trained policy: model, parallelism, memory, optimizer.

    Attributes:
        is_frozen: it only computes, as a reference does: no optimizer.
        logprob_chunk_tokens: tokens whose logits exist at one time; 0: 1024, more where a GPU has
            room.
    """

    path: str = setting(MISSING, "model folder, or a name of the hub: owner/model[@revision]")
    random_init: bool = setting(
        False, "draw weights from seed; the folder needs config.json and tokenizer only"
    )
    is_frozen: bool = in_code(False)
    lora: LoraConfig = setting(LoraConfig)
    head: ModelHead = in_code(ModelHead.lm)
    engine: str = setting(
        TrainEngineKind.fsdp.value, "fsdp, megatron (some families), or package.module:Handle"
    )
    parallel: ParallelConfig = setting(ParallelConfig)
    device: Device = setting(Device.auto)
    dtype: Dtype = setting(
        Dtype.float32, "type of parameters in computation; optimizer state is float32"
    )
    max_tokens_per_micro_batch: int = setting(
        4096, "tokens of one forward and backward pass; unless set at least the longest row", ge=1
    )
    activation_checkpointing: ActivationCheckpointing = setting(
        ActivationCheckpointing.none,
        "what the backward pass computes again: whole layers; selective: all but products and "
        "attention",
    )
    activation_offload: bool = setting(
        False,
        "with checkpointing: what it keeps, the inputs of layers, in pinned host memory",
        idle=("device=cpu",),
    )
    cpu_offload: bool = setting(
        False,
        "parameters, gradients and optimizer state in host memory; updates run on the CPU",
        idle=("device=cpu",),
    )
    flash_attention: int = setting(
        2,
        "version, in 16 bits on a GPU; 3 needs Hopper and the package flash_attn_3",
        ge=2,
        le=3,
        idle=("device=cpu", "dtype=float32"),
    )
    compile_layers: bool | None = setting(
        None, "torch.compile for each decoder layer; null: on a GPU that waits for the host"
    )
    routing_replay: bool = setting(
        False, "tokens go through the experts that they had in generation", idle=_ON_ROWS
    )
    train_vision_tower: bool = setting(
        False, "of a model that reads pictures: what it sees them by is trained, too"
    )
    logprob_chunk_tokens: int = in_code(0)
    num_threads: int = setting(
        0, "CPU threads a rank; 0: one, with a GPU its share of the cores", ge=0
    )
    store_bytes: int = in_code(0)
    seed: int = shared("${seed}", 0, "seed of initial weights and shuffles", ge=0)
    memory_snapshots: bool = shared(
        "${checkpoint.memory_snapshots}", True, "each step has a snapshot in memory"
    )
    optimizer: OptimizerConfig = setting(OptimizerConfig)
    algorithm: str = setting(
        "decoupled_ppo", "a preset of these settings, of configs/algorithms; what you set wins"
    )
    ppo: PPOConfig = setting(PPOConfig, idle=_ON_ROWS)
    weight_update: WeightUpdateConfig = shared("${weight_update}", WeightUpdateConfig)

    @property
    def has_adapter(self) -> bool:
        """Whether the model has one; if it is frozen, none but the one that it begins from."""
        return self.lora.rank > 0 and (not self.is_frozen or bool(self.lora.path))


@dataclass
class ModelBesideConfig(Section):
    """A model beside the policy. What it has no setting for is the actor's.

    Attributes:
        is_frozen: it only computes.
        head: what it gives of each token.
    """

    is_frozen: ClassVar[bool] = True
    head: ClassVar[ModelHead] = ModelHead.lm
    path: str = setting("", "model folder, or its name on the hub; empty: there is none")
    engine: str = apart("${actor.engine}", TrainEngineKind.fsdp.value, "as actor.engine")
    parallel: ParallelConfig = apart("${actor.parallel}", ParallelConfig)
    device: Device = apart("${actor.device}", Device.auto)
    dtype: Dtype = apart("${actor.dtype}", Dtype.float32, "type of parameters in computation")
    max_tokens_per_micro_batch: int = apart(
        "${actor.max_tokens_per_micro_batch}", 4096, "tokens of one forward pass", ge=1
    )
    cpu_offload: bool = apart(
        "${actor.cpu_offload}", False, "parameters in host memory", idle=("device=cpu",)
    )


@dataclass
class ReferenceConfig(ModelBesideConfig):
    """A frozen model that the policy stays near to; an adapter in actor.lora.path is its too."""


@dataclass
class CriticConfig(ModelBesideConfig):
    """A model of values, trained beside the policy. What is not set is the actor's."""

    is_frozen: ClassVar[bool] = False
    head: ClassVar[ModelHead] = ModelHead.value
    lora: LoraConfig = apart("${actor.lora}", LoraConfig)
    optimizer: OptimizerConfig = apart("${actor.optimizer}", OptimizerConfig)
    ppo: CriticPPOConfig = setting(CriticPPOConfig)


@dataclass
class TeacherConfig(ModelBesideConfig):
    """Another model than the policy, whose adapter it does not have; else a frozen one."""

    lora: FrozenAdapterConfig = setting(FrozenAdapterConfig)


@dataclass
class RewardModelConfig(TeacherConfig):
    """A model whose score of a row is added to its reward. What is not set is the actor's."""

    head: ClassVar[ModelHead] = ModelHead.value


ENDLESS_VERSIONS: Final = 100_000
"""A bound that nothing comes to, where no setting says how many steps there are."""


@dataclass
class RolloutConfig(Section):
    """Generation: engines, admission, staleness, limits.

    Attributes:
        max_prefill_tokens: prompt tokens that the local engine computes between two decode steps.
        step_timeout_s: limit of one step of the local engine; longer for a large model.
    """

    engine: str = setting(
        RolloutEngine.local.value,
        "local (embedded), sglang or vllm (servers), or package.module:Handle",
    )
    path: str = shared("${actor.path}", MISSING, "model folder, or its name on the hub")
    random_init: bool = shared(
        "${actor.random_init}", False, "the folder needs no weights: the trainer's come first"
    )
    lora: LoraConfig = shared("${actor.lora}", LoraConfig)
    routing_replay: bool = shared("${actor.routing_replay}", False, "rows tell their experts")
    generation: GenerationConfig = shared("${generation}", GenerationConfig)
    num_workers: int = setting(1, "processes, one engine each", ge=1)
    autoscale: AutoscaleConfig = setting(AutoscaleConfig)
    device: Device = apart(
        "${actor.device}", Device.auto, idle=("engine!=local and servers.urls!=",)
    )
    placement: Placement = shared("${placement}", Placement.auto)
    dtype: Dtype = apart("${actor.dtype}", Dtype.float32, "type of parameters and KV cache")
    float32_output_layer: bool = setting(
        False,
        "with a 16-bit dtype: logits are not rounded to it, as trainers do not either",
        idle=("dtype=float32",),
    )
    max_running_sequences: int = setting(64, "decode slots a worker", ge=1)
    max_context_tokens: int = setting(
        0, "tokens of prompt and completion; 0: what the model and a micro-batch take", ge=0
    )
    max_episode_tokens: int = setting(0, "tokens of an episode's rows; 0: max_context_tokens", ge=0)
    max_prefill_tokens: int = in_code(8192)
    num_threads: int = setting(1, "CPU threads a worker", ge=1)
    seed: int = shared("${seed}", 0, "seed of sampling", ge=0)
    total_steps: int = shared("${total_steps}", 0, "training steps; 0: admit without end", ge=0)
    train_batch_groups: int = setting(32, "groups a training step (B)", ge=1)
    group_size: int = setting(8, "episodes a prompt", ge=1)
    max_staleness: int | None = setting(
        4, "bound eta, in policy versions; 0 is synchronous, null: no bound", ge=0
    )
    over_bound: OverBound = setting(
        OverBound.train, idle=("max_staleness=0: no group is ever over the bound",)
    )
    keep_groups: KeepGroups = setting(KeepGroups.all)
    choose_prompts: str = setting("all", "in later epochs; with_signal, package.module:function")
    soft_length: SoftLengthConfig = setting(SoftLengthConfig)
    admission: AdmissionMode = setting(AdmissionMode.just_in_time, idle=("max_staleness=0",))
    max_concurrent_groups: int = setting(256, "running groups, all workers together", ge=1)
    store_bytes: int = setting(0, "limit of one worker's tensor store; 0: what is free there", ge=0)
    group_timeout_s: float = setting(3600.0, "limit of a group, from its start to its end", gt=0)
    step_timeout_s: float = in_code(300.0)
    reward_timeout_s: float = setting(30.0, "limit of one reward", gt=0)
    num_reward_processes: int = setting(1, "processes a worker that compute rewards", ge=1)
    sandbox: SandboxConfig = setting(SandboxConfig)
    on_weight_update: OnWeightUpdate = setting(OnWeightUpdate.interrupt)
    max_unavailable: int = setting(0, "workers that an update stops at one time; 0: all", ge=0)
    max_rejection_rate: float = setting(
        0.5, "the run ends if more of rejection_window groups' episodes are rejected", gt=0, le=1
    )
    rejection_window: int = setting(
        128,
        "newest groups, for max_rejection_rate",
        ge=1,
        idle=("max_rejection_rate=1: no share of rejections ends the run",),
    )
    agents: AgentsConfig = shared("${agents}", AgentsConfig)
    servers: ServersConfig = shared("${servers}", ServersConfig)
    sglang: SGLangConfig = shared("${sglang}", SGLangConfig)
    vllm: VLLMConfig = shared("${vllm}", VLLMConfig)
    weight_update: WeightUpdateConfig = shared("${weight_update}", WeightUpdateConfig)

    @property
    def waits_for_weights(self) -> bool:
        """Whether the first weights are the trainer's, as the model folder has others, or none."""
        return self.random_init or (self.lora.rank > 0 and bool(self.lora.path))

    @property
    def staleness_bound(self) -> int:
        """`max_staleness`; without a bound as many versions as there are."""
        if self.max_staleness is not None:
            return self.max_staleness
        return self.total_steps or ENDLESS_VERSIONS

    @property
    def most_workers(self) -> int:
        """The most workers that there may be at one time."""
        return max(self.num_workers, self.autoscale.max)

    @property
    def fewest_workers(self) -> int:
        """The fewest workers that there may be while the run goes on."""
        autoscale = self.autoscale
        return min(self.num_workers, autoscale.min) if autoscale.max else self.num_workers

    @property
    def episode_tokens(self) -> int:
        """Most tokens of all rows of an episode together."""
        return self.max_episode_tokens or self.max_context_tokens


@dataclass
class SchedulerConfig(KnowsRunOnly):
    """Where and how worker processes run.

    Attributes:
        shipping_timeout_s: limit until files of the script are on a node that shares no folder.
        max_log_bytes: of each log, and of its earlier part.
        shutdown_timeout_s: between asking a worker to end and killing it.
    """

    type: str = setting(SchedulerType.local.value, "local, slurm, ray, or package.module:Class")
    settings: dict[str, Any] = setting(
        dict, "settings of a scheduler of your own", idle=("type=local,slurm,ray",)
    )
    slurm: SlurmConfig = setting(SlurmConfig, idle=("type=local,ray",))
    ray: RayConfig = setting(RayConfig, idle=("type=local,slurm",))
    run_dir: str = shared("${run_dir}", MISSING, "folder of the run")
    resume: Resume = shared("${resume}", Resume.auto, "of a loop without a `Run`")
    overwrite: bool = shared("${overwrite}", False, "of a loop without a `Run`")
    dry_run: bool = shared("${dry_run}", False, "lends nothing")
    transport: TransportConfig = shared("${transport}", TransportConfig)
    records: RecordsConfig = shared("${records}", RecordsConfig)
    startup_timeout_s: float = setting(180.0, "limit until a worker is ready", gt=0)
    heartbeat_interval_s: float = setting(2.0, "between two signs of life", gt=0)
    hung_after_s: float = setting(60.0, "a worker whose loop stands still so long is lost", gt=0)
    max_deaths: int = setting(
        5, "deaths of a worker, no row or step in between; the next one ends the run", ge=0
    )
    orphan_timeout_s: float = setting(
        300.0, "workers that no script asks for end after so long; until then it goes on", gt=0
    )
    node_folder: str = setting(
        "/var/tmp", "for the script's files, on nodes that share no folder with it"
    )
    shipping_timeout_s: float = in_code(3600.0)
    max_log_bytes: int = in_code(50 << 20)
    shutdown_timeout_s: float = in_code(10.0)


@dataclass
class GRPOConfig:
    """A whole run. After a change call `join_sections`: it brings the change to shared settings."""

    run_dir: str = setting(MISSING, "folder of the run")
    total_steps: int = setting(MISSING, "training steps", ge=1)
    seed: int = setting(0, "seed of everything that is random", ge=0)
    resume: Resume = setting(Resume.auto)
    overwrite: bool = setting(False, "empty the run folder first")
    dry_run: bool = setting(False, "start nothing; end when all of the task was looked at")
    placement: Placement = setting(Placement.auto, idle=_ON_ROWS)
    generation: GenerationConfig = setting(GenerationConfig, idle=_ON_ROWS)
    actor: ActorConfig = setting(ActorConfig)
    reference: ReferenceConfig = setting(ReferenceConfig, idle=("reference.path=", *_ON_ROWS))
    critic: CriticConfig = setting(CriticConfig, idle=("critic.path=", *_ON_ROWS))
    teacher: TeacherConfig = setting(TeacherConfig, idle=("teacher.path=", *_ON_ROWS))
    reward_model: RewardModelConfig = setting(
        RewardModelConfig,
        idle=("reward_model.path=", *_ON_ROWS, "actor.ppo.loss lacks advantages"),
    )
    rollout: RolloutConfig = setting(RolloutConfig, idle=_ON_ROWS)
    agents: AgentsConfig = setting(AgentsConfig, idle=(*_ON_ROWS, "without a workflow of agents"))
    servers: ServersConfig = setting(ServersConfig, idle=(*_ON_ROWS, "rollout.engine=local"))
    sglang: SGLangConfig = setting(SGLangConfig, idle=(*_ON_ROWS, "rollout.engine!=sglang"))
    vllm: VLLMConfig = setting(VLLMConfig, idle=(*_ON_ROWS, "rollout.engine!=vllm"))
    weight_update: WeightUpdateConfig = setting(WeightUpdateConfig, idle=_ON_ROWS)
    scheduler: SchedulerConfig = setting(SchedulerConfig)
    transport: TransportConfig = setting(TransportConfig)
    evaluation: EvaluationConfig = setting(
        EvaluationConfig, idle=("without prompts for evaluations",)
    )
    checkpoint: CheckpointConfig = setting(CheckpointConfig)
    records: RecordsConfig = setting(RecordsConfig)
    trackers: list[TrackerKind] = setting(list, "what else keeps the metrics: wandb, …")
    tracker_project: str = setting(
        "areal_sc", "name under which trackers file the run", idle=("trackers=",)
    )
    task: dict[str, Any] = setting(dict, "the script's own settings")

    def __post_init__(self) -> None:
        join_sections(self)


class FurtherModel(NamedTuple):
    """What the models of a section are for.

    Attributes:
        output: what they compute of each trained token of a batch.
        field: its name among the fields of the batch; "": it is a number a row, for the reward.
    """

    output: str
    field: str


FURTHER_MODELS: Final = {
    "reference": FurtherModel("logprobs", "reference_logprobs"),
    "critic": FurtherModel("values", "values"),
    "teacher": FurtherModel("logprobs", "teacher_logprobs"),
    "reward_model": FurtherModel("scores", ""),
}
"""Sections, which are the roles of their models as well."""


_OF_TRAINING: Final = (
    *("algorithm", "ppo", "optimizer", "memory_snapshots"),
    *("activation_checkpointing", "activation_offload", "train_vision_tower"),
)
"""Fields of `ActorConfig` that nothing reads of a model which only computes."""


def further_models(config: GRPOConfig) -> dict[str, ActorConfig]:
    """The settings of the models that a run has beside the policy, by their roles."""
    roles = (role for role in FURTHER_MODELS if getattr(config, role).path)
    return {role: as_actor(getattr(config, role), config.actor) for role in roles}


def further_model(config: GRPOConfig, role: str) -> ActorConfig:
    """The settings of one of them.

    Raises: ConfigError: there is no such section, or it names no model.
    """
    if role not in FURTHER_MODELS:
        raise ConfigError(f"role: expected one of {', '.join(FURTHER_MODELS)}, got {role!r}")
    models = further_models(config)
    if role not in models:
        raise ConfigError(f"{role}.path: no value; name the model of {role}, actor.path say")
    return models[role]


def as_actor(section: ModelBesideConfig, actor: ActorConfig) -> ActorConfig:
    """The settings of an engine: the section's own, and the actor's where it has none."""
    own: dict[str, Any] = {it.name: getattr(section, it.name) for it in fields(section)}
    if isinstance(section, CriticConfig):
        ppo = section.ppo
        own["ppo"] = PPOConfig(ppo.num_minibatches, ppo.loss, ppo.loss_settings)
    elif isinstance(section, TeacherConfig):
        own["lora"] = section.lora.whole()
    own |= {"is_frozen": section.is_frozen, "head": section.head, "routing_replay": False}
    # a folder without weights is drawn alike, whatever the model is for
    own["random_init"] = actor.random_init and section.path == actor.path
    idle = _OF_TRAINING if section.is_frozen else ("algorithm",)
    names = {it.name for it in fields(ActorConfig)}.difference(own, idle)
    return ActorConfig(**{name: getattr(actor, name) for name in names}, **own)
