"""What a simulation is asked for: the flags of ``experiments/simulate.py``. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from asyncsgd.settings.flags import yaml_of
from asyncsgd.settings.specs import checked, setting, specs_of
from asyncsgd.settings.yaml_reader import ABOUT_THE_RUN, EXPERIMENT, FORMAT, SETTINGS_FORMAT, SIMULATION


@dataclasses.dataclass(frozen=True)
class SimulationSettings:
    """Written to settings.yaml, and read back by a replay."""

    rule: str = setting("asynchronous", "NAME[:key=value,...]; help lists them")
    workers: int = setting(8, "virtual workers", at_least=1, name="nproc")
    problem: str = setting("quadratic", "NAME[:key=value,...]; help lists them")
    speeds: str = setting("exponential:1", "NAME[:value,key=value,...]; help lists them", aliases=("times",))
    learning_rate: float = setting(0.05, "constant", above=0)
    samples: int | None = setting(None, "gradients, used or not", unset="no limit", at_least=1)
    budget_seconds: float | None = setting(None, "virtual seconds", unset="no limit", above=0, name="seconds")
    evaluations: int = setting(8, "after the first, evenly over the budget", at_least=1)
    network: str | None = setting(None, "bytes=B,worker=RATE,server=RATE, the rates in bytes a second", unset="none")
    churn: str | None = setting(None, "leave:worker=N,seconds=S;join:worker=N,seconds=S;...", unset="all stay")
    seed: int = setting(0, "of problem, samples and times", at_least=0, below=2**32)


def text_of_simulation(settings: SimulationSettings, comment: str) -> str:
    """The settings.yaml of a simulation; `comment` is for the head of the file."""
    values = {name: getattr(settings, spec.field) for name, spec in specs_of(SimulationSettings).items()}
    return yaml_of({"": {FORMAT: SETTINGS_FORMAT, EXPERIMENT: SIMULATION}, "simulation": values}, comment)


def read_simulation(values: Mapping[str, Any]) -> SimulationSettings:
    """The simulation of a settings.yaml.

    Raises:
        UsageError: for a key that it does not have, and for a value of another type or out of bounds.
    """
    return checked(SimulationSettings, **{name: value for name, value in values.items() if name not in ABOUT_THE_RUN})
