"""Loss scaling: keeps small gradients in the range of float16, which ends at 6e-8. No torch."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

GROWTH_INTERVAL: Final = 2000
"""Updates in a row without overflow after which the scale is doubled."""

_LEAST: Final = 2.0**-24
"""Gradients that are not finite even so are not so by their scale."""


class LossScale(NamedTuple):
    """A factor of the loss, which gradients are divided by; a power of two, so it rounds nothing.

    It changes as that of `torch.amp.GradScaler`, whose numbers these are. That one looks for
    overflow in one process; here the norm over all ranks tells, so that all skip the same updates.

    Attributes:
        num_good: updates without overflow since it has changed.
    """

    value: float = 2.0**16
    num_good: int = 0

    def after(self, norm: float) -> LossScale:
        """The scale of the next update, by the norm of this one's gradients."""
        if not math.isfinite(norm):
            return LossScale(max(self.value / 2, _LEAST))
        if self.num_good + 1 == GROWTH_INTERVAL:
            return LossScale(self.value * 2)
        return LossScale(self.value, self.num_good + 1)
