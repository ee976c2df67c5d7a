"""What a study writes beside its runs, and what is read of it: plan.json and analysis.yaml."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from msgspec import Struct

from asyncsgd.studies.config import Alpha, Difference, NamedCondition, PositiveFloat, Settings
from asyncsgd.studies.runs import PlannedRun


class Tried(Struct):
    """What became of a trial of an arm, or of a stage that is tuned."""

    settings: Settings
    seeds: list[int]
    losses: list[float | None]
    """The final loss on each seed; None where the run is not DONE."""
    score: float | None = None
    """The mean over the seeds of what trials are chosen by: the loss, or the score of a labelled task. None: one of
    them is missing."""


def end_of_grid(trials: Iterable[Tried], chosen: Settings | None) -> str:
    """``smallest`` or ``largest`` if the chosen learning rate is that of several which were tried, else empty."""
    rates: set[Any] = {trial.settings.get("learning_rate") for trial in trials}
    rates.discard(None)
    if len(rates) < 2:
        return ""
    ends = {min(rates): "smallest", max(rates): "largest"}
    return ends.get((chosen or {}).get("learning_rate"), "")


class PlannedArm(Struct):
    """An arm, its trials, and the settings that tuning has chosen."""

    name: str
    algorithm: str
    settings: Settings
    num_workers: int = 1
    clock: str = "measured"
    speeds: str | None = None
    chosen: Settings | None = None
    trials: list[Tried] = []


class PlannedStage(Struct):
    """A stage of a chain that has no arms and is tuned: once, or once for each arm on the models of that arm."""

    name: str
    """The stage, or ``stage/arm``."""
    settings: Settings
    chosen: Settings | None = None
    trials: list[Tried] = []


class PlanFile(Struct, kw_only=True):
    """plan.json: every arm and every run, and what is known of them by now."""

    schema: Literal[1] = 1
    study: str
    config_sha256: str | None = None
    base_model: bool = False
    arms: list[PlannedArm]
    stages: list[PlannedStage] = []
    targets: dict[str, float] = {}
    budget_seconds: dict[str, float] = {}
    runs: list[PlannedRun]
    settings: dict[str, Settings] = {}
    """Folder -> all settings of the run there, as soon as they are known; without `model` where the study says what the
    run starts from, as the run's parent or the base model. Older plans have none of these settings."""
    analysis_sha256: str | None = None


class RegisteredQuestion(NamedCondition, frozen=True, kw_only=True):
    """The registered comparison."""

    endpoint: str


class Registration(Struct, kw_only=True):
    """analysis.yaml: what was declared before the test runs; `Analysis` says more."""

    schema: Literal[1] = 1
    study: str = ""
    reference: str
    control: str | None = None
    differences: dict[str, Difference] = {}
    primary: RegisteredQuestion
    alpha: Alpha = 0.05
    margins: dict[str, PositiveFloat] = {}
    margin_reasons: dict[str, str] = {}
    family: list[str] | None = None
    """The arms that Holm's correction counts. None: the file names none, and all are meant."""
    num_seeds: int | None = None
    seeds: list[int] | None = None
    targets: dict[str, float] = {}
    """The target loss of every reference arm."""
    budget_seconds: dict[str, float] = {}
    look_samples: dict[str, int] = {}
    """Reference arm -> the setting `evaluate_at` of the test runs of its group, where the config names none."""
    target_from: str | None = None
    pilots: dict[str, dict[str, float]] = {}
    """Reference arm -> its number of pilots, `runs`, and the medians of their first and lowest losses."""
    config_sha256: str | None = None
