"""A completion that is asked for: its checks, its limits, and what is known of it so far."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion
from areal_sc.engines.request_checks import check_prompt, check_sampling
from areal_sc.engines.servers.sglang.answers import Answer
from areal_sc.engines.servers.sglang.routing import Work


@dataclass(eq=False)
class CompletionRequest:
    """One `generate` call.

    Attributes:
        prompt: [P] token ids.
        max_new_tokens: that its length or the context allows.
        length_reason: `length` or `context`, whichever of the two is the limit.
        stop_token_ids: all that end it.
        cancelled: done when its group is cancelled.
        answer: what was sampled so far.
        num_losses: attempts that brought nothing, as a server was lost.
        busy_since_s: since when servers have refused it as they are full; None: they have not.
    """

    prompt: list[int]
    sampling: GenerationConfig
    max_new_tokens: int
    length_reason: str
    stop_token_ids: tuple[int, ...]
    prefix_group: str | None
    cancelled: asyncio.Future[None]
    answer: Answer = field(default_factory=Answer)
    num_losses: int = 0
    busy_since_s: float | None = None

    @property
    def num_missing_tokens(self) -> int:
        return self.max_new_tokens - len(self.answer.token_ids)

    def work(self) -> Work:
        """What is left of it, for the router. It goes on only under weights as new as its last."""
        return Work(
            num_prompt_tokens=len(self.prompt) + len(self.answer.token_ids),
            max_new_tokens=self.num_missing_tokens,
            prefix_group=self.prefix_group,
            min_version=max(self.answer.versions, default=0),
        )

    def completion(self, finish_reason: str) -> Completion:
        answer = self.answer
        return Completion(
            answer.token_ids,
            answer.logprobs,
            answer.versions,
            finish_reason,
            self.sampling.temperature,
        )


def make_request(
    input_ids: Sequence[int],
    sampling: GenerationConfig,
    *,
    prefix_group: str | None,
    end_token_ids: Sequence[int],
    vocab_size: int,
    max_context_tokens: int,
) -> CompletionRequest:
    """Checks a call of `generate`.

    Raises: WorkflowError: the prompt leaves no room in the context, is empty, or holds a token
        outside the vocabulary. ConfigError: an impossible sampling setting.
    """
    prompt = [int(token) for token in input_ids]
    check_prompt(prompt, vocab_size=vocab_size, max_context_tokens=max_context_tokens)
    check_sampling(sampling)
    room = max_context_tokens - len(prompt)
    return CompletionRequest(
        prompt=prompt,
        sampling=sampling,
        max_new_tokens=min(sampling.max_new_tokens, room),
        length_reason="length" if sampling.max_new_tokens <= room else "context",
        stop_token_ids=tuple(dict.fromkeys((*end_token_ids, *sampling.stop_token_ids))),
        prefix_group=prefix_group,
        cancelled=asyncio.get_running_loop().create_future(),
    )
