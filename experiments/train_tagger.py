"""Tag the words of sentences: named entities, slots, whatever has a tag per word in the BIO scheme.

    python experiments/train_tagger.py --data ../shared/data/matsci_ner_sofc

Fine-tunes the encoder of a run folder of stilt_mlm.py, a saved model, a name on the Hub, or random weights, in any
mode, and scores spans: precision, recall and F1. ``--help`` lists the settings."""

from __future__ import annotations

import sys
from typing import Any

from asyncsgd.runtime.ranks import go_offline
from asyncsgd.scripts.base import run_script
from asyncsgd.scripts.task import task_script
from asyncsgd.tasks.token_classification import TokenClassification

EXAMPLES = """\
  one process:      python experiments/train_tagger.py --mode single --init-from base/tiny --data FOLDER
  asynchronously:   python experiments/train_tagger.py --mode async --nproc 2 --init-from base/tiny --data FOLDER
  other columns:    python experiments/train_tagger.py --data FOLDER --tokens-column words --tags-column slot_tags
"""


def before(settings: Any) -> None:
    go_offline(settings.task.init_from, settings.task.data_name or "")


SCRIPT = task_script(
    TokenClassification,
    "train_tagger",
    description="Tag the words of sentences, in one process or any mode; spans are scored.",
    examples=EXAMPLES,
    model="init_from",
    before=before,
)

if __name__ == "__main__":
    sys.exit(run_script(SCRIPT.run, ends_with_process=True))
