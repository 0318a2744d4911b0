"""SGLang's HTTP interface."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import multiprocessing

from areal_sc.engines.servers.client import PartReader, ServerAbilities, ServerClient, reason_of
from areal_sc.engines.servers.command_line import check_version
from areal_sc.engines.servers.requests import AnswerPart, CompletionRequest, version_number
from areal_sc.engines.servers.sglang.answers import (
    read_answer,
    read_part,
    read_prompt_logprobs,
    request_body,
    with_asked,
)
from areal_sc.engines.servers.sglang.arguments import NEWER_VERSION, OLDEST_VERSION
from areal_sc.errors import EngineFailed, ProtocolError

if TYPE_CHECKING:
    from areal_sc.weights.published import BucketLayout, WeightGroup

_PROBE_TOKEN = 0
_IDLE_POLL_S = 0.1


class SGLangClient(ServerClient):
    """An SGLang server."""

    section: ClassVar[str] = "sglang"
    answers_at: ClassVar[str] = "/generate"
    adapter_field: ClassVar[str] = "lora_path"
    stream_fields: ClassVar[Mapping[str, Any]] = {"stream": True}
    _has_update_session = True

    async def probe(self, *, timeout_s: float) -> None:
        await self._server_info(timeout_s)

    async def ask_abilities(self) -> ServerAbilities:
        """Generates a token. Raises: ConfigError: the server is too old."""
        info = await self._server_info(self._control_timeout_s)
        version = str(info.get("version", ""))
        is_new = check_version(version, OLDEST_VERSION, self.url, "SGLang") >= NEWER_VERSION
        self._has_update_session = is_new
        model = await self._get("/model_info")
        plain = await self._post("/generate", _probe())
        try:
            return ServerAbilities(
                version=version,
                model_type=str(model.get("model_type") or ""),
                architectures=tuple(model.get("architectures") or ()),
                max_context_tokens=int(info["max_req_input_len"]),
                tp_size=int(info["tp_size"]),
                has_version_spans="weight_versions" in plain["meta_info"],
                max_support=int(info["sampling_mask_max_tokens"]) if is_new else 0,
                tells_routes=bool(info.get("enable_return_routed_experts")),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"{self.url} does not tell what it can do: {error!r}") from error

    async def served_weights(self) -> tuple[int | None, str]:
        info = await self._get("/model_info")
        return version_number(info.get("weight_version")), str(info.get("model_path"))

    def _make_body(self, request: CompletionRequest, max_support: int | None) -> dict[str, Any]:
        return request_body(request, max_support)

    def _read_answer(self, answer: dict[str, Any], request: CompletionRequest) -> AnswerPart:
        part = read_answer(answer, is_truncated=request.is_truncated)
        return with_asked(part, answer, request)

    def _part_reader(self, request: CompletionRequest) -> PartReader:
        def read(answer: dict[str, Any], num_known: int) -> AnswerPart:
            part = read_part(answer, num_known, is_truncated=request.is_truncated)
            refused = (answer["meta_info"].get("finish_reason") or {}).get("status_code")
            if refused is not None:
                raise self.refusal(self.answers_at, refused, part.reason.encode())
            if num_known:  # of the prompt all parts tell the same
                part = replace(part, num_prompt_tokens=0, num_cached_tokens=0)
            return part

        return read

    async def abort(self, request_id: str) -> None:
        await self._post("/abort_request", {"rid": request_id})

    async def abort_all(self) -> None:
        await self._post("/abort_request", {"abort_all": True})

    async def pause(self, *, holds_requests: bool) -> None:
        # retract drops the KV cache of held requests, so that it is recomputed
        await self._post("/pause_generation", {"mode": "retract" if holds_requests else "abort"})

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def sleep(self) -> None:
        # The scheduler would end if it still had a request, which it then refuses to flush.
        for _ in range(math.ceil(self._control_timeout_s / _IDLE_POLL_S)):
            status, _ = await self.send("POST", "/flush_cache", {}, self._control_timeout_s)
            if status == HTTPStatus.OK:
                return await self._change_memory("release", "kv_cache", "weights")
            await asyncio.sleep(_IDLE_POLL_S)
        raise EngineFailed(f"{self.url} still had requests after {self._control_timeout_s:g} s")

    async def take_weights_memory(self) -> None:
        await self._change_memory("resume", "weights")

    async def take_cache_memory(self) -> None:
        await self._change_memory("resume", "kv_cache")

    async def _change_memory(self, verb: str, *tags: str) -> None:
        await self.command(f"/{verb}_memory_occupation", {"tags": list(tags)})

    async def set_version(self, version: int) -> None:
        # by default it would abort all requests
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._update("/update_weight_version", body)

    async def load_from_disk(self, folder: str) -> None:
        body = {"model_path": folder, "load_format": "auto", "flush_cache": True}
        await self._update("/update_weights_from_disk", body)

    async def load_adapter(self, name: str, folder: str) -> None:
        await self._update("/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    async def unload_adapter(self, name: str) -> None:
        await self._update("/unload_lora_adapter", {"lora_name": name})

    async def prompt_logprobs(self, token_ids: list[int], adapter: str) -> list[float]:
        body = _probe(input_ids=token_ids, logprob_start_len=0, lora_path=adapter or None)
        answer = await self.request("POST", "/generate", body, self._step_timeout_s)
        return read_prompt_logprobs(answer, len(token_ids))

    async def begin_update(self) -> None:
        if self._has_update_session:
            await self._update("/begin_weight_update", {})

    async def end_update(self) -> None:
        if self._has_update_session:
            await self._update("/end_weight_update", {})

    async def load_tensors(
        self, flat: torch.Tensor, layout: BucketLayout, *, drops_cache: bool
    ) -> None:
        ranks = range(self.abilities.tp_size)
        body = {
            "serialized_named_tensors": [_pickle(flat, layout) for _ in ranks],
            "load_format": "flattened_bucket",
            "flush_cache": drops_cache,
        }
        await self._update("/update_weights_from_tensor", body)

    async def join_group(self, group: WeightGroup, first_rank: int) -> None:
        body = {
            "group_name": group.name,
            "master_address": group.master_address,
            "master_port": group.master_port,
            "world_size": group.world_size,
            "rank_offset": first_rank,
            "backend": group.backend,
        }
        await self._update("/init_weights_update_group", body)

    async def leave_group(self, name: str) -> None:
        body = {"group_name": name}
        await self._update("/destroy_weights_update_group", body)

    async def receive_broadcast(
        self, group_name: str, layout: BucketLayout, *, drops_cache: bool
    ) -> None:
        body = {
            "load_format": "flattened_bucket",
            "group_name": group_name,
            "names": list(layout.names),
            "dtypes": list(layout.dtypes),
            "shapes": [list(shape) for shape in layout.shapes],
            "flush_cache": drops_cache,
        }
        await self._update("/update_weights_from_distributed", body)

    async def _server_info(self, timeout_s: float) -> dict[str, Any]:
        """The server's arguments and limits. Its scheduler answers this, also while paused."""
        return await self.request("GET", "/server_info", None, timeout_s)

    async def _update(self, path: str, body: Mapping[str, Any]) -> None:
        answer = await self.request("POST", path, body, self._step_timeout_s)
        if answer.get("success") is not True:
            raise EngineFailed(f"{self.url}{path} did not succeed: {reason_of(answer)}")


def _probe(**more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 1, "temperature": 1.0, **more.pop("sampling_params", {})}
    return {
        "input_ids": [_PROBE_TOKEN],
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        **more,
    }


def _pickle(flat: torch.Tensor, layout: BucketLayout) -> str:
    """The form that SGLang loads buckets in, base64: it names the memory and what lies where.

    One reader gives back the count of references that this adds to the memory.
    """
    parts, start = [], 0
    for name, dtype_name, shape in zip(layout.names, layout.dtypes, layout.shapes, strict=True):
        dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        part = {"name": name, "shape": shape, "dtype": dtype, "numel": size}  # of bytes
        parts.append(SimpleNamespace(**part, start_idx=start, end_idx=start + size))
        start += size
    sharing: Any = multiprocessing  # has no types
    strategy = sharing.get_sharing_strategy()
    sharing.set_sharing_strategy("file_system")  # which names memory, and sends no files
    try:
        pickled = ForkingPickler.dumps({"flattened_tensor": flat, "metadata": parts}, protocol=4)
    finally:
        sharing.set_sharing_strategy(strategy)
    return base64.b64encode(pickled).decode()
