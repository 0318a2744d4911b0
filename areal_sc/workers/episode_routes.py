"""Which experts the tokens of an episode's rows went through, by the answers that it got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from areal_sc.engines.base import Completion
from areal_sc.rejection import Rejection
from areal_sc.token_fields import ROUTED_EXPERTS, TensorMetadata
from areal_sc.workflows.base import Trajectory


class _RoutedAnswer(NamedTuple):
    """What one call of the model tells.

    Attributes:
        token_ids: [T] of prompt and answer.
        num_prompt: of these, the prompt's.
        first: tokens before this one have their routes of an earlier answer.
        routes: [T - first, layers, experts of a token].
    """

    token_ids: npt.NDArray[np.int64]
    num_prompt: int
    first: int
    routes: npt.NDArray[Any]


class EpisodeRoutes:
    """Collects routes while the episode runs; its rows are looked up at its end.

    So a workflow may make its rows as it likes, and turns that go on from an answer take over the
    routes that its tokens had.

    Args:
        field: of a token's routes; None: nothing is collected.
    """

    def __init__(self, field: TensorMetadata | None) -> None:
        self._field = field
        self._answers: list[_RoutedAnswer] = []

    def take(self, prompt: Sequence[int], answer: Completion) -> Completion:
        """Keeps the routes of an answer; returns it without them."""
        if self._field is None or answer.routes is None:
            return answer
        token_ids, first = np.array([*prompt, *answer.token_ids], dtype=np.int64), 0
        for before in self._answers:
            size = len(before.token_ids)
            if size <= len(prompt) and np.array_equal(before.token_ids, token_ids[:size]):
                first = max(first, size - 1)
        new = answer.routes[first:].copy()
        self._answers.append(_RoutedAnswer(token_ids, len(prompt), first, new))
        return replace(answer, routes=None)

    def with_routes(self, rows: list[Trajectory] | Rejection) -> list[Trajectory] | Rejection:
        """The rows with the field `routed_experts`; zeros where the routes are not known."""
        if self._field is None or isinstance(rows, Rejection):
            return rows
        return [
            replace(row, fields={**row.fields, ROUTED_EXPERTS: self._of(row, self._field)})
            for row in rows
        ]

    def _of(self, row: Trajectory, field: TensorMetadata) -> npt.NDArray[Any]:
        token_ids = np.asarray(row.input_ids)
        found = np.zeros((len(token_ids), *field.sizes), dtype=field.dtype)
        for answer in self._answers:
            size = min(len(token_ids), len(answer.token_ids))
            is_of_row = np.array_equal(token_ids[:size], answer.token_ids[:size])
            if is_of_row and size > answer.num_prompt:
                # of the last token nothing is known but by a later answer
                end = min(size, len(answer.token_ids) - 1)
                found[answer.first : end] = answer.routes[: end - answer.first]
        return found
