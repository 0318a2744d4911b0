"""CUDA devices and memory as the environment, nvidia-smi, /dev and /proc tell them."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_sc.sizing import machine
from areal_sc.sizing.machine import (
    available_memory_bytes,
    this_machine,
    threads_of_rank,
    visible_cuda_memory,
)

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


LISTED = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa)
  MIG 1g.10gb     Device  0: (UUID: MIG-1111)
  MIG 3g.40gb     Device  1: (UUID: MIG-3333)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bbbb)
"""


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, (9.5,)),  # a process gets one slice, the first, and no whole GPU beside it
        ("0", (9.5,)),
        ("1", (40,)),
        ("MIG-3333", (38,)),
        ("MIG-1111", (9.5,)),
        ("GPU-bbbb", (40,)),
        ("GPU-b", (40,)),  # CUDA takes the beginning of a name
    ],
)
def test_a_slice_has_not_the_memory_of_the_whole_card(
    tmp_path: Path, visible: str | None, expected: tuple[float, ...]
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}

    def two_cards(command: list[str]) -> str | None:
        return LISTED if "-L" in command else two_devices(command)

    found = visible_cuda_memory(environment, two_cards, tmp_path)
    assert found == tuple(int(each * GIB) for each in expected)


def test_the_fastest_device_is_not_known(tmp_path: Path) -> None:
    """Where it comes first, the numbers are not those of nvidia-smi."""
    environment = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    assert visible_cuda_memory(environment, two_devices, tmp_path) == (None, None)
    assert visible_cuda_memory(environment, lambda _: "8192\n8192\n", tmp_path) == (8 * GIB,) * 2


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


def test_a_rank_on_a_gpu_has_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it has one, as many ranks share few cores; what is asked for holds for both."""
    monkeypatch.setattr(machine, "num_cores", lambda: 128)
    for num_ranks, expected in ((1, 128), (4, 32), (8, 16), (64, 16)):
        assert threads_of_rank(0, num_ranks, is_cuda=True) == expected
        assert threads_of_rank(0, num_ranks, is_cuda=False) == 1
        assert threads_of_rank(3, num_ranks, is_cuda=True) == 3
        assert threads_of_rank(3, num_ranks, is_cuda=False) == 3
    monkeypatch.setattr(machine, "num_cores", lambda: 1)
    assert threads_of_rank(0, 8, is_cuda=True) == 1


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
    found = this_machine()
    assert found.host_memory_bytes is not None
    assert found.host_memory_bytes > 0
    assert found.num_cuda_devices == len(found.cuda_memory_bytes)
