"""The optimisation guide as a measurement: from the naive loop to the fastest training, one setting at a time.

    python experiments/speed_ladder.py --quick
    python -m analysis speed_ladder runs/speed_ladder-quick

It is ``asyncsgd study speed_ladder``; docs/speed_ladder.md explains it."""

from __future__ import annotations

import sys

from asyncsgd.scripts import study

COMMAND = study.StudyCommand.of_script("speed_ladder", __doc__)


def main() -> int:
    return study.main(COMMAND)


if __name__ == "__main__":
    sys.exit(main())
