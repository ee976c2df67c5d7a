"""Continued masked-language-model pretraining, synchronously or asynchronously: the first stage of STILT.

    torchrun experiments/stilt_mlm.py --mode async --nproc 4

Prepares the text (by default the English documentation of the installed Python packages), trains with the workers
and the rule asked for, evaluates exactly at fixed points, and leaves everything in one run folder. ``--help`` lists
the settings."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from asyncsgd.runtime.ranks import go_offline
from asyncsgd.scripts.base import run_script
from asyncsgd.scripts.run_folder import open_run_folder
from asyncsgd.scripts.task import TaskScript
from asyncsgd.settings.training import FLAGS, Settings

if TYPE_CHECKING:
    from asyncsgd.experiment import Experiment

DESCRIPTION = "Continued masked-language-model pretraining, synchronously or asynchronously (the first stage of STILT)."
EXAMPLES = """\
  laptop, no network:   torchrun experiments/stilt_mlm.py --mode async --nproc 4
  compare with:         torchrun experiments/stilt_mlm.py --mode sync --nproc 4
  one slow worker:      torchrun experiments/stilt_mlm.py --mode async --nproc 2 --speeds slow:worker=0,factor=3
  16 virtual workers:   python experiments/stilt_mlm.py --clock virtual --nproc 16 --speeds exponential:1
  your model and text:  torchrun --nproc-per-node 4 experiments/stilt_mlm.py --mode async --model FOLDER_OR_HUB_ID \\
                          --data posts.csv --text-column text --learning-rate 5e-5 --dropout 0.1
"""


def experiment(settings: Settings) -> Experiment:
    from asyncsgd.scripts.pretraining import pretraining

    made = pretraining(settings)
    made.task.check_names()
    return made


SCRIPT = TaskScript(
    "stilt_mlm",
    FLAGS,
    DESCRIPTION,
    EXAMPLES,
    experiment,
    lambda settings, command: open_run_folder("stilt_mlm", settings, command),
    model=lambda settings: settings.model.model,
    before=lambda settings: go_offline(settings.model.model, settings.data.data),
)
run = SCRIPT.run


def main() -> int:
    return run_script(run)


if __name__ == "__main__":
    sys.exit(run_script(run, ends_with_process=True))
