"""Texts and rows of tables, from files, folders and the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncsgd.data.documents import without_surrogates
from asyncsgd.errors import UsageError, nearest
from asyncsgd.numbers import shortened

if TYPE_CHECKING:
    import datasets

TABLES = (".parquet", ".csv", ".jsonl")
KINDS = (".txt", ".txt.gz", ".jsonl", ".csv", ".parquet")
SIDES = {"train": ("train",), "test": ("test",), "validation": ("validation", "valid", "dev", "eval")}
"""What a file of each split is called, up to its first dot."""

Rows = list[tuple[str, tuple[Any, ...]]]
"""The rows of a table: words that say where the row stands, and the values of the wanted columns."""


def joined_parts(data: str) -> list[str]:
    """Return the sources that ``A+B+...`` joins; a path that exists as it is written wins, its plus signs included.

    >>> joined_parts("pydocs+hub:name:config")
    ['pydocs', 'hub:name:config']
    """
    pieces = data.split("+")
    parts: list[str] = []
    while pieces:
        # The longest run of pieces that exists as a path; "pydocs", "hub:..." and what does not exist are one piece.
        joined = {number: "+".join(pieces[:number]) for number in range(len(pieces), 0, -1)}
        number = next((n for n, part in joined.items() if part.strip() and os.path.exists(os.path.expanduser(part))), 1)
        parts.append(joined[number])
        del pieces[:number]
    return parts


def existing_path(name: str, flag: str, *, pydocs: bool = True, kinds: Sequence[str] = KINDS) -> Path:
    """Return the absolute path of a file or folder that the user named with `flag`.

    Raises:
        UsageError: if there is none; `pydocs` and `kinds` are what else could have been meant.
    """
    path = Path(name).expanduser()
    if not name.strip() or not os.path.exists(path):
        built_in = ["pydocs"] if pydocs else []
        others = "".join(f"{other}, " for other in [*built_in, "hub:NAME"]) if flag == "--data" else ""
        raise UsageError(
            f"there is no file or folder {shortened(name)}{nearest(name, built_in)}; "
            f"{flag} takes {others}a folder, or a file ({', '.join(kinds)})"
        )
    # abspath, so that "." has a name; not resolve(), so that a link keeps the name the user gave it.
    return Path(os.path.abspath(path))


def files_of(path: Path, kinds: Sequence[str] = KINDS) -> list[Path]:
    """The file itself, or the files of a folder of one of these kinds, by name; no hidden ones, no subfolders.

    Raises:
        UsageError: if a file is of another kind, or a folder has none.
    """
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    of_kind = [file for file in files if file.name.lower().endswith(tuple(kinds)) and file.name[0] != "."]
    if not of_kind and path.is_dir():
        raise UsageError(f"the folder {path} holds no file that can be read; known are {', '.join(kinds)}")
    if not of_kind:
        raise UsageError(f"{path.name}: files of this kind cannot be read; known are {', '.join(kinds)}")
    return of_kind


def sides_of(path: Path, kinds: Sequence[str] = KINDS) -> dict[str, list[Path]]:
    """The files of the splits that a folder has, by split; a file is ``train``."""
    files = files_of(path, kinds)
    if not path.is_dir():
        return {"train": files}
    sides = {side: [file for file in files if file.name.lower().split(".")[0] in SIDES[side]] for side in SIDES}
    return {side: named for side, named in sides.items() if named}


def read_texts(path: Path, text_column: str) -> list[str]:
    """Return the non-empty documents of one file, stripped, in the file's order.

    A text file holds one document a line, or one a paragraph as soon as it has a blank line; a table has them in
    `text_column`.

    Raises:
        UsageError: the file is unreadable, empty or damaged, or lacks the column.
    """
    if path.name.lower().endswith(TABLES):
        values = [
            text_of(where, text_column, row[0]) for where, row in read_table(path, {text_column: "--text-column"})
        ]
    else:
        values = _lines_or_paragraphs(_text(path))
    texts = [text for text in (without_surrogates(value).strip() for value in values) if text]
    if not texts:
        raise UsageError(f"{path} is empty or holds no text; give a file with at least one document")
    return texts


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
            f"{path} is not UTF-8 (byte offset {error.start}); convert it, for example: "
            f"iconv -f ISO-8859-1 -t UTF-8 {path} > converted{path.suffix}"
        ) from error


def read_table(path: Path, columns: Mapping[str, str]) -> Rows:
    """Return the rows of a .jsonl, .csv or .parquet file, in the file's order; the values of a CSV file are text.

    Args:
        columns: the names of the columns that are wanted, each with the flag that chooses it.

    Raises:
        UsageError: the file cannot be read or is damaged, has no columns, or lacks one.
    """
    name = path.name.lower()
    if name.endswith(".jsonl"):
        return _json_rows(path, columns)
    if not name.endswith(TABLES):
        raise UsageError(f"{path} is plain text and has no columns; give a .parquet, .csv or .jsonl file")
    values = (_parquet_columns if name.endswith(".parquet") else _csv_columns)(path, columns)
    return [(f"{path}, row {number}:", row) for number, row in enumerate(zip(*values, strict=True), start=1)]


def _json_rows(path: Path, columns: Mapping[str, str]) -> Rows:
    rows: Rows = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}:"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where} not JSON ({error}); mend or delete the line") from error
        if not isinstance(row, dict):
            raise UsageError(f'{where} not a JSON object; each line must look like {{"text": "..."}}')
        check_columns(where, columns, row)
        rows.append((where, tuple(row[column] for column in columns)))
    return rows


def _csv_columns(path: Path, columns: Mapping[str, str]) -> list[list[Any]]:
    import pandas as pd

    if not (text := _text(path)).strip():
        return [[] for _ in columns]
    try:
        # A row with too many fields is only a warning to pandas, and its last fields would be lost.
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False, index_col=False)
    except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise UsageError(f"{path} is not a well-formed CSV file ({error}); check its quotes and commas") from error
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
    """Return a value as text, a missing one as an empty string.

    Raises:
        UsageError: if it is not text; `where` stands in front of the message.
    """
    if value is not None and not isinstance(value, str):
        raise UsageError(
            f"{where} column {text_column!r} holds {type(value).__name__} values, not text; "
            "choose a column of text with --text-column NAME"
        )
    return value or ""


def check_columns(where: str, columns: Mapping[str, str], present: Iterable[object]) -> None:
    """Refuse a table that lacks a wanted column.

    Raises:
        UsageError: naming the nearest column and the flag that chooses it; `where` stands in front of the message.
    """
    names = [str(column) for column in present]
    for column, flag in columns.items():
        if column not in names:
            raise UsageError(
                f"{where} has no column {column!r}; its columns are {', '.join(names)}{nearest(column, names)}; "
                f"choose one with {flag} NAME"
            )


def hub_name(data: str) -> tuple[str, str | None]:
    """The name and the configuration of a Hub data set.

    Raises:
        UsageError: if there is no name.

    >>> hub_name("hub:tweet_eval:hate"), hub_name("hub:imdb")
    (('tweet_eval', 'hate'), ('imdb', None))
    """
    _, name, *rest = data.split(":")
    if not name or len(rest) > 1:
        raise UsageError(f"{data!r} does not name a Hub data set; write hub:NAME or hub:NAME:CONFIG")
    return name, rest[0] if rest else None


def hub_is_reachable() -> bool:
    """Ask the Hugging Face Hub for one answer, without retries and for 5 seconds at most.

    The Hub's own libraries retry an unreachable Hub for more than 20 seconds. Asking first makes a run without network
    fail at once, or go on from the local cache at once.
    """
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:
        # No name resolution, no route, a refusing proxy, offline mode: the HTTP library behind the session, and with
        # it the exception classes, differ between versions of huggingface_hub.
        return False
    return True


def hub_splits(data: str) -> datasets.DatasetDict:
    """The splits of ``hub:NAME[:CONFIG]``, ``train`` among them; from the local cache where the Hub is unreachable.

    Raises:
        UsageError: if it is in neither, or has no training split.
    """
    import datasets

    name, config = hub_name(data)
    offline = datasets.config.HF_HUB_OFFLINE or not hub_is_reachable()
    try:
        with _datasets_offline() if offline else contextlib.nullcontext():
            splits = datasets.load_dataset(name, config)
    except Exception as error:
        reason = " ".join(str(error).split())
        if offline:
            raise UsageError(
                f"the data set {name} is not in the local cache and the Hub is unreachable ({reason}); run the same "
                f"command once online, or use --data pydocs or --data FILE"
            ) from error
        raise UsageError(f"the data set {name} cannot be loaded from the Hub: {reason}") from error
    if "train" not in splits:
        raise UsageError(f"the data set {name} has no split 'train'; it has {', '.join(splits)}")
    return splits


@contextlib.contextmanager
def _datasets_offline() -> Iterator[None]:
    # load_dataset has no argument for "from the cache only": its offline mode is this flag, which it reads per call.
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def hub_rows(data: str, split: datasets.Dataset, columns: Mapping[str, str]) -> Rows:
    """The rows of a split of a Hub data set, as `read_table` gives those of a file."""
    where = f"the data set {hub_name(data)[0]}"
    check_columns(where, columns, split.column_names)
    return [(f"{where}:", row) for row in zip(*(split[column] for column in columns), strict=True)]
