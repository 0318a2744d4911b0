"""The methods of the workers: name, arguments, reply and deadline of each, declared once. No torch.

The methods of every worker come first, then those of rollout workers; those of ranks are in
`rank_methods`, and those about weights in `weights/methods.py`.
"""

from __future__ import annotations

from types import NoneType
from typing import Final

from msgspec import Struct
from msgspec.structs import asdict

from areal_sc.agents.routes import AgentsAt
from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion, RequestOptions
from areal_sc.metadata import BatchMetadata, PromptReference, RowMetadata
from areal_sc.rejection import Rejection
from areal_sc.transport.plane_stats import PlaneStats
from areal_sc.transport.rpc.method import Method
from areal_sc.weights.published import ShardReference

SHUTDOWN_TIMEOUT_S: Final = 2.0
"""A worker that has not answered by then is ended."""

Numbers = dict[str, int | float]
"""Metrics, or counters, by name; whole numbers stay whole."""


class Sweep(Struct, frozen=True, array_like=True):
    """Which shards to forget: those in `dead`, and those up to `acknowledged` that are not live.

    Attributes:
        live, dead: numbers of the worker's own shards.
        adopted_live: ids of those to keep of an earlier life of the worker; None keeps all.
    """

    acknowledged: int
    live: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()
    adopted_live: tuple[str, ...] | None = None


class WorkerStats(Struct, frozen=True):
    """Counters of a worker.

    Attributes:
        plane: of its store and data plane.
        control_refused: connections and calls of strangers, calls of those who may not make them,
            and messages that no correct peer sends, on the control socket.
        engine: of its engine, which has its own names for them.
        warnings: in its log since it was asked before, each once.
    """

    plane: PlaneStats
    control_refused: int = 0
    engine: Numbers = {}
    warnings: tuple[str, ...] = ()

    def as_metrics(self) -> dict[str, float]:
        """All of them by name."""
        return {**asdict(self.plane), "control_refused": self.control_refused, **self.engine}


class GroupAttempt(Struct, frozen=True, array_like=True):
    """One run of a group."""

    group_id: int
    attempt: int


REST: Final = -1
"""In place of an episode's number: the shard has all of a group that were not sealed alone."""
SHARED: Final = -2
"""In place of an episode's number: the shard has what all rows of a group share."""


class FinishedEpisode(Struct, frozen=True, array_like=True):
    """An episode of a group of training that has ended: the note of its shard.

    Attributes:
        workflow, prompt: what it played, of its group.
        run: that has played it.
        number: of the episode within the group, from 0; or `REST`, or `SHARED`.
        rows: of its shard; none: it was rejected.
        metrics: of each row.
        rejection: why there are no rows.
        answer, vote: of the last row, see `Trajectory`, as far as a group's reward reads them.
        session: id of a session whose journal is there, so the episode has not ended, and goes on;
            "": it has ended.
    """

    run: GroupAttempt
    number: int
    rows: tuple[RowMetadata, ...] = ()
    metrics: tuple[dict[str, float], ...] = ()
    rejection: Rejection | None = None
    answer: str = ""
    vote: str | None = None
    workflow: int = 0
    prompt: PromptReference | None = None
    session: str = ""


class HeldShard(Struct, frozen=True, array_like=True):
    """A shard in a worker's store, and the episode that it is of; None: it is of something else."""

    shard_id: str
    episode: FinishedEpisode | None = None


PING = Method("ping", NoneType, NoneType)
SWEEP = Method("sweep", Sweep, int)
"""Its reply is the number of the newest shard in the store."""
ADOPTED_SHARDS = Method("adopted_shards", tuple[int, ...], tuple[HeldShard, ...])
"""The shards of earlier lives of the worker that it has taken over, and still holds.

The argument has the ids of the groups of which more than the names of their episodes is told."""
STATS = Method("stats", NoneType, WorkerStats)
SLEEP = Method("sleep", NoneType, NoneType)
"""The engine gives up the memory of its device. It takes it again when it is asked to compute, or,
to generate, when it gets weights."""
SHUTDOWN = Method("shutdown", NoneType, NoneType, deadline_s=SHUTDOWN_TIMEOUT_S)


class SealedShard(Struct, frozen=True, array_like=True):
    """A new shard, whose id is "" if there was nothing to seal.

    Attributes:
        last_sequence: number of the newest shard in the store.
    """

    shard: ShardReference
    last_sequence: int


class KeptEpisode(Struct, frozen=True, array_like=True):
    """A finished episode of an earlier attempt of a group, and where its shard is."""

    shard: ShardReference
    episode: FinishedEpisode


class RunGroup(Struct, frozen=True, array_like=True):
    """Episodes of one prompt, to be run beside each other.

    Attributes:
        kept: those that an earlier attempt has finished, and what they share; each number once.
    """

    group_id: int
    attempt: int
    admitted_version: int
    prompt: PromptReference
    workflow: int
    group_size: int
    kept: tuple[KeptEpisode, ...] = ()


class RejectedEpisodes(Struct, frozen=True, array_like=True):
    """Episodes of a group that were rejected for the same cause, and the first of them."""

    num_episodes: int
    first: Rejection


class GroupReply(Struct, frozen=True, array_like=True):
    """What became of a group.

    Attributes:
        run: of which this is the end.
        batch: its rows; None if all were rejected, or the group was given up meanwhile.
        rejected: one for each cause.
        metrics: metric of the workflow -> (sum, number of episodes).
        warning: what the user should know of the prompt; "" if there is nothing.
        num_waiting: answers that wait for a place in the engine.
        goes_on: nothing has become of it yet, because agents outside are waited for: to be asked
            for again.
    """

    run: GroupAttempt
    batch: BatchMetadata | None = None
    rejected: tuple[RejectedEpisodes, ...] = ()
    metrics: dict[str, tuple[float, int]] = {}
    warning: str = ""
    num_waiting: int = 0
    goes_on: bool = False


class Generate(Struct, frozen=True, array_like=True):
    """A completion that belongs to no episode.

    Attributes:
        options: the adapter's folder is named by its path below the run folder.
    """

    input_ids: list[int]
    sampling: GenerationConfig
    options: RequestOptions


class RunEvaluation(Struct, frozen=True, array_like=True):
    """One episode that is not trained.

    Attributes:
        evaluation: it is recorded by this name, see `EvaluatedAnswer`; "": it is not recorded.
        step: policy version when the evaluation began.
        sample: number of the answer to the prompt.
        temperature: replaces that of the run; None keeps it.
        keeps_text: the reply has what the model read and wrote.
    """

    prompt: PromptReference
    workflow: int
    temperature: float | None = None
    keeps_text: bool = False
    evaluation: str = ""
    step: int = 0
    sample: int = 0


class KeptCompletion(Struct, frozen=True):
    """What the model wrote in one call: with it the episode can be played again without a model.

    Attributes: those of `engines.base.Completion`.
    """

    token_ids: list[int]
    finish_reason: str
    temperature: float
    stop: tuple[str, ...] = ()


class EvaluatedText(Struct, frozen=True):
    """What the model read and wrote in an episode.

    Attributes:
        prompt: what it read first, with special tokens.
        answer: what it wrote, all calls together, with special tokens.
        completions: in the order in which they ended.
    """

    prompt: str
    answer: str
    completions: tuple[KeptCompletion, ...]


class EvaluationReply(Struct, frozen=True, array_like=True):
    """What an evaluated episode gave.

    Attributes:
        reward: None where the episode was rejected.
        versions: lowest and highest policy version that sampled a token.
        vote: what was answered, in words that equal answers share; None where the reward does not
            tell, or nothing was answered.
    """

    reward: float | None
    metrics: dict[str, float] = {}
    versions: tuple[int, int] = (0, 0)
    rejection: Rejection | None = None
    vote: str | None = None
    text: EvaluatedText | None = None


AGENT_OUTSIDE: Final = "an agent outside"
"""What an episode waits for that has no time limit."""


class Waiting(Struct, frozen=True, array_like=True):
    """Running episodes that wait for the same, and for how long the first of them does."""

    what: str
    num_episodes: int
    longest_s: float


class EpisodesReport(Struct, frozen=True, array_like=True):
    """What the episodes of a worker do, those of evaluations included.

    Attributes:
        num_kept, num_rejected: those that have ended, since the worker's start.
        new_causes: the first rejection of each cause that no earlier report told.
    """

    waiting: tuple[Waiting, ...] = ()
    num_kept: int = 0
    num_rejected: int = 0
    new_causes: tuple[Rejection, ...] = ()


NO_POLICY: Final = (-1, -1)
"""The policy of a rollout worker that has given its weights up; no other has this name."""


class EndedRun(Struct, frozen=True, array_like=True):
    """A run whose reply the worker keeps, and the shards of its rows."""

    run: GroupAttempt
    shards: tuple[str, ...]


class RolloutDescription(Struct, frozen=True, array_like=True):
    """What a rollout worker holds and does.

    Attributes:
        policy: lineage and version of its weights; None: those that its engine was built with.
        going: runs of groups that go on.
        ended: those whose replies are kept.
        shards: all that are in its store.
    """

    policy: tuple[int, int] | None
    going: tuple[GroupAttempt, ...]
    ended: tuple[EndedRun, ...]
    shards: tuple[HeldShard, ...]


INITIALIZE_ENGINE = Method("initialize_engine", NoneType, NoneType)
"""Once; a repeat waits for the first one."""
RUN_GROUP = Method("run_group", RunGroup, GroupReply)
"""A run is played once: a repeat joins it, or gets its reply again; see `group_runs`."""
GIVE_UP_GROUP = Method("give_up_group", GroupAttempt, NoneType)
"""Ends a run, if it goes on; nothing more comes of it when this replies."""
AGENTS_AT = Method("agents_at", NoneType, AgentsAt)
"""Where the sessions of the worker are served to the process that has the run's address."""
EPISODES = Method("episodes", NoneType, EpisodesReport)
RUN_EVALUATION = Method("run_evaluation", RunEvaluation, EvaluationReply)
GENERATE = Method("generate", Generate, Completion)
"""Its reply has no routes."""
PAUSE = Method("pause", NoneType, NoneType)
RESUME = Method("resume", NoneType, NoneType)
DESCRIBE_ROLLOUT = Method("describe_rollout", tuple[int, ...], RolloutDescription)
"""What it tells a controller that takes it over; the argument is that of `ADOPTED_SHARDS`."""
