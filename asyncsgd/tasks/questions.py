"""Questions about texts, as SQuAD 2.0 has them: read from files or from the Hub, checked, and parted for evaluation.

The answer to a question is a span of its text, the context, or the context does not hold it.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncsgd.data.corpora import Corpus, evenly
from asyncsgd.data.documents import Documents, without_surrogates
from asyncsgd.data.tables import Rows, existing_path, files_of, hub_name, hub_rows, hub_splits, joined_parts, read_table
from asyncsgd.errors import UsageError

KINDS = (".parquet", ".jsonl", ".json", ".json.gz")
_COLUMNS = dict.fromkeys(("id", "context", "question", "answers"), "--data")
_BEGINNINGS = {"train": ("train",), "validation": ("dev", "validation")}


@dataclass(frozen=True)
class Question:
    """A question about a context.

    Args:
        answers: as the annotators wrote them; none where the context does not hold the answer.
        start: the character of the context at which the first one is said to begin; None where there is none.
    """

    id: str
    question: str
    context: str
    answers: tuple[str, ...]
    start: int | None


@dataclass(frozen=True)
class QuestionCorpus(Corpus):
    """Questions to train on and questions to score on, about different contexts; its training texts are all contexts
    and questions that are learned.
    """

    questions: Mapping[str, Sequence[Question]] = dataclasses.field(default_factory=dict)
    """Of ``train`` and ``eval``."""


def load_questions(data: str, *, eval_data: str | None = None, limits: tuple[int, int] = (0, 0)) -> QuestionCorpus:
    """Load questions as SQuAD 2.0 has them.

    Of questions with one id the first is kept. Training questions about contexts of the evaluation are left out. The
    first answer of a training question is learned. If its text does not stand at its ``answer_start``, it is taken
    where it stands nearest to that. If it stands nowhere, the question is left out. `notes` counts all of these.

    Args:
        data: ``"hub:NAME[:CONFIG]"``, a file, a folder with ``train*`` (and ``dev*`` or ``validation*`` to score on),
            or several of these with plus signs between them. A .parquet or .jsonl file has the columns id, context,
            question and answers. A .json or .json.gz file has the published form, ``{"data": [{"paragraphs": ...}]}``.
        eval_data: the same, to score on; None takes what folders and Hub data sets in `data` have for it.
        limits: at most so many questions of each side, taken evenly over their order; 0 for all.

    Raises:
        UsageError: the source or a column is missing or damaged, a question or a context is empty, answers do not have
            the published form, or no question is left.
    """
    check_questions(data, eval_data)
    notes: list[str] = []
    parts = joined_parts(data)
    name = "+".join(part if part.startswith("hub:") else existing_path(part, "--data").name for part in parts)
    if eval_data is None:
        with_sides = [part for part in parts if part.startswith("hub:") or Path(part).expanduser().is_dir()]
        evaluation = _questions(with_sides, "validation", "--data", notes)
    else:
        evaluation = _questions(joined_parts(eval_data), "validation", "--eval-data", notes)
    if not evaluation:
        raise UsageError(f"{name} has no questions to score on; name a file of them with --eval-data")
    read = _questions(parts, "train", "--data", notes)
    scored = {question.context for question in evaluation}
    train = [question for question in read if question.context not in scored]
    if len(train) < len(read):
        notes.append(f"{len(read) - len(train)} training questions about contexts of the evaluation are left out")
    train = _placed([train[number] for number in evenly(len(train), limits[0])], notes)
    evaluation = [evaluation[number] for number in evenly(len(evaluation), limits[1])]
    if not train:
        raise UsageError(f"{name} has no question to learn from; name other files with --data")
    texts = dict.fromkeys(text for question in train for text in (question.context, question.question))
    learned, nothing, sides = Documents(tuple(texts), None), Documents((), None), {"train": train, "eval": evaluation}
    fingerprint = _fingerprint(train, evaluation)
    return QuestionCorpus(name, learned, nothing, fingerprint, notes=tuple(notes), questions=sides)


def check_questions(data: str, eval_data: str | None) -> None:
    """Look at what `load_questions` would read, and read nothing.

    Raises:
        UsageError: if a file or folder is missing or of an unknown kind, or a Hub data set has no name.
    """
    named = [(part, "train", "--data") for part in joined_parts(data)]
    if eval_data is not None:
        named += [(part, "validation", "--eval-data") for part in joined_parts(eval_data)]
    for part, side, flag in named:
        if part.startswith("hub:"):
            hub_name(part)
        elif not _files(part, flag)[side]:
            wanted = " or ".join(f"{beginning}*" for beginning in _BEGINNINGS[side])
            raise UsageError(f"the folder {part} has no file {wanted} ({', '.join(KINDS)}); name a file with {flag}")


def _files(name: str, flag: str) -> dict[str, list[Path]]:
    """The files of both sides; a file that is named may be either."""
    path = existing_path(name, flag, pydocs=False, kinds=KINDS)
    files = files_of(path, KINDS)
    if not path.is_dir():
        return dict.fromkeys(_BEGINNINGS, files)
    return {side: [file for file in files if file.name.lower().startswith(of)] for side, of in _BEGINNINGS.items()}


def _questions(parts: Sequence[str], side: str, flag: str, notes: list[str]) -> list[Question]:
    """The questions of one side of some sources; of those with one id the first."""
    rows: Rows = []
    for part in parts:
        if part.startswith("hub:"):
            splits = hub_splits(part)
            if side in splits:
                rows += hub_rows(part, splits[side], _COLUMNS)
        else:
            for path in _files(part, flag)[side]:
                rows += _nested_rows(path) if path.name.lower().endswith(KINDS[2:]) else read_table(path, _COLUMNS)
    contexts: dict[str, str] = {}  # equal ones are one object
    questions: dict[str, Question] = {}
    for where, row in rows:
        question = _question(where, row, contexts)
        questions.setdefault(question.id, question)
    if len(questions) < len(rows):
        kind = "training" if side == "train" else "evaluation"
        notes.append(f"{len(rows) - len(questions)} {kind} questions whose id was there before are left out")
    return list(questions.values())


def _nested_rows(path: Path) -> Rows:
    """The rows of a file in the published form."""
    try:
        raw = path.read_bytes()
        content = json.loads(gzip.decompress(raw) if path.name.lower().endswith(".gz") else raw)
        return [
            (f"{path}, question {asked['id']}:", (asked["id"], paragraph["context"], asked["question"], answers))
            for article in content["data"]
            for paragraph in article["paragraphs"]
            for asked in paragraph["qas"]
            for answers in [{key: [answer[key] for answer in asked["answers"]] for key in ("text", "answer_start")}]
        ]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{path} is damaged or not in SQuAD's form ({type(error).__name__}: {error}); it must look like "
            f'{{"data": [{{"paragraphs": [{{"context": "...", "qas": [{{"id": "...", "question": "...", '
            f'"answers": [{{"text": "...", "answer_start": 0}}]}}]}}]}}]}}'
        ) from error


def _question(where: str, row: Sequence[Any], contexts: dict[str, str]) -> Question:
    for column, value in zip(_COLUMNS, row[:3], strict=False):
        if not isinstance(value, str) or not value.strip():
            raise UsageError(f"{where} the {column} is empty or no text; fill it in or leave the row out")
    identity, context, question = map(without_surrogates, row[:3])
    given = row[3] if isinstance(row[3], Mapping) else {}
    texts, starts = given.get("text"), given.get("answer_start")
    if not (
        isinstance(texts, list)
        and isinstance(starts, list)
        and len(texts) == len(starts)
        and all(isinstance(text, str) and text.strip() for text in texts)
        and all(type(start) is int for start in starts)
    ):
        raise UsageError(
            f"{where} answers must be lists of as many texts and whole numbers, like "
            f'{{"text": ["one"], "answer_start": [12]}}; mend the row or leave it out'
        )
    answers = tuple(map(without_surrogates, texts))
    return Question(
        identity, question.strip(), contexts.setdefault(context, context), answers, starts[0] if starts else None
    )


def _placed(questions: Sequence[Question], notes: list[str]) -> list[Question]:
    """The questions with their first answer where it stands; without those whose answer stands nowhere."""
    answered = [question if question.start is None else _moved(question) for question in questions]
    placed = [question for question in answered if question is not None]
    if num_moved := sum(new is not None and new != old for new, old in zip(answered, questions, strict=True)):
        notes.append(f"{num_moved} training answers do not stand at their answer_start; the nearest place is taken")
    if left_out := len(questions) - len(placed):
        notes.append(f"{left_out} training questions whose answer stands nowhere in the context are left out")
    return placed


def _moved(question: Question) -> Question | None:
    said, answer = question.start or 0, question.answers[0]
    if said >= 0 and question.context.startswith(answer, said):
        return question
    starts = [match.start() for match in re.finditer(f"(?={re.escape(answer)})", question.context)]
    nearest = min(starts, key=lambda start: abs(start - said), default=None)
    return None if nearest is None else dataclasses.replace(question, start=nearest)


def _fingerprint(*sides: Sequence[Question]) -> str:
    digest = hashlib.sha256()
    for questions in sides:
        digest.update(f"side {len(questions)}\n".encode())
        for question in questions:
            digest.update(json.dumps(dataclasses.astuple(question)).encode())
    return digest.hexdigest()[:16]
