"""HateCheck: functional tests of a hate-speech classifier, taken once at the end of its training and never learned.

Röttger, Vidgen, Nguyen, Waseem, Margetts, Pierrehumbert: HateCheck: Functional Tests for Hate Speech Detection Models.
ACL 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from asyncsgd.data.corpora import Corpus
from asyncsgd.data.files import TABLES, Source, text_of
from asyncsgd.errors import UsageError, nearest

_HATEFUL = {"0": False, "1": True, "non-hateful": False, "hateful": True}


class Case(NamedTuple):
    """A short text, made to test one thing that a classifier should get right."""

    functionality: str
    """``slur_h``; those that end in ``_nh`` hold texts that are not hateful."""
    text: str
    hateful: bool


def scores(cases: Sequence[Case], said_hateful: np.ndarray) -> dict[str, object]:
    """Accuracy over all cases and per functionality, with their numbers of cases.

    Args:
        said_hateful: bool, what the classifier said of each case.
    """
    is_right = said_hateful == np.array([case.hateful for case in cases])
    functionality = np.array([case.functionality for case in cases])

    def accuracy(chosen: np.ndarray) -> dict[str, object]:
        return {"accuracy": float(is_right[chosen].mean()), "num_cases": int(chosen.sum())}

    of_all = accuracy(np.ones_like(is_right))
    functionalities = {}
    for name in sorted(set(functionality.tolist())):
        functionalities[name] = accuracy(functionality == name)
    return {**of_all, "functionalities": functionalities}


def load_hatecheck(path: str) -> list[Case]:
    """Read the cases, a file or ``test.*`` in a folder: columns functionality, text and label.

    Raises:
        UsageError: if there are none, or a label is neither 0 (non-hateful) nor 1 (hateful).
    """
    columns = dict.fromkeys(("functionality", "text", "label"), "a table with the column")
    source = Source(path, "--hatecheck", kinds=TABLES, needs="test", takes=())
    cases = []
    side = "test" if "test" in source.sides else "train"  # a file
    for where, (functionality, text, label) in source.rows(side, columns):
        if str(label) not in _HATEFUL:
            raise UsageError(f"{where} label {label!r} is neither 0 (non-hateful) nor 1 (hateful)")
        hateful = _HATEFUL[str(label)]
        cases.append(Case(str(functionality), text_of(where, "text", text), hateful))
    if not cases:
        raise UsageError(f"{path} holds no cases")
    return cases


def hateful_labels(positive: str | None, corpus: Corpus) -> Sequence[int]:
    """The numbers of the classes that count as hateful: those named ``LABEL[,LABEL]``, by default ``hate``.

    Raises:
        UsageError: if there is no such label, or every label is named.
    """
    wanted = [label.strip() for label in (positive or "hate").split(",")]
    labels = corpus.labels
    for label in wanted:
        if label not in labels:
            raise UsageError(
                f"--hatecheck: {corpus.name} has no label {label!r}{nearest(label, labels)}; say which labels "
                f"count as hateful with --hatecheck-positive LABEL[,LABEL]; the labels are {', '.join(labels)}"
            )
    if len(set(wanted)) == len(labels):
        raise UsageError("--hatecheck-positive names every label; leave out those that are not hateful")
    return [labels.index(label) for label in dict.fromkeys(wanted)]
