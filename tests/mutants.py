"""Do the tests notice a fault? A line of the library is made wrong in a copy, and the tests that should see it run.

    python tests/mutants.py                      # all of mutants.yaml: mutant, first test that failed, seconds
    python tests/mutants.py --only mean,delay    # those with one of these words in their names
    python tests/mutants.py --check              # only whether each line still stands in the library, once
    python tests/mutants.py --random 50 --seed 1 # so many changes of a single token, drawn from the whole library

A mutant that survives is a promise that no test keeps; `tests/mutants.md` has the table of the last time. Whoever
rewrites a room carries its mutants over: the fault stays, the line is the new code's. Exits with 1 if one survives, or
if a line is not found.

A random change is tried on the tests that name most of what its file defines, and if these pass on the whole fast part.
What survives that has to be judged: some changes alter no behaviour.
"""

import argparse
import ast
import io
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parents[1]
MUTANTS = Path(__file__).with_suffix(".yaml")
MUTATED = ("asyncsgd", "analysis")
LIKELY = 4
"""Test files that a random change is tried on first."""
MINUTES = 20
"""The longest that tests of one change may take."""
OTHER_TOKENS = {
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "/", "/": "*"},
    **{"+=": "-=", "-=": "+=", "and": "or", "or": "and", "not": "", "True": "False", "False": "True", "is": "is not"},
    **{"min": "max", "max": "min", "any": "all", "all": "any", "break": "continue", "continue": "break"},
}
"""A token, and what a random change writes in its place; a whole number becomes one more."""


class Mutant(NamedTuple):
    fault: str
    file: str
    line: str
    """As it stands in the file, once."""
    wrong: str
    tests: str
    """What should notice, as pytest takes it."""


def fault_of(mutant: Mutant) -> str:
    """Why the mutant cannot be made; empty where it can."""
    path = ROOT / mutant.file
    number = path.read_text().count(mutant.line) if path.exists() else 0
    if number != 1:
        return f"its line stands {number} times in {mutant.file}"
    for word in mutant.tests.partition(" -k ")[0].split():
        if word.startswith("tests/") and not (ROOT / word.partition("::")[0]).exists():
            return f"there is no {word}"
    return ""


def run_tests(copy: Path, *arguments: str) -> str:
    """The first test that failed in a copy, "survived", or "no test ran"."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--hypothesis-profile=unshrunk"]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    try:
        done = subprocess.run(
            [*command, *arguments], cwd=copy, env=environment, capture_output=True, text=True, timeout=60 * MINUTES
        )
    except subprocess.TimeoutExpired:
        return "does not end"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if failed:
        return failed[1]
    if done.returncode in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
        return "no test ran"
    return "survived" if done.returncode == 0 else done.stdout[-300:] + done.stderr[-300:]


def try_out(mutant: Mutant, copy: Path) -> str:
    """What notices a mutant of the list; see `run_tests`."""
    path = copy / mutant.file
    right = path.read_text()
    path.write_text(right.replace(mutant.line, mutant.wrong))
    where, _, expression = mutant.tests.partition(" -k ")
    chosen = ["-k", expression] if expression else []
    noticed = run_tests(copy, *where.split(), *chosen)
    path.write_text(right)
    return noticed


class Change(NamedTuple):
    """Of one token."""

    file: str
    row: int
    """From 1."""
    column: int
    token: str
    other: str

    def of(self, source: str) -> str:
        """The source of the file with the change in it."""
        lines = source.splitlines(keepends=True)
        line = lines[self.row - 1]
        lines[self.row - 1] = line[: self.column] + self.other + line[self.column + len(self.token) :]
        return "".join(lines)

    def __str__(self) -> str:
        line = (ROOT / self.file).read_text().splitlines()[self.row - 1].strip()
        return f"{self.file}:{self.row} `{self.token}` to `{self.other}` in `{line}`"


def changes_of(file: str) -> Iterator[Change]:
    """All that a random change may be in a file of Python."""
    for token in tokenize.generate_tokens(io.StringIO((ROOT / file).read_text()).readline):
        whole_number = token.type == tokenize.NUMBER and token.string.isdecimal()
        other = str(int(token.string) + 1) if whole_number else OTHER_TOKENS.get(token.string)
        is_unpacking = token.string in "**" and not token.line[: token.start[1]].rstrip()[-1:].isalnum()
        if other is not None and token.type != tokenize.STRING and not is_unpacking:
            yield Change(file, *token.start, token.string, other)


def drawn(number: int, seed: int) -> list[Change]:
    """So many changes, of all of the library with equal chances."""
    files = sorted(str(path.relative_to(ROOT)) for folder in MUTATED for path in (ROOT / folder).rglob("*.py"))
    changes = [change for file in files for change in changes_of(file)]
    random.Random(seed).shuffle(changes)
    return list(itertools.islice(filter(is_python, changes), number))


def is_python(change: Change) -> bool:
    """Whether its file can still be read: a `not` may not stand behind another one."""
    try:
        ast.parse(change.of((ROOT / change.file).read_text()))
    except SyntaxError:
        return False
    return True


def likely_tests(file: str) -> list[str]:
    """The test files that name most of what a file of the library defines."""
    definitions = (ast.ClassDef, ast.FunctionDef)
    names = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, definitions)}
    names = {name for name in names if not name.startswith("__")} | {Path(file).stem}
    counts = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        words = re.findall(r"\w+", path.read_text())
        counts[str(path.relative_to(ROOT))] = len(names.intersection(words))
    ordered = sorted((path for path in counts if counts[path]), key=lambda path: -counts[path])
    return ordered[:LIKELY]


def try_change(change: Change, copy: Path) -> str:
    """What notices a random change; see `run_tests`."""
    path = copy / change.file
    right = path.read_text()
    path.write_text(change.of(right))
    likely = likely_tests(change.file)
    noticed = run_tests(copy, *likely) if likely else "survived"
    if noticed == "survived":
        noticed = run_tests(copy, "-n", "2", "--dist", "loadfile")
    path.write_text(right)
    return noticed


def try_all(mutants: list[Mutant] | list[Change]) -> int:
    """Print what notices each, and return how many survived."""
    num_survived = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".git", "runs", "__pycache__", ".*_cache", ".hypothesis")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for mutant in mutants:
            began = time.monotonic()
            if isinstance(mutant, Mutant):
                name = mutant.fault
                noticed = try_out(mutant, copy)
            else:
                name = str(mutant)
                noticed = try_change(mutant, copy)
            num_survived += noticed in ("survived", "no test ran")
            print(f"| {name} | {noticed} | {time.monotonic() - began:.0f} |", flush=True)
    return num_survived


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORDS", help="words of the names, with commas between")
    parser.add_argument("--check", action="store_true", help="only look whether every line is there")
    parser.add_argument(
        "--random", type=int, metavar="NUMBER", help="so many changes of one token, in place of the list"
    )
    parser.add_argument("--seed", type=int, default=0, help="draws them")
    arguments = parser.parse_args()
    if arguments.random is not None:
        changes = drawn(arguments.random, arguments.seed)
        num_survived = try_all(changes)
        print(f"{len(changes) - num_survived} of {len(changes)} noticed")
        return 1 if num_survived else 0
    words = arguments.only.split(",")
    listed = [Mutant(**row) for row in yaml.safe_load(MUTANTS.read_text())]
    mutants = [mutant for mutant in listed if any(word in mutant.fault for word in words)]
    missing = {mutant.fault: why for mutant in mutants if (why := fault_of(mutant))}
    for fault, why in missing.items():
        print(f"{fault}: {why}")
    if arguments.check:
        print(f"{len(mutants) - len(missing)} of {len(mutants)} lines are there")
        return 1 if missing else 0
    num_survived = try_all([mutant for mutant in mutants if mutant.fault not in missing])
    print(f"{len(mutants) - len(missing) - num_survived} of {len(mutants)} noticed")
    return 1 if num_survived or missing else 0


if __name__ == "__main__":
    sys.exit(main())
