"""Questions in overlapping windows of their contexts, and their batches: pure functions of (seed, stream, index).

A context may be longer than what a model reads. So a model reads windows of it, each behind the question:

    prefix  question  between  window  suffix           [CLS] question [SEP] window [SEP] with BERT

A window that does not hold the whole answer has the first token as its target, which stands for no answer. So has every
window of a question without an answer.

Shapes: B windows of a batch, L tokens of the longest one (special tokens included), W windows, Q questions and C
contexts of a set, T word pieces of all its contexts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from asyncsgd.data.batching import Orders
from asyncsgd.data.questions import Question, QuestionData
from asyncsgd.data.tokenization import Tokens, cache_key, plain_backend, publish
from asyncsgd.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WINDOWS_FORMAT = 1
"""Changes when the same questions get other arrays: old caches are then left alone and new ones are made."""

_TEXTS_PER_CHUNK = 2048
_WINDOW = np.dtype([(name, np.int32) for name in ("question", "context", "first", "end", "start", "last")])


@dataclass(frozen=True)
class PairFrame:
    """What a tokenizer puts around a question and a window."""

    prefix: Sequence[int]
    between: Sequence[int]
    suffix: Sequence[int]
    pad_id: int

    @property
    def num_special(self) -> int:
        """Special tokens of a row."""
        return len(self.prefix) + len(self.between) + len(self.suffix)


def pair_frame_of(tokenizer: PreTrainedTokenizerBase) -> PairFrame:
    """What `tokenizer`, which has a mask token, puts around two texts.

    Raises:
        UsageError: if it puts nothing in front, so that no token can stand for no answer.
    """
    mask: Any = tokenizer.mask_token
    ids = tokenizer(mask, mask)["input_ids"]
    first, second = (index for index, id_ in enumerate(ids) if id_ == tokenizer.mask_token_id)
    if not first:
        raise UsageError(
            f"the tokenizer of {tokenizer.name_or_path} puts no token in front of a text, and that token stands for no "
            f"answer; choose another model"
        )
    pad: Any = tokenizer.pad_token_id
    return PairFrame(tuple(ids[:first]), tuple(ids[first + 1 : second]), tuple(ids[second + 1 :]), int(pad))


@dataclass(frozen=True, eq=False)
class Windows:
    """The windows of a set of questions. Contexts and questions are kept once, and windows point into them.

    Args:
        contexts, questions: their pieces; C and Q samples.
        offsets: int32 `(T, 2)`, the characters of its context at which each piece begins and has ended.
        table: `(W,)`, int32 by name: ``question`` and ``context`` are numbers of samples; the window has the pieces
            ``first`` to ``end``, without ``end``, of the context; the answer has ``start`` to ``last``, with ``last``,
            or both are -1 where the window does not hold it. The windows of a question follow one another.
    """

    contexts: Tokens
    questions: Tokens
    offsets: np.ndarray
    table: np.ndarray

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """int64, new: the pieces of the window and the question of each of some rows of `table`."""
        starts, number = self.questions.starts, rows["question"]
        return starts[number + 1] - starts[number] + rows["end"] - rows["first"]

    def save(self, folder: Path) -> None:
        """Write the arrays into `folder`, which is made."""
        self.contexts.save(folder / "contexts")
        self.questions.save(folder / "questions")
        np.save(folder / "offsets.npy", self.offsets)
        np.save(folder / "windows.npy", self.table)

    @classmethod
    def load(cls, folder: Path) -> Windows:
        """Map what `save` wrote into memory.

        Raises:
            OSError: a file is missing or empty.
            ValueError: a file is cut short or the arrays do not fit together.
        """
        contexts, questions = (Tokens.load(folder / name) for name in ("contexts", "questions"))
        offsets, table = (np.load(folder / name, mmap_mode="r") for name in ("offsets.npy", "windows.npy"))
        if len(offsets) != len(contexts.ids) or not len(table) or table["question"][-1] + 1 != questions.num_samples:
            raise ValueError("the arrays of windows do not fit together")
        return cls(contexts, questions, offsets, table)


def make_windows(
    questions: Sequence[Question], tokenizer: PreTrainedTokenizerBase, *, seq_len: int, stride: int
) -> Windows:
    """Tokenize questions and contexts, and cut the contexts into windows.

    The window k of a question begins at piece ``k * stride`` of its context. It takes what `seq_len` leaves beside the
    question and the special tokens. The last window is the first that reaches the end.

    Args:
        tokenizer: a fast tokenizer; neither used up nor changed.
        seq_len: the length of a padded row, special tokens included.

    Raises:
        UsageError: if a question leaves no room for its context, or `stride` would skip pieces or leave no overlap.
    """
    frame = pair_frame_of(tokenizer)
    texts = list(dict.fromkeys(question.context for question in questions))
    contexts, offsets = _encoded(texts, tokenizer)
    asked, _ = _encoded([question.question for question in questions], tokenizer)
    number_of = {text: number for number, text in enumerate(texts)}
    rows: list[tuple[int, ...]] = []
    for number, (question, length) in enumerate(zip(questions, asked.lengths.tolist(), strict=True)):
        context = number_of[question.context]
        begin, end = contexts.starts[context], contexts.starts[context + 1]
        room, total = seq_len - frame.num_special - length, int(end - begin)
        if room < 1:
            raise UsageError(
                f"the question {question.id} has {length} word pieces, which leaves no room for its context; type "
                f"--seq-len {seq_len - room + stride + 1} or more, or leave the question out"
            )
        if total > room and stride >= room:
            raise UsageError(
                f"--stride {stride} is not smaller than the window: beside the question {question.id} of {length} word "
                f"pieces --seq-len {seq_len} has room for {room}; type a --stride below {room}, or a longer --seq-len"
            )
        start, last = -1, -1
        if question.start is not None and question.answers:
            start, last = _pieces_of(offsets[begin:end], question.start, question.start + len(question.answers[0]))
        for first in range(0, max(total - room, 0) + stride, stride):
            until = min(first + room, total)
            inside = first <= start <= last < until
            rows.append((number, context, first, until, *((start, last) if inside else (-1, -1))))
    return Windows(contexts, asked, offsets, np.array(rows, dtype=_WINDOW))


def _encoded(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> tuple[Tokens, np.ndarray]:
    """The pieces of some texts without special tokens, and their offsets, int32 `(T, 2)`."""
    backend = plain_backend(tokenizer)
    ids, lengths, offsets = [np.empty(0, np.int32)], [0], [np.empty((0, 2), np.int32)]
    for begin in range(0, len(texts), _TEXTS_PER_CHUNK):
        for encoding in backend.encode_batch(list(texts[begin : begin + _TEXTS_PER_CHUNK]), add_special_tokens=False):
            ids.append(np.array(encoding.ids, dtype=np.int32))
            lengths.append(len(encoding.ids))
            offsets.append(np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2))
    joined = np.concatenate(ids)
    tokens = Tokens(joined, np.cumsum(lengths, dtype=np.int64), np.ones(len(joined), dtype=bool))
    return tokens, np.concatenate(offsets)


def _pieces_of(offsets: np.ndarray, start: int, stop: int) -> tuple[int, int]:
    """The first and the last piece that hold one of the characters `start` to `stop`; -1 for both if none does."""
    inside = np.flatnonzero((offsets[:, 1] > start) & (offsets[:, 0] < stop) & (offsets[:, 1] > offsets[:, 0]))
    return (int(inside[0]), int(inside[-1])) if len(inside) else (-1, -1)


def questions_folder(
    data: QuestionData, tokenizer: PreTrainedTokenizerBase, *, seq_len: int, stride: int, cache_dir: Path
) -> Path:
    """Tokenize once and return the folder with ``train`` and ``eval``, which `Windows.load` reads, ``tokenizer``, and
    ``texts.json`` with the frame and the texts that are scored.

    Its name is decided by the questions, the tokenizer, `seq_len` and `stride`.

    Raises:
        UsageError: as `make_windows` does, or if the cache cannot be written.
    """
    key = cache_key(WINDOWS_FORMAT, data.fingerprint, tokenizer.backend_tokenizer.to_str(), seq_len, stride)
    folder = cache_dir / f"questions-{key}"

    def tokenize_and_save(temporary: Path) -> None:
        for side, questions in (("train", data.train), ("eval", data.eval)):
            make_windows(questions, tokenizer, seq_len=seq_len, stride=stride).save(temporary / side)
        texts = {
            "frame": dataclasses.asdict(pair_frame_of(tokenizer)),
            "contexts": list(dict.fromkeys(question.context for question in data.eval)),
            "questions": [(question.id, question.answers) for question in data.eval],
        }
        (temporary / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
        tokenizer.save_pretrained(temporary / "tokenizer")

    publish(folder, tokenize_and_save)
    return folder


@dataclass(frozen=True)
class Asked:
    """A question of a batch that is scored: its texts, and which rows are its windows."""

    number: int
    """In the set, in [0, Q)."""
    id: str
    context: str
    answers: tuple[str, ...]
    offsets: np.ndarray
    """Those of the context's pieces; see `Windows`."""
    windows: tuple[tuple[int, int, int, int], ...]
    """Of each window its row, where its first piece is in the row, and its pieces, from ``first`` to ``end``."""

    def text(self, first: int, last: int) -> str:
        """The characters of some pieces of the context."""
        return self.context[self.offsets[first, 0] : self.offsets[last, 1]].strip()


@dataclass(frozen=True)
class WindowBatch:
    """One padded batch. Owned by the caller."""

    input_ids: Tensor
    """int64 `(B, L)`"""
    attention_mask: Tensor
    """int64 `(B, L)`, 1 for tokens and 0 for padding"""
    token_type_ids: Tensor
    """int64 `(B, L)`, 1 for the window and what is behind it, 0 for the rest"""
    allowed: Tensor
    """bool `(B, L)`, where an answer may begin or end: the pieces of the window, and the first token for no answer"""
    targets: Tensor
    """int64 `(B, 2)`, where the answer's first and last piece are in the row; 0 and 0 for no answer"""
    asked: tuple[Asked, ...] = ()
    """The questions, in an evaluation; all windows of each are in the batch."""


class WindowedQuestions:
    """The batches of a set for training, and of another for evaluation, in one process.

    Args:
        folder: that of `questions_folder`.
        batch_size: B of training.
        seed, by_length: of the order in training; the evaluation has none.
    """

    def __init__(self, folder: Path, batch_size: int, seed: int, by_length: bool) -> None:
        texts = json.loads((folder / "texts.json").read_text(encoding="utf-8"))
        self._train, self._frame = Windows.load(folder / "train"), PairFrame(**texts["frame"])
        self._orders = Orders(self._train.lengths(self._train.table), batch_size, seed, by_length)
        self.evaluation = {"main": QuestionEvaluation(Windows.load(folder / "eval"), texts, self._frame)}

    def batch(self, stream: int, index: int) -> WindowBatch:
        """Make batch `index` of a stream."""
        return _assemble(self._train, self._orders.samples(stream, index), self._frame)


class QuestionEvaluation:
    """Every question of a set once, those with short windows first. All windows of a question are in one batch.

    Args:
        texts: has ``contexts``, and ``questions`` with the id and the answers of each.
        batch_size: windows, as long as a single question has no more.
    """

    def __init__(self, windows: Windows, texts: Mapping[str, Any], frame: PairFrame, batch_size: int = 32) -> None:
        self._windows, self._texts, self._frame = windows, texts, frame
        self._starts = np.searchsorted(windows.table["question"], np.arange(windows.questions.num_samples + 1))
        longest = np.maximum.reduceat(windows.lengths(windows.table), self._starts[:-1])
        self._batches: list[list[int]] = []
        room = 0
        for number in np.argsort(longest, kind="stable").tolist():
            num_windows = int(self._starts[number + 1] - self._starts[number])
            if num_windows > room:
                self._batches.append([])
                room = batch_size
            self._batches[-1].append(number)
            room -= num_windows

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> WindowBatch:
        """Make batch `index` in [0, len)."""
        if not 0 <= index < len(self._batches):
            raise IndexError(f"there is no evaluation batch {index} of {len(self._batches)}")
        asked: list[Asked] = []
        rows: list[int] = []
        for number in self._batches[index]:
            of = range(self._starts[number], self._starts[number + 1])
            asked.append(self._asked(number, of, len(rows)))
            rows += of
        return dataclasses.replace(_assemble(self._windows, np.array(rows), self._frame), asked=tuple(asked))

    def _asked(self, number: int, of: range, row: int) -> Asked:
        """A question whose windows `of` have the rows from `row` on."""
        windows, table = self._windows, self._windows.table
        context = int(table["context"][of[0]])
        begin = len(self._frame.prefix) + len(windows.questions.sample(number).ids) + len(self._frame.between)
        identity, answers = self._texts["questions"][number]
        return Asked(
            number,
            identity,
            self._texts["contexts"][context],
            tuple(answers),
            windows.offsets[windows.contexts.starts[context] : windows.contexts.starts[context + 1]],
            tuple((row + k, begin, int(table["first"][w]), int(table["end"][w])) for k, w in enumerate(of)),
        )


def _assemble(windows: Windows, numbers: np.ndarray, frame: PairFrame) -> WindowBatch:
    table = windows.table[numbers]
    shape = len(numbers), frame.num_special + int(windows.lengths(table).max())
    input_ids = np.full(shape, frame.pad_id, dtype=np.int64)
    attention_mask, token_type_ids = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    allowed, targets = np.zeros(shape, dtype=bool), np.zeros((len(numbers), 2), dtype=np.int64)
    allowed[:, 0] = True
    for row, window in enumerate(table):
        question = windows.questions.sample(window["question"]).ids
        context = windows.contexts.sample(window["context"]).ids[window["first"] : window["end"]]
        ids = np.concatenate([frame.prefix, question, frame.between, context, frame.suffix])
        begin = len(ids) - len(frame.suffix) - len(context)
        input_ids[row, : len(ids)], attention_mask[row, : len(ids)] = ids, 1
        token_type_ids[row, begin : len(ids)] = 1
        allowed[row, begin : begin + len(context)] = True
        if window["start"] >= 0:
            targets[row] = begin - window["first"] + np.array([window["start"], window["last"]])
    return WindowBatch(
        torch.from_numpy(input_ids),
        torch.from_numpy(attention_mask),
        torch.from_numpy(token_type_ids),
        torch.from_numpy(allowed),
        torch.from_numpy(targets),
    )
