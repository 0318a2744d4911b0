"""Embedded generation: a Hugging Face model in this process, on a CPU or one GPU.

Here requests are checked and weights come in; `GenerationThread` computes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from areal_sc.config.schema import GenerationConfig, OnWeightUpdate, RolloutConfig
from areal_sc.engines.base import PLAIN, Completion, RequestOptions
from areal_sc.engines.held_adapters import HeldAdapters
from areal_sc.engines.local.adapters import LoadedAdapter
from areal_sc.engines.local.generator import SlotGenerator
from areal_sc.engines.local.handle import adapter_room
from areal_sc.engines.local.model import (
    LocalModel,
    check_context,
    load_folder,
    read_weights,
)
from areal_sc.engines.local.self_check import check_generation
from areal_sc.engines.local.slots import SlotRequest, SlotTable
from areal_sc.engines.local.thread import GenerationThread
from areal_sc.engines.partial_answers import hand_over
from areal_sc.engines.picture_processor import picture_processor
from areal_sc.engines.request_checks import check_request, check_top
from areal_sc.engines.stop_strings import StopStrings
from areal_sc.engines.tokenizer import end_token_ids
from areal_sc.engines.training.adapters.adapter_files import read_layers
from areal_sc.errors import EngineFailed, ModelError, NeverWorks
from areal_sc.sizing.adapter_folder import ADAPTER_WEIGHTS
from areal_sc.sizing.machine import resolved_device
from areal_sc.sizing.model_folder import check_model_folder
from areal_sc.weights.group import NamedTensor, WeightReceiver
from areal_sc.weights.published import BucketLayout, WeightGroup

if TYPE_CHECKING:
    from areal_sc.engines.base import OnTokens, TensorSource

logger = logging.getLogger(__name__)

_MAX_ASKED_LOGITS = 1 << 26
"""Of the prompts whose log-probabilities one pass tells: more are told by several passes."""

UPDATE_TIMES = ("update_open_s", "update_drain_s", "update_load_s", "update_bytes")
"""Sums over weight updates: getting the weights, waiting for a step or for running requests to end,
replacing, and the bytes replaced."""


class LocalEngine(GenerationThread):
    """`GenerationEngine` over an unmodified causal language model.

    What a request samples depends on the seed, on its place among all `generate` calls and on the
    weights, not on what runs beside it (up to rounding). Each life of a worker has another seed.
    """

    def __init__(
        self,
        config: RolloutConfig,
        loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None,
    ) -> None:
        """Loads model and tokenizer from `config.path`, unless they are given.

        A weight update changes the parameters of a given model, too.

        Raises: ModelError: the folder or the model cannot be used. ConfigError: an impossible
            limit or device.
        """
        if loaded is None:
            device = resolved_device(config.device, torch.cuda.device_count(), "rollout.device")
            loaded = load_folder(
                config.path, torch.device(device), config.dtype, is_drawn=config.random_init
            )
        model, self.tokenizer = loaded
        self.processor = picture_processor(config.path, self.tokenizer)
        check_context(model, config.max_context_tokens)
        local_model = LocalModel(
            model,
            has_float32_logits=config.float32_output_layer,
            records_routes=config.routing_replay,
            processor=self.processor,
        )
        self._pictures = local_model.pictures
        pass_tokens = config.max_prefill_tokens + config.max_running_sequences
        check_generation(model, longest_input=max(config.max_context_tokens, pass_tokens))
        self.max_context_tokens = config.max_context_tokens
        self._config = config
        self._vocab_size = local_model.vocab_size
        self.end_token_ids = end_token_ids(self.tokenizer, model.generation_config, model.config)
        self._request_ids = itertools.count()
        self._receiver: WeightReceiver | None = None
        self._update_times = dict.fromkeys(UPDATE_TIMES, 0.0)
        self._adaptable = {
            name: (it.out_features, it.in_features) for name, it in local_model.adaptable.items()
        }
        self._adapters = HeldAdapters(
            adapter_room(sum(parameter.nbytes for parameter in model.parameters())),
            self._adapter_bytes,
            self._load_adapter,
            self._unload_adapter,
        )
        table = SlotTable(
            config.max_running_sequences,
            config.max_context_tokens,
            config.max_prefill_tokens,
            config.seed,
            local_model.routers.sizes.field if local_model.routers else None,
            max_asked_tokens=max(1, _MAX_ASKED_LOGITS // local_model.vocab_size),
        )
        generator = SlotGenerator(local_model, table, config.max_context_tokens)
        super().__init__(generator, config.num_threads, config.step_timeout_s)

    @property
    def version(self) -> int:
        return self._generator.version

    async def close(self) -> None:
        """Ends the thread after the step in progress; pending calls raise WorkerError."""
        if self._receiver is not None:
            self._receiver.close()
        await super().close()

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: GenerationConfig,
        options: RequestOptions = PLAIN,
        *,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Samples one completion; see the protocol. Cancelling the task frees its place at once.

        It ends at a stop token or string of `sampling`, at the tokenizer's EOS and at those of the
        model's generation config; what ends it is part of it.
        Raises: WorkflowError: the prompt leaves no room in the context, is empty, or holds a token
            outside the vocabulary. ConfigError: an impossible sampling setting. WorkerError: the
            engine has failed or is closed. ModelError: the adapter cannot be served.
        """
        request = self._make_request(input_ids, sampling)
        if options.prefix_group:  # the entries of a prompt differ by adapter
            request.prefix_group = f"{options.adapter}\0{options.prefix_group}"
        check_top(options.top_k_logprobs, request.max_length)
        request.num_top = options.top_k_logprobs
        if options.prompt_logprobs:
            request.prompt_logprobs = np.full(len(input_ids), np.nan, dtype=np.float32)
            request.prompt_top = [[] for _ in input_ids if request.num_top]
        if options.pictures:
            if self._pictures is None:
                raise NeverWorks("the prompt has pictures, and the model reads none")
            tokens = torch.from_numpy(request.prompt)
            request.pictures = self._pictures.of_row(tokens, options.pictures)
        async with AsyncExitStack() as held:
            if options.adapter:
                using = self._adapters.using(options.adapter)
                request.adapter = await held.enter_async_context(using)
            if on_tokens is None:
                return await self.complete(request)
            return await hand_over(on_tokens, partial(self.complete, request))

    async def _adapter_bytes(self, folder: str) -> int:
        try:
            return (Path(folder) / ADAPTER_WEIGHTS).stat().st_size
        except OSError as error:
            raise ModelError(f"adapter {folder}: no {ADAPTER_WEIGHTS}: {error.strerror}") from error

    async def _load_adapter(self, folder: str) -> LoadedAdapter:
        dtype = getattr(torch, self._config.dtype)
        read = partial(read_layers, Path(folder), self._adaptable, dtype)
        return LoadedAdapter(folder, await asyncio.to_thread(read))

    async def _unload_adapter(self, adapter: LoadedAdapter) -> None:
        """Its memory is free as soon as the generator computes with others."""

    async def sleep(self) -> None:
        """Drops weights and KV cache, whose memory others get; see the protocol."""
        await self.call(self._generator.sleep)

    async def update_weights(self, version: int, source: TensorSource) -> None:
        """Replaces all weights between two steps.

        With `on_weight_update: interrupt`, running requests go on: their cached keys and values
        are computed again, at most `max_prefill_tokens` a step, and each samples its next token
        only then. With `finish_running` they end first, and no request starts meanwhile.
        Raises: ModelError: names or shapes do not fit; the old weights and version stay, and an
            engine that is asleep stays so.
        """
        started = time.perf_counter()
        await self._replace(version, list(await source()), started)

    async def update_weights_from_disk(self, version: int, folder: Path) -> None:
        """The same, by the safetensors files of a Hugging Face folder."""
        started = time.perf_counter()
        check_model_folder(folder)
        names = self._generator.weight_names
        tensors = await asyncio.to_thread(read_weights, folder, names)
        await self._replace(version, tensors, started)

    async def update_weights_from_group(
        self,
        version: int,
        group_name: str,
        buckets: Sequence[BucketLayout],
        *,
        again: TensorSource,
        give_up: Callable[[], Awaitable[None]],
    ) -> None:
        """The same, by what rank 0 of the group broadcasts; requests go on meanwhile."""
        started = time.perf_counter()
        receiver = self._receiver
        try:
            if receiver is None or receiver.name != group_name:
                raise EngineFailed(f"not a rank of weight group {group_name}")
            tensors = await asyncio.to_thread(_receive_all, receiver, buckets)
        except EngineFailed as error:
            logger.warning("version=%d is read another way: %s", version, error)
            await give_up()
            await self.leave_group(group_name)
            tensors = list(await again())
        await self._replace(version, tensors, started)

    async def join_group(self, group: WeightGroup, first_rank: int) -> None:
        """Becomes one rank of a weight group. Raises: EngineFailed: not all met in time."""
        timeout_s = self._config.weight_update.step_timeout_s
        self._receiver = await asyncio.to_thread(
            lambda: WeightReceiver(group, first_rank, self._generator.device, timeout_s)
        )

    async def leave_group(self, name: str) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            await asyncio.to_thread(receiver.close)

    def has_whole_group(self, name: str) -> bool:
        return self._receiver is not None and self._receiver.name == name

    def count_ranks(self) -> int:
        return 1

    @property
    def is_cuda(self) -> bool:
        return self._generator.device.type == "cuda"

    async def _replace(self, version: int, tensors: Sequence[NamedTensor], started: float) -> None:
        at_hand = time.perf_counter()

        def replace() -> None:
            began = time.perf_counter()
            self._generator.update_weights(version, tensors)
            self._update_times["update_load_s"] += time.perf_counter() - began
            self._update_times["update_drain_s"] += began - at_hand

        finish_running = self._config.on_weight_update == OnWeightUpdate.finish_running
        await self.call(replace, when_empty=finish_running)
        self._update_times["update_open_s"] += at_hand - started
        self._update_times["update_bytes"] += sum(tensor.nbytes for _, tensor in tensors)

    @property
    def num_waiting(self) -> int:
        return len(self._generator.table.waiting)

    def stats(self) -> Mapping[str, float]:
        """Counters since start, and the requests of now."""
        return {
            **self._generator.counters,
            **self._update_times,
            "update_stall_s": self._update_times["update_load_s"],
            "running_requests": self._generator.table.num_running,
            "waiting_requests": self.num_waiting,
        }

    def _make_request(self, input_ids: Sequence[int], sampling: GenerationConfig) -> SlotRequest:
        num_tokens, reason = check_request(
            input_ids,
            sampling,
            vocab_size=self._vocab_size,
            max_context_tokens=self.max_context_tokens,
        )
        return SlotRequest(
            request_id=next(self._request_ids),
            prompt=np.asarray(input_ids, dtype=np.int64),
            max_length=len(input_ids) + num_tokens,
            length_reason=reason,
            min_length=len(input_ids) + sampling.min_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=(*self.end_token_ids, *sampling.stop_token_ids),
            stops=StopStrings(self.tokenizer, sampling.stop) if sampling.stop else None,
        )


def _receive_all(receiver: WeightReceiver, buckets: Sequence[BucketLayout]) -> list[NamedTensor]:
    return [named for layout in buckets for named in receiver.receive(layout)]
