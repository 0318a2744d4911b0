"""vLLM's HTTP interface."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from areal_sc.engines.servers.client import PartReader, ServerAbilities, ServerClient
from areal_sc.engines.servers.command_line import check_version
from areal_sc.engines.servers.requests import AnswerPart, CompletionRequest, version_number
from areal_sc.engines.servers.vllm.answers import (
    StreamReader,
    read_answer,
    read_logprobs,
    read_prompt_logprobs,
    request_body,
    with_asked,
)
from areal_sc.engines.servers.vllm.arguments import OLDEST_VERSION
from areal_sc.errors import ConfigError, EngineFailed, ProtocolError

if TYPE_CHECKING:
    from areal_sc.weights.published import BucketLayout, WeightGroup

_ID_PREFIX = "generate-tokens-"
"""vLLM puts it before the ids of requests to that route."""

_PROBE_TOKENS = [0, 1, 2]
_NO_LIMIT = 1 << 31
"""A number of tokens that no truncated distribution reaches."""


class VLLMClient(ServerClient):
    """A vLLM server. One that this process has started has `areal_sc_in_vllm` in its workers."""

    section: ClassVar[str] = "vllm"
    answers_at: ClassVar[str] = "/inference/v1/generate"
    adapter_field: ClassVar[str] = "model"
    stream_fields: ClassVar[Mapping[str, Any]] = {
        "stream": True,
        "stream_options": {"include_usage": True},
    }

    async def probe(self, *, timeout_s: float) -> None:
        # The core answers this between two steps. Workers are not asked: each question would keep
        # an idle one spinning for a second. One that hangs holds up the core in the next step.
        await self.request("GET", "/is_paused", None, timeout_s)

    async def ask_abilities(self) -> ServerAbilities:
        """Generates one token.

        Raises: ConfigError: the server is too old, or its log-probabilities are not those of the
            distribution that it samples from.
        """
        told = await self._get("/version")
        version = str(told.get("version", ""))
        check_version(version, OLDEST_VERSION, self.url, "vLLM")
        models = await self._get("/v1/models")
        ranks = await self._get("/get_world_size?include_dp=false")
        await self._check_logprobs()
        try:
            return ServerAbilities(
                version=version,
                model_type="",  # it does not tell
                architectures=(),
                max_context_tokens=int(models["data"][0]["max_model_len"]),
                tp_size=int(ranks["world_size"]),
                has_version_spans=True,
                max_support=_NO_LIMIT,
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ProtocolError(f"{self.url} does not tell what it can do: {error!r}") from error

    async def served_weights(self) -> tuple[int | None, str]:
        weights, models = await self._get("/weight_info"), await self._get("/v1/models")
        try:
            return version_number(weights["weight_version"]), str(models["data"][0]["root"])
        except (KeyError, IndexError, TypeError) as error:
            raise ProtocolError(f"{self.url} does not tell what it serves: {error!r}") from error

    def _make_body(self, request: CompletionRequest, max_support: int | None) -> dict[str, Any]:
        return request_body(request)

    def _read_answer(self, answer: dict[str, Any], request: CompletionRequest) -> AnswerPart:
        return with_asked(read_answer(answer), answer, request)

    def _part_reader(self, request: CompletionRequest) -> PartReader:
        return StreamReader().read

    async def abort(self, request_id: str) -> None:
        await self._post("/abort_requests", {"request_ids": [_ID_PREFIX + request_id]})

    async def abort_all(self) -> None:
        await self._post("/abort_requests", {})

    async def pause(self, *, holds_requests: bool) -> None:
        await self._post(f"/pause?mode={'keep' if holds_requests else 'abort'}")
        # Drops the KV cache of held requests, too, so that it is recomputed.
        answer = await self._post("/reset_prefix_cache?reset_running_requests=true")
        if answer.get("success") is not True:
            raise EngineFailed(f"{self.url} did not drop its KV cache")

    async def resume(self) -> None:
        await self._post("/resume")

    async def sleep(self) -> None:
        await self._change_memory("/sleep?level=2")  # without a copy of the weights

    async def take_weights_memory(self) -> None:
        await self._change_memory("/wake_up?tags=weights")

    async def take_cache_memory(self) -> None:
        await self._change_memory("/wake_up?tags=kv_cache")

    async def _change_memory(self, path: str) -> None:
        await self.request("POST", path, None, self._step_timeout_s)

    async def set_version(self, version: int) -> None:
        await self._post("/update_weight_version", {"new_version": str(version)})

    async def load_from_disk(self, folder: str) -> None:
        await self._update("reload_weights", weights_path=folder)

    async def load_adapter(self, name: str, folder: str) -> None:
        await self.command("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    async def unload_adapter(self, name: str) -> None:
        await self.command("/v1/unload_lora_adapter", {"lora_name": name})

    async def prompt_logprobs(self, token_ids: list[int], adapter: str) -> list[float]:
        sampling = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        body = {"model": adapter or None, "token_ids": token_ids, "sampling_params": sampling}
        answer = await self.request("POST", self.answers_at, body, self._step_timeout_s)
        return read_prompt_logprobs(answer, token_ids)

    async def begin_update(self) -> None:
        await self._update("areal_sc_begin_update")

    async def end_update(self) -> None:
        await self._update("areal_sc_end_update")

    async def load_tensors(
        self, flat: torch.Tensor, layout: BucketLayout, *, drops_cache: bool
    ) -> None:
        storage = flat.untyped_storage()
        for _ in range(self.abilities.tp_size):  # each rank gives one reference back
            storage._shared_incref()  # type: ignore[no-untyped-call]
        manager, handle, num_bytes = storage._share_filename_cpu_()
        memory = [manager.decode(), handle.decode(), num_bytes]
        given = {"memory": memory, "size": flat.nbytes, "layout": _plain(layout)}
        await self._update("areal_sc_load_shared", arguments=json.dumps(given))

    async def join_group(self, group: WeightGroup, first_rank: int) -> None:
        plain = [getattr(group, name) for name in group.__struct_fields__]
        given = {"group": plain, "first_rank": first_rank, "timeout_s": self._step_timeout_s}
        await self._update("areal_sc_join_group", arguments=json.dumps(given))

    async def leave_group(self, name: str) -> None:
        await self._update("areal_sc_leave_group", name=name)

    async def receive_broadcast(
        self, group_name: str, layout: BucketLayout, *, drops_cache: bool
    ) -> None:
        given = {"group": group_name, "layout": _plain(layout)}
        await self._update("areal_sc_receive", arguments=json.dumps(given))

    async def _check_logprobs(self) -> None:
        """The one token that top_k=1 leaves is certain."""
        sampling = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0}
        sampling |= {"detokenize": False, "ignore_eos": True}
        body = {"token_ids": _PROBE_TOKENS, "sampling_params": sampling}
        # nobody has named the weights of a server that has just started
        if read_logprobs(await self._post(self.answers_at, body)) != [0.0]:
            raise ConfigError(
                f"{self.url} gives log-probabilities of another distribution than it samples from: "
                "start it with --logprobs-mode processed_logprobs"
            )

    async def _update(self, method: str, **arguments: str) -> None:
        """Calls a method of all ranks' workers."""
        body = {"method": method, "kwargs": arguments}
        await self.request("POST", "/collective_rpc", body, self._step_timeout_s)


def _plain(layout: BucketLayout) -> list[Any]:
    return [layout.names, layout.dtypes, layout.shapes]
