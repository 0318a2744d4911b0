"""Versions of a tiny model, and every sampled token against the one that sampled it."""

from __future__ import annotations

import asyncio
import copy
import string
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from local_engines import TensorSource, at_hand
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import Completion

Answers = list[asyncio.Task[Completion]]
Generating = Callable[[Callable[[], Answers]], Awaitable[Answers]]

VOCAB_SIZE = 512
MAX_CONTEXT = 1024
TOLERANCE = 1e-4
"""Nats. In float32, SGLang and transformers are both up to 3.5e-5 from the float64 values of a
pretrained model of 135 million parameters. Its next version, `change` 0.1, is 0.3 from them."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,  # heads of 32, the smallest that vLLM takes on a CPU
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": MAX_CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


class Policies:
    """A model folder, and the weights of every policy version that a test publishes.

    Neighbouring versions differ enough for a token to be told by its log-probability.
    """

    def __init__(self, folder: Path, config: Any = None, *, change: float = 1.0) -> None:
        """Reads the model of a folder that holds one; else makes a tiny one there.

        Args:
            config: of transformers: the tiny model is of its family.
            change: how far other versions are from the first. With 1 a pretrained model would
                forget what it knows.
        """
        self.folder = folder
        self.change = change
        if (folder / "config.json").exists():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        else:
            model = _make_model(config or Qwen2Config(**SIZES))
            model.save_pretrained(folder)
            _make_tokenizer().save_pretrained(folder)
        self._models = {0: model}

    @property
    def newest(self) -> int:
        return max(self._models)

    def add(self) -> int:
        """Makes the next version; returns its number."""
        version = self.newest + 1
        model = copy.deepcopy(self._models[0])
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.3 * self.change * parameter.std(correction=0) * noise)
        self._models[version] = model
        return version

    def named_tensors(self, version: int) -> list[tuple[str, torch.Tensor]]:
        return [(name, p.detach()) for name, p in self._models[version].named_parameters()]

    def source(self, version: int) -> TensorSource:
        return at_hand(self.named_tensors(version))

    def save(self, version: int, folder: Path) -> Path:
        self._models[version].save_pretrained(folder)
        return folder

    def errors(self, prompt: list[int], answer: Completion, temperature: float) -> list[float]:
        """Of each token: how far its log-probability is from that of its version's model."""
        ids = torch.tensor([[*prompt, *answer.token_ids]])
        tokens = torch.tensor(answer.token_ids)
        expected = torch.zeros(len(tokens), dtype=torch.float64)
        for version in set(answer.versions):
            with torch.no_grad():
                logits = self._models[version](ids, use_cache=False).logits[0].double()
            logprobs = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
            found = logprobs.gather(1, tokens[:, None])[:, 0]
            chosen = torch.tensor(answer.versions) == version
            expected[chosen] = found[chosen]
        return (expected - torch.tensor(answer.logprobs, dtype=torch.float64)).abs().tolist()

    def check(self, prompt: list[int], answer: Completion, temperature: float = 1.0) -> None:
        """Every token has the log-probability that the weights of its version give it."""
        lengths = {len(answer.token_ids), len(answer.logprobs), len(answer.versions)}
        assert len(lengths) == 1
        assert answer.versions == sorted(answer.versions)
        np.testing.assert_allclose(self.errors(prompt, answer, temperature), 0, atol=TOLERANCE)

    def logprobs(self, version: int, ids: list[int]) -> torch.Tensor:
        """[T, V] float64, nats, before each token; those before the first one are no numbers."""
        with torch.no_grad():
            logits = self._models[version](torch.tensor([ids]), use_cache=False).logits[0]
        return logits.double().log_softmax(-1).roll(1, 0)

    def greedy(self, version: int, prompt: list[int], num_tokens: int) -> list[int]:
        """The most probable token after each other."""
        ids = list(prompt)
        for _ in range(num_tokens):
            with torch.no_grad():
                logits = self._models[version](torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
        return ids[len(prompt) :]

    def check_truncated(
        self, prompt: list[int], answer: Completion, sampling: GenerationConfig
    ) -> None:
        """Log-probabilities are those among the tokens that top-k and top-p keep."""
        ids = torch.tensor([[*prompt, *answer.token_ids]])
        (version,) = set(answer.versions)
        with torch.no_grad():
            logits = self._models[version](ids, use_cache=False).logits[0].double()
        probabilities = (logits[len(prompt) - 1 : -1] / sampling.temperature).softmax(-1)
        for row, token, logprob in zip(
            probabilities, answer.token_ids, answer.logprobs, strict=True
        ):
            ordered, order = row.sort(descending=True)
            kept = torch.arange(len(row)) < (sampling.top_k or len(row))
            kept &= (ordered.cumsum(0) - ordered < sampling.top_p) | (sampling.top_p == 1)
            chosen = (order == token) & kept
            assert chosen.any(), "a token outside the kept ones was sampled"
            expected = float((ordered[chosen] / ordered[kept].sum()).log())
            assert abs(expected - logprob) < TOLERANCE

    def check_all(self, prompts: Iterable[list[int]], answers: Iterable[Completion]) -> None:
        for prompt, answer in zip(prompts, answers, strict=True):
            self.check(prompt, answer)


def _make_model(config: Any) -> Any:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def _make_tokenizer() -> PreTrainedTokenizerFast:
    characters = ["<pad>", *string.digits, *string.ascii_lowercase]
    vocabulary = {character: i for i, character in enumerate(characters)}
    vocabulary["$"] = VOCAB_SIZE  # the model cannot sample it: answers are as long as they may be
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="$")
