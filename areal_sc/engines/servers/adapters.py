"""Adapters as versions of the weights: a server keeps the model that it started with.

A server loads the new adapter beside the one that it serves, while it generates, and has to show
that it computes with it. Then its answers are ended where they are, and go on under the new name. A
request names its adapter, so that the versions of its tokens are known whatever the server does.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import Final

import torch

from areal_sc.config.lora_settings import LoraConfig
from areal_sc.config.schema import RolloutConfig
from areal_sc.engines.held_adapters import HeldAdapters
from areal_sc.engines.servers.client import ServedAdapter, ServerClient
from areal_sc.engines.servers.model import ServedModel
from areal_sc.engines.servers.weights import UpdateTimes, VersionWeights
from areal_sc.engines.training.adapters.adapter_files import read_layers, write_adapter
from areal_sc.engines.training.adapters.adapter_probe import PROBE_NAME, AdapterProbe
from areal_sc.engines.training.adapters.lora import LORA_A
from areal_sc.errors import EngineFailed, ModelError
from areal_sc.sizing.adapter_folder import ADAPTER_WEIGHTS
from areal_sc.weights.group import NamedTensor

_NAME: Final = re.compile(r"policy-\d+-[0-9a-f]{8}")
"""The names of adapters that a run has loaded into its servers: version and checksum."""


@dataclass(frozen=True)
class AdapterWeights(VersionWeights):
    """An adapter in a folder of peft's format that the server sees.

    It has to stay until the version after it has been published.

    Attributes:
        num_bytes: of the file with its values.
        adapter: its version, and its name, in which the checksum of its values stands.
        probe: by which a server shows that it serves it.
    """

    version: int
    folder: Path
    num_bytes: int
    adapter: ServedAdapter
    probe: AdapterProbe

    @classmethod
    def read(cls, version: int, folder: Path, config: RolloutConfig) -> AdapterWeights:
        """Raises: ModelError: no adapter was published there."""
        try:
            values = (folder / ADAPTER_WEIGHTS).read_bytes()
            probe = AdapterProbe.read(folder)
        except (OSError, ValueError, TypeError) as error:
            raise ModelError(f"{folder} holds no published adapter: {error}") from error
        # one token is sampled after the row
        probe = probe.cut(config.max_context_tokens - 1)
        adapter = ServedAdapter(f"policy-{version}-{zlib.crc32(values):08x}", version)
        return cls(version, folder, len(values), adapter, probe)

    async def load_beside(self, server: ServerClient) -> None:
        """Raises: ModelError: the server ignores the adapter. EngineFailed: it does not take it."""
        if server.bare_logprobs is None:
            # at first: where vLLM has adapters, it computes with one on a CPU even if none is named
            server.bare_logprobs = await server.prompt_logprobs(self.probe.token_ids, "")
        name, loaded = self.adapter.name, await server.loaded_adapters()
        served = server.adapter.name if server.adapter else ""
        for old in loaded - {name, served}:
            if _NAME.fullmatch(old):
                await server.unload_adapter(old)
        if name not in loaded:
            try:
                await server.load_adapter(name, str(self.folder))
            except EngineFailed as error:
                raise EngineFailed(f"{server.url} does not take the adapter: {error}") from error
        if name not in await server.loaded_adapters():
            raise ModelError(f"{server.url} says that it has no adapter {name}, which it loaded")
        await self._check_shown(server, server.bare_logprobs)

    async def load(self, server: ServerClient, times: UpdateTimes) -> None:
        times.update_bytes += self.num_bytes
        server.adapter = self.adapter

    async def _check_shown(self, server: ServerClient, bare: Sequence[float]) -> None:
        """Compares what the adapter changes on the server with what it changes on the trainer."""
        adapted = await server.prompt_logprobs(self.probe.token_ids, self.adapter.name)
        error = self.probe.error([a - b for a, b in zip(adapted, bare, strict=True)])
        if not error <= self.probe.limit(bare):
            raise ModelError(
                f"{server.url} does not compute with adapter {self.adapter.name}, which it says it "
                f"has: log-probabilities of a probe should change by {self.probe.size:.2g}, and "
                f"their change is {error:.2g} off, where rounding explains "
                f"{self.probe.limit(bare):.2g}; set actor.lora.publish_merged=true"
            )


class NamedAdapters(HeldAdapters[str]):
    """The adapters that a server has for requests that name them, by the server's names of them.

    Args:
        lora: the largest rank, and how many the server has room for.
        client: gives the server. Raises: EngineFailed: it is lost.
    """

    def __init__(
        self, model: ServedModel, lora: LoraConfig, client: Callable[[], ServerClient]
    ) -> None:
        super().__init__(lora.places, self._check, self._give, self._forget)
        self._model = model
        self._lora = lora
        self._client = client

    async def _check(self, folder: str) -> int:
        """A server may end with an adapter that does not fit: so it is read here, too."""
        read = partial(read_layers, Path(folder), self._model.adaptable, torch.float32)
        if (rank := (await asyncio.to_thread(read)).rank) > self._lora.rank:
            raise ModelError(
                f"adapter {folder}: expected a rank up to actor.lora.rank={self._lora.rank}, got "
                f"{rank}"
            )
        return 1

    async def _give(self, folder: str) -> str:
        client, name = self._client(), f"adapter-{sha256(folder.encode()).hexdigest()[:32]}"
        if name not in await client.loaded_adapters():  # else a request for it was given up
            await client.load_adapter(name, folder)
        return name

    async def _forget(self, name: str) -> None:
        with suppress(EngineFailed):  # it may have forgotten it
            await self._client().unload_adapter(name)


class AdapterFolders:
    """Where a worker writes the adapters that it has pulled, for its server.

    Args:
        root: is the worker's own; what earlier lives have left there goes.
    """

    def __init__(self, root: Path, config: RolloutConfig) -> None:
        self._root = root
        self._config = config

    def write(self, version: int, tensors: Iterable[NamedTensor]) -> Path:
        """A new folder with the published tensors, which may be flat; older folders stay.

        Raises: EngineFailed: it could not be written.
        """
        lora, values = self._config.lora, dict(tensors)
        probe = AdapterProbe.from_tensor(values.pop(PROBE_NAME).float())
        shaped = {
            name: value.view(lora.rank, -1) if name.endswith(LORA_A) else value.view(-1, lora.rank)
            for name, value in values.items()
        }
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            folder = Path(mkdtemp(prefix=f"{version}-", dir=self._root))
            write_adapter(folder, lora, self._config.path, shaped)
            probe.write(folder)
        except OSError as error:
            raise EngineFailed(f"no adapter could be written to {self._root}: {error}") from error
        return folder

    def keep_only(self, kept: Path | None) -> None:
        """Removes all other folders, once the server serves this one."""
        for folder in self._root.glob("*"):
            if folder != kept:
                shutil.rmtree(folder, ignore_errors=True)
