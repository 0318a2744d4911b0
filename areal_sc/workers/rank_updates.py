"""What a rank computes from rows: a new field of theirs, or the next weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from areal_sc.algorithms.loss_trial import try_loss
from areal_sc.algorithms.named_loss import NamedLoss
from areal_sc.engines.base import SCORES
from areal_sc.engines.training.updates.token_values import token_values
from areal_sc.engines.training.updates.update_trace import UpdateTrace
from areal_sc.errors import WorkflowError
from areal_sc.metadata import RowMetadata
from areal_sc.nodes.spec import TRAIN_ROLE
from areal_sc.records.recorder import KEPT_EVERY
from areal_sc.records.trained_rows import TrainedRow, TrainedTokens
from areal_sc.token_fields import ADAPTER, PICTURES
from areal_sc.transport.packed_rows import PackedRows, RowValues
from areal_sc.workers import calls, rank_methods
from areal_sc.workers.rank import Rank


async def compute_field(rank: Rank, args: rank_methods.Compute) -> calls.SealedShard:
    """Seals the fields, if this rank is the head of its model group."""
    with _computing(rank):
        with rank.recorder.span("pulling rows", version=rank.operations.version):
            rows = await rank.plane.puller.pull(args.batch)
        values_of = await _values_of(rank, args.output)

        def compute() -> str:
            if args.top_k:
                values: tuple[torch.Tensor, ...] = rank.engine.top_logprobs(rows, args.top_k)
            elif args.num_left_out:
                computed = values_of(rows.take(range(args.num_left_out, rows.num_rows)))
                missing = computed.new_full((rows.num_tokens - len(computed),), torch.nan)
                values = (torch.cat([missing, computed]),)
            else:
                values = (values_of(rows),)
            if not rows.num_rows or not rank.position.is_head:
                return ""
            return rank.plane.store.put(dict(zip(args.types, values, strict=True)), rows.lengths)

        with rank.recorder.span(f"computing {args.field}", version=rank.operations.version):
            return rank.sealed(await rank.compute(compute))


@contextmanager
def _computing(rank: Rank) -> Iterator[None]:
    """What all ranks do together: who takes them over must know whether each has begun it."""
    rank.num_computed += 1
    rank.num_computing += 1
    try:
        yield
    finally:
        rank.num_computing -= 1


async def _values_of(rank: Rank, output: str | int) -> Callable[[PackedRows], torch.Tensor]:
    if isinstance(output, str):
        return lambda rows: rank.engine.forward(rows, output)
    await rank.files.bring_source(output)
    function = rank.sources.token_function(output)
    compute = function.load()
    return lambda rows: token_values(rows, compute, f"token function {function.name!r}")


async def score(rank: Rank, args: rank_methods.ScoreRows) -> tuple[tuple[float, ...], ...]:
    """The score of each row or, of a pair, of the chosen and the rejected one; or of its tokens."""
    with _computing(rank):
        rows = await _read(rank, args.rows)
        values = await rank.compute(lambda: rank.engine.forward(rows, args.output))
    assert rows.metadata is not None, "_read gives each row its group"
    if args.per_token:
        return tuple(tuple(of_row.tolist()) for of_row in torch.split(values, list(rows.lengths)))
    found: dict[int, tuple[float, ...]] = {}
    for row, total in zip(rows.metadata, _of_rows(rows, values, args.output), strict=True):
        found[row.group_id] = (*found.get(row.group_id, ()), total)
    return tuple(found.values())


async def score_batch(rank: Rank, args: rank_methods.Compute) -> tuple[float, ...]:
    """A number of each row."""
    with _computing(rank):
        with rank.recorder.span("pulling rows", version=rank.operations.version):
            rows = await rank.plane.puller.pull(args.batch)
        values_of = await _values_of(rank, args.output)
        with rank.recorder.span("computing scores", version=rank.operations.version):
            values = await rank.compute(lambda: values_of(rows))
    return tuple(_of_rows(rows, values, args.output))


def _of_rows(rows: PackedRows, values: torch.Tensor, output: str | int) -> list[float]:
    """A number of each row: of `scores` that behind its last trained token, else the sum."""
    of_rows = torch.split(values.double(), list(rows.lengths))
    if output != SCORES or not rows.num_rows:
        return [float(row.sum()) for row in of_rows]
    masks = torch.split(rows.fields["loss_mask"], list(rows.lengths))
    return [float(row[mask.nonzero()[-1]]) for row, mask in zip(of_rows, masks, strict=True)]


async def try_registered_loss(rank: Rank, args: rank_methods.TryLoss) -> tuple[str, ...]:
    """Raises: ConfigError: see `loss_trial.try_loss`."""
    return tuple(sorted(try_loss(await _loss(rank, args.loss), rank.handle.config.head)))


async def update(rank: Rank, args: rank_methods.Update) -> dict[str, float]:
    """Metrics of one optimizer update a minibatch.

    Raises: what `Operations.join`, the engine and the loss raise. WorkflowError: a row of the
        demonstrations is no such row.
    """
    operation = args.operation

    async def run() -> dict[str, float]:
        loss, oldest = await _loss(rank, args.loss), None
        if isinstance(args.rows, rank_methods.Demonstrations):
            minibatches = [await _read(rank, args.rows)]
        else:
            with rank.recorder.span("pulling rows", version=operation.version):
                minibatches = [await rank.plane.puller.pull(batch) for batch in args.rows]
            oldest = args.rows[0].min_token_version
        trace = _trace_of(rank, minibatches)

        def compute() -> dict[str, float]:
            version = operation.version
            metrics = rank.engine.update(
                minibatches,
                loss,
                step=version,
                min_token_version=oldest,
                trace=trace,
                optimizers=args.optimizers,
            )
            for it in () if trace is None else trace.rows():
                row = TrainedRow(
                    worker=rank.spec.name,
                    group=it.metadata.group_id,
                    attempt=it.metadata.attempt,
                    episode=it.metadata.episode,
                    row=it.metadata.row,
                    step=version + 1,
                    minibatch=it.minibatch,
                    at=time.time(),
                )
                numbers = (it.gaps, it.entropies, it.advantages)
                rank.recorder.add_trained(row, TrainedTokens(*(its.numpy() for its in numbers)))
            return metrics

        recorded = rank.recorder.span("update", version=operation.version)
        with recorded, rank.operations.changing(operation):
            return await rank.compute(compute)

    next_version = operation.version + 1 if args.advances else None
    return await rank.operations.join(operation, run, next_version=next_version)


async def fill_adapter(rank: Rank, args: rank_methods.FillAdapter) -> dict[str, float]:
    """Raises: what `Operations.join` and the engine raise."""
    beginning = replace(args.beginning, folder=rank.files.place(args.beginning.folder))

    async def run() -> dict[str, float]:
        await rank.compute(lambda: rank.engine.fill_adapter(args.place, beginning))
        return {}

    return await rank.operations.join(args.operation, run)


def _trace_of(rank: Rank, minibatches: Sequence[PackedRows]) -> UpdateTrace | None:
    """What collects numbers of tokens for the records; None: there is nothing to record."""
    is_policy = rank.spec.name.partition("/")[0] == TRAIN_ROLE
    if not (rank.recorder.is_on and is_policy and rank.position.is_head):
        return None
    has_numbers = all(
        "behavior_logprobs" in rows.fields
        and (rows.advantages is not None or "advantages" in rows.fields)
        for rows in minibatches
        if rows.num_rows
    )
    return UpdateTrace(lambda row: row.group_id % KEPT_EVERY == 0) if has_numbers else None


async def _loss(rank: Rank, number: int) -> NamedLoss:
    await rank.files.bring_source(number)
    return rank.sources.loss(number)


async def _read(rank: Rank, wanted: rank_methods.Demonstrations) -> PackedRows:
    """Rows of a dataset, with `input_ids` and `loss_mask`; further lists of numbers, one a token,
    are float32 fields of theirs.

    A pair is two rows of one group, of which the chosen one has the reward 1, the other one 0. Each
    trained token of a row with `reference_logprob` has its mean as `reference_logprobs`. Where some
    rows have pictures, all have the field `pictures`.
    """
    await rank.files.bring_source(wanted.dataset)
    dataset = rank.sources.prompts(wanted.dataset)
    items, origins = list[Mapping[str, Any]](), list[RowMetadata]()
    for place, index in zip(wanted.places, wanted.indices, strict=True):
        item = dataset[index]
        its = [item["chosen"], item["rejected"]] if "chosen" in item else [item]
        for episode, row in enumerate(its):
            reward = float(len(its) == 2 and episode == 0)
            items.append(row)
            origins.append(RowMetadata(place, 0, len(row["input_ids"]), reward, 0, (), episode))
    fields = {
        "input_ids": packed([item["input_ids"] for item in items], torch.int32),
        "loss_mask": packed([item["loss_mask"] for item in items], torch.bool),
    }
    further = {name for item in items for name, it in item.items() if isinstance(it, list | tuple)}
    for name in sorted(further - fields.keys()):
        values = [torch.tensor(item[name], dtype=torch.float32) for item in items]
        fields[name] = torch.cat(values)
    if items and all("reference_logprob" in item for item in items):
        means = [
            torch.as_tensor(item["loss_mask"])
            * (item["reference_logprob"] / sum(item["loss_mask"]))
            for item in items
        ]
        fields["reference_logprobs"] = torch.cat(means).float()
    lengths = tuple(len(item["input_ids"]) for item in items)
    if wanted.adapters:  # no pairs have them
        places = torch.tensor(wanted.adapters, dtype=torch.int32)
        fields[ADAPTER] = places.repeat_interleave(torch.tensor(lengths))
    pictures = [item.get(PICTURES, b"") for item in items]
    of_rows = {PICTURES: RowValues.of_bytes(pictures)} if any(pictures) else {}
    return PackedRows(fields, lengths, metadata=tuple(origins), row_fields=of_rows)


def packed(values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    """The numbers of all rows, one after the other.

    Raises: WorkflowError: a number would become another one.
    """
    parts = [torch.empty(0, dtype=dtype)]
    for given in map(torch.as_tensor, values):
        parts.append(given.to(dtype))
        if not torch.equal(parts[-1].to(given.dtype), given):
            raise WorkflowError(
                f"a row of the dataset has numbers that {dtype} cannot hold: "
                f"{given.tolist()!r:.80}; expected input_ids of integers, and loss_mask of bools, "
                "or of 0 and 1"
            )
    return torch.cat(parts)
