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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from areal_sc.algorithms.losses import Metric, Metrics, decoupled_ppo_loss, sft_loss
from areal_sc.config.schema import ActorConfig, ClipCenter
from areal_sc.engines.base import WeightShard
from areal_sc.engines.fsdp.background import BackgroundWriter
from areal_sc.engines.fsdp.checkpoint import Snapshots
from areal_sc.engines.fsdp.export import begin_export
from areal_sc.engines.fsdp.micro_batches import (
    MicroBatch,
    learning_tokens,
    make_micro_batch,
    pack_rows,
    require_field,
    rows_with_tokens,
    trained_tokens,
)
from areal_sc.engines.fsdp.model import compute_dtype, load_sharded_model, needs_sharding
from areal_sc.engines.fsdp.optimizer import ShardedAdamW, learning_rate, local_part
from areal_sc.engines.fsdp.packed_model import PackedModel
from areal_sc.engines.fsdp.process_group import ProcessGroup, host_rendezvous, select_device
from areal_sc.engines.fsdp.update_metrics import UpdateMetrics
from areal_sc.engines.weight_group import (
    NamedTensor,
    layout_of,
    split_into_buckets,
)
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.weights import BucketLayout

logger = logging.getLogger(__name__)

LossOf = Callable[[PackedRows, MicroBatch, torch.Tensor, int], tuple[torch.Tensor, Metrics]]
"""(rows, micro-batch, logprobs [N], global number of loss tokens) -> loss, metric sums."""


class FSDPEngine:
    """One rank. Every rank must get the same calls in the same order; rows may differ.

    Args:
        config: the actor section of the settings.
    """

    def __init__(self, config: ActorConfig) -> None:
        self.config = config
        self._hosted: TCPStore | None = None
        self._group: ProcessGroup
        self._model: PackedModel
        self._optimizer: ShardedAdamW
        self._writer: BackgroundWriter
        self._snapshots: Snapshots

    def create_rendezvous(self, host: str = "127.0.0.1") -> str:
        """On rank 0, before `initialize`: opens the ranks' meeting point on a free port.

        Args:
            host: address of this machine that the other ranks can reach.
        Returns: the `init_method` for every rank, this one included.
        """
        self._hosted, address = host_rendezvous(host)
        return address

    def initialize(self, rank: int, world_size: int, init_method: str) -> None:
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
        self._group = ProcessGroup.join(
            rank,
            world_size,
            init_method,
            device,
            hosted=self._hosted,
            is_needed=needs_sharding(self.config, world_size),
        )
        self._model = load_sharded_model(self.config, self._group)
        self._optimizer = ShardedAdamW(
            dict(self._model.causal_lm.named_parameters()), self.config.optimizer, self._group
        )
        self._writer = BackgroundWriter(self._group)
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

    def compute_logprobs(self, rows: PackedRows) -> torch.Tensor:
        """Log-probabilities of trained tokens under the current weights, at their own temperatures.

        Args:
            rows: fields `input_ids`, `loss_mask` and `temperatures`. With advantages, rows of
                advantage 0 are left out: nothing is trained on them.
        Returns: [T] float32 on the CPU, nats: of each token in `loss_mask` given those before it
            in its row; 0 at all others, at row starts, and in rows that were left out.
        """
        asked = learning_tokens(rows, trained_tokens(rows, None))
        chosen = rows_with_tokens(rows, asked)
        (count,) = self._micro_batch_counts([rows], [chosen])
        logprobs = torch.zeros(rows.num_tokens)
        with torch.no_grad():
            for micro_rows in self._pack(rows, chosen, count):
                micro_batch = self._micro_batch(rows, micro_rows, asked)
                found, _ = self._forward(micro_batch, micro_batch.gather_temperatures(rows))
                logprobs[micro_batch.source] = found.float().cpu()
        if isinstance(self._model, FSDPModule):
            # The root stays whole after a forward without backward, and would go stale.
            self._model.reshard()
        return logprobs

    def ppo_update(
        self, minibatches: Sequence[PackedRows], *, step: int, min_token_version: int | None
    ) -> dict[str, float]:
        """One optimizer update a minibatch, with decoupled PPO as `config.ppo` says.

        Args:
            minibatches: this rank's rows of each; equally many on every rank. Fields `input_ids`,
                `loss_mask`, `behavior_logprobs`, `temperatures`, with the proximal clip centre
                `proximal_logprobs`, with `min_token_version` `versions`; and advantages. The
                first minibatch may do without `proximal_logprobs`: no weight has changed, so its
                own forward is that of the proximal policy. Rows of advantage 0 have no gradient;
                they count in the denominator and go through no forward.
            step: training step, counted from 0; decides the learning rate.
            min_token_version: tokens sampled by older versions add nothing to the loss and its
                denominator; None trains all.
        Returns: the same global numbers on every rank, see `UpdateMetrics.summary`.
        Raises: ValueError: a field or the advantages are missing, a row is over the micro-batch
            limit, or the ranks have different numbers of minibatches.
        """
        if self.config.ppo.clip_center == ClipCenter.proximal:
            for rows in minibatches[1:]:
                if rows.num_rows:
                    require_field(rows, "proximal_logprobs")
        return self._update(minibatches, step, min_token_version, self._ppo_loss, is_sampled=True)

    def sft_update(self, rows: PackedRows, *, step: int) -> dict[str, float]:
        """One optimizer update on the cross entropy of the tokens in `loss_mask`."""
        return self._update([rows], step, None, _sft_loss, is_sampled=False)

    def export_weights(self) -> Iterator[WeightShard]:
        """This rank's part of every parameter; tied ones once.

        `values` may be the live parameter: copy it before the next update.
        """
        dtype = compute_dtype(self.config)
        for name, parameter in self._model.causal_lm.named_parameters():
            values = local_part(parameter.detach()).flatten()
            yield WeightShard(name, tuple(parameter.shape), values, dtype)

    @property
    def is_cuda(self) -> bool:
        """Whether this rank computes on a GPU."""
        return self._group.device.type == "cuda"

    def gather_weights(self, bucket_bytes: int) -> Iterator[list[NamedTensor]]:
        """Every whole parameter in the dtype of computation, tied ones once, in buckets.

        Parameters may be the live ones. All ranks must go through all buckets together.
        """
        dtype = compute_dtype(self.config)
        parameters = dict(self._model.causal_lm.named_parameters())
        for bucket in split_into_buckets(self._unfilled_weights(), bucket_bytes):
            yield [(name, _whole(parameters[name].detach().to(dtype))) for name, _ in bucket]

    def weight_layouts(self, bucket_bytes: int) -> list[BucketLayout]:
        """What `gather_weights` gives, without the values."""
        return [
            layout_of(bucket)
            for bucket in split_into_buckets(self._unfilled_weights(), bucket_bytes)
        ]

    def _unfilled_weights(self) -> Iterator[NamedTensor]:
        dtype = compute_dtype(self.config)
        for name, parameter in self._model.causal_lm.named_parameters():
            yield name, torch.empty(parameter.shape, dtype=dtype, device="meta")

    def begin_save_hf(self, folder: Path) -> Future[None]:
        """Takes the weights as they are now; a folder that `transformers` loads is written later.

        Training may go on at once. One write goes on at a time: the one before is waited for.

        Returns: a future that is done when the folder, tokenizer included, is on the disk under
            its name. It fails with CheckpointError, on every rank, when it could not be written;
            what was at `folder` then stays.
        """
        return self._begin_export(folder, is_staged=True)

    def save_hf(self, folder: Path) -> None:
        """Writes the same, and returns when it is written; the weights are not copied for it.

        Raises: CheckpointError: on every rank, when it could not be written.
        """
        self._writer.finish(self._begin_export(folder, is_staged=False))

    def _begin_export(self, folder: Path, *, is_staged: bool) -> Future[None]:
        return begin_export(
            self._model.causal_lm,
            Path(self.config.path),
            folder,
            compute_dtype(self.config),
            self._writer,
            is_staged=is_staged,
        )

    def begin_snapshot(self, folder: Path) -> Future[None]:
        """Takes weights, optimizer state and random state as they are now, and writes them later.

        Training may go on at once. One write goes on at a time: the one before is waited for.

        Returns: a future that is done when the snapshot is on the disk and has replaced `folder`.
            It fails with CheckpointError, on every rank, when it could not be written.
        """
        return self._snapshots.begin(folder)

    def save_snapshot(self, folder: Path) -> None:
        """`begin_snapshot`, waited for.

        Raises: CheckpointError: on every rank, when it could not be written.
        """
        self._writer.finish(self.begin_snapshot(folder))

    def load_snapshot(self, folder: Path) -> None:
        """Restores what `begin_snapshot` took, also with another number of ranks.

        Raises: CheckpointError: on every rank, when it is absent, damaged, or of another model.
        """
        self._snapshots.load(folder)

    def close(self) -> None:
        """Waits for what is being written, and leaves the group. It cannot be used afterwards."""
        if hasattr(self, "_writer"):
            self._writer.close()
        if hasattr(self, "_group"):
            self._group.close()
        self._hosted = None

    def _update(
        self,
        minibatches: Sequence[PackedRows],
        step: int,
        min_token_version: int | None,
        loss_of: LossOf,
        *,
        is_sampled: bool,
    ) -> dict[str, float]:
        trained = [trained_tokens(rows, min_token_version) for rows in minibatches]
        learning = [learning_tokens(*pair) for pair in zip(minibatches, trained, strict=True)]
        chosen = [rows_with_tokens(*pair) for pair in zip(minibatches, learning, strict=True)]
        micro_batch_counts = self._micro_batch_counts(minibatches, chosen)
        own_counts = torch.tensor([int(mask.sum()) for mask in trained])
        num_loss_tokens = self._group.all_reduce(own_counts, "sum").tolist()
        metrics = UpdateMetrics()
        for index, rows in enumerate(minibatches):
            if num_loss_tokens[index] == 0:
                logger.warning("minibatch=%d step=%d has no token to train on", index, step)
                continue
            packed = self._pack(rows, chosen[index], micro_batch_counts[index])
            for micro_rows in packed:
                micro_batch = self._micro_batch(rows, micro_rows, learning[index])
                temperatures = micro_batch.gather_temperatures(rows) if is_sampled else None
                logprobs, entropy = self._forward(micro_batch, temperatures)
                loss, of_loss = loss_of(rows, micro_batch, logprobs, num_loss_tokens[index])
                # FSDP averages over the ranks, but the denominator is already the global one.
                torch.autograd.backward(loss * self._group.world_size)
                metrics.add(loss=Metric.sum(loss), entropy=Metric.mean(entropy), **of_loss)
            norm = self._optimizer.update(step)
            if not math.isfinite(norm):
                logger.warning("minibatch=%d step=%d skipped: gradient_norm=%s", index, step, norm)
            metrics.add_update(norm, len(packed))
        return metrics.summary(
            self._group,
            num_tokens=sum(rows.num_tokens for rows in minibatches),
            num_loss_tokens=sum(num_loss_tokens),
            lr=learning_rate(self.config.optimizer, step),
        )

    def _ppo_loss(
        self, rows: PackedRows, batch: MicroBatch, logprobs: torch.Tensor, num_loss_tokens: int
    ) -> tuple[torch.Tensor, Metrics]:
        ppo = self.config.ppo
        behavior = batch.gather(rows, "behavior_logprobs")
        if ppo.clip_center == ClipCenter.behavior:
            proximal = behavior
        elif "proximal_logprobs" in rows.fields:
            proximal = batch.gather(rows, "proximal_logprobs")
        else:
            proximal = logprobs.detach()
        return decoupled_ppo_loss(
            logprobs,
            proximal,
            behavior if ppo.use_behavior_weight else proximal,
            batch.gather_advantages(rows),
            torch.ones_like(logprobs, dtype=torch.bool),
            clip_low=ppo.clip_low,
            clip_high=ppo.clip_high,
            behavior_weight_cap=ppo.behavior_weight_cap,
            num_loss_tokens=num_loss_tokens,
        )

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
        everyone = self._group.gather((wanted, str(error) if error else None))
        for rank, (_, message) in enumerate(everyone):
            if message is not None:
                raise ValueError(f"train rank {rank}: {message}") from error
        lengths = [len(counts) for counts, _ in everyone]
        if len(set(lengths)) > 1:
            raise ValueError(f"the ranks have {lengths} minibatches; expected equally many")
        return [max(counts) for counts in zip(*(counts for counts, _ in everyone), strict=True)]

    def _pack(self, rows: PackedRows, chosen: Sequence[int], count: int) -> list[list[int]]:
        """The chosen rows in at least `count` micro-batches."""
        return pack_rows(rows, chosen, self.config.max_tokens_per_micro_batch, count)

    def _micro_batch(
        self, rows: PackedRows, chosen: Sequence[int], asked: torch.Tensor
    ) -> MicroBatch:
        return make_micro_batch(rows, chosen, asked, self._model, self._group.device)

    def _forward(
        self, batch: MicroBatch, temperatures: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = self._model(
            batch.input_ids, batch.layout, batch.positions, batch.targets, temperatures
        )
        return logprobs, entropy


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _sft_loss(
    _rows: PackedRows, _batch: MicroBatch, logprobs: torch.Tensor, num_loss_tokens: int
) -> tuple[torch.Tensor, Metrics]:
    everything = torch.ones_like(logprobs, dtype=torch.bool)
    return sft_loss(logprobs, everything, num_loss_tokens=num_loss_tokens)
