"""Numbers that a user has typed, their bounds, and how values stand in messages. Standard library only."""

from __future__ import annotations

import argparse
import contextlib
import math
import operator


class NotANumber(argparse.ArgumentTypeError, ValueError):
    """A text that spells no number; argparse shows the message of this error where it hides those of others."""


def whole_number(text: str) -> int:
    """Return the whole number that `text` spells; 1e4 is one.

    >>> whole_number("-12"), whole_number("1e4")
    (-12, 10000)
    """
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError, OverflowError):
        if (value := float(text)).is_integer():
            return int(value)
    raise NotANumber(f"{shortened(text)} is not a whole number")


def number(text: str) -> float:
    """Return the finite number that `text` spells.

    >>> number("nan")
    Traceback (most recent call last):
        ...
    asyncsgd.settings.numbers.NotANumber: 'nan' is not a number
    """
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(text)):
            return value
    raise NotANumber(f"{shortened(text)} is not a number")


def shortened(value: object) -> str:
    """Return how `value` is written, without its middle where a message would not be readable: a path ends in its name.

    >>> shortened("x" * 1000 + "/posts.csv")
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxxxxxxxxxxx/posts.csv'"
    """
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:39]}...{text[-38:]}"


def out_of_bounds(
    value: float,
    *,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> str:
    """Return what a value that is out of bounds should have been, and an empty string for one that is not.

    >>> out_of_bounds(0, at_least=1, at_most=1024), out_of_bounds(3, at_least=1)
    ('1 or more and at most 1024', '')
    """
    bounds = (
        (at_least, "{} or more", operator.ge),
        (above, "more than {}", operator.gt),
        (below, "less than {}", operator.lt),
        (at_most, "at most {}", operator.le),
    )
    inside = all(bound is None or holds(value, bound) for bound, _, holds in bounds)
    return "" if inside else " and ".join(words.format(bound) for bound, words, _ in bounds if bound is not None)
