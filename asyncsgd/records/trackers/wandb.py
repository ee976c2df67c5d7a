"""Weights & Biases: a run of its service, or offline in the run folder."""

from __future__ import annotations

import os
from collections.abc import Sequence

from asyncsgd.records.events import DONE
from asyncsgd.records.trackers.base import PROJECT, Identity, Point

LONGEST_TAG = 64

INIT_SECONDS = 15.0
UPLOAD_SECONDS = 8.0
"""Less than a run waits for a tracker. By default W&B waits without end, and keeps the process until then; what it has
not sent in this time stays on the disk for ``wandb sync``.
"""

UNNAMED = "-"
"""In the place of the host's name, which it would find out itself."""


class WandB:
    """Writes below ``RUN_DIR/wandb``; offline, unless the user has set WANDB_MODE.

    It is told nothing of the host, the user, the code or git, as the run folder does not hold them either.
    """

    def __init__(self, identity: Identity) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=identity.name,
            group=identity.group,
            tags=[tag[:LONGEST_TAG] for tag in identity.tags.values()],
            config={**identity.settings, **identity.tags},
            dir=str(identity.folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(
                console="off",
                host=UNNAMED,
                init_timeout=INIT_SECONDS,
                finish_timeout=UPLOAD_SECONDS,
                finish_timeout_raises=True,
                silent=True,
                reinit="create_new",
                disable_code=True,
                disable_git=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
            ),
        )
        self._run.define_metric("*", step_metric="num_samples")

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({"num_samples": point.num_samples, **point.values})

    def close(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == DONE else 1)
