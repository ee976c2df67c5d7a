"""The table of the lab notes that this project began with, and how its asynchronous rows compare with synchronous ones.

Masked-language-model training on hate-speech posts; one figure per process, each measured on its own share of the
evaluation data and with its own random masks."""

from __future__ import annotations

import dataclasses
import statistics

SOURCE = "the lab notes"


@dataclasses.dataclass(frozen=True)
class ReferenceRow:
    """One row of the lab notes."""

    mode: str
    """``single``, ``DataParallel``, ``sync`` or ``async``."""
    devices: int
    """GPUs."""
    processes: int
    batch_size: int
    """Of a process; "64 in all" of two synchronous processes is 32."""
    perplexities: tuple[float, ...]
    """At the end; one figure per process where the notes have them."""
    seconds: float

    @property
    def key(self) -> tuple[str, int, int]:
        return self.mode, self.processes, self.batch_size

    @property
    def perplexity(self) -> float:
        """The mean over processes."""
        return statistics.fmean(self.perplexities)


REFERENCE = (
    ReferenceRow("async", 1, 2, 32, (356.05,), 1442.69),
    ReferenceRow("async", 1, 4, 16, (364.44,), 1530.95),
    ReferenceRow("async", 2, 2, 32, (252.46, 256.68), 670.78),
    ReferenceRow("async", 3, 3, 32, (263.60, 274.92, 265.68), 448.63),
    ReferenceRow("async", 4, 4, 32, (271.13, 276.38, 282.15, 277.05), 340.29),
    ReferenceRow("single", 1, 1, 32, (274.37,), 1294.01),
    ReferenceRow("single", 1, 1, 64, (258.66,), 1259.63),
    ReferenceRow("DataParallel", 2, 1, 64, (248.02,), 1126.58),
    ReferenceRow("sync", 2, 2, 32, (239.79, 256.04), 819.22),
    ReferenceRow("sync", 3, 3, 32, (248.08, 246.70, 251.14), 581.81),
    ReferenceRow("sync", 4, 4, 32, (254.05, 254.65, 263.18, 248.94), 453.15),
)


def row_beside(mode: str, processes: int | None, batch_size: int | None, devices: int | None) -> ReferenceRow | None:
    """The row of the notes with the same mode, processes and batch; of several, the one on as many devices.

    >>> row_beside("async", 2, 32, devices=1).seconds, row_beside("async", 2, 32, devices=2).seconds
    (1442.69, 670.78)
    >>> row_beside("async", 5, 32, devices=5) is None
    True
    """
    rows = [row for row in REFERENCE if row.key == (mode, processes, batch_size)]
    return min(rows, key=lambda row: abs(row.devices - (devices or row.devices)), default=None)


@dataclasses.dataclass(frozen=True)
class Ratios:
    """What asynchronous processes took and reached, as shares of what as many synchronous ones did."""

    processes: int
    batch_size: int
    seconds: float
    perplexity: float


def reference_ratios() -> list[Ratios]:
    """Those of the notes, of the rows with one process on each GPU.

    >>> [(ratios.processes, round(ratios.seconds, 2), round(ratios.perplexity, 3)) for ratios in reference_ratios()]
    [(2, 0.82, 1.027), (3, 0.77, 1.078), (4, 0.75, 1.084)]
    """
    return [
        Ratios(ours.processes, ours.batch_size, ours.seconds / other.seconds, ours.perplexity / other.perplexity)
        for ours in REFERENCE
        for other in REFERENCE
        if ours.key == ("async", *other.key[1:]) and other.mode == "sync" and ours.devices == other.devices
    ]
