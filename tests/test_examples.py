"""The examples in docstrings of asyncsgd and analysis, each module as a test."""

import doctest
import importlib

import pytest
from doors import ROOT

PATHS = [path for room in ("asyncsgd", "analysis") for path in sorted((ROOT / room).rglob("*.py"))]
NAMES = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PATHS if ">>>" in path.read_text("utf-8")]


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_of_a_module_say_what_it_does(name):
    failed, number = doctest.testmod(importlib.import_module(name.removesuffix(".__init__")))
    assert number > failed == 0
