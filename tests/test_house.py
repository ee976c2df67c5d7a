"""How plain the code is, counted. Whoever makes it plainer lowers the limits; to raise one needs a reason in NOTES.md.

A code token is a token of `tokenize` that is no comment, docstring, line end or indentation; an f-string is one. A
statement is a logical line that is no docstring, a code line a line with a token.
"""

import ast
import io
import subprocess
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
NO_CODE = ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER")


class Limits(NamedTuple):
    """Of a folder."""

    tokens: int
    tokens_a_statement: float
    parallel_assignments: float
    """In 1,000 code lines: `a, b = x, y`, and no unpacking of a call."""


LIMITS = {
    "asyncsgd": Limits(225_600, 9.9, 5.0),
    "analysis": Limits(79_500, 10.3, 1.0),
    "experiments": Limits(34_800, 11.5, 1.0),
    "tests": Limits(284_750, 12.5, 1.0),
}
FLAG_PRODUCTS = 12
"""In asyncsgd, analysis and experiments together: a text or list that is multiplied by a truth value."""
LARGE_FILES = 0
"""Of more than 4,000 code tokens, in asyncsgd, analysis and experiments."""
SAME_NAMES = 1
"""Classes of asyncsgd and analysis that have a name in common with another one."""


class Counted(NamedTuple):
    tokens: int
    statements: int
    lines: int
    parallel_assignments: int
    flag_products: int
    classes: tuple[str, ...]


def docstring_lines(tree):
    lines = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        is_alone = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and isinstance(first, ast.Expr)
        if is_alone and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            lines.update(range(first.lineno, first.end_lineno + 1))
    return lines


def is_truth_value(node):
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "bool"
    is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return is_call or is_not or isinstance(node, ast.Compare | ast.BoolOp)


def is_flag_product(node):
    """Whether a text or list is multiplied by something that is true or false."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return False
    for literal, factor in ((node.left, node.right), (node.right, node.left)):
        is_text = isinstance(literal, ast.Constant) and isinstance(literal.value, str)
        if (is_text or isinstance(literal, ast.List | ast.JoinedStr)) and is_truth_value(factor):
            return True
    return False


def is_parallel(node):
    """Whether a statement assigns several values to several names."""
    is_assignment = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
    return is_assignment and isinstance(node.value, ast.Tuple)


def code_tokens(source):
    """The tokens of a source; an f-string is one, also where Python takes it apart."""
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            depth += 1
        if depth == 0 or (kind == "FSTRING_START" and depth == 1):
            yield token, kind
        if kind == "FSTRING_END":
            depth -= 1


@cache
def counted(path):
    source = (ROOT / path).read_text("utf-8")
    tree = ast.parse(source)
    in_docstring = docstring_lines(tree)
    kinds = Counter()
    lines = set()
    for token, kind in code_tokens(source):
        if token.start[0] in in_docstring and kind in ("STRING", "NEWLINE"):
            continue
        kinds[kind] += 1
        if kind not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    nodes = list(ast.walk(tree))
    return Counted(
        tokens=sum(number for kind, number in kinds.items() if kind not in NO_CODE),
        statements=kinds["NEWLINE"],
        lines=len(lines),
        parallel_assignments=sum(map(is_parallel, nodes)),
        flag_products=sum(map(is_flag_product, nodes)),
        classes=tuple(node.name for node in nodes if isinstance(node, ast.ClassDef)),
    )


@cache
def files_of(folder):
    """The files that git keeps, so that what lies about is not counted."""
    listed = subprocess.run(["git", "ls-files", f"{folder}/*.py"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("no checkout of git: what lies about would be counted too")
    return [path for path in listed.stdout.split() if (ROOT / path).exists()]


@pytest.mark.parametrize("folder", LIMITS)
def test_a_folder_does_not_grow_and_is_as_plain_as_it_was(folder):
    files = [counted(path) for path in files_of(folder)]
    limits = LIMITS[folder]
    tokens = sum(file.tokens for file in files)
    statements = sum(file.statements for file in files)
    lines = sum(file.lines for file in files)
    parallel = sum(file.parallel_assignments for file in files)
    assert tokens <= limits.tokens
    assert round(tokens / statements, 1) <= limits.tokens_a_statement
    assert 1000 * parallel / lines <= limits.parallel_assignments


def test_no_more_texts_are_multiplied_by_truth_values():
    folders = ("asyncsgd", "analysis", "experiments")
    number = 0
    for folder in folders:
        for path in files_of(folder):
            number += counted(path).flag_products
    assert number <= FLAG_PRODUCTS


def test_no_more_files_are_large():
    large = {}
    for folder in ("asyncsgd", "analysis", "experiments"):
        for path in files_of(folder):
            tokens = counted(path).tokens
            if tokens > 4_000:
                large[path] = tokens
    assert len(large) <= LARGE_FILES, large


def test_a_class_name_has_one_meaning():
    names = Counter()
    for folder in ("asyncsgd", "analysis"):
        for path in files_of(folder):
            names.update(counted(path).classes)
    several = sorted(name for name, number in names.items() if number > 1 and not name.startswith("_"))
    assert len(several) <= SAME_NAMES, several
