"""What a model says of every text of an evaluation set, in the form that GLUE's server takes: index<TAB>prediction."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

Said = str | float | list[str]
"""What a model says of a text: a label, a number, or all labels that it has."""


def write_predictions(path: Path, rows: Sequence[int], said: Sequence[Said]) -> None:
    """Write a file, which has no other content at any time.

    Args:
        path: its folder is there.
        rows: the place of each text among the rows of its source, from 0.
        said: what the model says of each text.
    """
    lines = ["index\tprediction"]
    for row, prediction in zip(rows, said, strict=True):
        lines.append(f"{row}\t{in_a_line(prediction)}")
    content = "\n".join(lines) + "\n"
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(content, encoding="utf-8")
    partial.replace(path)


def in_a_line(said: Said) -> str:
    r"""A label as it is; several labels, and a label with a tab or a line end, as JSON; a number as float32 has it.

    >>> in_a_line("yes"), in_a_line("a\tb"), in_a_line(["a", "b"]), in_a_line(0.1)
    ('yes', '"a\\tb"', '["a", "b"]', '0.1')
    """
    if isinstance(said, float):
        import numpy as np

        return str(np.float32(said))
    if isinstance(said, list) or not said.isprintable():
        return json.dumps(said, ensure_ascii=False)
    return said
