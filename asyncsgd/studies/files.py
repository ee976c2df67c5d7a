"""What a study writes beside its runs, and what is read of it: plan.json and analysis.yaml."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from asyncsgd.studies.config import Alpha, Difference, NamedCondition, PositiveFloat
from asyncsgd.studies.runs import PlannedRun


class Tried(Struct):
    """A trial of an arm, or of a stage that is tuned: its settings, and the final loss on each seed, None where there
    is none. `score` is the mean of what trials are chosen by: the loss, or the score of a labelled task.
    """

    settings: dict[str, Any]
    seeds: list[int]
    losses: list[float | None]
    score: float | None = None


class PlannedArm(Struct):
    """An arm, its trials, and the settings that tuning has chosen."""

    name: str
    algorithm: str
    settings: dict[str, Any]
    num_workers: int = 1
    clock: str = "measured"
    speeds: str | None = None
    chosen: dict[str, Any] | None = None
    trials: list[Tried] = []


class PlannedStage(Struct):
    """A stage of a chain without arms that is tuned, on the models of an arm where each is tuned by itself."""

    name: str
    settings: dict[str, Any]
    chosen: dict[str, Any] | None = None
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
    settings: dict[str, dict[str, Any]] = {}
    """Folder -> all settings of the run there, as soon as they are known. Older plans have none."""
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
    """Arms of the primary family; None where the file names none, and means all."""
    num_seeds: int | None = None
    seeds: list[int] | None = None
    targets: dict[str, float] = {}
    """The target loss of every reference arm."""
    budget_seconds: dict[str, float] = {}
    look_samples: dict[str, int] = {}
    """Reference arm -> the setting `evaluate_at` of the test runs of its group, which `budget_seconds` ends."""
    target_from: str | None = None
    pilots: dict[str, dict[str, float]] = {}
    """Reference arm -> its number of pilots, `runs`, and the medians of their first and lowest losses."""
    config_sha256: str | None = None
