"""Many runs from one file: tune every arm alike, register the analysis, test on fresh seeds, fine-tune, go on later.

    python experiments/sweep.py experiments/configs/quick.yaml

It is ``asyncsgd study``, see `asyncsgd.scripts.study`. What is finished is skipped, so the same command goes on where a
stopped or killed study was. docs/study.md says what a config holds."""

from __future__ import annotations

import sys

from asyncsgd.scripts.study import main

if __name__ == "__main__":
    sys.exit(main())
