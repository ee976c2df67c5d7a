"""Which learning rates and settings were tried for an arm, and what was chosen."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.study.types import Arm, Study, StudyRun, Trial


@dataclasses.dataclass(frozen=True)
class TrialPoint:
    """One tuning trial."""

    learning_rate: float | None
    settings: tuple[tuple[str, str], ...]
    losses: tuple[float | None, ...]
    """One per tuning seed; None: diverged or failed."""
    seeds: tuple[int, ...]
    score: float | None
    chosen: bool


@dataclasses.dataclass(frozen=True)
class TuningResult:
    """Table 3 and the sensitivity to the learning rate, of one arm."""

    arm: str
    trials: tuple[TrialPoint, ...]
    """Sorted by learning rate."""
    chosen: tuple[tuple[str, str], ...]
    at_edge: bool
    """Whether the chosen learning rate is the smallest or the largest that was tried: the best may lie beyond."""
    num_runs: int


def tuning_results(study: Study) -> tuple[TuningResult, ...]:
    """Table 3: what was tried for every arm, and what was chosen."""
    found = []
    for arm in study.arms:
        runs = study.of("tuning", arm.name)
        trials = arm.trials or _trials_of_runs(runs)
        if not trials:
            continue
        chosen = arm.chosen or (_chosen_by_tests(study, arm) if not arm.trials else None)
        points = [
            TrialPoint(
                learning_rate=rate_of(trial.settings),
                settings=texts_of(trial.settings),
                losses=trial.losses,
                seeds=trial.seeds,
                score=trial.score,
                chosen=chosen is not None and dict(trial.settings) == dict(chosen),
            )
            for trial in trials
        ]
        points = list(dict.fromkeys(points))  # two trials may happen to be the same settings
        points.sort(key=lambda point: (point.learning_rate is None, point.learning_rate or 0.0, point.settings))
        rates = sorted({point.learning_rate for point in points if point.learning_rate is not None})
        taken = {point.learning_rate for point in points if point.chosen}
        found.append(
            TuningResult(
                arm=arm.name,
                trials=tuple(points),
                chosen=() if chosen is None else texts_of(chosen),
                at_edge=len(rates) > 1 and bool(taken & {rates[0], rates[-1]}),
                num_runs=len(runs) or sum(len(trial.seeds) for trial in trials),
            )
        )
    return tuple(found)


def _trials_of_runs(runs: Sequence[StudyRun]) -> tuple[Trial, ...]:
    """The trials as the tuning runs tell them, where the plan does not."""
    by_trial: dict[int | None, list[StudyRun]] = defaultdict(list)
    for run in runs:
        if run.run is not None:
            by_trial[run.trial].append(run)
    trials = []
    for number in sorted(by_trial, key=lambda one: -1 if one is None else one):
        own = by_trial[number]
        losses = tuple(
            run.run.summary.get("final_eval_loss") if run.run is not None and run.run.done else None for run in own
        )
        finite = [loss for loss in losses if loss is not None]
        rate = own[0].run.learning_rate if own[0].run is not None else None
        score = statistics.fmean(finite) if finite and len(finite) == len(losses) else None
        settings = {} if rate is None else {"learning_rate": rate}
        trials.append(Trial(settings, tuple(run.seed for run in own if run.seed is not None), losses, score))
    return tuple(trials)


def _chosen_by_tests(study: Study, arm: Arm) -> dict[str, Any] | None:
    rates = {run.run.learning_rate for run in study.of("test", arm.name) if run.run is not None}
    return {"learning_rate": rates.pop()} if len(rates) == 1 else None


def texts_of(settings: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Those that are set, by name."""
    return tuple(sorted((str(key), str(value)) for key, value in settings.items() if value is not None))


def rate_of(settings: Mapping[str, Any]) -> float | None:
    """The learning rate among settings; None where they say none."""
    rate = settings.get("learning_rate")
    return float(rate) if isinstance(rate, int | float) and not isinstance(rate, bool) else None
