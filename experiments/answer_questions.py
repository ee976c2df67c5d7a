"""Answer questions with a span of a text, or say that the text has no answer, as in SQuAD 2.0.

    python experiments/answer_questions.py --data ../shared/data/squad_v2/train_part.parquet \\
        --eval-data ../shared/data/squad_v2/dev_a.parquet+../shared/data/squad_v2/dev_b.parquet

Fine-tunes the encoder of a run folder of stilt_mlm.py, a saved model, a name on the Hub, or random weights, in any
mode, and scores answers: exact match and F1. ``--help`` lists the settings."""

from __future__ import annotations

import sys
from typing import Any

from asyncsgd.runtime.ranks import go_offline
from asyncsgd.scripts.base import run_script
from asyncsgd.scripts.task import task_script
from asyncsgd.tasks.question_answering import QuestionAnswering

EXAMPLES = """\
  one process:      python experiments/answer_questions.py --mode single --init-from base/tiny --data FOLDER
  asynchronously:   python experiments/answer_questions.py --mode async --nproc 2 --init-from base/tiny --data FOLDER
  SQuAD's files:    python experiments/answer_questions.py --data train-v2.0.json --eval-data dev-v2.0.json \\
                        --predictions predictions
"""


def before(settings: Any) -> None:
    go_offline(settings.task.init_from, f"{settings.task.data_name}+{settings.task.eval_data}")


SCRIPT = task_script(
    QuestionAnswering,
    "answer_questions",
    description="Answer questions with spans of texts, in one process or any mode; exact match and F1 are scored.",
    examples=EXAMPLES,
    model="init_from",
    before=before,
)

if __name__ == "__main__":
    sys.exit(run_script(SCRIPT.run, ends_with_process=True))
