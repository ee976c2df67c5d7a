"""What a run is to the analysis: a row of `runs`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, get_type_hints

from pandas import DataFrame, Series

Columns: TypeAlias = dict[str, Any]
"""Name of a column -> its value in one row. A row need not have all columns of its table."""


class RunRow(NamedTuple):
    """A row of `runs`; docs/tables.md says what each column is. A number that is not known is nan, a text empty."""

    run: str
    stage: str
    arm: str
    algorithm: str
    seed: float
    replicate: float
    trial: float
    parent: str
    finetune_seed: float
    status: str
    diverged: bool
    usable: bool
    left_out: str
    notes: str
    task: str
    task_class: str
    model: str
    data: str
    train_data: str
    candidates: str
    evaluation: str
    sample_order: float
    terms: float
    start: str
    initial_model: str
    from_scratch: bool | None
    first_loss: float
    mode: str
    rule: str
    workers: float
    batch_size: float
    accumulate: float
    clock: str
    speeds: str
    learning_rate: float
    loss: float
    metric: float
    seconds: float
    samples: float
    updates: float
    samples_per_update: float
    samples_per_second: float
    delay_mean: float
    delay_p95: float
    delay_max: float
    computing: float
    waiting: float
    communicating: float
    memory_gib: float
    gpu_gib: float
    tokens_per_second: float
    mfu: float
    altered: float
    oversubscribed: bool | None
    other_load: float
    resumes: float
    machine: str
    device: str
    num_devices: float
    threads: float
    torch: str
    commit: str
    parameters_sha256: str
    asked: dict[str, Any]
    settings: dict[str, Any]
    details: dict[str, Any]
    path: Path


RunPair: TypeAlias = tuple[RunRow, RunRow]
"""The run of the treatment and the run of the reference with one seed."""


class Note(str):
    """A sentence on what limits an answer; its `kind` says where a report shows it, whatever its words are.

    `below` stands in small type under the verdict, and so does `batches`, on arms with unequal batch sizes. `diverged`
    and `risen` make sentences of the verdict, `corrected` stands next to the p value. `undefined` is on scores that do
    not exist. `budget`, on the second up to which times are counted, stands among the details where a run missed the
    target.
    """

    kind: str
    about: tuple[str, ...]
    """(arm, count) for the kind `diverged`, (sentence,) for the kind `batches`, else empty."""

    def __new__(cls, text: str, kind: str = "below", about: tuple[str, ...] = ()) -> Note:
        note = super().__new__(cls, text)
        note.kind = kind
        note.about = about
        return note


FROM_SCRATCH = Note("from scratch: not STILT")


def named(kind: Any) -> list[str]:
    """The columns of one type."""
    return [name for name, own in get_type_hints(RunRow).items() if own == kind]


RUNS = [*RunRow._fields]
TEXTS = named(str)
NUMBERS = named(float)
BOOLS = named(bool)
OPTIONAL_BOOLS = named(bool | None)
MACHINE = {
    "machine": "machine",
    "device": "device",
    "threads": "threads a worker",
    "torch": "torch",
    "commit": "commit",
}
"""Columns that say where runs were made, in words."""


def rows_with(table: DataFrame, **values: Any) -> DataFrame:
    """The rows with these values in their columns."""
    kept = Series(True, index=table.index)
    for column, value in values.items():
        kept &= table[column] == value
    return table[kept]


def listed(numbers: Iterable[float]) -> str:
    """
    >>> listed([1.0, 2.5])
    '1, 2.5'
    """
    return ", ".join(f"{number:g}" for number in numbers)


def each(runs: DataFrame) -> list[RunRow]:
    """The rows of a table, which may have more columns."""
    return list(map(RunRow._make, zip(*(runs[name] for name in RUNS), strict=True)))
