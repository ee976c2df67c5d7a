"""English documentation of the installed Python packages: docstrings, from sources that are parsed and never run."""

from __future__ import annotations

import ast
import hashlib
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
        if line.startswith(">>>"):
            in_example = True
        elif not line:  # an example and its output reach to the next blank line, as in doctest
            in_example = False
        visible = line.replace(" ", "")
        num_letters = sum(map(str.isalpha, visible))
        is_line_or_table = 2 * num_letters < len(visible)
        is_directive = re.match(r"\.\. [\w-]+::", line)
        if not (in_example or is_line_or_table or is_directive):
            kept.append(line)
    prose = without_surrogates(" ".join(kept))
    return " ".join(prose.split())


def load_pydocs(cache_dir: Path) -> Documents:
    """The documentation of the installed packages, from the cache where it is there."""

    def make(folder: Path) -> None:
        documents = collect_docstrings(package_folders())
        content = json.dumps([documents.texts, documents.labels])
        (folder / "documents.json").write_text(content)

    key = CORPUS_FORMAT, platform.python_version(), package_versions()
    path = cached(cache_dir, "pydocs", key, make) / "documents.json"
    texts, labels = json.loads(path.read_text())
    return Documents(tuple(texts), tuple(labels))


def package_folders() -> dict[str, Path]:
    """The source folder of each package that is installed, found without importing it."""
    folders = {"stdlib": Path(sysconfig.get_path("stdlib"))}
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin:
            folders[name] = Path(spec.origin).parent
    return folders


def package_versions() -> dict[str, str]:
    """The versions that decide what `load_pydocs` finds."""
    from importlib import metadata

    versions = {"stdlib": platform.python_version()}
    for name in _PACKAGES:
        if importlib.util.find_spec(name) is not None:
            versions[name] = metadata.version(name)
    return versions


def collect_docstrings(folders: dict[str, Path]) -> Documents:
    """Read, clean and deduplicate the docstrings below `folders` (label: folder); the first of equal texts stays."""
    docstrings = docstrings_with_modules(folders)
    texts = [text for text, _, _ in docstrings]
    labels = [label for _, label, _ in docstrings]
    return Documents(tuple(texts), tuple(labels))


def docstrings_with_modules(folders: dict[str, Path]) -> list[tuple[str, str, str]]:
    """The text, the label and the module, as a path below its folder, of each docstring of `collect_docstrings`."""
    docstrings: dict[bytes, tuple[str, str, str]] = {}
    for label, folder in folders.items():
        modules = [path.relative_to(folder).as_posix() for path in folder.rglob("*.py")]
        # Where a package is installed must not change the order.
        for module in sorted(modules):
            *subfolders, _ = module.split("/")
            if not _SKIPPED_FOLDERS.isdisjoint(subfolders):
                continue
            for text in map(clean_docstring, _docstrings(folder / module)):
                if _is_english_prose(text):
                    digest = hashlib.sha256(text.lower().encode()).digest()
                    docstrings.setdefault(digest, (text, label, module))
    return list(docstrings.values())


def _is_english_prose(text: str) -> bool:
    """Whether a text has enough words and letters to learn from."""
    if len(text) < 40 or len(text.split()) < 6:
        return False
    num_letters = sum(character.isascii() and character.isalpha() for character in text)
    return 2 * num_letters >= len(text)


def _docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings in a source file, which is parsed and never run; nothing if it does not parse."""
    try:
        with tokenize.open(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    has_calls = "_add_newdocs" in path.name
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node, clean=False) or ""
        elif has_calls and isinstance(node, ast.Call) and getattr(node.func, "id", "") == "add_newdoc":
            # add_newdoc("module", "name", "docstring"): names are too short to stay
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value
