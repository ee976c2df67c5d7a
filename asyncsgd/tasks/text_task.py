"""What every task on texts shares: rows on disk, batches, and a model of transformers.

A task's own file says how its data are read, how texts become rows, how rows become a batch, which head the model has,
and what is scored.
"""
# ruff: noqa: RUF009 - the calls in the dataclass's defaults are `setting`, which returns dataclasses.field

from __future__ import annotations

import abc
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

import numpy as np

from asyncsgd.data.corpora import PLAIN, Corpus, Kind, evenly, load_corpus
from asyncsgd.data.order import FIRST, NEWEST, ORDERS, is_by_length
from asyncsgd.data.random import Purpose, generator
from asyncsgd.data.tables import BUILT_IN, Reading
from asyncsgd.data.tokenizer import TRAINED_HERE, load_tokenizer, pad_id_of
from asyncsgd.data.tokens import MIN_SAMPLE_IDS, TOKENS_FORMAT, Samples, cached, pad, rows_of
from asyncsgd.errors import UsageError
from asyncsgd.settings.flags import flag_of, setting
from asyncsgd.settings.training import (
    BLOCKS,
    ENCODING,
    OF_TRANSFORMERS,
    QUOTING,
    QUOTING_UNSET,
    SAMPLE_ORDER,
    SAMPLING,
    Defaults,
    Quoting,
    Sampling,
    Units,
)
from asyncsgd.tasks import scores
from asyncsgd.tasks.base import Batches, Sums, Task, found
from asyncsgd.tasks.heads import HEADS, Directions, Head, Labels

if TYPE_CHECKING:  # fields are flags, and --help is not to wait for torch
    from torch import Tensor, nn

    from asyncsgd.models import Built
    from asyncsgd.recorded_run import Origin

IGNORED = -100
"""The label without a loss, as transformers and torch have it."""

VOCABULARY = 8192
"""Entries of the tokenizer of a model that is made here, unless `vocab_size` says otherwise."""

START = "a run of a task with an encoder, a saved model, a name on the Hub, or tiny or small (random weights)"
"""Help of `model_name` where the model is an encoder with a new head."""

Batch = dict[str, Any]
"""Padded rows: at least ``input_ids``, int64 `(B, L)`. Owned by the caller."""

Draw = Callable[[int], np.random.Generator]
"""The random numbers of a row of a batch, for what is drawn anew each time."""


class TextTask(Task):
    """A task on texts. Subclasses are frozen dataclasses with the fields named here that have no default."""

    defaults: ClassVar[Defaults] = OF_TRANSFORMERS
    preload: ClassVar[tuple[str, ...]] = ("asyncsgd.models",)
    shapes: ClassVar[tuple[str, ...]] = TRAINED_HERE
    """The models that are made here, with random weights."""
    starts_as: ClassVar[str] = "AutoModelForMaskedLM"
    """Of transformers, which loads what `model_name` names."""
    start_from: ClassVar[tuple[str, ...]] = ("masked_lm",)
    """The tasks of the runs that `model_name` may name."""
    has_head: ClassVar[bool] = False
    """Whether the model has another head than the one that it was saved with."""
    kind: ClassVar[Kind] = PLAIN
    """What its data hold."""
    column_fields: ClassVar[tuple[str, ...]] = ()
    """The settings that name columns of the data."""
    eval_batch_size: ClassVar[int] = 32

    model_name: str
    data_name: str | None
    eval_data: str | None = None
    seq_len: int
    sampling: Sampling
    sample_order: int = NEWEST
    dropout: float
    encoding: str = "utf-8"
    quoting: Quoting | None = None
    documents: Units | None = None
    vocab_size: int = VOCABULARY
    prepared: str | None
    """What `prepare` has found, as JSON: the one field that other processes are sent; see `known`."""

    def __post_init__(self) -> None:
        given = [name for name in self.column_fields if getattr(self, name) != getattr(type(self), name)]
        if given and self.data_name in BUILT_IN and self.eval_data is None:
            raise UsageError(
                f"{flag_of(given[0])} does nothing for --data {self.data_name}, which has no columns; drop it, or name "
                f"other data"
            )

    @property
    def columns(self) -> Mapping[str, str]:
        """The columns to read, each with the flag that chooses it."""
        return {getattr(self, name): flag_of(name) for name in self.column_fields}

    @property
    def reading(self) -> Reading:
        """How the files of the data are read."""
        return Reading(self.encoding, self.quoting, self.documents)

    def row_kind(self) -> Kind:
        """How a row of its data is read."""
        return self.kind

    def sources(self) -> object:
        """What `read` reads, which is not read yet; refuses names of nothing."""
        return self.row_kind().sources(str(self.data_name), self.columns, self.eval_data, self.reading)

    @abc.abstractmethod
    def read(self, cache: Path) -> Corpus:
        """The texts of both sides."""

    @abc.abstractmethod
    def encode(self, corpus: Corpus, side: str, tokenizer: Any) -> Samples:
        """The rows of ``train`` or ``eval``."""

    @abc.abstractmethod
    def collate(self, samples: Samples, numbers: np.ndarray, draw: Draw) -> Batch:
        """The batch of some rows.

        Args:
            numbers: of the rows, int64 `(B,)`.
            draw: gives the random numbers of the row at a place in [0, B) of the batch.
        """

    def write(self, corpus: Corpus, tokenizer: Any, folder: Path) -> None:
        """Keep the rows of both sides in a new folder of the cache."""
        for side in ("train", "eval"):
            self.encode(corpus, side, tokenizer).save(folder / side)

    def rows_depend_on(self) -> Sequence[object]:
        """What `encode` reads beside texts, tokenizer and `seq_len`, as JSON."""
        return ()

    def look(self, corpus: Corpus, tokenizer: Any, initial: Built) -> Mapping[str, Any]:
        """What the task finds out for itself before rows are made, as JSON; see `known`."""
        return {}

    def head(self, initial: Built, seed: int) -> Built:
        """The model that is trained, on the one that training starts from."""
        return initial

    def more_facts(self, corpus: Corpus, train: Samples, held_out: Samples, built: Built) -> Mapping[str, Any]:
        """What `facts` says beside what it says of every task on texts."""
        return {}

    def tests(self, held_out: Samples) -> Mapping[str, Batches]:
        return {"main": EvaluationBatches(self.collate, held_out, self.test_rows(held_out))}

    def test_rows(self, held_out: Samples) -> list[np.ndarray]:
        """The rows of each batch of ``main``."""
        return by_length(held_out, self.eval_batch_size)

    def make_tokenizer(self, model: str, corpus: Corpus, cache: Path) -> Any:
        """The tokenizer of a model, or one that is trained on the corpus."""
        return load_tokenizer(model, corpus, vocab_size=self.vocab_size, cache_dir=cache)

    def build(self, model: str, tokenizer: Any, seed: int) -> Built:
        """The model that training starts from."""
        from asyncsgd.models import build_model

        return build_model(model, tokenizer, seq_len=self.seq_len, dropout=self.dropout, seed=seed)

    def loaded_by(self, model: str) -> str:
        """The class of transformers that loads the saved model that training starts from."""
        return self.starts_as

    def origin(self) -> Origin:
        from asyncsgd.recorded_run import read_origin

        return read_origin(self.model_name, self.start_from, self.shapes)

    def check_names(self) -> None:
        """Look at the data and at what `model_name` names."""
        if self.data_name is None:
            raise UsageError("--data is missing: name a folder with train.*, a file, or hub:NAME")
        self.sources()
        model = self.origin().model
        if self.vocab_size != type(self).vocab_size and model not in self.shapes:
            raise UsageError(
                f"--vocab-size {self.vocab_size} is for --model {', '.join(self.shapes)}; {self.model_name!r} has its "
                f"own tokenizer; drop it"
            )

    def prepare(self, seed: int, cache: Path) -> Self:
        """Read the texts, make rows of them, look at the model; everything slow is cached.

        Raises:
            UsageError: if the user must change something; the message says what.
        """
        from asyncsgd import models
        from asyncsgd.recorded_run import hash_of

        self.check_names()
        cache, origin = cache.absolute(), self.origin()
        corpus = self.read(cache)
        tokenizer = self.make_tokenizer(origin.model, corpus, cache)
        initial = self.build(origin.model, tokenizer, seed)
        init_sha256 = hash_of(initial.model, origin)
        weights = None if origin.model in self.shapes else models.local_folder(origin.model)
        known = {
            "weights": weights,
            "config": models.config_json(initial.model),
            "tokenizer": weights or str(tokenizer.name_or_path),
            "pad_id": pad_id_of(tokenizer, initial.model),
        }
        if weights is not None:
            known["loaded_by"] = self.loaded_by(weights)
        known |= self.look(corpus, tokenizer, initial)
        task = dataclasses.replace(self, prepared=json.dumps(known))  # type: ignore[type-var]

        pieces = tokenizer.backend_tokenizer.to_str()
        key = TOKENS_FORMAT, corpus.fingerprint, pieces, self.seq_len, *task.rows_depend_on()
        folder = cached(cache, self.name, key, functools.partial(task.write, corpus, tokenizer))
        train, held_out = (Samples.load(folder / side) for side in ("train", "eval"))
        facts: dict[str, Any] = {
            "data": corpus.name,
            "data_fingerprint": corpus.fingerprint,
            "base_model": None if weights is None else self.model_name,
            "from_scratch": origin.from_scratch if self.has_head else weights is None,
            "num_train_samples": len(train),
            "num_eval_samples": len(held_out),
            "sample_order": self.sample_order,
            "notes": list(corpus.notes),
        }
        if self.has_head:
            facts |= {"model": self.model_name, "parent": origin.parent, "init_sha256": init_sha256}
        built = task.head(initial, seed)
        facts |= task.more_facts(corpus, train, held_out, built)
        if self.has_head and weights is not None:
            facts["notes"] = [*facts["notes"], built.in_words()]
        found_out = json.dumps({**known, "folder": str(folder), "facts": facts})
        return dataclasses.replace(task, prepared=found_out)  # type: ignore[type-var]

    @property
    def known(self) -> Mapping[str, Any]:
        """What `prepare` has found.

        Raises:
            ValueError: before `prepare`.
        """
        if self.prepared is None:
            raise ValueError("nothing is known of the data yet; call prepare(seed, cache) and use what it returns")
        return _read(self.prepared)

    def facts(self) -> Mapping[str, Any]:
        return {} if self.prepared is None else dict(self.known["facts"])

    def model(self, seed: int) -> nn.Module:
        from asyncsgd.models import Built, restored

        loaded_by = self.known.get("loaded_by", self.starts_as)
        initial = restored(self.known["weights"], self.known["config"], self.dropout, seed, loaded_by)
        return self.head(Built(initial, ()), seed).model

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write model and tokenizer; the transformers class `auto_class` reads them from there."""
        from asyncsgd.models import save_pretrained

        save_pretrained(model, self.known["tokenizer"], folder)

    def data(self, seed: int) -> TextData:
        return TextData(self, seed)

    def samples(self, side: str) -> Samples:
        """The rows of ``train`` or ``eval``, mapped into memory."""
        return Samples.load(Path(self.known["folder"]) / side)

    def padded(self, samples: Samples, numbers: np.ndarray) -> Batch:
        """``input_ids`` and ``attention_mask``, 1 for tokens and 0 for padding, of some rows."""
        rows = samples.rows("ids", numbers)
        mask = pad([np.ones(len(row), dtype=np.int64) for row in rows], 0)
        return {"input_ids": pad(rows, self.known["pad_id"]), "attention_mask": mask}

    def model_inputs(self, model: nn.Module, batch: Batch) -> Batch:
        """What the model is called with: token types where the batch has them and the model more than one."""
        names = ["input_ids", "attention_mask"]
        if "token_type_ids" in batch and getattr(model.config, "type_vocab_size", 0) > 1:
            names.append("token_type_ids")
        return {name: batch[name] for name in names}

    def targets(self, batch: Batch) -> Tensor:
        """The class of each row of logits, int64 `(K,)`, `IGNORED` where it has no loss."""
        labels: Tensor = batch["labels"]
        return labels.flatten()

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        from torch.nn import functional

        return functional.cross_entropy(outputs.flatten(0, -2), self.targets(batch), ignore_index=IGNORED)

    def summed_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """In float64, over float32 losses; for `sums`."""
        import torch
        from torch.nn import functional

        logits = outputs.float().flatten(0, -2)
        losses = functional.cross_entropy(logits, self.targets(batch), ignore_index=IGNORED, reduction="none")
        return losses.sum(dtype=torch.float64)

    def weight(self, batch: Batch) -> float:
        return float((self.targets(batch) != IGNORED).sum())

    def loss_unit(self) -> str:
        return "nats"

    def count_tokens(self, batch: Batch) -> int:
        return int(batch["attention_mask"].sum())


@functools.lru_cache(maxsize=8)
def _read(prepared: str) -> Mapping[str, Any]:
    known: dict[str, Any] = json.loads(prepared)
    return known


class TextData:
    """The batches of a task on texts in one process: training batches of any stream, and the evaluation sets."""

    def __init__(self, task: TextTask, seed: int) -> None:
        self._task, self._seed, self._train = task, seed, task.samples("train")
        order = ORDERS[task.sample_order]
        lengths = self._train.lengths
        alike = is_by_length(task.sampling)
        self._order = functools.cache(lambda stream: order(lengths, task.batch_size, seed, stream, alike))
        self.evaluation = task.tests(task.samples("eval"))

    def batch(self, stream: int, index: int) -> Batch:
        """Make batch `index` of a stream. What is drawn for a row depends on how many rows came before it."""
        first = index * self._task.batch_size

        def draw(row: int) -> np.random.Generator:
            return generator(self._seed, Purpose.MASK, stream, first + row)

        return self._task.collate(self._train, self._order(stream)(index), draw)


def by_length(samples: Samples, batch_size: int, limit: int = 0) -> list[np.ndarray]:
    """The rows of evaluation batches, similar lengths together: at most `limit` rows, evenly over all; 0 for all."""
    rows = evenly(len(samples), limit)
    rows = rows[np.argsort(samples.lengths[rows], kind="stable")]
    return [rows[first : first + batch_size] for first in range(0, len(rows), batch_size)]


@dataclasses.dataclass(frozen=True)
class EvaluationBatches:
    """Batches that are the same for every seed and in every mode."""

    collate: Callable[[Samples, np.ndarray, Draw], Batch]
    samples: Samples
    rows: Sequence[np.ndarray]
    """Of each batch, int64."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        numbers = self.rows[index]
        return self.collate(self.samples, numbers, lambda row: generator(0, Purpose.EVALUATION, 0, int(numbers[row])))


@dataclasses.dataclass(frozen=True)
class HeadTask(TextTask):
    """A new head on the encoder of a masked language model, learned from labels."""

    has_head: ClassVar[bool] = True
    start_from: ClassVar[tuple[str, ...]] = (
        *("masked_lm", "classification", "token_classification", "question_answering"),
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
        """With an output a label."""
        from asyncsgd.models import build_head

        return build_head(
            initial.model,
            str(self.auto_class).removeprefix("AutoModelFor"),
            self.known["labels"],
            problem_type=self.problem_type,
            keep=self.output_layer == "keep",
            dropout=self.dropout,
            seed=seed,
        )

    def loaded_by(self, model: str) -> str:
        from asyncsgd.models import class_of

        return class_of(model)

    def build(self, model: str, tokenizer: Any, seed: int) -> Built:
        from asyncsgd.models import load_model

        if model in self.shapes:
            return super().build(model, tokenizer, seed)
        loaded_by = self.loaded_by(model)
        return load_model(model, len(tokenizer), loaded_by, seq_len=self.seq_len, dropout=self.dropout, seed=seed)

    def tests(self, held_out: Samples) -> Mapping[str, Batches]:
        return {"main": EvaluationBatches(self.numbered, held_out, self.test_rows(held_out))}

    def numbered(self, samples: Samples, numbers: np.ndarray, draw: Draw) -> Batch:
        """A batch of an evaluation: with ``rows``, the samples that these are, of ``num_rows``."""
        import torch

        return self.collate(samples, numbers, draw) | {
            "rows": torch.from_numpy(numbers),
            "num_rows": torch.tensor(len(samples)),
        }


@dataclasses.dataclass(frozen=True)
class LabelledTask(HeadTask):
    """Of texts or of words, from a table with two columns.

    A class of its own may have a field ``labels: Labels``: then its batches have ``labels``, as the `Head` of that kind
    in `asyncsgd.tasks.heads` wants them, and loss, scores and the model's configuration follow.
    """

    labels = "single"

    data_name: str | None = setting(
        None,
        "a folder with train.*, a file (.parquet, .jsonl), or hub:NAME",
        unset="none: it has to be named",
        name="data",
        aliases=("train_file",),
    )
    eval_split: str | None = setting(
        None,
        "what to score on: test, validation or another set of the data, e.g. validation_matched",
        unset="the first that has labels",
        name="split",
    )
    encoding: str = setting("utf-8", ENCODING)
    quoting: Quoting | None = setting(None, QUOTING, unset=QUOTING_UNSET)

    @property
    def scored(self) -> Head:
        """The kind of its labels, which says the loss and the scores."""
        return HEADS[cast(Labels, self.labels)]

    @property
    def problem_type(self) -> str | None:
        return self.scored.problem_type if self.auto_class == "AutoModelForSequenceClassification" else None

    def scored_by(self) -> Directions:
        return self.better or {name: self.scored.better[name] for name in self.scored.usual}

    def loss_unit(self) -> str:
        return self.scored.loss_unit

    def read(self, cache: Path) -> Corpus:
        limits, split = (self.train_samples, self.eval_samples), self.eval_split
        return load_corpus(
            str(self.data_name),
            self.columns,
            self.row_kind(),
            split=split,
            limits=limits,
            cache_dir=cache,
            reading=self.reading,
        )

    def look(self, corpus: Corpus, tokenizer: Any, initial: Built) -> Mapping[str, Any]:
        return {"labels": corpus.labels}

    def targets(self, batch: Batch) -> Tensor:
        labels: Tensor = batch["labels"]
        return labels

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return self.scored.loss(outputs, self.targets(batch))

    def summed_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        import torch

        return self.scored.losses(outputs.flatten(0, -2), self.targets(batch)).sum(dtype=torch.float64)

    def sums(self, outputs: Tensor, batch: Batch) -> Sums:
        return {"loss": self.summed_loss(outputs, batch), **self.scored.sums(outputs, batch)}

    def metrics(self, sums: Sums) -> dict[str, Any]:
        found = self.scored.metrics(sums, None)
        return {name: found[name] for name in self.scored_by()}

    def undefined_scores(self, corpus: Corpus) -> Mapping[str, str]:
        """The scores that the labels to score on leave undefined, and why."""
        return {}

    def details(self, sums: Sums) -> dict[str, Any]:
        """What the kind of labels says beside its scores."""
        return self.scored.details(sums, self.known["labels"])


@dataclasses.dataclass(frozen=True)
class LanguageModel(TextTask):
    """What masked and causal language modelling share: plain texts, and evaluations of some rows."""

    column_fields: ClassVar[tuple[str, ...]] = ("text_column",)

    model_name: str = setting(
        "tiny",
        "tiny, small or tiny-distilbert (new, no network), a run, a folder or a name on the Hub",
        name="model",
        run=True,
    )
    data_name: str = setting(
        "pydocs",
        "pydocs (built in, no network), a file, a folder or hub:NAME; A+B joins two",
        name="data",
        aliases=("train_file",),
    )
    eval_data: str | None = setting(None, "text to evaluate on", unset="held out from --data", aliases=("val_file",))
    text_column: str = setting("text", "column of the data that holds the text")
    encoding: str = setting("utf-8", ENCODING)
    quoting: Quoting | None = setting(None, QUOTING, unset=QUOTING_UNSET)
    documents: Units | None = setting(
        None, "what a document of a .txt file is", unset="a line, or a paragraph where a line is blank"
    )
    seq_len: int = setting(128, "tokens per row", at_least=8)
    blocks: bool = setting(False, BLOCKS)
    batch_size: int = setting(16, "rows in one gradient, per worker", at_least=1)
    sampling: Sampling = setting("group_by_length", SAMPLING)
    sample_order: int = setting(NEWEST, SAMPLE_ORDER, at_least=FIRST, at_most=NEWEST)
    eval_samples: int = setting(500, "rows in one evaluation; 0: all", at_least=0)
    vocab_size: int = setting(VOCABULARY, "of the tokenizer trained for a model that is new", at_least=1)
    dropout: float = setting(0.0, "of all dropout layers", at_least=0, below=1)

    prepared: str | None = found()

    def read(self, cache: Path) -> Corpus:
        corpus = load_corpus(
            self.data_name, self.columns, eval_data=self.eval_data, cache_dir=cache, reading=self.reading
        )
        return dataclasses.replace(corpus, fingerprint=corpus.fingerprint_of(self.blocks))

    def rows(self, corpus: Corpus, side: str, tokenizer: Any, **columns: Any) -> Samples:
        """Those of `asyncsgd.data.tokens.rows_of`, of which there is at least one."""
        texts = (corpus.train if side == "train" else corpus.eval).texts
        samples = rows_of(texts, tokenizer, seq_len=self.seq_len, blocks=self.blocks, **columns)
        if not len(samples):
            raise UsageError(
                f"no {side} document of {corpus.name} has {MIN_SAMPLE_IDS} tokens (a word of more than 100 "
                f"characters is one); give other texts with --{'data' if side == 'train' else 'eval-data'} FILE"
            )
        return samples

    def test_rows(self, held_out: Samples) -> list[np.ndarray]:
        return by_length(held_out, self.eval_batch_size, self.eval_samples)

    def more_facts(self, corpus: Corpus, train: Samples, held_out: Samples, built: Built) -> Mapping[str, Any]:
        return {"num_eval_samples": len(evenly(len(held_out), self.eval_samples))}

    def sums(self, outputs: Tensor, batch: Batch) -> Sums:
        right = outputs.float().flatten(0, -2).argmax(-1) == self.targets(batch)
        return {"loss": self.summed_loss(outputs, batch), "correct": right.sum()}

    def metrics(self, sums: Sums) -> dict[str, float]:
        """`accuracy` is the share of the tokens that are predicted exactly."""
        loss, right = sums["loss"] / sums["weight"], sums["correct"] / sums["weight"]
        metrics = {"perplexity": scores.perplexity(loss), "accuracy": right}
        return {name: metrics[name] for name in self.better}
