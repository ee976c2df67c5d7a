"""Answers of a question answerer and their scores, as SQuAD 2.0 defines them. numpy and the standard library only.

Written from the published definitions, not from the official script. An answer and the annotators' answers are compared
in lower case, without punctuation, without the articles a, an and the, and with single spaces.

    exact match = 1 if they are equal, else 0
    F1          = 2 c / (p + t),    p and t words of the two, c of them in common; 1 if both have none

Each is the largest over the annotators' answers. A question without an answer has the empty text as its only one.

A question q also has a difference d_q = (score of no answer) - (score of the best answer). The answer is given where
d_q <= threshold; the others are said to have none. So a threshold has a score, and a sweep over all d_q finds the best.

References:
    Rajpurkar, Zhang, Lopyrev, Liang: SQuAD: 100,000+ Questions for Machine Comprehension of Text. EMNLP 2016.
    Rajpurkar, Jia, Liang: Know What You Don't Know: Unanswerable Questions for SQuAD. ACL 2018.
    Devlin, Chang, Lee, Toutanova: BERT. NAACL 2019, section 4.3. (spans and the score of no answer)

Shapes: Q questions; n pieces of a window's part of the context.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalized(text: str) -> str:
    """An answer as it is compared: in lower case, without punctuation and articles, with single spaces.

    >>> normalized("  The U.S. -- an   answer")
    'us answer'
    """
    without_punctuation = text.lower().translate(_PUNCTUATION)
    without_articles = _ARTICLES.sub(" ", without_punctuation)
    return " ".join(without_articles.split())


def exact_match(text: str, answers: Sequence[str]) -> int:
    """1 if `text` is one of the annotators' `answers`, else 0; without any it has to be empty.

    >>> exact_match("the Cat!", ["dog", "cat"]), exact_match("cat", []), exact_match("", [])
    (1, 0, 1)
    """
    return int(normalized(text) in _normalized_answers(answers))


def f1(text: str, answers: Sequence[str]) -> float:
    """The words that `text` shares with one of `answers`, the most over them all; see the module.

    >>> f1("a big black cat", ["the black cat", "dog"]), f1("cat", []), f1("", [])
    (0.8, 0.0, 1.0)
    """
    words = normalized(text).split()
    return max(_f1(words, answer.split()) for answer in _normalized_answers(answers))


def _normalized_answers(answers: Sequence[str]) -> Sequence[str]:
    """The answers as they are compared, of which something is left; the empty text where there are none."""
    return [*filter(None, map(normalized, answers))] or [""]


def _f1(words: Sequence[str], others: Sequence[str]) -> float:
    """The F1 of two texts in words; see the module."""
    if not words or not others:
        return float(words == others)
    num_common = (Counter(words) & Counter(others)).total()
    return 2 * num_common / (len(words) + len(others))


def best_spans(windows: Sequence[tuple[int, np.ndarray]], *, number: int, longest: int) -> list[tuple[float, int, int]]:
    """The spans with the largest scores over all windows of a context, at most `number`, best first; each once.

        score(i, j) = start_i + end_j,    i <= j < i + longest

    All spans of a window are compared, not only those of its best starts and ends. A span in several windows has its
    largest score. Of equal ones the first window's goes first, then the first in the context.

    Args:
        windows: of each window its first piece, and floats `(2, n)`: the logits of start and end at its pieces.

    Returns:
        (score, first piece, last piece) of each span, counted from the beginning of the context.

    >>> start, end = [0.0, 3.0, 0.0], [0.0, 0.0, 2.0]
    >>> best_spans([(4, np.array([start, end]))], number=2, longest=2)
    [(5.0, 5, 6), (3.0, 5, 5)]
    """
    scores = []
    firsts = []
    distances = []
    for begin, (start, end) in windows:
        if not len(start):
            continue
        padding = np.full(longest - 1, -np.inf, dtype=end.dtype)
        padded_end = np.concatenate([end, padding])
        # Row i has the logits of the end at the pieces i, i + 1, ...
        ends = np.lib.stride_tricks.sliding_window_view(padded_end, longest)
        window_scores = start[:, None] + ends
        first, distance = np.nonzero(window_scores > -np.inf)
        scores.append(window_scores[first, distance])
        firsts.append(begin + first)
        distances.append(distance)
    if not sum(map(len, scores)):
        return []
    score = np.concatenate(scores)
    first = np.concatenate(firsts)
    last = first + np.concatenate(distances)
    # A span is at most once in each window, so the best `number * len(windows)` are at least `number` different ones.
    count = min(number * len(windows), len(score))
    least = np.partition(score, -count)[-count]
    best = np.flatnonzero(score >= least)
    best_first = np.argsort(-score[best], kind="stable")
    spans: dict[tuple[int, int], float] = {}
    for index in best[best_first]:
        span = int(first[index]), int(last[index])
        spans.setdefault(span, float(score[index]))
    ordered = [(score, *span) for span, score in spans.items()]
    return ordered[:number]


def at_threshold(differences: np.ndarray, answered: np.ndarray, abstained: np.ndarray, threshold: float) -> np.ndarray:
    """The score of each question, `(Q,)`: `answered` where its difference is at most `threshold`, else `abstained`."""
    return np.where(differences <= threshold, answered, abstained)


def best_threshold(differences: np.ndarray, answered: np.ndarray, abstained: np.ndarray) -> tuple[float, float]:
    """The largest mean score of all thresholds, and the smallest threshold that has it.

    The differences are tried, and one number below them all, with which no answer is given.

    >>> differences = np.array([-3.0, -2.0, 4.0, 9.0])
    >>> best_threshold(differences, np.array([1.0, 0.0, 1.0, 0.0]), np.array([0.0, 1.0, 0.0, 1.0]))
    (0.75, -3.0)
    """
    order = np.argsort(differences, kind="stable")
    ordered = differences[order]
    gains = np.cumsum((answered - abstained)[order])
    # Questions with one difference are answered together, so only the last of them has a threshold.
    is_last = np.append(ordered[1:] != ordered[:-1], True)
    below_all = math.nextafter(ordered[0], -math.inf)
    gains = np.append(0.0, gains[is_last])
    thresholds = np.append(below_all, ordered[is_last])
    threshold = float(thresholds[np.argmax(gains)])
    scores = at_threshold(differences, answered, abstained, threshold)
    return float(scores.mean()), threshold
