"""From packed rows to the micro-batches that go through the model in one piece."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from areal_sc.algorithms.loss_tokens import LossRows
from areal_sc.algorithms.packing import (
    pack_full_micro_batches,
    pack_micro_batches,
    pack_padded_micro_batches,
)
from areal_sc.algorithms.shared_prefixes import Forest, Row, share_prefixes, sharing_rows
from areal_sc.engines.picture_inputs import PictureRun
from areal_sc.engines.training.device_copies import to_device
from areal_sc.engines.training.packed_attention import PackedLayout
from areal_sc.engines.training.row_numbers import RowNumbers, sums_of_rows
from areal_sc.sizing.routed_experts import RoutedExperts
from areal_sc.sources.pictures import unpacked
from areal_sc.token_fields import ADAPTER, PICTURES, ROUTED_EXPERTS, TOP_TOKENS
from areal_sc.transport.packed_rows import PackedRows, RowValues

_NO_TOKEN = 1 << 31
"""No vocabulary has so many tokens."""

LayoutOf = Callable[[Sequence[int], torch.device, Sequence[int] | None], PackedLayout]
"""Plans a device's attention of packed rows of these lengths, or of runs that have such parents;
its tensors are on the CPU."""


@dataclass(frozen=True)
class MicroBatch:
    """Some rows on the device, and the N tokens whose probability is asked for.

    Where the ranks of a sequence group share the rows, each is asked for `own` of these.

    Attributes:
        input_ids: [T] int64, those that are computed.
        layout: the lengths of the rows, or of the runs that they share.
        own: of the N tokens, those that this rank is asked for: all, or [own] int64 on the CPU.
        positions: [own] int64, where the model is asked for each of them, among the tokens that
            this rank computes: at the token before it, or at the token itself.
        targets: [own] int64, these tokens; [own, 1 + k] where the rows have `TOP_TOKENS`: these
            and, behind each, those of the field.
        token_index: [N] int64 on the CPU, index of the asked tokens in the rows it was taken from.
        fields: [N, ...] values of each field of these rows at the asked tokens.
        loss_rows: the rows as a loss sees them; None: their numbers are not known.
        routes: [T, L, k], the experts that the tokens went through in generation; None: not known.
        places: of the adapter of each row or run, ascending; those behind them are padding.
        pictures: tokens of rows that have pictures, on the CPU.
    """

    input_ids: torch.Tensor
    layout: PackedLayout
    own: slice | torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    token_index: torch.Tensor
    fields: Mapping[str, torch.Tensor]
    loss_rows: LossRows | None
    routes: torch.Tensor | None = None
    places: Sequence[int] = ()
    pictures: Sequence[PictureRun] = ()

    @property
    def own_token_index(self) -> torch.Tensor:
        """[own] int64, as `token_index`."""
        return self.token_index[self.own]

    def gather_temperatures(self, rows: PackedRows) -> torch.Tensor | None:
        """[own] float32, what the tokens were sampled at, on the device; None: 1 for all.

        Raises: ValueError: one is not above 0.
        """
        if not len(self.own_token_index) or "temperatures" not in rows.fields:
            return None
        temperatures = rows.fields["temperatures"][self.own_token_index]
        if not bool((temperatures > 0).all()):
            raise ValueError(
                "temperatures of asked tokens must be above 0, got "
                f"{temperatures.min().item():g}: greedy tokens are context, and have 1"
            )
        is_plain = bool((temperatures == 1).all())
        return None if is_plain else self.fields["temperatures"][self.own]

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """[K, N] of [K, own], without gradient: the ranks of a sequence group have all of it."""
        if self.layout.part is None:
            return values
        everyone = values.new_zeros(len(values), len(self.token_index))
        everyone[:, self.own] = values
        return self.layout.part.group.sum(everyone)


def check_top_tokens(rows: PackedRows, vocab_size: int) -> None:
    """Raises: ValueError: the rows' `TOP_TOKENS` are not of this model's vocabulary."""
    tokens = rows.fields.get(TOP_TOKENS)
    if tokens is None or not tokens.numel():
        return
    if tokens.dim() != 2 or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(
            f"{TOP_TOKENS}: expected tokens below {vocab_size}, of the trained model's vocabulary, "
            f"k of each token, got {tokens.min()} to {tokens.max()}, shaped {tuple(tokens.shape)}; "
            "the teacher has another vocabulary"
        )


class TokenFields(dict[str, torch.Tensor]):
    """[N, ...] values of a field at some tokens, by name; one of rows is spread over them.

    Args:
        values: of fields of tokens.
        of_rows: where the tokens stand.
        rows: that they were taken from.
    """

    def __init__(
        self, values: Mapping[str, torch.Tensor], of_rows: LossRows, rows: PackedRows
    ) -> None:
        super().__init__(values)
        self._of_rows = of_rows
        self._rows = rows

    def __missing__(self, name: str) -> torch.Tensor:
        """Raises: ValueError: the rows have no such field."""
        if name in self._rows.row_fields:
            return self._of_rows.spread_field(name)
        if self._rows.num_rows:
            return require_field(self._rows, name)
        # a rank without rows does not know their fields
        return torch.zeros(0, device=self._of_rows.reward.device)


class RowFields(dict[str, Any]):
    """`LossRows.fields` of some rows, looked up by name.

    Args:
        rows: that they were taken from.
        values: of some of these, on the device.
    """

    def __init__(
        self, rows: PackedRows, values: Mapping[str, RowValues], device: torch.device
    ) -> None:
        super().__init__({name: it.of_rows for name, it in values.items()})
        self._rows = rows
        self._device = device

    def __missing__(self, name: str) -> torch.Tensor:
        """Raises: ValueError: the rows have no such field."""
        if self._rows.num_rows:
            raise ValueError(_no_field(self._rows, name, sorted(self)))
        return torch.zeros(0, device=self._device)  # see `TokenFields`


def with_token_advantages(rows: PackedRows) -> PackedRows:
    """The rows with field `advantages`, [T] float32, if they are known; see `of_tokens`."""
    if rows.advantages is None or "advantages" in rows.fields:
        return rows
    return replace(rows, fields={**rows.fields, "advantages": of_tokens(rows, rows.advantages)})


def of_tokens(rows: PackedRows, values: Sequence[float | tuple[float, ...]]) -> torch.Tensor:
    """[T] float32: the value of each token's row; or, of several, that of a trained token's answer.

    Args:
        values: of each row; a tuple has one for each of its returns.
    """
    lengths = torch.tensor(rows.lengths, dtype=torch.int64)
    plain = [0.0 if isinstance(it, tuple) else it for it in values]
    found = torch.tensor(plain, dtype=torch.float32).repeat_interleave(lengths)
    starts, metadata = rows.starts, rows.metadata or ()
    for row, value in enumerate(values):
        if isinstance(value, tuple):
            own = slice(starts[row], starts[row] + rows.lengths[row])
            trained = require_field(rows, "loss_mask")[own].bool()
            sizes = torch.tensor([size for _, size in metadata[row].returns])
            found[own][trained] = torch.tensor(value).repeat_interleave(sizes)
    return found


def with_staleness(rows: PackedRows, version: int) -> PackedRows:
    """The rows with field `staleness`, [T]: versions between the sampling policy and this one.

    Raises: ValueError: the rows have no field `versions`.
    """
    if not rows.num_rows:
        return rows
    staleness = version - require_field(rows, "versions")
    return replace(rows, fields={**rows.fields, "staleness": staleness})


def trained_tokens(rows: PackedRows, min_token_version: int | None) -> torch.Tensor:
    """[T] bool: tokens that count as trained.

    The first token of a row, should it be among them, adds to the denominator only.

    Raises: ValueError: a needed field is missing.
    """
    if not rows.num_rows:
        return torch.zeros(0, dtype=torch.bool)
    mask = require_field(rows, "loss_mask").bool()
    if min_token_version is not None:
        mask = mask & (require_field(rows, "versions") >= min_token_version)
    return mask


def with_advantage(rows: PackedRows, tokens: torch.Tensor) -> torch.Tensor:
    """[T] bool: tokens of the rows that have one whose advantage is not 0, or is not known."""
    if "advantages" not in rows.fields:
        return tokens
    learning = sums_of_rows(rows, tokens & (rows.fields["advantages"] != 0))
    lengths = torch.tensor(rows.lengths, dtype=torch.int64)
    return tokens & torch.tensor(learning, dtype=torch.bool).repeat_interleave(lengths)


def require_field(rows: PackedRows, name: str) -> torch.Tensor:
    if name not in rows.fields:
        raise ValueError(_no_field(rows, name, sorted([*rows.fields, *rows.row_fields])))
    return rows.fields[name]


def _no_field(rows: PackedRows, name: str, known: list[str]) -> str:
    first = next(iter(rows.metadata or ()), None)
    which = f" (the first is of group {first.group_id}, episode {first.episode})" if first else ""
    return (
        f"the rows{which} have fields {known}, not {name!r}: those of a workflow are declared in "
        "its `fields`"
    )


def check_routes(rows: PackedRows, experts: RoutedExperts | None) -> None:
    """Raises: ValueError: the rows' routes are those of another model than one of these experts."""
    routes = rows.fields.get(ROUTED_EXPERTS)
    if experts is None or routes is None or not rows.num_tokens:
        return
    largest, shape = int(routes.max()), tuple(routes.shape[1:])
    if shape != experts.field.shape or largest >= experts.num_experts:
        raise ValueError(
            f"field {ROUTED_EXPERTS}: expected experts below {experts.num_experts} in the shape "
            f"{experts.field.shape}, which this model has; got up to {largest} in {shape}: the "
            "rows were generated by another model"
        )


def places_of_rows(rows: PackedRows, known: Collection[int]) -> list[int]:
    """The place of each row's adapter.

    Args: known: the places that there are.
    Raises: ValueError: a row is of another one, or of several.
    """
    found: list[float] = [0.0] * rows.num_rows
    if ADAPTER in rows.row_fields:
        found = [float(it) for it in rows.row_fields[ADAPTER].of_rows]
    elif (given := rows.fields.get(ADAPTER)) is not None:
        starts, lengths = (
            torch.tensor(it, dtype=torch.int64) for it in (rows.starts, rows.lengths)
        )
        first = given[starts]
        if not torch.equal(first.repeat_interleave(lengths), given):
            raise ValueError(f"field {ADAPTER}: expected one number for all tokens of a row")
        found = first.tolist()
    if unknown := sorted(set(found) - set(known)):
        raise ValueError(
            f"field {ADAPTER}: expected one of the places {sorted(known)} (of actor.lora.places "
            f"those that the update has an optimizer for), got {unknown[0]:g}"
        )
    return [int(place) for place in found]


@dataclass(frozen=True)
class RowUnits:
    """Rows of which some come into one micro-batch, since they belong together or share tokens.

    Attributes:
        rows: all of them.
        asked: [T] bool, tokens that the model is asked for.
        places: of the rows' adapters; empty: there is one.
        min_saved: see `share_prefixes`; infinite: all rows are computed by themselves.
        units: the rows of each.
        lengths: tokens of each that the model computes, padding included, or is asked for, if these
            are more: rows that are nearly equal may share most of what is asked.
        max_tokens: of a micro-batch, padding included.
        are_padded: the model computes rows that are padded to the longest one.
    """

    rows: PackedRows
    asked: torch.Tensor
    places: Sequence[int]
    min_saved: float
    units: list[list[int]]
    lengths: list[int]
    max_tokens: int
    are_padded: bool

    @classmethod
    def of(
        cls,
        rows: PackedRows,
        asked: torch.Tensor,
        max_tokens: int,
        *,
        are_padded: bool,
        keeps_groups: bool = False,
        min_saved: float = math.inf,
        places: Sequence[int] = (),
    ) -> RowUnits:
        """The units of the rows that hold an asked token; the others need no forward at all.

        Args:
            max_tokens: rows that share tokens are parted where they have more.
            keeps_groups: the rows of a group, a pair say, are a unit; all are equally large where
                rows are padded.
            places: rows share with those of their own place.
        Raises: ValueError: rows of a group that stays whole are of several places.
        """
        num_asked = sums_of_rows(rows, asked)
        chosen = [row for row, count in enumerate(num_asked) if count]

        def length(unit: Sequence[int]) -> int:
            if are_padded:
                return len(unit) * max(rows.lengths[row] for row in unit)
            forest = _shared_forest(rows, [unit], min_saved)
            alone = sum(rows.lengths[row] for row in unit)
            computed = alone if forest is None else forest.num_tokens
            return max(computed, sum(num_asked[row] for row in unit))

        if keeps_groups:
            units = _groups(rows, chosen)
            if places and any(len({places[row] for row in unit}) > 1 for unit in units):
                raise ValueError(f"field {ADAPTER}: expected one place for all rows of a group")
        elif min_saved < math.inf:
            of_place = dict[int, list[int]]()
            for row in chosen:
                of_place.setdefault(places[row] if places else 0, []).append(row)
            in_rows = (
                [its[row] for row in tree]
                for its in of_place.values()
                for tree in sharing_rows(_tokens_of(rows, its), min_saved)
            )
            parts = (_fitting(tree, lambda unit: length(unit) <= max_tokens) for tree in in_rows)
            units = sorted(chain.from_iterable(parts), key=min)
        else:
            units = [[row] for row in chosen]
        lengths = [length(unit) for unit in units]
        return cls(rows, asked, places, min_saved, units, lengths, max_tokens, are_padded)

    def pack(self, num_micro_batches: int, *, fills: bool) -> list[list[list[int]]]:
        """The units of at least `num_micro_batches` micro-batches, ascending by their places.

        Missing ones are empty.

        Args: fills: all micro-batches but the last are to be nearly full, not equally large.
        Raises: ValueError: a row, or a group that stays whole, is longer than `max_tokens`.
        """
        if self.are_padded:
            packed = pack_padded_micro_batches(self.lengths, self.max_tokens)
        else:
            pack = pack_full_micro_batches if fills else pack_micro_batches
            packed = pack(self.lengths, self.max_tokens, num_micro_batches)
        named = [[self.units[unit] for unit in positions] for positions in packed]
        if self.places:  # the rows of a unit are of one place
            named = [sorted(it, key=lambda unit: self.places[unit[0]]) for it in named]
        return named + [[] for _ in range(num_micro_batches - len(named))]

    def forest(self, units: Sequence[Sequence[int]]) -> Forest | None:
        """The forest of some units' rows, in their order; None: they share nothing."""
        return _shared_forest(self.rows, units, self.min_saved)


def _fitting(tree: list[int], fits: Callable[[list[int]], bool]) -> list[list[int]]:
    """The rows of a tree in parts, each of as many neighbours as fit, at least one."""
    parts, rest = list[list[int]](), tree
    while rest:
        count = 1
        while count < len(rest) and fits(rest[: 2 * count]):
            count = min(2 * count, len(rest))
        more = range(count + 1, min(2 * count, len(rest)))
        count += bisect_left(more, True, key=lambda count: not fits(rest[:count]))
        parts.append(rest[:count])
        rest = rest[count:]
    return parts


def _shared_forest(
    rows: PackedRows, units: Sequence[Sequence[int]], min_saved: float
) -> Forest | None:
    """The forest of the units' rows, in their order; None: they share nothing, or are not to."""
    if min_saved == math.inf or max(map(len, units), default=0) < 2:
        return None
    return share_prefixes([_tokens_of(rows, unit) for unit in units], min_saved)


def _tokens_of(rows: PackedRows, chosen: Sequence[int]) -> list[Row]:
    if not chosen:  # then they may have no fields
        return []
    tokens, starts = require_field(rows, "input_ids").numpy(), rows.starts
    found = [tokens[starts[row] : starts[row] + rows.lengths[row]] for row in chosen]
    if PICTURES not in rows.row_fields:
        return found
    spans, firsts = rows.row_fields[PICTURES].spans, dict[Any, int]()
    for number, row in enumerate(chosen):  # rows with other pictures have another first token
        own = found[number].astype(np.int64)
        own[:1] = _NO_TOKEN + firsts.setdefault((spans[row], *own[:1].tolist()), len(firsts))
        found[number] = own
    return found


def _groups(rows: PackedRows, chosen: Sequence[int]) -> list[list[int]]:
    """The chosen rows of each group; without metadata each row stands alone."""
    groups: dict[int, list[int]] = {}
    for row in chosen:
        group = row if rows.metadata is None else rows.metadata[row].group_id
        groups.setdefault(group, []).append(row)
    return list(groups.values())


def make_micro_batch(
    rows: PackedRows,
    chosen: Sequence[int],
    asked: torch.Tensor,
    layout_of: LayoutOf,
    device: torch.device,
    *,
    forest: Forest | None = None,
    num_tokens: int = 0,
    is_behind: bool = False,
    numbers: RowNumbers | None = None,
    row_places: Sequence[int] = (),
) -> MicroBatch:
    """Gathers the chosen rows. None chosen makes one token that nothing is asked of.

    Args:
        asked: [T] bool over all rows.
        forest: of the chosen rows, where they are computed as one.
        num_tokens: further rows of padding, of which nothing is asked, make them so many. None is
            longer than the longest of all rows, and they have tokens of those that are chosen.
        is_behind: the model is asked behind these tokens. Else first tokens of rows are left out:
            nothing predicts them.
        numbers: what a loss may know of all rows.
        row_places: of all rows' adapters; those of the chosen ones ascend. Empty: there is one.
    """
    packed = _PackedTokens.of(rows, chosen, asked, is_behind=is_behind)
    computed = packed.computed(forest, num_tokens, max(rows.lengths, default=1))
    layout = layout_of(computed.lengths, device, computed.parents)
    tokens, own = layout.own_tokens, cast("slice | torch.Tensor", slice(None))
    if layout.part is not None:
        is_own = (computed.read >= tokens.start) & (computed.read < tokens.stop)
        own = torch.nonzero(is_own).flatten()
    asked_index = packed.token_index[packed.places]
    fields = {name: it[asked_index] for name, it in rows.fields.items() if name != ROUTED_EXPERTS}
    given: dict[str, Any] = {
        "input_ids": computed.input_ids,
        "positions": computed.read[own] - tokens.start,
        "targets": packed.input_ids[packed.places][own],
        "layout": layout.tensors,
        "fields": fields,
    }
    if chosen and ROUTED_EXPERTS in rows.fields:
        given["routes"] = rows.fields[ROUTED_EXPERTS][packed.token_index]
    row_fields = rows.take_row_fields(chosen)
    row_fields.pop(PICTURES, None)
    if numbers is not None:
        its = numbers.take(chosen)
        given["loss_rows"] = {
            "of_token": packed.of_token[packed.places],
            "position": packed.offset[packed.places],
            "counts": its.counts,
            "rewards": its.rewards,
            "fields": {name: it.values for name, it in row_fields.items()},
        }
    there = to_device(given, device)
    loss_rows, targets = None, there["targets"]
    if (top_tokens := there["fields"].get(TOP_TOKENS)) is not None:
        targets = torch.cat([targets[:, None], top_tokens[own].long()], 1)
    if (its_rows := there.get("loss_rows")) is not None:
        values = its_rows["fields"]
        moved = {name: replace(it, values=values[name]) for name, it in row_fields.items()}
        loss_rows = RowNumbers(its_rows["counts"], its_rows["rewards"]).with_tokens(
            its_rows["of_token"], its_rows["position"], RowFields(rows, moved, device)
        )
    of_rows = [row_places[row] for row in chosen if row_places]
    return MicroBatch(
        there["input_ids"],
        replace(layout, **there["layout"]),
        own,
        there["positions"],
        targets,
        asked_index,
        there["fields"],
        loss_rows,
        there.get("routes"),
        _places_of_runs(of_rows, packed.sizes, forest),
        _picture_runs(rows, chosen, forest),
    )


class _ComputedTokens(NamedTuple):
    """What goes through the model.

    Attributes:
        input_ids: [T] int64.
        read: [N] int64, where the model is asked for each token.
        lengths: of the rows or runs, and of padding behind them.
        parents: the run before each run; None: they are rows.
    """

    input_ids: torch.Tensor
    read: torch.Tensor
    lengths: list[int]
    parents: list[int] | None


@dataclass(frozen=True, eq=False)
class _PackedTokens:
    """The T tokens of chosen rows, one row after the other; one token where none is chosen.

    Attributes:
        sizes: [R] int64, tokens of each row.
        offset: [T] int64, where each token stands in its row.
        token_index: [T] int64, its index in the rows it was taken from.
        input_ids: [T] int64.
        places: [N] int64, those that are asked for.
        is_behind: the model is asked behind them, else before them.
    """

    sizes: torch.Tensor
    offset: torch.Tensor
    token_index: torch.Tensor
    input_ids: torch.Tensor
    places: torch.Tensor
    is_behind: bool

    @classmethod
    def of(
        cls, rows: PackedRows, chosen: Sequence[int], asked: torch.Tensor, *, is_behind: bool
    ) -> _PackedTokens:
        if not chosen:
            one, none = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
            return cls(torch.ones_like(one), one, one, one, none, is_behind)
        sizes = torch.tensor([rows.lengths[row] for row in chosen])
        before = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
        offset = torch.arange(len(before)) - before
        starts = torch.tensor(rows.starts)[torch.tensor(chosen)]
        token_index = torch.repeat_interleave(starts, sizes) + offset
        input_ids = require_field(rows, "input_ids")[token_index].to(torch.int64)
        places = torch.nonzero(asked[token_index] & ((offset > 0) | is_behind)).flatten()
        return cls(sizes, offset, token_index, input_ids, places, is_behind)

    @property
    def of_token(self) -> torch.Tensor:
        """[T] int64, the row of each token."""
        return torch.repeat_interleave(torch.arange(len(self.sizes)), self.sizes)

    def computed(self, forest: Forest | None, num_tokens: int, longest: int) -> _ComputedTokens:
        """Each shared token once, and padding up to `num_tokens`, no piece above `longest`."""
        read = self.places if self.is_behind else self.places - 1
        input_ids, lengths, parents = self.input_ids, self.sizes.tolist(), None
        if forest is not None:
            input_ids = input_ids[torch.from_numpy(forest.token_index)]
            lengths, parents = list(forest.lengths), list(forest.parents)
            read = torch.from_numpy(forest.computed_index)[read]
        if (missing := num_tokens - len(input_ids)) > 0:
            padding = [min(longest, missing - begin) for begin in range(0, missing, longest)]
            lengths += padding
            parents = None if parents is None else [*parents, *(-1 for _ in padding)]
            input_ids = input_ids[torch.arange(num_tokens) % len(input_ids)]
        return _ComputedTokens(input_ids, read, lengths, parents)


def _places_of_runs(
    of_rows: Sequence[int], sizes: torch.Tensor, forest: Forest | None
) -> Sequence[int]:
    """The place of each row, or of each run of a forest."""
    if forest is None or not of_rows:
        return of_rows
    of_tokens = torch.tensor(of_rows).repeat_interleave(sizes)[torch.from_numpy(forest.token_index)]
    starts = torch.tensor([0, *forest.lengths[:-1]]).cumsum(0)
    return of_tokens[starts].tolist()


def _picture_runs(
    rows: PackedRows, chosen: Sequence[int], forest: Forest | None
) -> list[PictureRun]:
    """Where the tokens of chosen rows with pictures are computed."""
    each = [unpacked(it) for it in rows.picture_bytes(chosen)]
    if not any(each):
        return []
    starts = list(accumulate((rows.lengths[row] for row in chosen), initial=0))
    runs = [(start, start, stop) for start, stop in pairwise(starts)]
    if forest is not None:  # where each run lies, and which tokens of the rows are in it
        firsts = accumulate(forest.lengths, initial=0)
        tokens = [int(forest.token_index[first]) for first in list(firsts)[:-1]]
        firsts = accumulate(forest.lengths, initial=0)
        runs = [
            (f, t, t + size) for f, t, size in zip(firsts, tokens, forest.lengths, strict=False)
        ]
    found = []
    for first, begin, end in runs:
        number = bisect_right(starts, begin) - 1
        if its := each[number]:
            start = rows.starts[chosen[number]]
            row = rows.fields["input_ids"][start : start + rows.lengths[chosen[number]]].long()
            found.append(PictureRun(first, row, its, begin - starts[number], end - starts[number]))
    return found
