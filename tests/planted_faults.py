"""Mistakes in the ways of computing that are compared with a model's own forward at a start.

Each is planted into the trainer's packed rows or into embedded generation; `FAULTS` says which
families of models (`unit/engines/families.py`) can show it. A check that takes a model with one of
these does not check.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from areal_sc.engines.fsdp import packed_model
from areal_sc.engines.fsdp.ability_probe import probe_abilities
from areal_sc.engines.fsdp.packed_model import ModelAbilities, PackedModel
from areal_sc.engines.local import attention
from areal_sc.engines.local.model import LocalModel
from areal_sc.engines.local.self_check import check_generation
from areal_sc.engines.plain_attention import AttentionRule, attend_by_scores
from areal_sc.engines.rounding import LIMITS, Expected
from areal_sc.engines.training import packed_attention
from areal_sc.engines.training.packed_attention import PackedLayout
from areal_sc.errors import ModelError

LONGEST = 64  # tokens of a call: limits of the families are shorter
ANY = ("llama", "qwen2", "gemma2")
LINEAR = ("llama", "qwen2")
WINDOWS = ("mistral", "qwen2_sliding", "gemma2")


@dataclass(frozen=True)
class Fault:
    """A mistake. Attributes: plant: plants it for the time of a context; families: show it."""

    plant: Callable[[], Any]
    families: tuple[str, ...] = ANY


def wrapped(owner: Any, name: str, change: Callable[[dict[str, Any]], Any]) -> Any:
    """A patch of a function whose arguments, by name, `change` changes before each call."""
    original = getattr(owner, name)
    signature = inspect.signature(original)

    def changed(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        change(bound.arguments)
        return original(*bound.args, **bound.kwargs)

    return patch.object(owner, name, changed)


def rule(**changes: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    """Changes fields of the arguments' rule of attention where they are set."""

    def change(arguments: dict[str, Any]) -> None:
        old: AttentionRule = arguments["rule"]
        set_ = {name: getattr(old, name) for name in changes if getattr(old, name) is not None}
        arguments["rule"] = replace(old, **{name: changes[name](set_[name]) for name in set_})

    return change


def window_of_two(arguments: dict[str, Any]) -> None:
    """Where the model has none, too."""
    arguments["rule"] = replace(arguments["rule"], window=2)


def in_rows(**changes: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: wrapped(packed_attention, "attend_rows", rule(**changes))


def in_slots(**changes: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: wrapped(attention.SlotAttention, "attend", rule(**changes))


def keys_of_other_heads(owner: Any, name: str, keys: str) -> Callable[[], Any]:
    """Args: keys: the argument with [_, H_kv, ...] keys."""

    def change(arguments: dict[str, Any]) -> None:
        arguments[keys] = arguments[keys].flip(1)

    return lambda: wrapped(owner, name, change)


def one_row(arguments: dict[str, Any]) -> None:
    arguments["layout"] = PackedLayout.of(
        [sum(arguments["layout"].lengths)], torch.device("cpu"), 1
    )


def masked(is_seen: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
    """Rows' attention with another mask than the causal one [L, L], and no window."""

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        length = query.shape[2]
        mask = is_seen(torch.ones(length, length, dtype=torch.bool).tril())
        return attend_by_scores(query, key, value, mask, rule)

    return lambda: patch.object(packed_attention, "_causal_attention", attend)


def positions(of: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
    """Positions [1, T] of packed rows, which are told to the model."""
    original = PackedModel._inputs

    def inputs(*arguments: Any) -> Any:
        given, is_token = original(*arguments)
        if "position_ids" in given:
            given["position_ids"] = of(given["position_ids"])
        return given, is_token

    return lambda: patch.object(PackedModel, "_inputs", inputs)


def head(**changes: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
    """Arguments of the log-probabilities that are made from hidden states in chunks."""

    def change(arguments: dict[str, Any]) -> None:
        for name, changed in changes.items():
            arguments[name] = changed(arguments[name])

    return lambda: wrapped(packed_model, "chunked_logprobs", change)


def generated_positions(of: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[[], Any]:
    """Args: of: of the positions [T] and the number of rows, whose last tokens come at the end."""

    def change(arguments: dict[str, Any]) -> None:
        arguments["positions"] = of(arguments["positions"], arguments["num_last"])

    return lambda: wrapped(LocalModel, "__call__", change)


def seen_entries(of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
    """Args: of: of the distances [..., L] to entries of the cache, and which of them are seen."""
    original = attention.is_seen

    def is_seen(entries: torch.Tensor, positions: torch.Tensor, window: int | None) -> torch.Tensor:
        return of(positions[..., None] - entries, original(entries, positions, window))

    return lambda: patch.object(attention, "is_seen", is_seen)


@contextmanager
def scaled_logits() -> Iterator[None]:
    original = LocalModel.__call__

    def call(*arguments: Any) -> torch.Tensor:
        return original(*arguments) * 1.05

    with patch.object(LocalModel, "__call__", call):
        yield


def last_ones_later(of: torch.Tensor, num_last: int) -> torch.Tensor:
    return torch.cat([of[:-num_last], of[-num_last:] + 1])


TRAINER = {
    "rows see each other": Fault(lambda: wrapped(packed_attention, "attend_rows", one_row)),
    "tokens see later ones": Fault(masked(torch.ones_like)),
    "tokens do not see themselves": Fault(
        masked(lambda causal: causal.tril(-1) | (torch.arange(len(causal)) == 0))
    ),
    "no window": Fault(in_rows(window=lambda _: None), WINDOWS),
    "a window of one token more": Fault(in_rows(window=lambda n: n + 1), WINDOWS),
    "a window of two tokens": Fault(
        lambda: wrapped(packed_attention, "attend_rows", window_of_two)
    ),
    "scores scaled by 1.05": Fault(in_rows(scale=lambda scale: 1.05 * scale)),
    "no soft cap of scores": Fault(in_rows(softcap=lambda _: None), ("gemma2",)),
    "no sinks": Fault(in_rows(sinks=lambda _: None), ("gpt_oss",)),
    "keys of other heads": Fault(keys_of_other_heads(packed_attention, "attend_rows", "key")),
    "positions twice as far apart": Fault(positions(lambda of: 2 * of)),
    "another scale of rotary embeddings": Fault(positions(lambda of: of * 1.05)),
    "no positions": Fault(positions(torch.zeros_like)),
    "a position is left out": Fault(positions(lambda of: of + (of > 1))),
    "positions count on over rows": Fault(
        positions(lambda of: torch.arange(of.shape[1])[None]), ("gpt2", "opt")
    ),
    "rows of the output layer moved by one": Fault(head(weight=lambda of: of.roll(1, 0)), LINEAR),
    "no bias of the output layer": Fault(head(bias=lambda _: None), ("phi",)),
    "log-probabilities behind the token before": Fault(
        head(hidden=lambda of: of.roll(1, 0)), LINEAR
    ),
}
GENERATION = {
    "a window of one token more in generation": Fault(in_slots(window=lambda n: n + 1), WINDOWS),
    "no window in generation": Fault(in_slots(window=lambda _: None), WINDOWS),
    "a window of two tokens in generation": Fault(
        lambda: wrapped(attention.SlotAttention, "attend", window_of_two)
    ),
    "another scale of rotary embeddings in generation": Fault(
        generated_positions(lambda of, _: of * 1.05)
    ),
    "scores scaled in generation": Fault(in_slots(scale=lambda scale: 1.05 * scale)),
    "no soft cap in generation": Fault(in_slots(softcap=lambda _: None), ("gemma2",)),
    "no sinks in generation": Fault(in_slots(sinks=lambda _: None), ("gpt_oss",)),
    "keys of other heads in the cache": Fault(
        keys_of_other_heads(attention.SlotAttention, "_attend_last", "keys")
    ),
    "an entry too many is seen": Fault(seen_entries(lambda far, is_seen: is_seen | (far == -1))),
    "the first entry is not seen": Fault(
        seen_entries(lambda far, is_seen: is_seen & ((far.cumsum(-1) != far) | (far == 0)))
    ),
    "sampled tokens are one place later": Fault(generated_positions(last_ones_later)),
    "positions of a later part of a prompt begin anew": Fault(
        generated_positions(lambda of, _: of % 8)
    ),
    "logits at another temperature": Fault(scaled_logits),
}


def is_refused(make: Callable[[], Any], plant: Callable[[], Any]) -> bool:
    """Whether the start leaves the trainer's way that is at fault, or refuses the model, because
    of what it computes.

    Args: make: a model in float32, of a family that packs and has a plain output layer.
    """
    model = PackedModel(make(), chunk_tokens=LONGEST)
    with plant(), _distances() as found:
        try:
            abilities = probe_abilities(model, LONGEST).abilities
        except ModelError:
            abilities = None
    return abilities != fast_ways(make) and _is_beyond_rounding(found)


def fast_ways(make: Callable[[], Any]) -> ModelAbilities:
    """What a start finds where nothing is planted."""
    return probe_abilities(PackedModel(make(), chunk_tokens=LONGEST), LONGEST).abilities


def generation_is_refused(make: Callable[[], Any], plant: Callable[[], Any]) -> bool:
    with plant(), _distances() as found:
        try:
            check_generation(make(), LONGEST)
        except ModelError:
            return _is_beyond_rounding(found)
    return False


@contextmanager
def _distances() -> Iterator[list[float]]:
    """Within it the distances that checks find are noted: a fault that only raises is none."""
    found, distance = list[float](), Expected.distance

    def noted(self: Expected, values: torch.Tensor) -> float:
        found.append(distance(self, values))
        return found[-1]

    with patch.object(Expected, "distance", noted):
        yield found


def _is_beyond_rounding(distances: list[float]) -> bool:
    return any(LIMITS[torch.float32] < it < math.inf for it in distances)
