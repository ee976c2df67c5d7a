"""Texts and rows of tables: the built-in documentation, files, folders and the Hugging Face Hub."""

from __future__ import annotations

import functools
import gzip
import json
import os
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncsgd.errors import UsageError, nearest
from asyncsgd.numbers import shortened

if TYPE_CHECKING:
    import datasets

TABLES = (".parquet", ".csv", ".jsonl")
KINDS = (".txt", ".txt.gz", ".jsonl", ".csv", ".parquet")
SIDES = {"train": ("train.*",), "test": ("test.*",), "validation": ("validation.*", "valid.*", "dev.*", "eval.*")}
"""What the files of each split are called."""

Rows = list[tuple[str, tuple[Any, ...]]]
"""The rows of a table: words that say where the row stands, and the values of the wanted columns."""


@dataclass(frozen=True)
class Documents:
    """Texts in a fixed order, none of them empty, each with its label where the source has some."""

    texts: tuple[str, ...]
    labels: tuple[str, ...] = ()


class Source:
    """The documentation of installed packages, a file, a folder or a Hub data set that the user named.

    It is there; nothing of it is read yet.

    Args:
        data: ``"pydocs"``, ``"hub:NAME[:CONFIG]"`` or a path, as the user typed it with `flag`.
        kinds: endings of the files that can be read.
        sides: patterns for the names of the files of each split.
        needs: a split that a folder must have; where it is None, all files of a folder are ``train`` unless it has
            ``train`` beside another split.
        takes: which of ``pydocs`` and ``hub:NAME`` may be meant.
    """

    def __init__(
        self,
        data: str,
        flag: str = "--data",
        *,
        kinds: Sequence[str] = KINDS,
        sides: Mapping[str, Sequence[str]] = SIDES,
        needs: str | None = None,
        takes: Sequence[str] = ("hub:NAME",),
    ) -> None:
        self.data = self.name = data
        self.path: Path | None = None
        self.is_built_in = data == "pydocs" and data in takes
        self.is_hub = "hub:NAME" in takes and re.fullmatch("hub:[^:]+(:[^:]+)?", data) is not None
        if self.is_hub or self.is_built_in:
            return
        # abspath, so that "." has a name; not resolve(), so that a link keeps the name the user gave it.
        self.path = path = Path(os.path.abspath(os.path.expanduser(data)))
        self.name, takes = path.name, [*takes, "a folder"]
        if not data.strip() or not os.path.exists(path):
            raise UsageError(
                f"there is no file or folder {shortened(data)}{nearest(data, takes)}; {flag} takes "
                f"{', '.join(takes)}, or a file ({', '.join(kinds)})"
            )
        there = sorted(path.iterdir()) if path.is_dir() else [path]
        files = [file for file in there if file.name.lower().endswith(tuple(kinds)) and file.name[0] != "."]
        of = {
            side: [file for file in files if any(fnmatchcase(file.name.lower(), name) for name in names)]
            for side, names in sides.items()
            if path.is_dir()
        }
        of = {side: named for side, named in of.items() if named}
        if not files or (path.is_dir() and needs is not None and needs not in of):
            wanted = "file" if needs is None else f"file {' or '.join(sides[needs])}"
            raise UsageError(f"there is no {wanted} ({', '.join(kinds)}) in {data}; name other data with {flag}")
        self._files = of if of and (needs is not None or {"train"} < of.keys()) else {"train": files}

    @functools.cached_property
    def sides(self) -> Mapping[str, Any]:
        """The files of each split, or the splits of the Hub data set; a file and ``pydocs`` are ``train``."""
        if self.is_built_in:
            return {"train": None}
        return hub_splits(self.data) if self.is_hub else self._files

    def rows(
        self, side: str, columns: Mapping[str, str], read: Callable[..., Rows] | None = None, cache: Path | None = None
    ) -> Rows:
        """The rows of a split; see `read_table`, which `read` may replace; those of ``pydocs`` are texts and labels.

        Args:
            cache: folder in which ``pydocs`` is kept between runs.
        """
        if self.is_built_in:
            from asyncsgd.data.pydocs import load_pydocs

            assert cache is not None
            documents = load_pydocs(cache)
            return [("pydocs:", row) for row in zip(documents.texts, documents.labels, strict=True)]
        if not self.is_hub:
            return [row for path in self.sides[side] for row in (read or read_table)(path, columns)]
        split = self.sides[side]
        check_columns(self.data, columns, split.column_names)
        return [(f"{self.data}:", row) for row in zip(*(split[column] for column in columns), strict=True)]


def joined_parts(data: str) -> list[str]:
    """The sources that ``A+B+...`` joins; a path that exists with its plus signs is one.

    >>> joined_parts("pydocs+hub:name:config")
    ['pydocs', 'hub:name:config']
    """
    return [data] if os.path.exists(os.path.expanduser(data)) else data.split("+")


def without_surrogates(text: str) -> str:
    # JSON and Python sources can spell half a surrogate pair, which no encoder accepts later.
    return text.encode("utf-8", "replace").decode("utf-8")


def read_table(path: Path, columns: Mapping[str, str]) -> Rows:
    """The rows of a file, in the file's order; the values of a CSV file are text.

    A text file has one column whatever is wanted, with a row a line, or a paragraph as soon as it has a blank line.

    Args:
        columns: the names of those that are wanted, each with the flag that chooses it.

    Raises:
        UsageError: if the file is damaged, is not UTF-8 or lacks a column.
    """
    name, where = path.name.lower(), str(path)
    try:
        if name.endswith(".parquet"):
            from pyarrow.parquet import ParquetFile

            file = ParquetFile(path)
            check_columns(where, columns, file.schema_arrow.names)
            values = [column.to_pylist() for column in file.read(list(columns)).select(list(columns)).columns]
        elif name.endswith(".csv"):
            import pandas as pd

            # A row with too many fields is only a warning to pandas, and its last fields would be lost.
            with warnings.catch_warnings():
                warnings.simplefilter("error", pd.errors.ParserWarning)
                table = pd.read_csv(path, dtype=str, keep_default_na=False, index_col=False, encoding="utf-8-sig")
            check_columns(where, columns, table.columns)
            values = [table[column].fillna("").tolist() for column in columns]
        else:
            raw = path.read_bytes()
            text = (gzip.decompress(raw) if name.endswith(".gz") else raw).decode("utf-8-sig")
            if name.endswith(".jsonl"):
                return _json_rows(path, text, columns)
            return [(where, (part,)) for part in _lines_or_paragraphs(text)]
    except UsageError:
        raise
    except (OSError, EOFError, zlib.error, ValueError, NotImplementedError, Warning) as error:
        raise UsageError(f"{path} cannot be read ({error})") from error
    return [(f"{path}, row {number}:", row) for number, row in enumerate(zip(*values, strict=True), start=1)]


def _lines_or_paragraphs(text: str) -> list[str]:
    # Not str.splitlines: it also cuts at form feeds and at Unicode separators that occur inside documents.
    text = text.replace("\r\n", "\n").strip()
    paragraphs = re.split(r"\n[ \t]*\n", text)
    if len(paragraphs) == 1:
        return text.split("\n")
    return [" ".join(line.strip() for line in paragraph.split("\n")) for paragraph in paragraphs]


def _json_rows(path: Path, text: str, columns: Mapping[str, str]) -> Rows:
    rows: Rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}:"
            try:
                row = dict(json.loads(line))
            except (ValueError, TypeError) as error:
                raise UsageError(f"{where} not a JSON object ({error})") from error
            check_columns(where, columns, row)
            rows.append((where, tuple(row[column] for column in columns)))
    return rows


def text_of(where: str, text_column: str, value: object) -> str:
    """A value as text, a missing one as an empty string; `where` it stands is for messages."""
    if value is not None and not isinstance(value, str):
        raise UsageError(
            f"{where} column {text_column!r} holds {type(value).__name__} values, not text; "
            "choose a column of text with --text-column NAME"
        )
    return value or ""


def check_columns(where: str, columns: Mapping[str, str], present: Iterable[object]) -> None:
    """Refuse a table that lacks a wanted column, and name the nearest one and the flag that chooses it."""
    names = [str(column) for column in present]
    for column, flag in columns.items():
        if column not in names:
            raise UsageError(
                f"{where} has no column {column!r}; its columns are {', '.join(names)}{nearest(column, names)}; "
                f"choose one with {flag} NAME"
            )


def hub_is_reachable() -> bool:
    """Whether the Hugging Face Hub answers within 5 seconds; its own libraries retry for more than 20."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # which one depends on the version of huggingface_hub
        return False
    return True


def hub_splits(data: str) -> datasets.DatasetDict:
    """The splits of ``hub:NAME[:CONFIG]``, ``train`` among them; from the local cache where the Hub is unreachable."""
    import datasets

    name, _, config = data.removeprefix("hub:").partition(":")
    before = datasets.config.HF_HUB_OFFLINE
    offline = before or not hub_is_reachable()
    try:
        # load_dataset has no argument for "from the cache only": its offline mode is this flag.
        datasets.config.HF_HUB_OFFLINE = offline
        splits = datasets.load_dataset(name, config or None)
    except Exception as error:
        reason = " ".join(str(error).split())
        where = "is not in the local cache and the Hub is unreachable" if offline else "cannot be loaded from the Hub"
        raise UsageError(f"the data set {name} {where} ({reason}); use --data pydocs or --data FILE") from error
    finally:
        datasets.config.HF_HUB_OFFLINE = before
    if "train" not in splits:
        raise UsageError(f"the data set {name} has no split 'train'; it has {', '.join(splits)}")
    return splits
