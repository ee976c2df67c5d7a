"""Questions about texts, as SQuAD 2.0 has them: read from files or from the Hub, checked, and parted for evaluation.

The answer to a question is a span of its text, the context, or the context does not hold it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from asyncsgd.data.corpora import Corpus
from asyncsgd.data.documents import Documents, evenly, without_surrogates
from asyncsgd.data.evaluation_sets import ALONE, EvaluationSet, named_places
from asyncsgd.data.files import Rows, Source, joined_parts, read_table, unpacked
from asyncsgd.errors import UsageError
from asyncsgd.settings.groups import EvalData

KINDS = (".parquet", ".jsonl", ".json", ".json.gz")
SIDES = {"train": ("train*",), "validation": ("dev*", "validation*")}
_COLUMNS = dict.fromkeys(("id", "context", "question", "answers"), "")  # no flag chooses one


@dataclass(frozen=True)
class Question:
    """A question about a context."""

    id: str
    question: str
    context: str
    answers: tuple[str, ...]
    """As the annotators wrote them; none where the context does not hold the answer."""
    start: int | None
    """The character of the context at which the first one is said to begin; None where there is none."""


@dataclass(frozen=True)
class QuestionCorpus(Corpus):
    """Questions to train on and questions to score on, about different contexts; its training texts are all contexts
    and questions that are learned.
    """

    questions: Mapping[str, Sequence[Question]] = dataclasses.field(default_factory=dict)
    """The questions of ``train`` and of ``eval``."""
    further: tuple[Sequence[Question], ...] = ()
    """The questions of each of `sets`. The documents of these sets are empty."""

    @property
    def evaluations(self) -> tuple[Self, ...]:
        first, *others = super().evaluations
        corpora = [first]
        for other, questions in zip(others, self.further, strict=True):
            sides = {**self.questions, "eval": questions}
            corpora.append(dataclasses.replace(other, questions=sides))
        return tuple(corpora)


def load_questions(data: str, *, eval_data: EvalData | None = None, limits: tuple[int, int] = (0, 0)) -> QuestionCorpus:
    """Load questions as SQuAD 2.0 has them.

    Of questions with one id the first is kept. Training questions about contexts of the evaluation are left out. The
    first answer of a training question is learned. If its text does not stand at its ``answer_start``, it is taken
    where it stands nearest to that. If it stands nowhere, the question is left out. `notes` counts all of these.

    Args:
        data: ``"hub:NAME[:CONFIG]"``, a file, a folder with ``train*`` (and ``dev*`` or ``validation*`` to score on),
            or several of these with plus signs between them. A .parquet or .jsonl file has the columns id, context,
            question and answers. A .json or .json.gz file has the published form, ``{"data": [{"paragraphs": ...}]}``.
        eval_data: sets to score on, see `asyncsgd.data.evaluation_sets.named_places`, each named as `data` is; None
            takes what folders and Hub data sets in `data` have for it.
        limits: at most so many questions to train on, and of each set to score on, taken evenly over their order; 0 for
            all.

    Raises:
        UsageError: the source or a column is missing or damaged, a question or a context is empty, answers do not have
            the published form, or no question is left.
    """
    notes: list[str] = []
    sources, scored = question_sources(data, eval_data)
    name = "+".join(source.name for source in sources)
    if eval_data is None:
        may_have_others = [source for source in sources if source.path is None or source.path.is_dir()]
        scored = {ALONE: may_have_others}
    evaluations = []
    contexts: set[str] = set()
    for set_sources in scored.values():
        questions = _questions(set_sources, "validation", notes)
        if not questions:
            where = "+".join(source.name for source in set_sources) or name
            raise UsageError(f"{where} has no questions to score on; name a file that has some with --eval-data")
        contexts |= {question.context for question in questions}
        evaluations.append(_some(questions, limits[1]))
    read = _questions(sources, "train", notes)
    all_sources = itertools.chain(sources, *scored.values())
    notes[:0] = dict.fromkeys(note for source in all_sources for note in source.notes)
    train = [question for question in read if question.context not in contexts]
    if len(train) < len(read):
        notes.append(f"{len(read) - len(train)} training questions about contexts of the evaluation are left out")
    train = _placed(_some(train, limits[0]), notes)
    if not train:
        raise UsageError(f"{name} has no question to learn from; name other files with --data")
    texts: dict[str, None] = {}
    for question in train:
        texts[question.context] = None
        texts[question.question] = None
    no_documents = Documents(())
    evaluation, *further = evaluations
    first_name, *further_names = scored
    sets = []
    for set_name, questions in zip(further_names, further, strict=True):
        sets.append(EvaluationSet(set_name, no_documents, fingerprint=_fingerprint((), questions)))
    return QuestionCorpus(
        name,
        train=Documents(tuple(texts)),
        eval=no_documents,
        fingerprint=_fingerprint(train, evaluation),
        split=first_name,
        labels=(),
        notes=tuple(notes),
        sets=tuple(sets),
        questions={"train": train, "eval": evaluation},
        further=tuple(further),
    )


def _some(questions: Sequence[Question], limit: int) -> list[Question]:
    """At most `limit` of the questions, taken evenly over their order; 0: all."""
    return [questions[number] for number in evenly(len(questions), limit)]


def question_sources(data: str, eval_data: EvalData | None) -> tuple[list[Source], dict[str, list[Source]]]:
    """The sources that `load_questions` reads to train, and those to score on by the name of the set, before any of
    them is read.
    """
    train = [Source(part, kinds=KINDS, sides=SIDES, needs="train") for part in joined_parts(data)]
    scored = {}
    for name, place in named_places(eval_data).items():
        parts = joined_parts(place)
        scored[name] = [Source(part, "--eval-data", kinds=KINDS, sides=SIDES, needs="validation") for part in parts]
    return train, scored


def _questions(sources: Sequence[Source], side: str, notes: list[str]) -> list[Question]:
    """The questions of one side of some sources; of those with one id the first."""
    rows: Rows = []
    for source in sources:
        is_file = source.path is not None and source.path.is_file()
        # A file has one side, whatever it is read for.
        source_side = "train" if is_file else side
        if source_side in source.sides:
            rows += source.rows(source_side, _COLUMNS, _read)
    contexts: dict[str, str] = {}  # equal ones are one object
    questions: dict[str, Question] = {}
    for where, row in rows:
        question = _question(where, row, contexts)
        questions.setdefault(question.id, question)
    if len(questions) < len(rows):
        kind = "training" if side == "train" else "evaluation"
        notes.append(f"{len(rows) - len(questions)} {kind} questions whose id was there before are left out")
    return list(questions.values())


def _read(path: Path, columns: Mapping[str, str]) -> Rows:
    """The rows of a file: of a table, or of JSON in SQuAD's form."""
    if not path.name.lower().endswith((".json", ".json.gz")):
        return read_table(path, columns)
    rows: Rows = []
    try:
        content = json.loads(unpacked(path))
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    identity = asked["id"]
                    answers = {
                        "text": [answer["text"] for answer in asked["answers"]],
                        "answer_start": [answer["answer_start"] for answer in asked["answers"]],
                    }
                    row = identity, paragraph["context"], asked["question"], answers
                    rows.append((f"{path}, question {identity}:", row))
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is damaged or not in SQuAD's form ({type(error).__name__}: {error})") from error
    return rows


def _question(where: str, row: Sequence[Any], contexts: dict[str, str]) -> Question:
    """The question of a row, whose context is one object with an equal one in `contexts`."""
    try:
        identity, context, question = map(without_surrogates, row[:3])
        answers = tuple(without_surrogates(text) for text in row[3]["text"])
        starts = [int(start) for _, start in zip(answers, row[3]["answer_start"], strict=True)]
        if not all(text.strip() for text in (identity, context, question, *answers)):
            raise ValueError("one of its texts is empty")
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{where} a question has three texts and answers like "
            f'{{"text": ["one"], "answer_start": [12]}}; mend the row or leave it out ({error})'
        ) from error
    context = contexts.setdefault(context, context)
    first_start = starts[0] if starts else None
    return Question(identity, question.strip(), context, answers, first_start)


def _placed(questions: Sequence[Question], notes: list[str]) -> list[Question]:
    """The questions with their first answer where it stands; without those whose answer stands nowhere."""
    placed = []
    num_moved = 0
    for question in questions:
        start = question.start
        if start is not None:
            ahead = f"(?={re.escape(question.answers[0])})"  # so that places may overlap
            places = [match.start() for match in re.finditer(ahead, question.context)]
            if not places:
                continue
            distances = np.abs(np.array(places) - start)
            start = places[int(distances.argmin())]
            if start != question.start:
                num_moved += 1
        placed.append(dataclasses.replace(question, start=start))
    if num_moved:
        notes.append(f"{num_moved} training answers do not stand at their answer_start; the nearest place is taken")
    num_left_out = len(questions) - len(placed)
    if num_left_out:
        notes.append(f"{num_left_out} training questions whose answer stands nowhere in the context are left out")
    return placed


def _fingerprint(*sides: Sequence[Question]) -> str:
    digest = hashlib.sha256()
    for questions in sides:
        digest.update(f"side {len(questions)}\n".encode())
        for question in questions:
            values = json.dumps(dataclasses.astuple(question))
            digest.update(values.encode())
    return digest.hexdigest()[:16]
