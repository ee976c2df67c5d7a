"""Texts to train on and texts to evaluate on, from installed documentation, files, folders or the Hugging Face Hub.

A corpus is the same on every machine that has the same source: the order is fixed, the split is decided by each text
alone, and `Corpus.fingerprint` names the result. Nothing here needs a network unless the user names a Hub data set.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from asyncsgd.data.documents import Documents, without_surrogates
from asyncsgd.data.pydocs import load_pydocs, package_versions
from asyncsgd.errors import UsageError, nearest
from asyncsgd.numbers import shortened

if TYPE_CHECKING:
    import datasets

EXTENSIONS = (".txt", ".txt.gz", ".jsonl", ".csv", ".parquet")

TRAIN_NAMES = ("train",)
EVAL_NAMES = ("validation", "valid", "dev", "eval")
TEST_NAMES = ("test",)


Rows = list[tuple[str, tuple[object, ...]]]
"""The rows of a table: words that say where the row stands, and the values of the wanted columns."""


@dataclass(frozen=True)
class Corpus:
    """Training and evaluation documents that share no text.

    Args:
        name: ``"pydocs"``, the file's or folder's own name without its directory, or ``"hub:NAME[:CONFIG]"``; the
            names of joined sources with plus signs between them.
        train: the documents to train on.
        eval: the documents to evaluate on.
        fingerprint: 16 hexadecimal digits that change whenever a text, its order, its side of the split or, for
            ``pydocs``, a package version changes.
    """

    name: str
    train: Documents
    eval: Documents
    fingerprint: str

    def fingerprint_of(self, blocks: bool) -> str:
        """The fingerprint of its evaluation: blocks of texts are another test than the texts one by one."""
        if not blocks:
            return self.fingerprint
        return hashlib.sha256(f"blocks {self.fingerprint}".encode()).hexdigest()[:16]


def load_corpus(
    data: str, *, eval_data: str | None, text_column: str, cache_dir: Path, eval_fraction: float = 0.05
) -> Corpus:
    """Load the texts that `data` names and set some of them aside for evaluation.

    A text is set aside if the first 64 bits of its SHA-256, read as a number in [0, 1), lie below `eval_fraction`. So
    the split depends on neither the order nor the other texts. Nothing is split where evaluation texts are given: by
    `eval_data`, by ``validation.*`` (or ``valid``, ``dev``, ``eval``) beside ``train.*`` in a folder, or by the Hub
    data set's own validation or test split. Texts that occur on both sides are then taken out of training.

    Args:
        data: ``"pydocs"`` (docstrings of the standard library, numpy, scipy and pandas, read from their sources), a
            file (.txt, .txt.gz, .jsonl, .csv, .parquet), a folder of such files, or ``"hub:NAME[:CONFIG]"``. A text
            file holds one document a line, or one a paragraph as soon as it has a blank line. A folder is read without
            its subfolders, in the order of the names; where it has ``train.*`` beside ``validation.*`` or ``test.*``,
            only ``train.*`` and ``validation.*`` are used. ``A+B`` joins sources: their training texts, and the
            evaluation texts that each sets aside for itself.
        eval_data: a file or folder with the evaluation texts, or None. Of a folder that has ``train.*``, the
            ``validation.*`` files are read.
        text_column: the column (or JSON key) that holds the text in .jsonl, .csv, .parquet and Hub data sets.
        cache_dir: folder in which ``pydocs`` is kept between runs; made when needed.
        eval_fraction: share of the documents to set aside, between 0 and 1, both excluded.

    Raises:
        UsageError: the source is missing, empty, damaged or not text, has no column `text_column`, or leaves one side
            without documents. The message says what to type next.
    """
    if not 0 < eval_fraction < 1:
        raise UsageError(f"eval_fraction is {eval_fraction}; it must lie between 0 and 1, for example 0.05")
    check_sources(data, eval_data)  # before the first one is read, which may take a while
    sources = [_load_source(part, text_column, cache_dir, eval_data is None) for part in joined_parts(data)]
    name = "+".join(source.name for source in sources)
    if eval_data is not None:
        train = _join([source.train for source in sources])
        own_train, own_eval = _load_path(existing_path(eval_data, "--eval-data"), text_column)
        evaluation = own_eval or own_train
    else:
        sides = [
            split_documents(source.train, eval_fraction) if source.eval is None else (source.train, source.eval)
            for source in sources
        ]
        train, evaluation = _join([side[0] for side in sides]), _join([side[1] for side in sides])
    train = without(train, evaluation)
    _check_sides(name, train, evaluation)
    origin = "".join(source.origin for source in sources)
    return Corpus(name, train, evaluation, _fingerprint(origin, train, evaluation))


def check_sources(data: str, eval_data: str | None) -> None:
    """Look at what `load_corpus` would read, and read nothing.

    Raises:
        UsageError: if a file or folder is missing or of an unknown kind, or a Hub data set has no name.
    """
    for part in joined_parts(data):
        if part.startswith("hub:"):
            hub_name(part)
        elif part != "pydocs":
            _text_files(existing_path(part, "--data"))
    if eval_data is not None:
        _text_files(existing_path(eval_data, "--eval-data"))


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


@dataclass(frozen=True)
class _Source:
    """What one part of ``--data`` holds; `eval` is None where it does not set evaluation texts apart."""

    name: str
    origin: str
    """What the fingerprint covers beside the texts."""
    train: Documents
    eval: Documents | None


def _load_source(data: str, text_column: str, cache_dir: Path, wants_eval: bool) -> _Source:
    if data == "pydocs":
        return _Source(data, json.dumps(package_versions(), sort_keys=True), load_pydocs(cache_dir), None)
    if data.startswith("hub:"):
        return _Source(data, "", *_load_hub(data, text_column, wants_eval=wants_eval))
    path = existing_path(data, "--data")
    return _Source(path.name, "", *_load_path(path, text_column))


def _join(sides: Sequence[Documents]) -> Documents:
    texts = tuple(text for side in sides for text in side.texts)
    labels = [label for side in sides for label in side.labels or ()]
    return Documents(texts, tuple(labels) if len(labels) == len(texts) else None)


def split_documents(documents: Documents, eval_fraction: float) -> tuple[Documents, Documents]:
    """Split by a hash of each text into (train, eval); equal texts always land on the same side.

    >>> train, held_out = split_documents(Documents(("one", "two", "three", "four"), None), 0.25)
    >>> train.texts, held_out.texts
    (('one', 'three'), ('two', 'four'))
    """
    held_out = [_unit_hash(text) < eval_fraction for text in documents.texts]
    return select(documents, [not flag for flag in held_out]), select(documents, held_out)


def _unit_hash(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def select(documents: Documents, keep: Sequence[bool]) -> Documents:
    """Return the documents whose flag is set, with their labels."""
    texts = tuple(text for text, flag in zip(documents.texts, keep, strict=True) if flag)
    if documents.labels is None:
        return Documents(texts, None)
    return Documents(texts, tuple(label for label, flag in zip(documents.labels, keep, strict=True) if flag))


def without(documents: Documents, others: Documents) -> Documents:
    """Return the documents whose text is none of `others`."""
    excluded = set(others.texts)
    return select(documents, [text not in excluded for text in documents.texts])


def _check_sides(name: str, train: Documents, evaluation: Documents) -> None:
    if not evaluation.texts:
        raise UsageError(
            f"{name} has too few documents ({len(train.texts)}) to set some aside for evaluation; "
            "give evaluation texts with --eval-data FILE"
        )
    if not train.texts:
        raise UsageError(
            f"{name} leaves no document to train on: every text is used for evaluation; "
            "give other evaluation texts with --eval-data FILE"
        )


def _fingerprint(origin: str, train: Documents, evaluation: Documents) -> str:
    digest = hashlib.sha256(origin.encode())
    for documents in (train, evaluation):
        digest.update(f"side {len(documents.texts)}\n".encode())
        for text in documents.texts:
            encoded = text.encode()
            # The length in front keeps ("ab", "c") apart from ("a", "bc").
            digest.update(f"{len(encoded)}\n".encode())
            digest.update(encoded)
    return digest.hexdigest()[:16]


def existing_path(name: str, flag: str, *, pydocs: bool = True, kinds: Sequence[str] = EXTENSIONS) -> Path:
    """Return the absolute path of a file or folder that the user named with `flag`.

    Args:
        pydocs: whether ``pydocs`` could have been meant, for the message.
        kinds: what files there may be, for the message.

    Raises:
        UsageError: if there is none.
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


def _load_path(path: Path, text_column: str) -> tuple[Documents, Documents | None]:
    """Return (train, eval) of a file or folder; eval is None where the path does not set evaluation texts apart."""
    files = _text_files(path)
    if not path.is_dir():
        return _read_files(files, text_column), None
    train = files_named(files, TRAIN_NAMES)
    evaluation = files_named(files, EVAL_NAMES)
    if not train or not (evaluation or files_named(files, TEST_NAMES)):
        return _read_files(files, text_column), None
    return _read_files(train, text_column), _read_files(evaluation, text_column) if evaluation else None


def _text_files(path: Path) -> list[Path]:
    """The file itself, or the files of a folder that can be read, in the order of their names."""
    if not path.is_dir():
        _known_extension(path)
        return [path]
    files = files_in(path)
    if not files:
        raise UsageError(f"the folder {path} holds no file that can be read; known are {', '.join(EXTENSIONS)}")
    return files


def files_named(files: Sequence[Path], names: Sequence[str]) -> list[Path]:
    """Return the files whose name up to its first dot is one of `names`, in their order."""
    return [path for path in files if path.name.lower().split(".")[0] in names]


def _extension(path: Path) -> str | None:
    name = path.name.lower()
    return next((extension for extension in EXTENSIONS if name.endswith(extension)), None)


def _read_files(files: Sequence[Path], text_column: str) -> Documents:
    texts: list[str] = []
    for path in files:
        texts.extend(read_texts(path, text_column))
    return Documents(tuple(texts), None)


def files_in(folder: Path, extensions: Sequence[str] = EXTENSIONS) -> list[Path]:
    """The files in a folder with one of the `extensions`, by name; no hidden ones."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.name.lower().endswith(tuple(extensions)) and not path.name.startswith(".") and path.is_file()
    )


@contextlib.contextmanager
def needs(package: str, what: str) -> Iterator[None]:
    """Around the import of a package that only some data need.

    Raises:
        UsageError: with how to install it; `what` is what needs it.
    """
    try:
        yield
    except ImportError as error:
        raise UsageError(
            f"{what} needs the package {package}, which cannot be imported ({error}); type "
            f"python -m pip install {package}"
        ) from error


def read_texts(path: Path, text_column: str) -> list[str]:
    """Return the non-empty documents of one file, stripped, in the file's order.

    Args:
        path: a file with one of the `EXTENSIONS`.
        text_column: the column or JSON key with the text; not used for .txt and .txt.gz.

    Raises:
        UsageError: the file is unknown, unreadable, empty or damaged, or lacks the column.
    """
    if _known_extension(path) in (".txt", ".txt.gz"):
        values = _lines_or_paragraphs(_text(path))
    else:
        values = [text_of(where, text_column, row[0]) for where, row in read_rows(path, {text_column: "--text-column"})]
    texts = [text for text in (without_surrogates(value).strip() for value in values) if text]
    if not texts:
        raise UsageError(f"{path} is empty or holds no text; give a file with at least one document")
    return texts


def read_rows(path: Path, columns: Mapping[str, str]) -> Rows:
    """Return the rows of a table, each with words that say where it stands.

    Args:
        path: a .jsonl, .csv or .parquet file.
        columns: the names of the columns that are wanted, each with the flag that chooses it.

    Returns:
        The values of the wanted columns as the file has them, in the file's order; those of a CSV file are text.

    Raises:
        UsageError: the file cannot be read or is damaged, has no columns, or lacks one.
    """
    extension = table_extension(path)
    if extension == ".parquet":
        return _parquet_rows(path, columns)
    return (_jsonl_rows if extension == ".jsonl" else _csv_rows)(path, _text(path), columns)


def table_extension(path: Path) -> str:
    """The kind of a file that has columns.

    Raises:
        UsageError: if it is of another kind.
    """
    extension = _known_extension(path)
    if extension in (".txt", ".txt.gz"):
        raise UsageError(f"{path} is plain text and has no columns; give a .parquet, .csv or .jsonl file")
    return extension


def _known_extension(path: Path) -> str:
    extension = _extension(path)
    if extension is None:
        raise UsageError(f"{path.name}: files of this kind cannot be read; known are {', '.join(EXTENSIONS)}")
    return extension


def _text(path: Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if _extension(path) == ".txt.gz" else raw).decode("utf-8").removeprefix("\ufeff")
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read ({error})") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 (byte offset {error.start}); convert it, for example: "
            f"iconv -f ISO-8859-1 -t UTF-8 {path} > converted{_extension(path)}"
        ) from error


def _lines_or_paragraphs(text: str) -> list[str]:
    # Not str.splitlines: it also cuts at form feeds and at Unicode separators that occur inside documents.
    text = text.replace("\r\n", "\n").strip()
    paragraphs = re.split(r"\n[ \t]*\n", text)
    if len(paragraphs) == 1:
        return text.split("\n")
    return [" ".join(line.strip() for line in paragraph.split("\n")) for paragraph in paragraphs]


def _jsonl_rows(path: Path, text: str, columns: Mapping[str, str]) -> Rows:
    rows: Rows = []
    for number, line in enumerate(text.split("\n"), start=1):
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


def _csv_rows(path: Path, text: str, columns: Mapping[str, str]) -> Rows:
    if not text.strip():
        return []
    with needs("pandas", str(path)):
        import pandas as pd

    try:
        # A row with too many fields is only a warning to pandas, and its last fields would be lost.
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False, index_col=False)
    except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise UsageError(f"{path} is not a well-formed CSV file ({error}); check its quotes and commas") from error
    check_columns(str(path), columns, table.columns)
    values = zip(*(table[column].fillna("").tolist() for column in columns), strict=True)
    return [(f"{path}, row {number}:", row) for number, row in enumerate(values, start=1)]


def _parquet_rows(path: Path, columns: Mapping[str, str]) -> Rows:
    with needs("pyarrow", str(path)):
        import pyarrow as pa
        import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        if set(columns) <= set(names):
            table = file.read(list(columns))
            values = zip(*(table.column(column).to_pylist() for column in columns), strict=True)
            return [(f"{path}, row {number}:", row) for number, row in enumerate(values, start=1)]
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"{path} cannot be read as Parquet ({error})") from error
    check_columns(str(path), columns, names)
    return []


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


def _load_hub(data: str, text_column: str, *, wants_eval: bool) -> tuple[Documents, Documents | None]:
    name, config = hub_name(data)
    splits = load_hub_splits(name, config)
    if "train" not in splits:
        raise UsageError(f"the data set {name} has no split 'train'; it has {', '.join(splits)}")
    train = _hub_documents(name, splits["train"], text_column)
    eval_split = next((split for split in ("validation", "test") if split in splits), None)
    if not wants_eval or eval_split is None:
        return train, None
    return train, _hub_documents(name, splits[eval_split], text_column)


def load_hub_splits(name: str, config: str | None) -> datasets.DatasetDict:
    """Load a data set from the Hub, or from the local cache where the Hub is unreachable.

    Raises:
        UsageError: if it is in neither.
    """
    with needs("datasets", f"hub:{name}"):
        import datasets

    offline = datasets.config.HF_HUB_OFFLINE or not hub_is_reachable()
    try:
        with _datasets_offline() if offline else contextlib.nullcontext():
            return datasets.load_dataset(name, config)
    except Exception as error:
        reason = " ".join(str(error).split())
        arguments = repr(name) if config is None else f"{name!r}, {config!r}"
        if offline:
            raise UsageError(
                f"the data set {name} is not in the local cache and the Hub is unreachable ({reason}); run the same "
                f'command once online, or python -c "import datasets; datasets.load_dataset({arguments})"; '
                "or use --data pydocs or --data FILE"
            ) from error
        raise UsageError(f"the data set {name} cannot be loaded from the Hub: {reason}") from error


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


def _hub_documents(name: str, split: datasets.Dataset, text_column: str) -> Documents:
    check_columns(f"the data set {name}", {text_column: "--text-column"}, split.column_names)
    values = [text_of(f"the data set {name}:", text_column, value) for value in split[text_column]]
    texts = (without_surrogates(value).strip() for value in values)
    return Documents(tuple(text for text in texts if text), None)
