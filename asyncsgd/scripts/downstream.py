"""How a study's models are fine-tuned: experiment and run folder of each script that a study may use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncsgd.records.run_folder import RunFolder
from asyncsgd.scripts.run_folder import open_finetune_folder
from asyncsgd.scripts.tagging import TAGGER

if TYPE_CHECKING:
    from asyncsgd.experiment import Experiment


def experiment_of(script: str, settings: Any) -> Experiment:
    """What the settings of a script ask for."""
    if script == TAGGER.name:
        return TAGGER.experiment(settings)
    from asyncsgd.scripts.finetuning import finetuning

    return finetuning(settings)


def open_folder_of(script: str, settings: Any, command: str) -> RunFolder:
    """The run's folder, new or at its last checkpoint."""
    opened = TAGGER.folder if script == TAGGER.name else open_finetune_folder
    return opened(settings, command)
