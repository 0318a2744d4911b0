"""Numbers as short text of bounded width, for lines of fixed columns."""

from __future__ import annotations

import math

_SUFFIXES = ("", "k", "M", "G", "T", "P")


def short_number(value: float | None) -> str:
    """A real number in at most 6 characters below 1e18: 0.250, -12.35, 12.3k, 1.2e-4."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(float(value))
    sign, value = "-" if value < 0 else "", abs(value)
    if 0 < value < 0.001:
        mantissa, exponent = f"{value:.{0 if sign else 1}e}".split("e")
        return f"{sign}{mantissa}e{int(exponent)}"
    if value < 1000:
        return sign + _longest_fit(value, max_decimals=3, max_length=5)
    power = 0
    while value >= 1000 and power < len(_SUFFIXES) - 1:
        value /= 1000
        power += 1
    return sign + _longest_fit(value, max_decimals=2, max_length=4) + _SUFFIXES[power]


def short_duration(seconds: float | None) -> str:
    """Seconds in at most 6 characters: 0.52s, 12.3s, 4m05s, 12h03m, 9d04h."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 99.95:
        return f"{seconds:.{2 if seconds < 9.995 else 1}f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = whole // 60
    if minutes < 100 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = minutes // 60
    return f"{hours // 24}d{hours % 24:02d}h"


def percent(share: float) -> str:
    """A share as percentage: 0.4%, 6%, 100%; never 0% for a share above 0."""
    if 0 < share < 0.0995:
        return f"{max(share * 100, 0.1):.1f}%"
    return f"{share * 100:.0f}%"


def _longest_fit(value: float, *, max_decimals: int, max_length: int) -> str:
    """`value` with as many decimals, at most `max_decimals`, as fit into `max_length`."""
    for decimals in range(max_decimals, 0, -1):
        text = f"{value:.{decimals}f}"
        if len(text) <= max_length:
            return text
    return f"{value:.0f}"
