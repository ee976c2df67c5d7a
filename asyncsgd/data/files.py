"""Texts and rows of tables: the built-in documentation, files, folders and the Hugging Face Hub."""

from __future__ import annotations

import csv
import functools
import gzip
import io
import json
import os
import re
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncsgd.data.folders import SIDES, TRAIN, splits_of, told
from asyncsgd.errors import UsageError, nearest
from asyncsgd.settings.groups import BUILT_IN, PAIRS
from asyncsgd.settings.numbers import shortened

if TYPE_CHECKING:
    import datasets

TABLES = (".parquet", ".csv", ".tsv", ".jsonl", ".json", ".csv.gz", ".tsv.gz", ".jsonl.gz", ".json.gz")
KINDS = (".txt", ".txt.gz", *TABLES)
MOST_TIMES_PACKED = 200
ALWAYS_UNPACKED = 2**20
"""A .gz that unpacks to more than `MOST_TIMES_PACKED` times its size, and to more than `ALWAYS_UNPACKED` bytes, is
refused. Text packs to a third or a thirtieth of its size."""
MOST_LINE_ENDS = 10
"""If a field of a table has more line ends, its quotation mark is taken for one that nobody closed."""
_DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}

Rows = list[tuple[str, tuple[Any, ...]]]
"""The rows of a table: words that say where the row stands, and the values of the wanted columns."""


@dataclass(frozen=True)
class Reading:
    """How files are read where they do not say it themselves.

    Raises:
        UsageError: if there is no such encoding.
    """

    encoding: str = "utf-8"
    quoting: str | None = None
    """The quoting of tables: ``standard`` or ``none``; None is ``none`` for a .tsv file and ``standard`` for a .csv
    file."""
    documents: str | None = None
    """What a document of a text file is, one of the ``lines`` or ``paragraphs``; None is lines where no line is
    blank."""

    def __post_init__(self) -> None:
        try:
            " ".encode(self.encoding)
        except LookupError as error:
            raise UsageError(f"--encoding {self.encoding}: there is no such encoding; type e.g. latin-1") from error


AS_IT_IS = Reading()


class Source:
    """The documentation of installed packages, a file, a folder or a Hub data set that the user named.

    It is there; nothing of it is read yet.

    Args:
        data: ``"pydocs"``, ``"pydocs:pairs"``, ``"hub:NAME[:CONFIG]"`` or a path, as the user typed it with `flag`.
        kinds: endings of the files that can be read.
        sides: patterns for the names of the files of each split.
        needs: a split that a folder or a Hub data set must have. Where it is None, a Hub data set must have ``train``,
            and all files of a folder are ``train`` unless it has ``train`` beside another split; see
            `asyncsgd.data.folders.splits_of`.
        takes: which of ``pydocs`` and ``hub:NAME`` may be meant.
        reading: of its files.
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
        reading: Reading = AS_IT_IS,
    ) -> None:
        self.data = self.name = data
        self.notes: list[str] = []
        """Sentences that tell the user how it was read."""
        self._reading = reading
        self._needs = needs or TRAIN
        self.path: Path | None = None
        self.is_built_in = data in BUILT_IN and data in takes
        self.is_hub = "hub:NAME" in takes and re.fullmatch("hub:[^:]+(:[^:]+)?", data) is not None
        if self.is_hub or self.is_built_in:
            return
        # abspath, so that "." has a name; not resolve(), so that a link keeps the name the user gave it.
        self.path = path = Path(os.path.abspath(os.path.expanduser(data)))
        self.name = path.name
        takes = [*takes, "a folder"]
        if not data.strip() or not os.path.exists(path):
            raise UsageError(
                f"there is no file or folder {shortened(data)}{nearest(data, takes)}; {flag} takes "
                f"{', '.join(takes)}, or a file ({', '.join(kinds)})"
            )
        if path.is_dir():
            self._files, left_out = splits_of(path, kinds, sides, needs)
            self.notes.append(told(self._files, left_out, path))
        else:
            self._files = {"train": [path]} if path.name.lower().endswith(tuple(kinds)) else {}
        if not self._files or (path.is_dir() and needs is not None and needs not in self._files):
            wanted = "file" if needs is None else f"file {' or '.join(sides[needs])}"
            raise UsageError(f"there is no {wanted} ({', '.join(kinds)}) in {data}; name other data with {flag}")

    @functools.cached_property
    def sides(self) -> Mapping[str, Any]:
        """The files of each split, or the splits of the Hub data set; a file and ``pydocs`` are ``train``."""
        if self.is_built_in and self.data == PAIRS:
            return {"train": None, "test": None}
        if self.is_built_in:
            return {"train": None}
        if not self.is_hub:
            return self._files
        splits = hub_splits(self.data)
        if self._needs not in splits:
            raise UsageError(f"{self.data} has no split {self._needs!r}; it has {', '.join(splits)}")
        return splits

    def rows(
        self,
        side: str,
        columns: Mapping[str, str],
        read: Callable[..., Rows] | None = None,
        cache: Path | None = None,
        may_lack: Collection[str] = (),
    ) -> Rows:
        """The rows of a split; see `read_table`, which `read` may replace. Those of ``pydocs`` are texts and labels,
        and those of ``pydocs:pairs`` have a second text after them.

        Args:
            cache: folder in which ``pydocs`` is kept between runs.
            may_lack: columns that need not be there; their values are then None.
        """
        if self.is_built_in:
            assert cache is not None
            if self.data == PAIRS:
                from asyncsgd.data.pydocs_pairs import in_words, load_pairs

                pairs, bag_of_words_accuracy = load_pairs(cache)
                if side == "train":
                    self.notes.append(in_words(bag_of_words_accuracy))
                return [(f"{PAIRS}:", row) for row in pairs[side]]
            from asyncsgd.data.pydocs import load_pydocs

            documents = load_pydocs(cache)
            return [("pydocs:", row) for row in zip(documents.texts, documents.labels, strict=True)]
        if not self.is_hub:
            if read is None:
                read = functools.partial(read_table, reading=self._reading, tell=self.notes.append, may_lack=may_lack)
            return [row for path in self.sides[side] for row in read(path, columns)]
        split = self.sides[side]
        check_columns(self.data, columns, split.column_names, may_lack)
        values = []
        for column in columns:
            values.append(split[column] if column in split.column_names else [None] * len(split))
        return [(f"{self.data}:", row) for row in zip(*values, strict=True)]


def joined_parts(data: str) -> list[str]:
    """The sources that ``A+B+...`` joins; a path that exists with its plus signs is one.

    >>> joined_parts("pydocs+hub:name:config")
    ['pydocs', 'hub:name:config']
    """
    if os.path.exists(os.path.expanduser(data)):
        return [data]
    return data.split("+")


def read_table(
    path: Path,
    columns: Mapping[str, str],
    reading: Reading = AS_IT_IS,
    tell: Callable[[str], None] = lambda note: None,
    may_lack: Collection[str] = (),
) -> Rows:
    """The rows of a file, in the file's order; the values of a CSV or TSV file are text.

    A text file has one column whatever is wanted; see `Reading` for its rows.

    Args:
        columns: the names of those that are wanted, each with the flag that chooses it, empty if none does.
        reading: what the file does not say itself.
        tell: is told what was found out about the file, in a sentence.
        may_lack: columns that need not be there; their values are then None.

    Raises:
        UsageError: if the file is damaged, has another encoding, unpacks to far more than its size, or lacks a column.
    """
    where = str(path)
    ending = path.name.lower().removesuffix(".gz").rpartition(".")[2]
    try:
        if ending == "parquet":
            from pyarrow.parquet import ParquetFile

            file = ParquetFile(path)
            names = file.schema_arrow.names
            check_columns(where, columns, names, may_lack)
            table = file.read([column for column in columns if column in names])
            values = {name: table.column(name).to_pylist() for name in table.column_names}
            return _numbered(path, columns, values, table.num_rows)
        text = text_in(path, reading.encoding)
        if ending in ("csv", "tsv"):
            return _delimited(path, text, columns, reading, tell, may_lack)
        if ending == "json" and text.lstrip().startswith("["):
            rows = []
            for number, record in enumerate(json.loads(text), start=1):
                rows.append(_json_row(f"{path}, record {number}:", record, columns, may_lack))
            return rows
        if ending in ("json", "jsonl"):
            return _json_rows(path, text, columns, may_lack)
        return [(where, (part,)) for part in _lines_or_paragraphs(path, text, reading, tell)]
    except UsageError:
        raise
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} cannot be read ({error}); save it as UTF-8, or name its encoding, e.g. --encoding latin-1"
        ) from error
    except (OSError, EOFError, zlib.error, csv.Error, ValueError, NotImplementedError, Warning) as error:
        raise UsageError(f"{path} cannot be read ({error})") from error


def text_in(path: Path, encoding: str) -> str:
    """The text of a file, unpacked where it is a .gz, without a byte order mark."""
    text = unpacked(path).decode(encoding)
    return text.removeprefix("\ufeff")


def unpacked(path: Path) -> bytes:
    """The bytes of a file, unpacked where it is a .gz.

    Raises:
        UsageError: if it unpacks to more than `MOST_TIMES_PACKED` times its size and more than `ALWAYS_UNPACKED` bytes.
            It is not kept in memory then.
    """
    if not path.name.lower().endswith(".gz"):
        return path.read_bytes()
    size = 0
    most = max(path.stat().st_size * MOST_TIMES_PACKED, ALWAYS_UNPACKED)
    with gzip.open(path) as file:
        while part := file.read(2**20):
            size += len(part)
            if size > most:
                raise UsageError(
                    f"{path} unpacks to more than {MOST_TIMES_PACKED} times its size of {path.stat().st_size:,} bytes, "
                    f"which no text does; unpack it yourself if you trust it"
                )
        file.seek(0)
        return file.read()


def _numbered(path: Path, columns: Mapping[str, str], values: Mapping[str, Sequence[Any]], number: int) -> Rows:
    """The wanted columns of a table of so many rows as rows; a column that is not there is None."""
    wanted = [values.get(column, [None] * number) for column in columns]
    rows = zip(*wanted, strict=True)
    return [(f"{path}, row {place}:", row) for place, row in enumerate(rows, start=1)]


def _delimited(
    path: Path,
    text: str,
    columns: Mapping[str, str],
    reading: Reading,
    tell: Callable[[str], None],
    may_lack: Collection[str],
) -> Rows:
    """The rows of a CSV or TSV file."""
    import pandas as pd

    is_tsv = path.name.lower().removesuffix(".gz").endswith(".tsv")
    quoting = reading.quoting or ("none" if is_tsv else "standard")
    usual = "\t" if is_tsv else ","
    header, *_ = re.split(r"[\r\n]", text, maxsplit=1)
    delimiter = _delimiter(header, set(columns) - set(may_lack), usual)
    if delimiter != usual:
        tell(f"the columns of {path.name} are separated by {_DELIMITERS[delimiter]}, as its header shows")
    try:
        # A row with too many fields is only a warning to pandas, and its last fields would be lost.
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(
                io.StringIO(text),
                sep=delimiter,
                quoting=csv.QUOTE_NONE if quoting == "none" else csv.QUOTE_MINIMAL,
                dtype=str,
                keep_default_na=False,
                index_col=False,
            )
    except pd.errors.ParserError as error:
        if quoting == "none":
            raise
        hint = "type --quoting none if quotation marks are ordinary characters there"
        raise UsageError(f"{path} cannot be read ({error}); {hint}") from error
    check_columns(str(path), columns, table.columns, may_lack)
    table = table.fillna("")  # what a row with too few fields lacks
    if quoting == "standard" and reading.quoting is None:
        for name in table.columns:
            line_ends = table[name].str.count("\n")
            num_several = int((line_ends > 0).sum())
            if num_several:
                tell(f"{num_several} fields of the column {name!r} of {path.name} go over several lines")
            is_too_long = line_ends > MOST_LINE_ENDS
            if is_too_long.any():
                row = int(is_too_long.to_numpy().argmax())
                raise UsageError(
                    f"{path}, row {row + 1}: the column {name!r} has {line_ends.iloc[row]} line ends, as behind a "
                    f"quotation mark that nobody closes; type --quoting none if quotation marks are ordinary "
                    f"characters there, or --quoting standard if the field is so long"
                )
    values = {column: table[column].tolist() for column in columns if column in table.columns}
    return _numbered(path, columns, values, len(table))


def _delimiter(header: str, wanted: Collection[str], usual: str) -> str:
    """What separates the columns: `usual`, unless the header has the wanted names only with another separator.

    >>> _delimiter("text;label", ["text", "label"], ","), _delimiter("a;b", ["text"], ",")
    (';', ',')
    """
    for delimiter in (usual, *_DELIMITERS):
        names = next(csv.reader([header], delimiter=delimiter), [])
        if set(wanted) <= set(names):
            return delimiter
    return usual


def _lines_or_paragraphs(path: Path, text: str, reading: Reading, tell: Callable[[str], None]) -> list[str]:
    """The documents of a text file, each on one line."""
    # Not str.splitlines: it also cuts at form feeds and at Unicode separators that occur inside documents.
    text = text.replace("\r\n", "\n").strip()
    paragraphs = re.split(r"\n[ \t]*\n", text)
    kind = reading.documents or ("lines" if len(paragraphs) == 1 else "paragraphs")
    documents = []
    if kind == "lines":
        documents = [line for line in text.split("\n") if line.strip()]
    else:
        for paragraph in filter(str.strip, paragraphs):  # three blank lines in a row have an empty one between them
            lines = map(str.strip, paragraph.split("\n"))
            documents.append(" ".join(lines))
    why = ""
    if reading.documents is None and len(paragraphs) > 1:
        why = ", since it has blank lines; type --documents lines if each line is one"
    tell(f"{path.name} has {len(documents)} documents, which are its {kind}{why}")
    return documents


def _json_rows(path: Path, text: str, columns: Mapping[str, str], may_lack: Collection[str]) -> Rows:
    """The rows of a file with a JSON object on each line."""
    rows: Rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}:"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UsageError(f"{where} not a JSON object ({error})") from error
            rows.append(_json_row(where, record, columns, may_lack))
    return rows


def _json_row(
    where: str, record: object, columns: Mapping[str, str], may_lack: Collection[str]
) -> tuple[str, tuple[Any, ...]]:
    """The row of a JSON object."""
    if not isinstance(record, dict):
        raise UsageError(f"{where} not a JSON object but {shortened(record)}")
    check_columns(where, columns, record, may_lack)
    return where, tuple(record.get(column) for column in columns)


def text_of(where: str, text_column: str, value: object) -> str:
    """A value as text, a missing one as an empty string; `where` it stands is for messages."""
    if value is not None and not isinstance(value, str):
        raise UsageError(
            f"{where} column {text_column!r} holds {type(value).__name__} values, not text; "
            "choose a column of text with --text-column NAME"
        )
    return value or ""


def check_columns(
    where: str, columns: Mapping[str, str], present: Iterable[object], may_lack: Collection[str] = ()
) -> None:
    """Refuse a table that lacks a wanted column, and name the nearest one and the flag that chooses it, if there is
    one.
    """
    names = [str(column) for column in present]
    for column, flag in columns.items():
        if column not in names and column not in may_lack:
            advice = f"; choose one with {flag} NAME" if flag else ""
            raise UsageError(
                f"{where} has no column {column!r}; its columns are {', '.join(names)}{nearest(column, names)}{advice}"
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
    """The splits of ``hub:NAME[:CONFIG]``, from the local cache where the Hub is unreachable."""
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
    return splits
