"""The rows of an episode have the routes of the answers that they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from areal_sc.engines.base import Completion
from areal_sc.rejection import Rejection, RejectionKind
from areal_sc.token_fields import TensorMetadata
from areal_sc.workers.episode_routes import EpisodeRoutes
from areal_sc.workflows.transcript import Transcript

FIELD = TensorMetadata((3, 2), "uint8")


def answered(prompt: Sequence[int], tokens: Sequence[int], number: int) -> Completion:
    """Token n of a call went through expert n + `number`; nothing is known of the last one."""
    length = len(prompt) + len(tokens)
    routes = np.arange(length, dtype=np.uint8)[:, None, None] + np.full((3, 2), number, np.uint8)
    routes[-1] = 0
    ends: Any = ("stop", 1.0)
    return Completion(list(tokens), [0.0] * len(tokens), [0] * len(tokens), *ends, routes=routes)


def first_of(routes: EpisodeRoutes, row: Transcript) -> list[int]:
    """Of each token of the row, its first expert in the first layer."""
    [found] = routes.with_routes([row.trajectory(0.0)])
    values = found.fields["routed_experts"]
    assert values.shape == (len(row.input_ids), *FIELD.shape)
    assert values.dtype == np.uint8
    return list(values[:, 0, 0])


def test_a_turn_takes_over_what_its_prefix_had() -> None:
    """A row of two turns: what was sampled first keeps its routes. Its last token, the tool's
    answer and the new answer have those of the second call."""
    routes, row = EpisodeRoutes(FIELD), Transcript()
    row.add_context([1, 2, 3])
    row.add_completion(routes.take(row.input_ids, answered([1, 2, 3], [4, 5], 100)))
    row.add_context([6, 7])
    second = routes.take(row.input_ids, answered(row.input_ids, [8, 9], 200))
    row.add_completion(second)
    assert second.routes is None  # it is held once
    assert first_of(routes, row) == [100, 101, 102, 103, 204, 205, 206, 207, 0]
    assert sum(it.routes.nbytes for it in routes._answers) == (5 + 5) * FIELD.value_bytes


def test_branches_of_one_prompt_have_their_own() -> None:
    routes = EpisodeRoutes(FIELD)
    rows = []
    for number, tokens in ((100, [4, 5]), (200, [4, 6])):
        row = Transcript()
        row.add_context([1, 2])
        row.add_completion(routes.take([1, 2], answered([1, 2], tokens, number)))
        rows.append(row)
    assert [first_of(routes, row) for row in rows] == [[100, 101, 102, 0], [200, 201, 202, 0]]


def test_what_no_answer_tells_is_not_known() -> None:
    """A prompt that was written otherwise, an answer that was cut, tokens behind the last one."""
    routes = EpisodeRoutes(FIELD)
    routes.take([1, 2], answered([1, 2], [4, 5, 6], 100))
    other, cut, longer = Transcript(), Transcript(), Transcript()
    other.add_context([1, 3, 4])
    cut.add_context([1, 2, 4])
    longer.add_context([1, 2, 4, 5, 6, 7, 8])
    assert first_of(routes, other) == [0, 0, 0]
    assert first_of(routes, cut) == [100, 101, 102]
    assert first_of(routes, longer) == [100, 101, 102, 103, 0, 0, 0]


def test_without_replay_rows_have_no_such_field() -> None:
    routes, row = EpisodeRoutes(None), Transcript()
    answer = answered([1], [2], 100)
    assert routes.take([1], answer) is answer
    row.add_completion(answer)
    [found] = routes.with_routes([row.trajectory(0.0)])
    assert found.fields == {}
    rejection = Rejection(RejectionKind.rejected, "none")
    assert EpisodeRoutes(FIELD).with_routes(rejection) is rejection
