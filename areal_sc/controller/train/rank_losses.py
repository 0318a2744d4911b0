"""The losses that the ranks of a model have been given: by number, each tried once."""

from __future__ import annotations

from areal_sc.algorithms.named_loss import NamedLoss
from areal_sc.controller.train.ranks import Ranks
from areal_sc.workflows.registry import SourceRegistry


class RankLosses:
    """Workers read a loss from a file of the run folder; what arrives on a socket is its number.

    Args:
        own: the loss of the settings.
    """

    def __init__(self, sources: SourceRegistry, ranks: Ranks, own: NamedLoss) -> None:
        self._sources = sources
        self._ranks = ranks
        self._own = own
        self._tried: list[tuple[NamedLoss, int]] = []

    def begin(self) -> int:
        """Number of the loss of the settings, which the ranks try when they start.

        Raises: ConfigError: there is no module of it.
        """
        number = self._sources.register_function(self._own)
        self._tried = [(self._own, number)]
        return number

    async def number(self, loss: NamedLoss) -> int:
        """Raises: ConfigError: there is no such loss, or the ranks cannot use it."""
        for known, number in self._tried:
            if known == loss:
                return number
        number = self._sources.register_function(loss)
        await self._ranks.repeated(lambda: self._ranks.calls.try_loss(number))
        self._tried.append((loss, number))
        return number
