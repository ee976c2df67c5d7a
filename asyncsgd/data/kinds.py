"""What the rows of a source hold: plain texts, texts with labels, or what a task makes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from asyncsgd.data.documents import Documents, without_surrogates
from asyncsgd.data.evaluation_sets import named_places
from asyncsgd.data.files import AS_IT_IS, KINDS, TABLES, Reading, Source, joined_parts, text_of
from asyncsgd.data.folders import TRAIN
from asyncsgd.data.labels import Names, label_name
from asyncsgd.errors import UsageError
from asyncsgd.settings.groups import EvalData


class Kind(NamedTuple):
    """What rows hold, and what messages call it."""

    read: Callable[[str, Mapping[str, str], tuple[Any, ...], Names], tuple[str, str]]
    """From (where a row stands, columns, its values, names) to a text, empty where there is none, and its label, empty
    where it is missing."""
    labels_of: Callable[[str], list[str]] = lambda label: [label]
    """All labels in the label of a text."""
    # Words for messages:
    text: str = "text"
    filling: str = "text"  # what a row must not be without
    unit: str = "text"  # what has a label, e.g. a word
    label: str = "label"  # empty where texts have none
    # What decides how rows are read:
    takes: Sequence[str] = ("pydocs", "hub:NAME")
    has_classes: bool = True  # else a label is a number
    fewest: int = 2  # the training texts must have so many labels
    names: Names = None  # where each label has a column of 0 and 1 with its name: these columns

    def sources(
        self, data: str, columns: Mapping[str, str], eval_data: EvalData | None = None, reading: Reading = AS_IT_IS
    ) -> tuple[list[Source], dict[str, Source]]:
        """The sources that `load_corpus` reads, before any is read: the parts of `data`, and the sets of `eval_data` by
        name.
        """
        endings = TABLES if self.label else KINDS
        scored = {}
        for name, place in named_places(eval_data).items():
            scored[name] = Source(place, "--eval-data", kinds=endings, takes=(), reading=reading)
        if not self.label:
            parts = [Source(part, takes=self.takes, reading=reading) for part in joined_parts(data)]
            return parts, scored
        if len(columns) < 2:  # both flags name one column
            name, flag = next(iter(columns.items()))
            raise UsageError(f"{self.text}s and {self.label}s are both {name!r}; name another with {flag}")
        source = Source(data, kinds=TABLES, needs=TRAIN, takes=self.takes, reading=reading)
        return [source], scored

    def counts(self, documents: Documents) -> Counter[str]:
        """How many documents have each label."""
        counts: Counter[str] = Counter()
        for label in documents.labels:
            counts.update(self.labels_of(label))
        return counts


def _read_text(where: str, columns: Mapping[str, str], row: tuple[Any, ...], names: Names) -> tuple[str, str]:
    """The text and the label of a row whose columns are a text and, unless texts are plain, a label."""
    text_column = next(iter(columns))
    text = without_surrogates(text_of(where, text_column, row[0])).strip()
    if not text or len(columns) == 1:
        return text, ""
    return text, label_name(where, columns, row[1], names)


LABELLED = Kind(_read_text)
PLAIN = Kind(_read_text, label="")
