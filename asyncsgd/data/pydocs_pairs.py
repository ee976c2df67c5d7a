"""Pairs of docstrings of the installed Python packages: do both come from one module?

A pair of one module, (a, b), stands beside a pair of two modules of the same package. Two pairs of one module, (a, b)
and (c, d), with b and d of about equal length, also give the pairs (a, d) and (c, b). So both kinds are equally many,
and every text stands in one pair of each kind, in the same place: a single text says nothing about the label.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from asyncsgd.data.pydocs import CORPUS_FORMAT, docstrings_with_modules, package_folders, package_versions
from asyncsgd.data.tokens import cached

LABELS = ("two modules", "one module")
PAIRS_FORMAT = 1
"""Changes when other pairs are made of the same texts."""
MOST_TIMES_AS_LONG = 1.5
"""The longer one of two texts that change places, in characters."""
HELD_OUT = 0.1
"""Share of the modules whose pairs are scored on."""
TOO_EASY = 0.9
"""Accuracy of a bag of words above which the pairs say little about a model."""

Row = tuple[str, str, str]
"""The first text, the label and the second text."""


def load_pairs(cache_dir: Path) -> tuple[Mapping[str, list[Row]], float]:
    """The pairs to learn from (``train``) and to score on (``test``), from the cache where they are there, and
    `bag_of_words_accuracy`.
    """

    def make(folder: Path) -> None:
        sides = pairs_of(docstrings_with_modules(package_folders()))
        accuracy = bag_of_words_accuracy(sides["train"], sides["test"])
        content = json.dumps([sides, accuracy])
        (folder / "pairs.json").write_text(content)

    key = PAIRS_FORMAT, CORPUS_FORMAT, platform.python_version(), package_versions()
    path = cached(cache_dir, "pydocs-pairs", key, make) / "pairs.json"
    sides, accuracy = json.loads(path.read_text())
    pairs = {}
    for side, rows in sides.items():
        pairs[side] = [(first, label, second) for first, label, second in rows]
    return pairs, accuracy


def pairs_of(docstrings: Sequence[tuple[str, str, str]]) -> dict[str, list[Row]]:
    """The pairs of some texts, each with its package and its module; no module is on both sides.

    >>> texts = [(f"{word} {number}", "p", word) for word in ("bb", "cc") for number in (1, 2)]
    >>> rows = [row for side in pairs_of(texts).values() for row in side]
    >>> len(rows), rows[0], rows[1]
    (4, ('bb 1', 'one module', 'bb 2'), ('bb 1', 'two modules', 'cc 2'))
    """
    modules: dict[tuple[str, str], list[str]] = {}
    for text, package, module in docstrings:
        modules.setdefault((package, module), []).append(text)
    groups: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
    for (package, module), texts in modules.items():
        side = _side_of(package, module)
        group = groups.setdefault((side, package), [])
        for first, second in zip(texts[::2], texts[1::2], strict=False):
            group.append((module, first, second))
    sides: dict[str, list[Row]] = {"train": [], "test": []}
    for (side, _), group in groups.items():
        sides[side] += _exchanged(group)
    return sides


def _side_of(package: str, module: str) -> str:
    """The side of a module's pairs, ``train`` or ``test``: a function of the module's name alone."""
    digest = hashlib.sha256(f"{package}/{module}".encode()).digest()
    fraction = int.from_bytes(digest[:8], "big") / 2**64
    return "test" if fraction < HELD_OUT else "train"


def _exchanged(pairs: Sequence[tuple[str, str, str]]) -> list[Row]:
    """Pairs of one module, (module, first, second), with those that two of them make by changing their second texts.

    A pair without a partner of another module and about its length is left out.
    """
    rows: list[Row] = []
    waiting: list[tuple[str, str, str]] = []
    two_modules, one_module = LABELS
    for pair in sorted(pairs, key=lambda each: len(each[2])):
        module, first, second = pair
        waiting = [each for each in waiting if len(second) <= MOST_TIMES_AS_LONG * len(each[2])]
        partner = next((each for each in waiting if each[0] != module), None)
        if partner is None:
            waiting.append(pair)
            continue
        waiting.remove(partner)
        _, other_first, other_second = partner
        rows.append((other_first, one_module, other_second))
        rows.append((other_first, two_modules, second))
        rows.append((first, one_module, second))
        rows.append((first, two_modules, other_second))
    return rows


def bag_of_words_accuracy(train: Sequence[Row], scored: Sequence[Row]) -> float:
    """How often the number of shared words tells the label: the baseline that a model has to beat.

    The similarity of a pair is the cosine of its two counts of words. A pair is said to be of one module where that is
    above a threshold, the one that is right most often on `train`; the share that is right is of `scored`.

    >>> rows = [("a b", "one module", "b a"), ("a b", "two modules", "c d")]
    >>> bag_of_words_accuracy(rows, rows)
    1.0
    """
    similarities = np.array([_cosine(first, second) for first, _, second in train])
    same = np.array([label == LABELS[1] for _, label, _ in train])
    order = np.argsort(-similarities, kind="stable")
    ordered = similarities[order]
    # If the k most similar pairs are said to be of one module, each of them that is adds a right one, and each that is
    # not takes one away.
    gained = np.cumsum(np.where(same[order], 1, -1))
    is_last = np.append(np.diff(ordered) != 0, True)  # of the pairs with one similarity
    best = int(np.argmax(np.where(is_last, gained, -len(gained))))
    threshold = ordered[best]
    right = []
    for first, label, second in scored:
        predicted_same = _cosine(first, second) >= threshold
        right.append(predicted_same == (label == LABELS[1]))
    return float(np.mean(right))


def in_words(accuracy: float) -> str:
    """What the user is told of `bag_of_words_accuracy`."""
    easy = ", so these pairs are too easy to tell models apart" if accuracy > TOO_EASY else ""
    return f"a bag of words, told by the words that a pair shares, has the accuracy {accuracy:.3f}{easy}"


def _cosine(first: str, second: str) -> float:
    """The cosine of the word counts of two texts; 0 where one has no words."""
    counts = _words(first)
    others = _words(second)
    product = sum(number * others[word] for word, number in counts.items())
    norm = math.sqrt(sum(number**2 for number in counts.values()))
    other_norm = math.sqrt(sum(number**2 for number in others.values()))
    if not norm or not other_norm:
        return 0.0
    return product / (norm * other_norm)


def _words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.lower()))
