"""A row by which whoever serves an adapter shows that it does.

An adapter changes the log-probabilities of the row's tokens. The trainer says by how much, beside
the adapter itself, and what they are without it. A server's own changes must be the same ones, but
for what the two programs compute differently without any adapter, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch

PROBE_NAME: Final = "adapter_probe"
"""The name of the probe among the published tensors."""

_FILE: Final = "probe.json"
_LEAST_ROUNDINGS: Final = 64
"""A log-probability is rounded at least so often: in a small model two programs agree by chance."""

_NOISE_MULTIPLE: Final = 4
"""How many times as far as without an adapter a server's changes may be from the trainer's. Both
terms of a change have that noise: together twice as much, which leaves as much again for larger
noise with the adapter."""

_NOISE_SHARES: Final = 1000
_LARGEST_SHARE: Final = 0.25
"""Changes of several nats amplify noise: they may be off by a share of their size, which is so many
times the noise as a share of the log-probabilities, and at most a quarter. In float32 that is 0.01,
where servers were off by 1e-5; in bfloat16 a quarter, where one was off by 0.22."""


@dataclass(frozen=True)
class AdapterProbe:
    """What an adapter does to the tokens of a row.

    Attributes:
        token_ids: [P] the row.
        bare: [P - 1] nats: the log-probability of each token but the first, given those before it,
            without the adapter.
        changes: [P - 1] nats: by how much the adapter changes these.
    """

    token_ids: list[int]
    bare: list[float]
    changes: list[float]

    @classmethod
    def measured(
        cls,
        token_ids: torch.Tensor,
        measure: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    ) -> AdapterProbe:
        """The probe of an adapter.

        Args:
            token_ids: [P] int64, text that the model finds likely.
            measure: gives the log-probability of each token of a row without the adapter and with
                it, [P] each of [P]; those of the first are left out.
        """
        bare, adapted = measure(token_ids)
        return cls(token_ids.tolist(), bare[1:].tolist(), (adapted - bare)[1:].tolist())

    @classmethod
    def from_tensor(cls, values: torch.Tensor) -> AdapterProbe:
        """The inverse of `tensor`, whose values may be flat."""
        token_ids, bare, changes = values.view(3, -1)
        return cls(token_ids.long().tolist(), bare[1:].tolist(), changes[1:].tolist())

    @property
    def tensor(self) -> torch.Tensor:
        """[3, P] float32, exact up to token 2^24."""
        return torch.tensor([self.token_ids, [0.0, *self.bare], [0.0, *self.changes]])

    @classmethod
    def read(cls, folder: Path) -> AdapterProbe:
        """Raises: OSError, ValueError: there is none in the folder."""
        return cls(**json.loads((folder / _FILE).read_text(encoding="utf-8")))

    def write(self, folder: Path) -> None:
        text = json.dumps(asdict(self))
        (folder / _FILE).write_text(text + "\n", encoding="utf-8")

    def cut(self, max_tokens: int) -> AdapterProbe:
        """Its first tokens, whose changes do not depend on those behind them."""
        num_values = max_tokens - 1
        bare, changes = self.bare[:num_values], self.changes[:num_values]
        return AdapterProbe(self.token_ids[:max_tokens], bare, changes)

    @property
    def size(self) -> float:
        """Root mean square of the changes, nats."""
        return _size(self.changes)

    def error(self, changes: Sequence[float]) -> float:
        """Root mean square of what others found, minus `changes`; nats."""
        return _size([a - b for a, b in zip(changes, self.changes, strict=True)])

    def limit(self, bare: Sequence[float]) -> float:
        """The largest `error` that rounding explains; nats.

        Args: bare: [P - 1] what others found without the adapter.
        """
        without = _size(self.bare)
        # what the rounding of the log-probabilities themselves may add up to
        least = _LEAST_ROUNDINGS * torch.finfo(torch.float32).eps * without
        noise = max(least, _size([a - b for a, b in zip(bare, self.bare, strict=True)]))
        share = min(_LARGEST_SHARE, _NOISE_SHARES * noise / without) if without else 0.0
        return max(_NOISE_MULTIPLE * noise, share * self.size)


def _size(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / max(1, len(values)))
