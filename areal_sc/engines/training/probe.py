"""Whether the ranks together compute what one rank alone does: a few tokens, before training."""

from __future__ import annotations

import math
from collections.abc import Callable

from areal_sc.engines.training.process_group import ProcessGroup
from areal_sc.errors import ModelError


def require_agreement(
    measure: Callable[[], float],
    limit: float,
    world: ProcessGroup,
    *,
    subject: str,
    advice: str,
) -> None:
    """Every rank measures how far it is from what one rank alone has computed.

    Args:
        measure: this rank's distance, in units of what rounding explains.
        limit: the largest distance of ranks that compute the same.
        subject: says which model does not compute the same where.
        advice: what to set.
    Raises: ModelError: on every rank: one of them could not measure, or has found too much.
    """
    failure = distance = None
    try:
        distance = measure()
    except (RuntimeError, TypeError, AttributeError) as error:
        failure = f"{type(error).__name__}: {error}"
    outcomes = world.gather((failure, distance))
    # NaN is a distance, too, and max() might pass it over
    distances = [d if d is not None and d == d else math.inf for _, d in outcomes]
    messages = [message for message, _ in outcomes if message is not None]
    worst = max(distances)
    if messages or worst > limit:
        what = f"{worst:.2g} times what rounding moves it by, expected at most {limit:g}"
        what = what if worst < math.inf else "values that are not finite"
        what = messages[0] if messages else what
        raise ModelError(f"{subject} ({what}); {advice}")
