"""What a worker asks of an engine. No torch at run time: controllers read these types too."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, runtime_checkable

from areal_sc.config.optimizer_settings import OptimizerConfig
from areal_sc.config.schema import ModelHead

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from areal_sc.algorithms.named_loss import NamedLoss
    from areal_sc.config.schema import ActorConfig, GenerationConfig
    from areal_sc.engines.picture_processor import PictureProcessor
    from areal_sc.engines.training.updates.update_trace import UpdateTrace
    from areal_sc.transport.packed_rows import PackedRows
    from areal_sc.weights.group import NamedTensor
    from areal_sc.weights.published import BucketLayout, WeightGroup

    TensorSource = Callable[[], Awaitable[Iterable[NamedTensor]]]
    """Gives every parameter, flat or shaped."""


OnTokens: TypeAlias = Callable[[Sequence[int]], None]
"""Takes the tokens of an answer that have been sampled since its last call, one or more."""

TopTokens: TypeAlias = list[tuple[int, float]]
"""The most probable tokens of one place, with their log-probabilities in nats, falling."""

SCORES: Final = "scores"
"""What a model with a value head says of a row up to a token, that token included."""

OUTPUTS: Final = MappingProxyType(
    {ModelHead.lm: ("logprobs", "entropy"), ModelHead.value: ("values", SCORES)}
)
"""What a forward gives of each asked token, by the model's head."""

BASE_LOGPROBS: Final = "base_logprobs"
"""What a model with an adapter gives, too: its log-probabilities without the adapter."""


def column_of(output: str, config: ActorConfig) -> int:
    """Which of the two outputs of a model it is.

    Raises: ValueError: none of them.
    """
    given: tuple[str, ...] = OUTPUTS[config.head]
    if config.has_adapter and config.head is ModelHead.lm:
        given = (*given, BASE_LOGPROBS)
    if output not in given:
        raise ValueError(
            f"output: expected one of {', '.join(given)}, which a model with head={config.head} "
            f"gives, got {output!r}"
        )
    return int(output == "entropy")


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer.

    Attributes:
        token_ids: [C] sampled tokens, the stop token or those of the stop string included.
        logprobs: [C] float, nats, under the distribution that was sampled from
            (temperature, top-p and top-k applied).
        versions: [C] policy version of the weights that sampled each token.
        finish_reason: `stop`, `length` (max_new_tokens) or `context` (the model's limit).
        temperature: that it was sampled at; 0: greedy, `logprobs` are those of temperature 1.
        stop: strings that end it; its text ends before the first one.
        routes: [P + C, layers, experts of a token], with `routing_replay`: the experts that the
            tokens of prompt and answer went through when the log-probabilities were computed;
            zeros where that is not known, as of the last one. None: the engine was not asked.
        prompt_logprobs: [P] nats, of each token of the prompt given those before it, at temperature
            1 whatever the answer is sampled at; NaN at the first. []: they were not asked for.
        prompt_top: [P], the most probable tokens where those of the prompt stand, at temperature 1;
            none at the first. []: they were not asked for.
        top: [C], the same where the sampled ones stand: at the temperature that they were sampled
            at, greedy ones at 1, before top-p and top-k. []: they were not asked for.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    temperature: float
    stop: tuple[str, ...] = ()
    routes: Any = field(default=None, compare=False)  # an array; journals need its type
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top: list[TopTokens] = field(default_factory=list)
    top: list[TopTokens] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request says beside its prompt and how it is sampled.

    Attributes:
        prefix_group: requests of one group, and of one adapter, share their prompt's prefill; "":
            it is of none.
        adapter: a folder of peft's format, whose content never changes, to compute with beside
            the weights. It is loaded at its first use, and stays while it is among the newest. "":
            the weights alone.
        prompt_logprobs: the completion tells those of the prompt, which costs its prefill: none of
            it is shared.
        top_k_logprobs: the most probable tokens that it tells at each place that was sampled, and
            with `prompt_logprobs` at each of the prompt; 0: none.
        pictures: of the prompt.
    """

    prefix_group: str = ""
    adapter: str = ""
    prompt_logprobs: bool = False
    top_k_logprobs: int = 0
    pictures: tuple[bytes, ...] = ()


PLAIN: Final = RequestOptions()


class GenerationEngine(Protocol):
    """What episodes ask of an engine. Coroutines run on the worker's event loop.

    `EpisodeEngine.generate`, which workflows call, comes to `generate` here. What an engine with a
    server asks that for is `ServerClient.answer`, or `stream_answer`.

    Attributes:
        end_token_ids: that end a completion, beside those of its `GenerationConfig`.
        processor: of a model that reads pictures; None: it reads none.
    """

    processor: PictureProcessor | None
    tokenizer: PreTrainedTokenizerBase
    max_context_tokens: int
    end_token_ids: tuple[int, ...]

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: GenerationConfig,
        options: RequestOptions = PLAIN,
        *,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Samples one completion. Cancelling the task frees the slot at once.

        Args:
            on_tokens: called in the caller's task while the answer is sampled. It gets every token
                of the completion once, in order, before this returns, whatever interrupts the
                answer meanwhile. What it raises is raised here, and the answer is given up.
        Raises: WorkflowError: the prompt leaves no room in the context, or the engine reads no
            pictures. ModelError: the adapter cannot be served. ConfigError: the engine has not what
            is asked for.
        """


class FollowingEngine(GenerationEngine, Protocol):
    """What a rollout worker asks of its engine.

    It generates, and follows a policy that is trained.
    """

    @property
    def is_cuda(self) -> bool:
        """Whether its ranks in a weight group compute on GPUs."""

    async def start(self) -> None:
        """Loads the model; returns when it can generate."""

    async def close(self) -> None:
        """Ends everything that it started."""

    async def pause(self) -> None:
        """Stops generation; running requests keep their tokens."""

    async def resume(self) -> None:
        """Goes on after `pause`."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place, as all are taken."""

    def stats(self) -> Mapping[str, float]:
        """Counters since start, `generated_tokens` and `cancelled_tokens` (lost) among them."""

    async def sleep(self) -> None:
        """Drops weights and KV cache. Running requests keep their tokens, and nothing is sampled
        before the next weights have come; their update takes the memory again.
        """

    @property
    def version(self) -> int:
        """Policy version of the weights that the next token is sampled from."""

    async def update_weights(self, version: int, source: TensorSource) -> None:
        """Replaces all weights; running requests go on under them, KV recomputed.

        Raises: ModelError: names or sizes do not fit; the old weights and version stay.
        """

    async def update_weights_from_disk(self, version: int, folder: Path) -> None:
        """The same, by a Hugging Face folder, which stays until the next publication is done."""

    async def update_weights_from_group(
        self,
        version: int,
        group_name: str,
        buckets: Sequence[BucketLayout],
        *,
        again: TensorSource,
        give_up: Callable[[], Awaitable[None]],
    ) -> None:
        """Replaces all weights by what rank 0 of a weight group broadcasts meanwhile.

        Args:
            buckets: in the order of the broadcasts.
            again: the same weights, for ranks that are not in the group, or lose it.
            give_up: tells rank 0 that not all ranks will take part; may be called repeatedly.
        """

    async def join_group(self, group: WeightGroup, first_rank: int) -> None:
        """Becomes `count_ranks()` ranks of a weight group; returns when all ranks have met."""

    async def leave_group(self, name: str) -> None:
        """Its ranks are no longer in that weight group."""

    def has_whole_group(self, name: str) -> bool:
        """Whether the group can still be used: no rank has come or gone since."""

    def count_ranks(self) -> int:
        """Ranks that the engine needs in a weight group."""


@runtime_checkable
class EndsWithServer(Protocol):
    """An engine that is of no use without a process that it has started."""

    async def wait_until_lost(self) -> str:
        """Returns why the process is lost, when nothing of it is left. After `start`."""


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Where a rank stands among all that train one model.

    Attributes:
        data_rank: share of each minibatch that it computes, the same for all of a model group.
        is_head: it replies for its model group; one rank of each does.
        min_saved_tokens: rows that begin alike are computed once, if that saves so many tokens;
            infinite: they never are.
    """

    data_rank: int
    is_head: bool
    min_saved_tokens: float = math.inf


@dataclass(frozen=True, slots=True)
class AdapterBeginning:
    """What an adapter begins with.

    Attributes:
        folder: what `TrainEngine.begin_save_adapter` or peft has written, and rank 0 sees; "": it
            is new.
        rank: up to `actor.lora.rank`; 0: that one, or the folder's.
        seed: of a new one.
        with_optimizer: moments and count of updates are those of the folder, if it has them; else
            they are 0.
    """

    folder: str = ""
    rank: int = 0
    seed: int = 0
    with_optimizer: bool = False


class TrainEngine(Protocol):
    """What every rank of a trained model has. Called from one thread; every rank gets the same
    calls.

    Attributes:
        shares_files: whether every rank sees the folders that it is told to write to; set before
            `initialize`. Otherwise a machine may have its own, each with a part of a snapshot, and
            the one of rank 0 with an export.
        node: names the machine whose memory this rank sees; set before `initialize`.
    """

    shares_files: bool
    node: str

    @property
    def is_cuda(self) -> bool:
        """Whether this rank computes on a GPU."""

    def create_rendezvous(self, host: str) -> str:
        """On rank 0: opens the ranks' meeting point; returns the `init_method` of all ranks.

        Args:
            host: address of this machine that the other ranks can reach.
        """

    def initialize(
        self, rank: int | None = None, world_size: int = 1, init_method: str = "env://"
    ) -> RankPosition:
        """Meets the other ranks and loads the model; returns which part this rank has in it.

        Args:
            rank: None: this process is the rank that torchrun made it, or the only one.
        """

    def forward(self, rows: PackedRows, output: str) -> torch.Tensor:
        """[T] float32: `output` at each token in `loss_mask`, else 0; meaningful on heads alone.

        But for `scores` it is 0 at the first token of a row, too, as nothing predicts it.

        Args:
            output: `logprobs`: nats, of the token given those before it in its row, under the
                distribution at the token's own `temperatures`; `entropy`: nats, of that;
                `values`: of a model with a value head, what it expects after the tokens before;
                `scores`: the same after this token, too;
                `base_logprobs`: `logprobs` without the adapter that the model has.
        """

    def top_logprobs(self, rows: PackedRows, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The most probable tokens at each token in `loss_mask`, else 0; meaningful on heads alone.

        Returns: [T, top_k] float32, nats, as `logprobs`, and [T, top_k] int32, the tokens.
        """

    def update(
        self,
        minibatches: Sequence[PackedRows],
        loss: NamedLoss,
        *,
        step: int,
        min_token_version: int | None = None,
        trace: UpdateTrace | None = None,
        optimizers: Mapping[int, OptimizerConfig] | None = None,
    ) -> dict[str, float]:
        """One optimizer update a minibatch; returns the same numbers on every rank.

        Args:
            minibatches: this rank's rows of each; equally many on every rank.
            loss: over the trained tokens; see `algorithms.losses`.
            step: training step, counted from 0; decides the learning rate.
            min_token_version: tokens sampled by older versions add nothing to the loss and its
                denominator; None trains all.
            trace: gets what the forward gives of some rows.
            optimizers: of this update, by the place of an adapter; None: the model's, of all.
        """

    def fill_adapter(self, place: int, beginning: AdapterBeginning) -> None:
        """The adapter of a place begins anew, or goes on from a folder.

        Raises: ModelError: on every rank: there is no such adapter. Nothing has changed.
        """

    def begin_save_adapter(self, place: int, folder: Path, *, with_optimizer: bool) -> Future[None]:
        """Takes the adapter of a place as it is now. The future: when the folder has been written.

        Args: with_optimizer: also its moments and its count of updates.
        """

    def published_parts(self) -> tuple[dict[str, torch.Tensor], Iterator[torch.Tensor]]:
        """What this rank publishes of the parameters: without values, and then the values.

        Under Hugging Face names, 1-D, in the dtype of publication. What the ranks give of a name,
        one after the other in their order, are the values of the whole parameter. The values may
        be live; all ranks must go through all of them together.
        """

    def gather_weights(self, bucket_bytes: int) -> Iterator[list[NamedTensor]]:
        """Every whole parameter under its Hugging Face name, a bucket at a time; tied ones once.

        In the dtype of publication; they may be the live ones. All ranks must go through all
        buckets together.
        """

    def weight_layouts(self, bucket_bytes: int) -> list[BucketLayout]:
        """What `gather_weights` gives, without the values; on any rank by itself."""

    def begin_save_hf(self, folder: Path, *, is_staged: bool = True) -> Future[None]:
        """Takes the weights as they are now. The future: when the folder has been written.

        Args:
            is_staged: a copy is taken. Without it, which saves its memory, the weights must not
                change until the future is done.
        """

    def begin_snapshot(self, folder: Path) -> Future[None]:
        """Takes the engine's whole state as it is now. The future: when it has been written."""

    def load_snapshot(self, folder: Path) -> None:
        """Becomes what `begin_snapshot` wrote, maybe by another number of ranks."""

    def keep_state(self, folder: Path, name: str, *, beside: str) -> None:
        """Copies the whole state into one of two buffers.

        Args:
            folder: in the memory of the node.
            name: of this state.
            beside: name of the state whose buffer is left as it is.
        """

    def load_state(self, folder: Path, name: str) -> None:
        """Becomes what the same ranks, on the same nodes, have kept under this name."""

    def forget_states(self) -> None:
        """Lets go of the buffers, whose files are deleted then."""

    def sleep(self) -> None:
        """Moves all that it holds on its device to host memory: of an engine that `can_sleep`."""

    def wake(self) -> None:
        """Moves it back; before that it cannot be asked for anything."""

    def close(self) -> None:
        """Leaves the other ranks; what is being written is finished first."""
