"""The training engine on PyTorch's FSDP2: one rank of any Hugging Face causal language model.

A minibatch (one optimizer update) is cut into micro-batches of whole rows, packed without
padding. Each goes forward and backward once; its gradients are averaged over the ranks at once and
added up in each rank's own part, so no rank ever holds those of the whole model. FSDP's collectives
meet only if every rank runs equally many micro-batches, so ranks agree on the largest count, and a
rank with fewer rows, even none, fills up with empty ones.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.fsdp import FSDPModule

from areal_sc.algorithms.losses import LossTokens, Metric
from areal_sc.algorithms.named_loss import NamedLoss
from areal_sc.config.schema import ActorConfig
from areal_sc.engines.base import RankPosition
from areal_sc.engines.fsdp.background import BackgroundWriter
from areal_sc.engines.fsdp.checkpoint import Snapshots
from areal_sc.engines.fsdp.export import begin_export
from areal_sc.engines.fsdp.micro_batches import (
    MicroBatch,
    TokenFields,
    make_micro_batch,
    pack_rows,
    rows_with_tokens,
    trained_tokens,
    with_advantage,
    with_token_advantages,
)
from areal_sc.engines.fsdp.model import (
    compute_dtype,
    gather_whole,
    load_sharded_model,
    needs_sharding,
)
from areal_sc.engines.fsdp.optimizer import ShardedAdamW, learning_rate, local_part
from areal_sc.engines.fsdp.packed_model import PackedModel
from areal_sc.engines.fsdp.process_group import ProcessGroups, host_rendezvous, select_device
from areal_sc.engines.fsdp.update_metrics import UpdateMetrics
from areal_sc.engines.weight_group import (
    NamedTensor,
    layout_of,
    split_into_buckets,
)
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.weights import BucketLayout

logger = logging.getLogger(__name__)

OUTPUTS = ("logprobs", "entropy")
"""What a forward gives of each asked token."""


class FSDPEngine:
    """One rank. Every rank must get the same calls in the same order; rows may differ.

    Args:
        config: the actor section of the settings.
    """

    def __init__(self, config: ActorConfig) -> None:
        self.config = config
        self._hosted: TCPStore | None = None
        self._groups: ProcessGroups
        self._model: PackedModel
        self._optimizer: ShardedAdamW
        self._writer: BackgroundWriter
        self._snapshots: Snapshots

    def create_rendezvous(self, host: str = "127.0.0.1") -> str:
        self._hosted, address = host_rendezvous(host)
        return address

    def initialize(self, rank: int, world_size: int, init_method: str) -> RankPosition:
        """Meets the other ranks and loads the model.

        Args:
            init_method: from `create_rendezvous`, or `tcp://host:port` that rank 0 will open, or
                `env://` under torchrun. A single rank ignores it.
        Raises: WorkerStartError: the ranks did not meet, or there is no such device.
            ModelError: the model folder cannot be used.
        """
        device = select_device(self.config.device, rank)
        if device.type == "cpu":
            torch.set_num_threads(self.config.num_threads)
        torch.manual_seed(self.config.seed)
        self._groups = ProcessGroups.join(
            rank,
            world_size,
            init_method,
            device,
            hosted=self._hosted,
            is_needed=needs_sharding(self.config, world_size),
        )
        self._model = load_sharded_model(self.config, self._groups.world)
        self._optimizer = ShardedAdamW(
            dict(self._model.causal_lm.named_parameters()),
            self.config.optimizer,
            self._groups.world,
        )
        self._writer = BackgroundWriter(self._groups.world)
        self._snapshots = Snapshots(self._model.causal_lm, self._optimizer, self._writer)
        logger.info(
            "engine_ready model=%s rank=%d world_size=%d device=%s dtype=%s abilities=%s",
            type(self._model.causal_lm).__name__,
            rank,
            world_size,
            device,
            self.config.dtype,
            self._model.abilities,
        )
        return self._groups.position

    def forward(self, rows: PackedRows, output: str) -> torch.Tensor:
        """What the current weights say of trained tokens, on the CPU.

        Args:
            rows: fields `input_ids` and `loss_mask`; `temperatures`, else 1. Where advantages are
                known, tokens of advantage 0 are left out: nothing is trained on them.
        Raises: ValueError: there is no such output, a field is missing, or a row is too long.
        """
        if output not in OUTPUTS:
            raise ValueError(f"expected an output of {', '.join(OUTPUTS)}, got {output!r}")
        column = OUTPUTS.index(output)
        asked = with_advantage(with_token_advantages(rows), trained_tokens(rows, None))
        chosen = rows_with_tokens(rows, asked)
        (count,) = self._micro_batch_counts([rows], [chosen])
        values = torch.zeros(rows.num_tokens)
        with torch.no_grad():
            for micro_rows in self._pack(rows, chosen, count):
                micro_batch = self._micro_batch(rows, micro_rows, asked)
                values[micro_batch.token_index] = (
                    self._forward(micro_batch, rows)[column].float().cpu()
                )
        if isinstance(self._model, FSDPModule):
            # The root stays whole after a forward without backward, and would go stale.
            self._model.reshard()
        return values

    def update(
        self,
        minibatches: Sequence[PackedRows],
        loss: NamedLoss,
        *,
        step: int,
        min_token_version: int | None = None,
    ) -> dict[str, float]:
        """One optimizer update a minibatch.

        Args:
            minibatches: fields `input_ids`, `loss_mask`, with `min_token_version` `versions`, those
                that the loss reads, and `temperatures`, else 1. The first minibatch may do without
                `proximal_logprobs`: no weight has changed, so its own forward is that of the
                proximal policy.
            loss: where it is zero without an advantage, tokens of advantage 0 go through no
                forward; they count in the denominator all the same.
        Returns: see `UpdateMetrics.summary`.
        Raises: ValueError: a field or the advantages are missing, a row is over the micro-batch
            limit, or the ranks have different numbers of minibatches. ConfigError: no such loss.
        """
        compute_loss = loss.load()
        minibatches = [with_token_advantages(rows) for rows in minibatches]
        trained = [trained_tokens(rows, min_token_version) for rows in minibatches]
        learning = trained
        if loss.is_zero_without_advantage:
            learning = [with_advantage(*pair) for pair in zip(minibatches, trained, strict=True)]
        chosen = [rows_with_tokens(*pair) for pair in zip(minibatches, learning, strict=True)]
        micro_batch_counts = self._micro_batch_counts(minibatches, chosen)
        own_counts = torch.tensor([int(mask.sum()) for mask in trained])
        num_loss_tokens = self._groups.data.sum(own_counts).tolist()
        metrics = UpdateMetrics()
        for index, rows in enumerate(minibatches):
            if num_loss_tokens[index] == 0:
                logger.warning("minibatch=%d step=%d has no token to train on", index, step)
                continue
            packed = self._pack(rows, chosen[index], micro_batch_counts[index])
            for micro_rows in packed:
                micro_batch = self._micro_batch(rows, micro_rows, learning[index])
                logprobs, entropy = self._forward(micro_batch, rows)
                fields = TokenFields(micro_batch, rows)
                if index == 0 and "proximal_logprobs" not in rows.fields:
                    fields["proximal_logprobs"] = logprobs.detach()
                tokens = LossTokens(logprobs, fields, num_loss_tokens[index])
                value, of_loss = compute_loss(tokens)
                # FSDP averages over the ranks, but the denominator is already the global one.
                torch.autograd.backward(value * self._groups.data.size)
                metrics.add(
                    loss=Metric.sum(value),
                    entropy=Metric.mean(entropy),
                    num_effective_tokens=Metric.sum(torch.ones_like(entropy)),
                    **of_loss,
                )
            norm = self._optimizer.update(step)
            if not math.isfinite(norm):
                logger.warning("minibatch=%d step=%d skipped: gradient_norm=%s", index, step, norm)
            metrics.gradient_norms.append(norm)
            metrics.num_micro_batches += len(packed)
        return metrics.summary(
            self._groups.data,
            num_tokens=sum(rows.num_tokens for rows in minibatches),
            num_loss_tokens=sum(num_loss_tokens),
            lr=learning_rate(self.config.optimizer, step),
        )

    @property
    def is_cuda(self) -> bool:
        return self._groups.world.device.type == "cuda"

    def gather_weights(self, bucket_bytes: int) -> Iterator[list[NamedTensor]]:
        parameters = dict(self._model.causal_lm.named_parameters())
        for bucket in split_into_buckets(self._unfilled_weights(), bucket_bytes):
            named = [(name, parameters[name].detach()) for name, _ in bucket]
            yield gather_whole(named, compute_dtype(self.config))

    def flat_parts(self) -> tuple[dict[str, torch.Tensor], torch.dtype]:
        """The shards of this rank: rows of each parameter, and so a range of its values."""
        parameters = self._model.causal_lm.named_parameters()
        parts = {name: local_part(value.detach()).flatten() for name, value in parameters}
        return {n: part for n, part in parts.items() if len(part)}, compute_dtype(self.config)

    def weight_layouts(self, bucket_bytes: int) -> list[BucketLayout]:
        return [
            layout_of(bucket)
            for bucket in split_into_buckets(self._unfilled_weights(), bucket_bytes)
        ]

    def _unfilled_weights(self) -> Iterator[NamedTensor]:
        dtype = compute_dtype(self.config)
        for name, parameter in self._model.causal_lm.named_parameters():
            yield name, torch.empty(parameter.shape, dtype=dtype, device="meta")

    def begin_save_hf(self, folder: Path, *, is_staged: bool = True) -> Future[None]:
        """Takes the weights as they are now; a folder that `transformers` loads is written later.

        One write goes on at a time: the one before is waited for.

        Returns: a future that is done when the folder, tokenizer included, is on the disk under
            its name. It fails with CheckpointError, on every rank, when it could not be written;
            what was at `folder` then stays.
        """
        return begin_export(
            self._model.causal_lm,
            Path(self.config.path),
            folder,
            compute_dtype(self.config),
            self._writer,
            is_staged=is_staged,
        )

    def begin_snapshot(self, folder: Path) -> Future[None]:
        """Takes weights, optimizer state and random state as they are now; see `Snapshots`."""
        return self._snapshots.begin(folder)

    def load_snapshot(self, folder: Path) -> None:
        """Restores what `begin_snapshot` took, also with another number of ranks."""
        self._snapshots.load(folder)

    def close(self) -> None:
        """Waits for what is being written, and leaves the group."""
        if hasattr(self, "_writer"):
            self._writer.close()
        if hasattr(self, "_groups"):
            self._groups.close()
        self._hosted = None

    def _micro_batch_counts(
        self, batches: Sequence[PackedRows], chosen: Sequence[Sequence[int]]
    ) -> list[int]:
        """Micro-batches of each batch, the same on every rank.

        Raises: ValueError: ranks have different numbers of batches, or a row is too long.
        """
        wanted: list[int] = []
        error = None
        try:
            wanted = [len(self._pack(*pair, 1)) for pair in zip(batches, chosen, strict=True)]
        except ValueError as failure:
            error = failure
        # One exchange tells of errors, too: a rank that raised alone would leave others waiting.
        everyone = self._groups.data.gather((wanted, str(error) if error else None))
        for rank, (_, message) in enumerate(everyone):
            if message is not None:
                raise ValueError(f"train rank {rank}: {message}") from error
        lengths = [len(counts) for counts, _ in everyone]
        if len(set(lengths)) > 1:
            raise ValueError(f"the ranks have {lengths} minibatches; expected equally many")
        return [max(counts) for counts in zip(*(counts for counts, _ in everyone), strict=True)]

    def _pack(self, rows: PackedRows, chosen: Sequence[int], count: int) -> list[list[int]]:
        return pack_rows(rows, chosen, self.config.max_tokens_per_micro_batch, count)

    def _micro_batch(
        self, rows: PackedRows, chosen: Sequence[int], asked: torch.Tensor
    ) -> MicroBatch:
        return make_micro_batch(rows, chosen, asked, self._model, self._groups.world.device)

    def _forward(self, batch: MicroBatch, rows: PackedRows) -> tuple[torch.Tensor, torch.Tensor]:
        """[N] `OUTPUTS` at the asked tokens."""
        logprobs, entropy = self._model(
            batch.input_ids,
            batch.layout,
            batch.positions,
            batch.targets,
            batch.gather_temperatures(rows),
        )
        return logprobs, entropy
