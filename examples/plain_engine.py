"""A generation engine of one's own, in place of the embedded one or a server.

    python examples/minimal.py --config configs/minimal.yaml \
        rollout.engine=plain_engine:PlainGenerator

It samples with transformers and nothing else: one answer at a time, without a cache. Answers go on
where they were when new weights have come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from areal_sc.engines.base import PLAIN, Completion, RequestOptions
from areal_sc.engines.handle_base import GeneratorHandle
from areal_sc.engines.request_checks import ANY_TOKEN, check_request
from areal_sc.errors import ConfigError


@dataclass(frozen=True)
class PlainGenerator(GeneratorHandle):
    """What the script knows of the engine. It does not import torch."""

    worker_class: ClassVar[str] = "plain_engine:PlainEngine"

    def plan_worker(
        self, index: int, shape: Any, devices: Sequence[str], machine: Any
    ) -> list[Any]:
        size = 4 * (shape.num_parameters or 0)
        return [self.plan_process(index, devices[0], parameter_bytes=size)]


class PlainEngine:
    """A `FollowingEngine`, in each rollout worker."""

    processor = None
    is_cuda = False
    num_waiting = 0

    def __init__(self, config: Any) -> None:
        import torch

        from areal_sc.engines.tokenizer import load_tokenizer, read_end_token_ids

        self.tokenizer = load_tokenizer(config.path)
        self.end_token_ids = read_end_token_ids(config.path, self.tokenizer)
        self.max_context_tokens = config.max_context_tokens
        self.version = 0
        self._path = config.path
        self._random = torch.Generator().manual_seed(config.seed)
        self._is_open = asyncio.Event()
        self._one = asyncio.Lock()
        self._counts = {"generated_tokens": 0.0, "cancelled_tokens": 0.0}

    async def start(self) -> None:
        from transformers import AutoModelForCausalLM

        self._model = await asyncio.to_thread(AutoModelForCausalLM.from_pretrained, self._path)
        self._is_open.set()

    async def close(self) -> None:
        self._is_open.clear()

    async def pause(self) -> None:
        self._is_open.clear()

    async def resume(self) -> None:
        self._is_open.set()

    def stats(self) -> dict[str, float]:
        return self._counts

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: Any,
        options: RequestOptions = PLAIN,
        *,
        on_tokens: Any = None,
    ) -> Completion:
        limits = {"vocab_size": ANY_TOKEN, "max_context_tokens": self.max_context_tokens}
        most, reason = check_request(input_ids, sampling, **limits)
        if options.adapter or options.pictures or sampling.stop or sampling.top_p < 1:
            raise ConfigError("plain_engine: expected no adapter, picture, stop string or top_p")
        answer = Completion([], [], [], reason, sampling.temperature)
        ends = {*self.end_token_ids, *sampling.stop_token_ids}
        while len(answer.token_ids) < most:
            await self._is_open.wait()
            async with self._one:  # new weights come between two tokens
                ids = [*input_ids, *answer.token_ids]
                token, logprob = await asyncio.to_thread(self._sample, ids, sampling.temperature)
                answer.versions.append(self.version)
            answer.token_ids.append(token)
            answer.logprobs.append(logprob)
            self._counts["generated_tokens"] += 1
            if on_tokens is not None:
                on_tokens([token])
            if token in ends:
                return replace(answer, finish_reason="stop")
        return answer

    def _sample(self, ids: list[int], temperature: float) -> tuple[int, float]:
        import torch

        with torch.inference_mode():
            logits = self._model(torch.tensor([ids])).logits[0, -1]
        logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
        token = int(logprobs.argmax())
        if temperature:
            token = int(torch.multinomial(logprobs.exp(), 1, generator=self._random))
        return token, float(logprobs[token])

    async def update_weights(self, version: int, source: Any) -> None:
        async with self._one:
            own = dict(self._model.named_parameters(remove_duplicate=False))
            for name, values in await source():
                own[name].data.copy_(values.view_as(own[name]))
            self.version = version
