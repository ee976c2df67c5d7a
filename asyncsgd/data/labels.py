"""What a label in a row is called: by the row itself, or by the names that belong to its number."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncsgd.data.files import Source
from asyncsgd.data.pydocs import package_versions
from asyncsgd.data.pydocs_pairs import LABELS as PAIR_LABELS
from asyncsgd.errors import UsageError, nearest
from asyncsgd.settings.groups import PAIRS

Names = Sequence[str] | None
"""The names that belong to numbers as labels; None where labels are their own names."""


def names_of(source: Source, column: str) -> Names:
    """The names of the labels of a source.

    A built-in source has its own. Elsewhere they stand in ``labels.json`` beside the files, or the Hugging Face library
    has left them in a data set or a Parquet file. None where there are none.
    """
    if source.is_built_in:
        return PAIR_LABELS if source.data == PAIRS else tuple(package_versions())
    if source.is_hub:
        features = source.sides["train"].features.to_dict()
        return _names_in(features.get(column, {}))  # rows without the column are refused where they are read
    files = list(itertools.chain(*source.sides.values()))
    beside = files[0].with_name("labels.json")
    if not beside.is_file() and source.path is not None:
        beside = source.path / "labels.json"
    if not beside.is_file():
        for path in files:
            names = _names_in(_features(path).get(column, {}))
            if names:
                return names
        return None
    try:
        content = json.loads(beside.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            content = [content[str(number)] for number in range(len(content))]
        if not isinstance(content, list) or not all(isinstance(name, str) for name in content):
            raise TypeError("a name is a text")
        return tuple(content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f'{beside} must hold the names of the labels, like ["no", "yes"] or {{"0": "no", "1": "yes"}} ({error!r})'
        ) from error


def _features(path: Path) -> dict[str, Any]:
    """What the Hugging Face library has written of the columns of a Parquet file; empty for any other file."""
    from pyarrow.parquet import read_schema

    try:
        metadata = read_schema(path).metadata or {}
        written = json.loads(metadata[b"huggingface"])
        features: dict[str, Any] = written["info"]["features"]
    except (OSError, ValueError, KeyError):  # a damaged file is reported where its rows are read
        return {}
    return features


def _names_in(feature: Any) -> Names:
    """The names of a ClassLabel, or of a list of them."""
    while inner := feature[0] if isinstance(feature, list) else feature.get("feature"):
        feature = inner
    return feature.get("names")


NUMBER = re.compile("-?[0-9]+")
NO_LABEL = ("-1", "-1.0")
"""How GLUE marks a row whose label is not published."""


def label_name(where: str, columns: Mapping[str, str], value: object, names: Names) -> str:
    """The name of a label, text or a whole number, that was read from a column of labels; empty where it is missing.

    Where labels have names, a number is an index of these, and -1 is none. A text is a name; it is an index where no
    name is a number.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a table with a missing label holds whole numbers as floats
    if value is None or value != value or (isinstance(value, str) and not value.strip()):
        return ""
    if not isinstance(value, str | int):
        column, flag = list(columns.items())[1]
        raise UsageError(
            f"{where} column {column!r} holds {value!r}, and a label is text or a whole number; choose another column "
            f"with {flag} NAME"
        )
    text = str(value).strip()
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if names is None or (text in names and not is_number):
        return text
    if text in NO_LABEL:
        return ""
    is_index = is_number or not any(NUMBER.fullmatch(name) for name in names)
    if is_index and text.isdecimal() and int(text) < len(names):
        return names[int(text)]
    raise UsageError(f"{where} label {text!r} has no name{nearest(text, names)}; the labels are {', '.join(names)}")


def is_marked(value: object) -> bool:
    """Whether a label, or all labels of a list, say that there is none."""
    labels = value if isinstance(value, list) else [value]
    return all(str(label) in NO_LABEL for label in labels)
