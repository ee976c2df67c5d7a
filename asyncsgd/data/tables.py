"""Texts and rows of tables, from files, folders and the Hugging Face Hub."""

from __future__ import annotations

import functools
import gzip
import io
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
    labels: tuple[str, ...] | None


class Source:
    """A file, a folder or a Hub data set that the user named. It is there; nothing of it is read yet.

    Args:
        data: ``"hub:NAME[:CONFIG]"`` or a path, as the user typed it with `flag`.
        kinds: endings of the files that can be read.
        sides: patterns for the names of the files of each split.
        needs: a split that a folder must have; where it is None, all files of a folder are ``train`` unless it has
            ``train`` beside another split.
        takes: what else could have been meant, for messages; a Hub data set is read only where it is among these.
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
        self.data, self.name = data, data
        self.path: Path | None = None
        if data.startswith("hub:") and "hub:NAME" in takes:
            hub_name(data)
            return
        self.path = path = existing_path(data, flag, takes=takes, kinds=kinds)
        self.name = path.name
        there = sorted(path.iterdir()) if path.is_dir() else [path]
        files = [file for file in there if file.name.lower().endswith(tuple(kinds)) and file.name[0] != "."]
        if not files:
            raise UsageError(f"there is no file in {path.name} that {flag} can read; known are {', '.join(kinds)}")
        self._sides = {"train": files}
        if path.is_dir():
            of = {
                side: [file for file in files if any(fnmatchcase(file.name.lower(), name) for name in names)]
                for side, names in sides.items()
            }
            of = {side: named for side, named in of.items() if named}
            if needs is not None and needs not in of:
                raise UsageError(
                    f"the folder {data} has no file {' or '.join(sides[needs])} ({', '.join(kinds)}); name another "
                    f"folder or a file with {flag}"
                )
            if needs is not None or {"train"} < of.keys():
                self._sides = of

    @functools.cached_property
    def sides(self) -> Mapping[str, Any]:
        """The files of each split, or the splits of the Hub data set; a file is ``train``."""
        return hub_splits(self.data) if self.path is None else self._sides

    def rows(self, side: str, columns: Mapping[str, str], read: Callable[..., Rows] | None = None) -> Rows:
        """The rows of a split; see `read_table`, which `read` may replace."""
        if self.path is not None:
            return [row for path in self.sides[side] for row in (read or read_table)(path, columns)]
        split, where = self.sides[side], f"the data set {hub_name(self.data)[0]}"
        check_columns(where, columns, split.column_names)
        return [(f"{where}:", row) for row in zip(*(split[column] for column in columns), strict=True)]


def joined_parts(data: str) -> list[str]:
    """The sources that ``A+B+...`` joins; a path that exists as it is written wins, its plus signs included.

    >>> joined_parts("pydocs+hub:name:config")
    ['pydocs', 'hub:name:config']
    """
    pieces = data.split("+")
    # The longest run of pieces that exists as a path; "pydocs", "hub:..." and what does not exist are one piece.
    joined = {number: "+".join(pieces[:number]) for number in range(len(pieces), 0, -1)}
    number = next((n for n, part in joined.items() if part.strip() and os.path.exists(os.path.expanduser(part))), 1)
    return [joined[number], *(joined_parts("+".join(pieces[number:])) if pieces[number:] else ())]


def existing_path(name: str, flag: str, *, takes: Sequence[str] = (), kinds: Sequence[str] = KINDS) -> Path:
    """The absolute path of a file or folder that the user named with `flag`; `takes` and `kinds` are for messages."""
    path = Path(name).expanduser()
    if not name.strip() or not os.path.exists(path):
        raise UsageError(
            f"there is no file or folder {shortened(name)}{nearest(name, takes)}; "
            f"{flag} takes {', '.join([*takes, 'a folder'])}, or a file ({', '.join(kinds)})"
        )
    # abspath, so that "." has a name; not resolve(), so that a link keeps the name the user gave it.
    return Path(os.path.abspath(path))


def documents_of(where: str, rows: Rows, column: str) -> Documents:
    """The texts of a column, stripped, without the empty ones, of which at least one is left."""
    stripped = (without_surrogates(text_of(place, column, row[0])).strip() for place, row in rows)
    texts = tuple(text for text in stripped if text)
    if not texts:
        raise UsageError(f"{where} holds no text")
    return Documents(texts, None)


def without_surrogates(text: str) -> str:
    # JSON and Python sources can spell half a surrogate pair, which no encoder accepts later.
    return text.encode("utf-8", "replace").decode("utf-8")


def read_table(path: Path, columns: Mapping[str, str]) -> Rows:
    """The rows of a file, in the file's order; the values of a CSV file are text.

    A text file has one column whatever is wanted, with a row a line, or a paragraph as soon as it has a blank line.

    `columns` are the names of those that are wanted, each with the flag that chooses it.
    """
    name = path.name.lower()
    if name.endswith(".jsonl"):
        return _json_rows(path, columns)
    if not name.endswith(TABLES):
        return [(str(path), (text,)) for text in _lines_or_paragraphs(_text(path))]
    values = (_parquet_columns if name.endswith(".parquet") else _csv_columns)(path, columns)
    return [(f"{path}, row {number}:", row) for number, row in enumerate(zip(*values, strict=True), start=1)]


def _lines_or_paragraphs(text: str) -> list[str]:
    # Not str.splitlines: it also cuts at form feeds and at Unicode separators that occur inside documents.
    text = text.replace("\r\n", "\n").strip()
    paragraphs = re.split(r"\n[ \t]*\n", text)
    if len(paragraphs) == 1:
        return text.split("\n")
    return [" ".join(line.strip() for line in paragraph.split("\n")) for paragraph in paragraphs]


def _text(path: Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.name.lower().endswith(".gz") else raw).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read ({error})") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 (byte offset {error.start}); convert it: iconv -f ISO-8859-1 -t UTF-8 {path}"
        ) from error


def _json_rows(path: Path, columns: Mapping[str, str]) -> Rows:
    rows: Rows = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}:"
        try:
            row = dict(json.loads(line))
        except (ValueError, TypeError) as error:
            raise UsageError(f"{where} not a JSON object ({error})") from error
        check_columns(where, columns, row)
        rows.append((where, tuple(row[column] for column in columns)))
    return rows


def _csv_columns(path: Path, columns: Mapping[str, str]) -> list[list[Any]]:
    import pandas as pd

    try:
        # A row with too many fields is only a warning to pandas, and its last fields would be lost.
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(io.StringIO(_text(path)), dtype=str, keep_default_na=False, index_col=False)
    except (pd.errors.ParserError, pd.errors.ParserWarning, pd.errors.EmptyDataError) as error:
        raise UsageError(f"{path} is not a well-formed CSV file ({error})") from error
    check_columns(str(path), columns, table.columns)
    return [table[column].fillna("").tolist() for column in columns]


def _parquet_columns(path: Path, columns: Mapping[str, str]) -> list[list[Any]]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        check_columns(str(path), columns, file.schema_arrow.names)
        return [column.to_pylist() for column in file.read(list(columns)).select(list(columns)).columns]
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"{path} cannot be read as Parquet ({error})") from error


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


def hub_name(data: str) -> tuple[str, str | None]:
    """The name and the configuration of a Hub data set.

    >>> hub_name("hub:tweet_eval:hate"), hub_name("hub:imdb")
    (('tweet_eval', 'hate'), ('imdb', None))
    """
    _, name, *rest = data.split(":")
    if not name or len(rest) > 1:
        raise UsageError(f"{data!r} does not name a Hub data set; write hub:NAME or hub:NAME:CONFIG")
    return name, rest[0] if rest else None


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

    name, config = hub_name(data)
    before = datasets.config.HF_HUB_OFFLINE
    offline = before or not hub_is_reachable()
    try:
        # load_dataset has no argument for "from the cache only": its offline mode is this flag.
        datasets.config.HF_HUB_OFFLINE = offline
        splits = datasets.load_dataset(name, config)
    except Exception as error:
        reason = " ".join(str(error).split())
        where = "is not in the local cache and the Hub is unreachable" if offline else "cannot be loaded from the Hub"
        raise UsageError(f"the data set {name} {where} ({reason}); use --data pydocs or --data FILE") from error
    finally:
        datasets.config.HF_HUB_OFFLINE = before
    if "train" not in splits:
        raise UsageError(f"the data set {name} has no split 'train'; it has {', '.join(splits)}")
    return splits
