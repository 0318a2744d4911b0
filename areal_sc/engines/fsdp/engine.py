"""The training engine on PyTorch's FSDP2: one rank of any Hugging Face causal language model.

Ranks form a mesh: each share of the rows is computed by a model group, whose ranks split the tokens
(`sequence_parallel`) and the layers (`tensor_parallel`); FSDP spreads what each rank of a tensor
group has over all others of its kind (embeddings and output layer: `vocabulary`).

Each micro-batch goes forward and backward once; its gradients are averaged over the ranks at once
and added up in each rank's own part, so no rank ever holds those of the whole model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from itertools import chain
from pathlib import Path

import torch
from torch.nn import attention

from areal_sc.algorithms.losses import Metric
from areal_sc.algorithms.packing import padded_size
from areal_sc.config.optimizer_settings import OptimizerConfig
from areal_sc.config.schema import ActorConfig, Dtype, ModelHead
from areal_sc.engines.base import BASE_LOGPROBS, AdapterBeginning, RankPosition
from areal_sc.engines.fsdp.cuts import CutParts
from areal_sc.engines.fsdp.handle import needs_fsdp
from areal_sc.engines.fsdp.model import load_sharded_model
from areal_sc.engines.fsdp.optimizer import ShardedOptimizer, local_part
from areal_sc.engines.fsdp.packed_model import PackedModel
from areal_sc.engines.fsdp.place_states import PlaceStates
from areal_sc.engines.fsdp.sharded_state import ShardedState
from areal_sc.engines.handle_base import FLOAT32_BYTES
from areal_sc.engines.loss_scale import LossScale
from areal_sc.engines.training.adapters.adapter_probe import PROBE_NAME, AdapterProbe
from areal_sc.engines.training.adapters.lora import adapter_place, merged_values, without_adapters
from areal_sc.engines.training.background import BackgroundWriter
from areal_sc.engines.training.causal_lm import compute_dtype
from areal_sc.engines.training.export import ModelExport
from areal_sc.engines.training.kept_states import KeptStates
from areal_sc.engines.training.process_group import ProcessGroups
from areal_sc.engines.training.rank_engine import PlannedBatch, RankEngine
from areal_sc.engines.training.snapshots import Snapshots
from areal_sc.engines.training.stowed import Stowed
from areal_sc.engines.training.updates.micro_batches import MicroBatch, make_micro_batch
from areal_sc.engines.training.updates.minibatch_loss import MinibatchLoss, Outputs
from areal_sc.engines.training.updates.update_metrics import NUM_GIVEN, OTHER_EXPERTS
from areal_sc.engines.training.whole_tensors import Publication, Values
from areal_sc.errors import ConfigError
from areal_sc.transport.packed_rows import PackedRows

logger = logging.getLogger(__name__)

ROOM_SHARE = 0.8
"""Of the free memory of a GPU, that gradients and parameters of all ranks may take."""

TELLING_FULLNESS = 0.5
"""The share of a micro-batch's tokens from which on an update tells what a full one needs."""


class FSDPEngine(RankEngine):
    """One rank of the mesh; see `RankEngine`."""

    def __init__(self, config: ActorConfig) -> None:
        super().__init__(config)
        self._groups: ProcessGroups
        self._model: PackedModel
        self._parts: CutParts
        self._optimizer: ShardedOptimizer
        self._stowed: Stowed
        self._told_compilation = self._is_room_known = False

    def _join(
        self, rank: int, world_size: int, init_method: str, device: torch.device
    ) -> RankPosition:
        if self.config.flash_attention == 3:
            if device.type != "cuda" or self.config.dtype == Dtype.float32:
                logger.warning("actor.flash_attention=3 has no effect in float32, or on a CPU")
            elif torch.cuda.get_device_capability(device)[0] != 9:
                raise ConfigError("actor.flash_attention: expected 2, got 3: the GPU is no Hopper")
            attention.activate_flash_attention_impl("FA3")
        self._groups = groups = ProcessGroups.join(
            rank,
            world_size,
            init_method,
            device,
            self.config.parallel,
            hosted=self._hosted,
            is_needed=needs_fsdp(world_size, self.config),
        )
        self.world, self.rows = groups.world, groups.rows
        if self.config.cpu_offload and device.type == "cpu":
            logger.warning("actor.cpu_offload=true has no effect on a CPU: all is in host memory")
        self.counts_rows = groups.sequence.rank == 0
        self.counts_metrics = groups.tensor.rank == groups.sequence.rank == 0
        self._model, self._parts, trial = load_sharded_model(self.config, groups)
        self._probe_row = trial.rows[0]
        self.reads_pictures = self._model.pictures is not None
        if self._model.routers is not None:
            self.routed_experts = self._model.routers.sizes
        if self.config.head is ModelHead.lm:
            self.logprob_noise = trial.noise
        causal_lm = self._model.causal_lm
        parameters = dict(causal_lm.named_parameters())
        scale = LossScale() if self.config.dtype == Dtype.float16 else None
        self._optimizer = ShardedOptimizer(
            parameters, self.config.optimizer, self._parts, groups.world, groups.tensor, scale
        )
        self._writer = BackgroundWriter(
            groups.world, shares_files=self.shares_files, node=self.node
        )
        held = parameters
        if self.config.has_adapter:  # what is not trained is read from the model again
            held = {name: p for name, p in parameters.items() if p.requires_grad}
        beside = PlaceStates(self.config, causal_lm, self._parts, self._optimizer, self._writer)
        beside.fill_all()
        self._place_states = beside
        state = ShardedState(
            type(causal_lm).__name__, held, self._parts, self._optimizer, beside.further_state
        )
        self._snapshots = Snapshots(state, self._writer)
        self._kept_states = KeptStates(state, self._writer)
        is_alone = self._is_adapter_published_alone
        self._publication = Publication(
            [name for name in parameters if adapter_place(name) == (0 if is_alone else None)],
            self._parts,
            (lambda: self._values) if is_alone else self._take_values,
            groups.world,
            torch.float32 if is_alone else compute_dtype(self.config),
        )
        logger.info(
            "engine_ready model=%s rank=%d world_size=%d sequence=%d tensor=%d device=%s dtype=%s "
            "abilities=%s",
            type(causal_lm).__name__,
            rank,
            world_size,
            groups.sequence.size,
            groups.tensor.size,
            device,
            self.config.dtype,
            self._model.abilities,
        )
        return groups.position

    def sleep(self) -> None:
        causal_lm, copies = self._model.causal_lm, self._model.copies
        held = [
            *(local_part(p.detach()) for p in causal_lm.parameters()),
            *causal_lm.buffers(),
            *self._optimizer.tensors,
            *(copies.tensors if copies is not None else ()),
        ]
        self._stowed = Stowed(it for it in held if it.device.type == self.world.device.type)

    def wake(self) -> None:
        self._stowed.bring_back()

    def forward(self, rows: PackedRows, output: str) -> torch.Tensor:
        if output != BASE_LOGPROBS:
            return super().forward(rows, output)
        with without_adapters(self._model.causal_lm):
            return super().forward(rows, output)

    @property
    def _is_adapter_published_alone(self) -> bool:
        return self.config.lora.is_published_alone and self.config.head is ModelHead.lm

    def published_parts(self) -> tuple[dict[str, torch.Tensor], Iterator[torch.Tensor]]:
        unfilled, values = super().published_parts()
        if not self._is_adapter_published_alone:
            return unfilled, values
        probe = self._measure_probe().tensor.flatten()
        if self.world.rank != 0:
            return unfilled, values
        return {**unfilled, PROBE_NAME: probe.to("meta")}, chain(values, [probe])

    def _measure_probe(self) -> AdapterProbe:
        """What the adapter does now; all ranks make the call."""

        def measure(token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            is_asked = torch.ones(len(token_ids), dtype=torch.bool)
            fields = {"input_ids": token_ids.int(), "loss_mask": is_asked}
            rows = PackedRows(fields, (len(token_ids),))
            return self.forward(rows, BASE_LOGPROBS), self.forward(rows, "logprobs")

        return AdapterProbe.measured(
            self._probe_row[: self.config.max_tokens_per_micro_batch], measure
        )

    def _outputs(self, batch: PlannedBatch) -> Iterator[tuple[MicroBatch, Outputs]]:
        with self._model.computing():
            for number in range(len(batch.packed)):
                micro_batch = self._micro_batch(batch, number)
                yield micro_batch, self._forward(micro_batch, batch.rows, batch.top_k)

    def _combined_outputs(self, values: torch.Tensor) -> torch.Tensor:
        return self._groups.sequence.sum(values)  # each rank has those of its own tokens

    def _add_gradients(self, batch: PlannedBatch, loss: MinibatchLoss) -> None:
        held_bytes = torch.cuda.memory_allocated() if self.is_cuda else 0
        with self._model.computing():
            for number in range(len(batch.packed)):
                self._model.begin_micro_batch(is_last=number == len(batch.packed) - 1)
                micro_batch = self._micro_batch(batch, number)
                value = loss.of(micro_batch, self._forward(micro_batch, batch.rows))
                self._note_routes(micro_batch, loss)
                # FSDP averages over its ranks, but the denominator is already the global one.
                scale = self._optimizer.loss_scale or LossScale(1.0)
                torch.autograd.backward(value * (self.rows.size * scale.value))
                if self._model.copies is not None:
                    self._model.copies.take_gradients()
        if self._model.is_compiled and not self._told_compilation:
            self._told_compilation = True
            spent = torch._dynamo.utils.calculate_time_spent()
            logger.info("layers_compiled seconds=%.1f", spent["total_wall_time"])

        if self.rows.size > 1 and not self._is_room_known:
            self._find_room_to_meet_once(max(batch.num_computed_tokens), held_bytes)

    def _note_routes(self, batch: MicroBatch, loss: MinibatchLoss) -> None:
        """Counts experts of tokens of the same weights that the routers would not have chosen."""
        routers, versions = self._model.routers, batch.fields.get("versions")
        if routers is None or batch.routes is None or versions is None or not loss.is_first:
            return
        is_same = versions[batch.own] == loss.version
        counts = self._groups.sequence.sum(routers.count_others(batch.positions, is_same))
        others, given = map(Metric.sum, counts)
        loss.metrics.add(**{OTHER_EXPERTS: others, NUM_GIVEN: given})

    def _find_room_to_meet_once(self, num_tokens: int, held_bytes: int) -> None:
        """From now on ranks meet once, if each has room for all parameters and their gradients.

        That is known once an update has filled a good part of a micro-batch on every rank: what
        such updates need is known then, and so is what others have of the device. All ranks make
        the call.

        Args:
            num_tokens: of the update's largest micro-batch.
            held_bytes: of the device's memory before the update, whatever its micro-batches.
        """
        fullness = num_tokens / self.config.max_tokens_per_micro_batch
        if float(-self.world.max(torch.tensor(-fullness))) < TELLING_FULLNESS:
            return
        self._is_room_known = True
        is_short = torch.tensor(not self._takes_room(fullness, held_bytes), dtype=torch.uint8)
        if not self.world.max(is_short):
            self._model.meet_once()
            logger.info("ranks_meet_once an update: there is room for what they would gather")
        elif self.is_cuda:
            torch.cuda.empty_cache()  # what this rank has taken is of no use

    def _takes_room(self, fullness: float, held_bytes: int) -> bool:
        """Whether this rank has room to meet once; what it needs is its process's from now on."""
        if not self.is_cuda or self.config.cpu_offload:
            return False
        num_values = sum(shape.numel() for shape in self._parts.shapes.values())
        size = compute_dtype(self.config).itemsize + FLOAT32_BYTES
        needed = num_values // self._groups.tensor.size * size
        used = held_bytes + (torch.cuda.max_memory_allocated() - held_bytes) / fullness
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - used
        if free * ROOM_SHARE < needed:
            return False
        try:  # the allocator keeps it: other processes on this GPU see that it is taken
            torch.empty(needed, dtype=torch.uint8, device=self.world.device)
        except torch.OutOfMemoryError:
            return False
        return True

    def load_snapshot(self, folder: Path) -> None:
        self._model.forget_gradients()
        super().load_snapshot(folder)

    def load_state(self, folder: Path, name: str) -> None:
        self._model.forget_gradients()
        super().load_state(folder, name)

    def _take_step(
        self, step: int, optimizers: Mapping[int, OptimizerConfig], *, is_void: bool
    ) -> dict[int, float]:
        return self._optimizer.update(step, optimizers, is_void=is_void)

    def _own_metrics(self) -> dict[str, float]:
        scale = self._optimizer.loss_scale
        return {} if scale is None else {"loss_scale": scale.value}

    @property
    def _pads_rows(self) -> bool:
        return not self._model.abilities.packs

    @property
    def _meets_each(self) -> bool:
        return not self._model.meets_once

    @property
    def _has_few_sizes(self) -> bool:
        return self._model.has_few_sizes  # also where a rank has given compiling up: all have them

    def _values(self, name: str) -> torch.Tensor:
        """The live values of this rank's part of a parameter."""
        return local_part(self._model.causal_lm.get_parameter(name).detach())

    def _take_values(self) -> Values:
        """The live values as others know the model: adapters are merged. All ranks call it."""
        causal_lm = self._model.causal_lm
        return merged_values(causal_lm, self._values, self._parts, self.world)

    def begin_save_hf(self, folder: Path, *, is_staged: bool = True) -> Future[None]:
        is_adapted = self.config.has_adapter
        # what is not staged is published; a value head is no part of an adapter
        is_whole = self.config.lora.save_merged or self.config.head is not ModelHead.lm
        if is_adapted and is_staged and not is_whole:
            return self._place_states.begin_save(0, folder)
        if not is_staged and self._is_adapter_published_alone:
            return self._place_states.begin_save(0, folder, probe=self._measure_probe())
        export = ModelExport(
            self._model.causal_lm,
            self._parts,
            self._take_values(),
            Path(self.config.path),
            folder,
            compute_dtype(self.config),
            self._writer,
        )
        return export.begin(is_staged=is_staged, reads_late=is_adapted)

    def fill_adapter(self, place: int, beginning: AdapterBeginning) -> None:
        self._place_states.fill(place, beginning)

    def begin_save_adapter(self, place: int, folder: Path, *, with_optimizer: bool) -> Future[None]:
        return self._place_states.begin_save(place, folder, with_optimizer=with_optimizer)

    def _leave(self) -> None:
        if hasattr(self, "_groups"):
            self._groups.close()

    @property
    def _min_saved_tokens(self) -> float:
        return self._model.min_saved_tokens(self.world.device)

    def _micro_batch(self, batch: PlannedBatch, number: int) -> MicroBatch:
        size = 0
        if self._has_few_sizes:
            num_tokens = batch.num_computed_tokens[number]
            size = padded_size(num_tokens, self.config.max_tokens_per_micro_batch)
            # torch.compile would compile layers anew for a rank that has one token
            size = max(size, 2 * self._groups.sequence.size)
        micro_batch = make_micro_batch(
            batch.rows,
            batch.packed[number],
            batch.asked,
            self._model.layout,
            self.world.device,
            forest=batch.forests[number],
            num_tokens=size,
            is_behind=batch.is_behind,
            numbers=batch.numbers,
            row_places=batch.row_places,
        )
        if (places := self._place_states.places) is not None:
            layout = micro_batch.layout
            also = batch.places if self.rows.size > 1 else ()
            places.lay_out(micro_batch.places, layout, also, are_padded=self._pads_rows)
        return micro_batch

    def _forward(self, batch: MicroBatch, rows: PackedRows, top_k: int = 0) -> Outputs:
        logprobs, entropy = self._model(
            batch.input_ids,
            batch.layout,
            batch.positions,
            batch.targets,
            batch.gather_temperatures(rows),
            batch.routes,
            top_k,
            batch.pictures,
        )
        return logprobs, entropy

    @property
    def _vocab_size(self) -> int:
        return int(self._model.causal_lm.config.get_text_config().vocab_size)
