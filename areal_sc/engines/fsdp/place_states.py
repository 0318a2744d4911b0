"""The adapters beside each other on one base, each with what AdamW knows of it, one at a time.

A place is filled, with a new adapter or with one from a folder, and is saved to a folder:

    adapter_config.json          peft's
    adapter_model.safetensors
    optimizer.safetensors        where asked for: moments by the names of the parameters, and `step`
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from areal_sc.config.schema import ActorConfig
from areal_sc.engines.base import AdapterBeginning
from areal_sc.engines.fsdp.cuts import CutParts
from areal_sc.engines.fsdp.optimizer import ShardedOptimizer, local_part
from areal_sc.engines.training.adapters.adapter_files import begin_adapter, read_adapter
from areal_sc.engines.training.adapters.adapter_places import AdapterPlaces
from areal_sc.engines.training.adapters.adapter_probe import AdapterProbe
from areal_sc.engines.training.adapters.lora import (
    LORA_A,
    adapter_place,
    common_name,
    lora_layers,
    new_values,
)
from areal_sc.engines.training.background import BackgroundWriter
from areal_sc.engines.training.parts import Box
from areal_sc.engines.training.whole_tensors import gather_whole
from areal_sc.errors import ModelError
from areal_sc.sizing.adapter_folder import stored_rank

OPTIMIZER_FILE: Final = "optimizer.safetensors"
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_STEP: Final = "step"


class PlaceStates:
    """Fills and saves the places of one rank; every rank must get the same calls.

    Args:
        parts: of all parameters of `causal_lm`.
        optimizer: has the state of each adapter.
        writer: the ranks, and the thread that writes.

    Attributes:
        places: which tokens each adapter computes; None: there is one for all.
    """

    def __init__(
        self,
        config: ActorConfig,
        causal_lm: Any,
        parts: CutParts,
        optimizer: ShardedOptimizer,
        writer: BackgroundWriter,
    ) -> None:
        self._config = config
        self._parts = parts
        self._optimizer = optimizer
        self._writer = writer
        self._world = optimizer.world
        self._parameters = {
            n: p for n, p in causal_lm.named_parameters() if adapter_place(n) is not None
        }
        layers = iter(lora_layers(causal_lm).values())
        self.places: AdapterPlaces | None = next((layer.places for layer in layers), None)

    @property
    def further_state(self) -> dict[str, torch.Tensor]:
        """What a snapshot needs beside parameters and moments."""
        return {} if self.places is None else {"adapter_ranks": self.places.ranks}

    def fill_all(self) -> None:
        """Every place begins; place 0 with the adapter of the settings, if they name one.

        Raises: ModelError: on every rank: there is none, or one that does not fit.
        """
        lora, seed = self._config.lora, self._config.seed
        for place in range(lora.places if self._parameters else 0):
            self.fill(place, AdapterBeginning(lora.path if place == 0 else "", seed=seed))

    def fill(self, place: int, beginning: AdapterBeginning) -> None:
        """See `TrainEngine.fill_adapter`."""
        rank, stored = beginning.rank or self._config.lora.rank, dict[str, torch.Tensor]()
        error: ModelError | None = None
        if beginning.folder and self._world.rank == 0:
            try:
                rank, stored = self._read(place, beginning)
            except ModelError as failure:  # the other ranks wait
                error = failure
        message = str(error) if error else None
        rank, stored, message = self._world.broadcast((rank, stored, message))
        if message is not None:
            raise error or ModelError(message)
        moments = self._optimizer.moments()
        for name in self._names(place):
            common, shape = common_name(name), self._small(name, rank)
            values = stored.get(common)
            if values is None:
                values = new_values(common, shape, beginning.seed)
            self._copy(name, values, local_part(self._parameters[name].detach()))
            for kind, part in moments.get(name, {}).items():  # a frozen model has none
                part.zero_()
                if kind == _STEP and _STEP in stored:
                    part.copy_(stored[_STEP])
                elif (values := stored.get(f"{kind}.{common}")) is not None:
                    self._copy(name, values, part)
        if self.places is not None:
            self.places.ranks[place] = rank

    def _copy(self, name: str, values: torch.Tensor, part: torch.Tensor) -> None:
        """This rank's part of whole values, which may be those of a smaller rank."""
        whole = torch.zeros(self._parts.shapes[name])
        whole[: values.shape[0], : values.shape[1]] = values
        own = self._parts.box(name).within(Box.whole(whole.shape))
        part.copy_(whole[own].view(part.shape))

    def _read(self, place: int, beginning: AdapterBeginning) -> tuple[int, dict[str, torch.Tensor]]:
        """Rank, and values by name: of parameters at place 0, `exp_avg.<name>` and so on, `step`.

        Raises: ModelError: the folder has no such adapter.
        """
        folder, found = Path(beginning.folder), self._config.lora.rank
        if self.places is not None:  # else there is one scale, and `read_adapter` compares
            found = stored_rank(folder)
            if found > self._config.lora.rank or beginning.rank not in (0, found):
                expected = beginning.rank or f"at most {self._config.lora.rank}"
                raise ModelError(f"{folder}: expected an adapter of rank {expected}, got {found}")
        lora = replace(self._config.lora, path=str(folder), rank=found)
        shapes = {common_name(n): self._small(n, found) for n in self._names(place)}
        stored = read_adapter(replace(self._config, lora=lora), shapes)
        path = folder / OPTIMIZER_FILE
        if not (beginning.with_optimizer and path.exists()):
            return found, stored
        try:
            state = load_file(path)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: not a whole safetensors file: {error}") from error
        expected_shapes = {f"{kind}.{n}": it for kind in _MOMENTS for n, it in shapes.items()}
        if {name: tuple(it.shape) for name, it in state.items()} != {_STEP: (), **expected_shapes}:
            raise ModelError(f"{path}: it is not the state of the adapter beside it")
        return found, stored | state

    def begin_save(
        self,
        place: int,
        folder: Path,
        *,
        with_optimizer: bool = False,
        probe: AdapterProbe | None = None,
    ) -> Future[None]:
        """See `TrainEngine.begin_save_adapter`.

        Args: probe: by which servers show that they serve it.
        """
        self._writer.wait()
        rank = self._config.lora.rank
        if self.places is not None:
            rank = int(self.places.ranks[place])
        copies = dict(self._whole(place, rank, "parameter"))
        state: dict[str, torch.Tensor] = {}
        if with_optimizer:
            for kind in _MOMENTS:
                state |= {f"{kind}.{n}": it for n, it in self._whole(place, rank, kind)}
            moments = self._optimizer.moments()
            # a rank that has no values of a parameter does not count its updates
            steps = torch.stack([moments[name][_STEP].cpu() for name in self._names(place)])
            state[_STEP] = self._world.max(steps.max())
        lora = replace(self._config.lora, rank=rank)
        config = replace(self._config, lora=lora)
        beside = {OPTIMIZER_FILE: state} if state else {}
        return begin_adapter(config, copies, folder, self._writer, probe, beside=beside)

    def _whole(self, place: int, rank: int, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole copies of the parameters of a place, or of moments, by the names at place 0."""
        moments = self._optimizer.moments()

        def values(name: str) -> torch.Tensor:
            if kind == "parameter":
                return local_part(self._parameters[name].detach())
            return moments[name][kind]

        names = self._names(place)
        for name, whole in gather_whole(names, values, self._parts, self._world, torch.float32):
            rows, columns = self._small(name, rank)
            yield common_name(name), whole[:rows, :columns].to("cpu", copy=True).contiguous()

    def _names(self, place: int) -> list[str]:
        return [name for name in self._parameters if adapter_place(name) == place]

    def _small(self, name: str, rank: int) -> tuple[int, int]:
        """The shape of a parameter of an adapter of that rank."""
        rows, columns = self._parts.shapes[name]
        is_a = common_name(name).rpartition(".")[2] == LORA_A
        return (rank, columns) if is_a else (rows, rank)
