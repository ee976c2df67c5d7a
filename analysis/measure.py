"""Reads values off curves: losses at equal samples and seconds, and between which looks a run came to a target."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame

from analysis.curves import SAME_LOOKS, Curve, bracket, curve, losses_around, on_common_looks, shared_look, until_shared
from analysis.pairs import Pairs
from analysis.runs import Note
from analysis.stats import Array

BY_RANKS = Note("a diverged run is worse than any other, so the pairs are compared by ranks")
WHOLE = 0.95
"""Share of the planned samples that a run must have."""
CUT_SHORT = "restricted to where the first run that missed it ended,"
NONE = np.array([])
NEVER = (math.inf, math.inf)
"""The ends of what never came: a time of a run that missed its target, a loss of one that diverged."""


def values_of(ours: Array, theirs: Array, seeds: list[Any], **limits: Any) -> dict[str, Any]:
    """Columns of `tests`: one value a pair of an endpoint, inf of a run that diverged, and what limits them.

    Args:
        ours, theirs: of each pair a number, or two between which it lies (n x 2), whose middle is then the value.
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


def _as_ends(values: Array) -> Array:
    """Two ends of every value; a number is both of its own."""
    return values if values.ndim == 2 else np.column_stack((values, values))


class Measure:
    """Reads the values of every endpoint off the curves."""

    def __init__(self, curves: DataFrame) -> None:
        self._frames = dict(iter(curves.groupby("run")))
        self._known: dict[tuple[str, str], Curve] = {}

    def curve(self, run: str, x: str) -> Curve:
        """Empty for a run without an evaluation."""
        if run not in self._frames:
            return NONE, NONE
        if (run, x) not in self._known:
            self._known[run, x] = curve(self._frames[run], x)
        return self._known[run, x]

    def end(self, run: str, x: str) -> float:
        """The last position at which a run was watched; nan without an evaluation."""
        return float(self._frames[run][x].max()) if run in self._frames else math.nan

    def crossings(self, runs: Sequence[Any], target: float, x: str = "seconds") -> list[tuple[float, float]]:
        """Between which looks each of `runs` came to the target, on looks that all had; never for one that diverged, or
        that ends above its own start.

        A run that stopped at its target_loss was there at its end, whoever else was looked at then.
        """
        own = {run.run: self.curve(run.run, x) for run in runs if not (run.diverged or self._ended_higher(run.run))}
        shared = on_common_looks(list(own.values()))
        brackets = {name: bracket(of_run, target) for name, of_run in zip(own, shared, strict=True)}
        return [brackets.get(run.run, NEVER) for run in runs]

    def looks(self, runs: Sequence[Any], x: str) -> dict[str, Curve]:
        """The curves of runs that are compared; one that stopped at its target_loss ends at a look that all share."""
        own = {run.run: self.curve(run.run, x) for run in runs}
        for run in filter(self.stopped, runs):
            for other in own.keys() - {run.run}:
                own[run.run] = until_shared(own[run.run], self.curve(other, x))
        return own

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

    def losses(self, pairs: Pairs, x: str) -> dict[str, Any]:
        """Losses at the samples that all runs reached, or at the seconds that both runs of a pair did."""
        both = pairs.run_pairs
        if x != "samples":
            both = [pair for pair in both if pair[0].seed not in pairs.why_untimed]
        seeds = [ours.seed for ours, _ in both]
        alive_of = [[run for run in pair if not run.diverged] for pair in both]
        alive = [run for group in alive_of for run in group]
        if not alive:
            nowhere = np.full(len(both), math.inf)
            nothing = "every run of both arms diverged" if both else ""
            return values_of(nowhere, nowhere, seeds, why_no_test=nothing)
        why = self._cut_short(alive)
        if why:
            return values_of(NONE, NONE, [], why_no_test=why)
        watched: dict[str, Curve] = {}
        for group in alive_of:
            watched |= self.looks(group, x)
        places = []
        known: dict[str, tuple[float, float]] = {}
        # all runs are compared at the same samples, but the two runs of a pair at seconds of their own
        compared = [alive] if x == "samples" else [group for group in alive_of if group]
        for group in compared:
            near = max(self._update(run, x) for run in group)
            curves = {run.run: watched[run.run] for run in group}
            place = _common_place(list(curves.values()), near)
            places.append(place)
            for name, of_run in curves.items():
                known[name] = losses_around(of_run, place, near)
        values = np.array([[known.get(run.run, NEVER) for run in pair] for pair in both])
        ends = [float(of_run[0][-1]) for of_run in watched.values()]
        notes = _where(x, places, min(ends), max(ends))
        if np.isinf(values).any():
            notes.append(BY_RANKS)
        limits: dict[str, Any] = {"notes": (*notes,)}
        references = [run for _, run in both if run.run in watched]
        limits["gained"] = self._gained(references, values[:, 1].mean(axis=1))
        between_looks = [run for run in alive if _lies_between(known[run.run])]
        if between_looks:
            seldom = self._how_often_evaluated(between_looks, x, pairs.clock)
            limits["between"] = seldom
            rising = sum(math.isnan(known[run.run][0]) for run in between_looks)
            if rising:
                runs = f"{rising} of {len(known)} runs"
                limits["why_no_test"] = f"the loss of {runs} does not fall between the looks around it, {seldom}"
        return values_of(values[:, 0], values[:, 1], seeds, **limits)

    def _gained(self, references: Sequence[Any], losses: Array) -> float:
        """By how much the loss of the reference fell from its start, of the runs that have one."""
        finite = losses[np.isfinite(losses)]
        if not len(finite) or not references:
            return math.nan
        starts = [self.curve(run.run, "samples")[1][0] for run in references]
        return float(np.mean(starts) - finite.mean())

    def _update(self, run: Any, x: str) -> float:
        """What a run takes for an update, in samples or seconds; 0 where it is not known."""
        size = self.end(run.run, x) / (run.updates or math.nan)
        return size if math.isfinite(size) else 0.0

    def _how_often_evaluated(self, runs: Sequence[Any], x: str, clock: str) -> str:
        """The widest gap between two evaluations of these runs, in words, and the setting that makes it narrower."""
        widest = -1.0
        most = 0
        every = ""
        for run in runs:
            looks = self.curve(run.run, x)[0]
            gap = float(np.diff(looks).max(initial=0.0))
            if (gap, len(looks)) > (widest, most):
                widest = gap
                most = len(looks)
                every = str(run.settings.get("evaluate_every") or "")
        more = f"evaluations={10 * (most - 1)}"
        if every.isdigit():
            more = f"evaluate_every={float(every) / 10:g}"
        unit = "samples" if x == "samples" else _seconds_of(clock)
        return f"evaluated every {widest:.3g} {unit} (type {more} for a narrower answer)"

    def _cut_short(self, alive: Sequence[Any]) -> str:
        """Why losses at equal samples are refused: a run ended before the samples that were planned for its arm.

        All runs are compared at the samples that every run reached, so one short run would move all comparisons.
        """
        planned: dict[str, float] = {}
        for run in alive:
            planned[run.arm] = max(planned.get(run.arm, 0.0), _planned_samples(run))
        for run in alive:
            end = self.end(run.run, "samples")
            if end < WHOLE * planned[run.arm]:
                return f"refused: {run.run} ended at {end:g} of the {planned[run.arm]:g} samples of its arm"
        return ""

    def times(self, pairs: Pairs, target: float) -> dict[str, Any]:
        """Seconds to the target, up to the second at which all are known."""
        both = [pair for pair in pairs.run_pairs if pair[0].seed not in pairs.why_untimed]
        if not both:
            return values_of(NONE, NONE, [], brackets=NONE.reshape(0, 2, 2))
        brackets = np.array([self.crossings(pair, target) for pair in both])
        times = brackets[:, :, 1]
        runs = [run for pair in both for run in pair]
        ends = {run.run: self.end(run.run, "seconds") for run in runs}
        budget, common, why = self._budget(runs, times.ravel(), ends)
        words = f"{budget:.4g} {_seconds_of(pairs.clock)}"
        nothing = ""
        if times.min() > budget:
            nothing = f"no run reached the target of {target:.3g}{_or_later(pairs, times, words, common)}"
        in_time = times <= budget
        later = np.isfinite(times) & ~in_time
        notes = [Note(f"{why} {words}", "budget"), *self._risen(both, in_time, target)]
        capped = np.minimum(brackets, budget)
        limits: dict[str, Any] = {
            "longest": max(ends.values()),
            "brackets": brackets,
            "reached": tuple(in_time.sum(axis=0).tolist()),
            "later": tuple(later.sum(axis=0).tolist()),
            "notes": tuple(notes),
            "why_no_test": nothing,
            "budget": budget,
            "common": common,
            "cut_short": why == CUT_SHORT,
            "caveats": self._stopped_unlike(both),
        }
        lies_between = capped[:, :, 0] < capped[:, :, 1]
        between_looks = [run for run, is_between in zip(runs, lies_between.ravel(), strict=True) if is_between]
        if between_looks:
            limits["between"] = self._how_often_evaluated(between_looks, "seconds", pairs.clock)
        seeds = [ours.seed for ours, _ in both]
        return values_of(capped[:, 0], capped[:, 1], seeds, **limits)

    def _stopped_unlike(self, both: Sequence[tuple[Any, Any]]) -> tuple[str, ...]:
        """Whether runs stopped at a target that one arm looked out for more often: it sees a low loss sooner."""
        if not any(self.stopped(run) for pair in both for run in pair):
            return ()
        steps = []
        for runs in zip(*both, strict=True):
            spacings = [float(np.diff(self.curve(run.run, "seconds")[0]).mean()) for run in runs]
            steps.append((float(np.median(spacings)), runs[0].arm))
        (step, often), (longer_step, seldom) = sorted(steps)
        if not longer_step > SAME_LOOKS * step:
            return ()
        more = f"{often} was evaluated {longer_step / step:.3g} times as often as {seldom}"
        return (f"Runs stopped where they were first seen at their target, and {more}, which alone makes it sooner.",)

    def _risen(self, both: Sequence[tuple[Any, Any]], there: NDArray[np.bool], target: float) -> Iterator[Note]:
        """How many runs of each arm were at the target and do not hold it at their end."""
        for side, runs in enumerate(zip(*both, strict=True)):
            count = 0
            for run, was_there in zip(runs, there[:, side], strict=True):
                losses = self.curve(run.run, "seconds")[1]
                if was_there and len(losses) and losses[-1] > target:
                    count += 1
            are = "were at the target and are above it at their end"
            if count == 1:
                are = "was at the target and is above it at its end"
            if count:
                yield Note(f"{count} of {len(runs)} runs of {runs[0].arm} {are}", "risen")

    def _budget(self, runs: Sequence[Any], times: Array, ends: Mapping[str, float]) -> tuple[float, bool, str]:
        """The second up to which all are known: what every run was given; else where the first that missed it ended."""
        given = {run.settings.get("seconds") for run in runs}
        missed = []
        for run, time in zip(runs, times, strict=True):
            if math.isinf(time) and not run.diverged:
                missed.append(ends[run.run])
        budget = given.pop() if len(given) == 1 else None
        if budget and all(end >= budget for end in missed):
            return float(budget), True, "every run had"
        if missed and max(missed) > 0:
            return min(missed), False, CUT_SHORT
        return max(ends.values()), False, "restricted to the longest run,"


def _common_place(curves: Sequence[Curve], near: float) -> float:
    """Where the losses of curves are read: at the last look that all share, or else where the first of them ends."""
    end = min(float(x[-1]) for x, _ in curves)
    look = shared_look(curves, end, near)
    return end if look is None else look


def _lies_between(ends: tuple[float, float]) -> bool:
    """Whether a value is known to lie between two others alone."""
    return ends[0] != ends[1]


def _seconds_of(clock: str) -> str:
    return "s" if clock == "measured" else "virtual s"


def _or_later(pairs: Pairs, times: Array, budget: str, common: bool) -> str:
    """Within what nobody reached a target, and who did so later."""
    if common:
        return f" within the {budget} of every run"
    if not np.isfinite(times).any():
        return ""
    ours, theirs = np.isfinite(times).sum(axis=0)
    later = f"{pairs.treatment} {ours} of {len(times)}, {pairs.reference} {theirs} of {len(times)}"
    return f" before {budget}, when the first run that missed it ended (later: {later})"


def _where(x: str, places: Sequence[float], first: float, last: float) -> list[Note]:
    """Where losses are compared; nothing where that is the end of all runs."""
    if min(places) >= WHOLE * last:
        return []
    if x == "samples":
        why = "where the first run ended" if places[0] >= first else "the last look that all runs share"
        return [Note(f"compared at {places[0]:g} samples, {why}; the last ended at {last:g}")]
    least = f"{min(places):.4g}"
    most = f"{max(places):.4g}"
    span = least if least == most else f"{least} to {most}"
    why = "where the shorter run of each pair ended or both have a look"
    return [Note(f"compared at {span} s, {why}; the longest is {last:.4g}")]


def _planned_samples(run: Any) -> float:
    """The samples that alone end a run; 0 where something else may."""
    if any(run.settings.get(key) for key in ("seconds", "target_loss", "patience")):
        return 0.0
    return float(run.settings.get("samples") or 0)
