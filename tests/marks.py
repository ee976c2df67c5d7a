"""Marks for some cases of a test."""

import pytest


def slow(*cases):
    """`cases` of `pytest.mark.parametrize` that run with ``-m slow`` only; a tuple has the values of one case."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
