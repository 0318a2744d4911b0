"""The model of a snapshot as a folder, written by one process, one tensor after the other.

Of a model with an adapter the snapshot holds what is trained; the rest is read from the model.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from areal_sc.config.schema import ActorConfig
from areal_sc.engines.fsdp.cuts import CutParts
from areal_sc.engines.training.adapters.adapter_files import begin_adapter
from areal_sc.engines.training.adapters.lora import adapter_place, add_adapters, merged_values
from areal_sc.engines.training.background import FAILURES, BackgroundWriter
from areal_sc.engines.training.causal_lm import compute_dtype
from areal_sc.engines.training.export import ModelExport
from areal_sc.engines.training.loading import SharedWeights
from areal_sc.engines.training.parts import Box
from areal_sc.engines.training.process_group import ProcessGroup
from areal_sc.engines.training.snapshot_index import SnapshotIndex
from areal_sc.engines.training.snapshots import Placed, check_same_model, opened_files, read_box
from areal_sc.errors import CheckpointError

_PARAMETER = "parameter."


def export_snapshot(
    config: ActorConfig, snapshot: Path, folder: Path, *, adapter_alone: bool = False
) -> None:
    """Writes what `begin_save_hf` would have written when the snapshot was taken.

    Any mesh of either engine may have written it: tensors have their Hugging Face names.

    Args:
        config: of the run; `path` is a folder.
        snapshot: has `snapshot.json` in it.
        folder: is replaced as a whole.
        adapter_alone: of a model with an adapter; otherwise that is merged.
    Raises: CheckpointError: the snapshot cannot be read, or is of another model, or the folder
        cannot be written. ModelError: `config.path` cannot be used.
    """
    alone = ProcessGroup(0, 1, torch.device("cpu"))
    stored = SharedWeights(config, alone)
    stored.open(lambda _: None)
    causal_lm = stored.build()
    stored.fill_buffers(causal_lm)
    stored.check()
    held = dict(causal_lm.named_parameters())
    if config.has_adapter:
        add_adapters(causal_lm, config.lora, config.head)
        held = {n: p for n, p in causal_lm.named_parameters() if p.requires_grad}
    parts = CutParts.of_one_rank(causal_lm)
    first = {id(parameter): name for name, parameter in causal_lm.named_parameters()}
    wanted = {
        _PARAMETER + name: Placed(parts.shapes[name], torch.float32, parts.box(name), True)
        for name in held
    }
    writer = BackgroundWriter(alone)
    try:
        index = SnapshotIndex.read(snapshot)
        ranks = range(len(index.files))
        index.check_content(snapshot, ranks)
        shapes = {n: shape for n, shape in index.shapes.items() if n.startswith(_PARAMETER)}
        index = msgspec.structs.replace(index, shapes=shapes)
        # an interrupt closes the files before it waits for the writer, which so comes to its end
        with opened_files(snapshot, ranks) as files:
            check_same_model(files, index, wanted, type(causal_lm).__name__)

            def values(name: str) -> torch.Tensor:
                known = first[id(causal_lm.get_parameter(name))]  # tied ones are there once
                if known not in held:
                    whole = stored.receive(known, parts)
                    stored.check()
                    return whole.to(compute_dtype(config))  # as the ranks have it
                whole = torch.empty(parts.shapes[name])
                read_box(files, index, _PARAMETER + known, Box.whole(whole.shape), whole)
                return whole

            if adapter_alone:
                adapter = {name: values(name) for name in held if adapter_place(name) == 0}
                begin_adapter(config, adapter, folder, writer).result()
                return
            merged = merged_values(causal_lm, values, parts, alone)
            export = ModelExport(
                causal_lm,
                parts,
                merged,
                Path(config.path),
                folder,
                compute_dtype(config),
                writer,
            )
            export.begin(is_staged=False, reads_late=True).result()
    except FAILURES as error:
        raise CheckpointError(f"cannot read the snapshot in {snapshot}: {error}") from error
    finally:
        writer.close()
