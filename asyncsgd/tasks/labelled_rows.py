"""Reading the rows of labelled texts: one text or a pair, with one label, several labels or a number.

A pair is kept as one text, a JSON list of its two texts, and so are several labels. Then whatever holds of texts holds
of pairs: two rows are the same text only where both texts are the same.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from asyncsgd.data.corpora import Kind
from asyncsgd.data.documents import without_surrogates
from asyncsgd.data.files import PAIRS
from asyncsgd.data.labels import NO_LABEL, Names, label_name
from asyncsgd.errors import UsageError
from asyncsgd.tasks.heads import Labels

NONE_OF_COLUMN = ("0", "0.0", "False", "false")
ONE_OF_COLUMN = ("1", "1.0", "True", "true")
"""How the columns of several labels spell that a text has the label."""


@dataclasses.dataclass(frozen=True)
class LabelledRows:
    """How a row becomes a text and a label.

    Args:
        is_pair: whether a row has two texts.
        labels: one, several, or a number.
        separator: what stands between several labels in a text; None: they are a list, or columns of 0 and 1.
        label_columns: the columns that are labels, where there are several.
    """

    is_pair: bool
    labels: Labels
    separator: str | None = None
    label_columns: tuple[str, ...] = ()

    def kind(self) -> Kind:
        """What `asyncsgd.data.corpora.load_corpus` takes."""
        word = "pair" if self.is_pair else "text"
        filling = "two texts" if self.is_pair else "text"
        by_columns = len(self.label_columns) > 1
        return Kind(
            self.read,
            labels_of=json.loads if self.labels == "multi" else lambda label: [label],
            text=word,
            filling=f"{filling} and a number" if self.labels == "number" else filling,
            unit=word,
            takes=(PAIRS if self.is_pair else "pydocs", "hub:NAME"),
            label="number" if self.labels == "number" else "label",
            has_classes=self.labels != "number",
            fewest=1 if self.labels == "multi" else 2,
            names=self.label_columns if by_columns else None,
        )

    def read(self, where: str, columns: Mapping[str, str], row: tuple[Any, ...], names: Names) -> tuple[str, str]:
        """The text and the label of a row, whose columns are the text, the labels and the second text.

        The text is empty where the row is to be left out: a text is missing, or all of it is. The label is empty where
        it is missing.
        """
        number = max(1, len(self.label_columns))
        placed = list(zip(columns.items(), row, strict=True))
        texts = [_text_of(where, column, value) for column, value in (placed[0], *placed[1 + number :])]
        if None in texts or not any(texts):
            return "", ""
        text = json.dumps(texts, ensure_ascii=False) if self.is_pair else str(texts[0])
        of_label = dict(column for column, _ in placed[1 : 1 + number])
        label = self._label(where, columns, of_label, [value for _, value in placed[1 : 1 + number]], names)
        return text, label

    def _label(
        self, where: str, columns: Mapping[str, str], of_label: Mapping[str, str], values: Sequence[Any], names: Names
    ) -> str:
        """The label, a JSON list of labels, or a number as text; empty where a number is missing."""
        column, flag = next(iter(of_label.items()))
        name = functools.partial(label_name, where, columns, names=names)
        if self.labels == "single":
            return name(values[0])
        if self.labels == "number":
            return _number_of(where, column, flag, values[0])
        if all(value is None or str(value) in NO_LABEL for value in values):
            return ""
        if len(of_label) > 1:
            return json.dumps([of for of, value in zip(of_label, values, strict=True) if _has(where, of, value)])
        (value,) = values
        if self.separator is not None and isinstance(value, str):
            value = [part for part in value.split(self.separator) if part.strip()]
        if not isinstance(value, list):
            raise UsageError(
                f"{where} column {column!r} holds {value!r}, and --labels multi takes a list, a text with "
                f"--label-separator, or several columns of 0 and 1 as {flag} A,B"
            )
        return json.dumps(list(dict.fromkeys(map(name, value))))


def texts_of(text: str) -> tuple[str, str]:
    """The two texts of a pair.

    >>> texts_of('["a", "b"]')
    ('a', 'b')
    """
    first, second = json.loads(text)
    return first, second


def _text_of(where: str, column: tuple[str, str], value: object) -> str | None:
    """A value as text without spaces around it; None where it is missing."""
    if value is not None and not isinstance(value, str):
        name, flag = column
        raise UsageError(
            f"{where} column {name!r} holds {type(value).__name__} values, not text; choose a column of text with "
            f"{flag} NAME"
        )
    return None if value is None else without_surrogates(value).strip()


def _number_of(where: str, column: str, flag: str, value: object) -> str:
    """The number as text; empty where it is missing."""
    if value is None or value == "" or value != value:
        return ""
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(
            f"{where} column {column!r} holds {value!r}, which is no finite number; choose another column with {flag} "
            f"NAME"
        )
    return repr(number)


def _has(where: str, column: str, value: object) -> bool:
    """Whether the column of a label says that a text has it."""
    if str(value) not in (*NONE_OF_COLUMN, *ONE_OF_COLUMN):
        raise UsageError(f"{where} column {column!r} holds {value!r}, and a column of several labels holds 0 and 1")
    return str(value) in ONE_OF_COLUMN
