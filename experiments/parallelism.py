"""Ways to spread one training over processes, compared on the same work: data parallel, pipelines, asynchronous.

    python experiments/parallelism.py --quick
    python -m analysis parallelism runs/parallelism-quick --out report.html

It is ``asyncsgd study parallelism``, a study that compares arms after equal samples; without ``--quick`` its task is
SQuAD 2.0."""

from __future__ import annotations

import sys

from asyncsgd.scripts import study
from asyncsgd.scripts.base import Typed

COMMAND = study.StudyCommand(Typed.of_script("parallelism.py"), str(__doc__).partition("\n")[0], "parallelism")


def main() -> int:
    return study.main(COMMAND)


if __name__ == "__main__":
    sys.exit(main())
