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

from asyncsgd.data.documents import without_surrogates
from asyncsgd.data.kinds import Kind
from asyncsgd.data.labels import NO_LABEL, Names, label_name
from asyncsgd.errors import UsageError
from asyncsgd.settings.groups import PAIRS
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
        kind = Kind(self.read)
        if self.is_pair:
            kind = kind._replace(text="pair", unit="pair", filling="two texts", takes=(PAIRS, "hub:NAME"))
        if self.labels == "number":
            filling = f"{kind.filling} and a number"
            return kind._replace(label="number", filling=filling, has_classes=False)
        if self.labels == "multi":
            kind = kind._replace(labels_of=json.loads, fewest=1)
        if len(self.label_columns) > 1:
            kind = kind._replace(names=self.label_columns)
        return kind

    def read(self, where: str, columns: Mapping[str, str], row: tuple[Any, ...], names: Names) -> tuple[str, str]:
        """The text and the label of a row, whose columns are the text, the labels and the second text.

        The text is empty where the row is to be left out: one of its texts is None, or all are blank. The label is
        empty where it is missing.
        """
        num_label_columns = max(1, len(self.label_columns))
        label_columns = slice(1, 1 + num_label_columns)
        named_columns = list(columns.items())
        texts = [_text_of(where, named_columns[0], row[0])]
        if self.is_pair:
            texts.append(_text_of(where, named_columns[-1], row[-1]))
        if None in texts or not any(texts):
            return "", ""
        text = json.dumps(texts, ensure_ascii=False) if self.is_pair else str(texts[0])
        flags = dict(named_columns[label_columns])
        label = self._label(where, columns, flags, row[label_columns], names)
        return text, label

    def _label(
        self, where: str, columns: Mapping[str, str], flags: Mapping[str, str], values: Sequence[Any], names: Names
    ) -> str:
        """The label, a JSON list of labels, or a number as text; empty where a number is missing.

        Args:
            flags: of each column of labels, the flag that chooses it.
            values: what the row has in these columns.
        """
        column, flag = next(iter(flags.items()))
        name = functools.partial(label_name, where, columns, names=names)
        if self.labels == "single":
            return name(values[0])
        if self.labels == "number":
            return _number_of(where, column, flag, values[0])
        missing = list(NO_LABEL)
        if len(flags) > 1:
            missing.append("")  # in one column an empty text is a list without labels
        if all(value is None or str(value).strip() in missing for value in values):
            return ""
        if len(flags) > 1:
            labels = [label for label, value in zip(flags, values, strict=True) if _has(where, label, value)]
            return json.dumps(labels)
        (value,) = values
        if self.separator is not None and isinstance(value, str):
            value = [part for part in value.split(self.separator) if part.strip()]
        if not isinstance(value, list):
            raise UsageError(
                f"{where} column {column!r} holds {value!r}, and --labels multi takes a list, a text with "
                f"--label-separator, or several columns of 0 and 1 as {flag} A,B"
            )
        if value and all(str(label) == "-1" for label in value):  # labels that are kept back, as the Hub marks them
            return ""
        named = filter(None, map(name, value))  # what a text is cut into may be empty
        return json.dumps(list(dict.fromkeys(named)))


def texts_of(text: str) -> tuple[str, str]:
    """The two texts of a pair.

    >>> texts_of('["a", "b"]')
    ('a', 'b')
    """
    first, second = json.loads(text)
    return first, second


def _text_of(where: str, column: tuple[str, str], value: object) -> str | None:
    """A value as text without spaces around it; None where it is missing."""
    if value is None:
        return None
    if not isinstance(value, str):
        name, flag = column
        raise UsageError(
            f"{where} column {name!r} holds {type(value).__name__} values, not text; choose a column of text with "
            f"{flag} NAME"
        )
    return without_surrogates(value).strip()


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
