"""Generation by a server: started and owned by this engine, or running already.

    generate ──► Completer ──► Places ──► ServerLife ──► server (HTTP)
                               wait for     watched until
                               a place      it is lost
    adopt ─────► update_server: hold, pause, load, name the version, go on

Consumes: `generate`, weights, `pause`, `resume`. Waits for: a place on the server, its answer, its
start. Unblocked by: answers, and the loss of the server, which ends the worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from areal_sc.config.schema import Device, GenerationConfig, WeightUpdateMethod
from areal_sc.engines.base import PLAIN, Completion, RequestOptions
from areal_sc.engines.partial_answers import hand_over
from areal_sc.engines.request_checks import check_request, check_top
from areal_sc.engines.servers.adapters import (
    AdapterFolders,
    AdapterWeights,
    NamedAdapters,
)
from areal_sc.engines.servers.completion import Completer
from areal_sc.engines.servers.handle import ServersHandle
from areal_sc.engines.servers.model import (
    ServedModel,
    as_served,
    check_weights_folder,
)
from areal_sc.engines.servers.pictures import PictureSender
from areal_sc.engines.servers.requests import CompletionRequest
from areal_sc.engines.servers.server import ServerLife
from areal_sc.engines.servers.weights import (
    CollectiveWeights,
    DiskWeights,
    SharedBuckets,
    TensorWeights,
    UpdateTimes,
    VersionWeights,
    WrittenWeights,
    update_server,
)
from areal_sc.engines.stop_strings import StopStrings
from areal_sc.errors import (
    ConfigError,
    EngineFailed,
    ModelError,
    NeverWorks,
    PeerLost,
    RpcTimeout,
    WorkerError,
)
from areal_sc.sizing.machine import resolved_device
from areal_sc.sizing.routed_experts import routes_field
from areal_sc.token_fields import ROUTED_EXPERTS
from areal_sc.weights.group import NamedTensor
from areal_sc.weights.published import BucketLayout, WeightGroup, check_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from areal_sc.engines.base import OnTokens, TensorSource

logger = logging.getLogger(__name__)


class ServerEngine:
    """`GenerationEngine` with one server of a kind.

    Args:
        handle: the settings, of one worker.
        log_folder: where the log of a server that is started goes.
        name: of the worker, in the log's name.

    Attributes:
        server: the server.
        times: sums over weight updates.
        num_updates: weight updates that were done.
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
        self._routes = routes_field(config).get(ROUTED_EXPERTS)
        is_disk = config.weight_update.method == WeightUpdateMethod.disk
        takes_files = is_disk or config.lora.is_published_alone
        is_known = self._model.stored_names is not None or not self._model.parameters
        if not (is_known or takes_files):
            raise ConfigError(
                f"weight_update.method: servers know weights by their names in files, and those of "
                f"{config.path} are no parts of the weights in memory, under names that "
                "transformers knows: choose disk"
            )
        self.tokenizer, self.processor = self._model.tokenizer, self._model.processor
        self._pictures = None
        if self.processor is not None:
            if self.processor.model_type not in handle.picture_families:
                raise ModelError(
                    f"model folder {config.path}: {self.processor.model_type} reads pictures, and "
                    f"{handle.name} is given them for {', '.join(handle.picture_families)}; set "
                    "rollout.engine=local"
                )
            self._pictures = PictureSender(self.processor, self.tokenizer)
        self.end_token_ids = self._model.end_token_ids
        self.max_context_tokens = config.max_context_tokens
        self._config = config
        self._buckets = SharedBuckets()
        self._adapters = AdapterFolders(log_folder / f"{name}-adapters", config)
        self._adapters.keep_only(None)  # of earlier lives
        self._named = NamedAdapters(self._model, config.lora, lambda: self.server.client)
        self.is_cuda = _serves_on_cuda(handle)
        self.server = ServerLife(handle, log_folder, name, is_cuda=self.is_cuda)
        self.times = UpdateTimes()
        self.num_updates = 0
        self._handle = handle
        self._owner = name
        self._completer = Completer(self.server, self._model.vocab_size)
        self._control = asyncio.Lock()  # one update, pause or resume at a time
        self._is_paused = False

    @property
    def version(self) -> int:
        """Policy version of the server's weights."""
        return self.server.version

    async def start(self) -> None:
        """Starts the server, or connects to it, and returns when it serves.

        To be called in the thread whose end shall end the server.
        Raises: ConfigError, ModelError, WorkerStartError: what is wrong, and what to change; no
            server is left running then.
        """
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            await self.server.start()
            if self.version != 0:  # somebody else's, with weights of another run
                first = DiskWeights(0, Path(self._config.path))
                await update_server(
                    self.server, first, UpdateTimes(), self._config, stays_paused=False
                )
            undo.pop_all()
        self.server.open()

    async def wait_until_lost(self) -> str:
        """Returns why the server is lost, when all of it has ended."""
        return await self.server.wait_until_lost()

    async def close(self) -> None:
        """Ends the server that was started; pending and later calls raise WorkerError."""
        await self.server.close(WorkerError(f"the {self._handle.name} engine is closed"))
        await self._completer.close()
        self._buckets.close()
        self._adapters.keep_only(None)

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: GenerationConfig,
        options: RequestOptions = PLAIN,
        *,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Samples one completion; see the protocol. Cancelling the task ends it on its server.

        It ends at a stop token or string of `sampling`, at the tokenizer's EOS and at those of the
        model's generation config; what ends it is part of it. With top_p below 1, at most as many
        tokens are kept as the server's limit for truncated distributions allows (4096, unless set).
        Raises: WorkflowError: the prompt leaves no room in the context, is empty, or holds a token
            outside the vocabulary; or see `PictureSender.sent`. NeverWorks: the model reads no
            pictures, or the server makes other tokens of them. ConfigError: an impossible sampling
            setting, or the server does not give what is asked for. ModelError: it cannot serve the
            adapter. WorkerError: the server is lost, or the engine is closed.
        """
        request = self._make_request(input_ids, sampling)
        if options.pictures:
            if self._pictures is None:
                raise NeverWorks("the prompt has pictures, and the model reads none")
            if options.prompt_logprobs:  # at the places of a picture, a server may look for any
                raise ConfigError("prompt_logprobs: expected false with pictures, got true")
            sent = self._pictures.sent
            request.pictures = await asyncio.to_thread(sent, request.prompt, options.pictures)
        check_top(options.top_k_logprobs, len(request.prompt) + request.max_new_tokens)
        request.asks_prompt, request.num_top = options.prompt_logprobs, options.top_k_logprobs
        if on_tokens is not None and (request.asks_prompt or request.num_top):
            raise ConfigError("prompt_logprobs, top_k_logprobs: expected none with on_tokens")
        if not (adapter := options.adapter):
            return await self._complete(request, on_tokens)
        if not (self._config.lora.is_named and self.server.is_own):
            raise ConfigError(
                f"adapter: expected none with rollout.engine={self._config.engine}, whose servers "
                "serve several only if the run starts them with actor.lora.places above 1, got "
                f"{adapter}"
            )
        try:
            async with self._named.using(adapter) as request.adapter:
                return await self._complete(request, on_tokens)
        except EngineFailed as error:
            if self.server.is_down:
                raise
            raise ModelError(f"adapter {adapter}: {error}") from error

    async def _complete(self, request: CompletionRequest, on_tokens: OnTokens | None) -> Completion:
        if on_tokens is None:
            return await self._completer.complete(request)

        async def complete(take: OnTokens) -> Completion:
            request.on_tokens = take
            return await self._completer.complete(request)

        return await hand_over(on_tokens, complete)

    async def adopt(self, weights: VersionWeights) -> None:
        """Gives the server these weights.

        Raises: as `update_server`. What getting the weights raises; nothing has changed then.
        """
        async with self._control:
            started = time.perf_counter()
            async with weights.opened():
                self.times.update_open_s += time.perf_counter() - started
                await update_server(
                    self.server, weights, self.times, self._config, stays_paused=self._is_paused
                )
            self.num_updates += 1

    async def pause(self) -> None:
        """Returns when the server generates nothing: its requests are held, or it is lost."""
        async with self._control:
            self._is_paused = True
            with suppress(EngineFailed), self.server.needed_for("a pause"):
                await self.server.pause()

    async def resume(self) -> None:
        """The server goes on, unless it sleeps, until it has the next weights, or is lost."""
        async with self._control:
            self._is_paused = False
            if self.server.is_asleep:
                return
            with suppress(EngineFailed), self.server.needed_for("going on after a pause"):
                await self.server.resume()
                self.server.open()

    async def sleep(self) -> None:
        """Returns when the server has no memory of the device; it takes it for the next weights."""
        async with self._control:
            with self.server.needed_for("giving its memory up"):
                await self.server.sleep()

    async def join_group(self, group: WeightGroup, first_rank: int) -> None:
        """The server becomes ranks of a weight group, from `first_rank` on.

        Waits for all ranks of the group, so the others must join at the same time.
        Raises: EngineFailed, TransportError: it did not join; the group is of no use then.
        """
        client = self.server.client
        await client.join_group(group, first_rank)
        client.groups.add(group.name)

    async def leave_group(self, name: str) -> None:
        if self.has_whole_group(name):
            client = self.server.client
            client.groups.discard(name)
            try:
                await client.leave_group(name)
            except (EngineFailed, PeerLost, RpcTimeout) as error:
                logger.warning("server=%s group=%s %s", client.url, name, error)

    def has_whole_group(self, name: str) -> bool:
        """Whether the server is in the weight group."""
        return not self.server.is_down and name in self.server.client.groups

    def count_ranks(self) -> int:
        return 0 if self.server.is_down else self.server.client.abilities.tp_size

    async def update_weights(self, version: int, source: TensorSource) -> None:
        """Replaces all weights by tensors; running requests go on as `on_weight_update` says.

        A server of others gets them by a folder in `weight_update.folder`, which goes again.
        Raises: ModelError: names or sizes do not fit; the old weights and version stay.
            EngineFailed: it is lost.
        """
        if self._config.lora.is_published_alone:
            folder = await asyncio.to_thread(self._adapters.write, version, await source())
            await self._adopt_adapter(version, folder)
            await asyncio.to_thread(self._adapters.keep_only, folder)
            return
        await self.adopt(self._given_weights(version, source))

    async def update_weights_from_disk(self, version: int, folder: Path) -> None:
        """The same, by a Hugging Face folder that the server sees.

        Raises: ModelError: it is of another model, or incomplete; nothing has changed then.
            EngineFailed: the server is lost.
        """
        if self._config.lora.is_published_alone:
            await self._adopt_adapter(version, folder)
            return
        check_weights_folder(str(folder), self._model.shapes_in_folders)
        await self.adopt(DiskWeights(version, folder))

    async def _adopt_adapter(self, version: int, folder: Path) -> None:
        weights = await asyncio.to_thread(AdapterWeights.read, version, folder, self._config)
        await self.adopt(weights)

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

        A server that is not in the group, or does not get the broadcast whole, gets `again`, as by
        `update_weights`.
        Raises: ModelError: the buckets are not the model's parameters; nothing has changed then.
            EngineFailed: the server is lost.
        """
        given = {n: s for b in buckets for n, s in zip(b.names, b.shapes, strict=True)}
        try:
            check_shapes(given, self._model.parameters, "the broadcast weights")
        except ModelError:
            await give_up()
            raise
        if (stored_names := self._model.stored_names) is not None:
            buckets = [stored_names.describe(layout) for layout in buckets]
        late = self._given_weights(version, again)
        await self.adopt(CollectiveWeights(version, group_name, buckets, late, give_up))

    @property
    def num_waiting(self) -> int:
        return self.server.places.num_waiting

    def stats(self) -> Mapping[str, float]:
        """Counters since start, and the requests and servers of now."""
        places = self.server.places
        places.busy.note_running(places.num_running)
        return {
            **asdict(self._completer.counters),
            **asdict(self.times),
            "busy_s": places.busy.busy_s,
            "answer_s": places.busy.answer_s,
            "weight_updates": self.num_updates,
            "running_requests": self._completer.num_running - places.num_waiting,
            "waiting_requests": places.num_waiting,
            "occupied_places": places.num_running,
        }

    def _make_request(
        self, input_ids: Sequence[int], sampling: GenerationConfig
    ) -> CompletionRequest:
        prompt, model = [int(token) for token in input_ids], self._model
        max_new_tokens, reason = check_request(
            prompt,
            sampling,
            vocab_size=model.vocab_size,
            max_context_tokens=self.max_context_tokens,
        )
        ends = dict.fromkeys((*model.end_token_ids, *sampling.stop_token_ids))
        keeps_few = sampling.top_p < 1 or 0 < sampling.top_k < model.vocab_size
        return CompletionRequest(
            prompt=prompt,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            length_reason=reason,
            # servers may refuse others; the model cannot sample them
            stop_token_ids=tuple(token for token in ends if 0 <= token < model.vocab_size),
            is_truncated=sampling.temperature > 0 and keeps_few,
            stops=StopStrings(self.tokenizer, sampling.stop) if sampling.stop else None,
            routes=None
            if self._routes is None
            else np.zeros((len(prompt) + max_new_tokens, *self._routes.sizes), self._routes.dtype),
        )

    def _given_weights(self, version: int, source: TensorSource) -> VersionWeights:
        """Tensors: they go to our own server in shared memory, to one of others by a folder."""

        async def served() -> Iterable[NamedTensor]:
            return as_served(await source(), self._model.parameters, self._model.stored_names)

        update = self._config.weight_update
        if self.server.is_own:
            return TensorWeights(version, served, self._buckets, update.bucket_bytes)
        folder = Path(update.folder) / f"{self._owner}-{version}"
        return WrittenWeights(version, folder, served, Path(self._config.path))


def _serves_on_cuda(handle: ServersHandle) -> bool:
    """Whether the server computes on GPUs; of one of others only the setting tells."""
    device = handle.config.device
    if handle.servers.urls:
        return device == Device.cuda
    return resolved_device(device, torch.cuda.device_count(), "rollout.device") == Device.cuda
