"""English documentation of the installed Python packages: docstrings, from sources that are parsed and never run."""

from __future__ import annotations

import ast
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

from asyncsgd.data.documents import Documents, without_surrogates
from asyncsgd.data.tokens import cached

# Change when the documents made from the same packages change: old caches are then left alone and new ones are built.
CORPUS_FORMAT = 3

_PACKAGES = ("numpy", "scipy", "pandas")

# Test suites and demonstration programs are code first; what other packages put inside the standard library's folder
# differs from machine to machine.
_SKIPPED_FOLDERS = {"tests", "test", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo"}


def clean_docstring(docstring: str) -> str:
    """The prose of a docstring on one line: no examples, directives, underlines or tables of numbers.

    >>> clean_docstring('''Return twice `x`.
    ...
    ...     .. versionadded:: 1.2
    ...
    ...     Examples
    ...     --------
    ...     >>> twice(2)
    ...     4
    ...
    ...     ====  1.0
    ...     More prose.
    ...     ''')
    'Return twice `x`. Examples More prose.'
    """
    kept: list[str] = []
    in_example = False
    for line in map(str.strip, inspect.cleandoc(docstring).split("\n")):
        # An example and its output reach to the next blank line, as in doctest.
        in_example = line.startswith(">>>") or (in_example and line != "")
        # An underline, a table or a directive: fewer letters than not.
        visible = line.replace(" ", "")
        is_markup = 2 * sum(map(str.isalpha, visible)) < len(visible) or re.match(r"\.\. [\w-]+::", line)
        if not in_example and not is_markup:
            kept.append(line)
    return " ".join(without_surrogates(" ".join(kept)).split())


def load_pydocs(cache_dir: Path) -> Documents:
    """The documentation of the installed packages, from the cache where it is there."""

    def make(folder: Path) -> None:
        documents = collect_docstrings(package_folders())
        (folder / "documents.json").write_text(json.dumps([documents.texts, documents.labels]))

    key = CORPUS_FORMAT, platform.python_version(), package_versions()
    texts, labels = json.loads((cached(cache_dir, "pydocs", key, make) / "documents.json").read_text())
    return Documents(tuple(texts), tuple(labels))


def package_folders() -> dict[str, Path]:
    """The source folder of each package that is installed, found without importing it."""
    specs = {name: importlib.util.find_spec(name) for name in _PACKAGES}
    found = {name: Path(spec.origin).parent for name, spec in specs.items() if spec is not None and spec.origin}
    return {"stdlib": Path(sysconfig.get_path("stdlib")), **found}


def package_versions() -> dict[str, str]:
    """The versions that decide what `load_pydocs` finds."""
    return {"stdlib": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in _PACKAGES if importlib.util.find_spec(name) is not None
    }


def collect_docstrings(folders: dict[str, Path]) -> Documents:
    """Read, clean and deduplicate the docstrings below `folders` (label: folder); the first of equal texts stays."""
    found = docstrings_with_modules(folders)
    return Documents(tuple(text for text, _, _ in found), tuple(label for _, label, _ in found))


def docstrings_with_modules(folders: dict[str, Path]) -> list[tuple[str, str, str]]:
    """The text, the label and the module, as a path below its folder, of each docstring of `collect_docstrings`."""
    found: dict[bytes, tuple[str, str, str]] = {}
    for label, folder in folders.items():
        # By the name below the folder: where a package is installed must not change the order.
        for name in sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py")):
            if _SKIPPED_FOLDERS.isdisjoint(name.split("/")[:-1]):
                for text in map(clean_docstring, _docstrings(folder / name)):
                    # It says enough, in English.
                    num_letters = sum(character.isascii() and character.isalpha() for character in text)
                    if len(text) >= 40 and len(text.split()) >= 6 and 2 * num_letters >= len(text):
                        digest = hashlib.sha256(text.lower().encode()).digest()
                        found.setdefault(digest, (text, label, name))
    return list(found.values())


def _docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings in a source file, which is parsed and never run; nothing if it does not parse."""
    try:
        with tokenize.open(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node, clean=False) or ""
        elif (
            "_add_newdocs" in path.name and isinstance(node, ast.Call) and getattr(node.func, "id", "") == "add_newdoc"
        ):
            # add_newdoc("module", "name", "docstring"): names are too short to stay
            of_call = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
            yield from (value for value in of_call if isinstance(value, str))
