"""Generation by SGLang servers: started and owned by this engine, or running already.

    generate ──► Completer ──► Dispatcher ──► Replica ──► SGLangServer (HTTP)
                               waits for room   watched, replaced when it fails
    publish ───► ReplicaSet: hold, pause, load, name the version, go on; wave by wave

Consumes: `generate`, weights, `pause`, `resume`. Waits for: a server with room, its answer, its
start. Unblocked by: answers, servers that come back, and the failure of the last one.

Every token has the log-probability of the distribution that it was sampled from (temperature,
top-k and top-p applied; at temperature 0 that of temperature 1) and the version of the weights
that sampled it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from areal_sc.config.schema import (
    Device,
    GenerationConfig,
    RolloutConfig,
    WeightUpdateMethod,
)
from areal_sc.config.sglang_checks import check_sglang_config
from areal_sc.engines.base import Completion
from areal_sc.engines.local.model import resolve_device
from areal_sc.engines.sglang.collective import CollectiveWeights
from areal_sc.engines.sglang.completion import Completer
from areal_sc.engines.sglang.model import ServedModel
from areal_sc.engines.sglang.replica import ReplicaSettings
from areal_sc.engines.sglang.replicas import ReplicaSet
from areal_sc.engines.sglang.requests import make_request
from areal_sc.engines.sglang.shared_buckets import SharedBuckets
from areal_sc.engines.sglang.weights import (
    DiskWeights,
    TensorWeights,
    Weights,
    WrittenWeights,
    as_shaped,
    check_shapes,
    check_weights_folder,
)
from areal_sc.engines.weight_group import NamedTensor
from areal_sc.errors import ArealError, ConfigError, ModelError, WorkerError
from areal_sc.weights import BucketLayout, WeightGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from areal_sc.engines.base import TensorSource


class SGLangServerEngine:
    """`GenerationEngine` over one or several SGLang servers.

    Args:
        config: model folder, limits, seed; the servers share `max_running_sequences`.
        log_folder: where the logs of servers that are started go.
        name: of the worker, in the logs' names.

    Attributes:
        tokenizer: the model's.
        max_context_tokens: limit of prompt and completion together.
    """

    tokenizer: PreTrainedTokenizerBase

    def __init__(self, config: RolloutConfig, *, log_folder: Path, name: str) -> None:
        """Reads the model folder; starts nothing.

        Raises: ConfigError: an impossible setting. ModelError: the folder cannot be used.
        """
        for setting in ("seed", "path", "dtype", "sglang", "weight_update"):
            if str(getattr(config, setting)).startswith("${"):
                raise ConfigError(
                    f"rollout.{setting} is {getattr(config, setting)!r}: a config built in code "
                    "needs a value here, load_config fills it in"
                )
        check_sglang_config(config.sglang)
        self._model = ServedModel.read(config.path)
        is_disk = config.weight_update.method == WeightUpdateMethod.disk
        if self._model.is_stored_by_other_names and not is_disk:
            other = min(self._model.parameters.keys() - self._model.stored.keys())
            raise ConfigError(
                f"weight_update.method: the files of {config.path} do not name the weights as they "
                f"are named in memory, e.g. {other}, and servers know the files' names: choose disk"
            )
        self.tokenizer = self._model.tokenizer
        self.max_context_tokens = config.max_context_tokens
        self._config = config
        self._name = name
        self._settings = ReplicaSettings(config, log_folder, name, is_cuda=_serves_on_cuda(config))
        self._buckets = SharedBuckets()
        self._starting: ReplicaSet | None = None
        self._is_closed = False
        self._replicas: ReplicaSet | None = None
        self._completer: Completer | None = None
        self._failure: ArealError = WorkerError("the SGLang engine has not been started")
        self._num_updates = 0

    @property
    def version(self) -> int:
        """Policy version of the oldest weights that the next token may be sampled from."""
        return self._replicas.version if self._replicas else 0

    async def start(self) -> None:
        """Starts the servers, or connects to them, and returns when all of them serve.

        To be called in the thread whose end shall end the servers.
        Raises: ConfigError, ModelError, WorkerStartError: what is wrong, and what to change.
        """
        assert self._starting is None, "start() is called once"
        replicas = self._starting = ReplicaSet(self._settings)
        try:
            await replicas.start()
        except asyncio.CancelledError:
            if self._is_closed:  # meanwhile
                raise self._failure from None
            raise
        if self._is_closed:
            await replicas.close()
            raise self._failure
        self._completer = Completer(replicas, self._model.vocab_size)
        self._replicas = replicas

    async def close(self) -> None:
        """Ends the servers that were started; pending and later calls raise WorkerError."""
        self._failure = WorkerError("the SGLang engine is closed")
        self._is_closed = True
        if self._starting is not None and self._replicas is None:
            await self._starting.close()
        replicas, self._replicas = self._replicas, None
        completer, self._completer = self._completer, None
        if replicas is not None and completer is not None:
            replicas.dispatcher.fail(self._failure)
            await replicas.close()
            await completer.close()
        self._buckets.close()

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: GenerationConfig,
        *,
        prefix_group: str | None = None,
    ) -> Completion:
        """Samples one completion. Cancelling the task ends it on its server.

        Args:
            input_ids: the prompt, at least one token.
            sampling: completions end at its stop tokens, at the tokenizer's EOS and at those of
                the model's generation config; the stop token is part of the completion. With
                top_p below 1, at most as many tokens are kept as the server's limit for
                truncated distributions allows (4096, unless set).
            prefix_group: requests of one group stay together, where their prompt is cached.
        Raises: WorkflowError: the prompt leaves no room in the context, is empty, or holds a token
            outside the vocabulary. ConfigError: an impossible sampling setting. WorkerError: all
            servers are lost, or the engine is closed.
        """
        _, completer = self._require_running()
        request = make_request(
            input_ids,
            sampling,
            prefix_group=prefix_group,
            end_token_ids=self._model.end_token_ids,
            vocab_size=self._model.vocab_size,
            max_context_tokens=self.max_context_tokens,
        )
        return await completer.complete(request)

    def cancel_group(self, prefix_group: str) -> None:
        """Ends the group's requests; each returns its partial answer as `cancelled`."""
        self._require_running()[1].cancel_group(prefix_group)

    async def update_weights(self, version: int, source: TensorSource) -> None:
        """Replaces all weights by tensors; running requests go on as `on_weight_update` says.

        Args:
            source: asked again for servers that start before the next publication.
        Raises: ModelError: names or sizes do not fit; the old weights and version stay.
            ConfigError: the servers were not started here. EngineFailed: no server is left.
        """
        if self._config.sglang.urls:
            raise ConfigError(
                "weights go as tensors only to servers that this worker has started, and "
                "sglang.urls names others: set weight_update.method to disk or collective"
            )
        await self.publish(self._tensor_weights(version, source))

    async def update_weights_from_disk(self, version: int, folder: Path) -> None:
        """Replaces all weights by those of a Hugging Face folder that the servers see.

        The folder has to stay until the next publication is done.
        Raises: ModelError: it is of another model, or incomplete; nothing has changed then.
            EngineFailed: no server is left.
        """
        check_weights_folder(str(folder), self._config.path, self._model.shapes_in_folders)
        await self.publish(DiskWeights(version, str(folder)))

    async def update_weights_from_group(
        self,
        version: int,
        group_name: str,
        buckets: Sequence[BucketLayout],
        *,
        again: TensorSource,
        give_up: Callable[[], Awaitable[None]],
    ) -> None:
        """Receives all weights from rank 0 of a group, which broadcasts them at the same time.

        Args:
            buckets: in the order of the broadcasts.
            again: for servers that are not in the group or restart; servers of others get them by
                a folder in `weight_update.folder`.
            give_up: tells rank 0 that not all ranks will take part.
        Raises: ModelError: the buckets are not the model's parameters; nothing has changed then.
            EngineFailed: no server is left.
        """
        given = {
            name: shape
            for bucket in buckets
            for name, shape in zip(bucket.names, bucket.shapes, strict=True)
        }
        try:
            check_shapes(given, self._model.parameters, "the broadcast weights")
        except ModelError:
            await give_up()
            raise
        late: Weights = self._tensor_weights(version, again)
        if self._config.sglang.urls:
            folder = Path(self._config.weight_update.folder) / f"{self._name}-{version}"
            late = WrittenWeights(version, self._shaped(again), folder, Path(self._config.path))
        num_members = self._require_running()[0].num_members(group_name)
        await self.publish(
            CollectiveWeights(version, group_name, num_members, buckets, late, give_up)
        )

    async def publish(self, weights: Weights) -> None:
        """Gives the servers these weights; returns when one serves them at least.

        The others do too, or are restarted and get them before they get requests.
        """
        replicas, _ = self._require_running()
        await replicas.publish(weights)
        self._num_updates += 1

    async def join_group(self, group: WeightGroup, first_rank: int) -> None:
        """The serving servers become ranks of a weight group; see `ReplicaSet.join_group`."""
        await self._require_running()[0].join_group(group, first_rank)

    async def leave_group(self, name: str) -> None:
        await self._require_running()[0].leave_group(name)

    def has_whole_group(self, name: str) -> bool:
        """Whether a group can still be used: no server has come or gone since."""
        return self._require_running()[0].has_whole_group(name)

    @property
    def is_cuda(self) -> bool:
        """Whether the servers compute on GPUs."""
        return self._settings.is_cuda

    def count_ranks(self) -> int:
        """Ranks that the servers need in a weight group."""
        return self._require_running()[0].count_ranks()

    async def pause(self) -> None:
        """Returns when no server generates; running requests are held until `resume`."""
        await self._require_running()[0].pause()

    async def resume(self) -> None:
        await self._require_running()[0].resume()

    def stats(self) -> Mapping[str, float]:
        """Counters since start, and the requests and servers of now."""
        if self._replicas is None or self._completer is None:
            return {}
        replicas, completer = self._replicas, self._completer
        num_waiting = replicas.dispatcher.num_waiting
        return {
            **asdict(completer.counters),
            **replicas.times.as_stats(),
            "weight_updates": self._num_updates,
            "running_requests": completer.num_running - num_waiting,
            "waiting_requests": num_waiting,
            "occupied_places": sum(r.load.num_running for r in replicas.replicas),
            "serving_servers": replicas.num_serving,
            "lost_servers": replicas.num_losses,
            "server_restarts": replicas.num_restarts,
        }

    def server_health(self) -> dict[str, str]:
        """Each server's name, and what is known of it; see `Health`."""
        replicas, _ = self._require_running()
        return {replica.load.name: str(replica.health) for replica in replicas.replicas}

    def _tensor_weights(self, version: int, source: TensorSource) -> TensorWeights:
        bucket_bytes = self._config.weight_update.bucket_bytes
        return TensorWeights(version, self._shaped(source), self._buckets, bucket_bytes)

    def _shaped(self, source: TensorSource) -> TensorSource:
        async def shaped() -> Iterable[NamedTensor]:
            return as_shaped(await source(), self._model.parameters)

        return shaped

    def _require_running(self) -> tuple[ReplicaSet, Completer]:
        if self._replicas is None or self._completer is None:
            raise self._failure
        return self._replicas, self._completer


def _serves_on_cuda(config: RolloutConfig) -> bool:
    """Whether the servers compute on GPUs; of others' servers only the setting tells."""
    if config.sglang.urls:
        return config.device == Device.cuda
    return resolve_device(config.device).type == "cuda"
