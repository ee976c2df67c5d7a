"""What a process computes on: the processor, the GPUs, and torch's build. Seconds on others are not compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from asyncsgd.records.machine import available_cores, cpu_model


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Of one process; no host name."""

    cpu: str | None
    cores: int
    gpus: tuple[str, ...]
    """All that it sees; empty where it computes on the CPU."""
    torch_build: str
    """The version with what it was built for: ``2.11.0+cpu``."""
    cpu_capability: str
    """The widest instructions of the processor that torch uses: ``AVX512``."""

    @classmethod
    def here(cls, device: str) -> Hardware:
        """Of this process; `device` is ``cpu`` or ``cuda``."""
        gpus = range(torch.cuda.device_count()) if device == "cuda" else ()
        return cls(
            cpu_model(),
            available_cores(),
            tuple(torch.cuda.get_device_name(gpu) for gpu in gpus),
            str(torch.__version__),
            torch.backends.cpu.get_cpu_capability(),
        )


def by_ranks(hardware: Sequence[Hardware]) -> list[dict[str, Any]]:
    """As JSON, each once with the ranks that have it; `hardware` is that of every rank.

    >>> slow, fast = Hardware("slow", 4, (), "2.11.0+cpu", "AVX2"), Hardware("fast", 64, (), "2.11.0+cpu", "AVX512")
    >>> [(row["ranks"], row["cpu"]) for row in by_ranks([slow, slow, fast])]
    [([0, 1], 'slow'), ([2], 'fast')]
    """
    return [
        {"ranks": [rank for rank, other in enumerate(hardware) if other == one], **dataclasses.asdict(one)}
        for one in dict.fromkeys(hardware)
    ]
