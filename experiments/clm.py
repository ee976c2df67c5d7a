"""Causal language modelling on a text, synchronously or asynchronously.

    python experiments/clm.py --mode async --nproc 2

``--help`` lists the settings."""

from __future__ import annotations

import sys
from typing import Any

from asyncsgd.runtime.ranks import go_offline
from asyncsgd.scripts.base import run_script
from asyncsgd.scripts.task import task_script
from asyncsgd.tasks.causal_lm import CausalLM

EXAMPLES = """\
  laptop, no network:   torchrun experiments/clm.py --mode async --nproc 2
  compare with:         torchrun experiments/clm.py --mode sync --nproc 2
  your model and text:  python experiments/clm.py --model FOLDER_OR_HUB_ID --data posts.csv --text-column text
"""


def before(settings: Any) -> None:
    go_offline(settings.task.model_name, settings.task.data_name)


SCRIPT = task_script(
    CausalLM,
    "clm",
    description="Causal language modelling on a text, synchronously or asynchronously.",
    examples=EXAMPLES,
    model="model_name",
    before=before,
)

if __name__ == "__main__":
    sys.exit(run_script(SCRIPT.run, ends_with_process=True))
