"""Continued masked-language-model pretraining, synchronously or asynchronously: the first stage of STILT.

    torchrun experiments/stilt_mlm.py --mode async --nproc 4

It is ``train.py masked_lm``. ``--help`` lists the settings."""

from __future__ import annotations

import sys

from asyncsgd.scripts.base import run_script
from asyncsgd.scripts.task import TaskScript
from asyncsgd.tasks.masked_lm import MaskedLM

EXAMPLES = """\
  laptop, no network:   torchrun experiments/stilt_mlm.py --mode async --nproc 4
  compare with:         torchrun experiments/stilt_mlm.py --mode sync --nproc 4
  one slow worker:      torchrun experiments/stilt_mlm.py --mode async --nproc 2 --times slow:worker=0,factor=3
  16 virtual workers:   python experiments/stilt_mlm.py --clock virtual --nproc 16 --times exponential:1
  your model and text:  torchrun --nproc-per-node 4 experiments/stilt_mlm.py --mode async --model FOLDER_OR_HUB_ID \\
                          --data posts.csv --text-column text --learning-rate 5e-5 --dropout 0.1
"""

SCRIPT = TaskScript(
    MaskedLM,
    "stilt_mlm",
    "Continued masked-language-model pretraining, synchronously or asynchronously (the first stage of STILT).",
    EXAMPLES,
)


def main() -> int:
    return run_script(SCRIPT.run)


if __name__ == "__main__":
    sys.exit(run_script(SCRIPT.run, ends_with_process=True))
