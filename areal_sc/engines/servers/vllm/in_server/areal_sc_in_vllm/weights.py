"""New weights for one rank of a vLLM server: from shared memory, or as a rank of a weight group.

The calls come over `/collective_rpc`, to all ranks of a server at once. Their arguments are text.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import rebuild_storage_filename
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

_PACKAGE_FOLDER = Path(__file__).parents[5]


def _make_importable() -> None:
    """Makes `areal_sc` importable from where this file lies, and nothing that lies beside it.

    On the path its folder would bring all packages of the trainer's environment with it.
    """
    if importlib.util.find_spec("areal_sc") is None:
        spec = importlib.util.spec_from_file_location(
            "areal_sc",
            _PACKAGE_FOLDER / "__init__.py",
            submodule_search_locations=[str(_PACKAGE_FOLDER)],
        )
        assert spec
        assert spec.loader
        package = importlib.util.module_from_spec(spec)
        sys.modules["areal_sc"] = package
        spec.loader.exec_module(package)


_make_importable()

from areal_sc.weights.group import WeightReceiver, cut  # noqa: E402
from areal_sc.weights.published import BucketLayout, WeightGroup  # noqa: E402

if TYPE_CHECKING:

    class VLLMWorker:
        """What is used of vLLM's worker, which the class below is made a part of."""

        rank: int
        device: torch.device
        vllm_config: Any
        model_config: Any

        def get_model(self) -> Any: ...
else:
    VLLMWorker = object


class WeightLoader(VLLMWorker):
    """Calls that vLLM adds to its workers; their names must differ from all that these have."""

    areal_sc_groups: dict[str, WeightReceiver]
    areal_sc_is_updating = False

    def areal_sc_begin_update(self) -> None:
        if self.areal_sc_is_updating:
            raise RuntimeError("an update of the weights has begun already")
        self.areal_sc_is_updating = True
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.get_model())

    def areal_sc_end_update(self) -> None:
        if not self.areal_sc_is_updating:
            raise RuntimeError("no update of the weights has begun")
        self.areal_sc_is_updating = False
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.get_model(), self.model_config)

    def areal_sc_load_shared(self, arguments: str) -> None:
        """Loads a bucket from shared memory.

        Args:
            arguments: JSON: `memory`: the three values by which torch names it, `size` in bytes
                and `layout` of what is loaded.
        """
        given = json.loads(arguments)
        manager, handle, num_bytes = given["memory"]
        storage = rebuild_storage_filename(  # type: ignore[no-untyped-call]
            torch.UntypedStorage, manager.encode(), handle.encode(), num_bytes
        )
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        # A copy, as vLLM keeps what it is given until all weights of a layer are there.
        flat = whole[: given["size"]].to(self.device, copy=True)
        self._areal_sc_load(cut(flat, _layout(given["layout"])))

    def areal_sc_join_group(self, arguments: str) -> None:
        """Becomes a rank of a weight group.

        Args:
            arguments: JSON: `group`: values of a `WeightGroup`, `first_rank` of the server's, and
                `timeout_s` of the meeting and of each broadcast.
        """
        given = json.loads(arguments)
        group, rank = WeightGroup(*given["group"]), given["first_rank"] + self.rank
        receiver = WeightReceiver(group, rank, self.device, given["timeout_s"])
        self.areal_sc_groups = {**getattr(self, "areal_sc_groups", {}), group.name: receiver}

    def areal_sc_leave_group(self, name: str) -> None:
        groups = dict(getattr(self, "areal_sc_groups", {}))
        if receiver := groups.pop(name, None):
            receiver.close()
        self.areal_sc_groups = groups

    def areal_sc_receive(self, arguments: str) -> None:
        """Takes part in a broadcast, and loads what came.

        Args:
            arguments: JSON: `group`: its name, and `layout` of the bucket.
        """
        given = json.loads(arguments)
        receiver = self.areal_sc_groups[given["group"]]
        self._areal_sc_load(receiver.receive(_layout(given["layout"])))

    def _areal_sc_load(self, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
        with set_current_vllm_config(self.vllm_config):
            self.get_model().load_weights(named_tensors)


def _layout(given: list[list[Any]]) -> BucketLayout:
    names, dtypes, shapes = given
    return BucketLayout(tuple(names), tuple(dtypes), tuple(map(tuple, shapes)))
