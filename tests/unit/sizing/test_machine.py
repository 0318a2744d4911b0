"""CUDA devices and memory as the environment, nvidia-smi, /dev and /proc tell them."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_sc.sizing.machine import available_memory_bytes, this_machine, visible_cuda_memory

GIB = 1 << 30


def no_command(command: list[str]) -> str | None:
    return None


def two_devices(command: list[str]) -> str | None:
    assert command[0] == "nvidia-smi"
    return "81920\n40960\n"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, (80 * GIB, 40 * GIB)),
        ("0,1", (80 * GIB, 40 * GIB)),
        ("1", (40 * GIB,)),
        ("1, 0", (40 * GIB, 80 * GIB)),
        ("", ()),
        ("-1", ()),
        ("0,7,1", (80 * GIB,)),  # CUDA stops at the first invalid entry
        ("GPU-8f2a", (None,)),
    ],
)
def test_visible_devices(
    tmp_path: Path, visible: str | None, expected: tuple[int | None, ...]
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_cuda_memory(environment, two_devices, tmp_path) == expected


def test_device_files_are_counted_without_nvidia_smi(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia-uvm", "nvidiactl", "null"):
        (tmp_path / name).touch()
    assert visible_cuda_memory({}, no_command, tmp_path) == (None, None)
    assert visible_cuda_memory({"CUDA_VISIBLE_DEVICES": "1"}, no_command, tmp_path) == (None,)


def test_no_device(tmp_path: Path) -> None:
    assert visible_cuda_memory({}, no_command, tmp_path) == ()
    assert visible_cuda_memory({"CUDA_VISIBLE_DEVICES": "0,GPU-1"}, no_command, tmp_path) == ()


def test_memory_without_a_value(tmp_path: Path) -> None:
    assert visible_cuda_memory({}, lambda _: "[N/A]\n", tmp_path) == (None,)


def test_what_a_wrapper_of_nvidia_smi_says_is_no_device(tmp_path: Path) -> None:
    greeting = "loading 2 modules: [ok]\n\n"
    assert visible_cuda_memory({}, lambda _: greeting, tmp_path) == ()
    assert visible_cuda_memory({}, lambda _: f"{greeting} 81559\n", tmp_path) == (81559 << 20,)
    assert visible_cuda_memory({}, lambda _: "No devices were found\n", tmp_path) == ()


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_memory_is_the_least_of_machine_and_cgroup(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path) is None
    write(tmp_path, "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert available_memory_bytes(tmp_path) == 4000 * 1024
    write(tmp_path, "sys/fs/cgroup/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", "100\n")
    assert available_memory_bytes(tmp_path) == 4000 * 1024
    write(tmp_path, "sys/fs/cgroup/memory.max", "1100\n")
    assert available_memory_bytes(tmp_path) == 1000


def test_this_machine_has_memory() -> None:
    machine = this_machine()
    assert machine.host_memory_bytes is not None
    assert machine.host_memory_bytes > 0
    assert machine.num_cuda_devices == len(machine.cuda_memory_bytes)
