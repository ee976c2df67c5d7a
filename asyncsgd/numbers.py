"""Numbers that a user has typed: one spelling each, so that nobody has to know which base a language guesses.

Python reads 1_0 as 10, YAML 1.1 reads 010 as 8 and 1:30 as 90. Here all three are errors. Standard library only.
"""

from __future__ import annotations

import argparse
import math
import re

WHOLE = r"[-+]?(?:0|[1-9][0-9]*)"
DECIMAL = r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"


class NotANumber(argparse.ArgumentTypeError, ValueError):
    """A text that spells no number; argparse shows the message of this error where it hides those of others."""


def whole_number(text: str) -> int:
    """Return the whole number that `text` spells; 1e4 is one.

    Raises:
        NotANumber: if it spells none, or not in the usual way.

    >>> whole_number("-12"), whole_number("1e4")
    (-12, 10000)
    >>> whole_number("010")
    Traceback (most recent call last):
        ...
    asyncsgd.numbers.NotANumber: '010' is not a whole number
    """
    if re.fullmatch(WHOLE, text):
        return int(text)
    if re.fullmatch(DECIMAL, text) and math.isfinite(value := float(text)) and value.is_integer():
        return int(value)
    raise NotANumber(f"{shortened(text)} is not a whole number")


def number(text: str) -> float:
    """Return the finite number that `text` spells.

    Raises:
        NotANumber: if it spells none, or not in the usual way.

    >>> number("1e-4"), number(".5"), number("3")
    (0.0001, 0.5, 3.0)
    >>> number("1_000")
    Traceback (most recent call last):
        ...
    asyncsgd.numbers.NotANumber: '1_000' is not a number
    """
    if re.fullmatch(DECIMAL, text) and math.isfinite(value := float(text)):
        return value
    raise NotANumber(f"{shortened(text)} is not a number")


def shortened(value: object) -> str:
    """Return how `value` is written, without its middle where a message would not be readable: a path ends in its name.

    >>> shortened("x" * 1000 + "/posts.csv")
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxxxxxxxxxxx/posts.csv'"
    """
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:39]}...{text[-38:]}"


def spelled_bytes(number: int) -> str:
    """Return a number of bytes in the largest unit of which there is one.

    >>> spelled_bytes(0), spelled_bytes(4096), spelled_bytes(5 * 2**29)
    ('0 bytes', '4.0 KiB', '2.5 GiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"


def out_of_bounds(
    value: float,
    *,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> str:
    """Return what a value that is out of bounds should have been, and an empty string for one that is not.

    >>> out_of_bounds(0, at_least=1, at_most=1024), out_of_bounds(1025, at_least=1, at_most=1024)
    ('1 or more', '1 or more and at most 1024')
    >>> out_of_bounds(3, at_least=1)
    ''
    """
    # Written as "not inside" so that nan is out of all bounds.
    bounds = (
        (at_least, f"{at_least} or more", at_least is None or value >= at_least),
        (above, f"more than {above}", above is None or value > above),
        (below, f"less than {below}", below is None or value < below),
    )
    wanted = [text for bound, text, _ in bounds if bound is not None]
    if at_most is not None and value > at_most:  # a value that is too small needs no word about the upper limit
        return " and ".join([*wanted, f"at most {at_most}"])
    return "" if all(inside for _, _, inside in bounds) else " and ".join(wanted)
