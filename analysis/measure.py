"""Reads values off curves: losses at equal samples and seconds, and the evaluations around the target loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame

from analysis.curves import (
    SAME_FREQUENCY,
    Curve,
    bracket,
    curve,
    losses_around,
    shared_position,
    thinned_to_sparsest,
    until_shared,
)
from analysis.pairs import Pairs
from analysis.runs import Columns, Note, RunPair
from analysis.stats import Array, Numbers

BY_RANKS = Note("a diverged run is worse than any other, so the pairs are compared by ranks")
COMPLETE_SHARE = 0.95
"""A run that ends before this share of its planned samples, or of the longest run, is said to end early."""
EVERY_RUN_HAD = "the budget of every run is"
CUT_SHORT = "times are counted to where the first run that missed the target ended, at"
LONGEST_RUN = "times are counted to where the longest run ended, at"
"""Three kinds of the time up to which runs are compared. The note on that time begins with its kind."""
EMPTY = np.array([])
NEVER = (math.inf, math.inf)
"""The ends of what never came: a time of a run that missed its target, a loss of one that diverged."""


def values_of(ours: Numbers, theirs: Numbers, seeds: list[Any], **limits: Any) -> Columns:
    """Fields of a `QuestionRow`: the values of an endpoint in each pair; inf, of a score -inf, of a run that diverged.

    Args:
        ours, theirs: of each pair a number, or the two between which it lies (n x 2), whose middle is then the value.
        limits: other fields, such as notes.
    """
    our_ends = _as_ends(ours)
    their_ends = _as_ends(theirs)
    return {
        "seeds": seeds,
        "n": len(seeds),
        **limits,
        "treatment_values": our_ends.mean(axis=1),
        "treatment_ends": our_ends,
        "reference_values": their_ends.mean(axis=1),
        "reference_ends": their_ends,
    }


def _as_ends(numbers: Numbers) -> Array:
    """The lowest and the highest possible value of each pair (n x 2); equal where the value is known."""
    values = np.asarray(numbers, float)
    if values.ndim == 2:
        return values
    return np.column_stack((values, values))


class Measure:
    """Reads the values of every endpoint off the curves, at positions `x` in "samples" or in "seconds"."""

    def __init__(self, curves: DataFrame) -> None:
        self._frames = dict(iter(curves.groupby("run")))
        self._known: dict[tuple[str, str], Curve] = {}

    def curve(self, run: str, x: str) -> Curve:
        """The curve of a run; empty for a run without an evaluation."""
        if run not in self._frames:
            return EMPTY, EMPTY
        if (run, x) not in self._known:
            self._known[run, x] = curve(self._frames[run], x)
        return self._known[run, x]

    def end(self, run: str, x: str) -> float:
        """The last position at which a run was watched; nan without an evaluation."""
        if run in self._frames:
            return float(self._frames[run][x].max())
        return math.nan

    def crossings(self, runs: Sequence[Any], target: float, x: str = "seconds") -> list[tuple[float, float]]:
        """The positions of the two evaluations between which each run came to the target.

        No run has more evaluations than another: curves are thinned to the sparsest, always with the last evaluation,
        at which a run that stopped at its target_loss had reached it. A run that diverged, or ends above its own first
        loss, has `NEVER`.
        """
        curves = {}
        for run in runs:
            if not (run.diverged or self._ended_higher(run.run)):
                curves[run.run] = self.curve(run.run, x)
        thinned = thinned_to_sparsest(list(curves.values()))
        brackets = {name: bracket(thin, target) for name, thin in zip(curves, thinned, strict=True)}
        return [brackets.get(run.run, NEVER) for run in runs]

    def compared_curves(self, runs: Sequence[Any], x: str) -> dict[str, Curve]:
        """The curves of runs.

        A run that stopped at its target_loss ends at an evaluation that was lucky. Its curve is cut at the last
        evaluation that it shares with the others.
        """
        curves = {run.run: self.curve(run.run, x) for run in runs}
        for run in filter(self.stopped, runs):
            for other in curves.keys() - {run.run}:
                curves[run.run] = until_shared(curves[run.run], self.curve(other, x))
        return curves

    def stopped(self, run: Any) -> bool:
        """Whether a run ended where it was first seen at its target_loss."""
        goal = run.settings.get("target_loss")
        if goal is None or run.diverged:
            return False
        losses = self.curve(run.run, "samples")[1]
        return len(losses) > 0 and bool(losses[-1] <= goal)

    def _ended_higher(self, run: str) -> bool:
        """Whether the last loss of a run is above its first one, or there is none."""
        losses = self.curve(run, "samples")[1]
        return not len(losses) or bool(losses[-1] > losses[0])

    def losses(self, pairs: Pairs, x: str) -> Columns:
        """Losses at the samples that all runs reached, or at the seconds that both runs of a pair did."""
        run_pairs = pairs.run_pairs if x == "samples" else _timed_pairs(pairs)
        seeds = [ours.seed for ours, _ in run_pairs]
        alive_in_pairs = [[run for run in pair if not run.diverged] for pair in run_pairs]
        alive = [run for pair in alive_in_pairs for run in pair]
        if not alive:
            worst = np.full(len(run_pairs), math.inf)
            why_no_test = "every run of both arms diverged" if run_pairs else ""
            return values_of(worst, worst, seeds, why_no_test=why_no_test)
        why_no_test = self._why_ended_early(alive)
        if why_no_test:
            return values_of(EMPTY, EMPTY, [], why_no_test=why_no_test)
        curves: dict[str, Curve] = {}
        for pair in alive_in_pairs:
            curves |= self.compared_curves(pair, x)
        # all runs are compared at the same samples, but the two runs of a pair at seconds of their own
        groups = [alive] if x == "samples" else filter(None, alive_in_pairs)
        positions = []
        losses = {}
        for group in groups:
            # a run ends only between two updates, so runs that end together may be an update apart
            tolerance = max(self._size_of_update(run, x) for run in group)
            position = _common_position([curves[run.run] for run in group], tolerance)
            positions.append(position)
            for run in group:
                losses[run.run] = losses_around(curves[run.run], position, tolerance)
        # pairs x arms x (lowest, highest)
        values = np.array([[losses.get(run.run, NEVER) for run in pair] for pair in run_pairs])
        ends = [float(positions_of_run[-1]) for positions_of_run, _ in curves.values()]
        notes = _notes_on_position(x, positions, min(ends), max(ends), pairs.clock)
        if np.isinf(values).any():
            notes.append(BY_RANKS)
        references = [run for _, run in run_pairs if run.run in curves]
        gained = self._gained(references, values[:, 1].mean(axis=1))  # of each reference the middle of its two losses
        limits: Columns = {"notes": tuple(notes), "gained": gained}
        # unequal ends: the loss lies between two evaluations; two nan: it does not fall between them
        with_gap = [run for run in alive if losses[run.run][0] != losses[run.run][1]]
        if with_gap:
            gap = self._widest_gap(with_gap, x, pairs.clock)
            limits["between"] = gap
            num_rising = sum(math.isnan(losses[run.run][0]) for run in with_gap)
            if num_rising:
                losses_of = f"the loss of {num_rising} of {len(losses)} runs"
                limits["why_no_test"] = f"{losses_of} does not fall between the evaluations around it, {gap}"
        return values_of(values[:, 0], values[:, 1], seeds, **limits)

    def _gained(self, references: Sequence[Any], losses: Array) -> float:
        """By how much the loss of the reference fell from its start, of the runs that have one."""
        finite = losses[np.isfinite(losses)]
        if not len(finite) or not references:
            return math.nan
        starts = [self.curve(run.run, "samples")[1][0] for run in references]
        return float(np.mean(starts) - finite.mean())

    def _size_of_update(self, run: Any, x: str) -> float:
        """The mean samples or seconds of an update of a run; 0 where that is not known."""
        size = self.end(run.run, x) / (run.updates or math.nan)
        return size if math.isfinite(size) else 0.0

    def _widest_gap(self, runs: Sequence[Any], x: str, clock: str) -> str:
        """The widest gap between two evaluations of these runs, in words, and the setting that makes it narrower."""

        def gap_and_count(run: Any) -> tuple[float, int]:
            positions = self.curve(run.run, x)[0]
            return float(np.diff(positions).max(initial=0.0)), len(positions)

        # Of runs with equal gaps the one with the most evaluations is taken. Ten times as many make the gap a tenth.
        run = max(runs, key=gap_and_count)
        gap, count = gap_and_count(run)
        # `evaluations` is refused beside `evaluate_every`
        setting = f"evaluations={10 * (count - 1)}"
        every = run.settings.get("evaluate_every")
        if every:
            setting = f"evaluate_every={_tenth_of(str(every))}"
        unit = "samples" if x == "samples" else unit_of_seconds(clock)
        return f"evaluated every {gap:.3g} {unit} (type {setting} for a narrower answer)"

    def _why_ended_early(self, alive: Sequence[Any]) -> str:
        """Why losses are refused: a run ended before the samples that were planned for its arm.

        At equal samples all runs are compared at the samples that every run reached, so one short run would move all
        comparisons. At equal seconds it would move its own pair to an earlier part of training than the others.
        """
        planned: dict[str, float] = {}
        for run in alive:
            planned[run.arm] = max(planned.get(run.arm, 0.0), _planned_samples(run))
        for run in alive:
            end = self.end(run.run, "samples")
            if end < COMPLETE_SHARE * planned[run.arm]:
                return f"refused: {run.run} ended at {end:g} of the {planned[run.arm]:g} samples of its arm"
        return ""

    def times(self, pairs: Pairs, target: float) -> Columns:
        """Seconds to the target, capped at the budget, which is of one of three kinds (`_budget`)."""
        run_pairs = _timed_pairs(pairs)
        if not run_pairs:
            return values_of(EMPTY, EMPTY, [], brackets=EMPTY.reshape(0, 2, 2))
        # pairs x arms x (the last evaluation above the target, the first that holds it)
        brackets = np.array([self.crossings(pair, target) for pair in run_pairs])
        times = brackets[:, :, 1]
        runs = [run for pair in run_pairs for run in pair]
        ends = {run.run: self.end(run.run, "seconds") for run in runs}
        budget, kind = self._budget(runs, times.ravel(), ends)
        budget_in_words = f"{budget:.4g} {unit_of_seconds(pairs.clock)}"
        why_no_test = ""
        if times.min() > budget:
            when = _when_nobody_reached_it(pairs, times, budget_in_words, kind)
            why_no_test = f"no run reached the target of {target:.3g}{when}"
        is_in_time = times <= budget
        is_later = np.isfinite(times) & ~is_in_time
        notes = [Note(f"{kind} {budget_in_words}", "budget"), *self._notes_on_risen(run_pairs, is_in_time, target)]
        capped = np.minimum(brackets, budget)
        limits: Columns = {
            "longest": max(ends.values()),
            "brackets": brackets,
            "reached": tuple(is_in_time.sum(axis=0).tolist()),
            "later": tuple(is_later.sum(axis=0).tolist()),
            "notes": tuple(notes),
            "why_no_test": why_no_test,
            "budget": budget,
            "common": kind == EVERY_RUN_HAD,
            "cut_short": kind == CUT_SHORT,
            "caveats": self._caveats_on_stopped(run_pairs),
        }
        lies_between = (capped[:, :, 0] < capped[:, :, 1]).ravel()
        with_gap = [run for run, is_between in zip(runs, lies_between, strict=True) if is_between]
        if with_gap:
            limits["between"] = self._widest_gap(with_gap, "seconds", pairs.clock)
        seeds = [ours.seed for ours, _ in run_pairs]
        return values_of(capped[:, 0], capped[:, 1], seeds, **limits)

    def _caveats_on_stopped(self, run_pairs: Sequence[RunPair]) -> tuple[str, ...]:
        """A caveat where runs stopped at a target for which one arm looked more often: it saw a low loss sooner."""
        if not any(self.stopped(run) for pair in run_pairs for run in pair):
            return ()
        steps = []
        for runs in zip(*run_pairs, strict=True):
            spacings = [float(np.diff(self.curve(run.run, "seconds")[0]).mean()) for run in runs]
            steps.append((float(np.median(spacings)), runs[0].arm))
        (step, often_evaluated), (longer_step, seldom_evaluated) = sorted(steps)
        if not longer_step > SAME_FREQUENCY * step:
            return ()
        more = f"{often_evaluated} was evaluated {longer_step / step:.3g} times as often as {seldom_evaluated}"
        return (f"Runs stopped where they were first seen at their target, and {more}, which alone makes it sooner.",)

    def _notes_on_risen(self, run_pairs: Sequence[RunPair], reached: NDArray[np.bool], target: float) -> Iterator[Note]:
        """How many runs of each arm were at the target and do not hold it at their end."""
        for side, runs in enumerate(zip(*run_pairs, strict=True)):
            count = 0
            for run, has_reached in zip(runs, reached[:, side], strict=True):
                losses = self.curve(run.run, "seconds")[1]
                if has_reached and len(losses) and losses[-1] > target:
                    count += 1
            are = "were at the target and are above it at their end"
            if count == 1:
                are = "was at the target and is above it at its end"
            if count:
                yield Note(f"{count} of {len(runs)} runs of {runs[0].arm} {are}", "risen")

    def _budget(self, runs: Sequence[Any], times: Array, ends: Mapping[str, float]) -> tuple[float, str]:
        """The second at which times are capped, and its kind.

        `EVERY_RUN_HAD` is what all runs were given. `CUT_SHORT` is where the first run that missed the target ended. It
        is taken where the runs were not given the same, or where a run that missed the target ended before what all
        were given. It is 0 where such a run was evaluated at its start alone: whether it reached the target is not
        known, so no pair shows anything. `LONGEST_RUN` is where the last run ended, if only runs that diverged
        missed the target; only their times are capped then.
        """
        given = {run.settings.get("seconds") for run in runs}
        missed = []
        for run, time in zip(runs, times, strict=True):
            if math.isinf(time) and not run.diverged:
                missed.append(ends[run.run])
        budget = given.pop() if len(given) == 1 else None
        if budget and all(end >= budget for end in missed):
            return float(budget), EVERY_RUN_HAD
        if missed:
            return min(missed), CUT_SHORT
        return max(ends.values()), LONGEST_RUN


def _timed_pairs(pairs: Pairs) -> list[RunPair]:
    """The pairs whose seconds are compared."""
    return [pair for pair in pairs.run_pairs if pair[0].seed not in pairs.why_untimed]


def _common_position(curves: Sequence[Curve], tolerance: float) -> float:
    """Where the losses of curves are read: at the last evaluation that all share, else where the first curve ends."""
    end = min(float(x[-1]) for x, _ in curves)
    position = shared_position(curves, end, tolerance)
    return end if position is None else position


def _tenth_of(every: str) -> str:
    """A tenth of the setting `evaluate_every`, which is a whole number of samples or any number of epochs.

    >>> [_tenth_of(every) for every in ("1000", "25", "1epoch", ".5epoch")]
    ['100', '3', '0.1epoch', '0.05epoch']
    """
    number, is_epochs, _ = every.partition("epoch")
    tenth = float(number) / 10
    if is_epochs:
        return f"{tenth:g}epoch"
    return f"{math.ceil(tenth)}"


def unit_of_seconds(clock: str) -> str:
    return "s" if clock == "measured" else "virtual s"


def _when_nobody_reached_it(pairs: Pairs, times: Array, budget: str, kind: str) -> str:
    """The budget within which no run reached the target, and the number of runs that did so later."""
    if kind == EVERY_RUN_HAD:
        return f" within the {budget} of every run"
    if not np.isfinite(times).any():
        return ""
    ours, theirs = np.isfinite(times).sum(axis=0)
    later = f"{pairs.treatment} {ours} of {len(times)}, {pairs.reference} {theirs} of {len(times)}"
    return f" before {budget}, when the first run that missed it ended (later: {later})"


def _notes_on_position(
    x: str, positions: Sequence[float], earliest_end: float, latest_end: float, clock: str
) -> list[Note]:
    """A note on where losses are compared; none where that is near the end of all runs."""
    least = min(positions)
    if least >= COMPLETE_SHARE * latest_end:
        return []
    if x == "samples":
        why = "where the first run ended" if least >= earliest_end else "the last evaluation that all runs share"
        return [Note(f"compared at {least:g} samples, {why}; the last ended at {latest_end:g}")]
    # one number where both are written alike
    span = " to ".join(dict.fromkeys((f"{least:.4g}", f"{max(positions):.4g}")))
    why = "where the shorter run of each pair ended or both have an evaluation"
    return [Note(f"compared at {span} {unit_of_seconds(clock)}, {why}; the longest is {latest_end:.4g}")]


def _planned_samples(run: Any) -> float:
    """The planned samples of a run that ends by nothing else; 0 where something else can end it."""
    if any(run.settings.get(key) for key in ("seconds", "target_loss", "patience")):
        return 0.0
    return float(run.settings.get("samples") or 0)
