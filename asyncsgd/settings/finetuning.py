"""The settings of a fine-tuning run, the second stage of STILT. Standard library only, as `asyncsgd.settings.training`.

Unless the user asks for more, every model is fine-tuned in the same way: in one process, with AdamW.
"""
# ruff: noqa: RUF009 - the calls in the dataclasses' defaults are `setting` and `group`, which return dataclasses.field

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal

from asyncsgd.settings.flags import Flags, group, setting
from asyncsgd.settings.training import (
    SAMPLING,
    Job,
    Length,
    Machine,
    Output,
    Sampling,
    Schedule,
    Steps,
    contradictions_of_batches,
    contradictions_of_job,
    contradictions_of_length,
    contradictions_of_output,
    contradictions_of_steps,
)

Task = Literal["classification"]
Split = Literal["test", "validation"]

DEFAULT_EPOCHS = 2.0

BETTER: Mapping[str, str] = {"macro_f1": "higher", "accuracy": "higher"}
"""The metrics of a classifier, the primary one first."""


@dataclasses.dataclass(frozen=True)
class Start:
    """What is fine-tuned, and for what. `init_from` is None only until `validate` has seen it."""

    init_from: str = setting(
        None,
        "run folder of stilt_mlm.py, saved model, name on the Hub, or tiny or small (random weights)",
        unset="none: it has to be named",
        example="runs/NAME",
    )
    task: Task = setting("classification", "kind of labelled task")


@dataclasses.dataclass(frozen=True)
class FinetuneJob(Job):
    """Which algorithm runs on how many workers."""

    seed: int = setting(0, "of the head's first values, the order of the texts and dropout", at_least=0, below=2**32)


@dataclasses.dataclass(frozen=True)
class LabelledText:
    """The labelled texts."""

    data: str = setting("pydocs", "pydocs (which package documents this?), a folder with train.*, a file, or hub:NAME")
    split: Split | None = setting(None, "what to score on", unset="test where there is one")
    text_column: str = setting("text", "column that holds the text")
    label_column: str = setting("label", "column that holds the label")
    train_samples: int = setting(0, "training texts to use; 0: all", at_least=0)
    eval_samples: int = setting(0, "texts to score on; 0: all", at_least=0)
    seq_len: int = setting(128, "tokens per text; what is longer is cut", at_least=8)
    sampling: Sampling = setting("group_by_length", SAMPLING)
    cache_dir: str | None = setting(None, "folder for prepared data", unset="the user's cache folder")


@dataclasses.dataclass(frozen=True)
class Tuning(Steps, Length):
    """How long, and with which steps. `epochs` is None where `samples` says how long.

    The learning rate suits the small models made here. It was tried with two epochs over 4,000 texts of hate_davidson
    from a pretrained `tiny`, two seeds each. The mean macro-F1 was 0.566 at 2e-4, 0.604 at 5e-4, 0.568 at 1e-3 and
    0.416 at 2e-3. Published models of BERT's size want about 5e-5.
    """

    epochs: float | None = setting(
        None,
        "passes over the training texts",
        unset=f"{DEFAULT_EPOCHS:g}, or as --samples says",
        above=0,
        example=2,
    )
    samples: int | None = setting(
        None,
        "texts to train on, over all epochs",
        unset="as --epochs says",
        at_least=1,
        example=2000,
    )
    batch_size: int = setting(16, "texts in one gradient", at_least=1)
    learning_rate: float = setting(5e-4, "peak learning rate", above=0)
    schedule: Schedule = setting("linear", "learning rate after the warmup")
    warmup: float = setting(
        0.1,
        "share of the samples until the learning rate reaches its peak, or a number of samples",
        at_least=0,
        or_whole=True,
    )
    dropout: float = setting(0.1, "of all dropout layers", at_least=0, below=1)
    class_weights: bool = setting(False, "weigh each class by its inverse frequency in the training loss")
    evaluations: int = setting(4, "evaluations after the first, evenly over training", at_least=1)


@dataclasses.dataclass(frozen=True)
class Functional:
    """Functional tests of a hate-speech classifier, after training."""

    hatecheck: str | None = setting(
        None, "HateCheck's folder or file", unset="not tested", example="../shared/data/hatecheck"
    )
    hatecheck_positive: str | None = setting(
        None, "labels that count as hateful, LABEL[,LABEL]", unset="hate", example="hate"
    )


@dataclasses.dataclass(frozen=True)
class FinetuneOutput(Output):
    """Where the run is written; nothing here changes a result."""

    save_model: bool = setting(False, "save the fine-tuned model in the run's folder")


@dataclasses.dataclass(frozen=True)
class FinetuneSettings:
    """All settings of one fine-tuning run, by subject.

    >>> FinetuneSettings(start=Start(init_from="tiny")).tuning.epochs
    2.0
    """

    start: Start = group(Start, "what to fine-tune")
    job: FinetuneJob = group(FinetuneJob, "how it is trained")
    data: LabelledText = group(LabelledText, "labelled texts")
    tuning: Tuning = group(Tuning, "training")
    functional: Functional = group(Functional, "functional tests")
    machine: Machine = group(Machine, "machine")
    output: FinetuneOutput = group(FinetuneOutput, "output")

    def __post_init__(self) -> None:
        if self.tuning.epochs is None and self.tuning.samples is None:
            object.__setattr__(self, "tuning", dataclasses.replace(self.tuning, epochs=DEFAULT_EPOCHS))


def _contradictions(settings: FinetuneSettings) -> Iterator[str]:
    """Yield what is wrong between settings that are each within bounds, the first cause first."""
    defaults = {name: spec.default for name, spec in FINETUNE_FLAGS.specs.items()}
    data, tuning, output = settings.data, settings.tuning, settings.output
    if settings.start.init_from is None:
        yield (
            "--init-from is missing: name the run, the model or the shape to fine-tune, e.g. --init-from runs/NAME "
            "or --init-from tiny"
        )
    yield from contradictions_of_length(tuning, Tuning().evaluations)
    if data.data == "pydocs":
        for name in ("text_column", "label_column"):
            if getattr(data, name) != defaults[name]:
                flag = FINETUNE_FLAGS.specs[name].flag
                yield f"{flag} does nothing for --data pydocs, which has no columns; drop it, or name other data"
    if settings.functional.hatecheck_positive is not None and settings.functional.hatecheck is None:
        yield "--hatecheck-positive does nothing without --hatecheck; add --hatecheck FOLDER, or drop it"
    yield from contradictions_of_job(settings.job, tuning.optimizer, tuning.momentum)
    yield from contradictions_of_batches(settings.job, settings.machine, tuning.batch_size)
    yield from contradictions_of_steps(tuning)
    yield from contradictions_of_output(output)
    if tuning.keep_best and not output.save_model:
        yield "--keep-best keeps a model, and without --save-model a fine-tuning run keeps none; add --save-model"


FINETUNE_FLAGS = Flags(FinetuneSettings, _contradictions, places=("cache_dir",), example=("init_from", "runs/NAME"))


def make_finetune_settings(values: Mapping[str, object]) -> FinetuneSettings:
    """Build valid settings from names and values without their groups; see `Flags.make`.

    >>> make_finetune_settings({"init_from": "tiny", "learning-rate": "1e-4"}).tuning.learning_rate
    0.0001
    """
    return FINETUNE_FLAGS.make(values)
