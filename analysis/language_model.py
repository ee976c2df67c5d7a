"""``python -m analysis language_model RUNS_DIR``: several workers against one, number formats, and a grid.

It shows a study of comparisons: ``asyncsgd study language_model``. The page is the one of ``report``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from analysis.comparison_report import run_report


def main(arguments: Sequence[str] | None = None) -> int:
    return run_report("language_model", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
