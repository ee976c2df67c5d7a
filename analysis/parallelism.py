"""``python -m analysis parallelism RUNS_DIR``: ways to spread a training over processes against one process.

It shows a study of comparisons: ``asyncsgd study parallelism``. The page is the one of ``report``, with what pipelines
wait for, what is sent, and scores."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from analysis.comparison_report import run_report


def main(arguments: Sequence[str] | None = None) -> int:
    return run_report("parallelism", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
