"""HateCheck: functional tests of a hate-speech classifier, taken once at the end of its training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from asyncsgd.data.corpora import Corpus
from asyncsgd.data.tables import TABLES, existing_path, files_of, read_table, sides_of, text_of
from asyncsgd.errors import UsageError, nearest


@dataclass(frozen=True)
class HateCheck:
    """Functional tests of a hate-speech classifier: short texts, each made to test one thing it should get right.

    Röttger, Vidgen, Nguyen, Waseem, Margetts, Pierrehumbert: HateCheck: Functional Tests for Hate Speech Detection
    Models. ACL 2021. Never to be trained on.

    Args:
        texts: the cases.
        functionalities: what each tests, ``slur_h``; those that end in ``_nh`` hold texts that are not hateful.
        hateful: bool, whether each is hateful.
    """

    texts: tuple[str, ...]
    functionalities: tuple[str, ...]
    hateful: np.ndarray

    def scores(self, said_hateful: np.ndarray) -> dict[str, object]:
        """Accuracy over all cases and per functionality, with their numbers of cases.

        Args:
            said_hateful: bool, what the classifier said of each case.
        """
        right = said_hateful == self.hateful
        of = np.array(self.functionalities)
        return {
            "accuracy": float(right.mean()),
            "num_cases": len(right),
            "functionalities": {
                name: {"accuracy": float(right[of == name].mean()), "num_cases": int((of == name).sum())}
                for name in sorted(set(self.functionalities))
            },
        }


def hatecheck_files(path: str) -> list[Path]:
    """The files that hold the cases.

    Raises:
        UsageError: if there are none.
    """
    where = existing_path(path, "--hatecheck", kinds=TABLES)
    files = sides_of(where, TABLES).get("test") if where.is_dir() else files_of(where, TABLES)
    if not files:
        raise UsageError(f"the folder {where} has no test.parquet, test.csv or test.jsonl; --hatecheck takes one")
    return files


def load_hatecheck(path: str) -> HateCheck:
    """Read the cases from a file, or from ``test.*`` in a folder: columns functionality, text and label.

    Raises:
        UsageError: if there are none, or a label is neither 0 (non-hateful) nor 1 (hateful).
    """
    rows = [
        row
        for file in hatecheck_files(path)
        for row in read_table(file, dict.fromkeys(("functionality", "text", "label"), "a table with the column"))
    ]
    hateful = {"0": False, "1": True, "non-hateful": False, "hateful": True}
    texts, functionalities, labels = [], [], []
    for where, (functionality, text, label) in rows:
        if str(label) not in hateful:
            raise UsageError(f"{where} label {label!r} is neither 0 (non-hateful) nor 1 (hateful)")
        texts.append(text_of(where, "text", text))
        functionalities.append(str(functionality))
        labels.append(hateful[str(label)])
    if not texts:
        raise UsageError(f"{path} holds no cases")
    return HateCheck(tuple(texts), tuple(functionalities), np.array(labels))


def hateful_labels(positive: str | None, corpus: Corpus) -> Sequence[int]:
    """The numbers of the classes that count as hateful: those named ``LABEL[,LABEL]``, by default ``hate``.

    Raises:
        UsageError: if there is no such label, or every label is named.
    """
    wanted, labels = [label.strip() for label in (positive or "hate").split(",")], corpus.labels
    for label in wanted:
        if label not in labels:
            raise UsageError(
                f"--hatecheck: {corpus.name} has no label {label!r}{nearest(label, labels)}; say which labels "
                f"count as hateful with --hatecheck-positive LABEL[,LABEL]; the labels are {', '.join(labels)}"
            )
    if len(set(wanted)) == len(labels):
        raise UsageError("--hatecheck-positive names every label; leave out those that are not hateful")
    return [labels.index(label) for label in dict.fromkeys(wanted)]
