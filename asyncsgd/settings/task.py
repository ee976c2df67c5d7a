"""The settings of a training: those that every one has, and the fields of its task's class."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator
from typing import Any

from asyncsgd.settings.flags import Flags
from asyncsgd.settings.groups import SGD_LEARNING_RATE, Budget, Common, Defaults, Steps, common_contradictions
from asyncsgd.settings.specs import group


def _with_defaults(kind: type[Any], defaults: Defaults, **unset: str) -> type[Any]:
    """A group of settings with the defaults of a task; those in `unset` are filled in by `Common`."""
    hints = typing.get_type_hints(kind)
    fields = []
    for field in dataclasses.fields(kind):
        name = field.name
        metadata = {**field.metadata}
        default = field.default
        if name in unset:
            metadata["unset"] = unset[name]
        else:
            default = getattr(defaults, name, default)
        fields.append((name, hints[name], dataclasses.field(default=default, metadata=metadata)))
    return dataclasses.make_dataclass(f"{kind.__name__}OfTask", fields, bases=(kind,), frozen=True)


def contradictions(settings: Any) -> Iterator[str]:
    """Yield what is wrong between settings that are each within bounds, those of a task among them."""
    target = settings.budget.target_loss
    if target is not None and target <= 0 and settings.task.loss_unit() == "nats":
        yield f"--target-loss must be more than 0, as a cross entropy is, got {target}"
    yield from common_contradictions(settings, settings.task.batch_size)


@functools.cache
def task_flags(kind: Any) -> Flags:
    """Flags of every training and of the fields of a task, which is a frozen dataclass.

    Raises:
        UsageError: if a field has the name of a setting that every training has.
    """
    defaults: Defaults = kind.defaults
    samples = f"{defaults.samples}, or no limit with --seconds" if defaults.samples is not None else "as --epochs says"
    epochs = f"{defaults.epochs:g}, or as --samples says" if defaults.epochs is not None else "as --samples says"
    otherwise = ", or constant when --samples sets no limit" if defaults.schedule != "constant" else ""
    rates = f"{defaults.learning_rate:g} for adamw, {SGD_LEARNING_RATE:g} for sgd"
    budget = _with_defaults(Budget, defaults, samples=samples, epochs=epochs)
    steps = _with_defaults(Steps, defaults, learning_rate=rates, schedule=defaults.schedule + otherwise)
    fields: list[Any] = [
        ("task", kind, group(kind, f"task: {kind.name}")),
        ("budget", budget, group(budget, "budget")),
        ("optimization", steps, group(steps, "optimizer")),
    ]
    made = dataclasses.make_dataclass(
        f"{kind.__name__}Settings", fields, bases=(Common,), namespace={"defaults": defaults}, frozen=True
    )
    flags = Flags(made, contradictions, kind.name, kind.__qualname__)
    _ = flags.specs  # refuses
    return flags
