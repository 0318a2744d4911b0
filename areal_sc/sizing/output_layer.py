"""How much of the output layer, and of its logits, a rank has at one time.

Each part costs some dozens of kernels. On a CPU that is nothing; a GPU would wait for the next one
to be launched. So a GPU's parts are as large as its memory allows.
"""

from __future__ import annotations

from areal_sc.config.schema import Device
from areal_sc.sizing.machine import Machine

PIECE_BYTES = 8 << 20
"""Bytes of the vocabulary's rows that are gathered at a time, on a CPU."""
CHUNK_TOKENS = 1024
"""Tokens whose logits exist at one time, on a CPU; at least as many on a GPU."""
KEPT_CHUNKS = 4
"""Chunks whose exponentials a GPU keeps, in 16 bits: 1/16 of its memory saves a product in four."""
_PARTS_PER_DEVICE = 32
_UNKNOWN_DEVICE_BYTES = 80 << 30


def piece_bytes(device: str, memory_bytes: int | None) -> int:
    """Bytes in float32 of the vocabulary's rows, of all ranks, that are gathered at a time.

    On a GPU of 80 GiB the output layer of a 7B model is one piece.

    Args:
        device: kind of what the rank computes on.
        memory_bytes: all of it; None: unknown.
    """
    return PIECE_BYTES if device == Device.cpu else _part_bytes(memory_bytes)


def chunk_tokens(asked: int, vocabulary: int, device: str, memory_bytes: int | None) -> int:
    """Tokens whose logits exist at one time.

    On a GPU of 80 GiB, with a vocabulary of 150 thousand, they are four thousand.

    Args:
        asked: `actor.logprob_chunk_tokens`; 0: by the device.
        vocabulary: logits of a token that this rank has.
        device, memory_bytes: as `piece_bytes`.
    """
    if asked or device == Device.cpu:
        return asked or CHUNK_TOKENS
    return max(CHUNK_TOKENS, _part_bytes(memory_bytes) // (4 * max(vocabulary, 1)))


def kept_tokens(chunk: int, device: str) -> int:
    """Most tokens of whose logits half as many bytes are kept for the backward pass.

    Args:
        chunk: `chunk_tokens`.
        device: as `piece_bytes`.
    """
    return 0 if device == Device.cpu else KEPT_CHUNKS * chunk


def kind_and_memory(device: str, machine: Machine) -> tuple[str, int | None]:
    """Kind, and bytes of memory if they are known, of `cpu` or `cuda:<n>` of a machine."""
    kind, _, number = device.partition(":")
    return kind, machine.cuda_memory_bytes[int(number)] if number else None


def _part_bytes(memory_bytes: int | None) -> int:
    return (memory_bytes or _UNKNOWN_DEVICE_BYTES) // _PARTS_PER_DEVICE
