"""Ways to spread one training over processes, compared on the same work: data parallel, pipelines, asynchronous.

    python experiments/parallelism.py --quick
    python -m analysis parallelism runs/parallelism-quick --out report.html

It is ``asyncsgd study parallelism``, a study that compares arms after equal samples; without ``--quick`` its task is
SQuAD 2.0."""

from __future__ import annotations

import sys

from asyncsgd.scripts import study

COMMAND = study.StudyCommand.of_script("parallelism", __doc__)


def main() -> int:
    return study.main(COMMAND)


if __name__ == "__main__":
    sys.exit(main())
