"""Generation by servers: started and owned by this engine, or running already.

    generate ──► Completer ──► Dispatcher ──► Replica ──► server (HTTP)
                               waits for room   watched, replaced when it fails
    publish ───► ReplicaSet: hold, pause, load, name the version, go on; wave by wave

Consumes: `generate`, weights, `pause`, `resume`. Waits for: a server with room, its answer, its
start. Unblocked by: answers, servers that come back, and the failure of the last one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from areal_sc.config.schema import Device, GenerationConfig, WeightUpdateMethod
from areal_sc.engines.base import Completion
from areal_sc.engines.partial_answers import hand_over
from areal_sc.engines.request_checks import check_prompt, check_sampling
from areal_sc.engines.servers.adapters import AdapterFolders, AdapterWeights
from areal_sc.engines.servers.completion import Completer
from areal_sc.engines.servers.handle import ServersHandle
from areal_sc.engines.servers.model import (
    ServedModel,
    as_served,
    check_shapes,
    check_weights_folder,
)
from areal_sc.engines.servers.replica import ReplicaSettings
from areal_sc.engines.servers.replicas import ReplicaSet
from areal_sc.engines.servers.requests import CompletionRequest
from areal_sc.engines.servers.tensors import SharedBuckets, TensorWeights
from areal_sc.engines.servers.weights import (
    CollectiveWeights,
    DiskWeights,
    VersionWeights,
    WrittenWeights,
)
from areal_sc.engines.stop_strings import StopStrings
from areal_sc.engines.weight_group import NamedTensor
from areal_sc.errors import ConfigError, ModelError
from areal_sc.sizing.machine import resolved_device
from areal_sc.weights import BucketLayout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from areal_sc.engines.base import OnTokens, TensorSource


class ServerEngine(ReplicaSet):
    """`GenerationEngine` over one or several servers of a kind.

    Args:
        handle: the settings; the servers share `max_running_sequences`.
        log_folder: where the logs of servers that are started go.
        name: of the worker, in the logs' names.
    """

    tokenizer: PreTrainedTokenizerBase

    def __init__(self, handle: ServersHandle, *, log_folder: Path, name: str) -> None:
        """Reads the model folder; starts nothing.

        Raises: ConfigError: an impossible setting. ModelError: the folder cannot be used.
        """
        handle.check_servers()
        config = handle.config
        self._model = ServedModel.read(config.path)
        self._model.check_context(config.max_context_tokens)
        is_disk = config.weight_update.method == WeightUpdateMethod.disk
        takes_files = is_disk or config.lora.is_published_alone
        if not self._model.can_get_tensors and not takes_files:
            raise ConfigError(
                f"weight_update.method: servers know weights by their names in files, and those of "
                f"{config.path} are no parts of the weights in memory, under names that "
                "transformers knows: choose disk"
            )
        self.tokenizer = self._model.tokenizer
        self.end_token_ids = self._model.end_token_ids
        self.max_context_tokens = config.max_context_tokens
        self._config = config
        self._buckets = SharedBuckets()
        self._adapters = AdapterFolders(log_folder / f"{name}-adapters", config)
        self._adapters.clear()  # of earlier lives
        self._completer = Completer(self, self._model.vocab_size)
        is_cuda = _serves_on_cuda(handle)
        super().__init__(ReplicaSettings(handle, log_folder, name, is_cuda=is_cuda))

    async def close(self) -> None:
        """Ends the servers that were started; pending and later calls raise WorkerError."""
        await super().close()
        await self._completer.close()
        self._buckets.close()
        self._adapters.clear()

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: GenerationConfig,
        *,
        prefix_group: str | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Samples one completion; see the protocol. Cancelling the task ends it on its server.

        It ends at a stop token or string of `sampling`, at the tokenizer's EOS and at those of the
        model's generation config; what ends it is part of it. With top_p below 1, at most as many
        tokens are kept as the server's limit for truncated distributions allows (4096, unless set).
        Raises: WorkflowError: the prompt leaves no room in the context, is empty, or holds a token
            outside the vocabulary. ConfigError: an impossible sampling setting. WorkerError: all
            servers are lost, or the engine is closed.
        """
        request = self._make_request(input_ids, sampling, prefix_group)
        if on_tokens is None:
            return await self._completer.complete(request)

        async def complete(take: OnTokens) -> Completion:
            request.on_tokens = take
            return await self._completer.complete(request)

        return await hand_over(on_tokens, complete)

    async def update_weights(self, version: int, source: TensorSource) -> None:
        """Replaces all weights by tensors; running requests go on as `on_weight_update` says.

        Raises: ModelError: names or sizes do not fit; the old weights and version stay.
            ConfigError: the servers were not started here. EngineFailed: no server is left.
        """
        if self._config.lora.is_published_alone:
            folder = await asyncio.to_thread(self._adapters.write, version, await source())
            await self._publish_adapter(version, folder)
            await asyncio.to_thread(self._adapters.keep_newest)
            return
        if self._settings.servers.urls:
            raise ConfigError(
                "weights go as tensors only to servers that this worker has started, and "
                f"{self._settings.handle.section}.urls names others: set weight_update.method to "
                "disk or collective"
            )
        await self.publish(self._tensor_weights(version, source))

    async def update_weights_from_disk(self, version: int, folder: Path) -> None:
        """The same, by a Hugging Face folder that the servers see.

        Raises: ModelError: it is of another model, or incomplete; nothing has changed then.
            EngineFailed: no server is left.
        """
        if self._config.lora.is_published_alone:
            await self._publish_adapter(version, folder)
            return
        check_weights_folder(str(folder), self._model.shapes_in_folders)
        await self.publish(DiskWeights(version, folder))

    async def _publish_adapter(self, version: int, folder: Path) -> None:
        weights = await asyncio.to_thread(AdapterWeights.read, version, folder, self._config)
        await self.publish(weights)

    async def update_weights_from_group(
        self,
        version: int,
        group_name: str,
        buckets: Sequence[BucketLayout],
        *,
        again: TensorSource,
        give_up: Callable[[], Awaitable[None]],
    ) -> None:
        """The same, by what rank 0 of a group broadcasts meanwhile; see the protocol.

        Servers that are not in the group, or restart, get `again`; servers of others get it by a
        folder in `weight_update.folder`.
        Raises: ModelError: the buckets are not the model's parameters; nothing has changed then.
            EngineFailed: no server is left.
        """
        given = {n: s for b in buckets for n, s in zip(b.names, b.shapes, strict=True)}
        try:
            check_shapes(given, self._model.parameters, "the broadcast weights")
        except ModelError:
            await give_up()
            raise
        late: VersionWeights = self._tensor_weights(version, again)
        if self._settings.servers.urls:
            folder = Path(self._config.weight_update.folder) / f"{self._settings.owner}-{version}"
            late = WrittenWeights(version, folder, self._as_served(again), Path(self._config.path))
        if (stored_names := self._model.stored_names) is not None:
            buckets = [stored_names.describe(layout) for layout in buckets]
        size = self._group_sizes.get(group_name, 0)
        await self.publish(CollectiveWeights(version, group_name, size, buckets, late, give_up))

    @property
    def num_waiting(self) -> int:
        return self.dispatcher.num_waiting

    def stats(self) -> Mapping[str, float]:
        """Counters since start, and the requests and servers of now."""
        num_waiting = self.num_waiting
        for replica in self.replicas:
            replica.busy.note(replica.num_running)
        return {
            **asdict(self._completer.counters),
            **asdict(self.times),
            "busy_s": sum(replica.busy.busy_s for replica in self.replicas),
            "answer_s": sum(replica.busy.answer_s for replica in self.replicas),
            "weight_updates": self.num_updates,
            "running_requests": self._completer.num_running - num_waiting,
            "waiting_requests": num_waiting,
            "occupied_places": sum(replica.num_running for replica in self.replicas),
            "serving_servers": len(self.serving),
            "lost_servers": self.num_losses,
            "server_restarts": sum(max(0, replica.num_starts - 1) for replica in self.replicas),
        }

    def _make_request(
        self, input_ids: Sequence[int], sampling: GenerationConfig, prefix_group: str | None
    ) -> CompletionRequest:
        prompt, model = [int(token) for token in input_ids], self._model
        check_prompt(
            prompt, vocab_size=model.vocab_size, max_context_tokens=self.max_context_tokens
        )
        check_sampling(sampling)
        room = self.max_context_tokens - len(prompt)
        ends = dict.fromkeys((*model.end_token_ids, *sampling.stop_token_ids))
        keeps_few = sampling.top_p < 1 or 0 < sampling.top_k < model.vocab_size
        return CompletionRequest(
            prompt=prompt,
            sampling=sampling,
            max_new_tokens=min(sampling.max_new_tokens, room),
            length_reason="length" if sampling.max_new_tokens <= room else "context",
            # servers may refuse others; the model cannot sample them
            stop_token_ids=tuple(token for token in ends if 0 <= token < model.vocab_size),
            prefix_group=prefix_group,
            is_truncated=sampling.temperature > 0 and keeps_few,
            stops=StopStrings(self.tokenizer, sampling.stop) if sampling.stop else None,
        )

    def _tensor_weights(self, version: int, source: TensorSource) -> TensorWeights:
        bucket_bytes = self._config.weight_update.bucket_bytes
        return TensorWeights(version, self._as_served(source), self._buckets, bucket_bytes)

    def _as_served(self, source: TensorSource) -> TensorSource:
        async def as_served_from() -> Iterable[NamedTensor]:
            return as_served(await source(), self._model.parameters, self._model.stored_names)

        return as_served_from


def _serves_on_cuda(handle: ServersHandle) -> bool:
    """Whether the servers compute on GPUs; of others' servers only the setting tells."""
    device = handle.config.device
    if handle.servers.urls:
        return device == Device.cuda
    return resolved_device(device, torch.cuda.device_count(), "rollout.device") == Device.cuda
