"""Every tracker that a run can be shown in, by the name that ``--track`` takes. Standard library only.

A tracker's package is imported where it is used, and nowhere before."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncsgd.errors import UsageError, nearest
from asyncsgd.records.trackers.base import Identity, Tracker
from asyncsgd.records.trackers.mlflow import MLflow
from asyncsgd.records.trackers.tensorboard import TensorBoard
from asyncsgd.records.trackers.trackio import Trackio
from asyncsgd.records.trackers.wandb import WandB

ALL: Mapping[str, Callable[[Identity], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def names_in(text: str | None) -> tuple[str, ...]:
    """The trackers that ``--track`` names, separated by commas.

    >>> names_in("tensorboard,wandb"), names_in(None)
    (('tensorboard', 'wandb'), ())

    Raises:
        UsageError: for a name that is no tracker's, or is there twice.
    """
    names = () if text is None else tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in ALL:
            raise UsageError(f"--track must be one of {', '.join(ALL)}, got {name!r}{nearest(name, ALL)}")
        if names.count(name) > 1:
            raise UsageError(f"--track names {name} twice; name it once")
    return names
