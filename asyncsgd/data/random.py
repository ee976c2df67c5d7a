"""Random numbers that are a pure function of what they are for: (seed, purpose, coordinates), and nothing else.

Philox is a counter-based generator: any place of any stream is reached directly, so a batch can be made again by
any process in any order. (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.)"""

from __future__ import annotations

import enum
import zlib

import numpy as np
from numpy.random import Generator, Philox


class Purpose(enum.IntEnum):
    """What random numbers are for; each purpose has streams of its own."""

    ORDER = 1
    MASK = 2
    DROPOUT = 3
    EVALUATION = 4  # the masks of evaluations
    NOISE = 5  # torch's generator in evaluations
    ITEM = 6


def generator(seed: int, purpose: Purpose, stream: int = 0, position: int = 0) -> Generator:
    """Return the generator at `position` of `stream`; up to 2^64 draws do not reach the next position.

    >>> generator(0, Purpose.MASK, 0, 7).random() == generator(0, Purpose.MASK, 0, 7).random()
    True
    """
    stream_of_purpose = int(purpose) << 32 | stream
    key = np.array([seed % 2**64, stream_of_purpose], dtype=np.uint64)
    counter = np.array([0, position, 0, 0], dtype=np.uint64)
    bits = Philox(key=key, counter=counter)
    return Generator(bits)


def dropout_seed(seed: int, stream: int, index: int, part: int = 0) -> int:
    """Return the seed of torch's default generator for a part of batch `index` of `stream`, in [0, 2^63).

    A whole batch is its part 0.

    >>> dropout_seed(0, 0, 7) == dropout_seed(0, 0, 7, 0) != dropout_seed(0, 0, 7, 1)
    True
    """
    draw = generator(seed, Purpose.DROPOUT, stream, index)
    seeds = draw.integers(2**63, size=part + 1)
    return int(seeds[part])


def item_seed(seed: int, stream: int, position: int) -> int:
    """Return the seed of the default generators while sample `position` of `stream` is read, in [0, 2^63).

    >>> item_seed(0, 0, 7) == item_seed(0, 0, 7) != item_seed(0, 0, 8)
    True
    """
    draw = generator(seed, Purpose.ITEM, stream, position)
    return int(draw.integers(2**63))


def noise_seed(name: str, index: int) -> int:
    """Return the seed of torch's default generator for batch `index` of the evaluation set `name`, in [0, 2^63). It is
    the same in every run.

    >>> noise_seed("main", 7) == noise_seed("main", 7) != noise_seed("other", 7)
    True
    """
    stream = zlib.crc32(name.encode())
    draw = generator(0, Purpose.NOISE, stream, index)
    return int(draw.integers(2**63))
