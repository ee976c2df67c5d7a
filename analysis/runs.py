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

    # its place in the study
    run: str
    stage: str
    arm: str
    algorithm: str  # its rule, where that is one of its own, else its mode
    seed: float  # of a fine-tuning, that of its pretraining
    replicate: float  # 0 takes part in tests
    trial: float  # of tuning
    parent: str  # the run that a fine-tuning started from
    finetune_seed: float
    # its end
    status: str
    diverged: bool
    usable: bool  # whether it has a result
    left_out: str  # why it enters no mean, test or count
    notes: str
    # what was learned and evaluated
    task: str  # "finetuning" for every run of a task with a head, but for loose runs that are tests
    task_class: str
    model: str
    data: str  # hash
    train_data: str  # hash
    candidates: str  # hash of the candidates for masking
    evaluation: str  # masks of the evaluation
    sample_order: float  # number of the order of samples
    terms: float  # weight of the evaluation: its masked tokens, tokens or examples
    # what it began from
    start: str  # hash of the parameters
    initial_model: str  # hash of the parameters with the new head, where the task adds one
    from_scratch: bool | None
    first_loss: float  # at update 0
    # how it was trained
    mode: str
    rule: str
    workers: float
    batch_size: float  # samples of a batch of one worker
    accumulate: float  # batches of a gradient
    clock: str  # measured or virtual
    speeds: str
    learning_rate: float
    # its result
    loss: float  # the last one
    metric: float  # the last one of the task's primary metric
    seconds: float  # of the training clock
    samples: float  # that arrived
    updates: float
    samples_per_update: float  # applied samples, without those of gradients that were dropped
    samples_per_second: float
    # delays of the applied gradients, in updates
    delay_mean: float
    delay_p95: float
    delay_max: float
    # shares of the workers' seconds
    computing: float
    waiting: float
    communicating: float
    # what it cost
    memory_gib: float
    gpu_gib: float
    tokens_per_second: float
    mfu: float  # share of the peak FLOPs
    altered: float  # gradients that the rule held, dropped, changed, scaled or averaged
    # the machine and the code
    oversubscribed: bool | None  # more threads than cores; None: not known
    other_load: float  # share of the cores that other programs used
    resumes: float  # how often it went on from a checkpoint
    machine: str
    device: str
    num_devices: float
    threads: float  # of a worker
    torch: str
    commit: str
    parameters_sha256: str  # at its end
    # what it was told, and what does not fit into a column
    asked: dict[str, Any]
    settings: dict[str, Any]
    details: dict[str, Any]
    path: Path


RunPair: TypeAlias = tuple[RunRow, RunRow]
"""The run of the treatment and the run of the reference with one seed."""


class Note(str):
    """A sentence on what limits an answer; its `kind` says where a report shows it, whatever its words are.

    `below` stands in small type under the verdict, and so does `batches`, on arms with unequal batch sizes. `diverged`
    and `risen` make sentences of the verdict, `corrected` stands next to the p value. `undefined`, on scores that do
    not exist, only makes a verdict say "had no score" in place of "diverged". `budget` says up to which second times
    are counted. It stands among the details where a run missed the target.
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
"""STILT: a model that knows the language is trained on an intermediate task, before it is fine-tuned on labels."""


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


def with_labels(runs: DataFrame) -> DataFrame:
    """The fine-tunings, and the test runs of a task that gives labels, with a result."""
    is_test = (runs["stage"] == "test") & runs["details"].map(lambda details: "labels" in details)
    is_usable = runs["usable"] & ~runs["diverged"]
    return runs[is_usable & ((runs["stage"] == "finetune") | is_test)]


def listed(numbers: Iterable[float]) -> str:
    """
    >>> listed([1.0, 2.5])
    '1, 2.5'
    """
    return ", ".join(f"{number:g}" for number in numbers)


def each(runs: DataFrame) -> list[RunRow]:
    """The rows of a table, which may have more columns."""
    return list(map(RunRow._make, zip(*(runs[name] for name in RUNS), strict=True)))
