"""Sets to evaluate on: what they are called, and what they hold."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from asyncsgd.data.documents import Documents
from asyncsgd.data.files import joined_parts
from asyncsgd.errors import UsageError
from asyncsgd.settings.numbers import shortened

ALONE = "evaluation"
"""The name of a set that has none and is the only one."""
MAIN = "main"
"""What records call the first set, so that no other one may be called so."""
LONGEST_NAME = 100
"""The most characters of a set's name, which is a file's name where predictions are written."""


class EvaluationSet(NamedTuple):
    """Texts to evaluate on. Those of a labelled task that have no labels are only predicted."""

    name: str
    documents: Documents
    has_labels: bool = True
    fingerprint: str = ""
    """16 hexadecimal digits that change with a text or its label."""


def named_places(eval_data: str | Sequence[str] | None) -> dict[str, str]:
    """The place of each set of ``--eval-data`` by its name: that in front of ``=``, or what the file is called.

    A place that is there with its ``=`` has no name in front.

    >>> named_places(("data/dev_matched.tsv", "other=data/dev_mismatched.tsv"))
    {'dev_matched': 'data/dev_matched.tsv', 'other': 'data/dev_mismatched.tsv'}
    >>> named_places("data/dev.tsv")
    {'evaluation': 'data/dev.tsv'}

    Raises:
        UsageError: if two have one name, or a name can be none of a file.
    """
    given = [eval_data] if isinstance(eval_data, str) else list(eval_data or ())
    places: dict[str, str] = {}
    for text in given:
        name, equals, place = text.partition("=")
        is_there = os.path.exists(os.path.expanduser(text))
        if not equals or is_there:
            place = text
            stems = [Path(part).name.partition(".")[0] for part in joined_parts(text)]
            name = ALONE if len(given) == 1 else "+".join(stems)
        check_name(name)
        if name in places:
            raise UsageError(f"two evaluation sets are called {name!r}; name them: --eval-data NAME=PATH")
        places[name] = place
    return places


def check_name(name: str) -> None:
    """Refuse a name of an evaluation set that cannot be one.

    Raises:
        UsageError: with what to type instead.
    """
    if not name.strip() or name == MAIN or "/" in name or not name.isprintable() or len(name) > LONGEST_NAME:
        raise UsageError(
            f"an evaluation set cannot be called {shortened(name)}; type --eval-data NAME=PATH, with a name of up to "
            f"{LONGEST_NAME} characters, without /, and not {MAIN}"
        )
