"""Words that are key to a corpus: much commoner there than in a reference corpus.

A word that stands a times among the corpus's c words and b times among the reference's d words has

    G2 = 2 (a ln(a / E1) + b ln(b / E2)),    E1 = c (a + b) / (c + d),    E2 = d (a + b) / (c + d),

with 0 ln 0 = 0. If both had the word equally often and occurrences were independent, G2 would follow a chi-square
distribution with one degree of freedom, which exceeds the default `threshold`, 15.13, with probability 0.0001. Words
come in bursts, so the threshold ranks words and tests nothing. In a large corpus the smallest difference exceeds it. So
a key word must also be `ratio` times as frequent as in the reference, and stand at least `min_count` times.

Words are compared in small letters, and a word needs a letter and two characters.

References:
    Dunning: Accurate Methods for the Statistics of Surprise and Coincidence. Computational Linguistics 19(1), 1993.
    Rayson, Berridge, Francis: Extending the Cochran rule for the comparison of word frequencies between corpora.
        JADT 2004. (the threshold)
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from asyncsgd.data.corpora import load_corpus
from asyncsgd.data.finders.base import Finder
from asyncsgd.data.finders.terms import WORD, Lexicon
from asyncsgd.errors import UsageError

_LETTER = re.compile(r"[^\W\d_]")


@dataclass(frozen=True)
class Keyness(Finder):
    """The key words of the training texts; see the module."""

    name: ClassVar[str] = "keyness"
    summary: ClassVar[str] = "words that are much commoner than in a reference corpus, by log-likelihood ratio"
    modules: ClassVar[tuple[str, ...]] = ("asyncsgd.data.finders.terms",)

    reference: str = "pydocs"
    """As ``--data`` takes it; column ``text``. The built-in one is technical English; give a general text."""
    threshold: float = 15.13
    ratio: float = 4.0
    min_count: int = 5

    def __post_init__(self) -> None:
        if not (self.threshold >= 0 and self.ratio > 0 and self.min_count >= 1):
            raise ValueError("threshold must be 0 or more, ratio more than 0 and min_count 1 or more")

    @property
    def asks_hub(self) -> bool:
        return "hub:" in self.reference

    def prepare(self, texts: Sequence[str], cache: Path) -> Lexicon:
        reference = load_corpus(self.reference, eval_data=None, text_column="text", cache_dir=cache)
        corpus, other = _count(texts), _count([*reference.train.texts, *reference.eval.texts])
        total, other_total = corpus.total(), other.total()
        if not total or not other_total:
            raise UsageError(f"--finder keyness: {'the training text' if not total else self.reference} has no words")
        words = tuple(
            sorted(
                word
                for word, count in corpus.items()
                if count >= self.min_count
                and count * other_total >= self.ratio * other[word] * total
                and log_likelihood_ratio(count, other[word], total, other_total) >= self.threshold
            )
        )
        if not words:
            raise UsageError(
                f"--finder keyness: no word of the training text is key against {self.reference}; name another "
                f"reference, or type a lower threshold, e.g. keyness:{self.reference},threshold=3.84,ratio=1.5"
            )
        return Lexicon(words)


def log_likelihood_ratio(count: int, other: int, total: int, other_total: int) -> float:
    """G2 of a word: a, b, c and d of the module.

    >>> log_likelihood_ratio(10, 20, 1000, 2000), round(log_likelihood_ratio(30, 0, 1000, 1000), 3)
    (0.0, 41.589)
    """
    expected = total * (count + other) / (total + other_total)
    other_expected = other_total * (count + other) / (total + other_total)
    return 2 * sum(
        seen * math.log(seen / wanted) for seen, wanted in ((count, expected), (other, other_expected)) if seen
    )


def _count(texts: Iterable[str]) -> Counter[str]:
    """How often each word stands in the texts."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(WORD.findall(text.lower()))
    return Counter({word: count for word, count in counts.items() if len(word) > 1 and _LETTER.search(word)})
