"""Train one of the library's tasks, or one of your own, in any mode and under any rule.

    torchrun experiments/train.py causal_lm --mode async --nproc 4
    python experiments/train.py classification --model runs/stilt_mlm-... --data FOLDER
    python experiments/train.py mine:Spirals --clock virtual --nproc 8

The tasks are masked_lm, causal_lm, classification, token_classification and question_answering; MODULE:CLASS is one of
your own. ``--help`` after a task lists its settings, each with its default."""

from __future__ import annotations

import sys

from asyncsgd.scripts.base import run_script
from asyncsgd.scripts.train import run_task


def main() -> int:
    return run_script(run_task)


if __name__ == "__main__":
    sys.exit(run_script(run_task, ends_with_process=True))
