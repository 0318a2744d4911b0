"""Random numbers that depend on the seed, the request and the position alone. No torch.

What a request samples then does not depend on when it joined or what runs beside it. The
generator is splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
OOPSLA 2014), entered at any position.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FACTOR_1 = 0xBF58476D1CE4E5B9
_FACTOR_2 = 0x94D049BB133111EB


def stream_key(seed: int, request_id: int) -> int:
    """Names the random stream of one request; 64 bits."""
    return _mix_one(_mix_one(seed + _GAMMA) + request_id * _GAMMA)


def uniforms(
    keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """[N] float32 in [0, 1): number `positions[i]` of the stream `keys[i]`."""
    x = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FACTOR_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_FACTOR_2)
    x = x ^ (x >> np.uint64(31))
    # 23 bits: u * x < x then holds in float32 arithmetic for every normal x
    bits: npt.NDArray[np.float32] = (x >> np.uint64(41)).astype(np.float32)
    return bits * np.float32(2.0**-23)


def _mix_one(x: int) -> int:
    """The finaliser: a bijection whose output bits all depend on all input bits."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * _FACTOR_1) & _MASK
    x = ((x ^ (x >> 27)) * _FACTOR_2) & _MASK
    return x ^ (x >> 31)
