"""Extractive question answering: the answer is a span of a text, or the text does not hold it, as in SQuAD 2.0.

    loss = -(1/2B) sum_b ( log softmax(start_b)[first_b] + log softmax(end_b)[last_b] ),    b over the B windows

The two softmaxes run over what may be an answer: the window's pieces of the text, and the first token,
which is the target of a window that does not hold the whole answer. (BERT's own softmax runs over all tokens.)

A question is scored over all its windows. Its answer is the span with the largest start + end logit in any of them; see
`asyncsgd.tasks.answers`. The score of no answer is the smallest start + end logit that a first token has. The
answer is given if its score is at least that one, which is the threshold 0. Exact match and F1 are shares: 0.5 is 50
percent.

Shapes: B windows, L tokens, Q questions of the evaluation.
"""

# ruff: noqa: RUF009 - the calls in the dataclass's defaults are `setting`, which returns dataclasses.field

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from asyncsgd.errors import UsageError
from asyncsgd.settings.groups import EVAL_DATA, EvalData
from asyncsgd.settings.specs import setting
from asyncsgd.tasks.base import Directions, Sums, to_device
from asyncsgd.tasks.labelled_task import HeadTask
from asyncsgd.tasks.text_task import VOCABULARY, side_of

if TYPE_CHECKING:  # fields are flags, and --help is not to wait for torch, numpy and the reading of data
    from numpy import ndarray
    from torch import Tensor, nn

    from asyncsgd.data.corpora import Corpus
    from asyncsgd.data.tokens import Samples
    from asyncsgd.tasks.models import Built
    from asyncsgd.tasks.text_batches import Batch, Draw


@dataclasses.dataclass(frozen=True)
class QuestionAnswering(HeadTask):
    """Finding the answer to a question in a text; see the module.

    A context may be longer than what a model reads. So a row holds a window of it after the question:

        [CLS] question [SEP] window [SEP]    with BERT

    A window that does not hold the whole answer has the first token as its target, which stands for no answer. So has
    every window of a question without an answer.

    A batch has ``token_type_ids``, int64 `(B, L)`, which are 1 for the window and what is after it; ``allowed``, bool
    `(B, L)`, true where an answer may begin or end; and ``targets``, int64 `(B, 2)`, the positions of the answer's
    first and last piece. A batch of an evaluation holds all windows of its questions, and ``rows`` has their numbers.
    """

    name: ClassVar[str] = "question_answering"
    better: ClassVar[Directions] = {"exact_match": "higher", "f1": "higher"}
    auto_class: ClassVar[str | None] = "AutoModelForQuestionAnswering"
    output_folders: ClassVar[tuple[str, ...]] = ("predictions",)

    data_name: str | None = setting(
        None,
        "a folder with train*, a file (.parquet, .jsonl, .json, .json.gz), hub:NAME, or several joined by +",
        unset="none: it has to be named",
        name="data",
        aliases=("train_file",),
    )
    eval_data: EvalData | None = setting(
        None, EVAL_DATA, unset="dev* or validation* of --data", aliases=("val_file",), repeats=True
    )
    train_samples: int = setting(0, "questions to learn from; 0: all", at_least=0)
    eval_samples: int = setting(0, "questions to score on; 0: all", at_least=0)
    batch_size: int = setting(16, "windows in one gradient", at_least=1)
    seq_len: int = setting(384, "tokens of a window and its question", at_least=8)
    stride: int = setting(128, "word pieces from the beginning of a window to that of the next", at_least=1)
    max_answer_length: int = setting(30, "word pieces of an answer, at most", at_least=1)
    predictions: str | None = setting(
        None,
        "folder for predictions.json and two more at the end; those of further sets in a folder of their name",
        unset="none are written",
    )
    vocab_size: int = setting(VOCABULARY, "entries of the tokenizer that tiny and small get", at_least=64)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stride >= self.seq_len:
            raise UsageError(f"--stride {self.stride} is not smaller than --seq-len {self.seq_len}; type a smaller one")

    def sources(self) -> object:
        from asyncsgd.tasks.questions import question_sources

        return question_sources(str(self.data_name), self.eval_data)

    def read(self, cache: Path) -> Corpus:
        from asyncsgd.tasks.questions import load_questions

        limits = self.train_samples, self.eval_samples
        return load_questions(str(self.data_name), eval_data=self.eval_data, limits=limits)

    def rows_depend_on(self) -> Sequence[object]:
        return (self.stride,)

    def encode(self, corpus: Corpus, side: str, tokenizer: Any) -> Samples:
        from asyncsgd.data.tokens import Samples
        from asyncsgd.tasks.questions import QuestionCorpus
        from asyncsgd.tasks.windows import windows_of

        assert isinstance(corpus, QuestionCorpus)
        windows = windows_of(corpus.questions[side], tokenizer, seq_len=self.seq_len, stride=self.stride)
        if side == "eval":
            return windows
        # Only an evaluation needs the text of an answer.
        values = dict(windows.values)
        del values["offsets"]
        return Samples(values, {"ids": windows.starts["ids"]})

    def write_set(self, corpus: Corpus, tokenizer: Any, folder: Path) -> None:
        from asyncsgd.tasks.questions import QuestionCorpus

        assert isinstance(corpus, QuestionCorpus)
        super().write_set(corpus, tokenizer, folder)
        scored = []
        for question in corpus.questions["eval"]:
            scored.append((question.id, question.context, question.answers))
        path = folder / "scored.json"
        path.write_text(json.dumps(scored), encoding="utf-8")

    def look(self, corpus: Corpus, tokenizer: Any, initial: Built) -> Mapping[str, Any]:
        return {"labels": ("start", "end")}

    def more_facts(self, corpus: Corpus, train: Samples, held_out: Samples, built: Built) -> Mapping[str, Any]:
        import numpy as np

        from asyncsgd.tasks.questions import QuestionCorpus

        assert isinstance(corpus, QuestionCorpus)
        notes = list(corpus.notes)
        first_pieces = train.values["targets"][:, 0]
        with_whole_answer = np.unique(train.values["question"][first_pieces > 0])
        num_answerable = sum(bool(question.answers) for question in corpus.questions["train"])
        num_lost = num_answerable - len(with_whole_answer)
        if num_lost:
            notes.append(f"{num_lost} training answers lie in no window as a whole and are learned as no answer")
        facts: dict[str, Any] = {"notes": notes}
        for side, questions in corpus.questions.items():
            facts[f"num_{side}_questions"] = len(questions)
        return facts

    def test_rows(self, held_out: Samples) -> list[ndarray]:
        from asyncsgd.tasks.windows import whole_questions

        return whole_questions(held_out, self.eval_batch_size)

    def collate(self, samples: Samples, numbers: ndarray, draw: Draw) -> Batch:
        import torch

        def column(name: str) -> Tensor:
            return torch.from_numpy(samples.values[name][numbers])

        batch = self.padded(samples, numbers)
        position = torch.arange(batch["input_ids"].shape[1])
        window_begin = column("begin")[:, None]
        num_pieces = column("end") - column("first")
        window_end = window_begin + num_pieces[:, None]
        behind_question = position >= window_begin
        in_window = behind_question & (position < window_end)
        batch["token_type_ids"] = behind_question * batch["attention_mask"]
        batch["allowed"] = (position == 0) | in_window
        batch["targets"] = column("targets")
        return batch

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """The logits of start and end, `(B, 2, L)`; minus infinity where no answer may begin or end."""
        import torch

        output = model(**self.model_inputs(model, batch))
        logits = torch.stack([output.start_logits, output.end_logits], dim=1)
        forbidden = ~batch["allowed"][:, None]
        return logits.masked_fill(forbidden, -torch.inf)

    def targets(self, batch: Batch) -> Tensor:
        targets: Tensor = batch["targets"]
        return targets.flatten()

    def weight(self, batch: Batch) -> float:
        return float(len(batch["input_ids"]))

    def sums(self, outputs: Tensor, batch: Batch) -> Sums:
        """The loss, and arrays `(Q,)` with a number for each question, 0 for the questions of other batches:

        ``difference``, float64, is the score of no answer less that of the best answer; ``exact``, int64, and ``f1``,
        float64, score the best answer; ``answerable``, int64, is 1 for a question that has an answer.
        """
        import numpy as np

        from asyncsgd.tasks.answers import exact_match, f1

        side = side_of(int(batch["set"]))
        num_questions = len(_scored(self.known["folder"], side))
        sums: Sums = {"loss": self.summed_loss(outputs, batch) / 2}
        for name in ("difference", "f1"):
            sums[name] = np.zeros(num_questions)
        for name in ("exact", "answerable"):
            sums[name] = np.zeros(num_questions, dtype=np.int64)
        for decoded in self.decoded(outputs, batch, 1):
            number = decoded.number
            answers = decoded.answers
            sums["difference"][number] = decoded.difference
            sums["exact"][number] = exact_match(decoded.text, answers)
            sums["f1"][number] = f1(decoded.text, answers)
            sums["answerable"][number] = bool(answers)
        return sums

    def decoded(self, outputs: Tensor, batch: Batch, num_best: int) -> Iterator[Decoded]:
        """Each question of an evaluation batch with its best answers, at most `num_best`."""
        import numpy as np

        from asyncsgd.tasks.answers import best_spans

        side = side_of(int(batch["set"]))
        windows = self.samples(side)
        scored = _scored(self.known["folder"], side)
        logits = outputs.float().cpu().numpy()
        rows = batch["rows"].cpu().numpy()
        question_of_row = windows.values["question"][rows]
        for question in dict.fromkeys(question_of_row.tolist()):
            identity, context, answers = scored[question]
            lines = np.flatnonzero(question_of_row == question)
            window_logits: list[tuple[int, ndarray]] = []
            offsets: dict[int, list[int]] = {}
            for line in lines:
                row = rows[line]
                begin = int(windows.row("begin", row))
                first = int(windows.row("first", row))
                characters = windows.row("offsets", row)
                end = begin + len(characters)
                window_logits.append((first, logits[line, :, begin:end]))
                offsets |= enumerate(characters.tolist(), start=first)
            best = []
            for score, first, last in best_spans(window_logits, number=num_best, longest=self.max_answer_length):
                start, _ = offsets[first]
                _, stop = offsets[last]
                best.append((score, context[start:stop].strip()))
            no_answer = logits[lines, :, 0].sum(axis=1)
            yield Decoded(question, identity, answers, float(no_answer.min()), best)

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Means over all questions, at the threshold 0."""
        return {name: float(of_questions.mean()) for name, of_questions in _at_zero(sums).items()}

    def details(self, sums: Sums) -> dict[str, Any]:
        """The scores of questions with and without an answer, None where there are none; and the best mean scores of
        any threshold, each with the smallest threshold that has it.
        """
        from asyncsgd.tasks.answers import best_threshold

        details: dict[str, Any] = {}
        at_zero = _at_zero(sums)
        answerable = sums["answerable"]
        for name, chosen in (("has_answer", answerable == 1), ("no_answer", answerable == 0)):
            means: dict[str, Any] = dict.fromkeys(at_zero)
            if chosen.any():
                means = {score: float(of_questions[chosen].mean()) for score, of_questions in at_zero.items()}
            details[name] = {**means, "num_questions": int(chosen.sum())}
        for name, column in _COLUMN_OF.items():
            score, threshold = best_threshold(sums["difference"], sums[column], 1 - answerable)
            details[f"best_{name}"] = {"score": score, "threshold": threshold}
        return details

    def final(self, model: nn.Module) -> Mapping[str, Any]:
        if self.predictions is not None:
            folder = Path(self.predictions)
            self.write_predictions(model, folder)
            for number in range(1, len(self.sets)):
                name = self.sets[number]["name"]
                self.write_predictions(model, folder / name, of_set=number)
        return {"predictions": self.predictions}

    def write_predictions(self, model: nn.Module, folder: Path, number: int = 20, of_set: int = 0) -> None:
        """Answer all questions of an evaluation set and write three files, each an object with a key for each question:

        ``predictions.json``, its answer, or an empty text where it has none at the threshold 0, as SQuAD's scorer reads
        it; ``null_odds.json``, its difference (see `asyncsgd.tasks.answers`), as that scorer reads with
        ``--na-prob-file``; ``nbest.json``, its best answers with their scores.

        Args:
            model: of this task, in evaluation mode, on any device.
            folder: made when needed. Earlier files are kept under names such as ``predictions.before-1.json``.
            number: answers of each question in ``nbest.json``, at most.
            of_set: its number.
        """
        device = next(model.parameters()).device
        predictions = {}
        null_odds = {}
        nbest = {}
        batches = self.tests(of_set)["main"]
        for index in range(len(batches)):
            batch = to_device(batches[index], device)
            outputs = self.outputs(model, batch)
            for decoded in self.decoded(outputs, batch, number):
                identity = decoded.id
                predictions[identity] = decoded.text if decoded.difference <= 0 else ""
                null_odds[identity] = decoded.difference
                nbest[identity] = [{"text": text, "score": score} for score, text in decoded.best]
        folder.mkdir(parents=True, exist_ok=True)
        contents = {"predictions": predictions, "null_odds": null_odds, "nbest": nbest}
        before = 1
        while list(folder.glob(f"*.before-{before}.json")):
            before += 1
        for name, content in contents.items():
            partial = folder / f"{name}.json.partial"
            path = folder / f"{name}.json"
            partial.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
            if path.exists():
                path.rename(folder / f"{name}.before-{before}.json")
            partial.rename(path)


class Decoded(NamedTuple):
    """What a model answers to a question."""

    number: int
    """The question's number in its evaluation set."""
    id: str
    answers: list[str]
    """The annotators' answers."""
    no_answer: float
    """The score of no answer."""
    best: list[tuple[float, str]]
    """The best answers with their scores; empty where the tokenizer makes nothing of the context."""

    @property
    def text(self) -> str:
        """The best answer."""
        return self.best[0][1] if self.best else ""

    @property
    def difference(self) -> float:
        """The score of no answer less that of the best answer."""
        score = self.best[0][0] if self.best else -math.inf
        return self.no_answer - score


_COLUMN_OF = {"exact_match": "exact", "f1": "f1"}
"""The column of `QuestionAnswering.sums` that each score is computed from."""


def _at_zero(sums: Sums) -> dict[str, ndarray]:
    """The scores of each question at the threshold 0, by name."""
    from asyncsgd.tasks.answers import at_threshold

    at_zero = {}
    for name, column in _COLUMN_OF.items():
        at_zero[name] = at_threshold(sums["difference"], sums[column], 1 - sums["answerable"], 0.0)
    return at_zero


@functools.lru_cache(maxsize=2)
def _scored(folder: str, side: str) -> Any:
    """The id, the context and the annotators' answers of each question of an evaluation set."""
    path = Path(folder) / side / "scored.json"
    return json.loads(path.read_text(encoding="utf-8"))
