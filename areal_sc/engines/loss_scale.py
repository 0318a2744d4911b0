"""Loss scaling: keeps small gradients in the range of float16, which ends at 6e-8. No torch."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

GROWTH_INTERVAL: Final = 2000
"""Updates in a row without overflow after which the scale is doubled."""


class LossScale(NamedTuple):
    """A factor of the loss, which gradients are divided by before they are used.

    It begins, grows and falls as that of `torch.amp.GradScaler`, whose numbers these are. That one
    looks for overflow among the gradients of one process; here the norm over all ranks tells, so
    that all of them have the same scale and skip the same updates.

    Attributes:
        value: a power of two, so that it rounds nothing.
        num_good: updates without overflow since it has changed.
    """

    value: float = 2.0**16
    num_good: int = 0

    def after(self, norm: float) -> LossScale:
        """The scale of the next update.

        Args:
            norm: of all gradients of this one; not finite: some were beyond float16's range.
        """
        if not math.isfinite(norm):
            return LossScale(self.value / 2)
        if self.num_good + 1 == GROWTH_INTERVAL:
            return LossScale(self.value * 2)
        return LossScale(self.value, self.num_good + 1)
