"""A language model's three comparisons: one process against several, learning rate x batch x length, number formats.

    python experiments/language_model.py --quick
    python -m analysis language_model runs/language_model-quick --out report.html

It is ``asyncsgd study language_model``, a study that compares arms after equal samples; without ``--quick`` it has more
seeds."""

from __future__ import annotations

import sys

from asyncsgd.scripts import study

COMMAND = study.StudyCommand.of_script("language_model", __doc__)


def main() -> int:
    return study.main(COMMAND)


if __name__ == "__main__":
    sys.exit(main())
