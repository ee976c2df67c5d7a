"""What `import asyncsgd` promises to editors, type checkers and `help`: stub, docstrings, the example of README."""

import ast
import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys

import pytest
from doors import ROOT, asyncsgd

NAMES = [name for name in asyncsgd.__all__ if name != "__version__"]


def imported_by_stub():
    tree = ast.parse((ROOT / "asyncsgd" / "__init__.pyi").read_text(encoding="utf-8"))
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom):
            (alias,) = statement.names
            assert alias.asname == alias.name  # else a type checker takes the import for the stub's own
            yield alias.name, statement.module


def test_the_stub_names_what_is_public_and_the_very_objects_that_are_loaded():
    imported = dict(imported_by_stub())
    assert sorted(imported) == sorted(NAMES)
    for name, module in imported.items():
        assert getattr(importlib.import_module(module), name) is getattr(asyncsgd, name)


def test_every_public_name_is_completed_and_has_help():
    assert set(asyncsgd.__all__) <= set(dir(asyncsgd))
    for name in NAMES:
        found = getattr(asyncsgd, name)
        if inspect.isroutine(found) or inspect.isclass(found):
            assert inspect.getdoc(found), name
        if inspect.isroutine(found) or dataclasses.is_dataclass(found):
            assert inspect.signature(found), name


@pytest.mark.slow
def test_a_strict_type_checker_accepts_the_example_of_the_first_page(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "mine.py").write_text(example + "reveal_type(result.verdict)\nasyncsgd.train(samples='all')\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "mine.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    # of an installed library a type checker tells nothing, of one that lies in a checkout it does
    ours = [line for line in done.stdout.splitlines() if line.startswith("mine.py:")]
    assert ours[0].endswith('Revealed type is "str"'), done.stdout
    assert re.fullmatch(r"mine\.py:\d+: error: Missing positional argument \"task\" in call to \"train\" .*", ours[1])
    assert 'Argument "samples" to "train" has incompatible type "str"; expected "int | None"' in ours[2]
    assert len(ours) == 3
