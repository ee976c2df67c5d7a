"""The script ``experiments/train_tagger.py``, which a study can judge its models by too."""

from __future__ import annotations

from typing import Any

from asyncsgd.runtime.ranks import go_offline
from asyncsgd.scripts.task import task_script
from asyncsgd.tasks.token_classification import TokenClassification

EXAMPLES = """\
  one process:      python experiments/train_tagger.py --mode single --init-from base/tiny --data FOLDER
  asynchronously:   python experiments/train_tagger.py --mode async --nproc 2 --init-from base/tiny --data FOLDER
  other columns:    python experiments/train_tagger.py --data FOLDER --tokens-column words --tags-column slot_tags
"""


def _before(settings: Any) -> None:
    go_offline(settings.task.init_from, settings.task.data_name or "")


TAGGER = task_script(
    TokenClassification,
    "train_tagger",
    description="Tag the words of sentences, in one process or any mode; spans are scored.",
    examples=EXAMPLES,
    model="init_from",
    before=_before,
)
