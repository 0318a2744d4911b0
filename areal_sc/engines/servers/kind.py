"""What a kind of server provides: how it is started, and what one that runs is asked.

Another kind implements `ServerKind` and `ServerClient`; everything else here is for all kinds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from areal_sc.config.model_folder import read_model_config
from areal_sc.config.schema import GenerationConfig, RolloutConfig, ServersConfig
from areal_sc.errors import ConfigError, ModelError

if TYPE_CHECKING:
    import torch

    from areal_sc.weights import BucketLayout, WeightGroup

ABORTED = "abort"


@dataclass(frozen=True)
class ServerPlace:
    """What tells one server of a worker from another.

    Attributes:
        index: number of the server, from 0.
        port: that it listens on.
        api_key: that its clients must show.
        is_cuda: it computes on GPUs, else on the CPU.
    """

    index: int
    port: int
    api_key: str
    is_cuda: bool


@dataclass(frozen=True)
class ServerAbilities:
    """What one server is and can.

    Attributes:
        version: of its program.
        model_type: and `architectures`, as in the model's config.json; empty when not told.
        vocab_size: None when the server does not tell.
        max_context_tokens: longest prompt and completion that it takes.
        tp_size: ranks that hold the weights.
        max_support: tokens that a truncated distribution may have; 0: the server gives no
            log-probabilities under truncated distributions.
        has_version_spans: it tells the version of every token, so that weights may be replaced
            under running requests.
    """

    version: str
    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int | None
    max_context_tokens: int
    tp_size: int
    max_support: int
    has_version_spans: bool

    def check(self, url: str, model_folder: str, max_context_tokens: int) -> None:
        """Compares the server with the model that is trained.

        Raises: ModelError: it serves another model. ConfigError: its context is too short.
        """
        expected = read_model_config(Path(model_folder)) or {}
        for name, found in (
            ("model_type", self.model_type),
            ("architectures", list(self.architectures)),
            ("vocab_size", self.vocab_size),
        ):
            wanted = expected.get(name)
            if found and wanted and found != wanted:
                raise ModelError(
                    f"the server at {url} serves another model than {model_folder}: {name} is "
                    f"{found!r}, expected {wanted!r}; start it with that folder"
                )
        if self.max_context_tokens < max_context_tokens:
            raise ConfigError(
                f"the server at {url} takes {self.max_context_tokens} tokens, but "
                f"rollout.max_context_tokens is {max_context_tokens}: lower it, or start the "
                "server with a longer context, and room for it in its KV cache"
            )


@dataclass(frozen=True)
class PartRequest:
    """What is asked of one server for a completion.

    Attributes:
        input_ids: prompt, and what was sampled before.
        stop_token_ids: all that end the completion.
        max_support: None samples from the whole distribution; else the largest number of tokens
            that a truncated one may have, and log-probabilities are those under that one.
    """

    request_id: str
    input_ids: Sequence[int]
    sampling: GenerationConfig
    max_new_tokens: int
    stop_token_ids: Sequence[int]
    max_support: int | None


@dataclass(frozen=True)
class AnswerPart:
    """One server's part of a completion.

    Attributes:
        token_ids, logprobs, versions: [S] tokens that the server sampled, the stop token included.
        finish: `stop`, `length`, or `abort`: there may be more.
        reason: with `abort`: what the server says of it.
        num_prompt_tokens: of the request, earlier parts included.
        num_cached_tokens: of these, those whose KV the server had.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: str
    reason: str
    num_prompt_tokens: int
    num_cached_tokens: int


class ServerClient(Protocol):
    """One running server. Made on a running event loop, and closed on it.

    Every call raises PeerLost, RpcTimeout, ServerBusy, EngineFailed, ConfigError or ProtocolError,
    as `http_client` says.
    """

    url: str

    async def close(self) -> None: ...

    async def check_health(self, *, timeout_s: float) -> None:
        """Returns when the server has generated a token."""
        ...

    async def probe(self, *, timeout_s: float) -> None:
        """Returns when the process that computes has answered, which it does while paused too."""
        ...

    async def ask_abilities(self, *, timeout_s: float) -> ServerAbilities:
        """Of a server that is not paused. Raises: ConfigError: it is too old to be driven."""
        ...

    async def served_weights(self) -> tuple[int | None, str]:
        """Policy version, None when it is no run's, and the folder that the server was given."""
        ...

    async def generate(self, request: PartRequest) -> AnswerPart:
        """Waits as long as it takes."""
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a request, which is answered with what it has; no error when there is none."""
        ...

    async def pause(self, *, holds_requests: bool) -> None:
        """Returns when no further step begins; running requests are held, or answered at once."""
        ...

    async def resume(self) -> None: ...

    async def set_version(self, version: int) -> None:
        """Names the weights that the server has; requests go on."""
        ...

    async def load_from_disk(self, folder: str, *, timeout_s: float) -> None:
        """Replaces the weights by those of a folder on the server's disk, and drops the cache."""
        ...

    async def begin_update(self) -> None:
        """Before weights come in buckets."""
        ...

    async def end_update(self, *, timeout_s: float) -> None:
        """After the last bucket."""
        ...

    async def load_tensors(
        self, flat: torch.Tensor, layout: BucketLayout, *, drops_cache: bool, timeout_s: float
    ) -> None:
        """Loads one bucket of weights, on a server that this process has started.

        Args:
            flat: [n] uint8, in shared memory that has a name; not written before all have loaded.
            layout: of its bytes.
            drops_cache: as the last bucket has to.
        """
        ...

    async def join_group(self, group: WeightGroup, first_rank: int, *, timeout_s: float) -> None:
        """Becomes ranks of a process group; returns when all of the group's ranks are there."""
        ...

    async def leave_group(self, name: str) -> None: ...

    async def receive_broadcast(
        self, group_name: str, layout: BucketLayout, *, drops_cache: bool, timeout_s: float
    ) -> None:
        """Takes part in the broadcast of one bucket."""
        ...


class ServerKind(Protocol):
    """How servers of a kind are started and reached.

    Attributes:
        name: for messages.
        section: name of their settings in the run's.
        module: that is run as their main program.
        scheduler_title: part of the titles of those of their processes that compute.
        left_files: finds, in a process's memory map, files of shared memory that a killed server
            leaves; the first group is the path.
    """

    name: str
    section: str
    module: str
    scheduler_title: str
    left_files: re.Pattern[str]

    def arguments(
        self, config: RolloutConfig, servers: ServersConfig, place: ServerPlace
    ) -> list[str]:
        """The command line of one server's main program."""
        ...

    def environment(self, place: ServerPlace) -> dict[str, str]:
        """Variables that it needs."""
        ...

    def connect(self, url: str, api_key: str, control_timeout_s: float) -> ServerClient:
        """A client; `control_timeout_s` is for answers that wait for no tokens or weights."""
        ...
