"""What this machine offers to workers: CUDA devices and memory; found without torch."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from areal_sc.config.schema import Device
from areal_sc.errors import ConfigError
from areal_sc.system.cgroups import memory_left, num_cores

PROBE_TIMEOUT_S = 20.0
"""`nvidia-smi` takes seconds where the driver has to be loaded first."""

_MOST_RANKS_OF_MACHINE = 8
"""Machines with more GPUs are rare; where there are fewer, some cores stay free."""

_SLICE_SHARE = 0.95
"""A MIG slice that is named `1g.10gb` has 9.6 GiB, others about as much less than their names."""

CommandOutput = Callable[[list[str]], str | None]
"""Runs a command; its standard output, or None when it is not there or fails."""


@dataclass(frozen=True)
class Machine:
    """Memory and CUDA devices that workers can use.

    Attributes:
        host_memory_bytes: memory that can be taken without swapping; None: unknown.
        cuda_memory_bytes: total memory of each visible CUDA device, None where it is unknown.
    """

    host_memory_bytes: int | None = None
    cuda_memory_bytes: tuple[int | None, ...] = ()

    @property
    def num_cuda_devices(self) -> int:
        return len(self.cuda_memory_bytes)


def this_machine() -> Machine:
    """The machine that this process runs on, as its environment lets it see it."""
    return Machine(
        host_memory_bytes=available_memory_bytes(Path("/")),
        cuda_memory_bytes=visible_cuda_memory(os.environ, _command_output, Path("/dev")),
    )


def count_cuda_devices() -> int:
    """Number of CUDA devices that a worker on this machine would see."""
    return len(visible_cuda_memory(os.environ, _command_output, Path("/dev")))


def threads_of_rank(asked: int, num_ranks: int, *, is_cuda: bool) -> int:
    """CPU threads of a training rank.

    Many ranks without a GPU share few cores, and leave one to each. With a GPU the cores of its
    machine are for the model's trial at the start, and for updates of what is offloaded.

    Args:
        asked: `actor.num_threads`; 0: as said above.
        num_ranks: of the run.
    """
    if asked or not is_cuda:
        return asked or 1
    return max(1, num_cores() // min(num_ranks, _MOST_RANKS_OF_MACHINE))


def resolved_device(device: Device, num_cuda_devices: int, setting: str = "") -> Device:
    """`cpu` or `cuda`; `auto` is CUDA where there is a device, else the CPU.

    Args:
        setting: the name of what asks for it; without one, `cuda` is not questioned.
    Raises: ConfigError: the setting asks for CUDA, and there is no device.
    """
    if setting and device == Device.cuda and not num_cuda_devices:
        raise ConfigError(
            f"{setting}: cuda, but this machine has no CUDA device (nvidia-smi names none); "
            f"{setting}=cpu needs none"
        )
    if device != Device.auto:
        return device
    return Device.cuda if num_cuda_devices else Device.cpu


def visible_cuda_memory(
    environment: Mapping[str, str], command_output: CommandOutput, device_folder: Path
) -> tuple[int | None, ...]:
    """Total memory of each CUDA device that a worker would see, in bytes.

    Args:
        environment: its `CUDA_VISIBLE_DEVICES` limits the devices, as it does for CUDA.
        command_output: runs `nvidia-smi`.
        device_folder: `/dev`; its `nvidia<N>` are counted when `nvidia-smi` gives nothing.
    """
    memory = _installed_cuda_memory(command_output, device_folder)
    cards = _cards(command_output) if memory else []
    by_name = {card.name: num_bytes for card, num_bytes in zip(cards, memory, strict=False)}
    by_name |= {name: num_bytes for card in cards for name, num_bytes in card.slices}
    # a process gets one slice of a card that is cut, the first if it names none
    first = {card.number: card.slices[0][1] for card in cards if card.slices}
    memory = tuple(first.get(number, num_bytes) for number, num_bytes in enumerate(memory))
    if environment.get("CUDA_DEVICE_ORDER") == "FASTEST_FIRST" and len(set(memory)) > 1:
        memory = (None,) * len(memory)  # which of them is the fastest is not known
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(first.values())[:1] or memory
    selected: list[int | None] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.startswith(("GPU-", "MIG-")):
            if not memory:
                break
            same = memory[0] if len(set(memory)) == 1 else None
            of_entry = (num_bytes for name, num_bytes in by_name.items() if name.startswith(entry))
            selected.append(next(of_entry, same))
        elif entry.isdecimal() and int(entry) < len(memory):
            selected.append(memory[int(entry)])
        else:
            break  # CUDA ignores an invalid entry and all that follow it
    return tuple(selected)


@dataclass(frozen=True)
class _Card:
    """One GPU, with the names and memory of its slices where it is cut (MIG)."""

    number: int
    name: str
    slices: list[tuple[str, int]] = field(default_factory=list)


def _cards(command_output: CommandOutput) -> list[_Card]:
    """The GPUs in the order of `nvidia-smi`; none where it does not list them."""
    cards = list[_Card]()
    for line in (command_output(["nvidia-smi", "-L"]) or "").splitlines():
        if card := re.match(r"GPU (\d+):.*\(UUID: (GPU-[^)]+)\)", line):
            cards.append(_Card(int(card[1]), card[2]))
        elif cards and (part := re.match(r"\s+MIG \S+\.(\d+)gb.*\(UUID: (MIG-[^)]+)\)", line)):
            cards[-1].slices.append((part[2], int(_SLICE_SHARE * (int(part[1]) << 30))))
    return cards


def available_memory_bytes(root: Path) -> int | None:
    """Memory free for new processes: the machine's, or what its container leaves if that is less.

    Args:
        root: `/`, under which `proc` and `sys` are read.
    """
    bounds = []
    with suppress(OSError):
        meminfo = (root / "proc/meminfo").read_text()
        bounds += [int(kib) * 1024 for kib in re.findall(r"MemAvailable:\s+(\d+)", meminfo)]
    left = memory_left(root)
    return min(bounds if left is None else [*bounds, left], default=None)


def _installed_cuda_memory(
    command_output: CommandOutput, device_folder: Path
) -> tuple[int | None, ...]:
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    listed = command_output(query)
    if listed is not None:
        # in MiB; devices without memory of their own answer [N/A]. A site's wrapper may say more.
        lines = re.findall(r"^\s*(\d+|\[.+\])\s*$", listed, re.MULTILINE)
        return tuple(int(line) << 20 if line.isdecimal() else None for line in lines)
    return (None,) * sum(node.name[6:].isdecimal() for node in device_folder.glob("nvidia*"))


def _command_output(command: list[str]) -> str | None:
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True
        ).stdout
    return None
