"""What a server is asked for when it gets an adapter, and what it must not answer."""

from __future__ import annotations

import json
import shutil
import threading
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from areal_sc.config.lora_settings import LoraConfig
from areal_sc.config.schema import RolloutConfig
from areal_sc.engines.servers.adapters import AdapterFolders, AdapterWeights
from areal_sc.engines.servers.client import ServedAdapter
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.servers.weights import UpdateTimes
from areal_sc.engines.training.adapters.adapter_probe import PROBE_NAME, AdapterProbe
from areal_sc.errors import EngineFailed, ModelError

PROBE = AdapterProbe([5, 9, 2, 7], [-12.0, -5.0, -10.0], [0.5, -0.25, 0.125])
TENSORS = [
    ("model.layers.0.q_proj.lora_A", torch.arange(6.0)),
    ("model.layers.0.q_proj.lora_B", torch.arange(8.0)),
    (PROBE_NAME, PROBE.tensor.flatten()),
]


def config() -> RolloutConfig:
    lora = LoraConfig(rank=2, publish_merged=False)
    return RolloutConfig(path="base", lora=lora, max_context_tokens=64)


def weights(folder: Path) -> AdapterWeights:
    written = AdapterFolders(folder, config()).write(3, TENSORS)
    return AdapterWeights.read(3, written, config())


class Server:
    """Has some adapters.

    Args:
        share: how much of the changes it shows.
        noise: by how much its log-probabilities differ from the trainer's, with and without.
    """

    url = "server"

    def __init__(self, *, share: float = 1.0, noise: float = 0.0) -> None:
        self.adapter: ServedAdapter | None = ServedAdapter("policy-2-00000002", 2)
        self.bare_logprobs: list[float] | None = None
        self.names = {"model", "somebody-s", "policy-7b", "policy-1-0000abcd", "policy-2-00000002"}
        self.asked: list[str] = []
        self.share, self.noise = share, noise

    async def loaded_adapters(self) -> set[str]:
        return set(self.names)

    async def load_adapter(self, name: str, folder: str) -> None:
        self.asked.append(f"load {name}")
        self.names.add(name)

    async def unload_adapter(self, name: str) -> None:
        self.asked.append(f"unload {name}")
        self.names.remove(name)

    async def prompt_logprobs(self, token_ids: list[int], adapter: str) -> list[float]:
        base = [-3.0 - token + self.noise for token in token_ids[1:]]
        changes = PROBE.changes[: len(base)]
        return [b + self.share * c * bool(adapter) for b, c in zip(base, changes, strict=True)]


def test_a_written_adapter_is_one_of_peft_with_its_probe(tmp_path: Path) -> None:
    folders = AdapterFolders(tmp_path / "root", config())
    first, second = folders.write(3, TENSORS), folders.write(3, TENSORS)
    assert json.loads((first / "adapter_config.json").read_text())["r"] == 2
    file = second / "adapter_model.safetensors"
    found = {key: tuple(values.shape) for key, values in load_file(file).items()}
    prefix = "base_model.model.model.layers.0.q_proj"
    assert found == {f"{prefix}.lora_A.weight": (2, 3), f"{prefix}.lora_B.weight": (4, 2)}
    read = AdapterWeights.read(3, second, config())
    assert read.probe == PROBE
    assert read.adapter == (f"policy-3-{zlib.crc32(file.read_bytes()):08x}", 3)
    assert AdapterWeights.read(3, first, config()).adapter == read.adapter  # the same values
    third = folders.write(4, TENSORS)
    folders.keep_only(third)
    assert list((tmp_path / "root").iterdir()) == [third]
    with pytest.raises(ModelError, match="holds no published adapter"):
        AdapterWeights.read(3, first, config())
    folders.keep_only(None)
    assert not list((tmp_path / "root").iterdir())


async def test_the_file_is_not_read_in_the_loop_s_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, adopted = list[int](), list[Any]()

    def read(*_: Any) -> str:
        threads.append(threading.get_ident())
        return "weights"

    async def adopt(weights: Any) -> None:
        adopted.append(weights)

    monkeypatch.setattr(AdapterWeights, "read", read)
    engine: Any = SimpleNamespace(_config=config(), adopt=adopt)
    await ServerEngine._adopt_adapter(engine, 3, tmp_path)
    assert adopted == ["weights"]
    assert threads != [threading.get_ident()]


async def test_a_folder_that_goes_meanwhile_is_no_defect(tmp_path: Path) -> None:
    server: Any = Server()
    of_version = weights(tmp_path)
    await of_version.load_beside(server)
    shutil.rmtree(of_version.folder)
    await of_version.load(server, UpdateTimes())


async def test_it_is_loaded_beside_the_one_that_is_served_which_stays(tmp_path: Path) -> None:
    server: Any = Server()
    of_version = weights(tmp_path)
    await of_version.load_beside(server)
    name = of_version.adapter.name
    assert server.asked == ["unload policy-1-0000abcd", f"load {name}"]
    assert server.adapter == ("policy-2-00000002", 2)
    times = UpdateTimes()
    await of_version.load(server, times)
    assert server.adapter == (name, 3)
    size = (of_version.folder / "adapter_model.safetensors").stat().st_size
    assert times.update_bytes == size
    await of_version.load_beside(server)  # again, as after a publication that was broken off
    assert server.asked[2:] == ["unload policy-2-00000002"]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95, -1.0, 2.0, float("nan")])
async def test_a_server_must_show_what_the_adapter_changes(tmp_path: Path, share: float) -> None:
    server: Any = Server(share=share)
    with pytest.raises(ModelError, match=r"server does not compute with adapter policy-3-"):
        await weights(tmp_path).load_beside(server)
    assert server.adapter == ("policy-2-00000002", 2)


@pytest.mark.parametrize(("share", "noise"), [(0.999, 0.0), (0.5, 0.05), (0.0, 0.1)])
async def test_what_may_be_noise_is_no_difference(
    tmp_path: Path, share: float, noise: float
) -> None:
    server: Any = Server(share=share, noise=noise)
    await weights(tmp_path).load_beside(server)
    with pytest.raises(ModelError, match="does not compute with adapter"):
        await weights(tmp_path).load_beside(Server(share=-1.0, noise=noise))  # type: ignore[arg-type]


async def test_a_server_with_a_short_context_gets_a_shorter_row(tmp_path: Path) -> None:
    written = AdapterFolders(tmp_path, config()).write(3, TENSORS)
    short = RolloutConfig(path="base", lora=LoraConfig(rank=2), max_context_tokens=4)
    read = AdapterWeights.read(3, written, short)
    assert read.probe == AdapterProbe([5, 9, 2], [-12.0, -5.0], [0.5, -0.25])
    await read.load_beside(Server())  # type: ignore[arg-type]


async def test_a_refusal_and_a_lie_are_told_by_name(tmp_path: Path) -> None:
    class Refusing(Server):
        async def load_adapter(self, name: str, folder: str) -> None:
            raise EngineFailed("rank 2 is too large")

    class Lying(Server):
        async def load_adapter(self, name: str, folder: str) -> None: ...

    for server, error, words in (
        (Refusing(), EngineFailed, "server does not take the adapter: rank 2 is too large"),
        (Lying(), ModelError, "server says that it has no adapter policy-3-"),
    ):
        with pytest.raises(error, match=words):
            await weights(tmp_path).load_beside(server)  # type: ignore[arg-type]
