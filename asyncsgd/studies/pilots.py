"""What pilots fix before the test runs: the target loss, and the seconds and samples of the test runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from asyncsgd.errors import RunError
from asyncsgd.records.events import DONE, FINISHED, read_events
from asyncsgd.run.choose_folder import read_summary
from asyncsgd.studies.arms import Arm
from asyncsgd.studies.config import Analysis, Config, GivenSettings

SAFE_SHARE = 0.9
"""Test runs are taken to make at least this share of the samples that the slowest pilot would make in their seconds."""


class Targets(NamedTuple):
    """The target losses of a study, and how they were found."""

    losses: dict[str, float]
    """Reference arm -> its target loss."""
    origin: str | None = None
    """How the losses were found, in words; None if there are none."""
    improvements: Mapping[str, dict[str, float]] = {}
    """How far the pilots of each reference arm fell, as `Registration.pilots` has it."""


class Pilots(NamedTuple):
    """The runs that fix the target and the budget of a reference arm: its pilot runs, or in a study without pilots the
    tuning runs of its chosen trial.
    """

    config: Config
    out: Path
    """The folder of the study."""
    chosen: Mapping[str, GivenSettings]
    """Tuning target -> its chosen trial, as far as it is known by now."""

    def folders_of(self, arm: Arm) -> list[Path]:
        """The folders of the pilots of a reference arm; none while its trial is not chosen."""
        config = self.config
        if config.pilots:
            return [self.out / f"pilot/{arm.name}/s{seed}" for seed in config.pilots]
        if arm.name not in self.chosen:
            return []
        number = arm.trials.index(self.chosen[arm.name])
        return [self.out / f"tuning/{arm.name}/t{number}-s{seed}" for seed in config.tuning.seeds]

    def budget_of(self, arm: Arm) -> tuple[float, int] | None:
        """The budget of the test runs in seconds, and the samples after which they evaluate once more.

        The seconds are the median of what the pilots took. The samples are `SAFE_SHARE` of what the slowest pilot would
        make in that time. None: a pilot has not ended, or all have diverged.
        """
        summaries = [read_summary(folder) for folder in self.folders_of(arm)]
        done = [summary for summary in summaries if summary.get("status") == DONE]
        have_ended = all(summary.get("status") in FINISHED for summary in summaries)
        if not done or not have_ended:
            return None
        seconds = statistics.median(summary["train_seconds"] for summary in done)
        slowest = min(summary["num_samples"] / summary["train_seconds"] for summary in done)
        return seconds, max(1, int(SAFE_SHARE * slowest * seconds))

    def targets_of(self, analysis: Analysis, arms: list[Arm]) -> Targets:
        """The target loss of every one of the reference arms.

        Raises:
            RunError: if all pilots of an arm have diverged.
        """
        config = self.config
        if analysis.target_loss is not None:
            return Targets({arm.name: analysis.target_loss for arm in arms}, "given in the config")
        number = len(config.pilots or config.tuning.seeds)
        if not number:
            return Targets({})
        losses = {}
        improvements = {}
        num_diverged = 0
        for arm in arms:
            curves = [_losses_in(folder) for folder in self.folders_of(arm)]
            finite = [curve for curve in curves if curve]
            if not finite:
                raise RunError(f"every run of {arm.name} that would fix the target diverged; lower its learning rates")
            num_diverged += len(curves) - len(finite)
            first = statistics.median(curve[0] for curve in finite)
            best = statistics.median(map(min, finite))
            improvements[arm.name] = {"runs": len(finite), "first_loss": round(first, 6), "best_loss": round(best, 6)}
            losses[arm.name] = round(first - analysis.target_share * (first - best), 6)
        trial = "its chosen trial, " if arms[0].trials else ""
        seeds = "seeds of their own" if config.pilots else "tuning seeds"
        runs = "1 pilot run" if number == 1 else f"{number} pilot runs"
        origin = (
            f"{100 * analysis.target_share:g} % of the median improvement of {runs} of the reference ({trial}{seeds})"
        )
        if num_diverged:
            origin += f"; {num_diverged} that diverged left out"
        return Targets(losses, origin, improvements)


def _losses_in(folder: Path) -> list[float]:
    """The finite losses of the evaluations of a run, in order; none of a run that is not DONE."""
    if read_summary(folder).get("status") != DONE:
        return []
    losses = []
    for record in read_events(folder / "events.jsonl"):
        if record.get("kind") == "evaluate" and record["loss"] is not None:
            losses.append(record["loss"])
    return losses
