"""What every task on texts shares: rows on disk, batches, and a model of transformers.

A task's own file says how its data are read, how texts become rows, how rows become a batch, which head the model has,
and what is scored.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from asyncsgd.errors import UsageError
from asyncsgd.settings.groups import (
    BUILT_IN,
    NEWEST,
    OF_TRANSFORMERS,
    TRAINED_HERE,
    Defaults,
    EvalData,
    Quoting,
    Sampling,
    Units,
)
from asyncsgd.settings.specs import flag_of
from asyncsgd.tasks.base import Batches, Task

if TYPE_CHECKING:  # fields are flags, and --help is not to wait for torch, numpy and the reading of data
    from numpy import ndarray
    from numpy.random import Generator
    from torch import Tensor, nn

    from asyncsgd.data.corpora import Corpus
    from asyncsgd.data.files import Reading
    from asyncsgd.data.kinds import Kind
    from asyncsgd.data.tokens import Samples
    from asyncsgd.tasks.models import Built
    from asyncsgd.tasks.origin import Origin
    from asyncsgd.tasks.text_batches import Batch, Draw

IGNORED = -100
"""The label without a loss, as transformers and torch have it."""

_FOLDERS = ("folder", "weights", "tokenizer")
"""What of `TextTask.known` is the path of a folder: of rows, of the model that training starts from, and of its
tokenizer."""

VOCABULARY = 8192
"""Entries of the tokenizer of a model that is made here, unless `vocab_size` says otherwise."""


class TextTask(Task):
    """A task on texts. Subclasses are frozen dataclasses.

    This class is no dataclass, so the values that settings have here are class attributes. A subclass declares as its
    fields the settings that have no value here, and those others that its user may choose.
    """

    defaults: ClassVar[Defaults] = OF_TRANSFORMERS
    preload: ClassVar[tuple[str, ...]] = ("asyncsgd.tasks.models",)
    shapes: ClassVar[tuple[str, ...]] = TRAINED_HERE
    """The models that are made here, with random weights."""
    starts_as: ClassVar[str] = "AutoModelForMaskedLM"
    """The class of transformers that loads what `model_name` names."""
    start_from: ClassVar[tuple[str, ...]] = ("masked_lm",)
    """The tasks of the runs that `model_name` may name."""
    has_head: ClassVar[bool] = False
    """Whether the model has another head than the one that it was saved with."""
    column_fields: ClassVar[tuple[str, ...]] = ()
    """The settings that name columns of the data."""
    eval_batch_size: ClassVar[int] = 32

    model_name: str
    data_name: str | None
    eval_data: EvalData | None = None
    eval_split: str | None = None
    seq_len: int
    sampling: Sampling
    sample_order: int = NEWEST
    dropout: float
    encoding: str = "utf-8"
    quoting: Quoting | None = None
    documents: Units | None = None
    """What is a document of a text file: a line or a paragraph."""
    vocab_size: int = VOCABULARY
    prepared: str | None
    """What `prepare` has found, as JSON: the one field that other processes are sent; see `known`."""

    def __post_init__(self) -> None:
        if self.eval_data is not None and self.eval_split is not None:
            raise UsageError("--eval-data and --split both say what to score on; drop one of them")
        if self.data_name not in BUILT_IN or self.eval_data is not None:
            return
        for name in self.column_fields:
            is_given = getattr(self, name) != getattr(type(self), name)
            if is_given:
                raise UsageError(
                    f"{flag_of(name)} does nothing for --data {self.data_name}, which has no columns; drop it, or name "
                    f"other data"
                )

    @property
    def columns(self) -> Mapping[str, str]:
        """The columns to read, each with the flag that chooses it."""
        return {getattr(self, name): flag_of(name) for name in self.column_fields}

    @property
    def reading(self) -> Reading:
        """How the files of the data are read."""
        from asyncsgd.data.files import Reading

        return Reading(self.encoding, self.quoting, self.documents)

    def row_kind(self) -> Kind:
        """How a row of its data is read."""
        from asyncsgd.data.kinds import PLAIN

        return PLAIN

    def sources(self) -> object:
        """Refuse names of files that are not there, and return the sources as `Kind.sources` does."""
        return self.row_kind().sources(str(self.data_name), self.columns, self.eval_data, self.reading)

    @abc.abstractmethod
    def read(self, cache: Path) -> Corpus:
        """The texts of both sides."""

    @abc.abstractmethod
    def encode(self, corpus: Corpus, side: str, tokenizer: Any) -> Samples:
        """The rows of ``train`` or ``eval``. Of several evaluation sets, each is `eval` of a corpus of its own."""

    @abc.abstractmethod
    def collate(self, samples: Samples, numbers: ndarray, draw: Draw) -> Batch:
        """The batch of some rows.

        Args:
            numbers: of the rows, int64 `(B,)`.
            draw: gives the random numbers of the row at a place in [0, B) of the batch.
        """

    def write(self, corpus: Corpus, tokenizer: Any, folder: Path) -> None:
        """Keep the rows to train on and those of every evaluation set in a new folder of the cache."""
        self.encode(corpus, "train", tokenizer).save(folder / "train")
        for number, of_set in enumerate(corpus.evaluations):
            self.write_set(of_set, tokenizer, folder / side_of(number))

    def write_set(self, corpus: Corpus, tokenizer: Any, folder: Path) -> None:
        """Keep the rows of an evaluation set in a folder that is not there yet; a subclass may keep more beside
        them.
        """
        self.encode(corpus, "eval", tokenizer).save(folder)

    def is_of(self, corpus: Corpus, folder: Path) -> bool:
        """Whether the rows in a folder of the cache were read from the same places of their source: predictions name
        the places, and the key of the cache does not. If not, the rows are kept once more, under a key with the places.
        """
        return True

    def rows_depend_on(self) -> Sequence[object]:
        """What `encode` reads beside texts, tokenizer and `seq_len`, as JSON."""
        return ()

    def look(self, corpus: Corpus, tokenizer: Any, initial: Built) -> Mapping[str, Any]:
        """What the task finds out for itself before rows are made, as JSON; see `known`."""
        return {}

    def head(self, initial: Built, seed: int) -> Built:
        """The model to train, made of the one that training starts from, e.g. its encoder with a new head."""
        return initial

    def more_facts(self, corpus: Corpus, train: Samples, held_out: Samples, built: Built) -> Mapping[str, Any]:
        """What `facts` says beside what it says of every task on texts. Its value stands where both have a key, so that
        ``notes`` of a task have to contain the notes of the corpus.
        """
        return {}

    def notes_on(self, held_out: Samples) -> Sequence[str]:
        """What is to be said of the rows of any evaluation set before training."""
        return ()

    def tests(self, number: int) -> Mapping[str, Batches]:
        """The batches of an evaluation set: ``main``, and by name those of any further test that a task has."""
        from asyncsgd.tasks.text_batches import EvaluationBatches

        held_out = self.samples(side_of(number))
        batches = EvaluationBatches(self.collate, held_out, self.test_rows(held_out))
        return {"main": batches}

    def test_rows(self, held_out: Samples) -> list[ndarray]:
        """The rows of each batch of an evaluation."""
        from asyncsgd.tasks.text_batches import by_length

        return by_length(held_out, self.eval_batch_size)

    def make_tokenizer(self, model: str, corpus: Corpus, cache: Path) -> Any:
        """The tokenizer of a model, or one that is trained on the corpus."""
        from asyncsgd.data.tokenizer import load_tokenizer

        return load_tokenizer(model, corpus, vocab_size=self.vocab_size, cache_dir=cache)

    def build(self, model: str, tokenizer: Any, seed: int) -> Built:
        """The model that training starts from."""
        from asyncsgd.tasks.models import build_model

        return build_model(model, tokenizer, seq_len=self.seq_len, dropout=self.dropout, seed=seed)

    def loaded_by(self, model: str) -> str:
        """The class of transformers that loads the saved model that training starts from."""
        return self.starts_as

    def origin(self) -> Origin:
        from asyncsgd.tasks.origin import read_origin

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

    def before_preparing(self, cache: Path) -> str:
        return f"data   reading {self.data_name}; what takes long is done once and kept in {cache}"

    def prepare(self, seed: int, cache: Path) -> Self:
        """Read the texts, make rows of them, look at the model; everything slow is cached.

        Raises:
            UsageError: if the user must change something; the message says what.
        """
        from asyncsgd.data.tokenizer import pad_id_of
        from asyncsgd.data.tokens import TOKENS_FORMAT, Samples, cached
        from asyncsgd.tasks import models
        from asyncsgd.tasks.origin import hash_of

        self.check_names()
        cache = cache.absolute()
        origin = self.origin()
        corpus = self.read(cache)
        tokenizer = self.make_tokenizer(origin.model, corpus, cache)
        initial = self.build(origin.model, tokenizer, seed)
        # This also refuses weights that are not those that their run wrote down.
        init_sha256 = hash_of(initial.model, origin)
        weights = None
        if origin.model not in self.shapes:
            weights = models.local_folder(origin.model)
        known: dict[str, Any] = {
            "weights": weights,
            "config": models.config_json(initial.model),
            "tokenizer": weights or str(tokenizer.name_or_path),
            "pad_id": pad_id_of(tokenizer, initial.model),
        }
        if weights is not None:
            known["loaded_by"] = self.loaded_by(weights)
        known |= self.look(corpus, tokenizer, initial)
        task = dataclasses.replace(self, prepared=json.dumps(known))  # type: ignore[type-var]

        tokenizer_json = tokenizer.backend_tokenizer.to_str()
        key: list[object] = [TOKENS_FORMAT, corpus.fingerprint]
        key += [further.fingerprint for further in corpus.sets]
        key += [tokenizer_json, self.seq_len, *task.rows_depend_on()]
        write = functools.partial(task.write, corpus, tokenizer)
        folder = cached(cache, self.name, key, write)
        if not task.is_of(corpus, folder):
            places = [of_set.eval.rows for of_set in corpus.evaluations]
            folder = cached(cache, self.name, [*key, places], write)
        train = Samples.load(folder / "train")
        held_out = Samples.load(folder / "eval")
        # A new head has random weights in any case, so of such a model it counts whether its encoder had any training.
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
            facts["model"] = self.model_name
            facts["parent"] = origin.parent
            facts["init_sha256"] = init_sha256
        built = task.head(initial, seed)
        facts |= task.more_facts(corpus, train, held_out, built)
        notes = list(facts["notes"])
        if corpus.sets:
            facts["evaluation_sets"] = task.facts_on_sets(corpus, folder)
        for number, further in enumerate(corpus.sets, start=1):
            if further.has_labels:
                rows = Samples.load(folder / side_of(number))
                notes += [f"{further.name}: {note}" for note in task.notes_on(rows)]
        if self.has_head and weights is not None:
            notes.append(built.in_words())
        facts["notes"] = notes
        known["folder"] = str(folder)
        known["facts"] = facts
        return dataclasses.replace(task, prepared=json.dumps(known))  # type: ignore[type-var]

    @property
    def known(self) -> Mapping[str, Any]:
        """What `prepare` has found: ``folder`` of the rows; ``weights``, the folder of the model that training starts
        from, None for random weights, and ``loaded_by``, the class that loads it; its ``config``; ``tokenizer`` and
        ``pad_id``; the ``facts``; and what `look` of the task has found.

        Raises:
            ValueError: before `prepare`.
        """
        if self.prepared is None:
            raise ValueError("nothing is known of the data yet; call prepare(seed, cache) and use what it returns")
        return _read(self.prepared)

    def folders(self) -> tuple[str, ...]:
        known = self.known
        paths = [known[name] for name in _FOLDERS if known[name] is not None]
        return tuple(dict.fromkeys(paths))

    def in_folders(self, places: Mapping[str, str]) -> Self:
        known = dict(self.known)
        for name in _FOLDERS:
            known[name] = places.get(known[name], known[name])
        return dataclasses.replace(self, prepared=json.dumps(known))  # type: ignore[type-var]

    def facts(self) -> Mapping[str, Any]:
        if self.prepared is None:
            return {}
        return dict(self.known["facts"])

    def model(self, seed: int) -> nn.Module:
        from asyncsgd.tasks.models import Built, restored

        known = self.known
        loaded_by = known.get("loaded_by", self.starts_as)
        initial = restored(known["weights"], known["config"], self.dropout, seed, loaded_by)
        built = self.head(Built(initial, ()), seed)
        return built.model

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write model and tokenizer; the transformers class `auto_class` reads them from there."""
        from asyncsgd.tasks.models import save_pretrained

        save_pretrained(model, self.known["tokenizer"], folder)

    def facts_on_sets(self, corpus: Corpus, folder: Path) -> list[dict[str, Any]]:
        """What the summary says of each of several evaluation sets, the first one first; see `known`."""
        from asyncsgd.data.evaluation_sets import ALONE, EvaluationSet
        from asyncsgd.data.tokens import Samples

        # The first set has the fingerprint of the whole corpus, which changes with the training texts too. Summaries of
        # all runs have it so.
        first = EvaluationSet(corpus.split or ALONE, corpus.eval, fingerprint=corpus.fingerprint)
        facts = []
        for number, evaluation_set in enumerate([first, *corpus.sets]):
            held_out = Samples.load(folder / side_of(number))
            set_facts: dict[str, Any] = {
                "name": evaluation_set.name,
                "fingerprint": evaluation_set.fingerprint,
                "scored": evaluation_set.has_labels,  # which plain texts have by definition
                "num_samples": sum(map(len, self.test_rows(held_out))),
            }
            facts.append(set_facts)
        return facts

    @property
    def sets(self) -> Sequence[Mapping[str, Any]]:
        """What `facts_on_sets` says, where there are several evaluation sets."""
        facts = self.known.get("facts", {})
        sets: Sequence[Mapping[str, Any]] = facts.get("evaluation_sets", ())
        return sets

    def all_tests(self) -> Mapping[str, Batches]:
        """`tests` of every evaluation set that has labels, by name; those of the first one have their own names."""
        tests = dict(self.tests(0))
        for number in range(1, len(self.sets)):
            evaluation_set = self.sets[number]
            if not evaluation_set["scored"]:
                continue
            set_name = evaluation_set["name"]
            for name, batches in self.tests(number).items():
                full_name = set_name if name == "main" else f"{set_name}: {name}"
                tests[full_name] = batches
        return tests

    def data(self, seed: int) -> TextData:
        return TextData(self, seed)

    def samples(self, side: str) -> Samples:
        """The rows of ``train`` or of an evaluation set, see `side_of`, mapped into memory."""
        from asyncsgd.data.tokens import Samples

        return Samples.load(Path(self.known["folder"]) / side)

    def padded(self, samples: Samples, numbers: ndarray) -> Batch:
        """``input_ids`` and ``attention_mask``, 1 for tokens and 0 for padding, of some rows."""
        import numpy as np

        from asyncsgd.data.tokens import pad

        rows = samples.rows("ids", numbers)
        input_ids = pad(rows, self.known["pad_id"])
        attention_mask = pad([np.ones(len(row), dtype=np.int64) for row in rows], 0)
        return {"input_ids": input_ids, "attention_mask": attention_mask}

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

        logits = outputs.flatten(0, -2)
        return functional.cross_entropy(logits, self.targets(batch), ignore_index=IGNORED)

    def summed_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The sum of the loss terms, for `sums`: in float64, over float32 losses."""
        import torch
        from torch.nn import functional

        logits = outputs.float().flatten(0, -2)
        losses = functional.cross_entropy(logits, self.targets(batch), ignore_index=IGNORED, reduction="none")
        return losses.sum(dtype=torch.float64)

    def weight(self, batch: Batch) -> float:
        has_loss = self.targets(batch) != IGNORED
        return float(has_loss.sum())

    def loss_unit(self) -> str:
        return "nats"

    def count_tokens(self, batch: Batch) -> int:
        return int(batch["attention_mask"].sum())


def side_of(number: int) -> str:
    """The folder of an evaluation set in the cache.

    >>> side_of(0), side_of(2)
    ('eval', 'eval-2')
    """
    return f"eval-{number}" if number else "eval"


@functools.lru_cache(maxsize=8)
def _read(prepared: str) -> Mapping[str, Any]:
    known: dict[str, Any] = json.loads(prepared)
    return known


class TextData:
    """The batches of a task on texts in one process: training batches of any stream, and the evaluation sets."""

    def __init__(self, task: TextTask, seed: int) -> None:
        from asyncsgd.data.order import ORDERS, is_by_length

        self._task = task
        self._seed = seed
        self._train = task.samples("train")
        order = ORDERS[task.sample_order]
        lengths = self._train.lengths
        by_length = is_by_length(task.sampling)
        self._order = functools.cache(lambda stream: order(lengths, task.batch_size, seed, stream, by_length))
        self.evaluation = task.all_tests()

    def batch(self, stream: int, index: int) -> Batch:
        """Make batch `index` of a stream. What is drawn for a row depends on how many rows came before it."""
        from asyncsgd.data.random import Purpose, generator

        first = index * self._task.batch_size

        def draw(place: int) -> Generator:
            return generator(self._seed, Purpose.MASK, stream, first + place)

        return self._task.collate(self._train, self._order(stream)(index), draw)
