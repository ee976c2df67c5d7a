"""The rows of the lab notes, which lab_notes.py shows beside ours."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple


class NotesRow(NamedTuple):
    """A row of the lab notes: masked language models on hate-speech posts."""

    mode: str
    """``single``, ``DataParallel``, ``sync`` or ``async``."""
    devices: int
    """The number of GPUs."""
    processes: int
    batch_size: int
    """The batch of one process; where the notes say 64 in all, each of two synchronous processes has 32."""
    seconds: float
    perplexities: tuple[float, ...]
    """At the end; one figure per process where the notes have them."""

    @property
    def key(self) -> tuple[str, int, int]:
        return self.mode, self.processes, self.batch_size

    @property
    def condition(self) -> tuple[int, int, int]:
        """An asynchronous and a synchronous row are compared if this is equal."""
        return self.devices, self.processes, self.batch_size


LAB_NOTES = """\
mode          GPUs  processes  batch size  seconds  perplexities
async            1          2          32  1442.69  356.05
async            1          4          16  1530.95  364.44
async            2          2          32   670.78  252.46  256.68
async            3          3          32   448.63  263.60  274.92  265.68
async            4          4          32   340.29  271.13  276.38  282.15  277.05
single           1          1          32  1294.01  274.37
single           1          1          64  1259.63  258.66
DataParallel     2          1          64  1126.58  248.02
sync             2          2          32   819.22  239.79  256.04
sync             3          3          32   581.81  248.08  246.70  251.14
sync             4          4          32   453.15  254.05  254.65  263.18  248.94
"""


def _notes_rows() -> list[NotesRow]:
    """The rows of `LAB_NOTES`."""
    rows = []
    _, *lines = LAB_NOTES.splitlines()
    for line in lines:
        mode, devices, processes, batch_size, seconds, *perplexities = line.split()
        row = NotesRow(
            mode=mode,
            devices=int(devices),
            processes=int(processes),
            batch_size=int(batch_size),
            seconds=float(seconds),
            perplexities=tuple(map(float, perplexities)),
        )
        rows.append(row)
    return rows


NOTES_ROWS = _notes_rows()


def row_beside(mode: str, processes: int | None, batch_size: int | None, devices: int | None) -> NotesRow | None:
    """The row of the notes with the same mode, processes and batch; of several, the one on as many devices.

    >>> row_beside("async", 2, 32, devices=1).seconds, row_beside("async", 2, 32, devices=2).seconds
    (1442.69, 670.78)
    >>> row_beside("async", 5, 32, devices=5) is None
    True
    """
    rows = [row for row in NOTES_ROWS if row.key == (mode, processes, batch_size)]
    if not rows:
        return None
    if not devices:
        return rows[0]
    return min(rows, key=lambda row: abs(row.devices - devices))


def async_and_sync(rows: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Each asynchronous row with each synchronous row of the same condition."""
    pairs = []
    for ours, other in itertools.product(rows, rows):
        if ours.mode == "async" and other.mode == "sync" and ours.condition == other.condition:
            pairs.append((ours, other))
    return pairs


def notes_ratios() -> dict[tuple[int, int], tuple[float, float]]:
    """(processes, batch) -> the notes' seconds and perplexity, of asynchronous processes over synchronous ones.

    >>> {key[0]: (round(seconds, 2), round(perplexity, 3)) for key, (seconds, perplexity) in notes_ratios().items()}
    {2: (0.82, 1.027), 3: (0.77, 1.078), 4: (0.75, 1.084)}
    """
    ratios = {}
    for ours, other in async_and_sync(NOTES_ROWS):
        seconds = ours.seconds / other.seconds
        perplexity = statistics.fmean(ours.perplexities) / statistics.fmean(other.perplexities)
        ratios[ours.processes, ours.batch_size] = (seconds, perplexity)
    return ratios
