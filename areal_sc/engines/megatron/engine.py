"""The training engine on Megatron-core: one rank of a decoder that `family` can map.

Ranks share the layers (tensor and sequence parallelism), stages of layers (pipelines, also
interleaved), experts and rows; the optimizer's state is spread over the ranks that have the same
layers. Micro-batches go through Megatron-core's schedules. A pipeline moves tensors of one shape:
all of its micro-batches get the length of the longest. Ranks that share experts exchange equally
many tokens: each micro-batch gets the length of the longest on any rank. A padding row is added,
and no token of it is trained.

Outside, the weights have their Hugging Face names: exports, publication and snapshots are those of
every engine, and a snapshot goes on with any mesh, also of `engine: fsdp`.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from areal_sc.algorithms.losses import Metric
from areal_sc.config.optimizer_settings import OptimizerConfig
from areal_sc.config.schema import ActorConfig, Dtype
from areal_sc.engines.base import RankPosition
from areal_sc.engines.likely_rows import likely_rows, plain_logprobs
from areal_sc.engines.megatron.family import ModelSizes
from areal_sc.engines.megatron.layers import ReplayedRoutes
from areal_sc.engines.megatron.machine import is_on_cpu
from areal_sc.engines.megatron.mapping import MegatronParts, MeshPlace, Slot
from areal_sc.engines.megatron.model import Rotary, build_stages, transformer_config, virtual_stages
from areal_sc.engines.megatron.optimizer import PARAMETER, DistributedAdamW
from areal_sc.engines.megatron.state import MegatronState
from areal_sc.engines.rounding import Expected, measure_noise, require_determined
from areal_sc.engines.small_limits import with_same_weights
from areal_sc.engines.training.background import BackgroundWriter
from areal_sc.engines.training.causal_lm import build_without_parameters, compute_dtype
from areal_sc.engines.training.export import ModelExport
from areal_sc.engines.training.kept_states import KeptStates
from areal_sc.engines.training.loading import SharedWeights
from areal_sc.engines.training.packed_attention import PackedLayout
from areal_sc.engines.training.probe import require_agreement
from areal_sc.engines.training.process_group import (
    COLLECTIVE_TIMEOUT,
    ProcessGroup,
    join_world,
)
from areal_sc.engines.training.rank_engine import PlannedBatch, RankEngine
from areal_sc.engines.training.snapshots import Snapshots
from areal_sc.engines.training.stored_weights import ModelWeights
from areal_sc.engines.training.streamed_layers import SharedPasses, stream_layers
from areal_sc.engines.training.updates.micro_batches import MicroBatch, make_micro_batch
from areal_sc.engines.training.updates.minibatch_loss import MinibatchLoss, Outputs
from areal_sc.engines.training.updates.update_metrics import NUM_GIVEN, OTHER_EXPERTS
from areal_sc.engines.training.whole_tensors import Publication
from areal_sc.errors import WorkerStartError
from areal_sc.sizing.routed_experts import RoutedExperts
from areal_sc.transport.packed_rows import PackedRows

logger = logging.getLogger(__name__)

LossOf = Callable[[MicroBatch, Outputs], torch.Tensor]


class MegatronEngine(RankEngine):
    """One rank of the mesh; see `RankEngine`."""

    def __init__(self, config: ActorConfig) -> None:
        super().__init__(config)
        self._is_owner = False
        self._sizes: ModelSizes
        self._stages: list[DistributedDataParallel]
        self._state: MegatronState
        self._optimizer: DistributedAdamW
        self._pipeline: ProcessGroup
        self._causal_lm: Any

    def _select_device(self, rank: int) -> torch.device:
        return torch.device("cpu") if is_on_cpu() else super()._select_device(rank)

    def _join(
        self, rank: int, world_size: int, init_method: str, device: torch.device
    ) -> RankPosition:
        parallel = self.config.parallel
        if world_size != parallel.num_ranks:
            raise WorkerStartError(
                f"actor.parallel makes {parallel.num_ranks} rank(s), got {world_size}"
            )
        self._is_owner = join_world(
            rank, world_size, init_method, device, self._hosted, is_needed=True
        )
        self.world = ProcessGroup(rank, world_size, device)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=virtual_stages(self.config),
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=COLLECTIVE_TIMEOUT // timedelta(minutes=1),
            create_gloo_process_groups=False,
        )
        place = MeshPlace.of(rank, parallel)
        self.rows = self._group(parallel_state.get_data_parallel_group())
        self._pipeline = self._group(parallel_state.get_pipeline_model_parallel_group())
        self.counts_rows = True
        is_head = self._is_last_stage and place.tensor == 0
        self.counts_metrics = is_head  # the last stage alone sees the losses
        model_parallel_cuda_manual_seed(self.config.seed)
        self._causal_lm = self._load()
        self._writer = BackgroundWriter(self.world, shares_files=self.shares_files, node=self.node)
        self._snapshots = Snapshots(self._state, self._writer)
        self._kept_states = KeptStates(self._state, self._writer)
        parts = self._state.parts
        self._publication = Publication(
            list(parts.shapes),
            parts,
            lambda: self._state.live_values,
            self.world,
            compute_dtype(self.config),
        )
        logger.info(
            "engine_ready model=%s rank=%d world_size=%d place=%s device=%s dtype=%s",
            self._state.architecture,
            rank,
            world_size,
            place,
            device,
            self.config.dtype,
        )
        return RankPosition(
            data_rank=self.rows.rank,
            is_head=is_head,
        )

    def _group(self, group: dist.ProcessGroup) -> ProcessGroup:
        return ProcessGroup(group.rank(), group.size(), self.world.device, group)

    @property
    def _is_last_stage(self) -> bool:
        return self._pipeline.rank == self._pipeline.size - 1

    def _load(self) -> Any:
        """Rank 0 alone reads the weights, some at a time, and sends every rank its part.

        Returns: the Hugging Face model without values.
        Raises: ModelError, ConfigError: on every rank.
        """
        config, world = self.config, self.world
        weights = SharedWeights(config, world)
        trial = weights.open(self._try_model)
        causal_lm = weights.build()
        self._sizes = sizes = ModelSizes.of(causal_lm.config.to_dict())
        sizes.check_mesh(config.parallel)
        shapes = {name: parameter.shape for name, parameter in causal_lm.named_parameters()}
        parts = MegatronParts(
            shapes, sizes, config.parallel, world.rank, has_fused_norms=self.is_cuda
        )
        device = world.device
        rotary = Rotary.of(causal_lm)
        if config.routing_replay:
            self.routed_experts = RoutedExperts.of(causal_lm.config.to_dict())
        for_megatron = transformer_config(config, sizes, rotary, device)
        self._stages = build_stages(
            for_megatron, config, sizes, rotary, device, self.routed_experts
        )
        self._optimizer = DistributedAdamW(self._stages, config.optimizer, compute_dtype(config))
        parameters = {
            Slot(chunk, name): parameter
            for chunk, stage in enumerate(self._stages)
            for name, parameter in stage.module.named_parameters()
        }
        self._state = MegatronState(type(causal_lm).__name__, parts, parameters, self._optimizer)
        for name in shapes:
            self._state.write(PARAMETER, name, weights.receive(name, parts))
        weights.check()
        self._check_mapping(*trial)
        if not self._has_tf32:
            self.logprob_noise = float(trial[1].noise.mean())
        return causal_lm

    def _try_model(self, weights: ModelWeights) -> tuple[list[torch.Tensor], Expected]:
        """Rows, and what the Hugging Face model makes of them.

        Returns: rows, each [T] int64, short enough for a micro-batch; [1, N] log-probabilities of
            their tokens but the first.
        """

        causal_lm = build_without_parameters(Path(self.config.path))
        stream_layers(causal_lm, weights.read, self.world.size)
        limit = self.config.max_tokens_per_micro_batch
        rows = [row[:limit] for row in likely_rows(causal_lm)]
        is_asked = _has_one_before(rows)
        dtype = torch.float16 if self._has_tf32 else compute_dtype(self.config)

        def compute(causal_lm: Any, num_copies: int) -> torch.Tensor:
            return plain_logprobs(causal_lm, rows * num_copies).view(num_copies, -1)[:, is_asked]

        def noise() -> torch.Tensor:
            config = copy.deepcopy(causal_lm.config)
            moved = with_same_weights(causal_lm, config, config._attn_implementation)
            stream_layers(moved, weights.read, self.world.size)
            return measure_noise(moved, dtype, functools.partial(compute, moved))

        passes = SharedPasses()
        once, moved = passes.add(lambda: compute(causal_lm, 1)), passes.add(noise)
        passes.run()
        if dtype is torch.float32:
            require_determined(causal_lm, moved.result())
        return rows, Expected(once.result(), moved.result()[None], dtype)

    @property
    def _has_tf32(self) -> bool:
        """TransformerEngine multiplies float32 as TF32, which has as many digits as float16."""
        return self.is_cuda and self.config.dtype is Dtype.float32

    def _check_mapping(self, rows: Sequence[torch.Tensor], expected: Expected) -> None:
        """Compares the stages' forward with that of the Hugging Face model.

        Args: what `_try_model` returns.
        Raises: ModelError: on every rank.
        """
        is_asked = _has_one_before(rows)
        packed = PackedRows(
            {"input_ids": torch.cat(list(rows)), "loss_mask": is_asked}, tuple(map(len, rows))
        )

        def measure() -> float:
            logprobs = self.forward(packed, "logprobs")[is_asked]
            return expected.distance(logprobs[None]) if self._is_last_stage else 0.0

        parallel = self.config.parallel
        require_agreement(
            measure,
            expected.limit,
            self.world,
            subject="Megatron-core's layers do not compute what the Hugging Face model does, on "
            f"data={parallel.data}, tensor={parallel.tensor}, pipeline={parallel.pipeline}, "
            f"expert={parallel.expert} ranks",
            advice="set actor.engine=fsdp",
        )

    @property
    def _vocab_size(self) -> int:
        return self._sizes.vocabulary

    def _outputs(self, batch: PlannedBatch) -> Iterator[tuple[MicroBatch, Outputs]]:
        if batch.top_k:
            raise ValueError("top_k: expected a model of engine=fsdp, got engine=megatron")
        found: list[tuple[MicroBatch, Outputs]] = []

        def keep(micro_batch: MicroBatch, outputs: Outputs) -> torch.Tensor:
            found.append((micro_batch, outputs))
            return outputs[0].sum()

        self._run(batch, keep, forward_only=True)
        yield from found

    def _add_gradients(self, batch: PlannedBatch, loss: MinibatchLoss) -> None:
        """No earlier gradient counts."""
        self._optimizer.clear_gradients()
        version = loss.version if loss.is_first else None
        routes = self._run(batch, loss.of, forward_only=False, version=version)
        if self.routed_experts is not None and loss.is_first:
            counts = [it for its in routes for it in its.others.values()]
            total = self.world.sum(sum(counts, torch.zeros(2, device=self.world.device)))
            others, given = map(Metric.sum, total / self.rows.size)  # each head adds its part
            loss.metrics.add(**{OTHER_EXPERTS: others, NUM_GIVEN: given})

    def _take_step(
        self, step: int, optimizers: Mapping[int, OptimizerConfig], *, is_void: bool
    ) -> dict[int, float]:
        if bool(self.world.max(torch.tensor(is_void, dtype=torch.uint8))):
            return {0: math.nan}
        return {0: self._optimizer.update(step, optimizers[0])}

    def _run(
        self,
        batch: PlannedBatch,
        loss_of: LossOf,
        *,
        forward_only: bool,
        version: int | None = None,
    ) -> list[ReplayedRoutes]:
        """All micro-batches through the stages, and back; `loss_of` is asked by the last one.

        Args:
            version: tokens of this one count where routers would choose otherwise.
        Returns: the routes of each micro-batch, in a model that replays them.
        """
        lengths, replayed = self._padded_lengths(batch), list[ReplayedRoutes]()

        def micro_batches() -> Iterator[MicroBatch]:
            for chosen, length in zip(batch.packed, lengths, strict=True):
                yield make_micro_batch(
                    batch.rows,
                    chosen,
                    batch.asked,
                    self._layout,
                    self.world.device,
                    num_tokens=length,
                    numbers=batch.numbers,
                )

        def step(following: Iterator[MicroBatch], stage: Any) -> tuple[Any, Any]:
            micro_batch = next(following)
            routes = self._own_routes(micro_batch, version)
            replayed.extend([] if routes is None else [routes])
            outputs = stage(micro_batch, micro_batch.gather_temperatures(batch.rows), routes)

            def loss(outputs: Outputs) -> tuple[torch.Tensor, torch.Tensor, None]:
                # no token counted: the loss is divided already
                return loss_of(micro_batch, outputs), torch.zeros((), dtype=torch.int), None

            return outputs, loss

        schedule = get_forward_backward_func()
        each = [micro_batches() for _ in self._stages]
        schedule(
            forward_step_func=step,
            data_iterator=each if len(each) > 1 else each[0],
            model=self._stages if len(each) > 1 else self._stages[0],
            num_microbatches=len(batch.packed),
            seq_length=max(lengths),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return replayed

    def _own_routes(self, batch: MicroBatch, version: int | None) -> ReplayedRoutes | None:
        """Those of the tokens that this rank's routers get; of padding they are not known."""
        if self.routed_experts is None or batch.routes is None:
            return None
        num_tokens, versions = len(batch.input_ids), batch.fields.get("versions")
        routes = F.pad(batch.routes, (0, 0, 0, 0, 0, num_tokens - len(batch.routes)))
        is_counted = torch.zeros(num_tokens, dtype=torch.bool, device=routes.device)
        if version is not None and versions is not None:
            is_counted[batch.positions] = versions == version
        rank = parallel_state.get_tensor_model_parallel_rank()
        own = (it.chunk(self.config.parallel.tensor)[rank] for it in (routes, is_counted))
        return ReplayedRoutes(*own)

    def _padded_lengths(self, batch: PlannedBatch) -> list[int]:
        """Tokens of each micro-batch, padding included; tensor ranks share them equally."""
        parallel = self.config.parallel
        sizes = [sum(batch.rows.lengths[row] for row in chosen) or 1 for chosen in batch.packed]
        lengths = [-(-size // parallel.tensor) * parallel.tensor for size in sizes]
        if parallel.expert > 1:
            lengths = self.world.max(torch.tensor(lengths)).tolist()
        return [max(lengths)] * len(lengths) if parallel.pipeline > 1 else lengths

    def _layout(self, lengths: Any, device: torch.device, parents: Any) -> PackedLayout:
        width = self._sizes.heads // self.config.parallel.tensor * self._sizes.head_dim
        return PackedLayout.of(lengths, device, width, parents=parents)

    def _rounded_count(self, count: int) -> int:
        """Interleaved stages take micro-batches in turns of as many as there are ranks."""
        turn = self._pipeline.size if self.config.parallel.virtual_pipeline > 1 else 1
        return -(-count // turn) * turn

    @property
    def _pads_rows(self) -> bool:
        return False

    def begin_save_hf(self, folder: Path, *, is_staged: bool = True) -> Future[None]:
        export = ModelExport(
            self._causal_lm,
            self._state.parts,
            self._state.live_values,
            Path(self.config.path),
            folder,
            compute_dtype(self.config),
            self._writer,
        )
        return export.begin(is_staged=is_staged, reads_late=True)

    def _leave(self) -> None:
        if dist.is_initialized() and hasattr(self, "world"):
            parallel_state.destroy_model_parallel()
            if self._is_owner:
                dist.destroy_process_group()


def _has_one_before(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """[T] bool: all tokens of the rows but the first of each."""
    return torch.cat([torch.arange(len(row)) > 0 for row in rows])
