"""Contexts of questions in windows that a model can read, and batches of all windows of a question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncsgd.data.tokens import Samples, encodings_of, special_around
from asyncsgd.errors import UsageError
from asyncsgd.tasks.questions import Question


def whole_questions(windows: Samples, batch_size: int) -> list[np.ndarray]:
    """The rows of batches that have all windows of every question, those with short windows first.

    Args:
        batch_size: windows, as long as a single question has no more.
    """
    questions = windows.values["question"]
    num_questions = questions[-1] + 1
    starts = np.searchsorted(questions, np.arange(num_questions + 1))
    longest_window = np.maximum.reduceat(windows.lengths, starts[:-1])
    batches: list[list[int]] = []
    room = 0
    for number in np.argsort(longest_window, kind="stable"):
        rows = range(starts[number], starts[number + 1])
        if len(rows) > room:
            batches.append([])
            room = batch_size
        batches[-1] += rows
        room -= len(rows)
    return [np.array(rows) for rows in batches]


def windows_of(questions: Sequence[Question], tokenizer: Any, *, seq_len: int, stride: int) -> Samples:
    """Tokenize questions and contexts, and cut the contexts into windows; a row is a window after its question.

    The window k of a question begins at piece ``k * stride`` of its context. It takes what `seq_len` leaves beside the
    question and the special tokens. The last window is the first that reaches the end.

    Returns:
        Rows with these columns:

        - ``targets``: as batches have them
        - ``question``: the number of the question
        - ``begin``: where the window begins in the row
        - ``first``, ``end``: which pieces of the context the window has, without ``end``
        - ``offsets``, int32: the characters of the context at which each of these pieces begins and has ended

    Raises:
        UsageError: if a question leaves room for no more than `stride` pieces of a longer context, so that windows
            would not overlap, or the tokenizer puts nothing in front of a text, so that no token can stand for no
            answer.
    """
    prefix, between, suffix = special_around(tokenizer, 2)
    if not prefix:
        raise UsageError(
            f"the tokenizer of {tokenizer.name_or_path} puts no token in front of a text, and that token stands for no "
            f"answer; choose another model"
        )
    texts = list(dict.fromkeys(question.context for question in questions))
    contexts = {}
    for text, encoding in zip(texts, encodings_of(texts, tokenizer), strict=True):
        pieces = np.array(encoding.ids, dtype=np.int32)
        characters = np.array(encoding.offsets, dtype=np.int32)
        contexts[text] = (pieces, characters.reshape(-1, 2))
    rows = []
    offsets_of_rows = []
    values: dict[str, list[Any]] = {name: [] for name in ("targets", "question", "begin", "first", "end")}
    asked = encodings_of([question.question for question in questions], tokenizer)
    for number, (question, encoding) in enumerate(zip(questions, asked, strict=True)):
        ids, offsets = contexts[question.context]
        front = [*prefix, *encoding.ids, *between]
        begin = len(front)
        length = len(encoding.ids)
        total = len(ids)
        room = seq_len - begin - len(suffix)
        if total > room and stride >= room:
            raise UsageError(
                f"beside the question {question.id} of {length} word pieces --seq-len {seq_len} has room for {room} "
                f"and --stride {stride} is not less; type a longer --seq-len, a smaller --stride, or leave it out"
            )
        start = -1
        last = -1
        if question.start is not None and question.answers:
            stop = question.start + len(question.answers[0])
            start, last = _pieces_of(offsets, question.start, stop)
        last_window = max(total - room, 0)
        for first in range(0, last_window + stride, stride):
            end = min(first + room, total)
            row = [*front, *ids[first:end], *suffix]
            rows.append(np.array(row, dtype=np.int32))
            offsets_of_rows.append(offsets[first:end])
            inside = first <= start <= last < end
            shift = begin - first
            values["targets"].append((shift + start, shift + last) if inside else (0, 0))
            values["question"].append(number)
            values["begin"].append(begin)
            values["first"].append(first)
            values["end"].append(end)
    columns = {name: np.array(column, dtype=np.int64) for name, column in values.items()}
    return Samples.of(ids=rows, offsets=offsets_of_rows, **columns)


def _pieces_of(offsets: np.ndarray, start: int, stop: int) -> tuple[int, int]:
    """The first and the last piece that hold one of the characters `start` to `stop`; -1 for both if none does."""
    begins, ends = offsets.T
    inside = np.flatnonzero((ends > start) & (begins < stop) & (ends > begins))
    if len(inside) == 0:
        return -1, -1
    return int(inside[0]), int(inside[-1])
