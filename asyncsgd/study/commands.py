"""The command that makes a run, from its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncsgd.study.arms import FLAGS


def flags_of(settings: Any) -> list[str]:
    """The flags of experiments/stilt_mlm.py that make `settings`; what has its default is left out.

    >>> flags_of(FLAGS.make({"mode": "sync", "nproc": 4}))
    ['--mode', 'sync', '--nproc', '4']
    """
    flags = []
    default = FLAGS.flatten(FLAGS.make({}))
    values = FLAGS.flatten(settings)
    # Defaults that follow from other settings, so that a value equal to the usual default may have to be said.
    open_ended = {"samples": "seconds", "schedule": "seconds", "learning_rate": "optimizer"}
    for name, value in values.items():
        decided_by = open_ended.get(name, name)
        differs = value != default[name] or values[decided_by] != default[decided_by]
        if differs and value is not None:
            flags += _flag(name, value)
    return flags


def flags_of_values(values: Mapping[str, Any]) -> list[str]:
    """Values by name as flags, without looking at what they mean.

    >>> flags_of_values({"model": "tiny", "class_weights": True, "eval_data": None})
    ['--model', 'tiny', '--class-weights']
    """
    return [word for name, value in values.items() if value is not None for word in _flag(name, value)]


def _flag(name: str, value: object) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag] if value else []  # a truth value is a flag without a value
    return [flag, str(value)]
