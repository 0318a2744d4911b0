"""Every setting of a run, as dataclasses that hydra fills.

The comment of a setting gives its unit and meaning; `checks.py` holds what each may be, and what
goes together. A `shared` setting takes the value of another one unless it is given, so that each is
set once. In a section that is built by itself it has the value that its second argument makes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from areal_sc.config.sharing import Section, join_sections, shared


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Resume(StrEnum):
    auto = "auto"
    never = "never"
    must = "must"


class OverBound(StrEnum):
    """What happens to a group or token that is staler than `max_staleness`."""

    train = "train"
    mask = "mask"
    wait = "wait"
    regenerate = "regenerate"


class RolloutEngine(StrEnum):
    """What generates: `local` is embedded in the worker, `sglang` runs SGLang's own servers."""

    local = "local"
    sglang = "sglang"


class OnWeightUpdate(StrEnum):
    """What a weight update does to running answers.

    interrupt: they stop where they are and go on under the new weights, their KV recomputed.
    finish_running: no new ones start, and the update waits for the running ones.
    """

    interrupt = "interrupt"
    finish_running = "finish_running"


class WeightUpdateMethod(StrEnum):
    """How new weights reach generation.

    pull: sealed in the trainers' stores; pulled once a node, without a copy on the same one.
    collective: rank 0 broadcasts to all generating ranks; NCCL between GPUs, else gloo.
    disk: a Hugging Face folder on a path that both sides see.
    """

    pull = "pull"
    collective = "collective"
    disk = "disk"


class NormScope(StrEnum):
    group = "group"
    batch = "batch"
    none = "none"


class LrSchedule(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class ClipCenter(StrEnum):
    """The policy around which PPO clips: `proximal` is decoupled PPO, `behavior` the naive form."""

    proximal = "proximal"
    behavior = "behavior"


@dataclass
class GenerationConfig:
    """How completions are sampled."""

    max_new_tokens: int = 128
    temperature: float = 1.0  # 0 is greedy: in evaluations only, greedy answers train nothing
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    stop_token_ids: list[int] = field(default_factory=list)  # besides the tokenizer's EOS


@dataclass
class OptimizerConfig(Section):
    """AdamW; the learning rate is constant within a training step."""

    lr: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # 0: no clipping
    schedule: LrSchedule = LrSchedule.constant
    warmup_steps: int = 0  # training steps from 0 to lr
    min_lr_ratio: float = 0.0  # where the schedule ends, as a share of lr
    total_steps: int = shared("${total_steps}", lambda: 0)  # training steps of the schedule


@dataclass
class PPOConfig:
    """Decoupled PPO (AReaL, arXiv:2505.24298, section 5.2)."""

    num_minibatches: int = 4  # optimizer updates a training step
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_center: ClipCenter = ClipCenter.proximal
    use_behavior_weight: bool = True  # the factor pi_prox / pi_behav
    behavior_weight_cap: float = 5.0  # tokens whose factor is larger leave the numerator
    advantage_mean: NormScope = NormScope.group
    advantage_std: NormScope = NormScope.group
    advantage_eps: float = 1e-6


@dataclass
class WeightUpdateConfig(Section):
    """The way of new weights from the trainers to generation."""

    method: WeightUpdateMethod = WeightUpdateMethod.pull
    # of `disk`: seen by trainers and servers
    folder: str = shared("${run_dir}/weights", lambda: "weights")
    bucket_bytes: int = 256 << 20  # weights on their way at one time; two buckets exist at most
    step_timeout_s: float = 600.0  # of one step: a bucket, a load, a meeting of ranks


@dataclass
class SGLangConfig:
    """The SGLang servers of one rollout worker: started and owned by it, or running already."""

    python: str = ""  # interpreter of the environment that has SGLang; empty: this one
    num_servers: int = 1
    tp_size: int = 1  # tensor parallel: GPUs a server
    host: str = "127.0.0.1"  # interface that the servers listen on
    ports: list[int] = field(default_factory=list)  # one a server; empty: free ones
    devices: list[int] = field(
        default_factory=list
    )  # GPU indices, tp_size a server; empty: 0, 1, …
    args: dict[str, Any] = field(default_factory=dict)  # of SGLang: {mem_fraction_static: 0.6}
    environment: dict[str, str] = field(default_factory=dict)  # further variables of the servers
    urls: list[str] = field(default_factory=list)  # servers that run already: none is started then
    api_key_env: str = ""  # environment variable that holds the key of the servers in `urls`
    start_timeout_s: float = 900.0  # until a server is ready
    control_timeout_s: float = 60.0  # of a pause, a resume, a question
    stop_timeout_s: float = 3.0  # between asking a server to end and killing it
    probe_interval_s: float = 1.0
    hung_after_s: float = 7.0  # without an answer and without having computed anything
    busy_limit_s: float = 120.0  # without an answer, whatever it computes
    max_restarts: int = 3  # failed starts in a row after which a server is given up


@dataclass
class ActorConfig(Section):
    """The trained policy: model, parallelism, memory, optimizer."""

    path: str = MISSING  # Hugging Face model folder
    random_init: bool = False  # config.json and tokenizer only; weights drawn from `seed`
    num_workers: int = 1  # FSDP ranks, one process each
    device: Device = Device.auto
    dtype: Dtype = Dtype.float32  # of parameters in computation; optimizer state is float32
    max_tokens_per_micro_batch: int = 4096
    activation_checkpointing: bool = False
    logprob_chunk_tokens: int = 1024  # tokens whose logits exist at one time
    num_threads: int = 1  # CPU threads a rank
    store_bytes: int = 4 << 30  # limit of one rank's tensor store
    seed: int = shared("${seed}", lambda: 0)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    weight_update: WeightUpdateConfig = shared("${weight_update}", WeightUpdateConfig)


@dataclass
class RolloutConfig(Section):
    """Generation: engines, admission, staleness, limits."""

    engine: RolloutEngine = RolloutEngine.local
    path: str = shared("${actor.path}", lambda: MISSING)
    generation: GenerationConfig = shared("${generation}", GenerationConfig)
    num_workers: int = 1
    device: Device = Device.auto
    dtype: Dtype = shared("${actor.dtype}", lambda: Dtype.float32)
    max_running_sequences: int = 64  # decode slots a worker
    max_context_tokens: int = 4096  # prompt and completion
    max_prefill_tokens: int = 8192  # prompt tokens computed between two decode steps
    num_threads: int = 1
    seed: int = shared("${seed}", lambda: 0)
    total_steps: int = shared("${total_steps}", lambda: 0)  # 0: admit groups without end
    train_batch_groups: int = 32  # B: groups a training step
    group_size: int = 8  # completions a prompt
    max_staleness: int = 4  # eta; 0 is synchronous
    over_bound: OverBound = OverBound.train
    max_concurrent_groups: int = 256  # running groups, all workers together
    store_bytes: int = 4 << 30  # limit of one worker's tensor store
    node_store_bytes: int = 0  # limit of all stores on a node; 0: what its shared memory has
    group_timeout_s: float = 3600.0
    reward_timeout_s: float = 30.0
    num_reward_processes: int = 1  # a worker; killable
    on_weight_update: OnWeightUpdate = OnWeightUpdate.interrupt
    max_unavailable: int = 0  # servers that an update may stop at one time; 0: all of them
    max_rejection_rate: float = 0.5  # over the last `rejection_window` groups; 1: never stop
    rejection_window: int = 128
    sglang: SGLangConfig = shared("${sglang}", SGLangConfig)  # with `engine: sglang`
    weight_update: WeightUpdateConfig = shared("${weight_update}", WeightUpdateConfig)


@dataclass
class TransportConfig:
    """The wire between processes."""

    bind: str = "127.0.0.1"  # IPv4 address or name of an interface to listen on; 0.0.0.0: all
    encrypt: bool = False  # payload too; everything is authenticated and headers of RPC encrypted
    shared_memory: str = "auto"  # auto: /dev/shm if it is large enough; off; or a folder's path
    chunk_bytes: int = 4 << 20  # payload of one request, under one authentication tag
    max_inflight_chunks: int = 4  # receiver credits: asked of one owner and not yet here
    call_timeout_s: float = 600.0  # deadline of a control call, a training step included
    pull_timeout_s: float = 300.0
    stalled_peer_timeout_s: float = (
        30.0  # a peer that neither reads nor answers for so long is dropped
    )

    def __post_init__(self) -> None:
        if self.shared_memory == "False":  # what YAML makes of off
            self.shared_memory = "off"


@dataclass
class SchedulerConfig(Section):
    """Where and how worker processes run."""

    type: str = "local"
    run_dir: str = shared("${run_dir}", lambda: MISSING)
    transport: TransportConfig = shared("${transport}", TransportConfig)
    startup_timeout_s: float = 180.0
    heartbeat_interval_s: float = 2.0
    hung_after_s: float = 60.0  # a worker whose event loop does not turn for so long is lost
    orphan_timeout_s: float = 20.0  # a worker that hears no controller for so long exits
    shutdown_timeout_s: float = 10.0


@dataclass
class EvaluationConfig:
    every_steps: int = 0  # 0: only before and after training
    num_prompts: int = 256
    greedy: bool = True  # also evaluate at temperature 0 at the end


@dataclass
class CheckpointConfig:
    every_steps: int = 10  # training steps between snapshots to resume from; 0: no snapshots
    every_minutes: float = 10.0  # at most between two snapshots; 0: no limit
    keep: int = 2  # newest snapshots that stay
    export_every_steps: int = 0  # models in Hugging Face layout, all kept; 0: only the final one


@dataclass
class GRPOConfig:
    """A whole run. After a change call `join_sections`: it brings the change to shared settings."""

    run_dir: str = MISSING
    total_steps: int = MISSING  # training steps
    seed: int = 0
    resume: Resume = Resume.auto
    overwrite: bool = False  # empty the run folder first
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sglang: SGLangConfig = field(default_factory=SGLangConfig)
    weight_update: WeightUpdateConfig = field(default_factory=WeightUpdateConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    task: dict[str, Any] = field(default_factory=dict)  # the script's own settings

    def __post_init__(self) -> None:
        join_sections(self)
