"""Where the model that is trained further comes from: a run folder, a saved model, a shape, a name on the Hub.

Torch is imported when a model is hashed, not before."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncsgd.errors import UsageError, nearest
from asyncsgd.records.events import DONE
from asyncsgd.records.run_folder import BEST_MODEL, LAST_MODEL
from asyncsgd.settings.groups import TRAINED_HERE
from asyncsgd.settings.yaml_reader import read_of_run, read_settings

if TYPE_CHECKING:
    from torch import nn


class Origin(NamedTuple):
    """Where the model that is trained further comes from."""

    model: str
    """What `asyncsgd.tasks.models.build_model` takes."""
    from_scratch: bool
    """Whether the model has no pretraining behind it, or pretraining from random weights. Such a run is no STILT."""
    parent: Mapping[str, Any] | None = None
    """The run before: its folder's name, what tells it from others, and its own parent where it has one; None for a
    model that is no run."""


def read_origin(model: str, tasks: Sequence[str] = ("masked_lm",), built_in: Sequence[str] = TRAINED_HERE) -> Origin:
    """Understand ``--model``: a run folder, a saved model, a shape with random weights, or a name on the Hub.

    Args:
        tasks: those that a run named by `model` may be of.
        built_in: the shapes.

    Raises:
        UsageError: if there is a folder that is none of these, or a run that has not ended well.

    >>> read_origin("tiny")
    Origin(model='tiny', from_scratch=True, parent=None)
    """
    if model in built_in:
        return Origin(model, True)
    folder = Path(os.path.expanduser(model))  # a YAML file has no shell to do it
    if (folder / "settings.yaml").is_file():
        return _run_origin(folder, tasks, LAST_MODEL)
    if folder.name == BEST_MODEL and (folder.parent / "settings.yaml").is_file():
        return _run_origin(folder.parent, tasks, BEST_MODEL)
    if (folder / "config.json").is_file():
        return Origin(str(folder), False)
    if folder.is_dir():
        raise UsageError(f"--model {model} is neither a run folder (settings.yaml) nor a saved model (config.json)")
    if model.startswith((".", "~", os.sep)) or model.count("/") > 1 or folder.exists():
        raise UsageError(
            f"--model {model}: no such folder or model; built in are {', '.join(built_in)}{nearest(model, built_in)}"
        )
    return Origin(model, False)


def _run_origin(folder: Path, tasks: Sequence[str], name: str) -> Origin:
    """Of a run's model, in the folder called `name`."""
    summary = read_of_run(folder, "summary.json")
    settings = read_settings(folder)
    if (task := summary.get("task", tasks[0])) not in tasks:
        raise UsageError(f"--model {folder} is a run of the task {task}; name one of {', '.join(tasks)}")
    if (status := summary.get("status")) != DONE:
        raise UsageError(
            f"--model {folder}: the run is {status}, not DONE; run it again, or type its model, {folder / LAST_MODEL}"
        )
    if not (folder / name / "config.json").is_file():
        raise UsageError(f"--model {folder}: the run folder has no {name}/; run it again, it was not kept")
    model_of = summary if name == LAST_MODEL else summary.get("best") or {}
    parent = {
        "run": Path(os.path.abspath(folder)).name,
        **{key: summary.get(key) for key in ("mode", "rule", "num_workers", "seed", "clock")},
        "learning_rate": settings.get("learning_rate"),
        "parameters_sha256": model_of.get("parameters_sha256"),
    }
    if task != "masked_lm":
        parent |= {"task": task, "parent": summary.get("parent")}
    from_scratch = summary.get("from_scratch", settings.get("model") in TRAINED_HERE)
    return Origin(str(folder / name), bool(from_scratch), parent)


def hash_of(model: nn.Module, origin: Origin) -> str:
    """The hash of the model that training starts from; it must be the one that its run wrote down.

    Raises:
        UsageError: if it is another one.
    """
    from asyncsgd.core.flat import FlatModel, parameters_sha256

    flat = FlatModel(model)
    sha256 = parameters_sha256(flat.layout, flat.parameters)
    recorded = (origin.parent or {}).get("parameters_sha256")
    if recorded not in (None, sha256):
        raise UsageError(
            f"{origin.model} is not the model that was saved there, whose parameters had the sha256 {recorded}; run "
            f"its pretraining again"
        )
    return sha256
