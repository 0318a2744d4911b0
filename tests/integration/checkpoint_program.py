"""Runs what a test asks of the engine's snapshots and exports, in several ranks that may be killed.

Called as `checkpoint_program.py FOLDER`, with scenarios in `FOLDER/scenarios.json`, that run one
after the other. Each is a list of actions that every rank takes; see `Rank.take`. Rank n of NAME
leaves `FOLDER/NAME-n.pt`: label -> what it recorded.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from ranks_program import (
    RANK_TIMEOUT_S,
    actor_config,
    import_what_ranks_need,
    make_rows,
    wait_for_address,
    whole_weights,
)

from areal_sc.algorithms.named_loss import loss_of
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.engines.fsdp.optimizer import local_part
from areal_sc.engines.training.export import ModelExport
from areal_sc.errors import ArealError, CheckpointError

LENGTHS = (11, 6, 14, 3, 9, 20, 5, 8)
VOCABULARY = 30


class Rank:
    """One rank: an engine, and a disk that can be held."""

    def __init__(self, engine: FSDPEngine, rank: int, share: int, folder: Path) -> None:
        self.engine = engine
        self.rank = rank
        self.share = share
        self.num_shares = engine.config.parallel.data
        self.folder = folder
        self.recorded: dict[str, Any] = {}
        self._written: Future[None] | None = None
        self._disk_goes_on = threading.Event()

    def take(self, action: str, argument: Any) -> None:
        """One action, by the name of its method."""
        getattr(self, action)(argument)

    def train(self, step: int) -> None:
        rows = make_rows(step, list(LENGTHS), VOCABULARY)
        mine = rows.take(list(range(self.share, len(LENGTHS), self.num_shares)))
        self.engine.update([mine], loss_of(self.engine.config.ppo), step=step)

    def begin_snapshot(self, path: str) -> None:
        self._written = self.engine.begin_snapshot(self._place(path))

    def keep(self, path_and_names: list[str]) -> None:
        """In the memory of this rank's node."""
        path, name, beside = path_and_names
        self.engine.keep_state(self._place(path), name, beside=beside)

    def load_kept(self, path_and_name: list[str]) -> None:
        path, name = path_and_name
        self.engine.load_state(self._place(path), name)

    def refuse_kept(self, path_and_name: list[str]) -> None:
        """Why it cannot be loaded, under the name of the folder."""
        try:
            self.load_kept(path_and_name)
        except CheckpointError as error:
            self.recorded[Path(path_and_name[0]).name] = str(error)

    def copy(self, ranks_and_paths: list[Any]) -> None:
        ranks, *paths = ranks_and_paths
        if self.rank in ranks:
            shutil.copytree(*map(self._place, paths))

    def begin_save_hf(self, path: str) -> None:
        self._written = self.engine.begin_save_hf(self._place(path))

    def bring(self, paths: list[str]) -> None:
        """What this rank's machine has of a snapshot to a folder that all see."""
        source, target = map(self._place, paths)
        target.mkdir(exist_ok=True)
        index = ["snapshot.json"] if self.rank == 0 else []
        for name in (f"rank-{self.rank}.safetensors", *index):
            shutil.copy(source / name, target)

    def begin_split_export(self, path: str) -> None:
        """As `begin_save_hf`, in files of a few kilobytes."""
        self._written = ModelExport(
            self.engine._model.causal_lm,
            self.engine._parts,
            self.engine._values,
            Path(self.engine.config.path),
            Path(path),
            torch.float32,
            self.engine._writer,
            max_file_bytes=10_000,
        ).begin()

    def wait(self, label: str) -> None:
        assert self._written is not None
        error = self._written.exception(RANK_TIMEOUT_S)
        self.recorded[label] = f"{type(error).__name__}: {error}" if error else ""

    def load(self, path: str) -> None:
        self.engine.load_snapshot(Path(path))

    def weights(self, label: str) -> None:
        self.recorded[label] = whole_weights(self.engine)

    def random(self, label: str) -> None:
        self.recorded[label] = torch.rand(4)

    def seed(self, number: int) -> None:
        torch.manual_seed(number + self.rank)

    def record_size(self, label: str) -> None:
        """Number of parameter values that this rank holds."""
        self.recorded[label] = sum(
            local_part(parameter).numel() for parameter in self.engine._model.parameters()
        )

    def hold_pwrite(self, rank: int) -> None:
        """From now on, this rank's disk takes no values until `release`."""
        if rank == self.rank:
            original = os.pwrite

            def pwrite(*arguments: Any) -> int:
                self._wait_for_disk()
                return original(*arguments)

            os.pwrite = pwrite

    def hold_rename(self, name: str) -> None:
        """From now on, the rename of a folder of this name does not happen."""
        original = Path.rename

        def rename(path: Path, target: Any) -> Any:
            if path.name == name:
                self._wait_for_disk()
            return original(path, target)

        Path.rename = rename  # type: ignore[method-assign]

    def release(self, _: Any) -> None:
        self._disk_goes_on.set()

    def await_holding(self, rank: int) -> None:
        """Until that rank's disk holds."""
        while not self._marker(rank).exists():
            time.sleep(0.01)

    def kill(self, rank: int | None) -> None:
        """SIGKILL of one rank, or of all."""
        if rank is None or rank == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)

    def _place(self, path: str) -> Path:
        """Where `*` stands for it: rank 0 is on another machine than the others."""
        return Path(path.replace("*", "first" if self.rank == 0 else "others"))

    def _wait_for_disk(self) -> None:
        self._marker(self.rank).touch()
        assert self._disk_goes_on.wait(RANK_TIMEOUT_S)

    def _marker(self, rank: int) -> Path:
        return self.folder / f"holding-{rank}"


def run_rank(
    name: str, scenario: dict[str, Any], folder: Path, rank: int, world_size: int, address: str
) -> None:
    torch.set_num_threads(1)
    own_folder = folder / name
    own_folder.mkdir(exist_ok=True)
    config = actor_config({"parallel": {"data": world_size}, **scenario})
    engine = FSDPEngine(config)
    engine.shares_files = scenario.get("shares_files", [True] * world_size)[rank]
    engine.node = scenario.get("nodes", [""] * world_size)[rank]
    if rank == 0 and world_size > 1:
        address = engine.create_rendezvous()
        (folder / f"{name}.address.part").write_text(address)
        (folder / f"{name}.address.part").rename(folder / f"{name}.address")
    share = engine.initialize(rank, world_size, address).data_rank
    taken = Rank(engine, rank, share, own_folder)
    try:
        for action, argument in scenario["actions"]:
            taken.take(action, argument)
    except (ArealError, ValueError) as error:
        taken.recorded["error"] = f"{type(error).__name__}: {error}"
    torch.save(taken.recorded, folder / f"{name}-{rank}.pt")
    if not scenario.get("loses_ranks"):
        engine.close()


def run_scenario(name: str, scenario: dict[str, Any], folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    ranks: list[Any] = []
    address = ""
    for rank in range(scenario["world_size"]):
        process = context.Process(
            target=run_rank, args=(name, scenario, folder, rank, scenario["world_size"], address)
        )
        process.start()
        ranks.append(process)
        if rank == 0 and scenario["world_size"] > 1:
            address = wait_for_address(folder / f"{name}.address", process)
    for process in ranks:
        process.join(RANK_TIMEOUT_S)
    codes = [process.exitcode for process in ranks]
    expected = scenario.get("exit_codes", [0] * len(ranks))
    if codes != expected:
        for process in ranks:
            process.kill()
        raise SystemExit(f"{name}: the ranks ended with {codes}, expected {expected}")


def main(folder: Path) -> None:
    import_what_ranks_need()
    for name, scenario in json.loads((folder / "scenarios.json").read_text()).items():
        run_scenario(name, scenario, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
