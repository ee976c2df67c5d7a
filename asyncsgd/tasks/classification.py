"""Classification of whole texts.

    loss = (1/B) sum_b w[y_b] (-log softmax(logits_b)[y_b]),    b over the B texts of the batch

with w = 1, or the inverse frequency of the class. The divisor is B and not the sum of the weights. (torch's ``weight=``
divides by that sum.) So the batches' gradients add up to the gradient of one loss over the whole training set, whatever
classes a batch happens to hold. Evaluations never weigh.

Shapes: B sequences, L tokens, C classes.
"""
# ruff: noqa: RUF009 - the calls in the dataclass's defaults are `setting`, which returns dataclasses.field

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from asyncsgd.errors import UsageError, nearest
from asyncsgd.settings.flags import flag_of, setting
from asyncsgd.settings.training import OF_TRANSFORMERS, SAMPLING, Defaults, Sampling
from asyncsgd.tasks import scores
from asyncsgd.tasks.base import Batches, Sums, Task, found
from asyncsgd.tasks.encoder import START, VOCABULARY

if TYPE_CHECKING:  # the fields are flags, and --help is not to wait for torch
    from torch import Tensor, nn

    from asyncsgd.data.batching import Frame
    from asyncsgd.data.labelled import HateCheck, LabelledBatch


def inverse_frequency(counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the weight of each class, w_c = N / (K n_c) with K the classes that occur; 0 for those that do not.

    The mean of the weights over the N samples is 1, so the loss keeps its scale and the learning rate its meaning.

    Args:
        counts: n_c, samples of each class.

    Returns:
        float64 `(C,)`, new.

    >>> inverse_frequency([1, 3]).tolist()
    [2.0, 0.6666666666666666]
    """
    counts = np.asarray(counts, dtype=np.float64)
    occurring = counts > 0
    return np.divide(counts.sum() / max(occurring.sum(), 1), counts, out=np.zeros_like(counts), where=occurring)


@dataclasses.dataclass(frozen=True)
class Classification(Task):
    """A text's class, from the encoder of a masked-language model and a new head."""

    name: ClassVar[str] = "classification"
    better: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {"macro_f1": "higher", "accuracy": "higher"}
    defaults: ClassVar[Defaults] = dataclasses.replace(
        OF_TRANSFORMERS, warmup=0.1, samples=None, epochs=2.0, evaluations=4
    )
    """The learning rate suits the small models made here. It was tried with two epochs over 4,000 texts of
    hate_davidson from a pretrained `tiny`, two seeds each. The mean macro-F1 was 0.566 at 2e-4, 0.604 at 5e-4, 0.568 at
    1e-3 and 0.416 at 2e-3. Published models of BERT's size want about 5e-5."""
    preload: ClassVar[tuple[str, ...]] = ("asyncsgd.data.labelled", "asyncsgd.models")
    auto_class: ClassVar[str | None] = "AutoModelForSequenceClassification"

    model_name: str = setting("tiny", START, name="model", aliases=("init_from",), run=True)
    data_name: str = setting(
        "pydocs",
        "pydocs (which package documents this?), a folder with train.*, a file, or hub:NAME",
        name="data",
        aliases=("train_file",),
    )
    eval_split: Literal["test", "validation"] | None = setting(
        None, "what to score on", unset="test where there is one", name="split"
    )
    text_column: str = setting("text", "column that holds the text")
    label_column: str = setting("label", "column that holds the label")
    train_samples: int = setting(0, "training texts to use; 0: all", at_least=0)
    eval_samples: int = setting(0, "texts to score on; 0: all", at_least=0)
    seq_len: int = setting(128, "tokens per text; what is longer is cut", at_least=8)
    batch_size: int = setting(16, "texts in one gradient", at_least=1)
    sampling: Sampling = setting("group_by_length", SAMPLING)
    dropout: float = setting(0.1, "of all dropout layers", at_least=0, below=1)
    class_weights: bool = setting(False, "weigh each class by its inverse frequency in the training loss")
    hatecheck: str | None = setting(
        None,
        "folder or file of HateCheck's functional tests, run once at the end",
        unset="not tested",
        example="../shared/data/hatecheck",
    )
    hatecheck_positive: str | None = setting(
        None, "labels that count as hateful there, LABEL[,LABEL]", unset="hate", example="hate"
    )

    weights: str | None = found()
    """Folder of the pretrained model; None for random weights."""
    config: str | None = found()
    """Of the masked-language model, as JSON."""
    tokenizer: str | None = found()
    tokens: str | None = found()
    """Folder of the token arrays: ``train``, ``eval``, and ``classes.npz``."""
    prefix: tuple[int, ...] | None = found()
    suffix: tuple[int, ...] | None = found()
    pad_id: int | None = found()
    labels: tuple[str, ...] | None = found()
    counts: tuple[int, ...] | None = found()
    """Training texts of each class."""
    corpus: str | None = found()
    fingerprint: str | None = found()
    notes: tuple[str, ...] | None = found()
    scored_on: str | None = found()
    num_train_samples: int | None = found()
    num_eval_samples: int | None = found()
    num_cut: int | None = found()
    """Texts that fill the sequence length."""
    init_sha256: str | None = found()
    """Of the masked-language model that the encoder comes from."""
    new_parameters: tuple[str, ...] | None = found()
    from_scratch: bool | None = found()
    parent: str | None = found()
    """As JSON."""

    def __post_init__(self) -> None:
        if self.data_name == "pydocs":
            for name in ("text_column", "label_column"):
                if getattr(self, name) != getattr(type(self), name):
                    flag = flag_of(name)
                    raise UsageError(
                        f"{flag} does nothing for --data pydocs, which has no columns; drop it, or name other data"
                    )
        if self.hatecheck_positive is not None and self.hatecheck is None:
            raise UsageError(
                "--hatecheck-positive does nothing without --hatecheck; add --hatecheck FOLDER, or drop it"
            )

    def check_names(self) -> None:
        from asyncsgd import models
        from asyncsgd.data.labelled import check_labelled, hatecheck_files
        from asyncsgd.origin import read_origin

        check_labelled(self.data_name, self.text_column, self.label_column)
        if self.hatecheck is not None:
            hatecheck_files(self.hatecheck)
        models.check_model(read_origin(self.model_name).model, self.seq_len)

    def prepare(self, seed: int, cache: Path) -> Self:
        """Read the origin and the texts, tokenize them, look at the model.

        Raises:
            UsageError: if the user must change something; the message says what.
        """
        from asyncsgd import models
        from asyncsgd.data.corpora import Corpus
        from asyncsgd.data.labelled import labelled_folder, load_hatecheck, load_labelled
        from asyncsgd.data.tokenization import TRAINED_HERE, Tokens, load_tokenizer
        from asyncsgd.origin import hash_of, read_origin

        origin = read_origin(self.model_name)
        data = load_labelled(
            self.data_name,
            text_column=self.text_column,
            label_column=self.label_column,
            cache_dir=cache,
            split=self.eval_split,
            train_samples=self.train_samples,
            eval_samples=self.eval_samples,
        )
        if self.hatecheck is not None:
            self._hateful(data.labels)
            load_hatecheck(self.hatecheck)
        corpus = Corpus(data.name, data.train, data.eval, data.fingerprint)
        tokenizer = load_tokenizer(origin.model, corpus, vocab_size=VOCABULARY, cache_dir=cache)
        initial = models.build_model(origin.model, tokenizer, seq_len=self.seq_len, dropout=self.dropout, seed=seed)
        init_sha256 = hash_of(initial.model, origin)
        built = models.build_classifier(initial.model, data.labels, dropout=self.dropout, seed=seed)
        frame = models.frame_of(tokenizer)
        folder = labelled_folder(data, tokenizer, seq_len=self.seq_len, cache_dir=cache)
        classes = data.classes(data.train)
        capacity = self.seq_len - len(frame.prefix) - len(frame.suffix)
        num_cut = sum(int((Tokens.load(folder / side).lengths >= capacity).sum()) for side in ("train", "eval"))
        return dataclasses.replace(
            self,
            weights=None if origin.model in TRAINED_HERE else models.local_folder(origin.model),
            config=models.config_json(initial.model),
            tokenizer=str(tokenizer.name_or_path),
            tokens=str(folder),
            prefix=frame.prefix,
            suffix=frame.suffix,
            pad_id=frame.pad_id,
            labels=data.labels,
            counts=tuple(np.bincount(classes, minlength=len(data.labels)).tolist()),
            corpus=data.name,
            fingerprint=data.fingerprint,
            notes=data.notes,
            scored_on=data.split,
            num_train_samples=len(data.train.texts),
            num_eval_samples=len(data.eval.texts),
            num_cut=num_cut,
            init_sha256=init_sha256,
            new_parameters=built.new_parameters,
            from_scratch=origin.from_scratch,
            parent=None if origin.parent is None else json.dumps(origin.parent),
        )

    def facts(self) -> Mapping[str, Any]:
        counts = ", ".join(
            f"{label} {count}" for label, count in zip(self.labels or (), self.counts or (), strict=True)
        )
        notes = [f"labels: {counts}", *(self.notes or ())]
        if self.num_cut:
            notes.append(f"{self.num_cut} texts fill --seq-len {self.seq_len}; what is longer is cut")
        return {
            "model": self.model_name,
            "from_scratch": self.from_scratch,
            "parent": None if self.parent is None else json.loads(self.parent),
            "class_weights": self.class_weights,
            "notes": notes,
            "data": self.corpus,
            "data_fingerprint": self.fingerprint,
            "base_model": None if self.weights is None else self.model_name,
            "data_notes": list(self.notes or ()),
            "split": self.scored_on,
            "labels": list(self.labels or ()),
            "num_train_samples": self.num_train_samples,
            "num_eval_samples": self.num_eval_samples,
            "new_parameters": len(self.new_parameters or ()),
            "init_sha256": self.init_sha256,
        }

    def save(self, model: nn.Module, folder: Path) -> None:
        """`AutoModelForSequenceClassification.from_pretrained(folder)` reads it."""
        from asyncsgd import models

        models.save_pretrained(model, self.tokenizer, folder)

    def model(self, seed: int) -> nn.Module:
        from asyncsgd import models

        initial = models.masked_lm(self.weights, str(self.config), self.dropout, seed)
        return models.build_classifier(initial, self.labels or (), dropout=self.dropout, seed=seed).model

    def data(self, seed: int) -> LabelledTokens:
        return LabelledTokens(self, seed)

    @property
    def frame(self) -> Frame:
        """What stands around each text."""
        from asyncsgd.data.batching import Frame

        assert self.prefix is not None
        assert self.suffix is not None
        assert self.pad_id is not None
        return Frame(self.prefix, self.suffix, self.pad_id)

    def outputs(self, model: nn.Module, batch: LabelledBatch) -> Tensor:
        """The logits `(B, C)`."""
        return model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits

    def loss(self, outputs: Tensor, batch: LabelledBatch) -> Tensor:
        import torch
        from torch.nn import functional

        if not self.class_weights:
            return functional.cross_entropy(outputs, batch.labels)
        losses = functional.cross_entropy(outputs, batch.labels, reduction="none")
        weights = torch.tensor(inverse_frequency(self.counts or ()), dtype=torch.float32, device=losses.device)
        return (weights[batch.labels] * losses).mean()

    def weight(self, batch: LabelledBatch) -> float:
        """Texts."""
        return float(len(batch.labels))

    def count_tokens(self, batch: LabelledBatch) -> int:
        return int(batch.attention_mask.sum())

    def sums(self, outputs: Tensor, batch: LabelledBatch) -> Sums:
        """The loss without class weights, and int64 `(C, C)`, rows: true class, columns: predicted."""
        import torch
        from torch.nn import functional

        logits = outputs.float()
        losses = functional.cross_entropy(logits, batch.labels, reduction="none")
        number = logits.shape[1]
        cells = batch.labels * number + logits.argmax(-1)
        confusion = torch.bincount(cells, minlength=number**2).reshape(number, number)
        return {"loss": losses.sum(dtype=torch.float64), "confusion": confusion}

    def metrics(self, sums: Sums) -> dict[str, float]:
        confusion = sums["confusion"]
        metrics = {"macro_f1": scores.macro_f1(confusion), "accuracy": scores.accuracy(confusion)}
        return {name: value for name, value in metrics.items() if value is not None}

    def details(self, sums: Sums) -> dict[str, Any]:
        each = scores.per_class_f1(sums["confusion"])
        return {
            "per_class_f1": dict(zip(self.labels or (), each, strict=True)),
            "confusion": sums["confusion"].tolist(),
        }

    def final(self, model: nn.Module) -> Mapping[str, Any]:
        """HateCheck, where it is asked for."""
        if self.hatecheck is None:
            return {"hatecheck": None}
        from asyncsgd.data.labelled import load_hatecheck

        cases = load_hatecheck(self.hatecheck)
        return {"hatecheck": cases.scores(np.isin(self._predictions(model, cases), self._hateful(self.labels or ())))}

    def _predictions(self, model: nn.Module, cases: HateCheck) -> np.ndarray:
        from transformers import AutoTokenizer

        from asyncsgd.data.labelled import LabelledEvaluation
        from asyncsgd.data.tokenization import tokenize_beginnings

        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer, trust_remote_code=False)
        tokens = tokenize_beginnings(cases.texts, tokenizer, seq_len=self.seq_len)
        batches = LabelledEvaluation(tokens, np.zeros(len(cases.texts), dtype=np.int64), self.frame)
        device = next(model.parameters()).device
        predicted = np.empty(len(cases.texts), dtype=np.int64)
        predicted[batches.order] = np.concatenate(
            [self.outputs(model, batches[index].to(device)).argmax(-1).cpu().numpy() for index in range(len(batches))]
        )
        return predicted

    def _hateful(self, labels: Sequence[str]) -> tuple[int, ...]:
        """The classes that count as hateful in HateCheck."""
        wanted = [label.strip() for label in (self.hatecheck_positive or "hate").split(",")]
        for label in wanted:
            if label not in labels:
                raise UsageError(
                    f"--hatecheck: {self.data_name} has no label {label!r}{nearest(label, labels)}; say which labels "
                    f"count as hateful with --hatecheck-positive LABEL[,LABEL]; the labels are {', '.join(labels)}"
                )
        if len(set(wanted)) == len(labels):
            raise UsageError("--hatecheck-positive names every label; leave out those that are not hateful")
        return tuple(labels.index(label) for label in dict.fromkeys(wanted))


class LabelledTokens:
    """The batches of a `Classification` in one process."""

    def __init__(self, task: Classification, seed: int) -> None:
        from asyncsgd.data.batching import is_by_length
        from asyncsgd.data.labelled import LabelledBatches, LabelledEvaluation
        from asyncsgd.data.tokenization import Tokens

        folder = Path(str(task.tokens))
        train, classes = Tokens.load(folder / "train"), np.load(folder / "train_classes.npy")
        self._train = LabelledBatches(train, classes, task.frame, task.batch_size, seed, is_by_length(task.sampling))
        self.evaluation: Mapping[str, Batches] = {
            "main": LabelledEvaluation(Tokens.load(folder / "eval"), np.load(folder / "eval_classes.npy"), task.frame)
        }

    def batch(self, stream: int, index: int) -> LabelledBatch:
        return self._train.batch(stream, index)
