"""Tasks whose models get a new head that is learned from labels."""
# ruff: noqa: RUF009 - the calls in the dataclass's defaults are `setting`, which returns dataclasses.field

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from asyncsgd.settings.groups import (
    ENCODING,
    EVAL_DATA,
    FIRST,
    NEWEST,
    QUOTING,
    QUOTING_UNSET,
    SAMPLE_ORDER,
    SAMPLING,
    SPLIT,
    EvalData,
    Quoting,
    Sampling,
)
from asyncsgd.settings.specs import setting
from asyncsgd.tasks.base import Directions, Sums, found, to_device
from asyncsgd.tasks.heads import HEADS, Head, Labels
from asyncsgd.tasks.predictions import Said, write_predictions
from asyncsgd.tasks.text_task import TextTask, side_of

if TYPE_CHECKING:  # fields are flags, and --help is not to wait for torch, numpy and the reading of data
    import numpy as np
    from torch import Tensor, nn

    from asyncsgd.data.corpora import Corpus
    from asyncsgd.data.tokens import Samples
    from asyncsgd.tasks.models import Built
    from asyncsgd.tasks.text_batches import Batch, Draw, EvaluationBatches

START = "a run of a task with an encoder, a saved model, a name on the Hub, or tiny or small (random weights)"
"""Help of `model_name` where the model is an encoder with a new head."""


@dataclasses.dataclass(frozen=True)
class HeadTask(TextTask):
    """A new head on the encoder of a masked language model, learned from labels."""

    has_head: ClassVar[bool] = True
    start_from: ClassVar[tuple[str, ...]] = (
        "masked_lm",
        "classification",
        "token_classification",
        "question_answering",
    )

    model_name: str = setting("tiny", START, name="model", aliases=("init_from",), run=True)
    train_samples: int = setting(0, "samples to learn from; 0: all", at_least=0)
    eval_samples: int = setting(0, "samples to score on; 0: all", at_least=0)
    batch_size: int = setting(16, "samples in one gradient", at_least=1)
    sampling: Sampling = setting("group_by_length", SAMPLING)
    sample_order: int = setting(NEWEST, SAMPLE_ORDER, at_least=FIRST, at_most=NEWEST)
    dropout: float = setting(0.1, "of all dropout layers", at_least=0, below=1)
    output_layer: Literal["new", "keep"] = setting(
        "new", "new: an output layer from the seed; keep: that of --model, whose labels are the same", name="head"
    )

    prepared: str | None = found()

    @property
    def problem_type(self) -> str | None:
        """What transformers calls the kind of its labels, where it has a name for that."""
        return None

    def head(self, initial: Built, seed: int) -> Built:
        """The encoder of the initial model with a head that has one output for each label."""
        from asyncsgd.tasks.models import build_head

        kind = str(self.auto_class).removeprefix("AutoModelFor")
        return build_head(
            initial.model,
            kind,
            self.known["labels"],
            problem_type=self.problem_type,
            keep=self.output_layer == "keep",
            dropout=self.dropout,
            seed=seed,
        )

    def loaded_by(self, model: str) -> str:
        from asyncsgd.tasks.models import class_of

        return class_of(model)

    def build(self, model: str, tokenizer: Any, seed: int) -> Built:
        from asyncsgd.tasks.models import load_model

        if model in self.shapes:
            return super().build(model, tokenizer, seed)
        loaded_by = self.loaded_by(model)
        return load_model(model, len(tokenizer), loaded_by, seq_len=self.seq_len, dropout=self.dropout, seed=seed)

    def tests(self, number: int) -> Mapping[str, EvaluationBatches]:
        from asyncsgd.tasks.text_batches import EvaluationBatches

        held_out = self.samples(side_of(number))
        numbered = functools.partial(self.numbered, number)
        batches = EvaluationBatches(numbered, held_out, self.test_rows(held_out))
        return {"main": batches}

    def numbered(self, of_set: int, samples: Samples, numbers: np.ndarray, draw: Draw) -> Batch:
        """A batch of an evaluation. ``rows`` has the numbers of its samples, ``num_rows`` says how many samples the
        evaluation set has, and ``set`` is the number of that set. Scores that are no sums over samples, such as a
        correlation, put each prediction in its place with these.
        """
        import torch

        batch = self.collate(samples, numbers, draw)
        batch["rows"] = torch.from_numpy(numbers)
        batch["num_rows"] = torch.tensor(len(samples))
        batch["set"] = torch.tensor(of_set)
        return batch


@dataclasses.dataclass(frozen=True)
class LabelledTask(HeadTask):
    """A task that learns labels of texts or of words, from a table with columns of texts and of labels.

    Its batches have ``labels`` as the `Head` of its kind of labels in `asyncsgd.tasks.heads` wants them, unless
    `targets` of a subclass reads them elsewhere; loss, scores and the model's configuration follow from that kind. It
    is ``single`` unless a subclass has a field ``labels: Labels``, with which its user chooses.
    """

    output_folders: ClassVar[tuple[str, ...]] = ("predictions",)
    labels = "single"
    """The kind of labels, one of `Labels`."""

    data_name: str | None = setting(
        None,
        "a folder with train.*, a file (.parquet, .jsonl), or hub:NAME",
        unset="none: it has to be named",
        name="data",
        aliases=("train_file",),
    )
    eval_data: EvalData | None = setting(None, EVAL_DATA, unset="a set of --data", aliases=("val_file",), repeats=True)
    eval_split: str | None = setting(None, SPLIT, unset="the first that has labels", name="split")
    predictions: str | None = setting(
        None, "folder for NAME.tsv of every set at the end, a line a text", unset="none are written"
    )
    encoding: str = setting("utf-8", ENCODING)
    quoting: Quoting | None = setting(None, QUOTING, unset=QUOTING_UNSET)

    @property
    def scored(self) -> Head:
        """The kind of its labels, which says the loss and the scores."""
        return HEADS[cast(Labels, self.labels)]

    @property
    def problem_type(self) -> str | None:
        if self.auto_class != "AutoModelForSequenceClassification":
            return None
        return self.scored.problem_type

    def scored_by(self) -> Directions:
        if self.better:
            return self.better
        better = self.scored.better
        return {name: better[name] for name in self.scored.usual}

    def loss_unit(self) -> str:
        return self.scored.loss_unit

    def read(self, cache: Path) -> Corpus:
        from asyncsgd.data.corpora import load_corpus

        return load_corpus(
            str(self.data_name),
            self.columns,
            self.row_kind(),
            eval_data=self.eval_data,
            split=self.eval_split,
            limits=(self.train_samples, self.eval_samples),
            cache_dir=cache,
            reading=self.reading,
        )

    def write_set(self, corpus: Corpus, tokenizer: Any, folder: Path) -> None:
        super().write_set(corpus, tokenizer, folder)
        rows = json.dumps(corpus.eval.rows)
        (folder / "rows.json").write_text(rows, encoding="utf-8")

    def is_of(self, corpus: Corpus, folder: Path) -> bool:
        for number, of_set in enumerate(corpus.evaluations):
            places = json.loads((folder / side_of(number) / "rows.json").read_bytes())
            if places != list(of_set.eval.rows):
                return False
        return True

    def look(self, corpus: Corpus, tokenizer: Any, initial: Built) -> Mapping[str, Any]:
        return {"labels": corpus.labels}

    def targets(self, batch: Batch) -> Tensor:
        labels: Tensor = batch["labels"]
        return labels

    def weight(self, batch: Batch) -> float:
        if self.labels == "single":
            return super().weight(batch)
        # All numbers have a loss, also one that is equal to `IGNORED`.
        return float(self.targets(batch).numel())

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return self.scored.loss(outputs, self.targets(batch))

    def summed_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        import torch

        logits = outputs.flatten(0, -2)
        losses = self.scored.losses(logits, self.targets(batch))
        return losses.sum(dtype=torch.float64)

    def sums(self, outputs: Tensor, batch: Batch) -> Sums:
        return {"loss": self.summed_loss(outputs, batch), **self.scored.sums(outputs, batch)}

    def metrics(self, sums: Sums) -> dict[str, Any]:
        metrics = self.scored.metrics(sums, positive=None)
        return {name: metrics[name] for name in self.scored_by()}

    def undefined_scores(self, corpus: Corpus) -> Mapping[str, str]:
        """The scores that the labels to score on leave undefined, and why."""
        return {}

    def said(self, outputs: Tensor, batch: Batch) -> Sequence[Said]:
        """What the model says of each text of a batch of an evaluation."""
        return self.scored.said(outputs, self.known["labels"])

    def final(self, model: nn.Module) -> Mapping[str, Any]:
        """Write the predictions for every evaluation set into a file each, where `predictions` names a folder."""
        from asyncsgd.data.evaluation_sets import MAIN

        if self.predictions is None:
            return {}
        folder = Path(self.predictions)
        folder.mkdir(parents=True, exist_ok=True)
        names = [evaluation_set["name"] for evaluation_set in self.sets]
        if not names:
            names = [self.known["facts"].get("split") or MAIN]
        prepared = Path(self.known["folder"])
        for number, name in enumerate(names):
            path = prepared / side_of(number) / "rows.json"
            rows = json.loads(path.read_bytes())
            write_predictions(folder / f"{name}.tsv", rows, self.predicted(model, number))
        return {"predictions": self.predictions}

    def predicted(self, model: nn.Module, number: int) -> list[Said]:
        """What a model in evaluation mode says of the texts of an evaluation set, in their order."""
        device = next(model.parameters()).device
        batches = self.tests(number)["main"]
        said_of: dict[int, Said] = {}
        for index, numbers in enumerate(batches.rows):
            batch = to_device(batches[index], device)
            said = self.said(self.outputs(model, batch), batch)
            said_of.update(zip(numbers.tolist(), said, strict=True))
        return [said_of[number] for number in range(len(said_of))]

    def details(self, sums: Sums) -> dict[str, Any]:
        """What the kind of labels says beside its scores."""
        return self.scored.details(sums, self.known["labels"])
