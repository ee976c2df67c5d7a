"""Functions of the user's own that look at a run at its evaluations, add metrics, and may end it."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from asyncsgd.core.flat import FlatModel
from asyncsgd.core.loop import CallbackAnswer
from asyncsgd.errors import UsageError
from asyncsgd.records.events import Evaluation
from asyncsgd.run.run import Run, device_of_worker
from asyncsgd.tasks.models import generators_restored


@dataclasses.dataclass
class Look:
    """What a callback is given at an evaluation."""

    evaluation: Evaluation
    """The record: loss, metrics, version, samples and seconds."""
    model: nn.Module
    """A copy of the evaluated model, in evaluation mode; it may be kept and changed, and the run is not touched."""
    reason: str | None = dataclasses.field(default=None, init=False)
    """Why the run is to end; None: it is not."""

    def stop(self, reason: str = "") -> None:
        """End the run with this evaluation. Its status is DONE; `stopped_early` of the summary has the callback's name
        and the reason.
        """
        self.reason = reason


Callback = Callable[[Look], Mapping[str, float] | None]
"""A function that is called at each evaluation. Numbers that it returns by name are metrics of that evaluation, beside
those of the task."""


class Callbacks:
    """Calls callbacks one after the other, each with a copy of the evaluated model for itself.

    An exception of a callback ends the run at once if it comes at the first evaluation. If it comes later, its metrics
    of that evaluation are lost, and the summary has a `score_error`, as for a mistake in a task's `metrics`. The
    default generators are afterwards as they were before.

    Args:
        run: the run, prepared.
        callbacks: the callbacks, which `check_callbacks` has let pass.
    """

    def __init__(self, run: Run, callbacks: Sequence[Callback]) -> None:
        self._run = run
        self._callbacks = callbacks
        self._device = torch.device(device_of_worker(run.device, 0))
        self._flat: FlatModel | None = None

    def __call__(self, evaluation: Evaluation, parameters: Tensor, statistics: Tensor | None) -> CallbackAnswer:
        """Show the callbacks an evaluation, and return what they answer.

        Args:
            parameters: the parameters that were evaluated, `(P,)`.
            statistics: the running statistics that were evaluated, `(S,)`, of a model that has some.
        """
        metrics: dict[str, float | None] = {}
        stopped_by: dict[str, str] | None = None
        error: str | None = None
        for callback in self._callbacks:
            try:
                look = Look(evaluation, self._model(parameters, statistics))
                with generators_restored(self._device):
                    said = callback(look)
                own = _metrics_in(said)
                for name in own.keys() & (metrics.keys() | evaluation.metrics.keys()):
                    raise ValueError(f"there is a metric {name!r} already; give it another name")
            except Exception as mistake:
                error = error or f"callback {name_of(callback)}: {type(mistake).__name__}: {mistake}"
                continue
            metrics |= own
            if look.reason is not None and stopped_by is None:
                stopped_by = {"by": name_of(callback), "reason": look.reason}
        return CallbackAnswer(metrics, stopped_by, error)

    def _model(self, parameters: Tensor, statistics: Tensor | None) -> nn.Module:
        """A copy of the evaluated model. No callback sees the one that is copied, whose tensors lie in one vector."""
        with torch.no_grad():
            if self._flat is None:
                self._flat = self._run.flat(device=self._device)
                self._flat.release_gradients()  # they would be copied too
            flat = self._flat
            flat.parameters.copy_(parameters)
            if flat.statistics is not None and statistics is not None:
                flat.statistics.put(statistics)
            try:
                return copy.deepcopy(flat.model).eval()
            except Exception:  # it holds what cannot be copied, such as a lock: hand it out, and make another next time
                self._flat = None
                return flat.model.eval()


def check_callbacks(callbacks: Any) -> None:
    """Refuse what is no sequence of functions.

    Raises:
        UsageError: naming it.
    """
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise UsageError(f"callbacks must be a list of functions, got {callbacks!r}; give callbacks=[look]")
    for callback in callbacks:
        if not callable(callback):
            raise UsageError(f"a callback must be a function of what it is to look at, got {callback!r}")


def name_of(callback: Callback) -> str:
    """What a record calls a callback: its name, or that of its class."""
    named: Any = callback if hasattr(callback, "__qualname__") else type(callback)
    return f"{named.__module__}:{named.__qualname__}"


def _metrics_in(said: Any) -> dict[str, float | None]:
    """The numbers that a callback has returned; what is not finite is None, as in metrics of a task.

    Raises:
        TypeError: if it has returned something else.
    """
    if said is None:
        return {}
    if not isinstance(said, Mapping):
        raise TypeError(f"it must return None or numbers by name, such as {{'norm': 1.5}}, got {said!r}")
    metrics: dict[str, float | None] = {}
    for name, value in said.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(name, str) or not isinstance(value, Real) or isinstance(value, bool):
            raise TypeError(f"its {name!r} is {value!r}, which is no number")
        number = float(value)
        metrics[name] = number if math.isfinite(number) else None
    return metrics
