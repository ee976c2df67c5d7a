"""Extractive question answering: the answer is a span of a text, or the text does not hold it, as in SQuAD 2.0.

    loss = -(1/2B) sum_b ( log softmax(start_b)[first_b] + log softmax(end_b)[last_b] ),    b over the B windows

The two softmaxes run over what may be an answer: the window's pieces of the text, and the first token,
which is the target of a window that does not hold the whole answer. (BERT's own softmax runs over all tokens.)

A question is scored over all its windows. Its answer is the span with the largest start + end logit in any of them; see
`asyncsgd.data.question_scores`. The score of no answer is the smallest start + end logit that a first token has. The
answer is given if its score is at least that one, which is the threshold 0. Scores are shares: 0.5 is 50 percent.

Shapes: B windows, L tokens, Q questions of the evaluation.
"""
# ruff: noqa: RUF009 - the calls in the dataclass's defaults are `setting`, which returns dataclasses.field

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from asyncsgd.data import question_scores as scores
from asyncsgd.errors import UsageError
from asyncsgd.settings.flags import setting
from asyncsgd.settings.training import SAMPLING, Sampling
from asyncsgd.tasks.base import Sums, found, to_device
from asyncsgd.tasks.encoder import START, VOCABULARY, EncoderTask

if TYPE_CHECKING:  # the fields are flags, and --help is not to wait for torch
    from torch import Tensor, nn

    from asyncsgd.data.question_windows import Asked, WindowBatch, WindowedQuestions, Windows
    from asyncsgd.data.questions import QuestionData
    from asyncsgd.models import Built


@dataclasses.dataclass(frozen=True)
class QuestionAnswering(EncoderTask):
    """Finding the answer to a question in a text; see the module."""

    name: ClassVar[str] = "question_answering"
    better: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {"exact_match": "higher", "f1": "higher"}
    preload: ClassVar[tuple[str, ...]] = ("asyncsgd.data.question_windows", "asyncsgd.models")
    auto_class: ClassVar[str | None] = "AutoModelForQuestionAnswering"
    output_folders: ClassVar[tuple[str, ...]] = ("predictions",)

    model_name: str = setting("tiny", START, name="model", aliases=("init_from",), run=True)
    data_name: str | None = setting(
        None,
        "a folder with train*, a file (.parquet, .jsonl, .json, .json.gz), hub:NAME, or several joined by +",
        unset="none: it has to be named",
        example="../shared/data/squad_v2/train_part.parquet",
        name="data",
        aliases=("train_file",),
    )
    eval_data: str | None = setting(
        None,
        "what to score on, named in the same ways",
        unset="dev* or validation* of --data",
        example="../shared/data/squad_v2/dev_a.parquet",
        aliases=("val_file",),
    )
    train_samples: int = setting(0, "training questions to use; 0: all", at_least=0)
    eval_samples: int = setting(0, "questions to score on; 0: all", at_least=0)
    seq_len: int = setting(384, "tokens of a window and its question", at_least=8)
    stride: int = setting(128, "word pieces from the beginning of a window to that of the next", at_least=1)
    max_answer_length: int = setting(30, "word pieces of an answer, at most", at_least=1)
    predictions: str | None = setting(
        None, "folder for predictions.json and two more at the end", unset="none are written", example="predictions"
    )
    batch_size: int = setting(16, "windows in one gradient", at_least=1)
    sampling: Sampling = setting("group_by_length", SAMPLING)
    dropout: float = setting(0.1, "of all dropout layers", at_least=0, below=1)
    vocab_size: int = setting(VOCABULARY, "entries of the tokenizer that tiny and small get", at_least=64)

    model_source: str | None = found()
    """What `asyncsgd.models.build_model` takes, without a network."""
    folder: str | None = found()
    """Of the windows and the tokenizer."""
    corpus: str | None = found()
    data_fingerprint: str | None = found()
    num_train_samples: int | None = found()
    """Windows."""
    num_train_questions: int | None = found()
    num_eval_samples: int | None = found()
    """Windows."""
    num_eval_questions: int | None = found()
    from_scratch: bool | None = found()
    parent: str | None = found()
    """As JSON."""
    init_sha256: str | None = found()
    notes: tuple[str, ...] = found()

    def check_names(self) -> None:
        from asyncsgd.data.questions import check_questions

        if self.data_name is None:
            raise UsageError("--data is missing: name a folder with train*, a file, or hub:NAME")
        if self.stride >= self.seq_len:
            raise UsageError(
                f"--stride {self.stride} is not smaller than the window: --seq-len is {self.seq_len}; type e.g. "
                f"--stride {self.seq_len // 3}"
            )
        if self.predictions is not None and Path(self.predictions).is_file():
            raise UsageError(f"--predictions {self.predictions} is a file; name a folder")
        check_questions(self.data_name, self.eval_data)
        self.check_encoder()

    def read(self, seed: int, cache: Path) -> Self:
        from asyncsgd.data.corpora import Corpus
        from asyncsgd.data.documents import Documents
        from asyncsgd.data.question_windows import Windows, questions_folder
        from asyncsgd.data.questions import load_questions
        from asyncsgd.data.tokenization import load_tokenizer
        from asyncsgd.origin import read_origin

        data = load_questions(
            str(self.data_name),
            eval_data=self.eval_data,
            train_samples=self.train_samples,
            eval_samples=self.eval_samples,
        )
        texts = [text for question in data.train for text in (question.context, question.question)]
        corpus = Corpus(data.name, Documents(tuple(dict.fromkeys(texts)), None), Documents((), None), data.fingerprint)
        model = read_origin(self.model_name).model
        tokenizer = load_tokenizer(model, corpus, vocab_size=self.vocab_size, cache_dir=cache)
        folder = questions_folder(data, tokenizer, seq_len=self.seq_len, stride=self.stride, cache_dir=cache)
        train, evaluation = (Windows.load(folder / side) for side in ("train", "eval"))
        return dataclasses.replace(
            self,
            folder=str(folder.absolute()),
            corpus=data.name,
            data_fingerprint=data.fingerprint,
            num_train_samples=len(train.table),
            num_train_questions=len(data.train),
            num_eval_samples=len(evaluation.table),
            num_eval_questions=len(data.eval),
            notes=(*data.notes, *_lost_answers(data, train)),
            **self.found_of_encoder(tokenizer, seed),
        )

    def facts(self) -> Mapping[str, Any]:
        if self.folder is None:
            return {}
        return {
            **self.facts_of_encoder(),
            "num_train_samples": self.num_train_samples,
            "num_train_questions": self.num_train_questions,
            "num_eval_samples": self.num_eval_samples,
            "num_eval_questions": self.num_eval_questions,
        }

    def head(self, masked_lm: nn.Module, seed: int) -> Built:
        from asyncsgd import models

        return models.build_answerer(masked_lm, dropout=self.dropout, seed=seed)

    def data(self, seed: int) -> WindowedQuestions:
        from asyncsgd.data.batching import is_by_length
        from asyncsgd.data.question_windows import WindowedQuestions

        return WindowedQuestions(Path(self.known("folder")), self.batch_size, seed, is_by_length(self.sampling))

    def outputs(self, model: nn.Module, batch: WindowBatch) -> Tensor:
        """The logits of start and end, `(B, 2, L)`; minus infinity where no answer may begin or end."""
        import torch

        config: Any = model.config
        types = {"token_type_ids": batch.token_type_ids} if getattr(config, "type_vocab_size", 0) > 1 else {}
        said = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, **types)
        logits = torch.stack([said.start_logits, said.end_logits], dim=1)
        return logits.masked_fill(~batch.allowed[:, None], -torch.inf)

    def loss(self, outputs: Tensor, batch: WindowBatch) -> Tensor:
        from torch.nn import functional

        return functional.cross_entropy(outputs.flatten(0, 1), batch.targets.flatten())

    def weight(self, batch: WindowBatch) -> float:
        """Windows."""
        return float(len(batch.input_ids))

    def count_tokens(self, batch: WindowBatch) -> int:
        return int(batch.attention_mask.sum())

    def sums(self, outputs: Tensor, batch: WindowBatch) -> Sums:
        """The loss, and of each question, in arrays `(Q,)` that have 0 for the questions of other batches:

        ``difference``, float64, is the score of no answer less that of the best answer; ``exact``, int64, and ``f1``,
        float64, score the best answer; ``answerable``, int64, is 1 for a question that has an answer.
        """
        import torch
        from torch.nn import functional

        losses = functional.cross_entropy(outputs.float().flatten(0, 1), batch.targets.flatten(), reduction="none")
        number = self.known("num_eval_questions")
        sums: Sums = {name: np.zeros(number) for name in ("difference", "f1")}
        sums |= {name: np.zeros(number, dtype=np.int64) for name in ("exact", "answerable")}
        for asked, no_answer, spans in self._decoded(outputs, batch, 1):
            # A context of which the tokenizer makes nothing has no span.
            best, text = (spans[0].score, asked.text(spans[0].first, spans[0].last)) if spans else (-np.inf, "")
            sums["difference"][asked.number] = no_answer - best
            sums["exact"][asked.number] = scores.exact_match(text, asked.answers)
            sums["f1"][asked.number] = scores.f1(text, asked.answers)
            sums["answerable"][asked.number] = bool(asked.answers)
        return {"loss": losses.sum(dtype=torch.float64) / 2, **sums}

    def _decoded(
        self, outputs: Tensor, batch: WindowBatch, number: int
    ) -> Iterator[tuple[Asked, float, list[scores.Span]]]:
        """Of each question the score of no answer, and its best spans."""
        logits = outputs.float().cpu().numpy()
        for asked in batch.asked:
            windows = [(first, logits[row, :, begin : begin + end - first]) for row, begin, first, end in asked.windows]
            no_answer = min(float(logits[row, 0, 0] + logits[row, 1, 0]) for row, *_ in asked.windows)
            yield asked, no_answer, scores.best_spans(windows, number=number, longest=self.max_answer_length)

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Means over all questions, at the threshold 0."""
        return {name: float(of_questions.mean()) for name, of_questions in _at_zero(sums).items()}

    def details(self, sums: Sums) -> dict[str, Any]:
        """The scores of questions with and without an answer, None where there are none; and the best mean scores of
        any threshold, each with the smallest threshold that has it.
        """
        details: dict[str, Any] = {}
        for name, answerable in (("has_answer", 1), ("no_answer", 0)):
            of = sums["answerable"] == answerable
            means = {score: float(each[of].mean()) if of.any() else None for score, each in _at_zero(sums).items()}
            details[name] = {**means, "num_questions": int(of.sum())}
        for name, column in _COLUMN_OF.items():
            score, threshold = scores.best_threshold(sums["difference"], sums[column], 1 - sums["answerable"])
            details[f"best_{name}"] = {"score": score, "threshold": threshold}
        return details

    def final(self, model: nn.Module) -> Mapping[str, Any]:
        """The predictions, where they are asked for."""
        if self.predictions is not None:
            self.write_predictions(model, Path(self.predictions))
        return {"predictions": self.predictions}

    def write_predictions(self, model: nn.Module, folder: Path, number: int = 20) -> None:
        """Answer all questions of the evaluation and write three files, each an object with a key for each question:

        ``predictions.json``, its answer, or an empty text where it has none at the threshold 0, as SQuAD's scorer reads
        it; ``null_odds.json``, its difference (see `asyncsgd.data.question_scores`), as that scorer reads with
        ``--na-prob-file``; ``nbest.json``, its best answers with their scores.

        Args:
            model: of this task, in evaluation mode, on any device.
            folder: made when needed. Earlier files are kept under names such as ``predictions.before-1.json``.
            number: answers of each question in ``nbest.json``, at most.
        """
        device = next(model.parameters()).device
        predictions: dict[str, str] = {}
        null_odds: dict[str, float] = {}
        nbest: dict[str, list[dict[str, Any]]] = {}
        batches = self.data(0).evaluation["main"]
        for index in range(len(batches)):
            batch = to_device(batches[index], device)
            for asked, no_answer, spans in self._decoded(self.outputs(model, batch), batch, number):
                best = [{"text": asked.text(span.first, span.last), "score": span.score} for span in spans]
                null_odds[asked.id] = no_answer - (spans[0].score if spans else -np.inf)
                predictions[asked.id] = str(best[0]["text"]) if null_odds[asked.id] <= 0 else ""
                nbest[asked.id] = best
        contents = {"predictions": predictions, "null_odds": null_odds, "nbest": nbest}
        folder.mkdir(parents=True, exist_ok=True)
        number = 1
        while any((folder / f"{name}.before-{number}.json").exists() for name in contents):
            number += 1
        for name, content in contents.items():
            partial, path = folder / f"{name}.json.partial", folder / f"{name}.json"
            partial.unlink(missing_ok=True)
            with open(partial, "x", encoding="utf-8") as file:  # follows no link
                json.dump(content, file, ensure_ascii=False)
            if path.exists():
                path.rename(folder / f"{name}.before-{number}.json")
            partial.rename(path)


_COLUMN_OF = {"exact_match": "exact", "f1": "f1"}


def _at_zero(sums: Sums) -> dict[str, np.ndarray]:
    """The scores of each question at the threshold 0, by name."""
    return {
        name: scores.at_threshold(sums["difference"], sums[column], 1 - sums["answerable"], 0.0)
        for name, column in _COLUMN_OF.items()
    }


def _lost_answers(data: QuestionData, train: Windows) -> list[str]:
    """What is said of training answers that no window holds."""
    held = np.unique(train.table["question"][train.table["start"] >= 0])
    lost = sum(bool(question.answers) for question in data.train) - len(held)
    return [f"{lost} training answers lie in no window as a whole and are learned as no answer"] if lost else []
