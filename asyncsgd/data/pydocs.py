"""English documentation of the installed Python packages: docstrings, from sources that are parsed and never run."""

from __future__ import annotations

import ast
import contextlib
import gzip
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import platform
import re
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path

from asyncsgd.data.tables import Documents, without_surrogates
from asyncsgd.data.tokens import cached

# Change when the documents made from the same packages change: old caches are then left alone and new ones are built.
CORPUS_FORMAT = 2

_PACKAGES = ("numpy", "scipy", "pandas")

# Test suites and demonstration programs are code first; what other packages put inside the standard library's folder
# differs from machine to machine.
_SKIPPED_FOLDERS = {"tests", "test", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo"}


def clean_docstring(docstring: str) -> str:
    """Return the prose of a docstring on one line: no examples, directives, underlines or tables of numbers.

    >>> clean_docstring('''Return twice `x`.
    ...
    ...     Examples
    ...     --------
    ...     >>> twice(2)
    ...     4
    ...     ''')
    'Return twice `x`. Examples'
    """
    kept: list[str] = []
    in_example = False
    for line in inspect.cleandoc(docstring).split("\n"):
        line = line.strip()
        # An example and its output reach to the next blank line, as in doctest.
        in_example = line.startswith(">>>") or (in_example and line != "")
        if not in_example and not _is_markup(line):
            kept.append(line)
    return " ".join(without_surrogates(" ".join(kept)).split())


def _is_markup(line: str) -> bool:
    """Whether a line is an underline, a table, a reST directive or something else with fewer letters than not."""
    visible = line.replace(" ", "")
    return 2 * sum(map(str.isalpha, visible)) < len(visible) or re.match(r"\.\. [\w-]+::", line) is not None


def is_prose(text: str) -> bool:
    """Whether a cleaned docstring says enough in English: 40 characters, 6 words, and mostly ASCII letters.

    >>> is_prose("Return a copy of the array, collapsed into one dimension.")
    True
    >>> is_prose("Return a copy.")
    False
    """
    num_letters = sum(character.isascii() and character.isalpha() for character in text)
    return len(text) >= 40 and len(text.split()) >= 6 and 2 * num_letters >= len(text)


def load_pydocs(cache_dir: Path) -> Documents:
    """Return the documentation of the installed packages, from the cache where it is there.

    Raises:
        UsageError: if the cache folder cannot be written.
    """

    def collect_and_save(folder: Path) -> None:
        documents = collect_docstrings(_package_folders())
        rows = [json.dumps(row) for row in zip(documents.labels or (), documents.texts, strict=True)]
        (folder / "documents.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode(), compresslevel=6, mtime=0))

    key = CORPUS_FORMAT, platform.python_version(), package_versions()
    folder = cached(cache_dir, "pydocs", key, collect_and_save)
    rows = [json.loads(row) for row in gzip.decompress((folder / "documents.jsonl.gz").read_bytes()).splitlines()]
    return Documents(tuple(text for _, text in rows), tuple(label for label, _ in rows))


def _package_folders() -> dict[str, Path]:
    """Return the source folder of each package that is installed, found without importing it."""
    folders = {"stdlib": Path(sysconfig.get_path("stdlib"))}
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            folders[name] = Path(spec.origin).parent
    return folders


def package_versions() -> dict[str, str]:
    """The versions that decide what `load_pydocs` finds."""
    versions = {"stdlib": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def collect_docstrings(folders: dict[str, Path]) -> Documents:
    """Read, clean and deduplicate the docstrings below `folders` (label: folder); the first of equal texts stays."""
    texts: list[str] = []
    labels: list[str] = []
    seen: set[bytes] = set()
    for label, folder in folders.items():
        for path in _source_files(folder):
            for docstring in _docstrings(path):
                text = clean_docstring(docstring)
                digest = hashlib.sha256(text.lower().encode()).digest()
                if is_prose(text) and digest not in seen:
                    seen.add(digest)
                    texts.append(text)
                    labels.append(label)
    return Documents(tuple(texts), tuple(labels))


def _source_files(folder: Path) -> list[Path]:
    files = []
    for path in folder.rglob("*.py"):
        relative = path.relative_to(folder)
        if _SKIPPED_FOLDERS.isdisjoint(relative.parts[:-1]):
            files.append((relative.as_posix(), path))
    # By the name below the folder: where a package is installed must not change the order.
    return [path for _, path in sorted(files)]


def _docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings in a source file, which is parsed and never run; nothing if it does not parse."""
    try:
        with tokenize.open(path) as file:
            source = file.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    reads_newdocs = "_add_newdocs" in path.name
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node, clean=False) or ""
        elif reads_newdocs and isinstance(node, ast.Call):
            yield from _newdoc_strings(node)


def _newdoc_strings(call: ast.Call) -> Iterator[str]:
    """Yield what a call add_newdoc("module", "name", "docstring") documents; names are too short to stay."""
    if isinstance(call.func, ast.Name) and call.func.id == "add_newdoc":
        for node in ast.walk(call):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
