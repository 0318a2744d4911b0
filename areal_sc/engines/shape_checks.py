"""Whether weights are those of a model: looked at before anything of it changes. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from areal_sc.errors import ModelError


def check_shapes(
    given: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], whose: str
) -> None:
    """Compares parameters by name and shape, which may be flat.

    Args:
        expected: of the model; when empty, nothing is known or compared.
        whose: for the message.
    Raises: ModelError: a parameter is missing, unknown, or of another shape.
    """
    if not expected:
        return
    if given.keys() != expected.keys():
        missing, unknown = sorted(expected.keys() - given), sorted(given.keys() - expected)
        raise ModelError(
            f"{whose} do not fit the model: {len(missing)} parameters are missing "
            f"({', '.join(missing[:3])}), {len(unknown)} unknown ({', '.join(unknown[:3])})"
        )
    for name, shape in given.items():
        if shape not in (expected[name], (prod(expected[name]),)):
            raise ModelError(
                f"{whose} do not fit the model: {name} has shape {shape}, expected {expected[name]}"
            )
