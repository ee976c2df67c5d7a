"""Finders say which words of a text are worth masking; one a class, and a name in `ALL`.

A finder as the user names it is a `Finder`. It prepares a `Find`, which finds words in every process.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from asyncsgd.data.corpora import load_corpus
from asyncsgd.data.files import hub_is_reachable
from asyncsgd.domain_masking.tagger import Span, Tagger, first_line, hashed, load
from asyncsgd.errors import UsageError
from asyncsgd.extensions import FINDERS as GROUP
from asyncsgd.extensions import Registry
from asyncsgd.settings.choices import Choices, Named, parameter

TERMS_FORMAT = 1
_WORD = re.compile(r"\w+|[^\w\s]")
_LETTER = re.compile(r"[^\W\d_]")


class Find(Protocol):
    """Finds words in texts. It is pickled for other processes."""

    @property
    def key(self) -> str:
        """A text that changes whenever the spans of some text may change."""

    def spans(self, texts: Sequence[str], device: str) -> list[list[Span]]:
        """The spans of each text, in order and without overlap: a pure function of the texts of the call."""


@dataclass(frozen=True)
class Finder(Named):
    """Says which words are worth masking; its fields are parameters."""

    def prepare(self, texts: Sequence[str], cache: Path) -> Find:
        """Read what is slow to read, once, in one process.

        Args:
            texts: those to train on.
            cache: the folder of prepared data.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Lexicon:
    """Terms of a list, wherever they stand in a text.

    A text is read word by word; a word is a run of letters and digits, and every other sign is a word of its own. A
    term is found where its words stand one after another, with any white space between them: ``oxide`` is not found
    in ``dioxide``, but in ``oxide-based``. A text is searched from the left. Of several terms that begin at one
    word, the longest is found, and the search goes on after it.

    A term in small letters is found in any case. A term with a capital letter is found as it is written, so that ``Co``
    (cobalt) is not found in ``CO``.

    >>> Lexicon(("fuel cell", "solid oxide fuel cell", "Co")).spans(["A Solid Oxide  fuel cell with CO and Co."], "cpu")
    [[(2, 24), (37, 39)]]
    """

    terms: tuple[str, ...]

    @property
    def key(self) -> str:
        return hashed(TERMS_FORMAT, self.terms)

    def spans(self, texts: Sequence[str], device: str) -> list[list[Span]]:
        terms, longest = _words_of(self.terms)
        return [list(_terms_in(text, terms, longest)) for text in texts]


@functools.lru_cache(maxsize=4)
def _words_of(terms: tuple[str, ...]) -> tuple[set[tuple[str, ...]], dict[str, int]]:
    """Terms as words, and the number of words of the longest one that begins with a word, in small letters."""
    words = {tuple(_WORD.findall(term)) for term in terms} - {()}
    longest = {}
    for term in sorted(words, key=len):
        longest[term[0].lower()] = len(term)
    return words, longest


def _terms_in(text: str, terms: set[tuple[str, ...]], longest: Mapping[str, int]) -> Iterator[Span]:
    """The spans of the terms in a text, see `Lexicon`; `terms` and `longest` are those of `_words_of`."""
    spans = [word.span() for word in _WORD.finditer(text)]
    exact = tuple(text[start:end] for start, end in spans)
    lower = tuple(word.lower() for word in exact)
    first = 0
    while first < len(spans):
        limit = first + longest.get(lower[first], 0)
        for end in range(min(limit, len(spans)), first, -1):
            if lower[first:end] in terms or exact[first:end] in terms:
                start, _ = spans[first]
                _, stop = spans[end - 1]
                yield start, stop
                first = end - 1
                break
        first += 1


@dataclass(frozen=True)
class Terms(Finder):
    """The terms of a file, one a line; see `Lexicon`."""

    file: str

    def prepare(self, texts: Sequence[str], cache: Path) -> Lexicon:
        path = Path(self.file).expanduser()
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--finder terms: {path} cannot be read, or is not UTF-8 ({error})") from error
        terms = {line.strip() for line in lines} - {""}
        if not terms:
            raise UsageError(f"--finder terms: {path} holds no term; write one a line")
        return Lexicon(tuple(sorted(terms)))


@dataclass(frozen=True)
class Keyness(Finder):
    """Words that are much commoner than in a reference corpus, by log-likelihood ratio.

    A word that stands a times among the corpus's c words and b times among the reference's d words has

        G2 = 2 (a ln(a / E1) + b ln(b / E2)),    E1 = c (a + b) / (c + d),    E2 = d (a + b) / (c + d),

    with 0 ln 0 = 0. If both had the word equally often and occurrences were independent, G2 would follow a
    chi-square distribution with one degree of freedom, which exceeds the default `threshold`, 15.13, with
    probability 0.0001. Words come in bursts, so the threshold ranks words and tests nothing. In a large corpus the
    smallest difference exceeds it. So a key word must also be `ratio` times as frequent as in the reference, and
    stand at least `min_count` times.

    Words are compared in small letters, and a word needs a letter and two characters.

    References:
        Dunning: Accurate Methods for the Statistics of Surprise and Coincidence. Computational Linguistics 19(1), 1993.
        Rayson, Berridge, Francis: Extending the Cochran rule for the comparison of word frequencies between corpora.
            JADT 2004. (the threshold)
    """

    reference: str = "pydocs"
    """The reference corpus, as ``--data`` takes it, with a column ``text``. The built-in one is technical English; give
    a general text."""
    threshold: float = parameter(15.13, at_least=0)
    ratio: float = parameter(4.0, above=0)
    min_count: int = parameter(5, at_least=1)

    def prepare(self, texts: Sequence[str], cache: Path) -> Lexicon:
        reference = load_corpus(self.reference, {"text": "--data"}, cache_dir=cache)
        corpus = _count(texts)
        other = _count([*reference.train.texts, *reference.eval.texts])
        total = corpus.total()
        other_total = other.total()
        words = []
        for word, count in corpus.items():
            other_count = other[word]
            is_frequent = count >= self.min_count and count * other_total >= self.ratio * other_count * total
            if is_frequent and log_likelihood_ratio(count, other_count, total, other_total) >= self.threshold:
                words.append(word)
        if not words:
            raise UsageError(
                f"--finder keyness: no word of the training text is key against {self.reference}; name another "
                f"reference, or type a lower threshold, e.g. keyness:{self.reference},threshold=3.84,ratio=1.5"
            )
        return Lexicon(tuple(sorted(words)))


def log_likelihood_ratio(count: int, other: int, total: int, other_total: int) -> float:
    """G2 of a word: a, b, c and d of `Keyness`.

    >>> log_likelihood_ratio(10, 20, 1000, 2000), round(log_likelihood_ratio(30, 0, 1000, 1000), 3)
    (0.0, 41.589)
    """
    both = count + other
    every = total + other_total
    terms = []
    for observed, words in ((count, total), (other, other_total)):
        expected = words * both / every
        if observed:
            terms.append(observed * math.log(observed / expected))
    return 2 * sum(terms)


def _count(texts: Iterable[str]) -> Counter[str]:
    """How often each word of a letter and two characters stands in some texts, in small letters."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(_WORD.findall(text.lower()))
    for word in list(counts):
        if len(word) == 1 or not _LETTER.search(word):
            del counts[word]
    return counts


@dataclass(frozen=True)
class Ner(Finder):
    """What a model tags: a run of token_classification, another folder, or a name on the Hub.

    A word is what stands between spaces, without the signs at its ends; each of these signs is a word too. A word has
    the tag of its first piece, as in training. Neighbours with tags of one type are one span, unless the later one
    begins a span (``B-``, ``S-``, ``U-``). A label without such a prefix is a type, and ``O`` is none.
    """

    model: str
    types: str = ""
    """Only these types, with plus signs between them; empty: all."""

    def prepare(self, texts: Sequence[str], cache: Path) -> Tagger:
        folder = _folder(self.model)
        digest = hashlib.sha256()
        for path in sorted(folder.iterdir()):
            if path.is_file() and path.suffix in (".json", ".txt", ".safetensors", ".bin", ".model"):
                content = path.read_bytes()
                digest.update(f"{path.name} {len(content)}\n".encode())
                digest.update(hashlib.sha256(content).digest())
        types = sorted(filter(None, self.types.split("+")))
        known = load(str(folder), "cpu").tagging.types
        for kind in types:
            if kind not in known:
                raise UsageError(f"--finder ner: {self.model} has no type {kind!r}; it has {', '.join(known)}")
        return Tagger(str(folder), tuple(types), digest.hexdigest())


def _folder(model: str) -> Path:
    """The folder of a model: that of a run, of another folder, or of a name on the Hub."""
    folder = Path(model).expanduser().absolute()
    if folder.is_dir():
        of_run = folder / "model"
        return of_run if (of_run / "config.json").is_file() else folder
    try:
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.txt", "*.safetensors", "*.model", "pytorch_model*.bin"]
        here_only = not hub_is_reachable()
        return Path(snapshot_download(model, allow_patterns=patterns, local_files_only=here_only))
    except Exception as error:  # the Hub's library raises many types
        raise UsageError(
            f"--finder ner: {model!r} is no folder, and cannot be had from the Hub ({first_line(error)})"
        ) from error


ALL: Mapping[str, type[Finder]] = {"ner": Ner, "terms": Terms, "keyness": Keyness}

NAMED = Registry[type[Finder]]("finder", GROUP, ALL, Finder)
"""Those of installed packages too."""
FINDERS: Choices[Finder] = Choices("finder", "finders", "--finder", NAMED, first_is_positional=True)
